/* When what a thread executes has to be done, whether it can be, to judge by what earlier
 * executions took, and what is said if it was not: for every request, however it came.
 *
 * The deadline goes by the thread, so that everything between the listener and an operation in the
 * midst of a model can look at it, and nothing on the way has to hand it on.
 */
#include <stdint.h>

#include "burst/api.h"
#include "burst/packet.h"
#include "burst/run_queue.h"
#include "fmq/futex.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>

static _Thread_local uint64_t due = UINT64_MAX;

uint64_t burst_due(void) { return due; }

void burst_set_due(uint64_t deadline) { due = deadline; }

/* Several listeners may execute one model. Relaxed, because it is a guess: one that gets lost does
 * no harm. */
static uint64_t look(const uint64_t *word) {
    return atomic_load_explicit((const _Atomic uint64_t *)word, memory_order_relaxed);
}

/* Relaxed, because nothing is handed over with it. */
static void put(uint64_t *word, uint64_t value) {
    atomic_store_explicit((_Atomic uint64_t *)word, value, memory_order_relaxed);
}

/* A time that is about the same as before is not stored, so that the cache line stays shared. */
static void learn_time(burst_estimate *e, uint64_t ns) {
    uint64_t usual = look(&e->usual_ns), off = ns > usual ? ns - usual : usual - ns;
    if (!usual) put(&e->usual_ns, ns);
    else if (off > usual / 8) put(&e->usual_ns, usual - usual / 8 + ns / 8);
    if (!usual || look(&e->doubts) || ns < look(&e->least_ns)) put(&e->least_ns, ns);
}

void burst_took(burst_estimate *e, uint64_t ns, int was_done) {
    if (was_done) learn_time(e, ns ? ns : 1);
    else if (ns > look(&e->begun_ns)) put(&e->begun_ns, ns);
    if (look(&e->doubts)) put(&e->doubts, 0);
}

/* The shortest that was done; before one was, the longest that was given up. */
static uint64_t least_of(const burst_estimate *e) {
    uint64_t least = look(&e->least_ns);
    return least ? least : look(&e->begun_ns);
}

/* A refusal is a guess and measures nothing. So each further refusal asks for an eighth less time,
 * until a run is tried. */
uint64_t burst_needed(const burst_estimate *e) {
    uint64_t least = least_of(e), doubts = look(&e->doubts);
    return doubts < 8 ? least - least / 8 * doubts : 0;
}

static bool is_left(uint64_t ns, uint64_t since, uint64_t deadline) {
    return since <= deadline && deadline - since >= ns;
}

/* Of one that did not begin: also one that is tried does not fit if none ever has. */
static int32_t not_begun(const burst_estimate *e, uint64_t since, uint64_t deadline) {
    return is_left(e ? least_of(e) : 0, since, deadline) ? MISSED_DEADLINE_TRANSIENT
                                                         : MISSED_DEADLINE_PERSISTENT;
}

int32_t burst_admit(burst_estimate *e, uint64_t since, uint64_t now, uint64_t deadline) {
    if (deadline == UINT64_MAX || is_left(e ? burst_needed(e) : 0, now, deadline)) return 0;
    if (e && now <= deadline) put(&e->doubts, look(&e->doubts) + 1);
    return not_begun(e, since, deadline);
}

/* ---- one execution --------------------------------------------------------------------------- */

/* When it has to end. */
static uint64_t end_of(const burst_attempt *x) {
    return x->bound < UINT64_MAX - x->deadline ? x->deadline + x->bound : UINT64_MAX;
}

int burst_judge_begin(burst_attempt *x, burst_ticket *ticket) {
    uint64_t end = end_of(x);
    int r = burst_admit(x->estimate, x->since, x->known, end);
    if (!r && ticket) r = burst_enter(ticket, x->estimate, end, x->known);
    if (r) return r == -ETIMEDOUT ? not_begun(x->estimate, x->since, end) : r;
    x->begun = ticket && ticket->number ? futex_now() : x->known;
    return 0;
}

/* Without the time that others took meanwhile. */
static uint64_t own_time(const burst_attempt *x, uint64_t now, uint64_t waited) {
    uint64_t before = x->begun - x->known, others = waited > before ? waited - before : 0,
             took = now - x->begun;
    return took > others ? took - others : 0;
}

/* It would have been done but for other executions: by the shortest so far. If none was done yet,
 * by its own time, or a longer one that was given up. One that was given up needs more than that,
 * nobody knows how much: so what others took must not be little. */
static uint32_t missed(const burst_attempt *x, uint64_t now, uint64_t own, bool was_done) {
    const burst_estimate *e = x->estimate;
    uint64_t end = end_of(x), others = now - x->since - own, least = e ? look(&e->least_ns) : 0;
    bool is_little = x->since > end || others < (end - x->since) / 8;
    if (!least && !was_done && is_little) return MISSED_DEADLINE_PERSISTENT;
    if (!least) least = e && least_of(e) > own ? least_of(e) : own;
    return is_left(least, x->since, end) ? MISSED_DEADLINE_TRANSIENT : MISSED_DEADLINE_PERSISTENT;
}

uint32_t burst_judge_late(const burst_attempt *x, burst_ticket *ticket) {
    uint64_t now = futex_now();
    return missed(x, now, own_time(x, now, ticket ? run_queue_waited(ticket) : 0), false);
}

uint32_t burst_judge_end(const burst_attempt *x, uint32_t status) {
    bool is_given_up = status == MISSED_DEADLINE_TRANSIENT;
    if (status && !is_given_up) return status;
    uint64_t own = own_time(x, x->done, x->waited);
    if (x->estimate && (is_given_up || !x->is_first)) burst_took(x->estimate, own, !is_given_up);
    if (x->done <= x->deadline) return status; /* a loop may have taken too long */
    return missed(x, x->done, own, !is_given_up);
}

int burst_begin_attempt(burst_attempt *x, burst_ticket *ticket) {
    x->known = futex_now();
    if (!x->since) x->since = x->known;
    x->due = due;
    due = end_of(x);
    int r = burst_judge_begin(x, ticket);
    if (r) due = x->due;
    return r;
}

uint32_t burst_end_attempt(burst_attempt *x, burst_ticket *ticket, uint32_t status) {
    x->done = futex_now();
    due = x->due;
    x->waited = ticket ? burst_leave(ticket) : 0;
    return burst_judge_end(x, status);
}
