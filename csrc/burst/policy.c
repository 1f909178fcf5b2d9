/* The scheduling policy of a device: which ticket runs next, which has to yield, and what each is
 * charged. No clock, no lock and no futex: run_queue.c, which waits, passes the time in and calls
 * this under its lock.
 *
 * Between accounts (shares), and between the applications of an account: start-time fair queueing
 * by the time that they used. Within an application: strict priority. Within a priority: deficit
 * round robin between clients (flows). Within a flow: first come, first served. All of it counts
 * *contended* time, of a clock that stands still while no ticket waits: a client that runs while no
 * other wants the device owes nothing to clients that come later. README.md, "Run queue", has the
 * bounds.
 */
#include <stdint.h>

#include "burst/api.h"
#include "burst/run_queue.h"

/* For each ns that an execution lasts longer than one that was estimated to be brief may. */
static const uint64_t DOUBT = 100;
/* ns for which a slot is kept after an execution of a higher priority has come. */
static const uint64_t EXPECTED = UINT64_C(10000000000);

/* ---- the contended clock --------------------------------------------------------------------- */

/* Relaxed, because only a start and an end beside the lock read it there, and these may be a little
 * off. */
static uint64_t standing(const burst_run_queue *q) {
    return atomic_load_explicit(&q->contended, memory_order_relaxed);
}

static uint64_t contended(const burst_run_queue *q, uint64_t now) {
    return standing(q) + (q->waiting && now > q->since ? now - q->since : 0);
}

static burst_share *share_of(fair_entity *member) { return (burst_share *)member; }

static burst_application *application_of(fair_entity *member) {
    return (burst_application *)member;
}

static void begin_waiting(const burst_flow *f, uint64_t now) {
    burst_application *a = f->application;
    burst_run_queue *q = a->share->queue;
    a->rings[f->priority].waiting++;
    a->fair.waiting++;
    a->share->fair.waiting++;
    if (q->waiting++) return;
    q->since = now;
    q->shares.pace_since = q->shares.pace;
    for (fair_entity *m = q->shares.members; m; m = m->next) {
        fair_group *applications = &share_of(m)->applications;
        applications->pace_since = applications->pace;
    }
}

static void end_waiting(const burst_flow *f, uint64_t now) {
    burst_application *a = f->application;
    burst_run_queue *q = a->share->queue;
    uint64_t clock = contended(q, now);
    a->rings[f->priority].waiting--;
    a->fair.waiting--;
    a->share->fair.waiting--;
    /* Relaxed, because of that. */
    if (!--q->waiting) atomic_store_explicit(&q->contended, clock, memory_order_relaxed);
}

/* ---- what was used --------------------------------------------------------------------------- */

/* Of paces, which run freely. */
static bool is_less(uint64_t a, uint64_t b) { return (int64_t)(a - b) < 0; }

static uint64_t weighted(const fair_entity *e, uint64_t ns) { return ns * MOST_WEIGHT / e->weight; }

/* Time away counts as used in a turn that was not over, and it pays a debt: a flow saves nothing up
 * and pays all debts. */
static void settle_flow(burst_flow *f, uint64_t now) {
    if (f->present) return;
    int64_t away = now > f->left && now - f->left < INT64_MAX ? (int64_t)(now - f->left) : 0;
    if (f->deficit > 0) f->deficit = f->deficit > away ? f->deficit - away : 0;
    else f->deficit = f->deficit + away < 0 ? f->deficit + away : 0;
}

/* An account or application that was away begins at the pace of the others. Its debt shrinks by the
 * time that it was away, but not while it has its turn: that time is a rest between two
 * requests. */
static void settle_entity(fair_entity *e, uint64_t pace, bool has_turn, uint64_t now) {
    if (e->waiting) return;
    if (!e->present && !has_turn && is_less(pace, e->pace) && now > e->left) {
        uint64_t owes = e->pace - pace, away = now - e->left;
        e->pace = away < owes && weighted(e, away) < owes ? e->pace - weighted(e, away) : pace;
    }
    if (is_less(e->pace, pace)) e->pace = pace;
}

static void settle(burst_application *a, uint64_t pace_of_accounts, uint64_t pace, uint64_t now) {
    settle_entity(&a->share->fair, pace_of_accounts, false, now);
    settle_entity(&a->fair, pace, a->share->turn == a, now);
}

static void settle_now(burst_application *a, uint64_t now) {
    settle(a, a->share->queue->shares.pace, a->share->applications.pace, now);
}

static void note_presence(fair_entity *e, uint64_t change, bool leaves, uint64_t now) {
    e->present += change;
    if (leaves) e->left = now;
}

static void set_present(burst_ticket *t, bool present, uint64_t now) {
    burst_flow *f = t->flow;
    uint64_t change = (uint64_t)present - (uint64_t)t->present; /* may be -1 */
    f->present += change;
    if (!present) f->left = now, t->number = 0;
    note_presence(&f->application->fair, change, !present, now);
    note_presence(&f->application->share->fair, change, !present, now);
    t->present = present;
}

/* A ticket that began while none waited is seen only now. It is charged from when the others began
 * to wait. */
static void meet(burst_ticket *t, uint64_t now) {
    burst_flow *f = t->flow;
    settle(f->application, t->queue->shares.pace_since,
           f->application->share->applications.pace_since, now);
    if (!f->first) settle_flow(f, now);
    set_present(t, true, now);
}

static void charge_entity(fair_entity *e, uint64_t used) {
    e->used += used;
    e->pace += weighted(e, used);
}

static void charge(burst_ticket *t, uint64_t now) {
    burst_flow *f = t->flow;
    if (!t->present) meet(t, now);
    uint64_t clock = contended(t->queue, now), used = clock - t->charged;
    t->charged = clock;
    t->served += used;
    f->used += used;
    f->deficit -= (int64_t)used;
    charge_entity(&f->application->fair, used);
    charge_entity(&f->application->share->fair, used);
    t->queue->used += used;
}

/* ---- rings and lines ------------------------------------------------------------------------- */

static flow_ring *ring_of(burst_flow *f) { return &f->application->rings[f->priority]; }

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
        for (burst_ticket *other = f->first; other && other->number < t->number;
             other = other->next)
            before = other;
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
    end_waiting(f, now);
}

/* ---- the last slot --------------------------------------------------------------------------- */

/* While an account has no long execution, those of the others leave it one slot: the last one is
 * for brief executions, and for the first long one of an account. What an execution takes is known
 * from earlier ones; one that lasts longer costs its account that belief for a hundred times as
 * long. */
static bool is_doubted(const burst_share *s, uint64_t now) {
    /* Relaxed, because it is a guess. */
    return now < atomic_load_explicit(&s->doubted, memory_order_relaxed);
}

/* While executions of a priority come, those of lower ones of their application leave them one slot
 * of a device that has several: else one that comes behind lower ones would wait for as long as one
 * of these goes on. */
static bool is_expected(const burst_application *a, uint32_t priority, uint64_t now) {
    /* Relaxed, because a flow that comes at this moment finds what it finds. */
    return atomic_load_explicit(&a->used[priority], memory_order_relaxed) &&
           now < atomic_load_explicit(&a->expected[priority], memory_order_relaxed);
}

/* Whether a ticket is below another priority in use: one of which executions have come, ever. */
static bool is_below_another(const burst_ticket *t) {
    const burst_application *a = t->flow->application;
    bool found = false;
    for (uint32_t p = t->flow->priority + 1; p < PRIORITIES; p++) found |= is_expected(a, p, 0);
    return found && t->queue->slots > 1;
}

/* Whether a free slot is left to a higher priority: those below that one have all others. */
static bool leaves_slot(const burst_application *a, uint32_t priority, uint64_t now) {
    uint32_t below = 0, slots = a->share->queue->slots;
    for (uint32_t p = 1; p < PRIORITIES; p++) {
        below += a->runs[p - 1];
        if (p > priority && below && below + 1 >= slots && is_expected(a, p, now)) return true;
    }
    return false;
}

/* Seldom stored, because all threads of an application read it. */
static void expect_more(burst_flow *f, uint64_t now) {
    _Atomic uint64_t *expected = &f->application->expected[f->priority];
    uint64_t until = now + EXPECTED;
    /* Relaxed, because it is a guess. */
    if (until > atomic_load_explicit(expected, memory_order_relaxed) + EXPECTED / 16)
        atomic_store_explicit(expected, until, memory_order_relaxed);
}

void burst_policy_expect(burst_ticket *t, const burst_estimate *e, uint64_t now) {
    /* Relaxed, because it is a guess. */
    uint64_t usual =
        e ? atomic_load_explicit((const _Atomic uint64_t *)&e->usual_ns, memory_order_relaxed) : 0;
    t->is_long = !usual || usual > t->queue->brief || is_doubted(t->flow->application->share, now);
    t->is_lower = is_below_another(t);
    if (t->flow->priority) expect_more(t->flow, now);
}

void burst_policy_doubt(burst_ticket *t, uint64_t now) {
    uint64_t most = 2 * t->queue->brief; /* its thread may have waited for a processor, too */
    if (now <= t->begun || now - t->begun <= most) return;
    uint64_t until = now + (now - t->begun - most) * DOUBT;
    _Atomic uint64_t *doubted = &t->flow->application->share->doubted;
    /* Relaxed, because it is a guess: of two at once, either will do. */
    if (until > atomic_load_explicit(doubted, memory_order_relaxed))
        atomic_store_explicit(doubted, until, memory_order_relaxed);
}

static bool is_kept_from(const burst_share *s) {
    const burst_run_queue *q = s->queue;
    return s->long_runs && q->long_runs + 1 >= q->slots && q->long_accounts < q->accounts;
}

/* A slot is free: whether it is not kept for others. */
static bool may_begin(const burst_ticket *t, uint64_t now) {
    const burst_flow *f = t->flow;
    if (t->is_lower && leaves_slot(f->application, f->priority, now)) return false;
    return !t->is_long || !is_kept_from(f->application->share);
}

static void count_run(const burst_ticket *t, uint32_t change) {
    if (t->is_lower) t->flow->application->runs[t->flow->priority] += change;
    if (!t->is_long) return;
    burst_run_queue *q = t->queue;
    burst_share *s = t->flow->application->share;
    q->long_accounts -= s->long_runs > 0;
    q->long_runs += change;
    s->long_runs += change;
    q->long_accounts += s->long_runs > 0;
}

void burst_policy_release(burst_ticket *t) { count_run(t, UINT32_MAX); }

/* ---- the next ticket ------------------------------------------------------------------------- */

/* The member that has used least, of those that wait; except one. */
static fair_entity *least_used(const fair_group *group, const fair_entity *except) {
    fair_entity *least = NULL;
    for (fair_entity *m = group->members; m; m = m->next)
        if (m->waiting && m != except && (!least || is_less(m->pace, least->pace))) least = m;
    return least;
}

/* Whether an application's turn is over: another one waits that has used less, by more than half a
 * quantum. So two that take turns go from half a quantum behind to half a quantum ahead. */
static bool is_ahead(const burst_application *a, const fair_entity *other) {
    return other && is_less(other->pace + a->share->queue->quantum / 2, a->fair.pace);
}

/* The highest priority of those that wait, or -1. */
static int most_urgent(const burst_application *a) {
    int priority = PRIORITIES - 1;
    while (priority >= 0 && !a->rings[priority].first) priority--;
    return priority;
}

/* Whether a ticket of that application waits that may have a slot. That may change beside the lock,
 * so a second look may find otherwise. */
static bool is_ready(const burst_application *a, uint64_t now) {
    int urgent = most_urgent(a);
    return urgent >= 0 && !leaves_slot(a, (uint32_t)urgent, now);
}

static burst_application *least_used_application(const burst_share *s,
                                                 const burst_application *except, uint64_t now) {
    fair_entity *least = NULL;
    for (fair_entity *m = s->applications.members; m; m = m->next)
        if (application_of(m) != except && (!least || is_less(m->pace, least->pace)) &&
            is_ready(application_of(m), now))
            least = m;
    return application_of(least);
}

/* The application of a share that comes next; except one. NULL: none is ready. */
static burst_application *next_application(const burst_share *s, const burst_application *except,
                                           uint64_t now) {
    burst_application *least = least_used_application(s, except, now), *turn = s->turn;
    bool goes_on = turn && turn != except && least && is_ready(turn, now);
    return goes_on && !is_ahead(turn, &least->fair) ? turn : least;
}

/* The share that has used least, of those with an application that is ready; except one. */
static burst_share *least_used_share(const burst_run_queue *q, const burst_share *except,
                                     uint64_t now) {
    fair_entity *least = NULL;
    for (fair_entity *m = q->shares.members; m; m = m->next)
        if (m->waiting && share_of(m) != except && (!least || is_less(m->pace, least->pace)) &&
            next_application(share_of(m), NULL, now))
            least = m;
    return share_of(least);
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

/* The ticket of an application that comes next. One must wait. */
static burst_ticket *first_of(burst_application *a) {
    int64_t quantum = (int64_t)a->share->queue->quantum;
    return first_in_turn(&a->rings[most_urgent(a)], quantum)->first;
}

/* The application of a share that comes next. NULL: its next ticket may have no slot. */
static burst_application *next_of_share(const burst_share *s, uint64_t now) {
    burst_application *a = next_application(s, NULL, now);
    return a && is_kept_from(s) && (first_of(a)->is_long || is_doubted(s, now)) ? NULL : a;
}

/* That of the share that has used least, of those whose next ticket may have a slot. */
static burst_application *next_of_all(const burst_run_queue *q, uint64_t now) {
    burst_application *least = NULL;
    for (fair_entity *m = q->shares.members; m; m = m->next) {
        if (!m->waiting || (least && !is_less(m->pace, least->share->fair.pace))) continue;
        burst_application *a = next_of_share(share_of(m), now);
        if (a) least = a;
    }
    return least;
}

burst_ticket *burst_policy_next(burst_run_queue *q, uint64_t now) {
    burst_application *a = next_of_all(q, now);
    if (!a) return NULL;
    burst_share *s = a->share;
    burst_ticket *t = first_of(a);
    q->shares.pace = least_used(&q->shares, NULL)->pace;
    s->applications.pace = least_used(&s->applications, NULL)->pace;
    s->turn = a;
    leave_line(t, now);
    t->is_long |= is_doubted(s, now); /* since it began to wait */
    t->is_lower = is_below_another(t);
    count_run(t, 1);
    t->charged = contended(q, now);
    t->served = 0;
    t->begun = now;
    return t;
}

/* ---- events ---------------------------------------------------------------------------------- */

_Bool burst_policy_begin(burst_ticket *t, uint64_t now) {
    if (!may_begin(t, now)) return false;
    count_run(t, 1);
    t->charged = standing(t->queue);
    t->served = 0;
    return true;
}

_Bool burst_policy_owes(const burst_ticket *t) {
    return t->present || t->charged != standing(t->queue);
}

void burst_policy_arrive(burst_ticket *t, uint64_t now) {
    burst_flow *f = t->flow;
    settle_now(f->application, now);
    if (!f->first) {
        settle_flow(f, now);
        join(f);
    }
    t->number = ++t->queue->arrivals;
    line_up(t);
    set_present(t, true, now);
    begin_waiting(f, now);
}

void burst_policy_abandon(burst_ticket *t, uint64_t now) {
    leave_line(t, now);
    set_present(t, false, now);
}

void burst_policy_finish(burst_ticket *t, uint64_t now) {
    charge(t, now);
    burst_policy_release(t);
    set_present(t, false, now);
}

/* The first in line of an application, if there is one, without giving any flow its turn. */
static burst_ticket *first_waiting(const burst_application *a) {
    int urgent = a ? most_urgent(a) : -1;
    return urgent < 0 ? NULL : a->rings[urgent].first->first;
}

/* The first of those that may have a slot. Another account comes before another application, and
 * both before the own: the slot stays free until this ticket's thread is awake, and only its own
 * account decides whether that takes long. */
static burst_ticket *called(burst_ticket *of_account, burst_ticket *of_application,
                            burst_ticket *own, uint64_t now) {
    burst_ticket *found[] = {of_account, of_application, own};
    for (unsigned i = 0; i < 3; i++)
        if (found[i] && may_begin(found[i], now)) return found[i];
    return NULL;
}

burst_ticket *burst_policy_standby(const burst_ticket *t, uint64_t now) {
    const burst_flow *f = t->flow;
    const burst_application *a = f->application, *other = next_application(a->share, a, now);
    const burst_share *account = least_used_share(t->queue, a->share, now);
    if (f->first || (account && is_less(account->fair.pace, a->share->fair.pace))) return NULL;
    if (other && (a->share->turn != a || is_ahead(a, &other->fair))) return NULL;
    int urgent = most_urgent(a), own = (int)f->priority;
    if (urgent > own || (urgent == own && (!f->has_turn || f->deficit <= 0))) return NULL;
    const burst_application *its = account ? next_application(account, NULL, now) : NULL;
    return called(first_waiting(its), first_waiting(other), first_waiting(a), now);
}

uint64_t burst_policy_outranking(const burst_ticket *t) {
    const burst_flow *f = t->flow;
    uint64_t found = 0;
    for (uint32_t p = f->priority + 1; p < PRIORITIES; p++)
        found += f->application->rings[p].waiting;
    return found;
}

/* Whether another flow of its priority waits. */
static bool has_rivals(burst_flow *f) {
    const flow_ring *ring = ring_of(f);
    return ring->first && (ring->first != f || ring->last != f);
}

/* A ticket goes on at a checkpoint as if it had been given its slot there: who comes later begins
 * at its pace, and the next round of a flow without rivals begins. It would owe what it used while
 * only tickets of its own waited, else. */
static void go_on_at_pace(fair_group *group, const fair_entity *own, const fair_entity *other) {
    group->pace = other && is_less(other->pace, own->pace) ? other->pace : own->pace;
}

static void go_on_in_turn(burst_flow *f, int64_t quantum) {
    if (f->deficit > 0 || has_rivals(f)) return;
    f->deficit += (1 - f->deficit / quantum) * quantum;
    f->has_turn = true;
}

_Bool burst_policy_yields(burst_ticket *t, uint64_t now) {
    burst_flow *f = t->flow;
    burst_application *a = f->application;
    burst_run_queue *q = t->queue;
    if (!q->waiting) return false;
    charge(t, now);
    const fair_entity *other = least_used(&a->share->applications, &a->fair);
    const fair_entity *account = least_used(&q->shares, &a->share->fair);
    go_on_in_turn(f, (int64_t)q->quantum);
    go_on_at_pace(&a->share->applications, &a->fair, other);
    go_on_at_pace(&q->shares, &a->share->fair, account);
    int urgent = most_urgent(a), own = (int)f->priority;
    if (urgent > own) return true;
    if (urgent == own && f->deficit <= 0) return true;
    const burst_application *ready = least_used_application(a->share, a, now);
    if (ready && is_ahead(a, &ready->fair)) return true;
    if (t->served < q->quantum) return false;
    const burst_share *behind = least_used_share(q, a->share, now);
    return behind && is_less(behind->fair.pace, a->share->fair.pace);
}

void burst_policy_yield(burst_ticket *t, uint64_t now) {
    burst_flow *f = t->flow;
    charge(t, now);
    burst_policy_release(t);
    settle_now(f->application, now);
    if (!f->first) join(f);
    line_up(t);
    begin_waiting(f, now);
}
