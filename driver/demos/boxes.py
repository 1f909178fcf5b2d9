"""Boxes around objects, and how well found boxes agree with true ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Box:
    """An object of class `name` between pixel columns x0 <= x < x1 and rows y0 <= y < y1."""

    name: str
    x0: float
    y0: float
    x1: float
    y1: float
    score: float = 1.0

    @property
    def corners(self) -> tuple[float, float, float, float]:
        """(x0, y0, x1, y1)."""
        return self.x0, self.y0, self.x1, self.y1


def overlap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Intersection over union of every box in `a` [N, 4] with every box in `b` [M, 4]: an array [N, M]."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = np.maximum(high - low, 0).prod(axis=2)
    areas = (a[:, 2:] - a[:, :2]).prod(axis=1)[:, None] + (b[:, 2:] - b[:, :2]).prod(axis=1)[None]
    return shared / np.maximum(areas - shared, 1e-9)


@dataclass
class Agreement:
    """Counts of hits, false alarms and misses over many frames."""

    hits: int = 0
    false_alarms: int = 0
    misses: int = 0

    def count(self, found: Sequence[Box], truth: Sequence[Box], at_least: float = 0.5) -> None:
        """Match one frame: the surest box first takes the best free true box of its class that overlaps enough."""
        free = list(truth)
        for box in sorted(found, key=lambda box: -box.score):
            rivals = [other for other in free if other.name == box.name]
            if not rivals:
                continue
            shared = overlap(np.array([box.corners]), np.array([other.corners for other in rivals]))[0]
            if shared.max() >= at_least:
                free.remove(rivals[int(shared.argmax())])
        hits = len(truth) - len(free)
        self.hits += hits
        self.misses += len(free)
        self.false_alarms += len(found) - hits

    @property
    def precision(self) -> float:
        """The share of found boxes that are right."""
        return self.hits / max(self.hits + self.false_alarms, 1)

    @property
    def recall(self) -> float:
        """The share of true boxes that were found."""
        return self.hits / max(self.hits + self.misses, 1)

    def summary(self) -> dict[str, float] | None:
        """Return all counts and ratios; None if no true boxes are known."""
        true = self.hits + self.misses
        if not true:
            return None
        counts = {"true": true, "missed": self.misses, "false_alarms": self.false_alarms}
        return counts | {"precision": self.precision, "recall": self.recall}
