"""The onnxruntime device: models become ONNX graphs that ONNX Runtime runs, on the CPU or by CUDA."""

from .device import OnnxRuntimeDevice

__all__ = ["OnnxRuntimeDevice"]
