/* Waiting for the peer: spin for a window, then sleep. README.md proves that no wake-up is lost, whoever dies where. */
#define _GNU_SOURCE
#include <stdint.h>

#include "api.h"

#include "futex.h"
#include "life.h"
#include "sleep.h"

#include <limits.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { AWAKE = 0, ASLEEP = 1 };
enum { SPINS_PER_CLOCK = 64, SPURIOUS_LIMIT = 1000, LOOK_AGAIN = 1 };
static const uint64_t SIGNAL_SLICE = 100000000; /* ns: the main thread looks for signals this often */
static const uint64_t OLD_KERNEL_SLICE = 50000000; /* ns: without futex_waitv a death is polled for */

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* ---- wake -------------------------------------------------------------------------------------------------------- */

void sleep_wake_peer(fmq_end *e) {
    if (e->notify) fmq_event_wake(e->notify, e->notify_mask);
    if (!e->their_wait) return;
    /* Plain load first: while the peer is awake its wait word stays shared in both caches.  pairs: SLEEP */
    if (atomic_load_explicit(e->their_wait, memory_order_seq_cst) == AWAKE) return;
    if (atomic_exchange(e->their_wait, AWAKE) != ASLEEP) return;
    futex_wake(e->their_wait, e->overwrites ? INT_MAX : 1, FUTEX_BITSET_MATCH_ANY);
}

/* Returns when no thread is inside any more: from then on nothing of ours moves, and the role can go to somebody else.
 * Wakes again and again, and everybody, because a hostile peer could announce a sleep for us or take the one wake. A word
 * that readers share stays as it is: were we killed after clearing it, the others would sleep on. */
void fmq_stop(fmq_end *e) {
    atomic_store(&e->stopped, 1); /* pairs: STOP */
    if (!end_is_ours(e)) return;
    do {
        if (e->my_wait && !end_shares_wait(e)) atomic_exchange(e->my_wait, AWAKE);
        if (e->my_wait) futex_wake(e->my_wait, INT_MAX, FUTEX_BITSET_MATCH_ANY); /* without asking whether somebody sleeps */
        sched_yield();
    } while (atomic_load(&e->busy)); /* pairs: STOP */
}

/* ---- spin -------------------------------------------------------------------------------------------------------- */

static bool same_cpu(const fmq_end *e) {
    uint32_t theirs = atomic_load_explicit(&e->theirs->cpu, memory_order_relaxed); /* a hint: no order is needed */
    return theirs == (uint32_t)sched_getcpu() + 1;
}

/* Relaxed, because this only ends the spinning: the turn that follows looks properly. */
static bool is_over(const fmq_end *e) {
    uint32_t life = atomic_load_explicit(e->their_life, memory_order_relaxed);
    return life_is_dead(life) || life == LIFE_RELEASED || atomic_load_explicit(&e->stopped, memory_order_relaxed);
}

static int spin_for(fmq_end *e, uint64_t n, uint64_t spin_ns, uint64_t deadline) {
    if (!spin_ns || same_cpu(e)) return -EAGAIN;
    uint64_t until = 0;
    for (uint32_t i = 1;; i++) {
        if (i > SPINS_PER_CLOCK) relax(); /* not at first: on new processors one pause is as long as a transfer */
        int r = ring_need(e, n);
        if (r != -EAGAIN) return r;
        if (i % SPINS_PER_CLOCK) continue;
        uint64_t now = futex_now();
        if (!until) until = now + spin_ns < deadline ? now + spin_ns : deadline;
        if (now >= until || is_over(e)) return -EAGAIN;
    }
}

/* ---- sleep ------------------------------------------------------------------------------------------------------- */

int sleep_ended(const fmq_end *e, uint32_t life) {
    if (atomic_load(&e->stopped)) return -ECANCELED; /* pairs: STOP */
    if (life_is_dead(life)) return -EPIPE;
    return life == LIFE_RELEASED ? -ESHUTDOWN : -EAGAIN;
}

/* Announces a sleep, and then looks: 0 when n are at hand, -EAGAIN when there is reason to sleep while life stays so. */
static int announce(fmq_end *e, uint64_t n, uint32_t *life) {
    /* Life before data: what a peer published before it died is delivered before its death is told.  pairs: DEAD */
    *life = atomic_load(e->their_life);
    atomic_store_explicit(e->my_wait, ASLEEP, memory_order_seq_cst); /* pairs: SLEEP */
    int r = ring_need(e, n);
    return r == -EAGAIN ? sleep_ended(e, *life) : r;
}

/* The bridge, should it sleep for this end, has to announce that anew. */
static void awake(fmq_end *e) {
    if (end_shares_wait(e)) return;
    atomic_store(e->my_wait, AWAKE);
    if (e->bridged) futex_wake(e->my_wait, INT_MAX, FUTEX_BITSET_MATCH_ANY);
}

/* A wake for nothing: a peer may do that now and then, and not for ever. Progress, though not yet enough, is something.
 * Readers that share a wait word wake each other (fmq_stop), and that is not the writer's doing. */
static int count_spurious(fmq_end *e) {
    if (end_shares_wait(e)) return -EAGAIN;
    if (e->seen != e->progress) e->progress = e->seen, e->spurious = 0;
    if (++e->spurious <= SPURIOUS_LIMIT) return -EAGAIN;
    e->broken = true;
    return -EPROTO;
}

/* A signal that arrives just before the futex call would be noticed only after it, so Python's main thread, where
 * handlers run, does not sleep for long. Nobody else wakes without a reason. */
static uint64_t no_longer_than(uint64_t deadline) {
    bool is_main = syscall(SYS_gettid) == getpid();
    uint64_t slice = is_main ? futex_now() + SIGNAL_SLICE : FMQ_FOREVER;
    return slice < deadline ? slice : deadline;
}

/* As futex_wait; LOOK_AGAIN when nobody woke us and the deadline has not passed either. */
static int sleep_once(fmq_end *e, uint32_t life, uint64_t until) {
    int r = futex_wait_either(e->my_wait, ASLEEP, e->their_life, life, until);
    if (r != -ENOSYS && r != -EPERM) return r; /* EPERM: a container's filter older than the system call */
    uint64_t slice = futex_now() + OLD_KERNEL_SLICE;
    r = futex_wait(e->my_wait, ASLEEP, FUTEX_BITSET_MATCH_ANY, slice < until ? slice : until);
    return r == -ETIMEDOUT && slice < until ? LOOK_AGAIN : r;
}

/* The kernel wakes one sleeper of a dead process's word. It may have been us, whatever we slept for: wake the others. */
static void pass_on(_Atomic uint32_t *life, uint32_t before) {
    if (atomic_load(life) != before) futex_wake(life, INT_MAX, FUTEX_BITSET_MATCH_ANY); /* pairs: DEAD */
}

/* One turn: 0 when n are at hand, -EAGAIN or LOOK_AGAIN to take another turn. */
static int sleep_turn(fmq_end *e, uint64_t n, uint64_t until) {
    uint32_t life;
    int r = announce(e, n, &life);
    if (r != -EAGAIN) return r;
    int slept = sleep_once(e, life, until);
    pass_on(e->their_life, life);
    r = ring_need(e, n); /* before reporting a timeout or a signal */
    if (r != -EAGAIN) return r;
    if (slept == -ETIMEDOUT || slept == -EINTR || slept == LOOK_AGAIN) return slept;
    return count_spurious(e);
}

static int sleep_for(fmq_end *e, uint64_t n, uint64_t deadline) {
    if (!e->my_wait) return -EROFS;
    uint64_t until = no_longer_than(deadline);
    int r;
    do r = sleep_turn(e, n, until);
    while (r == -EAGAIN || r == LOOK_AGAIN);
    awake(e);
    return r == -ETIMEDOUT && until < deadline ? -EINTR : r;
}

int sleep_until(fmq_end *e, uint64_t n, uint64_t spin_ns, uint64_t deadline) {
    int r = ring_need(e, n);
    if (!deadline) return r;
    if (r == -EAGAIN) r = spin_for(e, n, spin_ns, deadline);
    if (r == -EAGAIN) r = sleep_for(e, n, deadline);
    return r;
}

/* ---- several at once --------------------------------------------------------------------------------------------- */

enum { ENDS_PER_SLEEP = FUTEX_MOST / 2 }; /* a wait word and a life word each */

/* Marks the ends on which a transfer of one element would not wait, and returns how many those are. */
static int look_at_all(fmq_end *const *ends, unsigned n, uint8_t *ready, futex_entry *entries) {
    int count = 0;
    for (unsigned i = 0; i < n; i++) {
        uint32_t life;
        uint64_t position = ends[i]->position;
        int r = announce(ends[i], 1, &life);
        if (r == -EOVERFLOW) ring_move_to(ends[i], position); /* the next transfer tells */
        count += ready[i] = r != -EAGAIN;
        if (i >= ENDS_PER_SLEEP) continue;
        entries[2 * i] = futex_on(ends[i]->my_wait, ASLEEP);
        entries[2 * i + 1] = futex_on(ends[i]->their_life, life);
    }
    return count;
}

/* One turn; as sleep_once. More ends than one system call takes, and old kernels, are looked at every millisecond. */
static int sleep_on_all(fmq_end *const *ends, unsigned n, futex_entry *entries, uint64_t until) {
    unsigned some = n < ENDS_PER_SLEEP ? n : ENDS_PER_SLEEP;
    uint64_t slice = n > some ? futex_now() + 1000000 : FMQ_FOREVER;
    int r = futex_wait_all(entries, 2 * some, slice < until ? slice : until);
    if (r == -ENOSYS || r == -EPERM) {
        slice = futex_now() + 1000000;
        r = futex_wait(ends[0]->my_wait, ASLEEP, FUTEX_BITSET_MATCH_ANY, slice < until ? slice : until);
    } else if (r >= 0) {
        count_spurious(ends[r / 2]);
    }
    for (unsigned i = 0; i < some; i++) pass_on(ends[i]->their_life, (uint32_t)entries[2 * i + 1].expected);
    return r == -ETIMEDOUT && slice < until ? LOOK_AGAIN : r;
}

static int wait_for_one_of(fmq_end *const *ends, unsigned n, uint8_t *ready, uint64_t deadline) {
    futex_entry entries[FUTEX_MOST];
    uint64_t until = no_longer_than(deadline);
    int r, count;
    while (!(count = look_at_all(ends, n, ready, entries))) {
        if (!deadline) return -EAGAIN;
        r = sleep_on_all(ends, n, entries, until);
        if (r != -ETIMEDOUT && r != -EINTR) continue;
        if ((count = look_at_all(ends, n, ready, entries))) return count; /* before reporting a timeout or a signal */
        return r == -ETIMEDOUT && until < deadline ? -EINTR : r;
    }
    return count;
}

int fmq_wait_any(fmq_end *const *ends, unsigned n, uint8_t *ready, uint64_t deadline) {
    int r = 0;
    unsigned entered = 0;
    while (entered < n && !r) {
        r = ends[entered]->my_wait ? end_enter_free(ends[entered]) : -EROFS;
        if (!r) entered++;
    }
    if (!r) r = wait_for_one_of(ends, n, ready, deadline);
    for (unsigned i = 0; i < entered; i++) {
        awake(ends[i]);
        end_leave(ends[i]);
    }
    return r;
}
