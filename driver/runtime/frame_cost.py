"""The cost of a frame: how long an execution takes in a stream, and how much processor time, of client and device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from driver.client.other_process import processor_time_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FRAMES, RATE = 10, 30.0
"""How many executions are measured, and how many of them come a second, at most."""
_MOST_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class FrameCost:
    """The cost of a frame of a model in one form on a device: milliseconds, medians of `frames` executions.

    processor_milliseconds: of the client's process and both of the device's, for one frame.
    """

    form: str
    device: str
    milliseconds: float
    processor_milliseconds: float
    frames: int

    def __str__(self) -> str:
        took, used = (f"{number:.3g} ms" for number in (self.milliseconds, self.processor_milliseconds))
        return f"a frame on {self.device}: {took}, {used} of processor time (zeros, {RATE:g} a second)"


def processor_ns(processes: Sequence[int]) -> int:
    """Return the processor time of this process and those, in nanoseconds. Raise OSError: one of them is not here."""
    return time.process_time_ns() + sum(map(processor_time_ns, processes))


def frame_cost(call: Callable[[], object], processes: Sequence[int]) -> tuple[float, float, int]:
    """Return the milliseconds and processor milliseconds of a call, and of how many; calls come as a stream's frames.

    Raise OSError, and what the call raises.
    """
    call()
    took, begin, used = list[float](), time.perf_counter(), processor_ns(processes)
    while len(took) < FRAMES and time.perf_counter() - begin < _MOST_SECONDS:
        time.sleep(max(0.0, begin + len(took) / RATE - time.perf_counter()))
        at = time.perf_counter()
        call()
        took.append(time.perf_counter() - at)
    used = processor_ns(processes) - used
    return 1e3 * float(np.median(took)), used / 1e6 / len(took), len(took)
