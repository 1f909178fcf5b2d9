"""Watches one burst of another process by its trace: plain reads of memory that both sides write anyway."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driver.client.statistics import cpu_of_listener
from driver.options import PRIORITIES
from driver.watching.figures import BurstFigures, Spread
from driver.watching.processes import program_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from burst import Trace


_LOOKS = 10


class _Totals(NamedTuple):
    """Counters that only grow."""

    at: float
    results: int
    plain: int
    client_cpu: float
    device_cpu: float | None
    waits: int
    waited: float


class WatchedBurst:
    """A burst of another process. Its figures cover the time between two calls of `look`."""

    def __init__(self, trace: Trace, device: str, number: int) -> None:
        self.trace, self.device, self.number = trace, device, number
        self.pid, self.model = int(trace.page.client.pid), trace.model
        self.program, self._last = program_of(self.pid), self._totals()
        self.waits_per_s = self.waited = 0.0
        self._seen, self._came = self._last.results, list[Any]()

    def glance(self) -> None:
        """Notes the requests whose results came since the last glance, at most 256."""
        if int(self.trace.page.client.results) != self._seen:
            records = self.trace.records()
            new = records[records["id"] > self._seen]
            if len(new):
                self._came.append(new)
                self._seen = int(new["id"][-1])

    def look(self) -> BurstFigures:
        """The figures since the last call."""
        client = self.trace.page.client
        before, now = self._last, self._totals()
        self._last, seconds = now, max(1e-9, now.at - before.at)
        results, plain = max(0, now.results - before.results), max(0, now.plain - before.plain)
        self.waits_per_s = max(0, now.waits - before.waits) / seconds
        self.waited = max(0.0, now.waited - before.waited) / seconds
        stages = self._stages()
        return BurstFigures(
            device=self.device,
            number=self.number,
            pid=self.pid,
            program=self.program,
            model=self.model,
            priority=self.priority,
            depth=int(client.depth),
            rate=(results + plain) / seconds,
            latency=stages.pop("total", None),
            stages=stages,
            **self._in_flight(),
            results=now.results,
            plain=now.plain,
            drops=int(client.drops),
            timeouts=int(client.timeouts),
            path=_path(results, plain),
            client_cpu=max(0.0, now.client_cpu - before.client_cpu) / seconds,
            device_cpu=_share(before.device_cpu, now.device_cpu, seconds),
        )

    @property
    def priority(self) -> str:
        """By name."""
        number = int(self.trace.page.device.priority)
        return PRIORITIES[number - 1] if 1 <= number <= len(PRIORITIES) else ""

    def _totals(self) -> _Totals:
        client, device = self.trace.page.client, self.trace.page.device
        busy = (int(client.busy_ns) - int(client.asleep_ns)) / 1e9
        counts = int(client.results), int(client.plain)
        waits = int(device.waits), int(device.waited_ns) / 1e9
        return _Totals(time.monotonic(), *counts, busy, cpu_of_listener(self.trace), *waits)

    def _in_flight(self) -> dict[str, Any]:
        """Consistent counters: reads again if a result came meanwhile."""
        client, device = self.trace.page.client, self.trace.page.device
        for _ in range(_LOOKS):
            results, answered = int(client.results), int(device.answered)
            requests, running, begun = int(client.requests), int(device.running), int(device.begun)
            if results == int(client.results):
                break
        return {
            "in_flight": max(0, requests - results),
            "queued": max(0, requests - answered - (running != 0)),
            "unread": max(0, answered - results),
            "is_waiting": running not in {0, begun},
        }

    def _stages(self) -> dict[str, Spread]:
        self.glance()
        each, self._came = [self.trace.stages(records) for records in self._came], []
        if not each:
            return {}
        rows = [np.concatenate([ns[name] for ns in each]) for name in each[0]]
        ordered = np.sort(rows, axis=1) / 1e3
        spreads = zip(*(_percentile(ordered, share) for share in (0.50, 0.99)), strict=True)
        return {name: Spread(*spread) for name, spread in zip(each[0], spreads, strict=True)}


def _percentile(ordered: NDArray[np.float64], share: float) -> list[float]:
    """The percentile of each row, as np.percentile; ten times as fast for hundreds of short rows."""
    below, part = divmod(share * (ordered.shape[1] - 1), 1)
    lower, upper = ordered[:, int(below)], ordered[:, min(int(below) + 1, ordered.shape[1] - 1)]
    found: list[float] = (lower + part * (upper - lower)).tolist()
    return found


def _path(results: int, plain: int) -> str:
    if results and plain:
        return "both"
    return "burst" if results else "plain" if plain else ""


def _share(before: float | None, now: float | None, seconds: float) -> float | None:
    return None if before is None or now is None else max(0.0, now - before) / seconds
