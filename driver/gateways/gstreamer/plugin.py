"""GStreamer's element for `burst doctor`: GStreamer loads it, and `burst serve` has no options for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from driver.gateway import Gateway

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from driver.finding import Finding


class GStreamerGateway(Gateway):
    """Runs models on the frames of GStreamer's pipelines, in the process of the pipeline."""

    def checks(self) -> Mapping[str, Callable[[], Iterable[Finding]]]:
        """Return the check of the element and of GStreamer's loader."""
        from driver.gateways.gstreamer.gstreamer_loader import element

        return {"GStreamer": element}
