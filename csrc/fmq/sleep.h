/* How an end waits for its peer, and wakes it. Used by queue.c; not exported. */
#ifndef FMQ_SLEEP_H
#define FMQ_SLEEP_H

#include "fmq/ring.h"

/* Until n are at hand: 0, or why not. Spins for spin_ns, then sleeps; deadline 0 only looks, and
 * SLEEP_NEVER only spins. */
enum { SLEEP_NEVER = 1 };
int sleep_until(struct fmq_end *e, uint64_t n, uint64_t spin_ns, uint64_t deadline);

/* Many readers share the life word of an unsynchronized writer. When the one that the kernel wakes
 * is itself being killed at that moment, it wakes no other; so each looks again after this time. */
#ifndef SLEEP_SHARED_SLICE /* tests make it longer, so that nothing but wakes ends a sleep */
#define SLEEP_SHARED_SLICE UINT64_C(1000000000)
#endif

/* A spin_ns that follows the peer: spins as long as waits are usually shorter than sleeping and
 * waking up take. */
#define FMQ_SPIN_ADAPTIVE UINT64_MAX
#define SLEEP_COSTS UINT64_C(100000) /* ns: about what a sleep and a wake-up cost */
uint64_t sleep_window(const struct fmq_end *e, uint64_t spin_ns);

/* As sleep_until, for spin_ns at most and without sleeping: -EAGAIN. */
int sleep_spin(struct fmq_end *e, uint64_t n, uint64_t spin_ns);

/* A wait word is odd while a thread may sleep on it. Announce, then look, then sleep on the value
 * that this returns. */
uint32_t sleep_announce(_Atomic uint32_t *word);

/* Whether a transfer at this moment would wake a thread, by a system call. */
static inline bool sleep_wakes(const struct fmq_end *e) {
    /* Relaxed: a hint. */
    return e->flag.notify ||
           (e->shared.their_wait &&
            (atomic_load_explicit(e->shared.their_wait, memory_order_relaxed) & 1));
}

/* After a transfer: wakes the threads that announced a sleep. */
void sleep_wake_peer(struct fmq_end *e);

/* Called by the new owner of a role: makes all sleepers look again, whatever the word says. A dead
 * predecessor may have changed the word and died before its wake. */
void sleep_greet_peer(struct fmq_end *e);

/* Makes this process's threads that wait on this end look again. */
void sleep_look_again(struct fmq_end *e);

/* Has a call that waits on this end return -EINTR, now or when it is about to sleep. Any thread of
 * this process. */
void sleep_call(struct fmq_end *e);

/* Before a broadcast writer announces a sleep until `need`: readers that do not come past it wake
 * no process. */
static inline void sleep_ask(struct fmq_end *e, uint64_t need) {
    if (e->readers.records) atomic_store(&e->shared.mine->need, need); /* pairs: SLEEP */
}

/* Why no more will come, or -EAGAIN. `life` and `ended` were read before the counter was. */
int sleep_ended(const struct fmq_end *e, uint32_t life, uint32_t ended);

#endif
