"""Reads a WAV file into an input: cut or padded to its length, and converted to its type."""

from __future__ import annotations

import math
import wave
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from driver.cli.ports import shape_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from driver.cli.ports import Port


def read_sound(port: Port, shape: tuple[int, ...], path: str, where: str) -> tuple[NDArray[Any], str]:
    """Reads a sound for an input; returns it and how it was converted. Raises UsageError."""
    kind = port.operand.type
    if kind.dtype.kind != "f" and not kind.is_quantised:
        raise click.UsageError(
            f"{where}: input {port.name!r} is {kind.name}, which no sound fits; pass an array (.npy)"
        )
    samples, rate = _samples(path, where)
    count, channels = samples.shape
    done = f"{count} samples at {rate} Hz"
    is_kept = shape[-1:] == (channels,) and any(size != 1 for size in shape[:-1])
    if channels > 1 and not is_kept:
        samples, done = samples.mean(axis=1, keepdims=True), f"{done}, the mean of {channels} channels"
    filled = _filled(port, shape, samples.shape, where)
    room = math.prod(filled) // samples.shape[1]
    if room < count:
        done = f"{done}, cut to the first {room}"
    elif room > count:
        done = f"{done}, padded with {room - count} zeros"
    fitted = np.zeros((room, samples.shape[1]))
    fitted[:count] = samples[:room]
    words = "-1 to 1, quantised" if kind.is_quantised else "-1 to 1"
    return port.stored(fitted).reshape(filled), f"{done}; {words}"


def _samples(path: str, where: str) -> tuple[NDArray[np.float64], int]:
    """Samples from -1 to 1, as [time, channels]; and the sample rate."""
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
    return (numbers / 2.0 ** (8 * width - 1)).reshape(-1, channels), rate


def _filled(port: Port, shape: tuple[int, ...], found: tuple[int, int], where: str) -> tuple[int, ...]:
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
