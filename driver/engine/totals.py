"""Scheduling counts summed over all clients of a device, including those that have left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from driver.options import PRIORITIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from burst.run_queue import FlowCounts

SUMMED = ("executions", "joined", "waits", "yields", "waiting", "waited", "used")
"""The fields of `burst.run_queue.FlowCounts` that can be added up."""


class Totals:
    """The sums over clients that have left: by priority, lowest first, one for each of `SUMMED`."""

    def __init__(self) -> None:
        self._left = [[0.0] * len(SUMMED) for _ in PRIORITIES]

    def leave(self, counts: Sequence[FlowCounts]) -> None:
        """Add the counts of a client that leaves. The caller excludes `snapshot` meanwhile."""
        _add(self._left, counts)
        for flow in self._left:
            flow[SUMMED.index("waiting")] = 0

    def snapshot(self) -> list[list[float]]:
        return [list(flow) for flow in self._left]


def summed(
    begin: list[list[float]], clients: Iterable[Callable[[], Sequence[FlowCounts]]], pace: Callable[[], object]
) -> list[list[float]]:
    """Add the counts of present clients to `begin`. `pace` lets running bursts through."""
    for counts in clients:
        pace()
        _add(begin, counts())
    return begin


def _add(sums: list[list[float]], counts: Sequence[FlowCounts]) -> None:
    for flow, found in zip(sums, counts, strict=True):
        for n, name in enumerate(SUMMED):
            flow[n] += getattr(found, name)
