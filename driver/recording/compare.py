"""Compares the outputs of a replayed request with the recorded ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driver.recording.file import as_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from burst import Result
    from driver.nn import Operand
    from driver.recording.file import Run

TOLERANCE = 1e-4


class Difference(NamedTuple):
    """The position where an output differs most from the recorded one."""

    request: int
    output: int
    at: tuple[int, ...]
    was: float
    by: float  #: infinite for a NaN, or another shape


def largest(number: int, run: Run, answer: Result, operands: Sequence[Operand], tolerance: float) -> Difference | None:
    """The largest difference over all outputs of a request; None if all are within the tolerance."""
    found = [
        difference(number, n, as_array(part, operand), new, tolerance)
        for n, (part, operand, new) in enumerate(zip(run.outputs, operands, answer.outputs, strict=False))
        if part is not None
    ]
    return max((one for one in found if one), key=lambda one: one.by, default=None)


def difference(number: int, n: int, was: NDArray[Any], new: NDArray[Any], tolerance: float) -> Difference | None:
    """The largest difference of output `n` of a request; None if it is within the tolerance."""
    if was.shape != new.shape:
        return Difference(number, n, (), math.nan, math.inf)
    a, b = was.astype(np.float64), new.astype(np.float64)
    with np.errstate(invalid="ignore"):
        by = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        by = np.where(np.isnan(by), math.inf, by)
        allowed = tolerance * np.maximum(1.0, np.abs(a)) if was.dtype.kind == "f" else np.full(a.shape, tolerance)
        allowed = np.where(np.isfinite(allowed), allowed, 0.0)
    over = np.where(by > allowed, by, 0.0)
    if not over.size or not over.any():
        return None
    index = np.unravel_index(int(over.argmax()), over.shape)
    return Difference(number, n, tuple(map(int, index)), float(a[index]), float(over[index]))
