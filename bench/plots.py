"""Pictures of the same figures. matplotlib is imported only here."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib import patheffects

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

OURS, OTHERS, FLOOR = "#c1440e", "#4c6a85", "#9a9a9a"
_PEERS = {  # those of one picture that cross each other have colours of their own
    "iceoryx2": "#1f6fb4",
    "pipe": "#7a5c99",
    "UDS + msgpack": "#2e8b74",
    "zmq": "#a8811e",
    "gRPC": "#55606b",
    "nng": "#8f4a67",
    "POSIX queue": "#5f7a3a",
    "faster-fifo": "#6c8ebf",
}
_LINES = ("-", "--", "-.", ":")
_PERCENT = np.linspace(0, 100, 201)


def latencies(path: Path, rows: Sequence[dict[str, Any]], in_full: Sequence[str], title: str) -> None:
    """Left: p50 of every row, whiskers to its p99. Right: the distribution of the rows named `in_full`."""
    measured = [row for row in rows if "error" not in row]
    curves = {row["name"]: curve(row) for row in measured if row["name"] in in_full and "cdf_us" in row["rounds"][0]}
    height = 1.2 + 0.32 * len(measured)
    figure, axes = plt.subplots(
        1, 2 if curves else 1, figsize=(13 if curves else 7, max(3.0, height)), layout="constrained", squeeze=False
    )
    _dots(axes[0, 0], measured)
    if curves:
        _distributions(axes[0, 1], curves, {row["name"] for row in measured if row["ours"]})
    figure.suptitle(title, weight="bold")
    _save(figure, path)


def distributions(path: Path, curves: dict[str, np.ndarray], ours: set[str], title: str) -> None:
    """Only the distributions."""
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    _distributions(axis, curves, ours)
    axis.set_title(title, loc="left", weight="bold")
    _save(figure, path)


def colour_of(name: str) -> str:
    """A peer's."""
    return _PEERS.get(name.partition(",")[0], OTHERS)


def _time(us: float, _: object = None) -> str:
    """Microseconds for an axis."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:g} {unit}"
    return f"{us:g} us" if us >= 1 else f"{us * 1e3:g} ns"


def _finish(axis: Axes) -> None:
    """What all pictures have in common."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(visible=True, alpha=0.25)
    axis.set_axisbelow(True)


def bars(path: Path, values: dict[str, float], label: str, title: str) -> None:
    """One bar each."""
    figure, axis = plt.subplots(figsize=(7, 1.2 + 0.32 * len(values)), layout="constrained")
    places = axis.barh(range(len(values)), list(values.values()), color=OURS)
    axis.bar_label(places, fmt="%.3g", padding=3, fontsize=8)
    axis.set_yticks(range(len(values)), list(values))
    axis.invert_yaxis()
    axis.set_xlabel(label)
    axis.margins(x=0.1)
    figure.suptitle(title)
    _save(figure, path)


def curve(row: dict[str, Any]) -> np.ndarray:
    """A row's 201 quantiles: of each, the median over rounds."""
    return np.median([block["cdf_us"] for block in row["rounds"]], axis=0)


class Line(NamedTuple):
    """One curve of a picture with logarithmic axes."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    style: str = "-"


def streams(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Left: elements of 64 bytes per second against the batch. Right: bytes per second against the size, unbatched."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    _curves(left, _stream_lines(rows, "batch", lambda row: row["bytes"] == 64, lambda row: row["elements_per_s"]))
    _curves(right, _stream_lines(rows, "bytes", lambda row: row["batch"] == 1, lambda row: row["mb_per_s"] / 1e3))
    left.set(xlabel="elements of 64 bytes per call", ylabel="elements per second")
    right.set(xlabel="bytes of an element, one per call", ylabel="GB/s")
    figure.suptitle(title)
    _save(figure, path)


def latency_against_size(path: Path, lines: Sequence[Line], title: str, label: str = "bytes each way") -> None:
    """Round trips in microseconds against the size of a message."""
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    _curves(axis, lines)
    axis.set(xlabel=label, ylabel="round trip (median)")
    axis.yaxis.set_major_formatter(_time)
    _finish(axis)
    axis.set_title(title, loc="left", weight="bold")
    _save(figure, path)


def costs(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Per queue, against their number. Left: microseconds. Right: resident memory."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axis, key, label in zip(axes, ("us", "resident_kib"), ("us", "resident KiB"), strict=True):
        curves: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            curves.setdefault(f"{row['way']}, {row['side']}", []).append(row)
        styles = dict(zip(curves, _LINES, strict=False))
        _curves(
            axis,
            [
                Line(name, [row["count"] for row in of_it], [max(row[key], 1e-2) for row in of_it], OURS, styles[name])
                for name, of_it in curves.items()
            ],
        )
        axis.set(xlabel="queues", ylabel=f"per queue, {label}")
    figure.suptitle(title)
    _save(figure, path)


def growth(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """A small picture for each dimension: its curves, with their exponents."""
    dimensions: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        dimensions.setdefault(row["name"].partition(":")[0], []).append(row)
    across = -(-len(dimensions) // 2)
    figure, axes = plt.subplots(2, across, figsize=(4.2 * across, 7), layout="constrained", squeeze=False)
    for axis in axes.flat[len(dimensions) :]:
        axis.set_visible(False)
    for axis, (name, curves) in zip(axes.flat, dimensions.items(), strict=False):
        for row, style in zip(curves, _LINES, strict=False):
            what = row["name"].partition(": ")[2]
            label = f"{what}, {row['unit']}: exponent {row['exponent']['median']:.2f}"
            axis.plot(*zip(*row["points"], strict=True), style, color=OURS, marker="o", markersize=3, label=label)
        axis.set(xscale="log", yscale="log", xlabel="bytes" if name == "payload" else name)
        axis.legend(fontsize=7, frameon=False)
        _finish(axis)
    figure.suptitle(title)
    _save(figure, path)


def _stream_lines(
    rows: Sequence[dict[str, Any]],
    x: str,
    is_shown: Callable[[dict[str, Any]], bool],
    y: Callable[[dict[str, Any]], float],
) -> list[Line]:
    lines = []
    shown = [row for row in rows if "ns" in row and is_shown(row)]
    for what in dict.fromkeys(row["what"] for row in shown):
        of_it = sorted((row for row in shown if row["what"] == what), key=lambda row: row[x])
        is_ours, is_floor = of_it[0]["ours"], what.startswith("floor")
        colour = OURS if is_ours else FLOOR if is_floor else OTHERS
        style = "--" if "in place" in what or "overwriting" in what or "peek" in what else "-"
        name = f"{what} (Python)" if is_ours and " in C" not in what else what
        lines.append(Line(name, [row[x] for row in of_it], [y(row) for row in of_it], colour, style))
    return lines


def _curves(axis: Axes, lines: Sequence[Line]) -> None:
    for line in lines:
        axis.plot(line.x, line.y, line.style, color=line.colour, marker="o", markersize=3, linewidth=1.3)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({x for line in lines for x in line.x})
    axis.set_xticks(ticks, [_short(x) for x in ticks])
    axis.tick_params(axis="x", which="minor", bottom=False)
    axis.grid(visible=True, alpha=0.3)
    if lines:
        _name_at_the_end(axis, lines)


def _name_at_the_end(axis: Axes, lines: Sequence[Line]) -> None:
    """Right of the axis, each at the height of its curve's last point, or as near as it can be read."""
    low, high = np.log10(axis.get_ylim())
    ordered = sorted(lines, key=lambda line: line.y[-1])
    places = np.log10([line.y[-1] for line in ordered])
    step = (high - low) / 25
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + step)
    places[-1] = min(places[-1], high)
    for i in range(len(places) - 2, -1, -1):
        places[i] = min(places[i], places[i + 1] - step)
    for line, at in zip(ordered, places, strict=True):
        axis.annotate(
            line.name,
            (line.x[-1], line.y[-1]),
            (1.03, 10**at),
            textcoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
            color=line.colour,
            weight="bold" if line.colour == OURS else "normal",
            arrowprops={"arrowstyle": "-", "color": line.colour, "linewidth": 0.4, "alpha": 0.6},
        )


def _short(x: float) -> str:
    if x < 1024:
        return f"{x:g}"
    return f"{x / 1024:g}K" if x < 1 << 20 else f"{x / (1 << 20):g}M"


def _dots(axis: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for y, row in enumerate(rows):
        colour = OURS if row["ours"] else FLOOR if row["name"] == row.get("floor") else OTHERS
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
    axis.xaxis.set_major_formatter(_time)
    axis.set_xlabel("round trip: p50 (dot, us) to p99 (bar)")
    _finish(axis)
    axis.grid(visible=False, axis="y")


def _distributions(axis: Axes, curves: dict[str, np.ndarray], ours: set[str]) -> None:
    """Each with its name beside it."""
    styles = dict(zip([name for name in curves if name in ours], itertools.cycle(_LINES), strict=False))
    for name, quantiles in curves.items():
        colour, width = (OURS, 1.8) if name in ours else (colour_of(name), 1.3)
        axis.plot(quantiles, _PERCENT, styles.get(name, "-"), color=colour, linewidth=width)
    axis.set_xscale("log")
    low, high = min(q[2] for q in curves.values()), max(q[180] for q in curves.values())
    room = (high / low) ** 0.3  # a name's
    for group in _close(sorted(curves.items(), key=lambda item: item[1][100]), room):
        _name_beside(axis, group, ours)
    axis.set_xlim(low / room, high * room)
    axis.set_ylim(0, 101)
    axis.yaxis.set_major_formatter("{x:.0f} %")
    axis.xaxis.set_major_formatter(_time)
    axis.set(xlabel="round trip", ylabel="of all round trips take at most so long")
    _finish(axis)


def _close(ordered: Sequence[tuple[str, np.ndarray]], room: float) -> list[list[tuple[str, np.ndarray]]]:
    """Groups of curves between which there is no room for a name."""
    groups = [[ordered[0]]]
    for one in ordered[1:]:
        if one[1][100] < room * groups[-1][-1][1][100]:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _name_beside(axis: Axes, group: Sequence[tuple[str, np.ndarray]], ours: set[str]) -> None:
    """The faster half of a group left of it, the slower half right; a line leads from each name to its curve."""
    half = len(group) // 2
    left, right = group[0][1][30] / 1.15, group[-1][1][150] * 1.15
    sides = ((group[:half], left, "right", 136), (group[half:][::-1], right, "left", 158))  # never at one height
    for names, x, alignment, top in sides:
        for n, (name, quantiles) in enumerate(names):
            at = top - n * 44 if len(names) < 4 else top - n * 120 // len(names)
            colour = OURS if name in ours else colour_of(name)
            axis.annotate(
                name,
                (quantiles[at], at / 2),
                (x, at / 2),
                ha=alignment,
                va="center",
                fontsize=8.5,
                color=colour,
                weight="bold" if name in ours else "normal",
                path_effects=[patheffects.withStroke(linewidth=3, foreground="white")],
                arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0},
            )
            axis.plot(quantiles[at], at / 2, "o", color=colour, markersize=3.5)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
