"""Sounds for the inputs of a model: a recording as a row of samples, whole or in blocks."""

from __future__ import annotations

import wave
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

from driver.cli.ports import shape_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from driver.cli.ports import Port


class Recording(NamedTuple):
    """Samples from -1 to 1, as [time, channels], and how many of them are a second."""

    samples: NDArray[np.float64]
    rate: int


class Blocks:
    """A recording in the shape of an input: blocks of `length` samples, each `hop` samples after the one before."""

    def __init__(
        self, port: Port, shape: Sequence[int], recording: Recording, where: str, block: int | None, hop: int | None
    ) -> None:
        """`shape`: 0 where it is open. `block`: samples of one where the input leaves that open; None: the whole
        recording. `hop`: None is as many as a block has. Raises UsageError.
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
        """The second at which each block begins, and its array."""
        for start in range(0, self.count * self.hop, self.hop):
            fitted = np.zeros((self.length, self._samples.shape[1]))
            part = self._samples[start : start + self.length]
            fitted[: len(part)] = part
            yield start / self.rate, self._port.stored(fitted).reshape(self._shape)


def read_recording(path: str, where: str) -> Recording:
    """Reads a WAV file of integers. Raises UsageError."""
    try:
        with wave.open(path) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            raw = file.readframes(file.getnframes())
    except (wave.Error, EOFError, OSError) as error:
        raise click.UsageError(f"{where}: not a PCM WAV file: {error or 'it is truncated'}") from error
    raw = raw[: len(raw) - len(raw) % (width * channels)]
    if not raw:
        raise click.UsageError(f"{where}: the file contains no samples")
    if width == 1:
        numbers = np.frombuffer(raw, np.uint8).astype(np.float64) - 128
    else:  # the highest bytes of 32 bits
        wide = np.zeros((len(raw) // width, 4), np.uint8)
        wide[:, 4 - width :] = np.frombuffer(raw, np.uint8).reshape(-1, width)
        numbers = wide.view("<i4")[:, 0] / 2.0 ** (32 - 8 * width)
    return Recording((numbers / 2.0 ** (8 * width - 1)).reshape(-1, channels), rate)


def _mixed(recording: Recording, shape: Sequence[int]) -> tuple[NDArray[np.float64], str]:
    """One channel, unless the input has as many as the recording."""
    channels, done = recording.samples.shape[1], f"{len(recording.samples)} samples at {recording.rate} Hz"
    is_kept = tuple(shape[-1:]) == (channels,) and any(size != 1 for size in shape[:-1])
    if channels == 1 or is_kept:
        return recording.samples, done
    return recording.samples.mean(axis=1, keepdims=True), f"{done}, the mean of {channels} channels"


def _filled(port: Port, shape: Sequence[int], found: tuple[int, int], where: str) -> tuple[int, ...]:
    """The input's shape: one axis is time, the last may be channels, all others have size 1."""
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
