/* ADD on four floats through a burst, from C by libburst: one block for each line of standard input, which is its number of calls.
 *
 *     libburst_add SOCKET
 *
 * Prints "ready", then for each block one line of JSON with percentiles of the round trip in nanoseconds.
 */
#define _GNU_SOURCE
#include <burst.h>

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST = 1 << 20, CLIENT_CPU = 0 };
static uint64_t took[MOST];

static void checked(int result) {
    if (!result) return;
    fprintf(stderr, "libburst_add: %s (%d)\n", burst_why(), result);
    exit(1);
}

static int by_size(const void *a, const void *b) {
    uint64_t one = *(const uint64_t *)a, other = *(const uint64_t *)b;
    return (one > other) - (one < other);
}

static burst_compiled *prepare(burst_client *device) {
    const uint32_t shape[] = {1, 4}, inputs[] = {0, 1, 2}, sum[] = {3};
    const int32_t no_activation = 0;
    burst_builder *model;
    burst_compiled *compiled;
    checked(burst_builder_new(&model));
    burst_builder_operand(model, BURST_FLOAT32_TENSOR, 2, shape, 0, 0);
    burst_builder_operand(model, BURST_FLOAT32_TENSOR, 2, shape, 0, 0);
    burst_builder_constant(model, BURST_INT32, 0, NULL, 0, 0, &no_activation, sizeof no_activation);
    burst_builder_operand(model, BURST_FLOAT32_TENSOR, 2, shape, 0, 0);
    checked(burst_builder_operation(model, "ADD", 3, inputs, 1, sum));
    checked(burst_builder_finish(model, 2, inputs, 1, sum));
    checked(burst_prepare(device, model, BURST_FOREVER, &compiled));
    checked(burst_builder_free(model));
    return compiled;
}

static void run(burst_controller *burst, burst_request *request, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        uint64_t begin = burst_now();
        checked(burst_run(burst, request, BURST_FOREVER, NULL));
        took[i] = burst_now() - begin;
    }
}

int main(int argc, char **argv) {
    burst_client *device;
    burst_controller *burst;
    burst_pool *pool;
    burst_request *request;
    void *memory;
    cpu_set_t one;
    if (argc != 2) return fprintf(stderr, "libburst_add: libburst_add SOCKET\n"), 1;
    CPU_ZERO(&one);
    CPU_SET(CLIENT_CPU, &one);
    sched_setaffinity(0, sizeof one, &one);
    checked(burst_connect_path(argv[1], &device));
    burst_compiled *compiled = prepare(device);
    checked(burst_open(compiled, NULL, &burst));
    checked(burst_pool_new(192, &pool, &memory));
    const burst_tensor in[] = {{.pool = pool, .length = 16}, {.pool = pool, .offset = 64, .length = 16}};
    const burst_tensor out = {.pool = pool, .offset = 128, .length = 16};
    checked(burst_request_new(burst, 2, in, 1, &out, &request));
    float *x = memory, *y = x + 16, *sum = x + 32;
    for (int i = 0; i < 4; i++) x[i] = 1, y[i] = 2;
    run(burst, request, 10);
    for (int i = 0; i < 4; i++)
        if (sum[i] != 3) return fprintf(stderr, "libburst_add: 1 + 2 is not %g\n", (double)sum[i]), 1;
    printf("ready\n"), fflush(stdout);
    for (uint32_t count; scanf("%" SCNu32, &count) == 1 && count && count <= MOST;) {
        run(burst, request, count / 20 + 10);
        run(burst, request, count);
        qsort(took, count, sizeof *took, by_size);
        printf("{\"p50_ns\": %" PRIu64 ", \"p99_ns\": %" PRIu64 ", \"p999_ns\": %" PRIu64 ", \"max_ns\": %" PRIu64 "}\n", took[count / 2],
               took[count * 99ull / 100], took[count * 999ull / 1000], took[count - 1]);
        fflush(stdout);
    }
    return 0;
}
