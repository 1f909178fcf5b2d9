"""The classification extension: in place of an output's values, the largest of them, as strings "VALUE:INDEX:LABEL"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from driver.gateways.oip.datatypes import STRINGS
from driver.gateways.oip.inference import AnsweredTensor
from driver.gateways.refusal import invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_MOST = 1 << 17  # strings in an answer: each costs this process more than the value that it tells


def classified(answered: AnsweredTensor, count: int, labels: Sequence[str], *, is_batched: bool) -> AnsweredTensor:
    """Return the `count` largest values of each row, or of the whole output, the largest first. Raise Refusal."""
    array = answered.array
    if array is None or answered.kind.is_bits or answered.kind is STRINGS:
        raise invalid(f"output {answered.name!r}: {answered.kind.name} in a message is no output to classify")
    rows = array.reshape(array.shape[0], -1) if is_batched and array.ndim else array.reshape(1, -1)
    count = min(count, rows.shape[1])
    if rows.shape[0] * count > _MOST:
        raise invalid(f"output {answered.name!r}: {count} classes of {rows.shape[0]} rows; at most {_MOST} are told")
    found = np.empty((rows.shape[0], count), np.object_)
    for n, row in enumerate(rows):
        found[n] = [_text(row, int(index), labels) for index in _largest(row)[:count]]
    shape = found.shape if is_batched else found.shape[1:]
    return AnsweredTensor(answered.name, STRINGS, shape, found, place=None, is_binary=answered.is_binary)


def _largest(row: NDArray[Any]) -> NDArray[Any]:
    """Return the indices of the values from the largest on; of equal ones the first comes first."""
    backwards = np.argsort(row[::-1], kind="stable")[::-1]
    return row.size - 1 - backwards


def _text(row: NDArray[Any], index: int, labels: Sequence[str]) -> bytes:
    value = f"{float(row[index]):f}" if row.dtype.kind == "f" else str(int(row[index]))
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{value}:{index}{label}".encode()
