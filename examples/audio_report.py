"""What a run of audio.py leaves behind: lines while it goes on, tables, a picture, and the sound itself."""

from __future__ import annotations

import os
import wave
from typing import TYPE_CHECKING

import numpy as np
from audio_sources import SECONDS
from keypad import BLOCK, COLUMNS, KEYS, RATE, ROWS, SECTION, Ear, level_at
from listener import Goertzel
from matplotlib import pyplot as plt
from report import PERCENTILES, percentiles
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from audio_sources import Source
    from keypad import Event, Press
    from matplotlib.axes import Axes
    from report import Latencies
    from rich.console import Console

KINDS = {"right": ("#009E73", "o"), "wrong": ("#D55E00", "X"), "missed": ("#0072B2", "v")}  # for the colour-blind, too


def verdict(event: Event) -> str:
    """Was it right, wrong or missed?"""
    if event.press is None:
        return "wrong"
    return "right" if event.key else "missed"


def level_of(event: Event) -> int:
    """How loud the tones were in the section of that press, or of that mistake."""
    return level_at(event.press.start if event.press else event.at - BLOCK)


def line(event: Event, *, is_checked: bool) -> str:
    """One event in words; `is_checked`: whether anybody knows what was pressed."""
    when = f"{event.at / RATE:7.2f} s"
    if not is_checked:
        return f"{when}   {event.key}"
    pressed = f"pressed {event.press.key}" if event.press else "not pressed"
    return f"{when}   {event.key or '-'}   {pressed:11}   {verdict(event):6}   {level_of(event):+} dB"


class Notes:
    """What was heard, block by block: printed as it comes, and kept for the end."""

    def __init__(self, source: Source, console: Console) -> None:
        self.source, self.console = source, console
        self.ears = {"network": Ear(source.presses or ()), "Goertzel": Ear(source.presses or ())}
        self.sound: list[np.ndarray] = []
        self.answers: list[np.ndarray] = []
        self.difference = 0.0  # the largest between the answers of two paths
        self._goertzel = Goertzel.trained()

    def add(self, block: np.ndarray, answers: Sequence[np.ndarray]) -> None:
        """A block, and what each path answered to it. The first one's answer counts."""
        first, *others = answers
        self.sound.append(block.copy())
        self.answers.append(first.copy())
        self.difference = max([self.difference, *(float(abs(first - other).max()) for other in others)])
        self.ears["Goertzel"].hear(self._goertzel.label(block))
        for event in self.ears["network"].hear(int(first.argmax())):
            self.console.print(line(event, is_checked=self.source.presses is not None), highlight=False)


def report(notes: Notes, paths: dict[str, Latencies], facts: dict[str, str], folder: Path) -> None:
    """Write the picture and a generated sound, and print the tables."""
    if not notes.sound:
        raise SystemExit(f"audio.py: {notes.source.name} has no sound at all; pass another")
    presses, events = notes.source.presses, {name: ear.events for name, ear in notes.ears.items()}
    sound, files = np.concatenate(notes.sound), [folder / "audio.png"]
    draw(files[0], sound, np.array(notes.answers), events["network"], presses)
    if presses is not None:
        files.append(folder / "audio.wav")
        write_sound(files[-1], sound)
    facts |= {
        "answers": f"{len(notes.answers)} on each path, which differ by at most {notes.difference:g}",
        "heard": "".join(event.key for event in events["network"] if event.key) or "nothing",
    }
    notes.console.print(fact_table(facts, files))
    if presses is not None:
        notes.console.print(ear_table(events))
    notes.console.print(path_table(paths))


def path_table(paths: dict[str, Latencies]) -> Table:
    """Tabulate how long the calls of every path took, in milliseconds, and what that means for sound."""
    table = Table(
        title=f"Milliseconds for a block of {1e3 * SECONDS:g} ms, same blocks, same device", title_justify="left"
    )
    table.add_column("path")
    for heading in ("calls", *(f"p{p:g}" for p in PERCENTILES), f"over {1e3 * SECONDS:g} ms", "real-time factor"):
        table.add_column(heading, justify="right")
    for path, latencies in paths.items():
        times = latencies.parts()["whole call"] / 1e3
        factor = times.mean() / (1e3 * SECONDS)
        cells = [f"{value:.3f}" for value in percentiles(times)]
        misses = np.count_nonzero(times > 1e3 * SECONDS)
        table.add_row(path, str(len(times)), *cells, str(misses), f"{factor:.4f}")
    return table


def ear_table(ears: dict[str, Sequence[Event]]) -> Table:
    """Tabulate what each ear made of the keys, by the loudness of the tones against the rest."""
    table = Table(title="Keys by the loudness of the tones against voice and hiss", title_justify="left")
    for heading in ("", "pressed", *(f"{ear}: {kind}" for ear in ears for kind in ("right", "wrong"))):
        table.add_column(heading, justify="right")
    levels = sorted({level_of(event) for events in ears.values() for event in events}, reverse=True)
    for level in [*levels, None]:
        counts = [[verdict(event) for event in events if level in {None, level_of(event)}] for events in ears.values()]
        pressed = max(len(found) - found.count("wrong") for found in counts)
        cells = [str(found.count(kind)) for found in counts for kind in ("right", "wrong")]
        table.add_row("all" if level is None else f"{level:+} dB", str(pressed), *cells)
    return table


def fact_table(facts: dict[str, str], files: Iterable[Path]) -> Table:
    """Tabulate the given facts, and what was written."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, fact in facts.items():
        table.add_row(name, fact)
    for path in files:
        table.add_row("written", f"{os.path.relpath(path)}  ({path.stat().st_size / 1024:,.0f} KiB)")
    return table


def write_sound(path: Path, sound: np.ndarray) -> None:
    """Write it as a WAV file that anything can play."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes())


def draw(
    path: Path, sound: np.ndarray, answers: np.ndarray, events: Sequence[Event], presses: Sequence[Press] | None
) -> None:
    """Draw the waveform, the spectrogram with the keys that were pressed, and what the network made of it."""
    length = len(sound) / RATE
    rows = {"sharex": True, "height_ratios": (1, 2, 2.4), "layout": "constrained"}
    figure, (waveform, tones, thoughts) = plt.subplots(3, 1, figsize=(18, 10), **rows)
    waveform.plot(np.arange(len(sound)) / RATE, sound, color="0.3", linewidth=0.3)
    waveform.set(ylabel="waveform")
    enough = np.pad(sound, (0, max(0, 4 * BLOCK - len(sound))))
    with np.errstate(divide="ignore"):  # the logarithm of silence
        tones.specgram(enough, NFFT=2 * BLOCK, Fs=RATE, noverlap=BLOCK, cmap="magma", vmin=-95, vmax=-45)
    tones.set(ylabel="Hz", ylim=(500, 1800), yticks=ROWS + COLUMNS)
    extent = (0, length, len(KEYS) - 0.5, -0.5)
    look = {"aspect": "auto", "cmap": "Greys", "interpolation": "nearest"}
    thoughts.imshow(answers[:, 1:].T, extent=extent, vmin=0, vmax=1, **look)
    thoughts.set(xlim=(0, length), ylabel="key", yticks=range(len(KEYS)), yticklabels=list(KEYS), xlabel="seconds")
    thoughts.set_title("how likely the network finds each key, and the keys read from that", loc="left")
    if presses is not None:
        _draw_truth(waveform, tones, presses, length)
        for kind, look in KINDS.items():
            _draw_events(thoughts, kind, *look, [event for event in events if verdict(event) == kind])
    else:
        _draw_events(thoughts, "heard", "black", "o", events)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_truth(waveform: Axes, tones: Axes, presses: Sequence[Press], length: float) -> None:
    """The loudness of each section above the waveform, and the two tones of each key in the spectrogram."""
    step = SECTION * BLOCK
    for start in range(0, round(length * RATE), step):
        text = f"{level_at(start):+} dB"
        waveform.text(start / RATE, 1.02, text, transform=waveform.get_xaxis_transform(), weight="bold")
    for press in presses:
        key = KEYS.index(press.key)
        pitches = ROWS[key // 4], COLUMNS[key % 4]
        tones.hlines(pitches, press.start / RATE, press.end / RATE, color="#56B4E9", linewidth=1.5)


def _draw_events(axis: Axes, kind: str, colour: str, marker: str, events: Sequence[Event]) -> None:
    """A mark at the row of the key that was heard, or missed, at the time at which that was known."""
    keys = [event.key or event.press.key for event in events]
    style = {"linestyle": "", "markersize": 7, "markeredgecolor": "white", "label": f"{kind} ({len(events)})"}
    axis.plot([event.at / RATE for event in events], [KEYS.index(k) for k in keys], marker, color=colour, **style)
    axis.legend(loc="lower right", ncols=3, bbox_to_anchor=(1, 1))
