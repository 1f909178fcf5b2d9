/* What the generated glue of fmq._hot needs above it. The module has no state and no code of the queue's. */
#include <stdint.h>

#undef Py_BEGIN_ALLOW_THREADS
#undef Py_END_ALLOW_THREADS
#define Py_BEGIN_ALLOW_THREADS {
#define Py_END_ALLOW_THREADS }

typedef int64_t exchange_start(const void *channel, const void *packet, uint64_t bytes);

static int64_t fmq_hot_exchange(const void *channel, const void *packet, uint64_t bytes) {
    return (*(exchange_start *const *)channel)(channel, packet, bytes); /* the channel's first word */
}
