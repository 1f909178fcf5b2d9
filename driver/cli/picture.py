"""The plot of `burst bench`: one panel for each model and device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np

from driver.cli.comparison import IN_PROCESS
from driver.cli.output import spelled

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from driver.cli.comparison import Comparison

_HERE, _OURS = "#4c6a85", "#c1440e"


def draw(path: Path, found: Sequence[Comparison], machine: str) -> None:
    """Draws a dot at each p50, the interval of its median, and a bar to p99. Raises OSError."""
    shown = [one for one in found if one.ways]
    rows = max(1, len(shown))
    figure, axes = plt.subplots(rows, 1, figsize=(8, 0.8 + 1.7 * rows), layout="constrained", squeeze=False)
    for axis, one in zip(axes[:, 0], shown, strict=False):
        _panel(axis, one)
    axes[-1, 0].set_xlabel("one execution: median (dot), its interval (thick), to p99 (thin)")
    figure.suptitle("What one execution costs", weight="bold")
    figure.text(0.005, -0.01, machine, fontsize=6, va="top", wrap=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def _panel(axis: Axes, one: Comparison) -> None:
    for y, way in enumerate(one.ways):
        colour = _HERE if way.name == IN_PROCESS else _OURS
        axis.plot([way.p50.median, way.p99], [y, y], color=colour, linewidth=1.2, marker="|", markevery=[1])
        axis.plot([way.p50.low, way.p50.high], [y, y], color=colour, linewidth=5, alpha=0.35, solid_capstyle="butt")
        axis.plot(way.p50.median, y, "o", color=colour)
        axis.annotate(
            spelled(way.p50.median), (way.p50.median, y), (0, 6), textcoords="offset points", fontsize=8, ha="center"
        )
    axis.set_yticks(np.arange(len(one.ways)), [way.name for way in one.ways])
    axis.set_ylim(len(one.ways) - 0.5, -0.7)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda us, _: spelled(us))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_title(f"{one.model} on {one.device}{', not pinned' * (not one.is_pinned)}", loc="left", fontsize=10)
    axis.grid(visible=True, axis="x", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
