"""Runs .pt2 files with PyTorch on NVIDIA's GPUs. Not tried on a GPU yet."""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from driver.devices.cuda_files import CudaFileDevice
from driver.devices.device_options import DeviceOption
from driver.devices.nvidia import cuda_needs
from driver.devices.torch import TorchDevice, torch_module
from driver.plugins import version_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.devices.file_device import FilePort
    from driver.devices.torch import TorchModel
    from driver.nn import Model


class TorchCudaDevice(CudaFileDevice, TorchDevice):
    """Runs programs that PyTorch has exported, on a GPU: those that were exported on the CPU, too."""

    name, version, type = "torch-cuda", f"1 (PyTorch {version_of('torch')})", "GPU"
    options = MappingProxyType({**CudaFileDevice.options, "tf32": DeviceOption("", bool, default=False)})
    needs = cuda_needs(TorchDevice.needs)

    def configure(self) -> None:
        if self.chosen["deterministic"]:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS asks for then
        torch = torch_module()
        torch.use_deterministic_algorithms(self.chosen["deterministic"])
        torch.backends.cudnn.benchmark = False  # which chooses kernels by their speed, so that results vary
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.chosen["tf32"]

    @classmethod
    def missing_build(cls) -> str | None:
        found = version_of("torch")
        return f"PyTorch {found} is its build for the CPU" if found.endswith("+cpu") else None

    @classmethod
    def remedy(cls) -> str | None:
        return "pip install torch, in its build for CUDA, and NVIDIA's driver (docs/howto/gpu.md)"

    def model_of(
        self, model: Model, program: Any, inputs: Sequence[FilePort], outputs: Sequence[FilePort]
    ) -> TorchModel:
        """Return the program on the GPU. Raise CudaMissing, CudaFailed, InvalidModel, and what PyTorch raises."""
        from driver.devices.cuda.torch_program import TorchCudaModel

        if percent := self.chosen.get("memory_percent"):
            torch_module().cuda.set_per_process_memory_fraction(int(percent) / 100, self.ordinal)
        has_graphs = bool(self.chosen["graphs"])
        return TorchCudaModel(self.gpu, model, program, inputs=inputs, outputs=outputs, has_graphs=has_graphs)
