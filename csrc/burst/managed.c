/* A burst_function on buffers that the device manages: it checks their states, runs another one,
 * and stores their states. */
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "burst/api.h"
#include "burst/packet.h"

static _Atomic uint32_t *state(uint32_t *fresh) { return (_Atomic uint32_t *)fresh; }

/* Relaxed, because a state says nothing about memory that another thread might be writing: that is
 * its client's concern. */
static bool is_fresh(uint32_t *fresh) {
    return atomic_load_explicit(state(fresh), memory_order_relaxed);
}

/* Relaxed, because of the same. */
static void note(uint32_t *fresh, bool failed) {
    atomic_store_explicit(state(fresh), failed, memory_order_relaxed);
}

static int32_t check(const burst_managed *m) {
    for (uint64_t i = 0; i < m->n_reads; i++)
        if (is_fresh(m->reads[i])) return GENERAL_FAILURE;
    return 0;
}

static void note_all(const burst_managed *m, bool failed) {
    for (uint64_t i = 0; i < m->n_writes; i++) note(m->writes[i], failed);
}

int32_t burst_managed_run(void *context) {
    const burst_managed *m = context;
    if (check(m)) return GENERAL_FAILURE;
    int32_t status = m->function(m->context);
    note_all(m, status != 0);
    return status;
}

int32_t burst_managed_begin(burst_managed *m) {
    note_all(m, true);
    return check(m);
}
