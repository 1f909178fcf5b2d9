"""The litert device: models become TFLite flatbuffers that LiteRT runs, with XNNPACK's kernels, on the CPU."""

from .device import LiteRtDevice

__all__ = ["LiteRtDevice"]
