"""What Frigate's detectors asked and were answered, for /metrics. They do not say of which camera a frame is."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

_BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class DetectorCounts:
    """Frames by what became of them. One thread counts, any may collect."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.frames: Counter[str] = Counter()
        self.questions = 0
        self._seconds: Counter[float] = Counter()
        self._sum = 0.0

    def note_answer(self, seconds: float) -> None:
        """A frame was answered."""
        self.frames["answered"] += 1
        self._sum += seconds
        self._seconds[next((bound for bound in _BOUNDS if seconds <= bound), float("inf"))] += 1

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client asks for it."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        frames = CounterMetricFamily(
            "burst_frigate_frames", "Frames by what became of them.", labels=["model", "outcome"]
        )
        for outcome in ("answered", "wrong_message", "wrong_frame", "wrong_model", "failed"):
            frames.add_metric([self._model, outcome], self.frames[outcome])
        yield frames
        asked = CounterMetricFamily(
            "burst_frigate_model_questions", "Detectors that asked for the model.", labels=["model"]
        )
        asked.add_metric([self._model], self.questions)
        yield asked
        seconds = HistogramMetricFamily(
            "burst_frigate_seconds",
            "From a frame to its answer. Frigate's detector reads nothing from answers after its request_timeout_ms.",
            labels=["model"],
        )
        total, buckets = 0, []
        for bound in (*_BOUNDS, float("inf")):
            total += self._seconds[bound]
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        seconds.add_metric([self._model], buckets, self._sum)
        yield seconds
