"""Find moving objects in a camera's frames, with the network in another process: `burst demo camera`.

Every frame is written straight into the burst's input, which the device process sees too, or it lies in a buffer of
the camera, which requests name: nothing is copied on the way. The same frame then goes to the same device over the
plain RPC path. This is all that the demo does with the API; where frames come from is in `camera_sources`, the network
in `detector`, and what becomes of the results in `camera_report`.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import burst
import driver
from driver.demos.detector import build_model, decode, outputs_of
from driver.demos.drawing import picture
from driver.demos.latencies import timed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from driver.demos.boxes import Box
    from driver.demos.camera_sources import FrameClock, FrameSource
    from driver.demos.latencies import TimedCall

TIMEOUT = 5.0  # seconds for one execution
WARM_UP = 20  # calls on each path before anything is measured


@dataclass(frozen=True, slots=True)
class FrameResult:
    """One frame, and what came of it. `frame` may be the burst's own memory until the next step: copy what you keep."""

    index: int
    frame: np.ndarray
    found: list[Box]
    truth: list[Box] | None  #: the true boxes, if known
    calls: dict[str, TimedCall]  #: by path
    dropped: int  #: frames dropped so far because they came too late


@contextmanager
def connected(
    device: str,
    size: tuple[int, int] = (640, 480),
    priority: Literal["low", "medium", "high"] = "medium",
    buffers: Sequence[driver.HardwareBuffer] = (),
    **how: Any,
) -> Iterator[Detector]:
    """Yield the network on a device, whose process starts if it is not running. `how`: options of `burst`, such as
    `spin`.

    `size`: columns and rows of the frames, both in whole cells of 16. `buffers`: those of a camera, where frames lie.
    """
    pixels: Any = buffers[0].format if buffers else "rgb"
    with (
        driver.connect(device) as remote,
        remote.prepare(build_model(*size, pixels=pixels), priority=priority) as prepared,
        prepared.burst(measure=True, **how) as fast,
    ):
        yield Detector(prepared, fast, buffers)


class Detector:
    """Both ways to the network: a frame goes in, boxes come out."""

    def __init__(
        self, prepared: driver.RemotePreparedModel, fast: driver.AnyBurst, buffers: Sequence[driver.HardwareBuffer] = ()
    ) -> None:
        """Lay both executions out in shared memory, once; then let both paths map it and fill their caches."""
        self.prepared, self.fast, self.buffers = prepared, fast, buffers
        (frames,) = fast.inputs
        assert frames is not None  # no input is omitted
        self.frame = frames[0]  # uint8 [rows, columns, 3], to be written in place unless frames lie in buffers
        width, height = (buffers[0].width, buffers[0].height) if buffers else self.frame.shape[1::-1]
        requests = _requests(width, height, buffers or [driver.HardwareBuffer.allocate("rgb", width, height)])
        self.plain_frame = None if buffers else requests[0].pools[0].asarray(np.uint8, self.frame.shape)
        self.paths: dict[str, Callable[[int], burst.Result]] = {
            "burst": lambda _: fast.run(timeout=TIMEOUT),
            "plain RPC": lambda n: prepared.execute(requests[n], measure=True, timeout=TIMEOUT),
        }
        if buffers:
            self.paths["burst"] = lambda n: fast.execute(requests[n], measure=True, timeout=TIMEOUT)
        for run in self.paths.values():
            for n in range(WARM_UP):
                run(n % len(requests)).raise_for_status()

    def detect(self, n: int = 0, *, last: bool = False) -> tuple[list[Box], dict[str, TimedCall]]:
        """Run the frame, or buffer `n`, on both paths, the burst first or last; what it found, how long each took."""
        if self.plain_frame is not None:
            self.plain_frame[...] = self.frame
        found: list[Box] = []
        calls = {}
        for path in sorted(self.paths, reverse=last):
            result, calls[path] = timed(partial(self.paths[path], n))
            if path == "burst":
                found = decode(result.outputs)  # before the next run: the outputs are views of shared memory
        return found, calls

    def watch(self, source: FrameSource, clock: FrameClock) -> Iterator[FrameResult]:
        """Take frame after frame from the source, whenever the clock says so."""
        for index in count():
            source.skip(clock.tick())
            truth = source.read(self.frame)
            found, calls = self.detect(source.index, last=index % 2 == 1)  # in turns: neither path always comes second
            frame = picture(self.buffers[source.index]) if self.buffers else self.frame
            yield FrameResult(index, frame, found, truth, calls=calls, dropped=clock.dropped)

    def stats(self) -> dict[str, Any]:
        """Return what the burst counted."""
        return self.fast.stats()


def _requests(width: int, height: int, frames: Sequence[driver.HardwareBuffer]) -> list[burst.Request]:
    """Return an execution for each buffer with a frame; the outputs lie in shared memory as well."""
    sizes = [4 * math.prod(shape) for shape in outputs_of(width, height)]
    results = driver.Memory.create(sum(sizes))
    outputs = tuple(burst.RequestArgument(pool=1, offset=sum(sizes[:i]), length=size) for i, size in enumerate(sizes))
    return [burst.Request((burst.RequestArgument(),), outputs, (frame, results)) for frame in frames]
