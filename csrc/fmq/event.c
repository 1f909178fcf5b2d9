/* A public event flag: 32 sticky bits and a count of sleepers, in eight bytes of any shared memory.
 *
 * wake sets bits; wait consumes the bits of its mask and sleeps while none is set. A waker makes a
 * system call whenever a thread sleeps, also when the bits were set already: if a waker dies
 * between setting and waking, the next one wakes the sleeper. (A count that a killed sleeper left
 * behind costs a call, never a wake-up.)
 */
#include <stdint.h>

#include "fmq/api.h"

#include "fmq/futex.h"
#include "fmq/ring.h"
#include "fmq/sleep.h"

#include <errno.h>
#include <limits.h>

/* ns: without futex_waitv a death is polled for. */
static const uint64_t OLD_KERNEL_SLICE = 50000000;

typedef struct {
    _Atomic uint32_t bits, sleepers;
} event_flag;

static uint32_t consume(event_flag *f, uint32_t mask) {
    if (!(atomic_load(&f->bits) & mask)) return 0;
    return atomic_fetch_and(&f->bits, ~mask) & mask;
}

int fmq_event_wake(void *flag, uint32_t mask) {
    event_flag *f = flag;
    if (!mask) return -EINVAL;
    /* seq_cst, then the look at sleepers.  pairs: EVENT_SLEEP */
    atomic_fetch_or(&f->bits, mask);
    if (atomic_load(&f->sleepers)) futex_wake(&f->bits, INT_MAX, mask);
    return 0;
}

/* Why one of these peers is gone, or 0. */
static int look_at_peers(fmq_end *const *peers, unsigned n, futex_entry *entries) {
    int r = 0;
    if (n)
        entries[n] =
            futex_on_private(&peers[0]->process->endings, atomic_load(&peers[0]->process->endings));
    for (unsigned i = 0; i < n; i++) {
        /* pairs: DEAD */
        uint32_t ended = atomic_load(&peers[i]->signals.ended),
                 life = atomic_load(peers[i]->shared.their_life);
        entries[i] = futex_on(peers[i]->shared.their_life, life);
        if (life_is_dead(life)) {
            r = -EPIPE;
            /* The kernel woke one; that one wakes the others. */
            futex_wake(peers[i]->shared.their_life, INT_MAX, FUTEX_BITSET_MATCH_ANY);
        } else if (life == LIFE_RELEASED) {
            r = r ? r : -ESHUTDOWN;
        } else if (end_is_lost(peers[i], life, ended)) {
            r = -EPIPE;
        }
    }
    return r;
}

/* Sleeps while the bits are `now` and the peers as in entries[0 .. n], of which the last is of this
 * process. */
static int sleep_on(event_flag *f, uint32_t now, uint32_t mask, futex_entry *entries, unsigned n,
                    uint64_t deadline) {
    if (!n) return futex_wait(&f->bits, now, mask, deadline);
    entries[n + 1] = futex_on(&f->bits, now);
    uint64_t slice = futex_now() + SLEEP_SHARED_SLICE;
    int r = futex_wait_all(entries, n + 2, slice < deadline ? slice : deadline);
    if (r == -ETIMEDOUT && slice < deadline) return 0;
    if (r != -ENOSYS && r != -EPERM) return r < 0 ? r : 0;
    slice = futex_now() + OLD_KERNEL_SLICE;
    r = futex_wait(&f->bits, now, mask, slice < deadline ? slice : deadline);
    return r == -ETIMEDOUT && slice < deadline ? 0 : r;
}

int fmq_event_wait(void *flag, uint32_t mask, fmq_end *const *peers, unsigned n, uint64_t deadline,
                   uint32_t *bits) {
    event_flag *f = flag;
    futex_entry entries[FUTEX_MOST];
    if (!mask || n > FUTEX_MOST - 2) return -EINVAL;
    int r = 0;
    for (;;) {
        /* Before the bits: what a peer set before its end is told first. */
        int ended = look_at_peers(peers, n, entries);
        if ((*bits = consume(f, mask))) return 0;
        if (r || ended) return r ? r : ended;
        atomic_fetch_add(&f->sleepers, 1); /* seq_cst, then the look at bits.  pairs: EVENT_SLEEP */
        uint32_t now = atomic_load(&f->bits);
        if (!(now & mask)) r = sleep_on(f, now, mask, entries, n, deadline);
        atomic_fetch_sub(&f->sleepers, 1);
        /* Woken, or another bit changed. A process that changes bits all the time cannot hold us
         * beyond the deadline. */
        if (!r || r == -EAGAIN) r = futex_now() < deadline ? 0 : -ETIMEDOUT;
    }
}
