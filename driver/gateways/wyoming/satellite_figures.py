"""What each satellite has sent and was told: counts, and their form for Prometheus.

Wyoming does not tell who connects. A satellite is named by the address of its connection, with a number from the second
on that is connected from there at a time: Home Assistant makes all connections of its satellites itself.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_MOST = 256
"""Satellites that are remembered; the one that was silent for longest is forgotten first."""


class SatelliteFigures:
    """Counts of all satellites. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: OrderedDict[str, Counter[str]] = OrderedDict()
        self._wanted: dict[str, tuple[str, ...]] = {}
        self.refused = 0

    @property
    def connected(self) -> int:
        """The number of satellites that are connected now."""
        return len(self._wanted)

    def enter(self, address: str, words: Iterable[str]) -> str:
        """Return the name of a connection from there, until it has left. words: that it listens for."""
        with self._lock:
            names = (f"{address}#{number}" if number > 1 else address for number in itertools.count(1))
            name = next(name for name in names if name not in self._wanted)
            self._wanted[name] = tuple(words)
        self.note(name, "connections")
        return name

    def wants(self, satellite: str, words: Iterable[str]) -> None:
        """Note the words that it listens for from now on."""
        with self._lock:
            self._wanted[satellite] = tuple(words)

    def leave(self, satellite: str) -> None:
        """Note that its connection has ended, and its name is free."""
        with self._lock:
            del self._wanted[satellite]

    def note(self, satellite: str, what: str, more: float = 1) -> float:
        """Add to a figure; return the sum. what: "seconds", "connections", "errors", or "detections " and a word."""
        with self._lock:
            counts = self._of.setdefault(satellite, Counter())
            self._of.move_to_end(satellite)
            counts[what] += more  # type: ignore[assignment] # seconds are fractions
            if len(self._of) > _MOST:
                self._of.popitem(last=False)
            return counts[what]

    def wanted(self) -> dict[str, tuple[str, ...]]:
        """Return the words that each connected satellite listens for."""
        with self._lock:
            return dict(self._wanted)

    def counts(self) -> dict[str, dict[str, float]]:
        """Return the counts by satellite, then by what was counted."""
        with self._lock:
            return {satellite: dict(counts) for satellite, counts in self._of.items()}


def metrics_collector(figures: SatelliteFigures, models: Callable[[], list[dict[str, Any]]]) -> Any:
    """Return a collector for a registry of prometheus_client. `models`: statistics of the models' servers."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector

    class WakeCollector(Collector):
        """Reads the counts at a scrape."""

        def collect(self) -> Iterator[Any]:
            """Yield the metrics."""
            yield GaugeMetricFamily("burst_satellites", "Satellites that are connected.", figures.connected)
            yield CounterMetricFamily("burst_satellites_refused", "Connections beyond the limit.", figures.refused)
            helps = {"seconds": "Sound.", "connections": "Connections.", "errors": "Connections ended by an error."}
            of = {
                what: CounterMetricFamily(f"burst_satellite_{what}", text, labels=["satellite"])
                for what, text in helps.items()
            }
            words = CounterMetricFamily(
                "burst_satellite_detections", "Wake words detected.", labels=["satellite", "word"]
            )
            for satellite, counts in figures.counts().items():
                for what, count in counts.items():
                    kind, _, word = what.partition(" ")
                    if word:
                        words.add_metric([satellite, word], count)
                    else:
                        of[kind].add_metric([satellite], count)
            listens = GaugeMetricFamily(
                "burst_satellite_listens", "1 while it listens for a word.", labels=["satellite", "word"]
            )
            for satellite, names in figures.wanted().items():
                for name in names:
                    listens.add_metric([satellite, name], 1)
            yield from (*of.values(), words, listens)
            yield from _of_models(models(), CounterMetricFamily)

        def describe(self) -> list[Any]:
            """Describe no metrics: registering this must not ask the models."""
            return []

    return WakeCollector()


def _of_models(stats: list[dict[str, Any]], family: Any) -> Iterator[Any]:
    for what, text in (("answered", "Executions that gave a result."), ("failed", "Executions that failed.")):
        found = family(f"burst_wake_model_{what}", text, labels=["model"])
        for each in stats:
            found.add_metric([each["name"]], each[what])
        yield found


__all__ = ["SatelliteFigures", "metrics_collector"]
