"""Figures of the cameras of this process, as prometheus_client asks for them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import Metric

    from driver.gateways.v4l2.camera_stream import Camera

_OUTCOMES = {"frames": "taken", "missed": "missed", "skipped": "skipped", "damaged": "damaged"}


class CameraCollector(Collector):
    """Reads the counts at a scrape; between scrapes it costs nothing. Any thread."""

    def __init__(self, cameras: Callable[[], Iterable[Camera]]) -> None:
        """`cameras`: those that are open now."""
        self._cameras = cameras

    def describe(self) -> list[Metric]:
        """Describe no metrics: no camera need be open when this is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Return all of them, by the path of the camera."""
        label = ["camera"]
        frames = CounterMetricFamily(
            "burst_camera_frames",
            "Frames: taken by the program, missed by the camera, which had no free buffer, skipped for a newer one, "
            "or damaged.",
            labels=["camera", "outcome"],
        )
        copied = CounterMetricFamily(
            "burst_camera_copied_bytes", "Written to decode frames or to put their planes together.", labels=label
        )
        held = GaugeMetricFamily("burst_camera_held", "Frames that the program has not released yet.", labels=label)
        buffers = GaugeMetricFamily("burst_camera_buffers", "Buffers that the camera has made.", labels=label)
        age = GaugeMetricFamily("burst_camera_frame_age_seconds", "Since the last frame was taken.", labels=label)
        counts: dict[str, Counter[str]] = {}
        for camera in self._cameras():
            of = counts.setdefault(camera.path, Counter())
            of.update(camera.stats())
            of["buffers"] += len(camera.buffers)
            if (seconds := camera.age) is not None:
                age.add_metric([camera.path], seconds)
        for path, of in counts.items():
            for name, outcome in _OUTCOMES.items():
                frames.add_metric([path, outcome], of[name])
            copied.add_metric([path], of["copied_bytes"])
            held.add_metric([path], of["held"])
            buffers.add_metric([path], of["buffers"])
        yield from (frames, copied, held, buffers, age)
