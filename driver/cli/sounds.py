"""Sounds for the inputs of a model: a recording as a row of samples, whole or in blocks."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

from burst_engine.names import install_command
from driver.cli.output import echo
from driver.cli.ports import shape_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from driver.cli.ports import Port


_SUFFIXES = (
    *(".wav", ".wave", ".w64", ".aif", ".aiff", ".au", ".caf"),
    *(".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a", ".aac", ".wma", ".amr"),
)


class SoundRecording(NamedTuple):
    """Samples from -1 to 1, as [time, channels], and how many of them are a second."""

    samples: NDArray[np.float64]
    rate: int


class Blocks:
    """A recording in the shape of an input: blocks of `length` samples, each `hop` samples after the one before."""

    def __init__(
        self,
        port: Port,
        shape: Sequence[int],
        recording: SoundRecording,
        where: str,
        block: int | None,
        hop: int | None,
    ) -> None:
        """`shape`: 0 where it is open. `block`: samples of one where the input leaves that open; None: the whole
        recording. `hop`: None is as many as a block has. Raise UsageError.
        """
        if not port.is_real:
            raise click.UsageError(
                f"{where}: input {port.name!r} is {port.dtype}, which no sound fits; pass an array (.npy)"
            )
        self._port, self.rate = port, recording.rate
        self._samples, words = _mixed(recording, shape)
        count, channels = self._samples.shape
        self._shape = _filled(port, shape, (block or count, channels), where)
        self.length = int(np.prod(self._shape)) // channels
        if block is not None and block != self.length:
            raise click.UsageError(
                f"--block {block}: input {port.name!r} takes {shape_words(shape)}, blocks of {self.length} samples; "
                "leave --block out"
            )
        self.hop = hop or self.length
        self.count = 1 + max(0, -(-(count - self.length) // self.hop))
        self.done = f"{words}{self._cutting(count)}; -1 to 1{', quantised' * port.operand.type.is_quantised}"

    def _cutting(self, count: int) -> str:
        missing = (self.count - 1) * self.hop + self.length - count
        padded = f"padded with {missing} zeros" if missing > 0 else ""
        if self.count == 1:
            return f", {padded}" if padded else ""
        every = f", one every {self.hop}" if self.hop != self.length else ""
        return f", {self.count} blocks of {self.length}{every}" + (f", the last {padded}" if padded else "")

    def __iter__(self) -> Iterator[tuple[float, NDArray[Any]]]:
        """Yield the second at which each block begins, and its array."""
        for start in range(0, self.count * self.hop, self.hop):
            fitted = np.zeros((self.length, self._samples.shape[1]))
            part = self._samples[start : start + self.length]
            fitted[: len(part)] = part
            yield start / self.rate, self._port.stored(fitted).reshape(self._shape)


def is_sound(source: str) -> bool:
    """Return True if an --input is a file of sound, by its suffix."""
    return source.lower().endswith(_SUFFIXES)


def read_recording(path: str, where: str) -> SoundRecording:
    """Read a file of sound, of any format that FFmpeg knows; of a damaged one what there is. Raise UsageError."""
    try:
        import av
    except ModuleNotFoundError as error:
        raise click.UsageError(f"{where}: sounds need PyAV: {install_command('video')}") from error
    parts: list[NDArray[Any]] = []
    damage = ""
    try:
        with av.open(path) as container:
            if not container.streams.audio:
                raise click.UsageError(f"{where}: the file contains no sound")
            rate, resampler = container.streams.audio[0].rate, av.AudioResampler("dblp")  # a row for each channel
            try:
                for frame in chain(container.decode(audio=0), [None]):
                    parts += [block.to_ndarray() for block in resampler.resample(frame)]
            except av.FFmpegError as error:
                damage = str(error.strerror)
    except (av.FFmpegError, OSError, ValueError) as error:
        told = getattr(error, "strerror", None) or error
        raise click.UsageError(f"{where}: not a sound that FFmpeg reads: {told}") from error
    if not sum(part.shape[1] for part in parts):
        raise click.UsageError(f"{where}: the file contains no samples{damage and f': {damage}'}")
    if damage:
        echo(f"{where}: the sound is damaged ({damage}); what comes before that was taken", err=True)
    return SoundRecording(np.concatenate(parts, axis=1).T, rate)


def _mixed(recording: SoundRecording, shape: Sequence[int]) -> tuple[NDArray[np.float64], str]:
    """Return one channel, unless the input has as many as the recording."""
    channels, done = recording.samples.shape[1], f"{len(recording.samples)} samples at {recording.rate} Hz"
    is_kept = tuple(shape[-1:]) == (channels,) and any(size != 1 for size in shape[:-1])
    if channels == 1 or is_kept:
        return recording.samples, done
    return recording.samples.mean(axis=1, keepdims=True), f"{done}, the mean of {channels} channels"


def _filled(port: Port, shape: Sequence[int], found: tuple[int, int], where: str) -> tuple[int, ...]:
    """Return the input's shape: one axis is time, the last may be channels, all others have size 1."""
    count, channels = found
    rest = list(shape or (0, channels))[: -1 if channels > 1 else None]
    if len(rest) > 1 and not rest[0]:
        rest[0] = 1  # a batch
    if sum(size != 1 for size in rest) > 1:
        raise click.UsageError(
            f"{where}: input {port.name!r} takes {shape_words(shape)}, which is not a row of samples; "
            "compute its features and pass them as an array (.npy)"
        )
    return (*(size or count for size in rest), *((channels,) if channels > 1 else ()))
