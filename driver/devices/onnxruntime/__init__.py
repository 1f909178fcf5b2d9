"""The devices of ONNX Runtime: models become ONNX graphs, which run on the CPU or by an execution provider on a GPU."""

from .device import OnnxRuntimeDevice
from .provider_device import OrtCudaDevice, OrtTensorRtRtxDevice, OrtWebGpuDevice

__all__ = ["OnnxRuntimeDevice", "OrtCudaDevice", "OrtTensorRtRtxDevice", "OrtWebGpuDevice"]
