/* A burst_function out of a driver's function that takes an object and a deadline: what a driver in
 * a shared library needs to be called by a listener without Python in between. And a watch over
 * runs that go on after their deadline, or after their cancellation: nothing but the end of the
 * process stops those.
 *
 * BELL: a run stores that it is bounded and then looks whether the watch sleeps; the watch stores
 * that it sleeps and then looks for bounded runs. So a bounded run is seen, and the watch sleeps
 * without a timeout while there is none.
 */
#include <stdint.h>

#include "burst/api.h"
#include "burst/packet.h"
#include "burst/timed.h"
#include "fmq/futex.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

struct burst_timed {
    driver_function *function;
    void *object;
    _Atomic uint64_t due, cancelled; /* when the run that goes on has to end; when it was told to */
    _Atomic uint32_t is_running;
    int32_t status;
    burst_timed *before, *after;
};

enum { LOOK_NS = 250 * 1000 * 1000, AWAKE = 0, ASLEEP = 1 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the list */
static burst_timed *first;
static _Atomic uint32_t bell = AWAKE;
static _Thread_local burst_timed *current;

burst_timed *burst_timed_new(driver_function *function, void *object) {
    burst_timed *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    *t = (burst_timed){
        .function = function, .object = object, .due = UINT64_MAX, .cancelled = UINT64_MAX};
    pthread_mutex_lock(&lock);
    t->after = first;
    if (first) first->before = t;
    first = t;
    pthread_mutex_unlock(&lock);
    return t;
}

void burst_timed_free(burst_timed *t) {
    if (!t) return;
    pthread_mutex_lock(&lock);
    if (t->before) t->before->after = t->after;
    else first = t->after;
    if (t->after) t->after->before = t->before;
    pthread_mutex_unlock(&lock);
    free(t);
}

static void ring(void) {
    if (atomic_load(&bell) == ASLEEP && atomic_exchange(&bell, AWAKE) == ASLEEP)
        futex_wake(&bell, 1, UINT32_MAX);
}

/* Relaxed, because nothing is handed over with it. */
static bool is_cancelled(burst_timed *t) {
    return atomic_load_explicit(&t->cancelled, memory_order_relaxed) != UINT64_MAX;
}

void burst_timed_cancel(burst_timed *t) {
    uint64_t never = UINT64_MAX;
    atomic_compare_exchange_strong(&t->cancelled, &never, futex_now());
    ring();
}

void timed_begin(burst_timed *t, uint64_t due) {
    /* Relaxed, because the next store publishes it. */
    atomic_store_explicit(&t->due, due, memory_order_relaxed);
    atomic_store(&t->is_running, 1); /* pairs: BELL */
    if (due != UINT64_MAX) ring();
}

void timed_end(burst_timed *t) { atomic_store(&t->is_running, 0); }

int32_t burst_timed_run(void *context) {
    burst_timed *t = context;
    uint64_t due = burst_due();
    timed_begin(t, due);
    t->status = BURST_TIMED_CANCELLED;
    if (!is_cancelled(t)) {
        current = t;
        t->status = t->function(t->object, due);
        current = NULL;
    }
    timed_end(t);
    return t->status >= 0 && t->status <= LAST_STATUS ? t->status : GENERAL_FAILURE;
}

int32_t burst_timed_status(const burst_timed *t) { return t->status; }

int32_t burst_timed_checkpoint(void) {
    uint64_t due = burst_due();
    int r = burst_checkpoint();
    if ((r && r != -ETIMEDOUT) || (current && is_cancelled(current))) return GENERAL_FAILURE;
    return r || (due != UINT64_MAX && futex_now() > due) ? MISSED_DEADLINE_TRANSIENT : 0;
}

/* The object of a run that is overdue. Taken under the lock: without it the run may end, and be
 * freed, at any moment. */
static void *look(uint64_t grace_ns, bool *is_bounded) {
    uint64_t now = futex_now();
    void *found = NULL;
    *is_bounded = false;
    pthread_mutex_lock(&lock);
    for (burst_timed *t = first; t && !found; t = t->after) {
        if (!atomic_load(&t->is_running)) continue;
        uint64_t end = atomic_load(&t->due), cancelled = atomic_load(&t->cancelled);
        if (cancelled < end) end = cancelled;
        if (end == UINT64_MAX) continue;
        *is_bounded = true;
        if (now > end && now - end > grace_ns) found = t->object;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

void *burst_timed_overdue(uint64_t grace_ns) {
    for (bool is_bounded;;) {
        void *found = look(grace_ns, &is_bounded);
        if (found) return found;
        if (is_bounded) {
            futex_wait(&bell, AWAKE, UINT32_MAX, futex_now() + LOOK_NS);
            continue;
        }
        atomic_store(&bell, ASLEEP); /* pairs: BELL */
        found = look(grace_ns, &is_bounded);
        if (!found && !is_bounded) futex_wait(&bell, ASLEEP, UINT32_MAX, FMQ_FOREVER);
        atomic_store(&bell, AWAKE);
        if (found) return found;
    }
}
