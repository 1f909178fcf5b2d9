"""The picture of how long the calls on both paths took."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, NullFormatter

from driver.demos.latencies import PARTS, PATHS, PERCENTILES, percentiles

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from driver.demos.latencies import Latencies

plt.switch_backend("Agg")  # there may be no display

LONGER = tuple(round(1 - p / 100, 6) for p in PERCENTILES)  # the share of calls beyond each
STYLES = dict(zip(PATHS, (("#0072B2", "-", "o"), ("#D55E00", "--", "s")), strict=True))


def draw_latencies(path: Path, paths: dict[str, Latencies], source: str) -> None:
    """Draw, for the whole call and for its two parts, how many calls took longer than a given time."""
    with plt.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(1, len(PARTS), figsize=(15, 5.6), sharey=True, layout="constrained")
        for axis, (part, title) in zip(axes, PARTS.items(), strict=True):
            axis.set_title(title, loc="left", weight="bold")
            times = {name: latencies.parts()[part] for name, latencies in paths.items()}
            _draw_part(axis, {name: np.sort(t[np.isfinite(t) & (t > 0)]) for name, t in times.items()})
        axes[0].set_ylabel("calls that took longer")
        axes[0].legend(loc="upper right", edgecolor="none", framealpha=1)
        calls = min(len(latencies) for latencies in paths.values())
        title = f"Latency of {calls:,} calls on each path, in turns on the same frames and the same device  ({source})"
        figure.suptitle(title, x=0.01, ha="left")
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _draw_part(axis: Axes, times: dict[str, np.ndarray]) -> None:
    """Draw one panel: a falling curve for each path, with its percentiles marked."""
    known = {name: microseconds for name, microseconds in times.items() if microseconds.size}
    if not known:
        axis.text(0.5, 0.5, "not measured by this device", transform=axis.transAxes, ha="center")
        return
    unit, name_of_unit = (1e3, "milliseconds") if max(map(np.median, known.values())) >= 1e3 else (1, "microseconds")
    axis.set(xscale="log", yscale="log", ylim=(5e-4, 1.15), xlabel=f"{name_of_unit}, logarithmic")
    axis.margins(x=0.15)
    decades = np.log10(max(t[-1] for t in known.values()) / min(t[0] for t in known.values()))
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7) if decades < 1 else (1, 3)))
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    shares = [f"1 in {1 / share:,.0f}\np{p:g}" for share, p in zip(LONGER, PERCENTILES, strict=True)]
    axis.set_yticks([1, *LONGER], ["all", *shares])
    axis.tick_params(axis="y", which="minor", length=0)
    for share in LONGER:
        axis.axhline(share, color="0.85", linewidth=1, zorder=0)
    for name, microseconds in known.items():
        colour, line, marker = STYLES[name]
        beyond = np.maximum(1 - np.arange(1, microseconds.size + 1) / microseconds.size, 1e-9)
        axis.step(microseconds / unit, beyond, where="post", color=colour, linestyle=line, linewidth=2)
        axis.plot([], [], color=colour, linestyle=line, marker=marker, label=name)
    _mark_percentiles(axis, {STYLES[name]: percentiles(t) / unit for name, t in known.items()})


def _three_digits(value: float) -> str:
    """Three significant digits, and never an exponent."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _mark_percentiles(axis: Axes, marks: dict[tuple[str, str, str], np.ndarray]) -> None:
    """Write each percentile beside its mark: the fastest path's to the left, the others' to the right."""
    for i, share in enumerate(LONGER):
        for place, ((colour, _, marker), values) in enumerate(sorted(marks.items(), key=lambda item: item[1][i])):
            axis.plot(values[i], share, marker, color=colour, markersize=7, markeredgecolor="white")
            left = place == 0
            axis.annotate(
                _three_digits(values[i]),
                (values[i], share),
                (-8 if left else 8, 6),
                textcoords="offset points",
                ha="right" if left else "left",
                color=colour,
                path_effects=[withStroke(linewidth=3, foreground="white")],
            )
