/* The kernels of this driver, as C calls them. Each adds one to a stream, and returns CUDA's error. */
#ifndef KERNELS_H
#define KERNELS_H
#include <cuda_runtime_api.h>
#ifdef __cplusplus
extern "C" {
#endif

cudaError_t launch_add(const float *a, const float *b, float *sum, unsigned n, cudaStream_t stream);

/* product[m][n] = a[m][k] * weights[n][k] (transposed) + bias[n] */
cudaError_t launch_gemm(const float *a, const float *weights, const float *bias, float *product, unsigned m, unsigned n,
                        unsigned k, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
