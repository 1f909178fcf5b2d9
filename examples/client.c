/* A client in C of the device "reference": adds float32[1,4] tensors, says what came back and how long the median round trip
 * took. The device is started if it does not run, and again if it dies.
 *
 *     make install PREFIX=$HOME/.local
 *     cc -std=c11 -O2 -Wall -Wextra -Werror examples/client.c $(pkg-config --cflags --libs libburst) -o client
 *     ./client [requests]
 */
#include <burst.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST = 1000000 };
static uint64_t took[MOST];

static int checked(int result, const char *what) {
    if (!result) return 0;
    fprintf(stderr, "client: %s: %s (%d)\n", what, burst_why(), result);
    exit(1);
}

static int by_size(const void *a, const void *b) {
    uint64_t one = *(const uint64_t *)a, other = *(const uint64_t *)b;
    return (one > other) - (one < other);
}

/* x + y, without an activation function. */
static burst_compiled *prepare_add(burst_client *device) {
    const uint32_t shape[] = {1, 4}, inputs[] = {0, 1, 2}, sum[] = {3};
    const int32_t no_activation = 0;
    burst_builder *model;
    burst_compiled *compiled;
    checked(burst_builder_new(&model), "a model");
    burst_builder_operand(model, BURST_FLOAT32_TENSOR, 2, shape, 0, 0); /* 0: x */
    burst_builder_operand(model, BURST_FLOAT32_TENSOR, 2, shape, 0, 0); /* 1: y */
    burst_builder_constant(model, BURST_INT32, 0, NULL, 0, 0, &no_activation, sizeof no_activation);
    burst_builder_operand(model, BURST_FLOAT32_TENSOR, 2, shape, 0, 0); /* 3: the sum */
    checked(burst_builder_operation(model, "ADD", 3, inputs, 1, sum), "ADD");
    checked(burst_builder_finish(model, 2, inputs, 1, sum), "a model");
    checked(burst_prepare(device, model, BURST_FOREVER, &compiled), "preparing the model");
    burst_builder_free(model);
    return compiled;
}

int main(int argc, char **argv) {
    const burst_options options = {.size = sizeof options, .recover = 1};
    uint64_t n = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000;
    burst_client *device;
    burst_controller *burst;
    burst_pool *pool;
    burst_request *request;
    void *memory;
    if (!n || n > MOST) return fprintf(stderr, "client: client [requests, 1 to %d]\n", MOST), 1;
    checked(burst_connect("reference", &device), "connecting");
    burst_compiled *model = prepare_add(device);
    checked(burst_pool_new(192, &pool, &memory), "memory");
    checked(burst_open(model, &options, &burst), "opening a burst");
    float *x = memory, *y = x + 16, *sum = x + 32;
    const burst_tensor in[] = {{.pool = pool, .length = 16}, {.pool = pool, .offset = 64, .length = 16}};
    const burst_tensor out = {.pool = pool, .offset = 128, .length = 16};
    checked(burst_request_new(burst, 2, in, 1, &out, &request), "a request");
    for (uint64_t id = 1; id <= n; id++) {
        for (int i = 0; i < 4; i++) x[i] = (float)(id + (uint64_t)i), y[i] = 10.0f * (float)(i + 1);
        uint64_t begin = burst_now();
        checked(burst_run(burst, request, BURST_FOREVER, NULL), "a request");
        took[id - 1] = burst_now() - begin;
        for (int i = 0; i < 4; i++)
            if (sum[i] != x[i] + y[i]) return fprintf(stderr, "client: %g + %g is not %g\n", x[i], y[i], sum[i]), 1;
        if (id == 1 || id == n) printf("%" PRIu64 ": %g %g %g %g\n", id, sum[0], sum[1], sum[2], sum[3]), fflush(stdout);
    }
    qsort(took, n, sizeof *took, by_size);
    printf("%" PRIu64 " requests, median %.2f us\n", n, (double)took[n / 2] / 1e3);
    burst_request_free(request), burst_close(burst), burst_pool_free(pool), burst_compiled_free(model);
    return burst_disconnect(device) != 0;
}
