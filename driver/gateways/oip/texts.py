"""Tensors of texts as messages have them: each element a length of 32 bits and its bytes, or a list of strings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.gateways.refusal import invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.gateways.oip.inference import GivenTensor

_LENGTH = 4  # bytes


def given_texts(given: GivenTensor, what: str) -> NDArray[Any]:
    """Return the texts of an input, as an array of str. Raise Refusal."""
    if given.place:
        raise invalid(f"{what}: BYTES come in the message, and not in shared memory")
    found = _elements(given.raw, what) if given.raw is not None else _flat(given.values)
    if len(found) != math.prod(given.shape):
        raise invalid(f"{what} of shape {list(given.shape)} has not {len(found)} texts")
    texts = np.empty(len(found), object)
    texts[:] = [_text(element, what) for element in found]
    return texts.reshape(given.shape)


def as_bytes(texts: NDArray[Any]) -> NDArray[Any]:
    """Return the texts of an output, as an array of bytes."""
    found = np.empty(texts.size, object)
    found[:] = [text.encode() for text in texts.reshape(-1).tolist()]
    return found.reshape(texts.shape)


def packed_texts(elements: NDArray[Any]) -> bytes:
    """Return the elements in their binary form."""
    return b"".join(len(element).to_bytes(_LENGTH, "little") + element for element in elements.flat)


def _elements(raw: Any, what: str) -> list[bytes]:
    data, found, at = memoryview(raw), list[bytes](), 0
    while at < len(data):
        end = at + _LENGTH + int.from_bytes(data[at : at + _LENGTH], "little")
        if at + _LENGTH > len(data) or end > len(data):
            raise invalid(f"{what}: its BYTES end within a text; each is a length of 4 bytes, and so many bytes")
        found.append(bytes(data[at + _LENGTH : end]))
        at = end
    return found


def _flat(values: Sequence[Any] | None) -> list[Any]:
    """Flatten values: those of JSON may be nested as the shape is."""
    found: list[Any] = []
    for value in values or ():
        found += _flat(value) if isinstance(value, list) else [value]
    return found


def _text(element: Any, what: str) -> str:
    try:
        return element if isinstance(element, str) else bytes.decode(element)
    except (TypeError, UnicodeDecodeError):
        raise invalid(f"{what} holds {element!r:.40}; the model takes texts of UTF-8") from None
