"""Where frames come from: the generated scene, a video file or a V4L2 camera, and the clock they keep."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import av
import numpy as np

from driver.demos.scene import Scene

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver.demos.boxes import Box

WIDTH, HEIGHT = 640, 480


class Source(Protocol):
    """Something that fills frames."""

    name: str

    def read(self, out: np.ndarray) -> list[Box] | None:
        """Fill `out` with the next frame; return the true boxes if anybody knows them."""

    def skip(self, frames: int) -> None:
        """Let frames pass that nobody had time for."""

    def close(self) -> None:
        """Give back the camera or the file."""


class SceneSource:
    """The generated scene, which draws straight into the frame it is given."""

    def __init__(self, seed: int) -> None:
        self.name = f"generated scene, seed {seed}"
        self._scene = Scene(seed, WIDTH, HEIGHT)
        self.read = self._scene.render
        self.skip = self._scene.advance

    def close(self) -> None:
        """Nothing to give back."""


class VideoSource:
    """A video file, played again from its beginning when it ends, or a camera; scaled to 640x480."""

    def __init__(self, path: Path, fps: float) -> None:
        self.name = str(path)
        self._live = path.exists() and stat.S_ISCHR(path.stat().st_mode)
        options = {"video_size": f"{WIDTH}x{HEIGHT}", "framerate": f"{fps or 30:g}"} if self._live else {}
        self._container = av.open(self.name, format="v4l2" if self._live else None, options=options)
        if not self._container.streams.video:
            self._container.close()
            raise ValueError("it has no video stream")
        self._frames = self._decode()

    def read(self, out: np.ndarray) -> None:
        """Decode the next frame, scale it and write its rows into `out`."""
        plane = next(self._frames).reformat(WIDTH, HEIGHT, "rgb24").planes[0]
        rows = np.frombuffer(memoryview(plane), np.uint8).reshape(HEIGHT, plane.line_size)
        out[...] = rows[:, : WIDTH * 3].reshape(out.shape)

    def skip(self, frames: int) -> None:
        """Decode frames of a file for nothing; a camera drops them itself."""
        for _ in range(0 if self._live else frames):
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
            if not shown or self._live:
                raise ValueError(f"--source {self.name}: no frame can be decoded from it; pass another video")
            self._container.seek(0)


def open_source(spec: str, seed: int, fps: float) -> Source:
    """Open what `--source` names, or say what is wrong with it."""
    if spec == "scene":
        return SceneSource(seed)
    remedy = "pass 'scene', a video file or a camera such as /dev/video0"
    if not Path(spec).exists():
        raise ValueError(f"--source {spec}: there is no such file or camera; {remedy}")
    try:
        return VideoSource(Path(spec), fps)
    except (av.FFmpegError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--source {spec}: cannot be opened as a video ({reason}); {remedy}") from error


class Clock:
    """The schedule of a camera with a buffer of one frame: slot k lasts from k/fps to (k+1)/fps.

    A frame whose slot ended before anybody asked for it is dropped. With fps 0 there is no schedule and no loss.
    """

    def __init__(self, fps: float) -> None:
        self.fps = fps
        self.dropped = 0
        self._next = 0
        self._start = time.monotonic()

    def tick(self) -> int:
        """Sleep until the next frame is due and return how many frames were dropped before it."""
        if not self.fps:
            return 0
        slot = (time.monotonic() - self._start) * self.fps
        missed = max(int(slot) - self._next, 0)
        self._next += missed
        if slot < self._next:
            time.sleep((self._next - slot) / self.fps)
        self._next += 1
        self.dropped += missed
        return missed
