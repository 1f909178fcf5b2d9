/* Waiting for a slot of a device: one word that says whether a ticket waits, one lock for that
 * case, and a futex word for each ticket. policy.c decides which ticket comes next. README.md, "Run
 * queue", has the protocol.
 *
 * While no ticket waits, entering and leaving are one compare-and-exchange each, and no clock is
 * read.
 */
#include <stdint.h>

#include "burst/api.h"
#include "fmq/futex.h"
#include "burst/run_queue.h"

#include <errno.h>
#include <linux/futex.h>

static const uint64_t RUNNER = 1, WAITER = UINT64_C(1) << 32; /* of `turns` */
enum { OUT, WAITS, RUNS, CLOSED, CALLED };                    /* of a ticket's word */

static _Thread_local burst_ticket *running; /* with which this thread has a slot */
static _Atomic uint32_t waiters;            /* tickets in line, in all queues of this process */
/* Grows when a ticket begins to wait and may outrank one that runs; a futex word. */
static _Atomic uint32_t preemption_requests;

/* ---- slots ----------------------------------------------------------------------------------- */

/* Takes a slot if one is free and no ticket waits: a ticket that waits makes `turns` greater than
 * any number of slots. */
static bool take_slot(burst_run_queue *q) {
    /* Relaxed, because the exchange looks again. */
    uint64_t turns = atomic_load_explicit(&q->turns, memory_order_relaxed);
    while (turns < q->slots)
        if (atomic_compare_exchange_weak(&q->turns, &turns, turns + RUNNER)) return true;
    return false;
}

static bool give_slot_back(burst_run_queue *q) {
    /* Relaxed, because the exchange looks again. */
    uint64_t turns = atomic_load_explicit(&q->turns, memory_order_relaxed);
    while (turns < WAITER)
        if (atomic_compare_exchange_weak(&q->turns, &turns, turns - RUNNER)) return true;
    return false;
}

/* Under the lock. */
static void note_wait(burst_ticket *t, uint64_t now) {
    t->since = now;
    atomic_fetch_add(&waiters, 1);
}

/* Under the lock. */
static void note_end_of_wait(burst_ticket *t, uint64_t now) {
    if (now > t->since) t->past.waited_ns += now - t->since;
    t->since = 0;
    atomic_fetch_sub(&waiters, 1);
}

/* Under the lock: gives a free slot to the ticket that comes next. */
static burst_ticket *hand_on(burst_run_queue *q, uint64_t now) {
    uint64_t turns = atomic_load(&q->turns);
    if (turns < WAITER || (uint32_t)turns >= q->slots) return NULL;
    burst_ticket *next = burst_policy_next(q, now);
    if (!next) return NULL;
    if (q->called == next) q->called = NULL;
    note_end_of_wait(next, now);
    atomic_fetch_add(&q->turns, RUNNER - WAITER);
    atomic_store(&next->word, RUNS); /* pairs: TURN */
    return next;
}

/* The same, with the lock taken here, unless a ticket was called that will do it. */
static burst_ticket *hand_on_the_rest(burst_run_queue *q) {
    pthread_mutex_lock(&q->lock);
    burst_ticket *next = q->called ? NULL : hand_on(q, futex_now());
    pthread_mutex_unlock(&q->lock);
    return next;
}

/* Not under the lock: wakes the tickets that were given a slot, until none is free. A ticket may
 * have gone on already: then this wakes no thread. */
static void wake(burst_run_queue *q, const burst_ticket *self, burst_ticket *next) {
    for (; next; next = hand_on_the_rest(q))
        if (next != self) futex_wake(&next->word, 1, FUTEX_BITSET_MATCH_ANY);
}

void run_queue_serve(burst_run_queue *q) { wake(q, NULL, hand_on_the_rest(q)); }

/* ---- waiting --------------------------------------------------------------------------------- */

/* Under the lock: it does not wait any more, and has no slot. */
static void drop_out(burst_ticket *t, uint32_t word) {
    burst_run_queue *q = t->queue;
    uint64_t now = futex_now();
    burst_policy_abandon(t, now);
    note_end_of_wait(t, now);
    if (q->called == t) q->called = NULL;
    atomic_fetch_sub(&q->turns, WAITER);
    atomic_store(&t->word, word); /* pairs: TURN */
}

static bool is_in_line(uint32_t word) { return word == WAITS || word == CALLED; }

static int give_up(burst_ticket *t) {
    burst_run_queue *q = t->queue;
    pthread_mutex_lock(&q->lock);
    bool gives_up = is_in_line(atomic_load(&t->word));
    if (gives_up) drop_out(t, OUT);
    pthread_mutex_unlock(&q->lock);
    wake(q, t, hand_on_the_rest(q)); /* it may have been called */
    return gives_up ? -ETIMEDOUT : 0;
}

/* The slot that was free when this ticket was called goes to the ticket that comes next, perhaps
 * itself, if it is still free. */
static void answer_call(burst_ticket *t) {
    burst_run_queue *q = t->queue;
    pthread_mutex_lock(&q->lock);
    if (q->called == t) {
        q->called = NULL;
        atomic_store(&t->word, WAITS);
    }
    pthread_mutex_unlock(&q->lock);
    wake(q, t, hand_on_the_rest(q));
}

static void give_up_slot(burst_ticket *t);

/* A slot that came too late is given back. */
static int wait_for_slot(burst_ticket *t, uint64_t latest) {
    int r = 0;
    uint32_t word;
    while (!r && is_in_line(word = atomic_load(&t->word))) { /* pairs: TURN */
        if (word == CALLED) answer_call(t);
        else if (futex_wait(&t->word, WAITS, FUTEX_BITSET_MATCH_ANY, latest) == -ETIMEDOUT)
            r = give_up(t);
    }
    if (r) return r;
    if (atomic_load(&t->word) == CLOSED) return -ECANCELED; /* pairs: TURN */
    if (latest == FMQ_FOREVER || futex_now() <= latest) return 0;
    give_up_slot(t);
    return -ETIMEDOUT;
}

/* Wakes the thread that preempts executions, to see whether one of them is in this ticket's way. */
static void request_preemption(const burst_ticket *t) {
    if (!atomic_load(&t->flow->application->preemptible) || t->flow->priority == BURST_LOW) return;
    atomic_fetch_add(&preemption_requests, 1);
    futex_wake(&preemption_requests, 1, FUTEX_BITSET_MATCH_ANY);
}

/* Under the lock: the ticket waits, and `turns` counts it. Returns the ticket that gets a slot,
 * perhaps itself, or NULL. */
static burst_ticket *stand_in_line(burst_ticket *t, uint64_t change, uint64_t now) {
    atomic_store(&t->word, WAITS);
    note_wait(t, now);
    atomic_fetch_add(&t->queue->turns, change);
    burst_ticket *next = hand_on(t->queue, now);
    if (next != t) request_preemption(t);
    return next;
}

static int enter_line(burst_ticket *t, uint64_t latest) {
    burst_run_queue *q = t->queue;
    burst_ticket *next = NULL;
    pthread_mutex_lock(&q->lock);
    bool is_closed = atomic_load(&t->closed);
    if (!is_closed) {
        uint64_t now = futex_now();
        burst_policy_arrive(t, now);
        t->past.waits++;
        next = stand_in_line(t, WAITER, now);
    }
    pthread_mutex_unlock(&q->lock);
    if (is_closed) return -ECANCELED;
    wake(q, t, next);
    return wait_for_slot(t, latest);
}

/* Takes a slot if one is free for this ticket and none waits. What is long, or below another
 * priority in use, is counted, so it takes the lock. */
static bool begin_at_once(burst_ticket *t, uint64_t now) {
    burst_run_queue *q = t->queue;
    t->begun = now;
    if (!is_counted(t)) return take_slot(q) && burst_policy_begin(t, now);
    pthread_mutex_lock(&q->lock);
    bool may_begin = burst_policy_begin(t, now), begins = may_begin && take_slot(q);
    if (may_begin && !begins) burst_policy_release(t);
    pthread_mutex_unlock(&q->lock);
    return begins;
}

/* Relaxed, because it is a figure: its thread writes it, and others may look. */
static void note_waited(burst_ticket *t, uint64_t ns) {
    atomic_store_explicit(&t->waited, ns, memory_order_relaxed);
}

/* Relaxed, because of that. */
static uint64_t waited_so_far(burst_ticket *t) {
    return atomic_load_explicit(&t->waited, memory_order_relaxed);
}

uint64_t run_queue_waited(burst_ticket *t) {
    pthread_mutex_lock(&t->queue->lock);
    uint64_t since = t->since, now = futex_now();
    pthread_mutex_unlock(&t->queue->lock);
    return waited_so_far(t) + (since && now > since ? now - since : 0);
}

void burst_lose(uint64_t ns) {
    if (running) note_waited(running, waited_so_far(running) + ns);
}

static void begin(burst_ticket *t) {
    t->holds = true;
    running = t;
}

static void end(burst_ticket *t) {
    t->holds = false;
    if (running == t) running = NULL;
}

/* A slot by its deadline, less what is estimated. */
static int take_or_wait(burst_ticket *t, uint64_t latest, uint64_t now) {
    /* Relaxed, because a close that comes at this moment might as well come after. */
    if (atomic_load_explicit(&t->closed, memory_order_relaxed)) return -ECANCELED;
    int r = begin_at_once(t, now) ? 0 : enter_line(t, latest);
    if (!r) begin(t);
    return r;
}

int burst_enter(burst_ticket *t, const burst_estimate *estimate, uint64_t deadline, uint64_t now) {
    uint64_t latest = deadline;
    if (deadline != FMQ_FOREVER) {
        uint64_t needed = estimate ? burst_needed(estimate) : 0;
        latest = deadline > needed ? deadline - needed : 0;
        if (now > latest) return -ETIMEDOUT;
    }
    t->deadline = deadline;
    burst_policy_expect(t, estimate, now);
    int r = take_or_wait(t, latest, now);
    note_waited(t, t->number ? futex_now() - now : 0);
    /* Relaxed, because it is a figure that this thread alone writes. */
    if (!r)
        atomic_store_explicit(&t->past.executions, burst_executions_of(t) + 1,
                              memory_order_relaxed);
    return r;
}

_Bool burst_run_queue_is_idle(const burst_run_queue *q) {
    /* Relaxed, because it is a hint. */
    return !atomic_load_explicit(&q->turns, memory_order_relaxed);
}

/* Under the lock: calls a ticket for the slot that was left. It gets the slot if the client of `t`
 * sends no request first. */
static burst_ticket *call(burst_run_queue *q, burst_ticket *standby) {
    if (q->called) return NULL;
    q->called = standby;
    atomic_store(&standby->word, CALLED);
    return standby;
}

static void give_up_slot(burst_ticket *t) {
    burst_run_queue *q = t->queue;
    if (!t->is_long && has_several_accounts(q)) burst_policy_doubt(t, futex_now());
    if (!is_counted(t) && !burst_policy_owes(t) && give_slot_back(q)) return;
    pthread_mutex_lock(&q->lock);
    uint64_t now = futex_now();
    if (burst_policy_owes(t) || atomic_load(&q->turns) >= WAITER) burst_policy_finish(t, now);
    else burst_policy_release(t);
    atomic_store(&t->word, OUT);
    atomic_fetch_sub(&q->turns, RUNNER);
    burst_ticket *standby = burst_policy_standby(t, now),
                 *next = standby ? call(q, standby) : hand_on(q, now);
    pthread_mutex_unlock(&q->lock);
    wake(q, NULL, next);
}

void run_queue_detach(const burst_ticket *t) {
    if (running == t) running = NULL;
}

uint64_t burst_leave(burst_ticket *t) {
    uint64_t waited = waited_so_far(t);
    if (!t->holds) return waited;
    end(t);
    give_up_slot(t);
    return waited;
}

_Bool burst_must_yield(burst_ticket *t) {
    burst_run_queue *q = t->queue;
    /* Relaxed, because a ticket that begins to wait at this moment is seen at the next
     * checkpoint. */
    if (atomic_load_explicit(&q->turns, memory_order_relaxed) < WAITER) return false;
    pthread_mutex_lock(&q->lock);
    bool yields = burst_policy_yields(t, futex_now());
    pthread_mutex_unlock(&q->lock);
    return yields;
}

int burst_yield(burst_ticket *t) {
    burst_run_queue *q = t->queue;
    burst_ticket *next = NULL;
    pthread_mutex_lock(&q->lock);
    uint64_t now = futex_now();
    bool is_closed = atomic_load(&t->closed), yields = !is_closed && burst_policy_yields(t, now);
    if (yields) {
        burst_policy_yield(t, now);
        t->past.yields++;
        next = stand_in_line(t, WAITER - RUNNER, now);
    }
    pthread_mutex_unlock(&q->lock);
    wake(q, t, next);
    if (is_closed) burst_leave(t);
    if (is_closed || !yields) return is_closed ? -ECANCELED : 0;
    int r = wait_for_slot(t, t->deadline);
    note_waited(t, waited_so_far(t) + futex_now() - now);
    if (r) end(t);
    return r;
}

void burst_ticket_close(burst_ticket *t) {
    burst_run_queue *q = t->queue;
    pthread_mutex_lock(&q->lock);
    atomic_store(&t->closed, true);
    if (is_in_line(atomic_load(&t->word))) {
        drop_out(t, CLOSED);
        futex_wake(&t->word, 1, FUTEX_BITSET_MATCH_ANY);
    }
    pthread_mutex_unlock(&q->lock);
    run_queue_serve(q);
}

/* ---- the ticket of this thread --------------------------------------------------------------- */

int burst_checkpoint(void) {
    burst_ticket *t = running;
    if (!t) return 0;
    /* Relaxed, because a close that comes at this moment is seen at the next checkpoint. */
    return atomic_load_explicit(&t->closed, memory_order_relaxed) || burst_must_yield(t)
               ? burst_yield(t)
               : 0;
}

bool run_queue_has_waiters(void) {
    return atomic_load_explicit(&waiters, memory_order_relaxed); /* relaxed, because it is a hint */
}

const uint32_t *burst_waiters(void) { return (const uint32_t *)&waiters; }

burst_ticket *burst_pause(void) {
    burst_ticket *t = running;
    if (!t) return NULL;
    t->paused = futex_now();
    burst_leave(t);
    return t;
}

int burst_resume(burst_ticket *t) {
    if (!t) return 0;
    int r = take_or_wait(t, t->deadline, futex_now());
    note_waited(t, waited_so_far(t) + futex_now() - t->paused);
    return r;
}

/* ---- preemption ------------------------------------------------------------------------------ */

burst_ticket *burst_set_preemptible(_Bool is_preemptible) {
    if (running)
        atomic_fetch_add(&running->flow->application->preemptible, is_preemptible ? 1 : UINT32_MAX);
    return running;
}

uint32_t burst_await_preemption(uint32_t seen) {
    while (atomic_load(&preemption_requests) == seen)
        futex_wait(&preemption_requests, seen, FUTEX_BITSET_MATCH_ANY, FMQ_FOREVER);
    return atomic_load(&preemption_requests);
}

burst_application *burst_application_of(burst_ticket *t) { return t->flow->application; }

uint64_t burst_outranking(burst_ticket *t) {
    pthread_mutex_lock(&t->queue->lock);
    uint64_t found = burst_policy_outranking(t);
    pthread_mutex_unlock(&t->queue->lock);
    return found;
}
