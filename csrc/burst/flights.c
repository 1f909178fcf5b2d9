/* Executions that begin in the listener's thread and end in another one: README.md, "Flights".
 *
 * A flight is a plan's; it is up from when its execution begins until the answer is out. Those that are up are in a list, in the
 * order of their requests. Whichever thread finds the first of them ended answers for it, one thread at a time, so that answers
 * keep that order. A thread of the device never waits for a client: where there is no room for an answer, or where Python is
 * needed, it calls the listener.
 */
#include <stdint.h>

#include "burst/api.h"

#include "burst/listener.h"
#include "burst/runqueue.h"
#include "burst/timed.h"
#include "burst/trace.h"
#include "fmq/futex.h"
#include "fmq/sleep.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

typedef struct burst_flight {
    burst_listener *listener;
    struct burst_plan *plan;
    burst_listener view; /* the listener as it was when the execution began */
    burst_ticket *ticket;
    burst_timed *timed;
    uint32_t status;
    bool is_up, has_ended, is_judged;
    struct burst_flight *next;
} flight;

struct burst_air {
    pthread_mutex_t lock; /* around all of it, and the flights' three states */
    pthread_cond_t changed;
    flight *first, **last;
    bool is_landing; /* a thread answers for the first */
    bool is_closed;
    bool was_used;   /* the listener's own */
    int broken;      /* why an answer could not go out */
    _Atomic uint64_t landed_at;
    _Atomic uint32_t calls, stale; /* what the listener has to do: look for room; have Python free a plan's memory */
};

int flights_new(burst_listener *l) {
    struct burst_air *air = l->air = calloc(1, sizeof *air);
    if (!air) return -ENOMEM;
    pthread_mutex_init(&air->lock, NULL);
    pthread_cond_init(&air->changed, NULL);
    air->last = &air->first;
    return 0;
}

void flights_free(burst_listener *l) {
    if (!l->air) return;
    pthread_mutex_destroy(&l->air->lock);
    pthread_cond_destroy(&l->air->changed);
    free(l->air);
    l->air = NULL;
}

static void close_ticket(flight *f) {
    if (f->ticket) burst_ticket_close(f->ticket);
    burst_timed_cancel(f->timed);
}

void *burst_flies(burst_listener *l, uint32_t i) {
    flight *f = i < l->count ? calloc(1, sizeof *f) : NULL;
    if (!f) return NULL;
    *f = (flight){.listener = l, .plan = &l->plans[i], .timed = burst_timed_new(NULL, f)};
    if (l->ticket) f->ticket = burst_ticket_new(l->ticket->flow);
    if (!f->timed || (l->ticket && !f->ticket)) {
        burst_timed_free(f->timed);
        free(f);
        return NULL;
    }
    pthread_mutex_lock(&l->air->lock);
    l->plans[i].flight = f;
    if (l->air->is_closed) close_ticket(f);
    pthread_mutex_unlock(&l->air->lock);
    return f;
}

void flights_drop(struct burst_plan *p) {
    flight *f = p->flight;
    if (!f) return;
    pthread_mutex_lock(&f->listener->air->lock);
    p->flight = NULL;
    pthread_mutex_unlock(&f->listener->air->lock);
    burst_timed_free(f->timed);
    if (f->ticket) burst_ticket_free(f->ticket);
    free(f);
}

void burst_ground(burst_listener *l) {
    pthread_mutex_lock(&l->air->lock);
    l->air->is_closed = true;
    for (uint32_t i = 0; i < l->count; i++)
        if (l->plans[i].flight) close_ticket(l->plans[i].flight);
    pthread_mutex_unlock(&l->air->lock);
}

uint64_t burst_flight_id(const void *f) { return ((const flight *)f)->view.id; }

burst_ticket *flights_ticket(const flight *f) { return f->ticket; }

/* Relaxed, because it is a figure; and the listener looks at it where what it has to do does not hang on it. */
uint64_t flights_landed_at(const burst_listener *l) {
    return atomic_load_explicit(&l->air->landed_at, memory_order_relaxed);
}

_Bool burst_runs(const burst_listener *l, uint32_t i) {
    return i < l->count && atomic_load(&l->plans[i].state) & RUNS; /* pairs: FREE_RUN */
}

/* ---- taking off ---------------------------------------------------------------------------------------------------- */

void flights_take_off(burst_listener *l, struct burst_plan *p) {
    struct burst_air *air = l->air;
    flight *f = p->flight;
    f->view = *l;
    f->view.ticket = f->ticket;
    f->view.may_not_wait = 1;
    f->next = NULL;
    timed_begin(f->timed, l->deadline);
    if (f->ticket) runqueue_detach(f->ticket);
    pthread_mutex_lock(&air->lock);
    f->is_up = true;
    f->has_ended = f->is_judged = false;
    if (!air->first) note(&l->trace->device.running, l->id);
    *air->last = f;
    air->last = &f->next;
    pthread_mutex_unlock(&air->lock);
    l->took_off = 1;
    air->was_used = true;
}

void flights_abort(burst_listener *l, struct burst_plan *p) {
    struct burst_air *air = l->air;
    flight *f = p->flight, **at = &air->first;
    pthread_mutex_lock(&air->lock);
    while (*at != f) at = &(*at)->next;
    *at = NULL; /* it was the last */
    air->last = at;
    f->is_up = false;
    pthread_mutex_unlock(&air->lock);
    timed_end(f->timed);
    if (f->ticket) burst_leave(f->ticket);
}

/* ---- landing ------------------------------------------------------------------------------------------------------- */

/* The answer of the first, by the one thread that is landing. When the listener cannot have begun it earlier than the one
 * before it was answered, its time is counted from there. */
static int answer(flight *f, bool may_wait, bool *is_stale) {
    if (!f->is_judged) {
        uint64_t landed = flights_landed_at(f->listener);
        if (landed > f->view.started) f->view.started = landed;
        f->status = listener_judge(&f->view, is_stale);
        f->is_judged = true;
    }
    f->view.may_not_wait = !may_wait;
    return listener_put(&f->view, f->plan, f->status);
}

/* Under the lock, so that the listener is there: it cannot end before it had the lock once more. */
static void call_listener(burst_listener *l) {
    atomic_store(&l->air->calls, 1);
    sleep_call(l->request);
}

/* Under the lock: the first is answered, or never will be. */
static void take_down(burst_listener *l, flight *f, int r) {
    struct burst_air *air = l->air;
    atomic_store_explicit(&air->landed_at, f->view.done, memory_order_relaxed); /* relaxed, because it is a figure */
    if (r) {
        air->broken = r;
        call_listener(l);
    }
    f->is_up = false;
    if (!(air->first = f->next)) air->last = &air->first;
    else note(&l->trace->device.running, air->first->view.id);
}

static bool can_land(const struct burst_air *air) { return air->first && air->first->has_ended && !air->is_landing; }

/* Answers for those that have ended, from the first on. */
static void land(burst_listener *l, bool may_wait) {
    struct burst_air *air = l->air;
    pthread_mutex_lock(&air->lock);
    for (int r = 0; r != -EAGAIN && can_land(air);) {
        flight *f = air->first;
        bool is_stale = false;
        air->is_landing = true;
        pthread_mutex_unlock(&air->lock);
        r = answer(f, may_wait, &is_stale);
        pthread_mutex_lock(&air->lock);
        air->is_landing = false;
        if (is_stale) atomic_store(&air->stale, 1);
        if (is_stale || r == -EAGAIN) call_listener(l);
        if (r != -EAGAIN) take_down(l, f, r);
        pthread_cond_broadcast(&air->changed);
    }
    pthread_mutex_unlock(&air->lock);
}

void burst_landed(void *context) {
    flight *f = context;
    burst_listener *l = f->listener;
    timed_end(f->timed);
    if (f->ticket) burst_leave(f->ticket);
    pthread_mutex_lock(&l->air->lock);
    f->has_ended = true;
    bool is_mine = can_land(l->air);
    if (!is_mine) pthread_cond_broadcast(&l->air->changed);
    pthread_mutex_unlock(&l->air->lock);
    if (is_mine) land(l, false);
}

void burst_landed_after(void *context) {
    const burst_landing *landing = context;
    for (const burst_copy *c = landing->copies; c < landing->copies + landing->n; c++) memcpy(c->to, c->from, c->bytes);
    burst_landed(landing->flight);
}

/* ---- the listener's thread ----------------------------------------------------------------------------------------- */

void flights_await(const burst_listener *l, const struct burst_plan *p) {
    if (!p->flight) return;
    struct burst_air *air = l->air;
    pthread_mutex_lock(&air->lock);
    while (p->flight->is_up) {
        bool is_mine = can_land(air);
        if (!is_mine) {
            pthread_cond_wait(&air->changed, &air->lock);
            continue;
        }
        pthread_mutex_unlock(&air->lock);
        land(p->flight->listener, true);
        pthread_mutex_lock(&air->lock);
    }
    pthread_mutex_unlock(&air->lock);
}

bool flights_are_up(const burst_listener *l) {
    if (!l->air->was_used) return false;
    pthread_mutex_lock(&l->air->lock);
    bool are_up = l->air->first;
    pthread_mutex_unlock(&l->air->lock);
    return are_up;
}

int flights_land(burst_listener *l) {
    struct burst_air *air = l->air;
    pthread_mutex_lock(&air->lock);
    while (air->first) {
        bool is_mine = can_land(air);
        if (!is_mine) pthread_cond_wait(&air->changed, &air->lock);
        pthread_mutex_unlock(&air->lock);
        if (is_mine) land(l, true);
        pthread_mutex_lock(&air->lock);
    }
    int broken = air->broken;
    pthread_mutex_unlock(&air->lock);
    return broken;
}

void burst_land(burst_listener *l) { flights_land(l); }

int flights_tend(burst_listener *l) {
    struct burst_air *air = l->air;
    if (!air->was_used) return 0;
    if (atomic_load(&air->calls) && atomic_exchange(&air->calls, 0)) land(l, true);
    if (atomic_load(&air->stale) && atomic_exchange(&air->stale, 0)) return -ESTALE;
    pthread_mutex_lock(&air->lock);
    int broken = air->broken;
    pthread_mutex_unlock(&air->lock);
    return broken;
}
