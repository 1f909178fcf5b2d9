/* A CUDA without a GPU, for the host part of examples/device-cuda: "memory of the GPU" is the CPU's, work is done when it is
 * added, and the two kernels are loops. Pools are the memfds that tests' libcuda.so.1 exports.
 */
#define _GNU_SOURCE
#include "cuda.h"
#include "kernels.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

const char *cudaGetErrorString(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "told by the stub"; }
cudaError_t cudaSetDevice(int device) { return device ? cudaErrorLaunchFailure : cudaSuccess; }

cudaError_t cudaMalloc(void **memory, size_t bytes) {
    *memory = bytes < (size_t)1 << 40 ? malloc(bytes) : NULL;
    return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void *memory) { return free(memory), cudaSuccess; }
cudaError_t cudaMemset(void *memory, int value, size_t bytes) { return memset(memory, value, bytes), cudaSuccess; }

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    return (void)kind, memcpy(to, from, bytes), cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return (void)stream, cudaMemcpy(to, from, bytes, kind);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    *stream = malloc(1);
    return flags == cudaStreamNonBlocking ? cudaSuccess : cudaErrorLaunchFailure;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) { return free(stream), cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return stream ? cudaSuccess : cudaErrorLaunchFailure; }

/* ---- the kernels --------------------------------------------------------------------------------------------------- */

cudaError_t launch_add(const float *a, const float *b, float *sum, unsigned n, cudaStream_t stream) {
    for (unsigned i = 0; i < n; i++) sum[i] = a[i] + b[i];
    return cudaStreamSynchronize(stream);
}

cudaError_t launch_gemm(const float *a, const float *weights, const float *bias, float *product, unsigned m, unsigned n,
                        unsigned k, cudaStream_t stream) {
    for (size_t row = 0; row < m; row++)
        for (size_t column = 0; column < n; column++) {
            float sum = bias[column];
            for (size_t i = 0; i < k; i++) sum += a[row * k + i] * weights[column * k + i];
            product[row * n + column] = sum;
        }
    return cudaStreamSynchronize(stream);
}

/* ---- the driver API ------------------------------------------------------------------------------------------------ */

CUresult cuInit(unsigned flags) { return (void)flags, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) { return memset(uuid->bytes, 0xA0 + device, 16), CUDA_SUCCESS; }

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *exported, CUmemAllocationHandleType type) {
    int fd = fcntl((int)(intptr_t)exported, F_DUPFD_CLOEXEC, 0);
    *handle = (CUmemGenericAllocationHandle)fd;
    return fd < 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return close((int)handle) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult cuMemAddressReserve(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
    (void)alignment, (void)wanted, (void)flags;
    void *found = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *at = (CUdeviceptr)(uintptr_t)found;
    return found == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
    return munmap((void *)(uintptr_t)at, bytes) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    (void)flags;
    if (lseek((int)handle, 0, SEEK_END) < (off_t)bytes) return CUDA_ERROR_INVALID_VALUE;
    void *found = mmap((void *)(uintptr_t)at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle, (off_t)offset);
    return found == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
    void *found = mmap((void *)(uintptr_t)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t n) {
    (void)n;
    int allowed = access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE : PROT_NONE;
    return mprotect((void *)(uintptr_t)at, bytes, allowed) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
