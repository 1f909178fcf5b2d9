/* Notes of where the time went: stores into memory that other processes may map and read at any
 * time. */
#ifndef BURST_TRACE_H
#define BURST_TRACE_H

#include <stdatomic.h>
#include <stdint.h>

/* Relaxed, because nothing hangs on the order: a reader throws away what does not fit together. */
static inline void note(uint64_t *at, uint64_t value) {
    atomic_store_explicit((_Atomic uint64_t *)at, value, memory_order_relaxed);
}

static inline uint64_t look(const uint64_t *at) { /* the same, of what the other side writes */
    return atomic_load_explicit((const _Atomic uint64_t *)at, memory_order_relaxed);
}

/* Each word has one writer. */
static inline void count(uint64_t *at, uint64_t more) { note(at, *at + more); }

#endif
