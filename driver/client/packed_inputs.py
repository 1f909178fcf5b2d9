"""Inputs that are no tensors of numbers: what an application may give for them, and where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from driver.nn.tensors import TEXTS
from driver.protocol.packed_values import most_bytes, pack, room_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from driver.nn.tensors import TensorInfo

_WORDS = {"float": "float32", "double": "float64"}  # for all others ONNX has numpy's


class PackedPlace:
    """A place for such an input. It stands for an array: `place[...] = value` gives it a value, if that fits."""

    dtype = np.dtype(object)

    def __init__(self, where: str, tensor: TensorInfo, memory: NDArray[np.uint8]) -> None:
        self._where, self._tensor, self._memory = where, tensor, memory
        self.nbytes = memory.nbytes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a tensor of texts, with 1 for each size that is open."""
        return blank_shape(self._tensor)

    def packed(self, given: Any) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return the memory for a value, and the bytes that belong there. Raise ValueError."""
        data = np.frombuffer(pack(input_value(self._where, self._tensor, given)), np.uint8)
        if data.nbytes > self.nbytes:
            raise ValueError(
                f"{self._where} takes {data.nbytes} bytes, and this memory has {self.nbytes}: give the value to run "
                "or submit, which make room for it"
            )
        return self._memory[: data.nbytes], data

    def __setitem__(self, key: Any, value: Any) -> None:
        """Give it a value. Raise ValueError for one that does not fit, and for a part of one."""
        if key is not Ellipsis and key != slice(None):
            raise ValueError(f"{self._where} is written as a whole: inputs[...][:] = value")
        memory, data = self.packed(value)
        memory[...] = data

    def __repr__(self) -> str:
        return f"<{self._where}: write it with [...] = value, or give it to run>"


def packed_shape(where: str, tensor: TensorInfo, given: Any) -> tuple[int]:
    """Return the shape of the bytes that a value gets as an argument. Raise ValueError."""
    return (room_for(most_bytes(input_value(where, tensor, given))),)


def blank_shape(tensor: TensorInfo) -> tuple[int, ...]:
    """Return the shape that the model says, with 1 for each size that is open."""
    return tuple(size or 1 for size in tensor.shape or ())


def blank_input(tensor: TensorInfo, shape: tuple[int, ...] | None = None) -> Any:
    """Return what stands for zeros: empty texts, an empty sequence, a map of one key, None for what may be absent."""
    if tensor.kind == TEXTS:
        return np.full(blank_shape(tensor) if shape is None else shape, "", object)
    outer, inner = _parts(tensor.kind)
    if outer == "map":
        key, value = inner
        return {"" if key == "string" else 0: "" if value == TEXTS else 0}
    return [] if outer == "seq" else None


def input_value(where: str, tensor: TensorInfo, given: Any) -> Any:
    """Return what the application gives for an input, as `pack` takes it. `where`: the input, in words.

    A model that does not say what the input is, as a recorded one, takes any value. Raise ValueError.
    """
    if not tensor.kind:
        return given
    found = _value(where, tensor.kind, given)
    if tensor.kind != TEXTS or tensor.shape is None:
        return found
    if not found.ndim and all(size in {None, 1} for size in tensor.shape):  # one text, whatever the rank
        return found.reshape((1,) * len(tensor.shape))
    pairs = zip(found.shape, tensor.shape, strict=False)
    if found.ndim != len(tensor.shape) or any(own not in {None, size} for size, own in pairs):
        said = ", ".join("?" if size is None else str(size) for size in tensor.shape)
        raise ValueError(f"{where} has shape {found.shape}; the model takes [{said}]")
    return found


def _value(where: str, kind: str, given: Any) -> Any:
    outer, inner = _parts(kind)
    if kind == TEXTS:
        return _texts(where, given)
    if outer == "tensor":
        return _numbers(where, np.dtype(_WORDS.get(inner[0], inner[0])), given)
    if outer == "optional":
        return None if given is None else _value(where, inner[0], given)
    if outer == "seq" and isinstance(given, list | tuple):
        return [_value(f"{where}[{n}]", inner[0], each) for n, each in enumerate(given)]
    if outer == "map" and isinstance(given, dict):
        its = str if inner[0] == "string" else (int, np.integer)
        if wrong := [key for key in given if not isinstance(key, its)]:
            raise ValueError(f"{where} has the key {wrong[0]!r:.40}; {kind} takes keys of {inner[0]}")
        return given
    raise ValueError(f"{where} is {type(given).__name__}; {kind} takes a {'dict' if outer == 'map' else 'list'}")


def _parts(kind: str) -> tuple[str, list[str]]:
    """Return what a kind is and of what: a map, of int64 and tensor(float); a sequence, of maps."""
    outer, _, inner = kind.removesuffix(")").partition("(")
    return outer, inner.split(",", 1) if outer == "map" else [inner]


def _texts(where: str, given: Any) -> NDArray[Any]:
    """Return an array of str, from a text, a list or an array of them, or bytes in UTF-8. Raise ValueError."""
    array = np.asarray(given, None if hasattr(given, "dtype") else object)
    found = array.astype(object) if array.dtype.kind in "USTO" else None
    if found is None:
        raise ValueError(f"{where} has dtype {array.dtype}; the model takes texts: convert it with .astype(str)")
    for n, text in enumerate(found.reshape(-1).tolist()):
        if isinstance(text, str):
            continue
        index = np.unravel_index(n, found.shape)
        place = ", ".join(map(str, index))
        if not isinstance(text, bytes):
            raise ValueError(f"{where} holds {text!r:.40} at [{place}]; a text is str, or bytes of UTF-8")  # noqa: TRY004
        try:
            found[index] = text.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} holds bytes at [{place}] that are no UTF-8: {error.reason}") from None
    return found


def _numbers(where: str, dtype: np.dtype[Any], given: Any) -> NDArray[Any]:
    """Return an array unchanged; for a list or a number, an array that means the same. Raise ValueError."""
    array = np.asarray(given)
    if not hasattr(given, "dtype") and array.dtype.kind in "biuf":
        cast = array.astype(dtype)
        array = cast if dtype.kind == "f" or np.array_equal(cast, array) else array
    if array.dtype != dtype:
        raise ValueError(
            f"{where} has dtype {array.dtype}; the model takes {dtype}: convert it with .astype('{dtype}')"
        )
    return array
