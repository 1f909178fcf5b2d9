/* A burst_function on buffers that the device manages: another one, between a look at their states and a note of them. */
#include <stdatomic.h>
#include <stdint.h>

#include "api.h"
#include "packet.h"

/* Relaxed, because a state says nothing about memory that another thread might be writing: that is its client's concern. */
static _Atomic uint32_t *state(uint32_t *fresh) { return (_Atomic uint32_t *)fresh; }

int32_t burst_managed_run(void *context) {
    const burst_managed *m = context;
    for (uint64_t i = 0; i < m->n_reads; i++)
        if (atomic_load_explicit(state(m->reads[i]), memory_order_relaxed)) return GENERAL_FAILURE;
    int32_t status = m->function(m->context);
    for (uint64_t i = 0; i < m->n_writes; i++)
        atomic_store_explicit(state(m->writes[i]), status != 0, memory_order_relaxed);
    return status;
}
