"""Memory pools of a client in memory of a GPU: what a request names so that its inputs and outputs never leave the GPU.

The pool is the client's: it is allocated in its process, and exported as a descriptor (CUDA's virtual memory
management), which the device maps when a request first names it. So it ends as every pool does: a client that drops it,
or dies, takes it away from the device, and the death of the device leaves the client its values.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from burst import ResourceExhaustedPersistent
from burst.memory import VendorMemory
from driver.devices.cuda.context import cuda_context
from driver.devices.cuda.device_buffers import CUDA_FD, uuid_fields
from driver.devices.cuda.driver_api import CudaOutOfMemory
from driver.devices.cuda.gpu_tensor import CUDA, GpuTensor, borrowed

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from driver.devices.cuda.context import CudaContext, SharedAllocation


class GpuPool(VendorMemory):
    """A pool in memory of a GPU, for requests to devices on that GPU. Made by `allocate`.

    It has no array: `tensor` gives its memory to libraries for GPUs, and `copy_from` and `copy_to` move values. The
    device does not wait for a client's streams: synchronise them before a request reads what they write.
    """

    def __init__(self, context: CudaContext, shared: SharedAllocation) -> None:
        """Map memory of the GPU, and describe it. Raise CudaFailed."""
        self._context, self._mapped = context, shared.map()
        super().__init__(shared.export(), CUDA_FD, shared.nbytes, uuid_fields(context.uuid))

    @classmethod
    def allocate(cls, nbytes: int, device: int = 0) -> Self:
        """Return new memory of zeros on GPU number `device`: of that size, or more, as CUDA rounds it up (to 2 MB
        mostly).

        Raise CudaMissing without a GPU, CudaFailed, ResourceExhaustedPersistent for more memory than the GPU has left.
        """
        if nbytes < 1:
            raise ValueError(f"nbytes={nbytes}: a pool has at least one byte")
        context = cuda_context(device)
        try:
            with context.shareable(nbytes) as shared:
                found = cls(context, shared)
        except CudaOutOfMemory as error:
            free, total = context.memory_info()
            words = f"nbytes={nbytes}: the GPU has {free} of {total} bytes free; close other programs on it"
            raise ResourceExhaustedPersistent(words) from error
        with context.stream() as stream:
            stream.fill(found.address, 0, found.nbytes)
            stream.synchronize()
        return found

    @property
    def address(self) -> int:
        """The address of its first byte, for the GPU alone."""
        return self._mapped.address

    def tensor(self, dtype: DTypeLike = np.uint8, shape: int | tuple[int, ...] | None = None, offset: int = 0) -> Any:
        """`shape` elements from byte `offset` on, for `torch.from_dlpack` and its kind; None: all that fit."""
        itemsize = max(1, np.dtype(dtype).itemsize)
        if not 0 <= offset <= self.nbytes or offset % itemsize:
            raise ValueError(f"offset={offset}: within {self.nbytes} bytes, and a multiple of {itemsize}")
        dims = (self.nbytes - offset) // itemsize if shape is None else shape
        dims = dims if isinstance(dims, tuple) else (dims,)
        if any(dim < 0 for dim in dims):
            raise ValueError(f"shape={shape}: give the number of elements along each axis, from 0 on")
        self._check(math.prod(dims) * itemsize, offset)
        return GpuTensor(self, self.address + offset, dtype, dims, device=self._place)

    def copy_from(self, source: Any, offset: int = 0) -> None:
        """Copy an array, or a tensor on this GPU (by DLPack), to byte `offset`, and wait until it is there.

        Raise ValueError for what does not fit or lies on another device, CudaFailed.
        """
        if hasattr(source, "__dlpack_device__") and int(source.__dlpack_device__()[0]) == CUDA:
            with self._context.stream() as stream, borrowed(source, self._place, stream.address) as found:
                self._check(found.nbytes, offset)
                stream.copy_across(self.address + offset, found.address, found.nbytes)
                stream.synchronize()
            return
        array = np.ascontiguousarray(source)
        self._check(array.nbytes, offset)
        if array.nbytes:
            self._context.copy_in(self.address + offset, array.ctypes.data, array.nbytes)

    def copy_to(self, target: NDArray[Any], offset: int = 0) -> None:
        """Copy the bytes from `offset` on to a whole contiguous array. Raise ValueError, CudaFailed."""
        if not (target.flags.c_contiguous and target.flags.writeable):
            raise ValueError("target: an array that can be written, without gaps")
        self._check(target.nbytes, offset)
        if target.nbytes:
            self._context.copy_out(target.ctypes.data, self.address + offset, target.nbytes)

    @property
    def _place(self) -> tuple[int, int]:
        return CUDA, self._context.ordinal

    def _check(self, nbytes: int, offset: int) -> None:
        if not 0 <= offset <= self.nbytes - nbytes:
            raise ValueError(f"{nbytes} bytes at offset {offset} do not fit into the pool's {self.nbytes}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the state for `multiprocessing`, between one's own processes: the other one maps the same memory."""
        from multiprocessing import reduction

        return _unpickled, (reduction.DupFd(self.fd), self.nbytes, self._context.ordinal)


def _unpickled(carried: Any, nbytes: int, device: int) -> GpuPool:
    fd, context = carried.detach(), cuda_context(device)
    try:
        with context.imported(fd, nbytes) as shared:
            return GpuPool(context, shared)
    finally:
        os.close(fd)
