/* Executions that begin in the listener's thread and end in another one: README.md, "In flight".
 *
 * A plan whose runs end elsewhere has a pending run, which is in flight from its begin until its
 * answer is out. The runs in flight are in a list, in the order of their requests. Whichever thread
 * finds that the first of them has ended answers for it, one thread at a time, so answers keep that
 * order. A thread of the device never waits for a client: if there is no room for an answer, or
 * Python is needed, it calls the listener.
 */
#include <stdint.h>

#include "burst/api.h"

#include "burst/listener.h"
#include "burst/run_queue.h"
#include "burst/timed.h"
#include "burst/trace.h"
#include "fmq/futex.h"
#include "fmq/sleep.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

typedef struct burst_pending {
    burst_listener *listener;
    struct burst_plan *plan;
    burst_listener view; /* the listener as it was when the execution began */
    burst_ticket *ticket;
    burst_timed *timed;
    uint32_t status;
    bool is_in_flight, has_ended, is_judged;
    struct burst_pending *next;
} pending;

struct burst_inflight {
    pthread_mutex_t lock; /* around all of it, and the three states of each pending run */
    pthread_cond_t changed;
    pending *first, **last;
    bool is_answering; /* a thread answers for the first */
    bool is_closed;
    int broken; /* why an answer could not go out */
    _Atomic uint64_t answered_at;
    /* The listener has to look for room; to have Python free a plan's memory. */
    _Atomic uint32_t calls, stale;
};

int inflight_new(burst_listener *l) {
    struct burst_inflight *all = l->inflight = calloc(1, sizeof *all);
    if (!all) return -ENOMEM;
    run_queue_init_lock(&all->lock);
    pthread_cond_init(&all->changed, NULL);
    all->last = &all->first;
    return 0;
}

void inflight_free(burst_listener *l) {
    if (!l->inflight) return;
    pthread_mutex_destroy(&l->inflight->lock);
    pthread_cond_destroy(&l->inflight->changed);
    free(l->inflight);
    l->inflight = NULL;
}

static void close_ticket(pending *p) {
    if (p->ticket) burst_ticket_close(p->ticket);
    burst_timed_cancel(p->timed);
}

void *burst_inflight_new(burst_listener *l, uint32_t i) {
    pending *p = i < l->count ? calloc(1, sizeof *p) : NULL;
    if (!p) return NULL;
    *p = (pending){.listener = l, .plan = &l->plans[i], .timed = burst_timed_new(NULL, p)};
    if (l->ticket) p->ticket = burst_ticket_new(l->ticket->flow);
    if (!p->timed || (l->ticket && !p->ticket)) {
        burst_timed_free(p->timed);
        free(p);
        return NULL;
    }
    pthread_mutex_lock(&l->inflight->lock);
    l->plans[i].pending = p;
    l->overlaps = 1;
    if (l->inflight->is_closed) close_ticket(p);
    pthread_mutex_unlock(&l->inflight->lock);
    return p;
}

void inflight_drop(struct burst_plan *plan) {
    pending *p = plan->pending;
    if (!p) return;
    pthread_mutex_lock(&p->listener->inflight->lock);
    plan->pending = NULL;
    pthread_mutex_unlock(&p->listener->inflight->lock);
    burst_timed_free(p->timed);
    if (p->ticket) burst_ticket_free(p->ticket);
    free(p);
}

void burst_inflight_close(burst_listener *l) {
    pthread_mutex_lock(&l->inflight->lock);
    l->inflight->is_closed = true;
    for (uint32_t i = 0; i < l->count; i++)
        if (l->plans[i].pending) close_ticket(l->plans[i].pending);
    pthread_mutex_unlock(&l->inflight->lock);
}

uint64_t burst_inflight_id(const void *run) { return ((const pending *)run)->view.id; }

burst_ticket *inflight_ticket(const pending *p) { return p->ticket; }

/* Relaxed, because it is a figure: what the listener has to do does not depend on it. */
uint64_t inflight_answered_at(const burst_listener *l) {
    return atomic_load_explicit(&l->inflight->answered_at, memory_order_relaxed);
}

_Bool burst_inflight_is_pending(const burst_listener *l, uint32_t i) {
    return i < l->count && atomic_load(&l->plans[i].state) & RUNS; /* pairs: FREE_RUN */
}

/* ---- the begin of a run ---------------------------------------------------------------------- */

void inflight_start(burst_listener *l, struct burst_plan *plan) {
    struct burst_inflight *all = l->inflight;
    pending *p = plan->pending;
    p->view = *l;
    p->view.ticket = p->ticket;
    p->view.may_not_wait = 1;
    p->next = NULL;
    timed_begin(p->timed, l->attempt.deadline);
    if (p->ticket) run_queue_detach(p->ticket);
    pthread_mutex_lock(&all->lock);
    p->is_in_flight = true;
    p->has_ended = p->is_judged = false;
    if (!all->first) note(&l->trace->device.running, l->id);
    *all->last = p;
    all->last = &p->next;
    pthread_mutex_unlock(&all->lock);
    l->is_in_flight = 1;
}

void inflight_abort(burst_listener *l, struct burst_plan *plan) {
    struct burst_inflight *all = l->inflight;
    pending *p = plan->pending, **at = &all->first;
    pthread_mutex_lock(&all->lock);
    while (*at != p) at = &(*at)->next;
    *at = NULL; /* it was the last */
    all->last = at;
    p->is_in_flight = false;
    pthread_mutex_unlock(&all->lock);
    timed_end(p->timed);
    if (p->ticket) burst_leave(p->ticket);
}

/* ---- the end of a run ------------------------------------------------------------------------ */

/* Answers for the first, in the one thread that is answering. A run that began before the answer to
 * the one before it is timed from that answer. */
static int answer(pending *p, bool may_wait, bool *is_stale) {
    if (!p->is_judged) {
        uint64_t answered = inflight_answered_at(p->listener);
        burst_attempt *x = &p->view.attempt;
        if (answered > x->begun) x->begun = answered;
        p->status = listener_judge(&p->view, is_stale);
        p->is_judged = true;
    }
    p->view.may_not_wait = !may_wait;
    return listener_put(&p->view, p->plan, p->status);
}

/* Under the lock, so that the listener is there: it cannot end before it had the lock once more. */
static void call_listener(burst_listener *l) {
    atomic_store(&l->inflight->calls, 1);
    sleep_call(l->request);
}

/* Under the lock: the first is answered, or never will be. */
static void remove_first(burst_listener *l, pending *p, int r) {
    struct burst_inflight *all = l->inflight;
    /* Relaxed, because it is a figure. */
    atomic_store_explicit(&all->answered_at, p->view.attempt.done, memory_order_relaxed);
    if (r) {
        all->broken = r;
        call_listener(l);
    }
    p->is_in_flight = false;
    if (!(all->first = p->next)) all->last = &all->first;
    else note(&l->trace->device.running, all->first->view.id);
}

static bool can_answer(const struct burst_inflight *all) {
    return all->first && all->first->has_ended && !all->is_answering;
}

/* Answers for those that have ended, from the first on. */
static void answer_ended(burst_listener *l, bool may_wait) {
    struct burst_inflight *all = l->inflight;
    pthread_mutex_lock(&all->lock);
    for (int r = 0; r != -EAGAIN && can_answer(all);) {
        pending *p = all->first;
        bool is_stale = false;
        all->is_answering = true;
        pthread_mutex_unlock(&all->lock);
        r = answer(p, may_wait, &is_stale);
        pthread_mutex_lock(&all->lock);
        all->is_answering = false;
        if (is_stale) atomic_store(&all->stale, 1);
        if (is_stale || r == -EAGAIN) call_listener(l);
        if (r != -EAGAIN) remove_first(l, p, r);
        pthread_cond_broadcast(&all->changed);
    }
    pthread_mutex_unlock(&all->lock);
}

void burst_inflight_complete(void *run) {
    pending *p = run;
    burst_listener *l = p->listener;
    timed_end(p->timed);
    if (p->ticket) burst_leave(p->ticket);
    pthread_mutex_lock(&l->inflight->lock);
    p->has_ended = true;
    bool is_mine = can_answer(l->inflight);
    if (!is_mine) pthread_cond_broadcast(&l->inflight->changed);
    pthread_mutex_unlock(&l->inflight->lock);
    if (is_mine) answer_ended(l, false);
}

void burst_inflight_copy_and_complete(void *completion) {
    const burst_completion *c = completion;
    for (const burst_copy *copy = c->copies; copy < c->copies + c->n; copy++)
        memcpy(copy->to, copy->from, copy->bytes);
    burst_inflight_complete(c->run);
}

/* ---- the listener's thread ------------------------------------------------------------------- */

void inflight_await(pending *p) {
    struct burst_inflight *all = p->listener->inflight;
    pthread_mutex_lock(&all->lock);
    while (p->is_in_flight) {
        bool is_mine = can_answer(all);
        if (!is_mine) {
            pthread_cond_wait(&all->changed, &all->lock);
            continue;
        }
        pthread_mutex_unlock(&all->lock);
        answer_ended(p->listener, true);
        pthread_mutex_lock(&all->lock);
    }
    pthread_mutex_unlock(&all->lock);
}

bool inflight_any(const burst_listener *l) {
    pthread_mutex_lock(&l->inflight->lock);
    bool is_any = l->inflight->first;
    pthread_mutex_unlock(&l->inflight->lock);
    return is_any;
}

int inflight_drain(burst_listener *l) {
    struct burst_inflight *all = l->inflight;
    pthread_mutex_lock(&all->lock);
    while (all->first) {
        bool is_mine = can_answer(all);
        if (!is_mine) pthread_cond_wait(&all->changed, &all->lock);
        pthread_mutex_unlock(&all->lock);
        if (is_mine) answer_ended(l, true);
        pthread_mutex_lock(&all->lock);
    }
    int broken = all->broken;
    pthread_mutex_unlock(&all->lock);
    return broken;
}

void burst_inflight_drain(burst_listener *l) { inflight_drain(l); }

int inflight_tend(burst_listener *l) {
    struct burst_inflight *all = l->inflight;
    if (atomic_load(&all->calls) && atomic_exchange(&all->calls, 0)) answer_ended(l, true);
    if (atomic_load(&all->stale) && atomic_exchange(&all->stale, 0)) return -ESTALE;
    pthread_mutex_lock(&all->lock);
    int broken = all->broken;
    pthread_mutex_unlock(&all->lock);
    return broken;
}
