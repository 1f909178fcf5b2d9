"""Pictures of the same figures. matplotlib is imported only here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

OURS, OTHERS, FLOOR = "#c1440e", "#4c6a85", "#9a9a9a"
_LINES = ("-", "--", "-.", ":")


def latencies(path: Path, rows: Sequence[dict[str, Any]], in_full: Sequence[str], title: str) -> None:
    """Left: p50 of every row, whiskers to its p99. Right: the distribution of the rows named `in_full`."""
    measured = [row for row in rows if "error" not in row]
    curves = {row["name"]: curve(row) for row in measured if row["name"] in in_full and "cdf_us" in row["rounds"][0]}
    height = 1.2 + 0.32 * len(measured)
    figure, axes = plt.subplots(
        1, 2 if curves else 1, figsize=(11 if curves else 7, max(3.0, height)), layout="constrained", squeeze=False
    )
    _dots(axes[0, 0], measured)
    if curves:
        _distributions(axes[0, 1], curves, {row["name"] for row in measured if row["ours"]})
    figure.suptitle(title)
    _save(figure, path)


def distributions(path: Path, curves: dict[str, np.ndarray], ours: set[str], title: str) -> None:
    """Only the distributions."""
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    _distributions(axis, curves, ours)
    figure.suptitle(title)
    _save(figure, path)


def curve(row: dict[str, Any]) -> np.ndarray:
    """A row's 201 quantiles: of each, the median over rounds."""
    return np.median([block["cdf_us"] for block in row["rounds"]], axis=0)


def _dots(axis: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for y, row in enumerate(rows):
        colour = OURS if row["ours"] else FLOOR if row["name"] == row["floor"] else OTHERS
        axis.plot([row["p50_us"], row["p99_us"]], [y, y], color=colour, linewidth=1.4, marker="|", markevery=[1])
        axis.plot(row["p50_us"], y, "o", color=colour, markersize=7 if row["ours"] else 5)
        axis.annotate(
            f"{row['p50_us']:.3g}", (row["p50_us"], y), (0, 5), textcoords="offset points", ha="center", fontsize=7
        )
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
    for label, row in zip(axis.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row["ours"] else "normal")
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("round trip, us: p50 (dot) to p99 (bar)")
    axis.grid(visible=True, axis="x", alpha=0.3)


def _distributions(axis: Axes, curves: dict[str, np.ndarray], ours: set[str]) -> None:
    for n, (name, quantiles) in enumerate(curves.items()):
        axis.plot(
            quantiles,
            np.linspace(0, 100, len(quantiles)),
            _LINES[n % len(_LINES)],
            color=OURS if name in ours else OTHERS,
            label=name,
        )
    axis.set_xscale("log")
    axis.set_xlabel("round trip, us")
    axis.set_ylabel("% of round trips at most this long")
    axis.grid(visible=True, alpha=0.3)
    axis.legend(fontsize=8, loc="lower right")


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
