/* The kernels: an addition, and a product of matrices in tiles of shared memory. */
#include "kernels.h"

enum { BLOCK = 256, TILE = 16 };

__global__ void add(const float *a, const float *b, float *sum, unsigned n) {
    unsigned i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) sum[i] = a[i] + b[i];
}

__global__ void gemm(const float *a, const float *weights, const float *bias, float *product, unsigned m, unsigned n,
                     unsigned k) {
    __shared__ float rows[TILE][TILE], columns[TILE][TILE + 1]; /* + 1: a column is read without bank conflicts */
    unsigned x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * TILE + y, column = blockIdx.x * TILE + x;
    unsigned other = blockIdx.x * TILE + y; /* the row of `weights` that this thread loads */
    float sum = 0;
    for (unsigned at = 0; at < k; at += TILE) {
        rows[y][x] = row < m && at + x < k ? a[(size_t)row * k + at + x] : 0;
        columns[y][x] = other < n && at + x < k ? weights[(size_t)other * k + at + x] : 0;
        __syncthreads();
        for (unsigned i = 0; i < TILE; i++) sum += rows[y][i] * columns[x][i];
        __syncthreads();
    }
    if (row < m && column < n) product[(size_t)row * n + column] = sum + bias[column];
}

extern "C" cudaError_t launch_add(const float *a, const float *b, float *sum, unsigned n, cudaStream_t stream) {
    add<<<(n + BLOCK - 1) / BLOCK, BLOCK, 0, stream>>>(a, b, sum, n);
    return cudaGetLastError();
}

extern "C" cudaError_t launch_gemm(const float *a, const float *weights, const float *bias, float *product, unsigned m,
                                   unsigned n, unsigned k, cudaStream_t stream) {
    dim3 grid((n + TILE - 1) / TILE, (m + TILE - 1) / TILE), block(TILE, TILE);
    gemm<<<grid, block, 0, stream>>>(a, weights, bias, product, m, n, k);
    return cudaGetLastError();
}
