"""The report of the audio demo: keys as they are heard, then a summary, a plot, and the sound itself."""

from __future__ import annotations

import wave
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import pyplot as plt
from rich.table import Column, Table

from driver.demos.audio import WARM_UP
from driver.demos.audio_sources import SECONDS, samples
from driver.demos.keypad import BLOCK, COLUMNS, KEYS, RATE, ROWS, SECTION, Ear, level_at
from driver.demos.latencies import NAMES, Latencies, PathTimes, percentiles, summary_table
from driver.demos.listener import Goertzel
from driver.demos.recordings import private

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from rich.console import Console

    from driver.demos.audio import BlockResult
    from driver.demos.keypad import Event, Press

plt.switch_backend("Agg")  # there may be no display

KINDS = {"right": ("#009E73", "o"), "wrong": ("#D55E00", "X"), "missed": ("#0072B2", "v")}  # for the colour-blind, too


def level_of(event: Event) -> int:
    """Return how loud the tones were in the section of that press, or of that mistake."""
    return level_at(event.press.start if event.press else event.at - BLOCK)


def line(event: Event, *, is_checked: bool) -> str:
    """Return one event as a line of text; `is_checked`: whether the pressed keys are known."""
    when = f"{event.at / RATE:7.2f} s"
    if not is_checked:
        return f"{when}   {event.key}"
    pressed = f"pressed {event.press.key}" if event.press else "not pressed"
    return f"{when}   {event.key or '-'}   {pressed:11}   {event.verdict:6}   {level_of(event):+} dB"


class AudioReport:
    """Adds steps up, and prints what was heard as it comes."""

    def __init__(self, presses: Sequence[Press] | None, out: Path, console: Console) -> None:
        """`presses`: the keys that are pressed, if known; `out`: the folder for the results."""
        self._presses, self._out, self._console = presses, out, console
        self._ears = {"network": Ear(presses or ()), "Goertzel": Ear(presses or ())}
        self._paths = PathTimes()
        self._sound: list[np.ndarray] = []
        self._answers: list[np.ndarray] = []
        self._difference = 0.0  # the largest between the answers of two paths
        self._goertzel = Goertzel.trained()

    @property
    def seen(self) -> int:
        """The number of blocks."""
        return len(self._sound)

    def add(self, step: BlockResult) -> None:
        """Add a block, and what each path answered to it. The burst's answer counts."""
        first, *others = step.answers.values()
        self._sound.append(step.block.copy())
        self._answers.append(first.copy())
        self._difference = max([self._difference, *(float(abs(first - other).max()) for other in others)])
        self._paths.add(step.calls)
        self._ears["Goertzel"].hear(self._goertzel.label(step.block))
        for event in self._ears["network"].hear(int(first.argmax())):
            self._console.print(line(event, is_checked=self._presses is not None), highlight=False)

    def finish(self, source: str, late: int, device: str, stats: dict[str, Any]) -> dict[str, Any]:
        """Write the picture and a generated sound; the summary of it all."""
        sound, files = np.concatenate(self._sound), [private(self._out / "audio.png")]
        events = {name: ear.events for name, ear in self._ears.items()}
        draw(files[0], sound, np.array(self._answers), events["network"], presses=self._presses)
        if self._presses is not None:
            files.append(private(self._out / "audio.wav"))
            write_sound(files[-1], sound)
        return {
            "source": source,
            "late_blocks": late,
            "device": device,
            "runs": stats["runs"] | {"warm_up": WARM_UP},
            "blocks": self.seen,
            "largest_difference": self._difference,
            "heard": "".join(event.key for event in events["network"] if event.key),
            "keys": None if self._presses is None else {name: counts(found) for name, found in events.items()},
            **self._paths.summary(),
            "real_time_factor": {path: real_time_factor(latencies) for path, latencies in self._paths.items()},
            "files": [str(path) for path in files],
        }

    def show(self, summary: dict[str, Any]) -> None:
        """Print the summary as tables."""
        self._console.print(summary_table(facts_of(summary), summary["files"]))
        if self._presses is not None:
            self._console.print(ear_table({name: ear.events for name, ear in self._ears.items()}))
        self._console.print(path_table(self._paths))
        self._console.print(self._paths.cost.text)


def counts(events: Sequence[Event]) -> dict[str, int]:
    """Return how many keys were heard rightly, heard wrongly, and missed."""
    found = [event.verdict for event in events]
    return {kind: found.count(kind) for kind in KINDS}


def real_time_factor(latencies: Latencies) -> float:
    """Return the share of the time that the sound takes."""
    return float(latencies.parts()["whole call"].mean() / (1e6 * SECONDS))


def path_table(paths: dict[str, Latencies]) -> Table:
    """Tabulate how long the calls of every path took, in milliseconds, and what that means for sound."""
    headings = "calls", *NAMES, f"over {1e3 * SECONDS:g} ms", "real-time factor"
    table = Table(
        "path",
        *(Column(heading, justify="right") for heading in headings),
        title=f"Milliseconds for a block of {1e3 * SECONDS:g} ms, same blocks, same device",
        title_justify="left",
    )
    for path, latencies in paths.items():
        times = latencies.parts()["whole call"] / 1e3
        cells = [f"{value:.3f}" for value in percentiles(times)]
        misses = np.count_nonzero(times > 1e3 * SECONDS)
        table.add_row(path, str(len(times)), *cells, str(misses), f"{real_time_factor(latencies):.4f}")
    return table


def ear_table(ears: dict[str, Sequence[Event]]) -> Table:
    """Tabulate what each ear made of the keys, by the loudness of the tones against the rest."""
    headings = "", "pressed", *(f"{ear}: {kind}" for ear in ears for kind in ("right", "wrong"))
    columns = (Column(heading, justify="right") for heading in headings)
    table = Table(*columns, title="Keys by the loudness of the tones against voice and hiss", title_justify="left")
    levels = sorted({level_of(event) for events in ears.values() for event in events}, reverse=True)
    for level in [*levels, None]:
        counts = [[event.verdict for event in events if level in {None, level_of(event)}] for events in ears.values()]
        pressed = max(len(found) - found.count("wrong") for found in counts)
        cells = [str(found.count(kind)) for found in counts for kind in ("right", "wrong")]
        table.add_row("all" if level is None else f"{level:+} dB", str(pressed), *cells)
    return table


def facts_of(summary: dict[str, Any]) -> dict[str, str]:
    """Return what happened, in words."""
    runs = summary["runs"]
    ran = f"{runs['burst']} runs in the burst ({runs['warm_up']} warm-up), {runs['plain']} fallbacks"
    return {
        "source": f"{summary['source']}; {summary['late_blocks']} blocks read late",
        "device": f"{summary['device']}; {ran}",
        "answers": f"{summary['blocks']} on each path; they differ by at most {summary['largest_difference']:g}",
        "heard": summary["heard"] or "nothing",
    }


def write_sound(path: Path, sound: np.ndarray) -> None:
    """Write it as a WAV file that anything can play."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(samples(sound))


def draw(
    path: Path, sound: np.ndarray, answers: np.ndarray, events: Sequence[Event], presses: Sequence[Press] | None
) -> None:
    """Draw the waveform, the spectrogram with the keys that were pressed, and what the network made of it."""
    length = len(sound) / RATE
    figure, (waveform, tones, thoughts) = plt.subplots(
        3, 1, sharex=True, height_ratios=(1, 2, 2.4), figsize=(18, 10), layout="constrained"
    )
    waveform.plot(np.arange(len(sound)) / RATE, sound, color="0.3", linewidth=0.3)
    waveform.set(ylabel="waveform")
    enough = np.pad(sound, (0, max(0, 4 * BLOCK - len(sound))))
    with np.errstate(divide="ignore"):  # the logarithm of silence
        tones.specgram(enough, NFFT=2 * BLOCK, Fs=RATE, noverlap=BLOCK, cmap="magma", vmin=-95, vmax=-45)
    tones.set(ylabel="Hz", ylim=(500, 1800), yticks=ROWS + COLUMNS)
    extent = (0, length, len(KEYS) - 0.5, -0.5)
    likely = answers[:, 1:].T
    thoughts.imshow(likely, extent=extent, vmin=0, vmax=1, aspect="auto", cmap="Greys", interpolation="nearest")
    thoughts.set(xlim=(0, length), ylabel="key", yticks=range(len(KEYS)), yticklabels=list(KEYS), xlabel="seconds")
    thoughts.set_title("how likely the network finds each key, and the keys read from that", loc="left")
    if presses is not None:
        _draw_truth(waveform, tones, presses, length)
        for kind, look in KINDS.items():
            _draw_events(thoughts, kind, *look, [event for event in events if event.verdict == kind])
    else:
        _draw_events(thoughts, "heard", "black", "o", events=events)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_truth(waveform: Axes, tones: Axes, presses: Sequence[Press], length: float) -> None:
    """Draw the loudness of each section above the waveform, and the two tones of each key in the spectrogram."""
    step = SECTION * BLOCK
    for start in range(0, round(length * RATE), step):
        text = f"{level_at(start):+} dB"
        waveform.text(start / RATE, 1.02, text, transform=waveform.get_xaxis_transform(), weight="bold")
    for press in presses:
        key = KEYS.index(press.key)
        pitches = ROWS[key // 4], COLUMNS[key % 4]
        tones.hlines(pitches, press.start / RATE, press.end / RATE, color="#56B4E9", linewidth=1.5)


def _draw_events(axis: Axes, kind: str, colour: str, marker: str, events: Sequence[Event]) -> None:
    """Draw a mark at the row of the key that was heard, or missed, at the time at which that was known."""
    keys = [event.key or (event.press.key if event.press else "") for event in events]
    style: dict[str, Any] = {
        "linestyle": "",
        "markersize": 7,
        "markeredgecolor": "white",
        "label": f"{kind} ({len(events)})",
    }
    axis.plot([event.at / RATE for event in events], [KEYS.index(k) for k in keys], marker, color=colour, **style)
    axis.legend(loc="lower right", ncols=3, bbox_to_anchor=(1, 1))
