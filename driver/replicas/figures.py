"""What a server has done: counts, and how long the latest requests took."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.replicas.waiting import WaitingRequest

_LATEST = 2048


@dataclass
class ServerFigures:
    """Counts since the beginning. Times are nanoseconds, of the latest requests."""

    requests: int = 0
    answered: int = 0
    refused: int = 0
    missed: int = 0
    failed: int = 0
    cancelled: int = 0
    batches: Counter[int] = field(default_factory=Counter)
    queued: deque[int] = field(default_factory=lambda: deque(maxlen=_LATEST))
    executed: deque[int] = field(default_factory=lambda: deque(maxlen=_LATEST))
    total: deque[int] = field(default_factory=lambda: deque(maxlen=_LATEST))

    def note_begin(self, requests: Sequence[WaitingRequest], now: int) -> None:
        """They leave the queue, together."""
        self.batches[len(requests)] += 1
        self.queued.extend(now - request.begin for request in requests)

    def note_answer(self, ns: int) -> None:
        self.answered += 1
        self.total.append(ns)

    def counts(self) -> dict[str, int]:
        return {
            name: getattr(self, name) for name in ("requests", "answered", "refused", "missed", "failed", "cancelled")
        }

    def seconds(self) -> dict[str, dict[str, float]]:
        """Return the median and the 99th percentile of each stage."""
        return {name: _percentiles(getattr(self, name)) for name in ("queued", "executed", "total")}


def _percentiles(times: Any) -> dict[str, float]:
    if not times:
        return {}
    p50, p99 = np.percentile(np.fromiter(times, np.int64), (50, 99)) / 1e9
    return {"p50": float(p50), "p99": float(p99)}
