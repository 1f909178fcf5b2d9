"""How long calls take: counted and tabulated, as a whole and by what of it the device worked."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.table import Column, Table
from rich.text import Text

from driver.demos.recordings import written

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from burst import Result

PERCENTILES = (50, 99, 99.9)
NAMES = tuple(f"p{p:g}" for p in PERCENTILES)
PARTS = {"whole call": "The whole call", "in the device": "… of which in the device", "around it": "… and around it"}
WINDOW = 300  # calls: ten seconds of a camera
PATHS = "burst", "plain RPC"


class TimedCall(NamedTuple):
    """How long one call took, and the microseconds that the device reported: None if it does not measure."""

    seconds: float
    on_device: float | None


def timed(execute: Callable[[], Result]) -> tuple[Result, TimedCall]:
    """Return the result of a call that succeeds, and how long it took. Raise as the call does, and StatusError."""
    start = time.perf_counter()
    result = execute()
    call = TimedCall(time.perf_counter() - start, result.timing.time_on_device)
    result.raise_for_status()
    return result, call


class ProcessCost:
    """The cost of running a model in another process: the usual call, less what the model took in the device.

    It is the median over the last calls, so one that was disturbed does not count.
    """

    def __init__(self) -> None:
        self._recent = deque[float](maxlen=WINDOW)

    def add(self, call: TimedCall) -> None:
        """Add one call more. One whose device does not measure says nothing."""
        if call.on_device is not None:
            self._recent.append(1e3 * call.seconds - call.on_device / 1e3)

    @property
    def milliseconds(self) -> float | None:
        """For one call; None while nothing is known."""
        return float(np.median(self._recent)) if self._recent else None

    @property
    def text(self) -> str:
        """For people."""
        found = self.milliseconds
        if found is None:
            return "What another process costs is unknown: this device does not report its times."
        calls = f"the median of the last {len(self._recent)} calls of the burst"
        return f"Another process costs {found:.3f} ms a call: {calls}, less what the model took in the device."


class Latencies:
    """The times of one path's calls, in microseconds: how long each took, and how much of that the device worked."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, float]] = []
        self.cost = ProcessCost()

    def add(self, call: TimedCall) -> None:
        """Remember one call."""
        self.cost.add(call)
        self._calls.append((call.seconds * 1e6, np.nan if call.on_device is None else call.on_device))

    def __len__(self) -> int:
        return len(self._calls)

    def parts(self) -> dict[str, np.ndarray]:
        """Return the whole, the device's part and the rest, call by call."""
        whole, device = np.array(self._calls, float).reshape(-1, 2).T
        return dict(zip(PARTS, (whole, device, whole - device), strict=True))

    def summary(self) -> dict[str, dict[str, float]]:
        """Return of each part that was measured how many calls there were, and the percentiles in milliseconds."""
        known = {part: values[np.isfinite(values)] / 1e3 for part, values in self.parts().items()}
        return {
            part: {"calls": len(values)} | dict(zip(NAMES, percentiles(values).tolist(), strict=True))
            for part, values in known.items()
            if values.size
        }


class PathTimes(dict[str, Latencies]):
    """The times of the calls on both paths."""

    def __init__(self) -> None:
        super().__init__((path, Latencies()) for path in PATHS)

    def add(self, calls: Mapping[str, TimedCall]) -> None:
        """Remember a call on each."""
        for path, call in calls.items():
            self[path].add(call)

    @property
    def cost(self) -> ProcessCost:
        """The cost of another process."""
        return self["burst"].cost

    def summary(self) -> dict[str, Any]:
        """Return what a summary of a demo says of them."""
        latency = {path: latencies.summary() for path, latencies in self.items()}
        return {"another_process_costs_ms": self.cost.milliseconds, "latency_ms": latency}


def percentiles(values: np.ndarray) -> np.ndarray:
    """Return the smallest measured values that 50, 99 and 99.9 % of all do not exceed."""
    ranks = [-(-len(values) * round(10 * p) // 1000) for p in PERCENTILES]  # exact: 99.9 % of 1,000 are 999
    return np.sort(values)[np.array(ranks) - 1]


def latency_table(paths: dict[str, Latencies]) -> Table:
    """Tabulate the percentiles of every path, in milliseconds."""
    figures = (Column(heading, justify="right") for heading in ("calls", *NAMES))
    table = Table(
        "path", "part", *figures, title="Latency in milliseconds, same frames, same device", title_justify="left"
    )
    for path, latencies in paths.items():
        measured = latencies.summary()
        for part in PARTS:
            found = measured.get(part, {})
            cells = [f"{found[name]:.3f}" if found else "-" for name in NAMES]
            table.add_row(path if part == "whole call" else "", part, str(found.get("calls", 0)), *cells)
        table.add_section()
    return table


def summary_table(facts: dict[str, str], files: Sequence[str]) -> Table:
    """Tabulate what happened, and the files that were written."""
    table = Table(Column(style="bold"), Column(), show_header=False)
    for name, fact in (*facts.items(), *(("written", written(path)) for path in files)):
        table.add_row(name, Text(fact))
    return table
