"""How `burst bench` and the scripts of bench/ measure: timed calls in blocks, interleaved in rounds, and an interval.

A machine's speed changes from minute to minute, so a figure means something only beside another of the same moment.
Every subject therefore has a block in every round, the order changes from round to round, and what is reported is the
median over rounds of a paired difference or ratio, with an interval that assumes nothing about the distribution.
"""

from __future__ import annotations

import math
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

_T = TypeVar("_T")
_MOST = 100_000  # calls in a block
_OUTSIDE = 0.05  # the largest probability that an interval does not hold the true median


class Estimate(NamedTuple):
    """A median over rounds, and the interval that holds the true median with `confidence`."""

    median: float
    low: float
    high: float
    confidence: float


def time_calls(call: Callable[[], object], count: int) -> NDArray[np.float64]:
    """Return the nanoseconds of each of `count` calls, including the clock's own 40 to 80 ns."""
    samples, clock = np.empty(count), time.perf_counter_ns
    for n in range(count):
        begin = clock()
        call()
        samples[n] = clock() - begin
    return samples


def order_of_round(subjects: Sequence[_T], number: int) -> list[_T]:
    """Return the subjects in the order of that round: it rotates, and every other round is reversed."""
    turn = number % len(subjects)
    return [*subjects[turn:], *subjects[:turn]][:: -1 if number % 2 else 1]


def seconds_of(call: Callable[[], object], patience: float) -> float:
    """Return the seconds of one call, measured for about `patience` seconds."""
    done, begin = 0, time.perf_counter()
    while not done or time.perf_counter() - begin < patience:
        call()
        done += 1
    return (time.perf_counter() - begin) / done


def count_for(each: float, seconds: float) -> int:
    """Return how many calls of `each` seconds fill `seconds`."""
    return max(1, min(_MOST, round(seconds / each)))


def estimate(values: Sequence[float] | NDArray[np.float64]) -> Estimate:
    """Return the interval of the sign test: from the k-th smallest to the k-th largest value, with at least 95 %
    confidence.

    With too few values for 95 %, the interval goes from the smallest to the largest.
    """
    ordered = np.sort(np.asarray(values, float))
    n = len(ordered)
    tails = 2 * np.cumsum([math.comb(n, k) for k in range((n + 1) // 2)]) / 2.0**n
    k = max(0, int(np.searchsorted(tails, _OUTSIDE, "right")) - 1)
    confidence = max(0.0, 1 - float(tails[k]))
    return Estimate(float(np.median(ordered)), float(ordered[k]), float(ordered[n - 1 - k]), confidence)


_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def conditions() -> dict[str, Any]:
    """Return what a figure depends on besides the code."""
    lines = _text(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
    return {
        "processor": next(names, platform.machine()),
        "processors": len(os.sched_getaffinity(0)),
        "kernel": f"{platform.system()} {platform.release()}",
        "governor": _text(_GOVERNOR) or "not readable",
        "load": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "at": time.strftime("%Y-%m-%d %H:%M %Z"),
    }


def in_words(found: dict[str, Any]) -> str:
    """Return the conditions as one line of text."""
    load = " ".join(map(str, found["load"]))
    return (
        f"{found['processor']}, {found['processors']} usable, {found['kernel']}, "
        f"governor {found['governor']}, load {load}, Python {found['python']}, numpy {found['numpy']}, {found['at']}"
    )


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
