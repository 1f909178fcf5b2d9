"""What the camera's page shows: frames, what was found in them, and how long that took."""

from __future__ import annotations

import io
import time
from collections import deque
from contextlib import closing, contextmanager
from dataclasses import astuple
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import av
from PIL import Image

import burst
import driver
from driver.demos.camera import TIMEOUT, Detector, FrameResult, connected
from driver.demos.camera_sources import CameraSource, clock_of, open_source
from driver.demos.detector import decode
from driver.demos.drawing import PALETTE, Film, annotate
from driver.demos.latencies import TimedCall, timed
from driver.demos.recordings import new_folder
from driver.demos.scene import NAMES
from driver.demos.web.board import Update
from driver.demos.web.settings import SPINS, Held, Setting, common

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

    import numpy as np

    from driver.demos.boxes import Box
    from driver.demos.camera_sources import FrameClock, FrameSource
    from driver.demos.web.stream import Stage

SIZES = {"320x240": (320, 240), "640x480": (640, 480), "1280x720": (1280, 720)}
QUALITY = 80  # of the JPEG pictures
MOST_FPS = 120


class CameraShow:
    """Frames of a source, at the size and rate that the page asks for."""

    kind = "camera"

    def __init__(self, source: str, seed: int, fps: float, device: str, out: Path) -> None:
        """`out`: the folder for recordings. Raise ValueError for a source that cannot be opened."""
        self._spec, self._seed, self._out, self._dropped = source, seed, out, 0
        self._source: FrameSource | None = None
        self._opened: tuple[str, float] | None = None
        with closing(open_source(source, seed, fps)) as opened:
            self.name, is_in_place = opened.name, bool(opened.buffers)
        self.settings: tuple[Setting, ...] = (
            *common(device),
            Setting("size", "Frame size", "640x480", "the size of the network's input", choices=tuple(SIZES)),
            Setting("fps", "Frames per second", fps, limits=(1, MOST_FPS)),
        )
        if not is_in_place:
            self.settings += (Setting("depth", "Depth", "1", "frames in flight at once", choices=("1", "2", "4", "8")),)

    def about(self) -> dict[str, Any]:
        """Return the source, and the colours of what is found."""
        return {"source": self.name, "colours": dict(zip(NAMES, PALETTE, strict=True))}

    def play(self, values: Held, stage: Stage) -> Generator[Update, None, None]:
        """Return a frame, what was found in it, and where everything stands."""
        source = self._source_for(values["size"], values["fps"])
        depth = int(values["depth"]) if "depth" in values.settings and not source.buffers else 1
        dropped, size = self._dropped, SIZES[values["size"]]
        how: dict[str, Any] = {"spin": SPINS[values["spin"]], "depth": depth, "recover": True}
        with (
            self._source_is_whole(),
            connected(values["device"], size, values["priority"], source.buffers, **how) as detector,
            self._film(size, values, stage) as film,
        ):
            stage.placed(detector.prepared)
            if source.name != self.name:
                stage.reads_from(source.name)
            clock = clock_of(source, values["fps"], stage.wait)
            several = watch_several(detector, source, clock, depth)
            for step in detector.watch(source, clock) if depth == 1 else several:
                self._dropped = dropped + step.dropped
                stage.noticed(detector.prepared, step.calls["burst"].seconds)
                if film is not None:
                    film.add(annotate(step.frame, step.found, f"frame {step.index}"))
                facts = {
                    "found": [astuple(box) for box in step.found],
                    "size": list(step.frame.shape[1::-1]),
                    "fps": stage.rate(),
                    "dropped": self._dropped,
                }
                if isinstance(source, CameraSource):
                    facts["camera"] = source.figures
                yield Update(stage.point(step.calls), facts, jpeg(step.frame))

    @contextmanager
    def _film(self, size: tuple[int, int], values: Held, stage: Stage) -> Iterator[Film | None]:
        """Yield a new one, in a folder of its own, if this is to be recorded."""
        if not values["record"]:
            stage.records(None)
            yield None
            return
        folder = new_folder(self._out)
        stage.records(folder / Film.NAME)
        with Film(folder, *size, values["fps"]) as film:
            yield film

    @contextmanager
    def _source_is_whole(self) -> Iterator[None]:
        """Open a source again the next time, if it cannot be read any more."""
        try:
            yield
        except driver.CameraFailed:
            self._close()
            raise
        except (ValueError, av.FFmpegError) as error:
            self._close()
            raise ValueError(f"{self.name}: {error}") from error

    def _source_for(self, size: str, fps: float) -> FrameSource:
        """Return the one that is open, where it fits."""
        wanted = size, fps
        is_other = self._opened is None or self._opened[0] != size
        if self._source is not None and (is_other or (self._source.is_live and self._opened != wanted)):
            self._close()
        if self._source is None:
            self._source = open_source(self._spec, self._seed, fps, SIZES[size])
        self._opened = wanted
        return self._source

    def rest(self) -> None:
        """Give a camera back; what is generated goes on where it was."""
        if self._source is not None and self._source.is_live:
            self._close()

    def _close(self) -> None:
        if self._source is not None:
            self._source.close()
        self._source = None


def jpeg(frame: np.ndarray) -> bytes:
    """Return the frame in the form that browsers take."""
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


class Flight(NamedTuple):
    """A frame whose result is awaited."""

    frame: np.ndarray
    truth: list[Box] | None
    result: Callable[[float], burst.Result]  #: waits for it so many seconds
    start: float


def watch_several(detector: Detector, source: FrameSource, clock: FrameClock, depth: int) -> Iterator[FrameResult]:
    """Watch as `detector.watch` does, but take the next frame while up to `depth` of them are with the device.

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
    """Return the result of the frame."""
    calls = {"burst": TimedCall(time.perf_counter() - flight.start, result.timing.time_on_device)}
    found = decode(result.outputs)
    if is_last:
        assert detector.plain_frame is not None
        detector.plain_frame[...] = flight.frame
        _, calls["plain RPC"] = timed(partial(detector.paths["plain RPC"], 0))
    return FrameResult(index, flight.frame, found, flight.truth, calls=calls, dropped=dropped)
