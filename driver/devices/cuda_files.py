"""Devices that run model files by a framework on NVIDIA's GPUs: what PyTorch's and JAX's have in common.

How a file runs there is in `driver.devices.cuda`, which is loaded with the first one.
"""

from __future__ import annotations

from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from driver.devices.cuda_memory import CudaMemoryDevice
from driver.devices.device_options import DeviceOption, chosen_options
from driver.devices.file_device import FileDevice, FileModel
from driver.devices.nvidia import missing_gpu

if TYPE_CHECKING:
    from collections.abc import Mapping

    from driver.devices.cuda.context import CudaContext
    from driver.devices.cuda.lane import CudaGpu
    from driver.devices.device_options import Value
    from driver.interface import PreparedModel


class CudaFileDevice(CudaMemoryDevice, FileDevice):
    """A device on CUDA of a framework: the first base of its class."""

    options: ClassVar[Mapping[str, DeviceOption]] = MappingProxyType(
        {
            "device": DeviceOption("", int, default=0),
            "deterministic": DeviceOption("", bool, default=False),
            "graphs": DeviceOption("", bool, default=True),
            "memory_percent": DeviceOption("", int),
        }
    )

    def __init__(self, **options: Value) -> None:
        """`options`: those of the device; what is not given is as configured. Takes no GPU. Raise ValueError."""
        self.chosen = chosen_options(self.name, self.options, options)
        self.configure()
        super().__init__()

    def configure(self) -> None:
        """Configure the framework, for the whole process, before it is loaded."""
        raise NotImplementedError

    @classmethod
    def missing(cls) -> str | None:
        return super().missing() or cls.missing_build() or missing_gpu()

    @classmethod
    def missing_build(cls) -> str | None:
        """Return why the installed framework has no CUDA; None: it has, as far as its package tells."""
        raise NotImplementedError

    @property
    def ordinal(self) -> int:
        """The number of its GPU, from 0."""
        return int(self.chosen["device"])

    @cached_property
    def gpu(self) -> CudaGpu:
        """The GPU, from the first file on. Raises CudaMissing, CudaFailed."""
        from driver.devices.cuda.context import cuda_context
        from driver.devices.cuda.lane import CudaGpu

        return CudaGpu(cuda_context(self.ordinal), self._lose)

    @property
    def context(self) -> CudaContext:
        return self.gpu.context

    def _lose(self, words: str) -> None:
        if self.give_up is not None:
            self.give_up(words)

    def time_work(self, until: float) -> bool:
        if "gpu" not in vars(self):
            return False
        self.gpu.clock.run_until(until)
        return True

    def computes_there(self, prepared: PreparedModel) -> bool:
        return isinstance(prepared, FileModel) and prepared.is_static
