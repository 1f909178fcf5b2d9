"""The report of the camera demo: progress while frames come, then a summary, a film and two pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from driver.demos.boxes import Agreement
from driver.demos.camera import WARM_UP
from driver.demos.drawing import COLOURS, Film, annotate
from driver.demos.latencies import PathTimes, latency_table, summary_table
from driver.demos.latency_picture import draw_latencies
from driver.demos.recordings import private

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from matplotlib.axes import Axes
    from rich.console import Console

    from driver.demos.boxes import Box
    from driver.demos.camera import FrameResult

REFRESH = 10  # frames between two updates of the progress bar


class CameraReport:
    """Adds steps up; with it a progress bar runs and, if there is one, a film is written."""

    def __init__(self, frames: int, out: Path, film: Film | None, console: Console) -> None:
        """`out`: the folder for the pictures."""
        self._frames, self._out, self._film, self._console = frames, out, film, console
        self._paths = PathTimes()
        self._agreement = Agreement()
        self._sample: tuple[np.ndarray, list[Box], list[Box] | None] | None = None
        self.seen = self.dropped = 0
        columns = "[bold]{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        times = "burst {task.fields[burst]:.2f} ms · plain {task.fields[plain]:.2f} ms"
        facts = TextColumn(times + " · dropped {task.fields[lost]}")
        # The bar is refreshed by hand, between frames: a thread of its own would disturb what is measured.
        self._progress = Progress(*columns, facts, console=console, auto_refresh=False)
        self._task = self._progress.add_task("frames", total=frames, burst=0.0, plain=0.0, lost=0)

    def add(self, step: FrameResult) -> None:
        """Add one frame and what came of it."""
        self.seen, self.dropped = step.index + 1, step.dropped
        self._paths.add(step.calls)
        if step.truth is not None:
            self._agreement.count(step.found, step.truth)
        if step.index in {0, self._frames // 2}:
            self._sample = step.frame.copy(), step.found, step.truth
        fast, slow = (1e3 * step.calls[path].seconds for path in self._paths)
        if self._film is not None:
            caption = f"frame {step.index}  burst {fast:.2f} ms  plain {slow:.2f} ms  dropped {step.dropped}"
            self._film.add(annotate(step.frame, step.found, caption))
        self._progress.update(self._task, advance=1, burst=fast, plain=slow, lost=step.dropped)
        if step.index % REFRESH == 0:
            self._progress.refresh()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def finish(self, source: str, device: str, stats: dict[str, Any]) -> dict[str, Any]:
        """Draw the pictures, once the film is closed; the summary of it all."""
        files = [private(self._out / "latency.png")]
        draw_latencies(files[0], self._paths, source)
        if self._film is not None:
            files.append(self._out / Film.NAME)
        if self._sample is not None:
            files.append(private(self._out / "frame.png"))
            draw_frame(files[-1], *self._sample)
        return {
            "source": source,
            "device": device,
            "frames": self.seen,
            "dropped": self.dropped,
            "runs": stats["runs"] | {"warm_up": WARM_UP},
            "copied_frame_bytes": stats["copied_bytes"]["bulk"],
            "objects": self._agreement.summary(),
            **self._paths.summary(),
            "files": [str(path) for path in files],
        }

    def show(self, summary: dict[str, Any]) -> None:
        """Print the summary as tables."""
        self._console.print(summary_table(facts_of(summary), summary["files"]))
        self._console.print(latency_table(self._paths))
        self._console.print(self._paths.cost.text)


def facts_of(summary: dict[str, Any]) -> dict[str, str]:
    """Return what happened, and how well the objects were found, in words."""
    runs, objects = summary["runs"], summary["objects"]
    copied = f"{runs['plain']} fallbacks, {summary['copied_frame_bytes']} frame bytes copied"
    facts = {
        "source": summary["source"],
        "device": summary["device"],
        "frames": f"{summary['frames']} processed, {summary['dropped']} dropped",
        "burst": f"{runs['burst']} runs ({runs['warm_up']} warm-up), {copied}",
    }
    if not objects:
        return facts | {"precision, recall": "unknown: this source has no true boxes"}
    return facts | {
        "precision": f"{objects['precision']:.3f}  ({objects['false_alarms']} false alarms)",
        "recall": f"{objects['recall']:.3f}  ({objects['missed']} of {objects['true']} objects missed)",
    }


def draw_frame(path: Path, frame: np.ndarray, found: Sequence[Box], truth: Sequence[Box] | None) -> None:
    """Draw one frame with what was found and, dashed, what was there."""
    height, width = frame.shape[:2]
    figure = plt.figure(figsize=(width / 80, height / 80 + 0.45))
    axis = figure.add_axes((0, 0, 1, height / 80 / (height / 80 + 0.45)))
    axis.imshow(frame, interpolation="nearest")
    axis.set_axis_off()
    for box in truth or ():
        _rectangle(axis, box, edgecolor="white", linewidth=2.2, linestyle=(0, (4, 3)), zorder=3)
    for box in found:
        colour = COLOURS[box.name] / 255
        _rectangle(axis, box, edgecolor="black", linewidth=4.5, zorder=1)
        _rectangle(axis, box, edgecolor=colour, linewidth=2.8, zorder=2)
        axis.text(
            box.x0,
            max(box.y0 - 3, 12),
            f"{box.name} {box.score:.0%}",
            color="black",
            fontsize=10.5,
            va="bottom",
            zorder=4,
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.8},
        )
    legend = f"{len(found)} found (solid, with class and confidence)"
    legend += "" if truth is None else f", {len(truth)} true (white, dashed)"
    figure.text(0.01, 0.985, legend, va="top", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _rectangle(axis: Axes, box: Box, **style: Any) -> None:
    axis.add_patch(Rectangle((box.x0 - 0.5, box.y0 - 0.5), box.x1 - box.x0, box.y1 - box.y0, fill=False, **style))
