"""Sources of frames: the generated scene, a camera's own buffers, or what FFmpeg reads; and their clocks."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import av
import numpy as np

import driver
from driver.demos.scene import Scene

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from driver.demos.boxes import Box

WIDTH, HEIGHT = 640, 480
FORMATS = "nv12", "yuyv", "rgb"  # of cameras; the last may have to be decoded from JPEG


class FrameSource(Protocol):
    """Something that fills frames: in memory that it is given, or in buffers of its own."""

    name: str
    is_live: bool  #: whether `read` waits for real time by itself
    size: tuple[int, int]  #: columns and rows
    buffers: Sequence[driver.HardwareBuffer]  #: of its own; empty: it writes frames where it is told
    index: int  #: of the buffer in which the last frame lies, until the next one is read

    def read(self, out: np.ndarray | None) -> list[Box] | None:
        """Take the next frame: into `out`, or into a buffer; return the true boxes if they are known."""

    def skip(self, frames: int) -> None:
        """Skip frames that came too late."""

    def close(self) -> None:
        """Give back the camera or the file."""


class FrameClock(Protocol):
    """When frames are due."""

    @property
    def dropped(self) -> int:
        """Frames that came too late, so far."""

    def left(self) -> float:
        """Return the seconds until the next frame is due; 0 when it is, or when only `read` knows."""

    def tick(self) -> int:
        """Wait until then; how many frames were dropped before it and are to be skipped."""


class SceneSource:
    """The generated scene, which draws straight into the frame it is given."""

    is_live = False
    buffers: Sequence[driver.HardwareBuffer] = ()
    index = 0

    def __init__(self, seed: int, size: tuple[int, int] = (WIDTH, HEIGHT)) -> None:
        self.name, self.size = f"generated scene, seed {seed}", size
        self._scene = Scene(seed, *size)
        self.skip = self._scene.advance

    def read(self, out: np.ndarray | None) -> list[Box]:
        """Draw the next frame."""
        assert out is not None
        return self._scene.render(out)

    def close(self) -> None:
        """Give nothing back."""


class CameraSource:
    """A camera. Its frames lie in buffers that the device reads as they are."""

    is_live = True
    index = 0

    def __init__(self, camera: driver.Camera) -> None:
        """Take over the camera."""
        self.camera, self.size = camera, (camera.width, camera.height)
        self.buffers: Sequence[driver.HardwareBuffer] = camera.buffers
        how = "in the camera's buffers" if camera.is_in_place else f"made of {camera.layout.fourcc}, one copy"
        self.name = f"{camera.path}, {camera.format}, {how}"
        self.lost = 0  #: frames that were not read since `forget`
        self._frame: driver.CameraFrame | None = None
        self._last: int | None = None

    def read(self, out: np.ndarray | None) -> list[Box] | None:
        """Give the frame before back, and wait for the next one."""
        if self._frame is not None:
            self._frame.release()
        self._frame = self.camera.next_frame()
        if self._last is not None:
            self.lost += self._frame.number - self._last - 1
        self._last, self.index = self._frame.number, self._frame.index
        return None

    @property
    def figures(self) -> str:
        """The camera's counts, in words."""
        counts = self.camera.stats()
        words = [f"{counts[name]} {name}" for name in ("missed", "skipped", "damaged")]
        return f"{counts['frames']} taken, {', '.join(words)}, the last {1e3 * (self.camera.age or 0):.0f} ms ago"

    def forget(self) -> None:
        """Count the frames that are not read from the next one on."""
        self.lost, self._last = 0, None

    def skip(self, frames: int) -> None:
        """Do nothing: the camera drops frames itself."""

    def close(self) -> None:
        """Give the camera back."""
        self.camera.close()


class VideoSource:
    """A source that FFmpeg reads and scales: a video file, played again from its beginning when it ends, or a
    camera.
    """

    buffers: Sequence[driver.HardwareBuffer] = ()
    index = 0

    def __init__(self, path: Path, fps: float, size: tuple[int, int] = (WIDTH, HEIGHT)) -> None:
        self.name, self.size = str(path), size
        self.is_live = path.exists() and stat.S_ISCHR(path.stat().st_mode)
        options = {"video_size": "{}x{}".format(*size), "framerate": f"{fps or 30:g}"} if self.is_live else {}
        self._container = av.open(self.name, format="v4l2" if self.is_live else None, options=options)
        if not self._container.streams.video:
            self._container.close()
            raise ValueError("it has no video stream")
        self._frames = self._decode()

    def read(self, out: np.ndarray | None) -> None:
        """Decode the next frame, scale it and write its rows into `out`."""
        assert out is not None
        width, height = self.size
        plane = next(self._frames).reformat(width, height, "rgb24").planes[0]
        rows = np.frombuffer(memoryview(plane), np.uint8).reshape(height, plane.line_size)
        out[...] = rows[:, : width * 3].reshape(out.shape)

    def skip(self, frames: int) -> None:
        """Decode frames of a file for nothing; a camera drops them itself."""
        for _ in range(0 if self.is_live else frames):
            next(self._frames)

    def close(self) -> None:
        """Close the file or the camera."""
        self._container.close()

    def _decode(self) -> Iterator[av.VideoFrame]:
        while True:
            shown = 0
            for frame in self._container.decode(video=0):
                shown += 1
                yield frame
            if not shown or self.is_live:
                raise ValueError(f"--source {self.name}: no frame can be decoded from it; pass another video")
            self._container.seek(0)


def open_source(spec: str, seed: int, fps: float, size: tuple[int, int] = (WIDTH, HEIGHT)) -> FrameSource:
    """Open what `--source` names, or say what is wrong with it. FFmpeg reads cameras that `driver.Camera` refuses."""
    if spec == "scene":
        return SceneSource(seed, size)
    remedy, why = "pass 'scene', a video file or a camera such as /dev/video0", ""
    if not (path := Path(spec)).exists():
        raise ValueError(f"--source {spec}: no such file or camera; {remedy}")
    if is_camera(path):
        try:
            return CameraSource(open_camera(spec, fps, size))
        except driver.CameraFailed as error:
            why = str(error)
    try:
        found = VideoSource(path, fps, size)
    except (av.FFmpegError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        first = why and f"{why}; nor by FFmpeg: "
        raise ValueError(f"--source {spec}: cannot be opened as a video ({first}{reason}); {remedy}") from error
    if why:
        found.name = f"{spec}, read and copied by FFmpeg, because {why}"
    return found


def is_camera(path: Path) -> bool:
    """Return True if a path is that of a device."""
    return path.is_char_device()


def open_camera(spec: str, fps: float, size: tuple[int, int]) -> driver.Camera:
    """Open it at that rate where the camera has it in some format, else at its own."""
    try:
        return driver.Camera(spec, FORMATS, *size, fps=fps or None, newest=True)
    except driver.CameraFailed:
        return driver.Camera(spec, FORMATS, *size, newest=True)


class Clock:
    """The schedule of a camera with a buffer of one frame: slot k lasts from k/fps to (k+1)/fps.

    A frame that is not read before its slot ends is dropped. With fps 0 there is no schedule and no loss.
    """

    def __init__(self, fps: float, sleep: Callable[[float], object] | None = None) -> None:
        """`sleep`: takes seconds; may return early, and then so does `tick`."""
        self.fps, self._sleep = fps, sleep or time.sleep
        self.dropped = 0
        self._next = 0
        self._start = time.monotonic()

    def left(self) -> float:
        """Return the seconds until the next frame is due; 0 when it is."""
        return max(0.0, self._start + self._next / self.fps - time.monotonic()) if self.fps else 0.0

    def tick(self) -> int:
        """Sleep until the next frame is due and return how many frames were dropped before it."""
        if not self.fps:
            return 0
        slot = (time.monotonic() - self._start) * self.fps
        missed = max(int(slot) - self._next, 0)
        self._next += missed
        if slot < self._next:
            self._sleep((self._next - slot) / self.fps)
        self._next += 1
        self.dropped += missed
        return missed


class CameraClock:
    """The camera's own: a frame is due when it is there."""

    def __init__(self, source: CameraSource) -> None:
        self._source = source
        source.forget()

    @property
    def dropped(self) -> int:
        """Frames that the camera has taken and the source has not."""
        return self._source.lost

    def left(self) -> float:
        """Return 0: only the camera knows."""
        return 0.0

    def tick(self) -> int:
        """`read` waits."""
        return 0


def clock_of(source: FrameSource, fps: float, sleep: Callable[[float], object] | None = None) -> FrameClock:
    """Return when its frames are due."""
    return CameraClock(source) if isinstance(source, CameraSource) else Clock(fps, sleep)
