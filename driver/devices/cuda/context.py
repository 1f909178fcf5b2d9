"""What the CUDA driver makes: the context, memory, streams, events, kernels.

A process has one context for each GPU, which CUDA calls primary: ONNX Runtime's is the same one, so pointers and
streams of one can be used by the other. Objects are closed by their owner, or by Python when nothing refers to them:
in any thread, between any two steps, so what frees them takes no lock, not even one of cffi's, and leaves its errors to
the next call, which logs them. After CudaFailed with `is_lost` nothing here can be used any more.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from driver.devices.cuda.driver_api import LOST, CudaFailed, CudaMissing, cuda_library, ffi, text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from driver.devices.cuda.driver_api import CudaLibrary

_log = logging.getLogger(__name__)
_CONTEXT = ffi.typeof("CUcontext *")  # looked up now: cffi does so under a lock
_FORKS = list[None]()  # one for each fork from which this process has come
os.register_at_fork(after_in_child=lambda: _FORKS.append(None))
_NOT_INITIALIZED = 3
_MOST_UNTOLD = 64  # errors of what was freed, until they are logged
_PORTABLE, _READ_ONLY = 1, 8  # of cuMemHostRegister
_NON_BLOCKING = 1  # of streams: they do not wait for the default stream
_SLEEPS, _NO_TIMING = 1, 2  # of events; a thread that waits for one does not poll
_BLOCKING_SYNC = 4  # of contexts: a thread that waits for the GPU sleeps
_CAN_REGISTER_READ_ONLY, _ASYNC_ENGINES, _MAJOR, _MINOR = 113, 40, 75, 76  # attributes
_PINNED_ON_DEVICE, _ON_DEVICE, _POSIX_FD, _READ_WRITE = 1, 1, 1, 3  # of the virtual memory management


class Owned:
    """Something that the driver made, and frees once."""

    def __init__(self, free: Any, *arguments: Any) -> None:
        self._free = weakref.finalize(self, free, *arguments)
        self._free.atexit = False  # the process's end frees all, and the context may be gone before

    @property
    def is_open(self) -> bool:
        """True if it was not closed."""
        return self._free.alive

    def close(self) -> None:
        """Free it. Nothing on the GPU may use it any more. A second call does nothing."""
        self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DeviceMemory(Owned):
    """Memory of the GPU. `address` is for the GPU alone: the CPU must not touch it."""

    def __init__(self, context: CudaContext, address: int, nbytes: int, free: Any, *arguments: Any) -> None:
        super().__init__(free, *arguments)
        self.context, self.address, self.nbytes = context, address, nbytes


class PinnedMemory(Owned):
    """Memory of the CPU from which the GPU copies by itself."""

    def __init__(self, address: int, nbytes: int, free: Any, *arguments: Any) -> None:
        super().__init__(free, *arguments)
        self.address, self.nbytes = address, nbytes

    def view(self) -> memoryview:
        """Return its bytes, valid while it is open."""
        return memoryview(ffi.buffer(ffi.cast("char *", self.address), self.nbytes))


class Registration(Owned):
    """A range of this process's memory that is pinned while this is open."""

    def __init__(self, address: int, nbytes: int, free: Any, *arguments: Any) -> None:
        super().__init__(free, *arguments)
        self.address, self.nbytes = address, nbytes


class SharedAllocation(Owned):
    """Memory of the GPU that other processes can map, by a descriptor. It lives until the last of them lets it go."""

    def __init__(self, context: CudaContext, handle: int, nbytes: int) -> None:
        super().__init__(context.call_quietly, "cuMemRelease", handle)
        self._context, self._handle, self.nbytes = context, handle, nbytes

    def export(self) -> int:
        """Return a new descriptor, which the caller closes. Raise CudaFailed."""
        fd = ffi.new("int *")
        self._context.call("cuMemExportToShareableHandle", fd, self._handle, _POSIX_FD, 0)
        return int(fd[0])

    def map(self) -> DeviceMemory:
        """Return the memory, at an address of this process's GPU. It outlives this object. Raise CudaFailed."""
        context, nbytes = self._context, self.nbytes
        address = ffi.new("CUdeviceptr *")
        context.call("cuMemAddressReserve", address, nbytes, 0, 0, 0)
        at = int(address[0])
        try:
            context.call("cuMemMap", at, nbytes, 0, self._handle, 0)
        except CudaFailed:
            context.call_quietly("cuMemAddressFree", at, nbytes)
            raise
        found = DeviceMemory(context, at, nbytes, _unmap, context, at, nbytes)
        access = ffi.new("CUmemAccessDesc *", {"location": context.location, "flags": _READ_WRITE})
        try:
            context.call("cuMemSetAccess", at, nbytes, access, 1)
        except CudaFailed:
            found.close()
            raise
        return found


def _unmap(context: CudaContext, address: int, nbytes: int) -> None:
    context.call_quietly("cuMemUnmap", address, nbytes)
    context.call_quietly("cuMemAddressFree", address, nbytes)


class CudaEvent(Owned):
    """A point in the work of a stream."""

    def __init__(self, context: CudaContext, handle: Any) -> None:
        super().__init__(context.call_quietly, "cuEventDestroy_v2", handle)
        self.context, self.handle = context, handle

    def is_done(self) -> bool:
        """Return True if the GPU has come to it. Raise CudaFailed."""
        return self.context.asked("cuEventQuery", self.handle)

    def synchronize(self) -> None:
        """Wait for it, without the GIL. Raise CudaFailed."""
        self.context.call("cuEventSynchronize", self.handle)

    def seconds_since(self, earlier: CudaEvent) -> float:
        """Return the seconds between two events made with `is_timed`. Raise CudaFailed."""
        found = ffi.new("float *")
        self.context.call("cuEventElapsedTime", found, earlier.handle, self.handle)
        return float(found[0]) / 1e3


class CudaKernel:
    """A function of a loaded module."""

    def __init__(self, module: Owned, handle: Any) -> None:
        self._module, self.handle = module, handle


class CudaStream(Owned):
    """Work for the GPU, done in order. One thread at a time adds to it."""

    def __init__(self, context: CudaContext, handle: Any) -> None:
        super().__init__(context.call_quietly, "cuStreamDestroy_v2", handle)
        self.context, self.handle = context, handle

    @property
    def address(self) -> int:
        """The address of CUDA's own object, for other libraries in this process."""
        return int(ffi.cast("uintptr_t", self.handle))

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        """Copy from the CPU's memory to the GPU's. Only pinned memory is copied without this thread. Raise
        CudaFailed.
        """
        self.context.call("cuMemcpyHtoDAsync_v2", target, ffi.cast("void *", source), nbytes, self.handle)

    def copy_out(self, target: int, source: int, nbytes: int) -> None:
        """Copy from the GPU's memory to the CPU's. As `copy_in`."""
        self.context.call("cuMemcpyDtoHAsync_v2", ffi.cast("void *", target), source, nbytes, self.handle)

    def copy_across(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the GPU's memory. Raise CudaFailed."""
        self.context.call("cuMemcpyDtoDAsync_v2", target, source, nbytes, self.handle)

    def fill(self, target: int, value: int, nbytes: int) -> None:
        """Set bytes of the GPU's memory. Raise CudaFailed."""
        self.context.call("cuMemsetD8Async", target, value, nbytes, self.handle)

    def host_function(self, function: int, argument: int) -> None:
        """Have a thread of CUDA's call `void function(void *argument)` when the work before it is done.

        The function must not call CUDA, and not wait for Python. CUDA does not call it when the context is lost.
        Raise CudaFailed.
        """
        cast = ffi.cast
        self.context.call("cuLaunchHostFunc", self.handle, cast("CUhostFn *", function), cast("void *", argument))

    def launch(self, kernel: CudaKernel, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any]) -> None:
        """Run a kernel. `arguments`: cffi pointers to the values, of the types that it takes. Raise CudaFailed."""
        pointers = ffi.new("void *[]", [ffi.cast("void *", argument) for argument in arguments])
        sizes = (*grid, 1, 1)[:3] + (*block, 1, 1)[:3]
        self.context.call("cuLaunchKernel", kernel.handle, *sizes, 0, self.handle, pointers, ffi.NULL)

    def record(self, event: CudaEvent | None = None) -> CudaEvent:
        """Record an event that comes after the work so far, and return it; None: a new one. Raise CudaFailed."""
        found = self.context.event() if event is None else event
        self.context.call("cuEventRecord", found.handle, self.handle)
        return found

    def wait(self, event: CudaEvent) -> None:
        """Make the work that follows wait for the event, which may be another stream's. Raise CudaFailed."""
        self.context.call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def is_done(self) -> bool:
        """Return True if all work is done. Raise CudaFailed: this is how a lost context is noticed."""
        return self.context.asked("cuStreamQuery", self.handle)

    def synchronize(self) -> None:
        """Wait for all work, without the GIL. Raise CudaFailed."""
        self.context.call("cuStreamSynchronize", self.handle)


class _ThreadState(threading.local):
    """The known state of a thread's current context."""

    is_at_home = False  #: it is this one, and stays so
    current: Any = None  #: where CUDA writes which one it is


class CudaContext:
    """The primary context of a GPU in this process. Any thread. `cuda_context` returns it.

    A thread's current context is as it was after each call: it may be that of another GPU, or of a library that the
    program uses.
    """

    is_at_home = False
    """Whether threads that have no context keep this one, and are not asked again, which saves time: the process is an
    engine on this GPU, in which no library leaves another one.
    """

    def __init__(self, library: CudaLibrary, ordinal: int) -> None:
        """Make the context of GPU number `ordinal`. Raise CudaFailed, CudaMissing."""
        self._library, self.ordinal, self._thread = library, ordinal, _ThreadState()
        self.on_lost: Callable[[str], object] = lambda _: None  #: called, with the reason, by whatever finds it lost
        self._forks, self._unfreed = len(_FORKS), deque[tuple[str, tuple[Any, ...], int]](maxlen=_MOST_UNTOLD)
        if not 0 <= ordinal < library.devices:
            raise CudaMissing(f"device={ordinal}: CUDA finds {library.devices} GPUs, numbered from 0")
        number, context = ffi.new("CUdevice *"), ffi.new("CUcontext *")
        library.check(library.lib.cuDeviceGet(number, ordinal), f"cuDeviceGet({ordinal})")
        self.device = int(number[0])
        library.lib.cuDevicePrimaryCtxSetFlags_v2(self.device, _BLOCKING_SYNC)  # refused where it is active: no matter
        retained = library.lib.cuDevicePrimaryCtxRetain(context, self.device)
        library.check(retained, f"cuDevicePrimaryCtxRetain(device {ordinal})")
        self._handle = context[0]
        self.location = {"type": _ON_DEVICE, "id": self.device}

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library, with this context current in this thread. Raise CudaFailed."""
        if self._unfreed:
            self._tell_unfreed()
        if code := self._called(name, arguments):
            raise self._failure(name, arguments, code)

    def asked(self, name: str, *arguments: Any) -> bool:
        """Call a query, and return True if what it asks about is done."""
        code = self._called(name, arguments)
        if code and not self._library.is_not_ready(code):
            raise self._failure(name, arguments, code)
        return not code

    def call_quietly(self, name: str, *arguments: Any) -> None:
        """Call for what is freed and not awaited: the next call logs an error, unless the context is lost."""
        if (code := self._called(name, arguments)) and code not in LOST:
            self._unfreed.append((name, arguments, code))

    def _failure(self, name: str, arguments: tuple[Any, ...], code: int) -> CudaFailed:
        error = self._library.failure(code, _worded(name, arguments))
        if error.is_lost:
            self.on_lost(str(error))
        return error

    def _tell_unfreed(self) -> None:
        while self._unfreed:
            name, arguments, code = self._unfreed.popleft()
            error = self._library.failure(code, _worded(name, arguments))
            _log.warning("what is freed may stay until this process ends: %s", error)

    def _called(self, name: str, arguments: tuple[Any, ...]) -> int:
        if _FORKS and self._forks != len(_FORKS):
            return _NOT_INITIALIZED  # as CUDA says of a process that was forked
        function = getattr(self._library.lib, name)
        if self._thread.is_at_home:
            return int(function(*arguments))
        return self._elsewhere(function, arguments)

    def _elsewhere(self, function: Any, arguments: tuple[Any, ...]) -> int:
        """Call in a thread of which it is not known what its current context is."""
        lib = self._library.lib
        here = self._thread.current
        if here is None:
            here = self._thread.current = ffi.new(_CONTEXT)
        if code := int(lib.cuCtxGetCurrent(here)):
            return code
        if here[0] == self._handle:
            return int(function(*arguments))
        if self.is_at_home and not here[0]:
            code = int(lib.cuCtxSetCurrent(self._handle))
            self._thread.is_at_home = not code
            return code or int(function(*arguments))
        if code := int(lib.cuCtxPushCurrent_v2(self._handle)):
            return code
        try:
            return int(function(*arguments))
        finally:
            lib.cuCtxPopCurrent_v2(here)

    # -- what the GPU is

    @property
    def name(self) -> str:
        """The GPU's, as NVIDIA calls it."""
        found = ffi.new("char[]", 256)
        self.call("cuDeviceGetName", found, 256, self.device)
        return text(found)

    @property
    def uuid(self) -> str:
        """The GPU's number as nvidia-smi and NVML write it: GPU-…"""
        found = ffi.new("CUuuid *")
        self.call("cuDeviceGetUuid_v2", found, self.device)
        digits = bytes(ffi.buffer(found)).hex()
        return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    @property
    def capability(self) -> tuple[int, int]:
        """Its compute capability."""
        return self._attribute(_MAJOR), self._attribute(_MINOR)

    @property
    def copy_engines(self) -> int:
        """2: copies in and copies out run beside kernels and each other."""
        return self._attribute(_ASYNC_ENGINES)

    @property
    def registers_read_only(self) -> bool:
        """True if memory that this process may only read can be pinned."""
        return bool(self._attribute(_CAN_REGISTER_READ_ONLY))

    def _attribute(self, number: int) -> int:
        found = ffi.new("int *")
        self.call("cuDeviceGetAttribute", found, number, self.device)
        return int(found[0])

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the GPU. Raise CudaFailed."""
        free, total = ffi.new("size_t *"), ffi.new("size_t *")
        self.call("cuMemGetInfo_v2", free, total)
        return int(free[0]), int(total[0])

    # -- memory

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Memory of the GPU. Raise CudaOutOfMemory, CudaFailed."""
        address = ffi.new("CUdeviceptr *")
        self.call("cuMemAlloc_v2", address, nbytes)
        at = int(address[0])
        return DeviceMemory(self, at, nbytes, self.call_quietly, "cuMemFree_v2", at)

    def pinned(self, nbytes: int) -> PinnedMemory:
        """Pinned memory of the CPU. Raise CudaOutOfMemory, CudaFailed."""
        address = ffi.new("void **")
        self.call("cuMemHostAlloc", address, nbytes, _PORTABLE)
        at = int(ffi.cast("uintptr_t", address[0]))
        return PinnedMemory(at, nbytes, self.call_quietly, "cuMemFreeHost", address[0])

    def register(self, address: int, nbytes: int, *, is_read_only: bool = False) -> Registration:
        """Pin memory that this process has mapped. Close the result before it is unmapped.

        `is_read_only`: the mapping is. Raise CudaOutOfMemory, CudaFailed.
        """
        flags = _PORTABLE | (_READ_ONLY if is_read_only else 0)
        pointer = ffi.cast("void *", address)
        self.call("cuMemHostRegister_v2", pointer, nbytes, flags)
        return Registration(address, nbytes, self.call_quietly, "cuMemHostUnregister", pointer)

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        """Copy from the CPU's memory to the GPU's; waits for it. Raise CudaFailed."""
        self.call("cuMemcpyHtoD_v2", target, ffi.cast("void *", source), nbytes)

    def copy_out(self, target: int, source: int, nbytes: int) -> None:
        """Copy from the GPU's memory to the CPU's; waits for it. Raise CudaFailed."""
        self.call("cuMemcpyDtoH_v2", ffi.cast("void *", target), source, nbytes)

    # -- memory between processes

    def shareable(self, nbytes: int) -> SharedAllocation:
        """Return new memory that can be exported, of that size or up to a granule more. Raise CudaOutOfMemory,
        CudaFailed.
        """
        granule = self.granule
        rounded = -(-nbytes // granule) * granule
        handle = ffi.new("CUmemHandle *")
        self.call("cuMemCreate", handle, rounded, self._shareable_properties(), 0)
        return SharedAllocation(self, int(handle[0]), rounded)

    def imported(self, fd: int, nbytes: int) -> SharedAllocation:
        """Return what another process has exported: `nbytes` as its object has them. The descriptor stays the caller's.

        Raise CudaFailed.
        """
        handle = ffi.new("CUmemHandle *")
        self.call("cuMemImportFromShareableHandle", handle, ffi.cast("void *", fd), _POSIX_FD)
        return SharedAllocation(self, int(handle[0]), nbytes)

    @property
    def granule(self) -> int:
        """The number of bytes of which the sizes of shareable memory are multiples. Raises CudaFailed."""
        found = ffi.new("size_t *")
        self.call("cuMemGetAllocationGranularity", found, self._shareable_properties(), 0)
        return int(found[0])

    def _shareable_properties(self) -> Any:
        fields = {"type": _PINNED_ON_DEVICE, "requestedHandleTypes": _POSIX_FD, "location": self.location}
        return ffi.new("CUmemAllocationProp *", fields)

    # -- work

    def stream(self, priority: int = 0) -> CudaStream:
        """Return a new stream; lower numbers are more urgent, and CUDA clamps them. Raise CudaFailed."""
        made = ffi.new("CUstream *")
        self.call("cuStreamCreateWithPriority", made, _NON_BLOCKING, priority)
        return CudaStream(self, made[0])

    def event(self, *, is_timed: bool = False) -> CudaEvent:
        """Return a new one, which counts as done until a stream records it. Raise CudaFailed.

        `is_timed`: it has a time, and threads that wait for it poll.
        """
        made = ffi.new("CUevent *")
        self.call("cuEventCreate", made, 0 if is_timed else _NO_TIMING | _SLEEPS)
        return CudaEvent(self, made[0])

    def kernel(self, image: bytes, name: str) -> CudaKernel:
        """Return a function of a module in PTX, which the driver compiles for this GPU, or a cubin. Raises
        CudaFailed.
        """
        made, found = ffi.new("CUmodule *"), ffi.new("CUfunction *")
        self.call("cuModuleLoadData", made, ffi.from_buffer(image + b"\0"))
        module = Owned(self.call_quietly, "cuModuleUnload", made[0])
        self.call("cuModuleGetFunction", found, made[0], name.encode())
        return CudaKernel(module, found[0])

    def synchronize(self) -> None:
        """Wait for everything. Raise CudaFailed: this is how a lost context is noticed."""
        self.call("cuCtxSynchronize")


def _worded(name: str, arguments: tuple[Any, ...]) -> str:
    """Return the call, with the numbers that it was given."""
    numbers = ", ".join(str(argument) for argument in arguments if isinstance(argument, int))
    return f"{name.partition('_v')[0]}({numbers})"


@cache
def cuda_context(ordinal: int = 0) -> CudaContext:
    """Return the one of this process for that GPU. Raise CudaMissing, CudaFailed."""
    return CudaContext(cuda_library(), ordinal)
