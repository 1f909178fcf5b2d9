"""Find moving objects in a camera's frames, with the network in another process: `burst demo camera`.

Every frame is written straight into the burst's input, which the device process sees too: nothing is copied on the way.
The same frame then goes to the same device over the plain RPC path. This is all that the demo does with the API; where
frames come from is in `camera_sources`, the network in `detector`, and what becomes of the results in `camera_report`.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import burst
import driver
from driver.demos.detector import build_model, decode, outputs_of
from driver.demos.latencies import TimedCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from driver.demos.boxes import Box
    from driver.demos.camera_sources import Clock, FrameSource

TIMEOUT = 5.0  # seconds for one execution
WARM_UP = 20  # calls on each path before anything is measured


@dataclass(frozen=True, slots=True)
class FrameResult:
    """One frame, and what came of it. `frame` is the burst's own memory until the next step: copy what you keep."""

    index: int
    frame: np.ndarray
    found: list[Box]
    truth: list[Box] | None  #: the true boxes, if known
    calls: dict[str, TimedCall]  #: by path
    dropped: int  #: frames dropped so far because they came too late


@contextmanager
def connected(
    device: str, size: tuple[int, int] = (640, 480), priority: Literal["low", "medium", "high"] = "medium", **how: Any
) -> Iterator[Detector]:
    """The network on a device, whose process starts if it is not running. `how`: options of `burst`, such as `spin`.

    `size`: columns and rows of the frames, both in whole cells of 16.
    """
    with (
        driver.connect(device) as remote,
        remote.prepare(build_model(*size), priority=priority) as prepared,
        prepared.burst(measure=True, **how) as fast,
    ):
        yield Detector(prepared, fast)


class Detector:
    """Both ways to the network: a frame goes in, boxes come out."""

    def __init__(self, prepared: driver.RemotePreparedModel, fast: driver.Burst) -> None:
        """Lay both executions out in shared memory, once; then let both paths map it and fill their caches."""
        self.prepared, self.fast = prepared, fast
        (frames,) = fast.inputs
        assert frames is not None  # no input is omitted
        self.frame = frames[0]  # uint8 [rows, columns, 3], to be written in place
        request = _plain_request(*self.frame.shape[1::-1])
        self.plain_frame = request.pools[0].asarray(np.uint8, self.frame.shape)
        self.paths: dict[str, Callable[[], burst.Result]] = {
            "burst": lambda: fast.run(timeout=TIMEOUT),
            "plain RPC": lambda: prepared.execute(request, measure=True, timeout=TIMEOUT),
        }
        for run in self.paths.values():
            for _ in range(WARM_UP):
                run().raise_for_status()

    def detect(self, *, last: bool = False) -> tuple[list[Box], dict[str, TimedCall]]:
        """Run the frame on both paths, the burst first or last; what the burst found, and how long each took."""
        self.plain_frame[...] = self.frame
        found: list[Box] = []
        calls = {}
        for path in sorted(self.paths, reverse=last):
            start = time.perf_counter()
            result = self.paths[path]()
            calls[path] = TimedCall(time.perf_counter() - start, result.timing.time_on_device)
            result.raise_for_status()
            if path == "burst":
                found = decode(result.outputs)  # before the next run: the outputs are views of shared memory
        return found, calls

    def watch(self, source: FrameSource, clock: Clock) -> Iterator[FrameResult]:
        """Take frame after frame from the source, whenever the clock says so."""
        index = 0
        while True:
            source.skip(clock.tick())
            truth = source.read(self.frame)
            found, calls = self.detect(last=index % 2 == 1)  # in turns: neither path always comes second
            yield FrameResult(index, self.frame, found, truth, calls, clock.dropped)
            index += 1

    def stats(self) -> dict[str, Any]:
        """What the burst counted."""
        return self.fast.stats()


def _plain_request(width: int, height: int) -> burst.Request:
    """The same execution for the plain path, in shared memory as well: the frame, then both outputs."""
    sizes = [3 * width * height, *(4 * math.prod(shape) for shape in outputs_of(width, height))]
    memory = driver.Memory.create(sum(sizes))
    frame, *outputs = (burst.RequestArgument(offset=sum(sizes[:i]), length=size) for i, size in enumerate(sizes))
    return burst.Request((frame,), tuple(outputs), (memory,))
