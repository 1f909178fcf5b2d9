"""Sources of sound in blocks of 20 ms: a generated keypad, a file or a microphone; and the pace of real time."""

from __future__ import annotations

import time
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import av
import numpy as np

from driver.demos.keypad import BLOCK, RATE, SECTION, Press, level_at, section

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

SECONDS = BLOCK / RATE  # of a block


def samples(sound: np.ndarray) -> bytes:
    """Return the samples in the form of a WAV file: 16 bits each."""
    return (np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes()


class SoundSource(Protocol):
    """Something that fills blocks of float32 samples between -1 and 1."""

    name: str
    is_live: bool  #: whether `read` waits for real time by itself

    @property
    def presses(self) -> Sequence[Press] | None:
        """The keys that are pressed in it, if known."""

    def read(self, out: np.ndarray) -> bool:
        """Fill `out` with the next block; False when there is none."""

    def close(self) -> None:
        """Give back the microphone or the file."""


class KeypadSource:
    """The generated keypad, made beforehand, so that making it takes no time from listening."""

    is_live = False

    def __init__(self, seed: int, seconds: float) -> None:
        """`seed`: less than 1,000, so that no section is one that the network was trained on."""
        self.name = f"generated keypad, seed {seed}"
        length = SECTION * BLOCK
        starts = range(0, round(seconds * RATE), length)
        sections = [section(1000 * seed + n, level_at(start)) for n, start in enumerate(starts)]
        self.presses = [
            Press(press.key, start + press.start, start + press.end)
            for start, (_, presses) in zip(starts, sections, strict=True)
            for press in presses
        ]
        self._blocks = iter(np.concatenate([sound for sound, _ in sections]).reshape(-1, BLOCK))

    def read(self, out: np.ndarray) -> bool:
        """Copy the next block."""
        block = next(self._blocks, None)
        if block is not None:
            out[...] = block
        return block is not None

    def close(self) -> None:
        """Give nothing back."""


class RecordedSource:
    """A file, or a microphone behind ALSA, at 16 kHz, its channels averaged. Silence fills the last block up."""

    presses = None

    def __init__(self, name: str, form: str | None = None) -> None:
        self.name, self.is_live = name, form is not None
        self._container = av.open(name, format=form)
        if not self._container.streams.audio:
            self._container.close()
            raise ValueError("it has no audio stream")
        self._blocks = self._decode()

    def read(self, out: np.ndarray) -> bool:
        """Decode, and resample, as much as a block needs."""
        try:
            block = next(self._blocks, None)
        except av.FFmpegError as error:
            raise ValueError(f"{self.name}: the sound is damaged ({error.strerror}); pass another file") from error
        if block is None:
            return False
        out[: len(block)], out[len(block) :] = block, 0
        return True

    def _decode(self) -> Iterator[np.ndarray]:
        resampler = av.AudioResampler("fltp", rate=RATE, frame_size=BLOCK)  # a row for each channel
        for frame in chain(self._container.decode(audio=0), [None]):
            for block in resampler.resample(frame):
                yield block.to_ndarray().mean(axis=0)

    def close(self) -> None:
        """Close the file or the microphone."""
        self._container.close()


def open_source(file: Path | None, microphone: str | None, seed: int, seconds: float) -> SoundSource:
    """Open what the command line names, or say what is wrong with it."""
    if file is None and microphone is None:
        return KeypadSource(seed, seconds)
    if file is not None and not file.is_file():
        raise ValueError(f"--wav {file}: no such file; pass a WAV file, or neither --wav nor --microphone")
    try:
        return RecordedSource(str(file)) if file is not None else RecordedSource(str(microphone), "alsa")
    except (av.FFmpegError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        if file is not None:
            raise ValueError(f"--wav {file}: cannot be read as sound ({reason}); pass a WAV file") from error
        raise ValueError(
            f"--microphone {microphone}: ALSA cannot open it ({reason}); `arecord -L` lists the microphones"
        ) from error


class Pace:
    """Real time: block k is complete 20 ms after block k-1. No block is lost: a slow reader finds blocks waiting."""

    def __init__(self, is_on: bool) -> None:
        self._is_on, self._start, self._blocks, self.late = is_on, time.monotonic(), 0, 0

    def wait(self) -> None:
        """Sleep until the next block is complete. `late` counts blocks that were read after the next was complete."""
        if not self._is_on:
            return
        self._blocks += 1
        early = self._start + self._blocks * SECONDS - time.monotonic()
        if early > 0:
            time.sleep(early)
        self.late += early < -SECONDS
