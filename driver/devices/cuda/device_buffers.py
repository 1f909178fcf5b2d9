"""Memory of a GPU for clients of a device: buffers that the device manages, and pools that clients hand over.

A device on CUDA passes `allocate` and `map_memory` on to the `GpuMemory` of its context. Its executions find
`GpuBuffer`s in the place of arrays, and give their addresses to kernels: the CPU never touches a value, so the state of
a recurrent network stays on the GPU from one execution to the next.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NoReturn

from burst import DeviceUnavailable, GeneralFailure, ResourceExhaustedTransient
from driver.devices.cuda.driver_api import CudaFailed, CudaOutOfMemory
from driver.interface import DriverBuffer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from driver.devices.cuda.context import CudaContext, CudaEvent, CudaStream, DeviceMemory
    from driver.interface import BufferRequest, MemoryHandle

CUDA_FD = "nvidia.cuda_fd"
"""The kind of pools in memory of a GPU: a descriptor that CUDA's virtual memory management has exported. Its two fields
are the GPU's UUID.
"""
GPU_KINDS = frozenset({CUDA_FD})


class GpuBuffer(DriverBuffer):
    """Memory of the GPU, in the HAL's layout. `address` is for the GPU alone."""

    is_linear = True
    nbytes = 0  #: of the CPU's memory

    def __init__(self, memory: DeviceMemory, gpu_nbytes: int) -> None:
        self._memory, self.address, self.gpu_nbytes = memory, memory.address, gpu_nbytes
        self._last: tuple[CudaStream, CudaEvent] | None = None  # what uses it last, and when that has ended

    @property
    def room(self) -> int:
        """Bytes that can be addressed."""
        return self._memory.nbytes

    @property
    def ordinal(self) -> int:
        """The number of its GPU."""
        return self._memory.context.ordinal

    def await_on(self, stream: CudaStream) -> None:
        """Make what follows on the stream wait for all that uses the buffer so far on others. Raise CudaFailed."""
        if self._last and self._last[0] is not stream:
            stream.wait(self._last[1])

    def note_use(self, stream: CudaStream, end: CudaEvent) -> None:
        """Work on the stream, until this event, uses it."""
        self._last = stream, end

    def settle(self) -> None:
        """Wait for all that uses it so far. Raise CudaFailed."""
        if self._last:
            self._last[1].synchronize()

    def copy_from(self, source: NDArray[np.uint8], offset: int = 0) -> None:
        """Copy as `DriverBuffer.copy_from` does, from byte `offset` on."""
        self.settle()
        self._memory.context.copy_in(self.address + offset, source.ctypes.data, source.nbytes)

    def copy_to(self, target: NDArray[np.uint8]) -> None:
        self.settle()
        self._memory.context.copy_out(target.ctypes.data, self.address, target.nbytes)

    def copy_across(self, source: DriverBuffer) -> bool:
        """Copy it on the GPU."""
        if not isinstance(source, GpuBuffer):
            return False
        self.settle()
        source.settle()
        with self._memory.context.stream() as stream:
            stream.copy_across(self.address, source.address, min(self._memory.nbytes, source._memory.nbytes))
            stream.synchronize()
        return True

    def close(self) -> None:
        self._memory.close()


class GpuMemory:
    """Where buffers of clients get memory of one GPU from. Any thread."""

    def __init__(self, context: CudaContext) -> None:
        self._context, self._fields = context, uuid_fields(context.uuid)

    def allocate(self, request: BufferRequest) -> GpuBuffer:
        """Return a buffer of zeros, so that no client reads what another one has left. Raise StatusError."""
        context, nbytes = self._context, max(1, request.nbytes)
        try:
            memory = context.allocate(nbytes)
            try:
                with context.stream() as stream:
                    stream.fill(memory.address, 0, nbytes)
                    stream.synchronize()
            except CudaFailed:
                memory.close()
                raise
        except CudaFailed as error:
            self._refuse(error, nbytes)
        return GpuBuffer(memory, nbytes)

    def map_memory(self, handle: MemoryHandle) -> GpuBuffer:
        """Memory that a client has exported. Raise ValueError for a wrong description, GeneralFailure for memory that
        this GPU cannot map, StatusError.
        """
        if len(handle.fields) != len(self._fields):
            raise ValueError(f"fields={handle.fields}: the {len(self._fields)} numbers of the GPU's UUID")
        if handle.fields != self._fields:
            raise GeneralFailure(
                f"fields={handle.fields}: the memory is of another GPU; this device runs on {self._said()}"
            )
        granule = self._context.granule
        if handle.nbytes % granule:
            raise ValueError(f"nbytes={handle.nbytes}: memory that CUDA exports is a multiple of {granule} bytes")
        try:
            with self._context.imported(handle.fd, handle.nbytes) as shared:
                return GpuBuffer(shared.map(), 0)
        except CudaOutOfMemory as error:
            self._refuse(error, handle.nbytes)
        except CudaFailed as error:
            if error.is_lost:
                self._refuse(error, handle.nbytes)
            raise GeneralFailure(f"CUDA does not map it: {error}") from error

    def _said(self) -> str:
        return f"{self._context.name}, {self._context.uuid}"

    def _refuse(self, error: CudaFailed, nbytes: int) -> NoReturn:
        """Raise the error that the client gets."""
        if error.is_lost:
            raise DeviceUnavailable(f"the GPU is lost: {error}") from error
        if isinstance(error, CudaOutOfMemory):
            free, total = self._context.memory_info()
            words = f"the GPU has {free} of {total} bytes free, and {nbytes} are asked for"
            raise ResourceExhaustedTransient(f"{words}; release buffers, or close other programs on the GPU") from error
        raise GeneralFailure(str(error)) from error


def uuid_fields(uuid: str) -> tuple[int, int]:
    """Return the UUID of a GPU, "GPU-…", as the two fields of a `CUDA_FD`."""
    high, low = struct.unpack(">qq", bytes.fromhex(uuid.removeprefix("GPU-").replace("-", "")))
    return high, low
