"""Devices whose clients may have buffers and pools in the memory of an NVIDIA GPU. The first one loads CUDA."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING

from driver.devices.files import CHOOSING
from driver.interface import Device

if TYPE_CHECKING:
    from driver.devices.cuda.context import CudaContext
    from driver.devices.cuda.device_buffers import GpuMemory
    from driver.interface import BufferRequest, DriverBuffer, MemoryHandle, PreparedModel


class CudaMemoryDevice(Device):
    """A device on CUDA: the first base of its class."""

    own_memory_kinds = frozenset({"nvidia.cuda_fd"})

    @property
    @abstractmethod
    def context(self) -> CudaContext:
        """The context of its GPU, made when it is first asked for. Raises LibraryMissing, LibraryFailed."""

    @abstractmethod
    def computes_there(self, prepared: PreparedModel) -> bool:
        """Return True if executions of a model take their arguments in memory of the GPU."""

    @cached_property
    def memory(self) -> GpuMemory:
        """The GPU's memory, for clients. Raises LibraryMissing, LibraryFailed."""
        from driver.devices.cuda.device_buffers import GpuMemory

        return GpuMemory(self.context)

    def allocate(self, request: BufferRequest) -> DriverBuffer | None:
        """Memory of the GPU for values that only kernels read; None for indices, sizes and conditions, and where a
        model does not compute there.
        """
        if request.type.dtype.name in CHOOSING or not all(self.computes_there(use.prepared) for use in request.roles):
            return None
        return self.memory.allocate(request)

    def map_memory(self, handle: MemoryHandle) -> DriverBuffer:
        return self.memory.map_memory(handle)
