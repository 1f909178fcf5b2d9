/* The scheduling policy of a device: which ticket runs next, which has to yield, and what each is charged. No clock, no lock
 * and no futex: turns.c, which waits, passes the time in and calls this under its lock.
 *
 * Between uids: start-time fair queueing by the time that they used. Within a uid: strict priority. Within a priority:
 * deficit round robin between clients (flows). Within a flow: first come, first served. All of it counts *contended* time,
 * of a clock that stands still while no ticket waits: a client that runs while no other wants the device owes nothing to
 * clients that come later. README.md, "Turns", has the bounds.
 */
#include <stdint.h>

#include "burst/api.h"
#include "burst/runqueue.h"

/* ---- the contended clock ------------------------------------------------------------------------------------------ */

/* Relaxed, because only a start and an end beside the lock read it there, and these may be a little off. */
static uint64_t standing(const burst_runqueue *q) { return atomic_load_explicit(&q->contended, memory_order_relaxed); }

static uint64_t contended(const burst_runqueue *q, uint64_t now) {
    return standing(q) + (q->waiting && now > q->since ? now - q->since : 0);
}

static void begin_waiting(burst_share *s, uint64_t now) {
    burst_runqueue *q = s->queue;
    s->waiting++;
    if (q->waiting++) return;
    q->since = now;
    q->pace_since = q->pace;
}

static void end_waiting(burst_share *s, uint64_t now) {
    burst_runqueue *q = s->queue;
    uint64_t clock = contended(q, now);
    s->waiting--;
    if (!--q->waiting) atomic_store_explicit(&q->contended, clock, memory_order_relaxed); /* relaxed, because of that */
}

/* ---- what was used ------------------------------------------------------------------------------------------------- */

static bool is_less(uint64_t a, uint64_t b) { return (int64_t)(a - b) < 0; } /* of paces, which run freely */

static uint64_t weighted(const burst_share *s, uint64_t ns) { return ns * MOST_WEIGHT / s->weight; }

/* Time away counts as used in a turn that was not over, and it pays a debt: a flow saves nothing up and pays all debts. */
static void settle_flow(burst_flow *f, uint64_t now) {
    if (f->present) return;
    int64_t away = now > f->left && now - f->left < INT64_MAX ? (int64_t)(now - f->left) : 0;
    if (f->deficit > 0) f->deficit = f->deficit > away ? f->deficit - away : 0;
    else f->deficit = f->deficit + away < 0 ? f->deficit + away : 0;
}

/* A share that was away begins at the pace of the others. Its debt shrinks by the time that it was away. */
static void settle_share(burst_share *s, uint64_t pace, uint64_t now) {
    if (!s->present && is_less(pace, s->pace) && now > s->left) {
        uint64_t owes = s->pace - pace, away = now - s->left;
        s->pace = away < owes && weighted(s, away) < owes ? s->pace - weighted(s, away) : pace;
    }
    if (is_less(s->pace, pace)) s->pace = pace;
}

static void set_present(burst_ticket *t, bool present, uint64_t now) {
    burst_flow *f = t->flow;
    burst_share *s = f->share;
    if (present && !t->present) f->present++, s->present++;
    if (!present && t->present) f->present--, s->present--;
    if (!present) f->left = s->left = now, t->number = 0;
    t->present = present;
}

/* A ticket that began while none waited is seen only now. It is charged from when the others began to wait. */
static void meet(burst_ticket *t, uint64_t now) {
    burst_flow *f = t->flow;
    if (!f->share->waiting) settle_share(f->share, f->share->queue->pace_since, now);
    if (!f->first) settle_flow(f, now);
    set_present(t, true, now);
}

static void charge(burst_ticket *t, uint64_t now) {
    burst_flow *f = t->flow;
    if (!t->present) meet(t, now);
    uint64_t clock = contended(f->share->queue, now), used = clock - t->charged;
    t->charged = clock;
    t->served += used;
    f->used += used;
    f->share->used += used;
    f->share->queue->used += used;
    f->deficit -= (int64_t)used;
    f->share->pace += weighted(f->share, used);
}

/* ---- rings and lines ----------------------------------------------------------------------------------------------- */

static flow_ring *ring_of(burst_flow *f) { return &f->share->rings[f->priority]; }

static void join_last(burst_flow *f) {
    flow_ring *ring = ring_of(f);
    f->next = NULL;
    *(ring->first ? &ring->last->next : &ring->first) = f;
    ring->last = f;
    f->has_turn = false;
}

/* A flow whose turn is not over goes on with it, before the others of its priority. */
static void join(burst_flow *f) {
    flow_ring *ring = ring_of(f);
    if (!f->has_turn || f->deficit <= 0) {
        join_last(f);
        return;
    }
    f->next = ring->first;
    ring->first = f;
    if (!f->next) ring->last = f;
}

static void leave_ring(burst_flow *f) {
    flow_ring *ring = ring_of(f);
    burst_flow *before = NULL;
    for (burst_flow *other = ring->first; other != f; other = other->next) before = other;
    *(before ? &before->next : &ring->first) = f->next;
    if (ring->last == f) ring->last = before;
}

/* Inserts a ticket by its number: one that has yielded comes before those that arrived later. */
static void line_up(burst_ticket *t) {
    burst_flow *f = t->flow;
    burst_ticket *before = NULL;
    if (f->last && f->last->number < t->number) before = f->last;
    else
        for (burst_ticket *other = f->first; other && other->number < t->number; other = other->next) before = other;
    t->next = before ? before->next : f->first;
    *(before ? &before->next : &f->first) = t;
    if (!t->next) f->last = t;
}

static void leave_line(burst_ticket *t, uint64_t now) {
    burst_flow *f = t->flow;
    burst_ticket *before = NULL;
    for (burst_ticket *other = f->first; other != t; other = other->next) before = other;
    *(before ? &before->next : &f->first) = t->next;
    if (f->last == t) f->last = before;
    if (!f->first) leave_ring(f);
    end_waiting(f->share, now);
}

/* ---- the next ticket ----------------------------------------------------------------------------------------------- */

/* The uid that has used least of its share, of those that wait; except one. */
static burst_share *least_used(const burst_runqueue *q, const burst_share *except) {
    burst_share *least = NULL;
    for (burst_share *s = q->shares; s; s = s->next)
        if (s->waiting && s != except && (!least || is_less(s->pace, least->pace))) least = s;
    return least;
}

/* The highest priority of those that wait, or -1. */
static int most_urgent(const burst_share *s) {
    int priority = PRIORITIES - 1;
    while (priority >= 0 && !s->rings[priority].first) priority--;
    return priority;
}

/* Skips the whole rounds in which no flow's debt would end. */
static void skip_rounds(flow_ring *ring, int64_t quantum) {
    int64_t rounds = INT64_MAX;
    for (burst_flow *f = ring->first; f; f = f->next) {
        int64_t own = f->deficit > 0 ? 0 : -f->deficit / quantum;
        if (own < rounds) rounds = own;
    }
    for (burst_flow *f = ring->first; rounds && f; f = f->next) f->deficit += rounds * quantum;
}

static burst_flow *first_in_turn(flow_ring *ring, int64_t quantum) {
    skip_rounds(ring, quantum);
    for (;;) {
        burst_flow *f = ring->first;
        if (!f->has_turn) f->deficit += quantum;
        f->has_turn = true;
        if (f->deficit > 0) return f;
        leave_ring(f);
        join_last(f);
    }
}

burst_ticket *burst_policy_next(burst_runqueue *q, uint64_t now) {
    burst_share *s = least_used(q, NULL);
    if (!s) return NULL;
    q->pace = s->pace;
    burst_ticket *t = first_in_turn(&s->rings[most_urgent(s)], (int64_t)q->quantum)->first;
    leave_line(t, now);
    t->charged = contended(q, now);
    t->served = 0;
    return t;
}

/* ---- events -------------------------------------------------------------------------------------------------------- */

void burst_policy_begin(burst_ticket *t) {
    t->charged = standing(t->flow->share->queue);
    t->served = 0;
}

_Bool burst_policy_owes(const burst_ticket *t) { return t->present || t->charged != standing(t->flow->share->queue); }

void burst_policy_arrive(burst_ticket *t, uint64_t now) {
    burst_flow *f = t->flow;
    if (!f->share->waiting) settle_share(f->share, f->share->queue->pace, now);
    if (!f->first) {
        settle_flow(f, now);
        join(f);
    }
    t->number = ++f->share->queue->arrivals;
    line_up(t);
    set_present(t, true, now);
    begin_waiting(f->share, now);
}

void burst_policy_abandon(burst_ticket *t, uint64_t now) {
    leave_line(t, now);
    set_present(t, false, now);
}

void burst_policy_finish(burst_ticket *t, uint64_t now) {
    charge(t, now);
    set_present(t, false, now);
}

burst_ticket *burst_policy_standby(const burst_ticket *t) {
    const burst_flow *f = t->flow;
    const burst_share *s = f->share, *other = least_used(s->queue, s);
    if (f->first || (other && is_less(other->pace, s->pace))) return NULL;
    int urgent = most_urgent(s), own = (int)f->priority;
    if (urgent > own || (urgent == own && (!f->has_turn || f->deficit <= 0))) return NULL;
    if (urgent >= 0) return s->rings[urgent].first->first;
    return other ? other->rings[most_urgent(other)].first->first : NULL;
}

static uint64_t waiting_in(const flow_ring *ring) {
    uint64_t found = 0;
    for (const burst_flow *f = ring->first; f; f = f->next)
        for (const burst_ticket *t = f->first; t; t = t->next) found++;
    return found;
}

uint64_t burst_policy_outranking(const burst_ticket *t) {
    const burst_flow *f = t->flow;
    uint64_t found = 0;
    for (uint32_t p = f->priority + 1; p < PRIORITIES; p++) found += waiting_in(&f->share->rings[p]);
    return found;
}

_Bool burst_policy_yields(burst_ticket *t, uint64_t now) {
    burst_flow *f = t->flow;
    burst_share *s = f->share;
    if (!s->queue->waiting) return false;
    charge(t, now);
    int urgent = most_urgent(s), own = (int)f->priority;
    if (urgent > own) return true;
    const flow_ring *ring = ring_of(f);
    bool has_rivals = ring->first && (ring->first != f || ring->last != f);
    if (urgent == own && has_rivals && f->deficit <= 0) return true;
    const burst_share *other = least_used(s->queue, s);
    return other && t->served >= s->queue->quantum && is_less(other->pace, s->pace);
}

void burst_policy_yield(burst_ticket *t, uint64_t now) {
    burst_flow *f = t->flow;
    charge(t, now);
    if (!f->share->waiting) settle_share(f->share, f->share->queue->pace, now);
    if (!f->first) join(f);
    line_up(t);
    begin_waiting(f->share, now);
}
