"""Frames of a video file, a camera or a stream, as PyAV opens it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from burst_engine.names import install_command
from driver.cli.output import echo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from av import VideoFrame
    from PIL.Image import Image

_PATIENCE = 10.0  # seconds, for a stream to answer


def is_stream(word: str) -> bool:
    """Return True if an --input is the address of a stream, or a camera."""
    return "://" in word or word.startswith("/dev/")


class Video:
    """Frames with their times. Raises UsageError for what is no video."""

    def __init__(self, address: str) -> None:
        self._address, self._damage = address, ""
        try:
            import av
        except ModuleNotFoundError as error:
            raise click.UsageError(
                f"--input {address}: no image that Pillow reads; videos and streams need PyAV: "
                f"{install_command('video')}"
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
        """Yield the second at which each frame is shown, and the frame, turned as the film says. Raise UsageError.

        What is damaged is left out, as players do, and counted at the end.
        """
        shown, first = 0, 0.0
        for frame in self._frames():
            now = frame.time or 0.0
            first = first if shown else now
            shown += 1
            yield now - first, _upright(frame)
        if not shown:
            raise self._wrong("no frame can be decoded")
        if self._damage:
            echo(f"--input {self._address}: {self._damage}; the other frames were taken", err=True)

    def _frames(self) -> Iterator[VideoFrame]:
        packets, damaged = self._container.demux(video=0), 0
        while True:
            try:
                packet = next(packets, None)
            except self._failures as error:  # the file ends in the midst, or the connection
                self._damage = f"it ends early: {_words(error)}"
                return
            if packet is None:
                return
            try:
                frames = packet.decode()
            except self._failures:
                damaged += 1
                self._damage = f"{damaged} damaged packet{'s' * (damaged > 1)} left out"
            else:
                yield from frames

    def close(self) -> None:
        """Close the file, the camera or the connection."""
        self._container.close()

    def _wrong(self, reason: object) -> click.UsageError:
        told = "; ".join(filter(None, (str(_words(reason)), self._damage)))
        known = (
            "supported: .npy, .npz, sounds, images (PNG, JPEG, …), and videos, cameras and streams that FFmpeg opens"
        )
        return click.UsageError(f"--input {self._address}: not a readable image or video: {told}; {known}")


def _words(reason: object) -> object:
    return getattr(reason, "strerror", None) or reason


def _upright(frame: VideoFrame) -> Image:
    """Turn a frame as the film's display matrix says: phones store films as the sensor lies."""
    from PIL import Image

    image = Image.fromarray(frame.to_ndarray(format="rgb24"))
    turns = {1: Image.Transpose.ROTATE_90, 2: Image.Transpose.ROTATE_180, 3: Image.Transpose.ROTATE_270}
    turn = turns.get(round(getattr(frame, "rotation", 0) / 90) % 4)  # counterclockwise, as Pillow counts
    return image if turn is None else image.transpose(turn)
