/* What the generated glue of fmq._hot needs above it. The module has no state and no code of the queue's. */
#include <stdint.h>

#undef Py_BEGIN_ALLOW_THREADS
#undef Py_END_ALLOW_THREADS
#define Py_BEGIN_ALLOW_THREADS {
#define Py_END_ALLOW_THREADS }

static int64_t fmq_hot_exchange(void *function, const void *channel, const void *packet, uint64_t bytes) {
    return ((int64_t(*)(const void *, const void *, uint64_t))function)(channel, packet, bytes);
}
