"""Sources of frames: the generated scene, a video file or a V4L2 camera; and their clock."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import av
import numpy as np

from driver.demos.scene import Scene

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from driver.demos.boxes import Box

WIDTH, HEIGHT = 640, 480


class FrameSource(Protocol):
    """Something that fills frames."""

    name: str
    is_live: bool  #: whether `read` waits for real time by itself

    def read(self, out: np.ndarray) -> list[Box] | None:
        """Fill `out` with the next frame; return the true boxes if they are known."""

    def skip(self, frames: int) -> None:
        """Skip frames that came too late."""

    def close(self) -> None:
        """Give back the camera or the file."""


class SceneSource:
    """The generated scene, which draws straight into the frame it is given."""

    is_live = False

    def __init__(self, seed: int, size: tuple[int, int] = (WIDTH, HEIGHT)) -> None:
        self.name = f"generated scene, seed {seed}"
        self._scene = Scene(seed, *size)
        self.read = self._scene.render
        self.skip = self._scene.advance

    def close(self) -> None:
        """Nothing to give back."""


class VideoSource:
    """A video file, played again from its beginning when it ends, or a camera; scaled to the size."""

    def __init__(self, path: Path, fps: float, size: tuple[int, int] = (WIDTH, HEIGHT)) -> None:
        self.name, self._size = str(path), size
        self.is_live = path.exists() and stat.S_ISCHR(path.stat().st_mode)
        options = {"video_size": "{}x{}".format(*size), "framerate": f"{fps or 30:g}"} if self.is_live else {}
        self._container = av.open(self.name, format="v4l2" if self.is_live else None, options=options)
        if not self._container.streams.video:
            self._container.close()
            raise ValueError("it has no video stream")
        self._frames = self._decode()

    def read(self, out: np.ndarray) -> None:
        """Decode the next frame, scale it and write its rows into `out`."""
        width, height = self._size
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
    """Open what `--source` names, or say what is wrong with it."""
    if spec == "scene":
        return SceneSource(seed, size)
    remedy = "pass 'scene', a video file or a camera such as /dev/video0"
    if not Path(spec).exists():
        raise ValueError(f"--source {spec}: no such file or camera; {remedy}")
    try:
        return VideoSource(Path(spec), fps, size)
    except (av.FFmpegError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--source {spec}: cannot be opened as a video ({reason}); {remedy}") from error


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
        """Seconds until the next frame is due; 0 when it is."""
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
