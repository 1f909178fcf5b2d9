/* Threads that use, close and free the handles of one burst at the same time: every result is one of burst.h's, and the
 * sanitizers find nothing.
 *
 *     handle_race ROUNDS SEED
 */
#include <burst.h>

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { THREADS = 4, STEPS = 30 };
static burst_client *device;
static burst_compiled *compiled;
static burst_controller *burst;
static burst_pool *pool;
static burst_request *requests[THREADS];
static uint64_t outcomes[2]; /* succeeded, refused */

static int is_documented(int r) {
    static const int known[] = {-EINVAL, -EBADF, -ECANCELED, -EBUSY, -EAGAIN, -ETIMEDOUT, -EPIPE, -ENOMSG, -ENOENT};
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (r == known[i]) return 1;
    return r >= 0;
}

static int one_call(unsigned what, unsigned which, int may_close) {
    burst_statistics counts;
    burst_request *made;
    const burst_tensor x = {.pool = pool, .length = 16}, y = {.pool = pool, .offset = 64, .length = 16};
    const burst_tensor in[] = {x, x};
    int r;
    switch (what % 14) {
    case 0: case 1: return burst_run(burst, requests[which], burst_now() + 1000000000, NULL);
    case 2: case 3: return burst_submit(burst, requests[which], BURST_FOREVER, NULL);
    case 4: case 5: case 6: return burst_await(burst, burst_now() + 1000000, NULL);
    case 7: return burst_cancel(burst, what % 64);
    case 8: return burst_count(burst, &counts);
    case 9: return burst_output_shape(burst, 0, NULL, 0);
    case 11: return burst_try_submit(burst, requests[which], BURST_FOREVER, NULL);
    case 12: return burst_poll(burst, NULL);
    case 10:
        r = burst_request_new(burst, 2, in, 1, &y, &made);
        return r ? r : burst_request_free(made);
    default:
        if (!may_close) return 0;
        switch (what / 14 % 4) {
        case 0: return burst_request_free(requests[which]);
        case 1: return burst_pool_free(pool);
        case 2: return burst_compiled_free(compiled);
        default: return burst_close(burst);
        }
    }
}

static void *use(void *argument) {
    unsigned state = (unsigned)(uintptr_t)argument;
    for (int i = 0; i < STEPS; i++) {
        unsigned what = (unsigned)rand_r(&state), which = (unsigned)rand_r(&state) % THREADS;
        int r = one_call(what, which, i > STEPS / 2);
        if (!is_documented(r)) {
            fprintf(stderr, "handle_race: call %u gave %d: %s\n", what % 12, r, burst_why());
            abort();
        }
        __atomic_add_fetch(&outcomes[r < 0], 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

static void checked(int r, const char *what) {
    if (!r) return;
    fprintf(stderr, "handle_race: %s: %s\n", what, burst_why());
    exit(1);
}

static void prepare(void) {
    const uint32_t shape[] = {1, 4}, inputs[] = {0, 1, 2}, sum[] = {3};
    const int32_t none = 0;
    burst_builder *model;
    checked(burst_builder_new(&model), "a model");
    burst_builder_operand(model, BURST_FLOAT32_TENSOR, 2, shape, 0, 0);
    burst_builder_operand(model, BURST_FLOAT32_TENSOR, 2, shape, 0, 0);
    burst_builder_constant(model, BURST_INT32, 0, NULL, 0, 0, &none, sizeof none);
    burst_builder_operand(model, BURST_FLOAT32_TENSOR, 2, shape, 0, 0);
    checked(burst_builder_operation(model, "ADD", 3, inputs, 1, sum), "ADD");
    checked(burst_builder_finish(model, 2, inputs, 1, sum), "a model");
    checked(burst_prepare(device, model, BURST_FOREVER, &compiled), "preparing");
    burst_builder_free(model);
}

static void one_round(unsigned seed) {
    pthread_t threads[THREADS];
    void *memory;
    prepare();
    checked(burst_open(compiled, NULL, &burst), "opening");
    checked(burst_pool_new(192, &pool, &memory), "a pool");
    const burst_tensor in[] = {{.pool = pool, .length = 16}, {.pool = pool, .offset = 64, .length = 16}};
    for (int i = 0; i < THREADS; i++) {
        const burst_tensor out = {.pool = pool, .offset = 128, .length = 16};
        checked(burst_request_new(burst, 2, in, 1, &out, &requests[i]), "a request");
    }
    for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, use, (void *)(seed * THREADS + i));
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    burst_close(burst);
    for (int i = 0; i < THREADS; i++) burst_request_free(requests[i]);
    burst_pool_free(pool), burst_compiled_free(compiled);
}

int main(int argc, char **argv) {
    unsigned rounds = argc > 1 ? (unsigned)atoi(argv[1]) : 10, seed = argc > 2 ? (unsigned)atoi(argv[2]) : 1;
    checked(burst_connect("reference", &device), "connecting");
    for (unsigned i = 0; i < rounds; i++) one_round(seed + i);
    burst_disconnect(device);
    printf("%u rounds, %llu calls succeeded, %llu were refused\n", rounds, (unsigned long long)outcomes[0], (unsigned long long)outcomes[1]);
    return 0;
}
