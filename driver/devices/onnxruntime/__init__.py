"""The devices of ONNX Runtime: models become ONNX graphs, which run on the CPU or by an execution provider on a GPU."""

from typing import TYPE_CHECKING

from driver.late_names import late_names

if TYPE_CHECKING:
    from .device import OnnxRuntimeDevice
    from .provider_device import OrtCudaDevice, OrtTensorRtRtxDevice, OrtWebGpuDevice

__all__ = ["OnnxRuntimeDevice", "OrtCudaDevice", "OrtTensorRtRtxDevice", "OrtWebGpuDevice"]

__getattr__, __dir__ = late_names(
    __name__,
    {
        "driver.devices.onnxruntime.device": "OnnxRuntimeDevice",
        "driver.devices.onnxruntime.provider_device": "OrtCudaDevice OrtTensorRtRtxDevice OrtWebGpuDevice",
    },
)
