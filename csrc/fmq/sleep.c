/* Waiting for the peer: poll for a window, then sleep. README.md proves that no wake-up is lost,
 * whichever side dies where. */
#define _GNU_SOURCE
#include <stdint.h>

#include "fmq/api.h"

#include "fmq/futex.h"
#include "fmq/life.h"
#include "fmq/readers.h"
#include "fmq/sleep.h"

#include <limits.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SPINS_AT_FIRST = 256, SPINS_PER_CLOCK = 64, SPURIOUS_LIMIT = 1000, LOOK_AGAIN = 1 };
enum { YIELDS_FROM = 16, YIELDS_PER_CLOCK = 8 }; /* looks of one of many readers */
/* ns: the main thread looks for signals this often. */
static const uint64_t SIGNAL_SLICE = 100000000;
static const uint64_t LOOK_AT_PROCESSORS = UINT64_C(1000000000); /* ns */
/* ns: without futex_waitv a death is polled for. */
static const uint64_t OLD_KERNEL_SLICE = 50000000;

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* ---- wake ------------------------------------------------------------------------------------ */

void sleep_wake_peer(fmq_end *e) {
    if (e->flag.notify) fmq_event_wake(e->flag.notify, e->flag.mask);
    if (!e->shared.their_wait) return;
    /* Plain load first: while the peer is awake its wait word stays shared in both caches.
     * pairs: SLEEP */
    if (!(atomic_load_explicit(e->shared.their_wait, memory_order_seq_cst) & 1)) return;
    if (end_has_seat(e) && !reader_is_awaited(e)) return;
    /* Even, and a value that no sleeper may be about to sleep on. */
    atomic_fetch_add(e->shared.their_wait, 1);
    futex_wake(e->shared.their_wait, INT_MAX, FUTEX_BITSET_MATCH_ANY);
}

void sleep_greet_peer(fmq_end *e) {
    if (!e->shared.their_wait) return;
    atomic_fetch_add(e->shared.their_wait, 2);
    futex_wake(e->shared.their_wait, INT_MAX, FUTEX_BITSET_MATCH_ANY);
}

uint32_t sleep_announce(_Atomic uint32_t *word) {
    return atomic_fetch_or(word, 1) | 1; /* seq_cst.  pairs: SLEEP */
}

/* Relaxed, because fmq_link sets it before any call, and fmq_unlink comes with fmq_stop, which
 * wakes the wait word whatever this says. */
static bool is_told(const fmq_end *e) {
    return atomic_load_explicit(&e->signals.told, memory_order_relaxed);
}

/* Tells this process's threads that wait on an end why it is over, by words that only this process
 * can reach: a peer may have truncated the shared ones. The words change before the wake, so no
 * sleeper can miss it. One that sleeps on its wait word alone, in memory that nobody can truncate,
 * is woken by that. */
static void tell_own_threads(fmq_end *e, uint32_t why) {
    atomic_fetch_or(&e->signals.ended, why); /* pairs: STOP */
    atomic_fetch_add(&e->signals.ended, END_TOLD);
    futex_wake_private(&e->signals.ended);
    if (is_told(e)) {
        atomic_fetch_add(e->shared.my_wait, 2); /* pairs: TOLD */
        futex_wake(e->shared.my_wait, INT_MAX, FUTEX_BITSET_MATCH_ANY);
    }
    atomic_fetch_add(&e->process->endings, 1);
    futex_wake_private(&e->process->endings);
}

void sleep_look_again(fmq_end *e) { tell_own_threads(e, 0); }

void sleep_call(fmq_end *e) {
    /* Before the change of `ended`, so a sleeper that misses this is woken. */
    atomic_store(&e->signals.called, 1);
    tell_own_threads(e, 0);
}

/* Returns when no thread is inside a call any more: from then on this end changes nothing, and
 * another end may take the role. A thread may sleep on its wait word alone, so that is woken too,
 * again and again, whatever it says. The word keeps its value, but where one end alone sleeps on
 * it: other readers may, too, and if we were killed after a change, they would sleep on. */
void fmq_stop(fmq_end *e) {
    if (!end_is_ours(e)) {
        atomic_fetch_or(&e->signals.ended, END_STOPPED);
        return;
    }
    tell_own_threads(e, END_STOPPED);
    do {
        if (e->shared.my_wait) futex_wake(e->shared.my_wait, INT_MAX, FUTEX_BITSET_MATCH_ANY);
        sched_yield();
    } while (atomic_load(&e->signals.busy)); /* pairs: STOP */
}

void fmq_lose(fmq_end *e) {
    if (!end_is_ours(e)) return;
    atomic_store(&e->signals.lost_life, atomic_load(e->shared.their_life));
    tell_own_threads(e, END_LOST);
}

/* ---- spin ------------------------------------------------------------------------------------ */

static uint32_t their_cpu(const fmq_end *e) {
    /* A hint: no order is needed. */
    return atomic_load_explicit(&e->shared.theirs->cpu, memory_order_relaxed);
}

/* Relaxed, because this only ends the spinning: the turn that follows looks properly. */
static bool is_over(const fmq_end *e) {
    uint32_t life = atomic_load_explicit(e->shared.their_life, memory_order_relaxed);
    if (life_is_dead(life) || life == LIFE_RELEASED) return true;
    uint32_t ended = atomic_load_explicit(&e->signals.ended, memory_order_relaxed);
    return ended && ((ended & END_STOPPED) || end_is_lost(e, life, ended));
}

/* The end of a window that begins now, by what is known of the processors: a peer that never moved
 * is probably on the same one, if there is only one, and a quota pays for little polling. */
static uint64_t end_of_window(const fmq_end *e, uint64_t now, uint64_t spin_ns, uint32_t mine,
                              uint32_t theirs) {
    struct fmq_processors *p = &e->process->processors;
    /* Relaxed, because all of this is a hint. */
    uint64_t looked = atomic_load_explicit(&p->looked, memory_order_relaxed);
    bool is_known =
        !p->has_siblings || (processors_core(p, mine) && (!theirs || processors_core(p, theirs)));
    if (p->look && (!looked || now - looked > LOOK_AT_PROCESSORS || !is_known))
        p->look(p, now, mine, theirs);
    /* Relaxed, because these are hints, too. */
    if (!theirs && atomic_load_explicit(&p->usable, memory_order_relaxed) == 1) return now;
    uint64_t most = atomic_load_explicit(&p->most_ns, memory_order_relaxed);
    return now + (most && most < spin_ns ? most : spin_ns);
}

static int spin_for(fmq_end *e, uint64_t n, uint64_t spin_ns, uint64_t deadline) {
    uint32_t mine = futex_cpu(), theirs = their_cpu(e);
    if (!spin_ns || mine == theirs) return -EAGAIN;
    /* Readers of a broadcast queue are more than there are processors: one that polls for the next
     * message keeps a processor from another that has not got this one yet. */
    bool yields = end_has_seat(e);
    uint32_t first = yields ? YIELDS_FROM : SPINS_AT_FIRST,
             each = yields ? YIELDS_PER_CLOCK : SPINS_PER_CLOCK;
    /* No pauses at first, because on new processors one is as long as a transfer; but a peer on the
     * same core needs them. */
    bool is_one_core = !yields && processors_are_siblings(&e->process->processors, mine, theirs);
    uint32_t at_once = is_one_core ? 0 : first;
    uint64_t until = 0;
    for (uint32_t i = 1;; i++) {
        if (i > at_once) yields ? (void)sched_yield() : relax();
        int r = ring_need(e, n);
        if (r != -EAGAIN) return r;
        if (i < first || i % each) continue;
        uint64_t now = futex_now();
        if (!until) until = end_of_window(e, now, spin_ns, mine, theirs);
        if (now >= until || now >= deadline || is_over(e)) return -EAGAIN;
    }
}

/* ---- sleep ----------------------------------------------------------------------------------- */

int sleep_ended(const fmq_end *e, uint32_t life, uint32_t ended) {
    if ((ended | atomic_load(&e->signals.ended)) & END_STOPPED) return -ECANCELED; /* pairs: STOP */
    if (life_is_dead(life)) return -EPIPE;
    if (life == LIFE_RELEASED) return -ESHUTDOWN;
    return end_is_lost(e, life, ended) ? -EPIPE : -EAGAIN;
}

/* What a sleeper saw, and sleeps on while it stays so. */
typedef struct {
    uint32_t life, ended, announced;
} sight;

/* Announces a sleep, and then looks: 0 when n are at hand, -EAGAIN when there is reason to
 * sleep. */
static int announce(fmq_end *e, uint64_t n, sight *saw) {
    /* Life before data: what a peer published before it died is delivered before its death is told.
     * pairs: DEAD */
    /* Before life, which a peer in good order changes before it closes anything. */
    saw->ended = atomic_load(&e->signals.ended);
    saw->life = atomic_load(e->shared.their_life);
    sleep_ask(e, e->sleep.is_bridged ? 0 : e->cursor.position + n - e->ring.capacity);
    saw->announced = sleep_announce(e->shared.my_wait);
    int r = ring_need(e, n);
    if (r == -EAGAIN) r = sleep_ended(e, saw->life, saw->ended);
    return r == -EAGAIN && atomic_load(&e->signals.called) && atomic_exchange(&e->signals.called, 0)
               ? -EINTR
               : r;
}

/* The kernel wakes one sleeper of a dead process's word; that one, whatever else it finds, wakes
 * the others. */
static void pass_on_death(fmq_end *e) {
    /* pairs: DEAD */
    if (life_is_dead(atomic_load(e->shared.their_life)))
        futex_wake(e->shared.their_life, INT_MAX, FUTEX_BITSET_MATCH_ANY);
}

/* Counts wake-ups without progress. A few are allowed; more than SPURIOUS_LIMIT in a row break the
 * queue. Partial progress resets the count. Shared wait words are not counted: a reader that stops
 * wakes the other readers, and each of many readers wakes the writer. */
static int count_spurious(fmq_end *e) {
    if (end_has_many(e)) return LOOK_AGAIN;
    if (e->cursor.seen != e->sleep.progress)
        e->sleep.progress = e->cursor.seen, e->sleep.spurious = 0;
    if (++e->sleep.spurious <= SPURIOUS_LIMIT) return -EAGAIN;
    return ring_broken(e);
}

/* Asked once for each thread and fork: two system calls before each sleep would be as many as the
 * sleep and the wake. A process that has no role does not count its forks. */
static bool is_main_thread(const fmq_end *e) {
    static _Thread_local int asked = INT_MIN; /* in that generation of the process */
    static _Thread_local bool is_main;
    if (end_is_unsynchronized_reader(e)) return syscall(SYS_gettid) == getpid();
    if (asked != e->process->generation) {
        is_main = syscall(SYS_gettid) == getpid();
        asked = e->process->generation;
    }
    return is_main;
}

/* A signal that arrives just before the futex call would be noticed only after it, so Python's main
 * thread, where handlers run, does not sleep for long. No other thread wakes without a reason. */
static uint64_t no_longer_than(const fmq_end *e, uint64_t deadline) {
    uint64_t slice = is_main_thread(e) ? futex_now() + SIGNAL_SLICE : FMQ_FOREVER;
    return slice < deadline ? slice : deadline;
}

/* A writer that waits for several readers. */
static int sleep_on_readers(fmq_end *e, sight saw, uint64_t until) {
    futex_entry entries[FUTEX_MOST];
    unsigned n = readers_words(e, entries);
    entries[n++] = futex_on(e->shared.my_wait, saw.announced);
    entries[n++] = futex_on_private(&e->signals.ended, saw.ended);
    int r = futex_wait_all(entries, n, until);
    return r < 0 ? r : 0;
}

/* On the wait word alone: whoever tells changes `ended`, and then that word. So what was seen
 * before the announcement has to be so after it. */
static int sleep_on_one(fmq_end *e, sight saw, uint64_t until) {
    bool is_same = atomic_load(&e->signals.ended) == saw.ended; /* pairs: TOLD */
    return is_same ? futex_wait(e->shared.my_wait, saw.announced, FUTEX_BITSET_MATCH_ANY, until)
                   : -EAGAIN;
}

/* As futex_wait; LOOK_AGAIN when no wake came and the deadline has not passed either. */
static int sleep_once(fmq_end *e, sight saw, uint64_t until) {
    if (is_told(e)) return sleep_on_one(e, saw, until);
    uint64_t slice = end_has_many(e) ? futex_now() + SLEEP_SHARED_SLICE : FMQ_FOREVER;
    int r =
        e->readers.records
            ? sleep_on_readers(e, saw, slice < until ? slice : until)
            : futex_wait_either(e->shared.my_wait, saw.announced, e->shared.their_life, saw.life,
                                &e->signals.ended, saw.ended, slice < until ? slice : until);
    if (r == -ETIMEDOUT && slice < until) return LOOK_AGAIN;
    /* EPERM: a container's filter older than the system call. */
    if (r != -ENOSYS && r != -EPERM) return r;
    slice = futex_now() + OLD_KERNEL_SLICE;
    r = futex_wait(e->shared.my_wait, saw.announced, FUTEX_BITSET_MATCH_ANY,
                   slice < until ? slice : until);
    return r == -ETIMEDOUT && slice < until ? LOOK_AGAIN : r;
}

/* One turn: 0 when n are at hand, -EAGAIN or LOOK_AGAIN to take another turn. */
static int sleep_turn(fmq_end *e, uint64_t n, uint64_t until) {
    sight saw;
    int r = announce(e, n, &saw);
    if (r != -EAGAIN) return r;
    int slept = sleep_once(e, saw, until);
    pass_on_death(e);
    r = ring_need(e, n); /* before reporting a timeout or a signal */
    if (r != -EAGAIN) return r;
    if (slept == -ETIMEDOUT || slept == -EINTR || slept == LOOK_AGAIN) return slept;
    r = count_spurious(e);
    return r == LOOK_AGAIN && futex_now() >= until ? -ETIMEDOUT : r;
}

static int sleep_for(fmq_end *e, uint64_t n, uint64_t deadline) {
    if (!e->shared.my_wait) return -EROFS;
    uint64_t until = no_longer_than(e, deadline), begin = futex_now();
    int r;
    do r = sleep_turn(e, n, until);
    while (r == -EAGAIN || r == LOOK_AGAIN);
    e->sleep.asleep_ns += futex_now() - begin;
    return r == -ETIMEDOUT && until < deadline ? -EINTR : r;
}

int sleep_spin(fmq_end *e, uint64_t n, uint64_t spin_ns) {
    int r = ring_need(e, n);
    return r == -EAGAIN ? spin_for(e, n, spin_ns, FMQ_FOREVER) : r;
}

/* Not at hand: because the peer is gone, or for now. Life before data, as above. */
static int why_not(fmq_end *e, uint64_t n) {
    uint32_t ended = atomic_load(&e->signals.ended),
             life = atomic_load(e->shared.their_life); /* pairs: DEAD */
    int r = ring_need(e, n);
    return r == -EAGAIN ? sleep_ended(e, life, ended) : r;
}

static int wait_for(fmq_end *e, uint64_t n, uint64_t spin_ns, uint64_t deadline) {
    /* A repeated call has polled already. */
    int r = e->sleep.interrupted ? -EAGAIN : spin_for(e, n, spin_ns, deadline);
    if (r == -EAGAIN) r = sleep_for(e, n, deadline);
    e->sleep.interrupted = r == -EINTR;
    return r;
}

uint64_t sleep_window(const fmq_end *e, uint64_t spin_ns) {
    if (spin_ns != FMQ_SPIN_ADAPTIVE) return spin_ns;
    return e->sleep.usual_ns <= SLEEP_COSTS ? 2 * SLEEP_COSTS : 0;
}

static int wait_and_learn(fmq_end *e, uint64_t n, uint64_t deadline) {
    uint64_t begin = futex_now();
    int r = wait_for(e, n, sleep_window(e, FMQ_SPIN_ADAPTIVE), deadline);
    uint64_t waited = futex_now() - begin;
    /* One long pause does not change the habit. */
    if (waited > 4 * SLEEP_COSTS) waited = 4 * SLEEP_COSTS;
    e->sleep.usual_ns += waited / 8 - e->sleep.usual_ns / 8;
    return r;
}

int sleep_until(fmq_end *e, uint64_t n, uint64_t spin_ns, uint64_t deadline) {
    int r = ring_need(e, n);
    if (!deadline) return r == -EAGAIN ? why_not(e, n) : r;
    if (r != -EAGAIN) return e->sleep.interrupted = false, r;
    if (deadline == SLEEP_NEVER) return spin_for(e, n, spin_ns, FMQ_FOREVER);
    return spin_ns == FMQ_SPIN_ADAPTIVE ? wait_and_learn(e, n, deadline)
                                        : wait_for(e, n, spin_ns, deadline);
}

/* ---- several at once ------------------------------------------------------------------------- */

/* What one system call sleeps on: of the first ends a wait word and a life word each (of a
 * broadcast writer all its readers'), and this process's endings. */
typedef struct {
    futex_entry entries[FUTEX_MOST];
    uint8_t owners[FUTEX_MOST]; /* whose they are */
    unsigned n, ends;
} words_of_all;

/* Marks the ends on which a transfer of one element would not wait, and returns how many those
 * are. */
static int look_at_all(fmq_end *const *ends, unsigned n, uint8_t *ready, words_of_all *words) {
    int count = 0;
    uint32_t endings = atomic_load(&ends[0]->process->endings); /* before the looks */
    words->n = words->ends = 0;
    for (unsigned i = 0; i < n; i++) {
        sight saw;
        count += ready[i] = announce(ends[i], 1, &saw) != -EAGAIN;
        unsigned most = ends[i]->readers.records ? 1 + FMQ_SEATS : 2;
        if (words->ends < i || words->n + most >= FUTEX_MOST) continue;
        unsigned before = words->n;
        words->entries[words->n++] = futex_on(ends[i]->shared.my_wait, saw.announced);
        if (ends[i]->readers.records) words->n += readers_words(ends[i], words->entries + words->n);
        else words->entries[words->n++] = futex_on(ends[i]->shared.their_life, saw.life);
        while (before < words->n) words->owners[before++] = (uint8_t)i;
        words->ends++;
    }
    words->entries[words->n] = futex_on_private(&ends[0]->process->endings, endings);
    return count;
}

/* One turn; as sleep_once. More ends than one system call takes, and old kernels, are looked at
 * every millisecond. */
static int sleep_on_all(fmq_end *const *ends, unsigned n, words_of_all *words, uint64_t until) {
    uint64_t slice = n > words->ends ? futex_now() + 1000000 : FMQ_FOREVER;
    for (unsigned i = 0; i < words->ends && slice == FMQ_FOREVER; i++)
        if (end_has_many(ends[i])) slice = futex_now() + SLEEP_SHARED_SLICE;
    int r = futex_wait_all(words->entries, words->n + 1, slice < until ? slice : until);
    if (r == -ENOSYS || r == -EPERM) {
        slice = futex_now() + 1000000;
        r = futex_wait(ends[0]->shared.my_wait, (uint32_t)words->entries[0].expected,
                       FUTEX_BITSET_MATCH_ANY, slice < until ? slice : until);
    } else if (r >= 0 && (unsigned)r < words->n) {
        count_spurious(ends[words->owners[r]]);
    }
    return r == -ETIMEDOUT && slice < until ? LOOK_AGAIN : r;
}

static int wait_for_one_of(fmq_end *const *ends, unsigned n, uint8_t *ready, uint64_t deadline) {
    words_of_all words;
    uint64_t until = no_longer_than(ends[0], deadline);
    int r, count;
    while (!(count = look_at_all(ends, n, ready, &words))) {
        if (!deadline) return -EAGAIN;
        r = sleep_on_all(ends, n, &words, until);
        for (unsigned i = 0; i < n; i++) pass_on_death(ends[i]);
        /* A peer that wakes us all the time. */
        if (r != -ETIMEDOUT && r != -EINTR && futex_now() < until) continue;
        /* Before reporting a timeout or a signal. */
        if ((count = look_at_all(ends, n, ready, &words))) return count;
        return r == -EINTR || until < deadline ? -EINTR : -ETIMEDOUT;
    }
    return count;
}

int fmq_wait_any(fmq_end *const *ends, unsigned n, uint8_t *ready, uint64_t deadline) {
    int r = n ? 0 : -EINVAL; /* nothing would ever end that wait */
    unsigned entered = 0;
    while (entered < n && !r) {
        r = ends[entered]->shared.my_wait ? end_enter_unreserved(ends[entered]) : -EROFS;
        if (!r) entered++;
    }
    if (!r) r = wait_for_one_of(ends, n, ready, deadline);
    while (entered) end_leave(ends[--entered]);
    return r;
}
