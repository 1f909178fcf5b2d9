"""What was found in a frame, as metadata of GStreamer's on its buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gi

gi.require_version("GstVideo", "1.0")
from gi.repository import GLib, Gst, GstVideo  # noqa: E402 (after its version)

from driver.gateways.detection.class_names import label_of  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.gateways.detection import FoundBoxes

try:
    gi.require_version("GstAnalytics", "1.0")
    from gi.repository import GstAnalytics
except (ImportError, ValueError):  # GStreamer before 1.24, or the library is not installed
    GstAnalytics = None


def attach(buffer: Gst.Buffer, found: FoundBoxes, labels: Sequence[str], width: int, height: int) -> None:
    """Attach regions of interest, in pixels, and the same as object detections of GstAnalytics where this is installed.

    The regions' ids count from 0: by them, `buffer_get_video_region_of_interest_meta_id` finds each, in Python too.
    """
    relations = GstAnalytics.buffer_add_analytics_relation_meta(buffer) if GstAnalytics else None
    for number, (edges, score, label_id) in enumerate(zip(*(each.tolist() for each in found[:3]), strict=True)):
        left, right = (round(side * width) for side in edges[::2])
        top, bottom = (round(side * height) for side in edges[1::2])
        place = left, top, max(0, right - left), max(0, bottom - top)
        label = label_of(labels, label_id)
        region = GstVideo.buffer_add_video_region_of_interest_meta(buffer, label, *place)
        region.id = number
        region.add_param(_figures(label, label_id, score, edges))
        if relations is not None:
            relations.add_od_mtd(GLib.quark_from_string(label), *place, score)


def _figures(label: str, label_id: int, score: float, edges: list[float]) -> Any:
    """Return the figures by the names that DL Streamer's elements have for them."""
    figures = Gst.Structure.new_empty("detection")
    figures.set_value("label", label)
    figures.set_value("label_id", label_id)
    figures.set_value("confidence", score)
    for name, value in zip(("x_min", "y_min", "x_max", "y_max"), edges, strict=True):
        figures.set_value(name, value)
    return figures
