/* A blocking queue end = ring + sleep/wake words + the peer's life word.
 *
 * A wait spins for a window (not at all when the peer last moved on this CPU), then announces that it sleeps, looks
 * once more, and sleeps on two words at once: its own wait word and the peer's life word. A publisher makes a system
 * call only for a sleeper. README.md proves that no wake-up is lost, whoever dies where.
 */
#define _GNU_SOURCE
#include <stdint.h>

#include "api.h"

#include "futex.h"
#include "life.h"
#include "ring.h"

#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
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

/* ---- geometry ---------------------------------------------------------------------------------------------------- */

uint64_t fmq_now(void) { return futex_now(); }

uint64_t fmq_bytes(uint64_t capacity, uint32_t element_bytes) {
    const uint64_t most = UINT64_C(1) << 40; /* far from every overflow below, far beyond every machine */
    if (!capacity || !element_bytes || capacity > most / element_bytes) return 0;
    return FMQ_PAGE + (capacity * element_bytes + FMQ_PAGE - 1) / FMQ_PAGE * FMQ_PAGE;
}

int fmq_format(void *base, uint64_t bytes, uint64_t capacity, uint32_t element_bytes, uint64_t dtype_hash) {
    uint64_t needed = fmq_bytes(capacity, element_bytes);
    if (!needed || needed > bytes) return -EINVAL;
    fmq_control *c = base;
    memset(c, 0, sizeof *c);
    c->version = FMQ_VERSION;
    c->flavour = FMQ_SYNCHRONIZED;
    c->capacity = capacity;
    c->element_bytes = element_bytes;
    c->dtype_hash = dtype_hash;
    c->magic = FMQ_MAGIC; /* the region becomes reachable for others only after this call returned */
    return 0;
}

int fmq_geometry(const void *base, uint64_t bytes, uint64_t *capacity, uint32_t *element_bytes, uint64_t *dtype_hash) {
    const volatile fmq_control *c = base; /* volatile: each field is fetched once, and what was checked is what is used */
    if (bytes < FMQ_PAGE || c->magic != FMQ_MAGIC) return -EINVAL;
    if (c->version != FMQ_VERSION) return -EPROTONOSUPPORT;
    if (c->flavour != FMQ_SYNCHRONIZED) return -EOPNOTSUPP;
    *capacity = c->capacity;
    *element_bytes = c->element_bytes;
    *dtype_hash = c->dtype_hash;
    uint64_t needed = fmq_bytes(*capacity, *element_bytes);
    return needed && needed <= bytes ? 0 : -EMSGSIZE;
}

int fmq_open(void *base, uint64_t bytes, int role, fmq_end **out) {
    uint64_t capacity, hash;
    uint32_t element_bytes;
    int r = fmq_geometry(base, bytes, &capacity, &element_bytes, &hash);
    if (r) return r;
    fmq_end *e = calloc(1, sizeof *e);
    if (!e) return -ENOMEM;
    fmq_control *c = base;
    e->writer = role == FMQ_WRITER;
    e->mine = e->writer ? &c->head : &c->tail;
    e->theirs = e->writer ? &c->tail : &c->head;
    e->my_wait = e->writer ? &c->space_wait.word : &c->data_wait.word;
    e->their_wait = e->writer ? &c->data_wait.word : &c->space_wait.word;
    e->their_life = e->writer ? &c->reader_life.word : &c->writer_life.word;
    e->ring = (unsigned char *)base + FMQ_PAGE;
    e->capacity = capacity;
    e->element_bytes = element_bytes;
    e->generation = life_generation();
    /* A restarted owner goes on where the dead one stopped: its lock is ours, so its last publish is visible. */
    e->position = atomic_load(&e->mine->counter);
    e->slot = e->position % capacity;
    e->seen = atomic_load(&e->theirs->counter);
    if (ring_known(e) > capacity) return free(e), -EPROTO; /* more than full, or less than empty */
    atomic_store(e->my_wait, AWAKE);
    *out = e;
    return 0;
}

int fmq_check(const fmq_end *e, uint64_t capacity, uint32_t element_bytes) {
    return e->capacity == capacity && e->element_bytes == element_bytes ? 0 : -EPROTO;
}

void fmq_free(fmq_end *e) { free(e); }

int fmq_life_state(const void *word) {
    uint32_t life = atomic_load((_Atomic uint32_t *)(uintptr_t)word);
    if (life_is_dead(life)) return FMQ_DEAD;
    if (life == LIFE_NOBODY) return FMQ_NOBODY;
    return life == LIFE_RELEASED ? FMQ_RELEASED : FMQ_ALIVE;
}

int fmq_peer(const fmq_end *e) { return fmq_life_state(e->their_life); }

/* ---- one thread at a time ---------------------------------------------------------------------------------------- */

static void leave(fmq_end *e) { atomic_store_explicit(&e->busy, 0, memory_order_release); /* pairs: ONE_CALLER */ }

static int enter(fmq_end *e) {
    if (e->generation != life_generation()) return -ECANCELED;
    /* acquire: what the last caller did to this end is visible.  pairs: ONE_CALLER.
     * seq_cst, and then the look at `stopped`: either we see it, or fmq_stop sees us inside.  pairs: STOP */
    if (atomic_exchange(&e->busy, 1)) return -EBUSY;
    if (!atomic_load(&e->stopped)) return 0;
    leave(e);
    return -ECANCELED;
}

/* As enter, for calls that may not run inside a reservation. */
static int enter_free(fmq_end *e) {
    int r = enter(e);
    if (!r && e->reserved) r = -EBUSY, leave(e);
    return r;
}

/* ---- sleep and wake ---------------------------------------------------------------------------------------------- */

static void wake_peer(fmq_end *e) {
    /* Plain load first: while the peer is awake its wait word stays shared in both caches.  pairs: SLEEP */
    if (atomic_load_explicit(e->their_wait, memory_order_seq_cst) == AWAKE) return;
    if (atomic_exchange(e->their_wait, AWAKE) == ASLEEP) futex_wake(e->their_wait, 1, FUTEX_BITSET_MATCH_ANY);
}

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

/* Why no more will come, or -EAGAIN. */
static int ended(const fmq_end *e, uint32_t life) {
    if (atomic_load(&e->stopped)) return -ECANCELED; /* pairs: STOP */
    if (life_is_dead(life)) return -EPIPE;
    return life == LIFE_RELEASED ? -ESHUTDOWN : -EAGAIN;
}

/* As futex_wait; LOOK_AGAIN when nobody woke us and the deadline has not passed either. */
static int sleep_once(fmq_end *e, uint32_t life, uint64_t until) {
    int r = futex_wait_either(e->my_wait, ASLEEP, e->their_life, life, until);
    if (r != -ENOSYS && r != -EPERM) return r; /* EPERM: a container's filter older than the system call */
    uint64_t slice = futex_now() + OLD_KERNEL_SLICE;
    r = futex_wait(e->my_wait, ASLEEP, FUTEX_BITSET_MATCH_ANY, slice < until ? slice : until);
    return r == -ETIMEDOUT && slice < until ? LOOK_AGAIN : r;
}

/* One turn: 0 when n are at hand, -EAGAIN or LOOK_AGAIN to take another turn. */
static int sleep_turn(fmq_end *e, uint64_t n, uint64_t until) {
    /* Life before data: what a peer published before it died is delivered before its death is told.  pairs: DEAD */
    uint32_t life = atomic_load(e->their_life);
    atomic_store_explicit(e->my_wait, ASLEEP, memory_order_seq_cst); /* pairs: SLEEP */
    int r = ring_need(e, n);
    if (r == -EAGAIN) r = ended(e, life);
    if (r != -EAGAIN) return r;
    int slept = sleep_once(e, life, until);
    r = ring_need(e, n); /* before reporting a timeout or a signal */
    if (r != -EAGAIN) return r;
    return slept == -ETIMEDOUT || slept == -EINTR || slept == LOOK_AGAIN ? slept : -EAGAIN;
}

static int sleep_for(fmq_end *e, uint64_t n, uint64_t deadline) {
    /* A signal that arrives just before the futex call would be noticed only after it, so Python's main thread, where
     * handlers run, does not sleep for long. Nobody else wakes without a reason. */
    bool is_main = syscall(SYS_gettid) == getpid();
    uint64_t slice = is_main ? futex_now() + SIGNAL_SLICE : FMQ_FOREVER;
    uint64_t until = slice < deadline ? slice : deadline, seen = e->seen;
    int r, spurious = 0;
    while ((r = sleep_turn(e, n, until)) == -EAGAIN || r == LOOK_AGAIN) {
        if (e->seen != seen) spurious = 0; /* progress, though not yet enough, is no reason to complain */
        else if (r == -EAGAIN) spurious++;
        seen = e->seen;
        if (spurious <= SPURIOUS_LIMIT) continue;
        e->broken = true, r = -EPROTO;
        break;
    }
    atomic_store(e->my_wait, AWAKE);
    /* The kernel wakes one sleeper of a dead process's word; that one wakes the others, and so on. */
    if (r == -EPIPE) futex_wake(e->their_life, INT_MAX, FUTEX_BITSET_MATCH_ANY); /* pairs: DEAD */
    return r == -ETIMEDOUT && until < deadline ? -EINTR : r;
}

/* Until n are at hand: 0, or why not. */
static int wait_for(fmq_end *e, uint64_t n, uint64_t spin_ns, uint64_t deadline) {
    int r = ring_need(e, n);
    if (!deadline) return r;
    if (r == -EAGAIN) r = spin_for(e, n, spin_ns, deadline);
    if (r == -EAGAIN) r = sleep_for(e, n, deadline);
    return r;
}

/* Returns when no thread is inside any more: from then on nothing of ours moves, and the role can go to somebody else.
 * Wakes again and again, and everybody, because a hostile peer could announce a sleep for us or take the one wake. */
void fmq_stop(fmq_end *e) {
    atomic_store(&e->stopped, 1); /* pairs: STOP */
    if (e->generation != life_generation()) return;
    do {
        atomic_exchange(e->my_wait, AWAKE);
        futex_wake(e->my_wait, INT_MAX, FUTEX_BITSET_MATCH_ANY); /* without asking whether somebody sleeps */
        sched_yield();
    } while (atomic_load(&e->busy)); /* pairs: STOP */
}

/* ---- transfers --------------------------------------------------------------------------------------------------- */

int64_t fmq_available(fmq_end *e) {
    int r = enter(e);
    if (r) return r;
    r = ring_look(e);
    int64_t n = r ? r : (int64_t)ring_known(e);
    leave(e);
    return n;
}

int fmq_reserve(fmq_end *e, uint64_t n, fmq_spans *spans, uint64_t spin_ns, uint64_t deadline) {
    int r = enter_free(e);
    if (r) return r;
    r = wait_for(e, n, spin_ns, deadline);
    if (!r) {
        uint64_t straight = e->capacity - e->slot;
        spans->start = e->slot;
        spans->first = n < straight ? n : straight;
        spans->second = n - spans->first;
        e->reserved = n;
    }
    leave(e);
    return r;
}

int fmq_commit(fmq_end *e, uint64_t n) {
    int r = enter(e);
    if (r) return r;
    if (n > e->reserved) r = -EINVAL;
    e->reserved = 0;
    if (!r && n) ring_publish(e, n), wake_peer(e);
    leave(e);
    return r;
}

/* n are at hand, and n may be 0. */
static void put(fmq_end *e, const void *elements, uint64_t n) {
    if (!n) return;
    ring_copy_in(e, elements, n);
    ring_publish(e, n);
    wake_peer(e);
}

static void get(fmq_end *e, void *elements, uint64_t n) {
    if (!n) return;
    ring_copy_out(e, elements, n);
    ring_publish(e, n);
    wake_peer(e);
}

int fmq_write(fmq_end *e, const void *elements, uint64_t n, uint64_t spin_ns, uint64_t deadline) {
    int r = enter_free(e);
    if (r) return r;
    r = wait_for(e, n, spin_ns, deadline);
    if (!r) put(e, elements, n);
    leave(e);
    return r;
}

int fmq_read(fmq_end *e, void *elements, uint64_t n, uint64_t spin_ns, uint64_t deadline) {
    int r = enter_free(e);
    if (r) return r;
    r = wait_for(e, n, spin_ns, deadline);
    if (!r) get(e, elements, n);
    leave(e);
    return r;
}

/* Everything that has arrived is one message: its writer published it at once, and has no leave to send another. */
static int64_t take_message(fmq_end *e, void *buffer, uint64_t capacity) {
    uint64_t n = ring_known(e);
    if (n > capacity) return -EMSGSIZE;
    get(e, buffer, n);
    return (int64_t)n;
}

int64_t fmq_exchange(fmq_end *out, const void *packet, uint64_t n, fmq_end *in, void *buffer, uint64_t capacity,
                     uint64_t spin_ns, uint64_t deadline) {
    int64_t r = enter_free(in);
    if (r) return r;
    if (n && !(r = enter_free(out))) {
        if (!(r = ring_need(out, n))) put(out, packet, n);
        leave(out);
    }
    if (!r && (r = wait_for(in, 1, spin_ns, deadline)) == -EAGAIN) r = -ETIMEDOUT; /* deadline 0: but the packet is out */
    if (!r) r = take_message(in, buffer, capacity);
    leave(in);
    return r;
}
