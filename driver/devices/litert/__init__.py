"""The litert device: models become TFLite flatbuffers that LiteRT runs, with XNNPACK's kernels, on the CPU."""

from typing import TYPE_CHECKING

from driver.late_names import late_names

if TYPE_CHECKING:
    from .device import LiteRtDevice

__all__ = ["LiteRtDevice"]

__getattr__, __dir__ = late_names(__name__, {"driver.devices.litert.device": "LiteRtDevice"})
