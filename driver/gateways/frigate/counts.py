"""What Frigate's detectors asked and were answered, by detector: no message names a camera."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

_BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, float("inf"))
_OUTCOMES = ("answered", "wrong_message", "wrong_frame", "wrong_model", "failed")
_MOST = 64  # detectors


class DetectorCounts:
    """Frames by what became of them. One thread counts, any may collect."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.frames: Counter[tuple[str, str]] = Counter()  #: by detector and outcome
        self.questions: Counter[str] = Counter()
        self.connected = self.refused = 0  #: connections
        self._took: dict[str, Counter[float]] = {}  # answers by bound
        self._seconds: dict[str, float] = {}

    def known(self, detector: str) -> str:
        """Return the name under which it is counted: addresses come and go, and each name is kept."""
        if detector in self._took or len(self._took) < _MOST:
            self._add(detector)
            return detector
        self._add("others")
        return "others"

    def _add(self, detector: str) -> None:
        self._seconds.setdefault(detector, 0.0)
        self._took.setdefault(detector, Counter())

    def note_answer(self, detector: str, seconds: float) -> None:
        """Count the answer to a frame. detector: as `known` returns it."""
        self.frames[detector, "answered"] += 1
        self._seconds[detector] += seconds
        self._took[detector][next(bound for bound in _BOUNDS if seconds <= bound)] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as prometheus_client asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        yield GaugeMetricFamily("burst_frigate_connections", "Detectors that are connected.", self.connected)
        yield CounterMetricFamily("burst_frigate_connections_refused", "Connections beyond the limit.", self.refused)
        labels = ["model", "detector"]
        frames = CounterMetricFamily(
            "burst_frigate_frames", "Frames by what became of them.", labels=[*labels, "outcome"]
        )
        asked = CounterMetricFamily("burst_frigate_model_questions", "Questions for the model.", labels=labels)
        seconds = HistogramMetricFamily(
            "burst_frigate_seconds",
            "From a frame to its answer. Frigate's detector reads nothing from answers after its request_timeout_ms.",
            labels=labels,
        )
        for detector, took in list(self._took.items()):
            its = [self._model, detector]
            for outcome in _OUTCOMES:
                frames.add_metric([*its, outcome], self.frames[detector, outcome])
            asked.add_metric(its, self.questions[detector])
            names = [*map(str, _BOUNDS[:-1]), "+Inf"]
            totals = accumulate(took[bound] for bound in _BOUNDS)
            seconds.add_metric(its, list(zip(names, totals, strict=True)), self._seconds[detector])
        yield from (frames, asked, seconds)
