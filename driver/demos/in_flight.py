"""Frames through a burst with several of them in flight, for the camera's page when its depth is more than one."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import burst
from driver.demos.camera import TIMEOUT, Detector, FrameResult
from driver.demos.detector import decode
from driver.demos.latencies import TimedCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    from driver.demos.boxes import Box
    from driver.demos.camera_sources import Clock, FrameSource


class Flight(NamedTuple):
    """A frame whose result is awaited."""

    frame: np.ndarray
    truth: list[Box] | None
    result: Callable[[float], burst.Result]  #: waits for it so many seconds
    start: float


def watch(detector: Detector, source: FrameSource, clock: Clock, depth: int) -> Iterator[FrameResult]:
    """As `detector.watch`, but the next frame is taken while up to `depth` of them are with the device.

    The plain path gets a frame when nothing else is in flight, so that neither path waits for the other one.
    """
    flights: deque[Flight] = deque()
    index = 0
    while True:
        while flights and (len(flights) == depth or clock.left()):
            wait = TIMEOUT if len(flights) == depth else min(clock.left(), TIMEOUT)
            try:
                result = flights[0].result(wait)
            except burst.Timeout:
                if len(flights) == depth:
                    raise
                continue
            yield _landed(detector, flights.popleft(), result, is_last=not flights, index=index, dropped=clock.dropped)
            index += 1
        source.skip(clock.tick())
        (frames,) = detector.fast.inputs
        assert frames is not None
        truth = source.read(frames[0])
        start = time.perf_counter()
        future = detector.fast.submit(timeout=TIMEOUT)
        # A copy, while the device works: the frame's memory is another one's as soon as its result has arrived.
        flights.append(Flight(frames[0].copy(), truth, future.result, start))


def _landed(
    detector: Detector, flight: Flight, result: burst.Result, *, is_last: bool, index: int, dropped: int
) -> FrameResult:
    """What came of the frame."""
    calls = {"burst": TimedCall(time.perf_counter() - flight.start, result.timing.time_on_device)}
    found = decode(result.outputs)
    if is_last:
        detector.plain_frame[...] = flight.frame
        start = time.perf_counter()
        plain = detector.paths["plain RPC"]()
        calls["plain RPC"] = TimedCall(time.perf_counter() - start, plain.timing.time_on_device)
        plain.raise_for_status()
    return FrameResult(index, flight.frame, found, flight.truth, calls, dropped)
