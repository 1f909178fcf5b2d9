"""Calls in a row, timed; and what follows from several such blocks of several parties, measured by turns."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

_MOST = 100_000  # calls in a block
_OUTSIDE = 0.05  # of the probability that an interval does not hold the true median


class Median(NamedTuple):
    """Of figures of several rounds, and an interval that holds the true median with `confidence`."""

    value: float
    low: float
    high: float
    confidence: float


def timed(call: Callable[[], object], count: int) -> NDArray[np.float64]:
    """Microseconds of each of so many calls."""
    found, clock = np.empty(count), time.perf_counter_ns
    for n in range(count):
        begin = clock()
        call()
        found[n] = clock() - begin
    return found / 1e3


def seconds_of(call: Callable[[], object], patience: float) -> float:
    """What a call takes, found out in about so many seconds."""
    done, begin = 0, time.perf_counter()
    while not done or time.perf_counter() - begin < patience:
        call()
        done += 1
    return (time.perf_counter() - begin) / done


def count_for(each: float, seconds: float) -> int:
    """How many calls that take `each` seconds fill so many."""
    return max(1, min(_MOST, round(seconds / each)))


def median(values: Sequence[float] | NDArray[np.float64]) -> Median:
    """By the sign test, so that nothing is assumed of how they are distributed: from the k-th least to the k-th most,
    for the largest k that leaves no more than 5 % outside; the extremes, if there are too few for that.
    """
    ordered = np.sort(np.asarray(values, float))
    n = len(ordered)
    tails = 2 * np.cumsum([math.comb(n, k) for k in range((n + 1) // 2)]) / 2.0**n
    k = max(0, int(np.searchsorted(tails, _OUTSIDE, "right")) - 1)
    return Median(
        float(np.median(ordered)), float(ordered[k]), float(ordered[n - 1 - k]), max(0.0, 1 - float(tails[k]))
    )
