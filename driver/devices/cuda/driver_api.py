"""The functions of libcuda.so.1 that Burst uses, and what their error codes mean.

The library comes with NVIDIA's kernel driver. It is loaded when it is first needed, never at import, and nothing is
needed to build Burst for it. `~/.config/burst/cuda.toml` may say where it lies::

    library = "/usr/lib/wsl/lib/libcuda.so.1"

::

    CudaMissing      (LibraryMissing)   there is no such library, it is too old, or it finds no GPU
    CudaFailed       (LibraryFailed)    a call failed; `code`, `name` and `call` say which, and how
    +-- CudaOutOfMemory (MemoryError)   memory of the GPU, or memory to pin, has run out
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from cffi import FFI

from driver.devices.lowering.errors import LibraryFailed, LibraryMissing
from driver.devices.nvidia import LIBRARY, configuration, library_path

ffi = FFI()
ffi.cdef("""
typedef int CUresult; typedef int CUdevice; typedef uint64_t CUdeviceptr;
typedef struct CUctx *CUcontext; typedef struct CUmod *CUmodule; typedef struct CUfunc *CUfunction;
typedef struct CUstr *CUstream; typedef struct CUev *CUevent; typedef uint64_t CUmemHandle;
typedef struct { char bytes[16]; } CUuuid;
typedef struct { int type; int id; } CUmemLocation;
typedef struct {
    int type; int requestedHandleTypes; CUmemLocation location; void *win32HandleMetaData;
    struct { unsigned char compressionType, gpuDirectRDMACapable; unsigned short usage; unsigned char reserved[4]; }
        allocFlags;
} CUmemAllocationProp;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
typedef void CUhostFn(void *);

CUresult cuInit(unsigned flags);
CUresult cuDriverGetVersion(int *version);
CUresult cuGetErrorName(CUresult code, const char **name);
CUresult cuGetErrorString(CUresult code, const char **text);
CUresult cuDeviceGetCount(int *count);
CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuDeviceGetName(char *name, int room, CUdevice device);
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device);
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device);
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxGetCurrent(CUcontext *context);
CUresult cuCtxPushCurrent_v2(CUcontext context);
CUresult cuCtxPopCurrent_v2(CUcontext *context);
CUresult cuCtxSynchronize(void);

CUresult cuMemGetInfo_v2(size_t *free, size_t *total);
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr address);
CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags);
CUresult cuMemFreeHost(void *address);
CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags);
CUresult cuMemHostUnregister(void *address);
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes);
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream);
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream);

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority);
CUresult cuStreamDestroy_v2(CUstream stream);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuStreamQuery(CUstream stream);
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn *function, void *argument);
CUresult cuEventCreate(CUevent *event, unsigned flags);
CUresult cuEventDestroy_v2(CUevent event);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuEventQuery(CUevent event);
CUresult cuEventSynchronize(CUevent event);
CUresult cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to);

CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleUnload(CUmodule module);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared_bytes, CUstream stream, void **arguments, void **extra);

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop, int option);
CUresult cuMemCreate(CUmemHandle *handle, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags);
CUresult cuMemRelease(CUmemHandle handle);
CUresult cuMemExportToShareableHandle(void *exported, CUmemHandle handle, int type, unsigned long long flags);
CUresult cuMemImportFromShareableHandle(CUmemHandle *handle, void *exported, int type);
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags);
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes);
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemHandle handle, unsigned long long flags);
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes);
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count);
""")

OLDEST = 11040
"""Of cuDriverGetVersion: 11.4."""

_OUT_OF_MEMORY, _NOT_READY, _UNKNOWN = 2, 600, 999
_REMEDIES = {
    2: "free memory of the GPU, or use fewer or smaller models and pools",
    3: 'a process that was forked cannot use the CUDA of its parent: start it by "spawn"; or the driver was updated',
    46: "the GPU is in exclusive use by another process (nvidia-smi -c DEFAULT)",
    100: "nvidia-smi must list a GPU, and this account needs read and write access to /dev/nvidia*",
    222: "install a newer NVIDIA driver",
    801: "this GPU or its driver cannot do it",
    802: "wait until the driver has initialised the GPU (nvidia-smi, fabric manager)",
    803: "the library and the kernel's driver differ in version; restart the machine after the update",
    999: "the kernel's log may say more (dmesg | grep -i -e nvrm -e xid)",
}
LOST = frozenset({4, 214, 220, 226, 700, 702, 710, *range(714, 720), 721, 999})
"""Codes after which a context cannot be used any more, or which say that the GPU is gone."""
_LOST_REMEDY = "the context is lost: the engine has to start again; the kernel's log may say more (dmesg | grep -i xid)"


class CudaMissing(LibraryMissing):
    """There is no libcuda.so.1, it is older than Burst needs, or it finds no GPU. Nothing was made."""


class CudaFailed(LibraryFailed):
    """A call of the CUDA driver failed. What it was to make was not made."""

    def __init__(self, code: int, name: str, call: str, text: str = "") -> None:
        """`name`: NVIDIA's, such as CUDA_ERROR_INVALID_VALUE. `call`: what was called, and with what."""
        remedy = _REMEDIES.get(code) or (_LOST_REMEDY if code in LOST else "")
        super().__init__(f"{call}: {name} ({code}{f', {text}' if text else ''}){f'; {remedy}' if remedy else ''}")
        self.code, self.name, self.call, self.status = code, name, call, code

    @property
    def is_lost(self) -> bool:
        """True if the context is unusable from now on, in all threads: only a new process helps."""
        return self.code in LOST


class CudaOutOfMemory(CudaFailed, MemoryError):
    """Memory of the GPU, or memory that can be pinned, has run out. Clients get RESOURCE_EXHAUSTED_TRANSIENT."""


def text(pointer: Any) -> str:
    """Return a C string."""
    return cast("bytes", ffi.string(pointer)).decode(errors="replace")


class CudaLibrary:
    """The loaded library. Any thread may call it."""

    def __init__(self, path: str) -> None:
        """Load CUDA's library. Raise CudaMissing."""
        try:
            self.lib = cast("Any", ffi.dlopen(path))
        except OSError as error:
            raise CudaMissing(
                f"CUDA needs {path}, which cannot be loaded ({error}); it comes with NVIDIA's driver "
                f"(nvidia-driver, or the container's --gpus option); {configuration()} may say where it lies: "
                f'library = "/path/to/{LIBRARY}"'
            ) from error
        for name in dir(self.lib):  # now: cffi does so under a lock, and what is freed meanwhile calls these
            getattr(self.lib, name, None)
        number = ffi.new("int *")
        try:
            self.check(self.lib.cuDriverGetVersion(number), "cuDriverGetVersion()")
            self.version = int(number[0])
            if self.version < OLDEST:
                raise CudaMissing(f"{path} is of CUDA {_dotted(self.version)}; Burst needs {_dotted(OLDEST)} or later")
            self.check(self.lib.cuInit(0), "cuInit()")
            self.check(self.lib.cuDeviceGetCount(number), "cuDeviceGetCount()")
        except CudaFailed as error:
            raise CudaMissing(f"{path} finds no GPU: {error}") from error
        self.devices = int(number[0])

    def check(self, code: int, call: str) -> None:
        """Raise CudaOutOfMemory, CudaFailed, unless a call has succeeded."""
        if code:
            raise self.failure(code, call)

    def is_not_ready(self, code: int) -> bool:
        """Return True if a query says "not yet"."""
        return code == _NOT_READY

    def failure(self, code: int, call: str) -> CudaFailed:
        """Return the error of a call that has returned this code."""
        kind = CudaOutOfMemory if code == _OUT_OF_MEMORY else CudaFailed
        name, words = (self._said(about, code) for about in (self.lib.cuGetErrorName, self.lib.cuGetErrorString))
        return kind(code, name or "unknown error", call, words)

    def _said(self, about: Any, code: int) -> str:
        found = ffi.new("const char **")
        if about(code, found) or found[0] == ffi.NULL:
            return ""
        return text(found[0])


@cache
def cuda_library() -> CudaLibrary:
    """Return the one of this process. Raise CudaMissing, ValueError for a wrong option."""
    return CudaLibrary(library_path())


def missing_cuda() -> str | None:
    """Return why there is no CUDA on this machine, in words; None: there is. It loads the library."""
    try:
        found = cuda_library()
    except (CudaMissing, ValueError) as error:
        return str(error)
    return None if found.devices else f"{library_path()} finds no GPU; {_REMEDIES[100]}"


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
