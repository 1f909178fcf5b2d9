/* An atomic circular FIFO: two free-running 64-bit counters of elements, each with one writer.
 *
 * head counts what was ever written, tail what was ever read; only their difference is meant, so neither wraps in
 * practice and full differs from empty. A slot is counter % capacity. Transfers are all or nothing: the peer sees a
 * counter move once, over everything that was copied.
 *
 * Both roles run the same code: each publishes its own counter and looks at the other's. A writer's free places and a
 * reader's elements are the same subtraction seen from two sides (ring_known).
 */
#define _GNU_SOURCE
#include "ring.h"

#include <errno.h>
#include <sched.h>
#include <string.h>

/* Refreshes the private copy of the peer's counter. The peer is not trusted: it may only have moved forward, and not
 * beyond what the ring can hold. */
int ring_look(struct fmq_end *e) {
    if (e->broken) return -EPROTO;
    /* acquire: what the peer published before this counter is visible after it.  pairs: VISIBLE.
     * seq_cst, because between announcing a sleep and sleeping this load must not move up.  pairs: SLEEP */
    uint64_t now = atomic_load_explicit(&e->theirs->counter, memory_order_seq_cst);
    uint64_t lag = e->writer ? e->position - now : now - e->position;
    if (now - e->seen > e->capacity || lag > e->capacity) {
        e->broken = true;
        return -EPROTO;
    }
    e->seen = now;
    return 0;
}

/* 0 when n are at hand. Looks at the peer's cache line only when the private copy does not suffice. */
int ring_need(struct fmq_end *e, uint64_t n) {
    if (n > e->capacity) return -EMSGSIZE;
    if (ring_known(e) >= n) return 0;
    int r = ring_look(e);
    if (r) return r;
    return ring_known(e) >= n ? 0 : -EAGAIN;
}

/* Says on which CPU the counter last moved, so that a waiter on the same one sleeps at once instead of spinning. */
static void note_cpu(struct fmq_end *e) {
    uint32_t cpu = (uint32_t)sched_getcpu() + 1;
    if (cpu == e->my_cpu) return;
    e->my_cpu = cpu;
    atomic_store_explicit(&e->mine->cpu, cpu, memory_order_relaxed); /* a hint: no order is needed */
}

void ring_publish(struct fmq_end *e, uint64_t n) {
    note_cpu(e);
    e->position += n;
    e->slot += n;
    if (e->slot >= e->capacity) e->slot -= e->capacity;
    /* release: the copies above are visible to whoever sees this counter.  pairs: VISIBLE.
     * seq_cst, because the look at the peer's wait word that follows must not move up.  pairs: SLEEP */
    atomic_store_explicit(&e->mine->counter, e->position, memory_order_seq_cst);
}

void ring_copy_in(struct fmq_end *e, const void *elements, uint64_t n) {
    uint64_t straight = e->capacity - e->slot;
    uint64_t first = n < straight ? n : straight;
    memcpy(e->ring + e->slot * e->element_bytes, elements, first * e->element_bytes);
    if (first < n) memcpy(e->ring, (const char *)elements + first * e->element_bytes, (n - first) * e->element_bytes);
}

void ring_copy_out(struct fmq_end *e, void *elements, uint64_t n) {
    uint64_t straight = e->capacity - e->slot;
    uint64_t first = n < straight ? n : straight;
    memcpy(elements, e->ring + e->slot * e->element_bytes, first * e->element_bytes);
    if (first < n) memcpy((char *)elements + first * e->element_bytes, e->ring, (n - first) * e->element_bytes);
}
