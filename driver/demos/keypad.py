"""A telephone keypad in a noisy room: what `burst demo audio` hears without a sound of yours, and the truth about it.

A key is two tones at once, one for its row and one for its column. Sections of four seconds each have a loudness of the
tones against everything else: hiss, and a person who talks, or at least hums vowels at the pace of speech.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

RATE = 16_000  # samples a second
BLOCK = 320  # samples: 20 ms
SECTION = 200  # blocks with one loudness of the tones
LEVELS = (5, 0, -5, -10, -15)  # dB of the tones against the rest, section by section

KEYS = "123A456B789C*0#D"
ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477, 1633)  # Hz
NOTHING = 0  # the label of a block without a key; the key n of KEYS is n + 1

_LOUDNESS = 0.1  # of the whole sound: its mean square is the square of that
_VOWELS = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410))  # formants, Hz
_HIGHEST = 4000.0  # Hz in the talker's voice
_STEP = 160  # samples between two looks at how the voice changes


@dataclass(frozen=True, slots=True)
class Press:
    """A key that is held from sample `start` to sample `end`."""

    key: str
    start: int
    end: int


def keystrokes(random: np.random.Generator) -> tuple[np.ndarray, list[Press]]:
    """Return a section of tones alone, whose power while a key is held is 1, and the keys. Senders are not exact."""
    sound, presses = np.zeros(SECTION * BLOCK, np.float32), []
    at = int(random.integers(800, 4000))
    while (end := at + int(random.integers(960, 2240))) < len(sound) - 2 * BLOCK:  # 60 to 140 ms
        key = int(random.integers(len(KEYS)))
        time = np.arange(end - at) / RATE
        off, twist = random.uniform(0.988, 1.012, 2), 10 ** (random.uniform(-4, 4) / 20)  # 1.2 %, 4 dB
        low, high = (
            np.sin(2 * np.pi * (f * time + random.random()))
            for f in (ROWS[key // 4] * off[0], COLUMNS[key % 4] * off[1])
        )
        sound[at:end] = (low * twist + high) * np.sqrt(2 / (1 + twist**2))
        presses.append(Press(KEYS[key], at, end))
        at = end + int(random.integers(960, 4000))  # 60 to 250 ms
    return sound, presses


def voice(random: np.random.Generator) -> np.ndarray:
    """Return a section of a person's voice: the harmonics of a gliding pitch, coloured by vowels, a syllable at a
    time.
    """
    steps = SECTION * BLOCK // _STEP
    spoken = np.repeat(random.integers(len(_VOWELS), size=steps), random.integers(12, 35, steps))[:steps]
    pitch = random.uniform(90, 230) * np.exp(0.2 * _smooth(random.standard_normal(steps), 25))
    formants = np.array(_VOWELS)[spoken] * random.uniform(0.9, 1.15)
    formants = np.stack([_smooth(f, 6) for f in formants.T])
    loud = _smooth(random.random(steps) > 0.35, 8) ** 2
    at, times = np.arange(steps) * _STEP, np.arange(SECTION * BLOCK)
    phase = 2 * np.pi * np.cumsum(np.interp(times, at, pitch)) / RATE
    sound = np.zeros(len(times))
    for n in range(1, int(_HIGHEST / pitch.min()) + 1):
        near = sum(1 / (1 + ((n * pitch - f) / (60 + 0.06 * f)) ** 2) for f in formants)
        sound += np.interp(times, at, near * loud * (n * pitch < _HIGHEST) / n**0.3) * np.sin(n * phase)
    return sound


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Return the means over `width` neighbours, as many values as before."""
    wide = np.pad(values.astype(float), (width // 2, width - 1 - width // 2), mode="edge")
    return np.convolve(wide, np.full(width, 1 / width), "valid")


def room(random: np.random.Generator) -> np.ndarray:
    """Return a section of everything but tones, with a mean power of 1: a voice and hiss, sometimes more of the one."""
    share = random.uniform(0.2, 0.8)
    parts = ((voice(random), share), (random.standard_normal(SECTION * BLOCK), 1 - share))
    return sum(part * np.sqrt(power / np.mean(part**2)) for part, power in parts).astype(np.float32)


def mixed(tones: np.ndarray, rest: np.ndarray, level: float) -> np.ndarray:
    """Mix both, the tones so many dB louder than the rest, at a fixed loudness."""
    gain = 10 ** (level / 20)
    return (tones * gain + rest) * (_LOUDNESS / np.sqrt(1 + gain**2))


def section(seed: int, level: float) -> tuple[np.ndarray, list[Press]]:
    """Return the section of that seed: float32 samples and the keys in it."""
    random = np.random.default_rng(seed)
    tones, presses = keystrokes(random)
    return mixed(tones, room(random), level), presses


def level_at(sample: int) -> int:
    """Return how loud the tones are there, in a sound of many sections."""
    return LEVELS[sample // (SECTION * BLOCK) % len(LEVELS)]


def labels(presses: Sequence[Press]) -> np.ndarray:
    """Return for each block the key that is held for at least half of it, as a label."""
    found = np.full(SECTION, NOTHING)
    for press in presses:
        found[round(press.start / BLOCK) : round(press.end / BLOCK)] = KEYS.index(press.key) + 1
    return found


class Event(NamedTuple):
    """At sample `at` a key was heard: that press, or else no key was pressed. Without a key, a press was missed."""

    at: int
    key: str | None
    press: Press | None

    @property
    def verdict(self) -> str:
        """Right, wrong or missed."""
        if self.press is None:
            return "wrong"
        return "right" if self.key else "missed"


class Ear:
    """Makes keys of what a classifier says about block after block, and compares them with the keys that were pressed.

    A key is new when two blocks in a row say it; the same one again once two blocks in a row said something else. Each
    press can be heard once, from its start until LATE after its end.
    """

    LATE = 4 * BLOCK  # samples

    def __init__(self, presses: Sequence[Press] = ()) -> None:
        self.events: list[Event] = []
        self._coming, self._blocks = sorted(presses, key=lambda press: press.start), 0
        self._last, self._held, self._others = NOTHING, NOTHING, 0

    def expect(self, presses: Sequence[Press]) -> None:
        """More presses, later than those it knows."""
        self._coming += sorted(presses, key=lambda press: press.start)

    def hear(self, label: int) -> list[Event]:
        """Return the next block's label; what is known by now, and was not before it."""
        self._blocks += 1
        at, before = self._blocks * BLOCK, len(self.events)
        if self._is_new(label):
            fits = [p for p in self._coming if p.key == KEYS[label - 1] and p.start < at <= p.end + self.LATE]
            self._coming = [p for p in self._coming if p not in fits[:1]]
            self.events.append(Event(at, KEYS[label - 1], fits[0] if fits else None))
        while self._coming and self._coming[0].end + self.LATE < at:
            self.events.append(Event(at, None, self._coming.pop(0)))
        return self.events[before:]

    def _is_new(self, label: int) -> bool:
        self._others = self._others + 1 if label != self._held else 0
        if self._others == 2:
            self._held = NOTHING
        is_new = label not in {NOTHING, self._held} and label == self._last
        self._last = label
        if is_new:
            self._held, self._others = label, 0
        return is_new
