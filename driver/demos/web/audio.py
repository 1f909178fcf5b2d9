"""What the audio page shows: the sound, the keys that are heard in it, and how long that took."""

from __future__ import annotations

import wave
from base64 import b64encode
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.demos.audio import connected
from driver.demos.audio_sources import Pace, open_source, samples
from driver.demos.keypad import BLOCK, KEYS, LEVELS, RATE, SECTION, Ear, Press, keystrokes, mixed, room
from driver.demos.recordings import new_folder, private
from driver.demos.web.board import Update
from driver.demos.web.settings import SPINS, Held, Setting, common

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from pathlib import Path

    from driver.demos.audio import BlockResult
    from driver.demos.audio_sources import SoundSource
    from driver.demos.keypad import Event
    from driver.demos.web.stream import Stage

BAND = 500, 1800  # Hz, of the spectrogram
QUIET, LOUD = -95, -45  # dB, its darkest and its brightest


class EndlessKeypad:
    """The generated keypad, section after section, as loud against the rest as `level` says, in dB."""

    is_live = False
    presses: Sequence[Press] = ()

    def __init__(self, seed: int, level: Callable[[], float]) -> None:
        self.name = f"generated keypad, seed {seed}"
        self._random, self._level = np.random.default_rng(seed), level
        self._tones = self._rest = np.zeros(0, np.float32)
        self._at = self._begin = 0

    def read(self, out: np.ndarray) -> bool:
        """Mix the next block."""
        if self._at == len(self._tones):
            self._begin += self._at
            self._at = 0
            self._tones, presses = keystrokes(self._random)
            self._rest = room(self._random)
            self.presses = [Press(p.key, self._begin + p.start, self._begin + p.end) for p in presses]
        block = slice(self._at, self._at + BLOCK)
        out[...] = mixed(self._tones[block], self._rest[block], self._level())
        self._at += BLOCK
        return True

    @property
    def begins(self) -> bool:
        """True if the block that was read is the first of a section: then `presses` are those of the section."""
        return self._at == BLOCK

    def close(self) -> None:
        """Give nothing back."""


class AudioShow:
    """Blocks of a sound, and the keys in it."""

    kind = "audio"

    def __init__(self, wav: Path | None, microphone: str | None, seed: int, device: str, out: Path) -> None:
        """`out`: the folder for recordings. Raise ValueError for a sound that cannot be opened."""
        self._wav, self._microphone, self._seed, self._out = wav, microphone, seed, out
        self._late = 0
        self.settings = common(device)
        if wav is None and microphone is None:
            level = Setting(
                "level",
                "Tones against noise",
                LEVELS[0],
                "lower is noisier",
                limits=(-30, 20),
                unit="dB",
                begins_anew=False,
            )
            self.settings += (level,)
            self.name = f"generated keypad, seed {seed}"
        else:
            opened = open_source(wav, microphone, seed, SECTION * BLOCK / RATE)
            self.name = opened.name
            opened.close()

    def about(self) -> dict[str, Any]:
        """Return the source, the keys, and what the spectrogram spans."""
        return {"source": self.name, "keys": KEYS, "band": BAND, "block_ms": 1e3 * BLOCK / RATE}

    def play(self, values: Held, stage: Stage) -> Generator[Update, None, None]:
        """Return a block, how likely each key is, and the keys that are known by now. A file begins again when it
        ends.
        """
        with (
            connected(values["device"], values["priority"], spin=SPINS[values["spin"]]) as listeners,
            self._recorder(values, stage) as record,
        ):
            stage.placed(listeners.prepared)
            while True:
                with closing(self._open(values)) as source:
                    pace, hearing, late = Pace(not source.is_live), Hearing(source), self._late
                    for step in listeners.listen(source, pace):
                        record(step.block)
                        self._late = late + pace.late
                        likely = np.round(step.answers["burst"][1:], 2).tolist()
                        facts = {"likely": likely, "fps": stage.rate(), "dropped": self._late}
                        yield Update(stage.point(step.calls) | hearing.add(step), facts)

    @contextmanager
    def _recorder(self, values: Held, stage: Stage) -> Iterator[Callable[[np.ndarray], object]]:
        """Yield the function to which blocks are given: it writes a new file, if this is to be recorded."""
        if not values["record"]:
            stage.records(None)
            yield lambda _: None
            return
        path = private(new_folder(self._out) / "audio.wav")
        stage.records(path)
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            yield lambda block: file.writeframes(samples(block))

    def _open(self, values: Held) -> SoundSource:
        if "level" in values.settings:
            return EndlessKeypad(self._seed, lambda: values["level"])
        return open_source(self._wav, self._microphone, self._seed, 0)

    def rest(self) -> None:
        """Rest: nothing is open beside what plays."""


class Hearing:
    """The points that a sound becomes, block after block: how it looks, and the keys in it."""

    def __init__(self, source: SoundSource) -> None:
        self._source, self._ear, self._last = source, Ear(), np.zeros(BLOCK, np.float32)

    def add(self, step: BlockResult) -> dict[str, Any]:
        """Return the next block."""
        if isinstance(self._source, EndlessKeypad) and self._source.begins:
            self._ear.expect(self._source.presses)
        heard = [self._told(event) for event in self._ear.hear(int(step.answers["burst"].argmax()))]
        self._ear.events.clear()
        both, self._last = np.concatenate([self._last, step.block]), step.block.copy()
        return {
            "block": step.index,
            "low": round(float(step.block.min()), 3),
            "high": round(float(step.block.max()), 3),
            "tones": b64encode(spectrum(both)).decode(),
            "heard": heard,
        }

    def _told(self, event: Event) -> dict[str, Any]:
        """Return a key that was heard or missed. Of a recording it is unknown what was pressed."""
        pressed, is_checked = event.press.key if event.press else None, self._source.presses is not None
        return {"key": event.key, "pressed": pressed, "verdict": event.verdict if is_checked else None}


def spectrum(sound: np.ndarray) -> bytes:
    """Return how loud two blocks are, from low to high pitches, a byte for each."""
    power = np.abs(np.fft.rfft(sound * np.hanning(len(sound)))) ** 2 / (len(sound) * RATE)
    low, high = (hertz * len(sound) // RATE for hertz in BAND)
    decibels = 10 * np.log10(power[low:high] + 1e-12)
    return np.clip((decibels - QUIET) * (255 / (LOUD - QUIET)), 0, 255).astype(np.uint8).tobytes()
