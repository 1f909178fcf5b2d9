"""Frames of a video file, a camera or a stream, as PyAV opens it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL.Image import Image

_PATIENCE = 10.0  # seconds, for a stream to answer


def is_stream(word: str) -> bool:
    """Whether an --input is the address of a stream, or a camera."""
    return "://" in word or word.startswith("/dev/")


class Video:
    """Frames with their times. Raises UsageError for what is no video."""

    def __init__(self, address: str) -> None:
        self._address = address
        try:
            import av
        except ModuleNotFoundError as error:
            raise click.UsageError(
                f"--input {address}: no image that Pillow reads; videos and streams need PyAV: "
                "pip install 'burst-engine[video]'"
            ) from error
        self._failures = av.FFmpegError, OSError, ValueError
        form = "v4l2" if address.startswith("/dev/video") else None
        try:
            self._container = av.open(address, format=form, timeout=_PATIENCE)
        except self._failures as error:
            raise self._wrong(error) from error
        if not self._container.streams.video:
            self.close()
            raise self._wrong("it has no video stream")

    def __iter__(self) -> Iterator[tuple[float, Image]]:
        """The second at which each frame is shown, and the frame. Raises UsageError."""
        from PIL import Image

        shown, first = 0, None
        try:
            for frame in self._container.decode(video=0):
                now = frame.time or 0.0
                first = now if first is None else first
                shown += 1
                yield now - first, Image.fromarray(frame.to_ndarray(format="rgb24"))
        except self._failures as error:
            raise self._wrong(error) from error
        if not shown:
            raise self._wrong("no frame can be decoded")

    def close(self) -> None:
        """Closes the file, the camera or the connection."""
        self._container.close()

    def _wrong(self, reason: object) -> click.UsageError:
        told = getattr(reason, "strerror", None) or reason
        known = "supported: .npy, .npz, .wav, images (PNG, JPEG, …), and videos, cameras and streams that FFmpeg opens"
        return click.UsageError(f"--input {self._address}: not a readable image or video: {told}; {known}")
