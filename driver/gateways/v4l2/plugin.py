"""Cameras for `burst doctor`: programs open them by `driver.Camera`, and `burst serve` has no options for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from driver.gateway import Gateway

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from driver.finding import Finding


class CameraGateway(Gateway):
    """Hands the buffers of V4L2 cameras to devices, in the program that opens them."""

    def checks(self) -> Mapping[str, Callable[[], Iterable[Finding]]]:
        """Return the check of this machine's cameras."""
        from driver.gateways.v4l2.camera_nodes import nodes

        return {"cameras": nodes}
