/* A burst_function out of a library's calls that take more than one argument: what a device needs
 * to offer `native` without Python between the listener and the library. What the library cannot
 * use where it lies is copied for it.
 *
 * A cancellation or the deadline ends a run between two calls, and within one where the library
 * asks burst_foreign_ends.
 */
#include <stdint.h>

#include "burst/api.h"
#include "fmq/futex.h"
#include "burst/packet.h"

#include <pthread.h>
#include <stddef.h>
#include <string.h>

_Static_assert(sizeof(pthread_mutex_t) <= offsetof(burst_turn, running),
               "a turn begins with a mutex");
_Static_assert(_Alignof(pthread_mutex_t) <= _Alignof(burst_turn), "a turn begins with a mutex");

static pthread_mutex_t *mutex(burst_turn *turn) { return (pthread_mutex_t *)(void *)turn; }

void burst_turn_init(burst_turn *turn) {
    *turn = (burst_turn){0};
    pthread_mutex_init(mutex(turn), NULL);
}

static _Atomic uint32_t *cancelled(burst_foreign *f) { return (_Atomic uint32_t *)&f->cancelled; }

void burst_foreign_cancel(burst_foreign *f) { atomic_store(cancelled(f), 1); }

static _Atomic uintptr_t *runner(burst_turn *turn) { return (_Atomic uintptr_t *)&turn->running; }

/* Relaxed, because nothing is handed over with it: another thread asks only whether the run that it
 * has cancelled goes on. */
static void note_runner(burst_turn *turn, burst_foreign *f) {
    atomic_store_explicit(runner(turn), (uintptr_t)f, memory_order_relaxed);
}

/* Relaxed, because of that. */
_Bool burst_foreign_runs(burst_foreign *f) {
    return atomic_load_explicit(runner(f->turn), memory_order_relaxed) == (uintptr_t)f;
}

/* Relaxed, because nothing is handed over with it. */
static bool is_cancelled(burst_foreign *f) {
    if (atomic_load_explicit(cancelled(f), memory_order_relaxed)) f->ended = BURST_CANCELLED;
    return f->ended;
}

static bool is_overdue(burst_foreign *f, uint32_t ended) {
    if (f->turn->due != UINT64_MAX && futex_now() > f->turn->due) f->ended = ended;
    return f->ended;
}

static void copy(const burst_copy *copies, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) memcpy(copies[i].to, copies[i].from, copies[i].bytes);
}

static bool has_no_slot(burst_foreign *f, int r, uint32_t overdue) {
    if (r) f->ended = r == -ETIMEDOUT ? overdue : BURST_CANCELLED;
    return r;
}

/* A thread gives its slot of the run queue up before it waits for a turn, because the thread that
 * has the turn may itself have to wait for a slot. */
static void take_turn(burst_foreign *f) {
    if (!pthread_mutex_trylock(mutex(f->turn))) return;
    burst_ticket *ticket = burst_pause();
    pthread_mutex_lock(mutex(f->turn));
    has_no_slot(f, burst_resume(ticket), BURST_QUEUED);
}

/* Lets executions of the run queue through that come first; others of this turn cannot. That time
 * is not the loop's. */
static void let_others_through(burst_foreign *f) {
    uint64_t since = f->turn->until ? futex_now() : 0;
    if (!has_no_slot(f, burst_checkpoint(), BURST_OVERDUE) && since)
        f->turn->until += futex_now() - since;
}

/* In the thread that runs, which alone writes to its turn; the library asks before each node, those
 * of a loop's body, too. */
_Bool burst_foreign_ends(void *context) {
    burst_turn *turn = context;
    burst_foreign *f = turn->running;
    let_others_through(f);
    if (f->ended || is_cancelled(f) || is_overdue(f, BURST_OVERDUE)) return true;
    if (turn->until && futex_now() > turn->until) f->ended = BURST_TIMED_OUT;
    return f->ended;
}

/* In our turn. */
static void run_steps(burst_foreign *f) {
    burst_turn *turn = f->turn;
    note_runner(turn, f);
    turn->due = burst_due();
    is_overdue(f, BURST_QUEUED);
    const burst_step *end = f->steps + f->n_steps;
    for (const burst_step *s = f->steps; s < end && !f->status; s++) {
        if (s > f->steps) let_others_through(f);
        if (s > f->steps && !f->ended) is_overdue(f, BURST_OVERDUE);
        if (is_cancelled(f)) break;
        turn->until = s->limit_ns ? futex_now() + s->limit_ns : 0;
        f->status =
            f->function(f->object, s->number, s->n_inputs, s->inputs, s->n_outputs, s->outputs);
    }
}

int32_t burst_foreign_run(void *context) {
    burst_foreign *f = context;
    f->status = 0;
    f->ended = 0;
    copy(f->before, f->n_before);
    take_turn(f);
    run_steps(f);
    note_runner(f->turn, NULL);
    pthread_mutex_unlock(mutex(f->turn));
    if (f->ended == BURST_CANCELLED) return GENERAL_FAILURE;
    if (f->ended) return MISSED_DEADLINE_TRANSIENT;
    if (f->status) return GENERAL_FAILURE;
    copy(f->after, f->n_after);
    return 0;
}
