/* Calls on a controller that wait for nothing: a request that is sent if it can be, a look for a
 * result, and what is told of both.
 *
 * burst_try_submit and burst_poll are for threads that must not be late, as those of sound cards
 * are. While the device is awake they make no system call, allocate nothing, and wait for no lock:
 * one that another thread has is -EAGAIN. Of the device's death they only tell.
 */
#define _GNU_SOURCE
#include "libburst/controller.h"

#include "burst/trace.h"

#include <errno.h>

/* ---- requests and results -------------------------------------------------------------------- */

/* As controller_enter; -EAGAIN: another thread is putting the next lane in its place. */
static int try_enter(controller *c) {
    if (pthread_rwlock_tryrdlock(&c->living)) return -EAGAIN;
    int r = controller_refuse(c);
    if (r) controller_leave(c);
    return r;
}

static int tell_death(controller *c) {
    return c->options.recover ? fail(-EPIPE, "the device died; a call that waits starts it again")
                              : controller_give_up(c);
}

static int send_noted(controller *c, request *q, uint64_t deadline, uint64_t *number) {
    if (pthread_mutex_trylock(&c->lock)) return -EAGAIN;
    int r = controller_send_noted(c, q, deadline, number);
    pthread_mutex_unlock(&c->lock);
    return r;
}

static int send(controller *c, request *q, uint64_t deadline, uint64_t *number) {
    int r = try_enter(c);
    if (r) return r;
    if (!(r = controller_mark(q)) && (r = send_noted(c, q, deadline, number))) {
        atomic_store(&q->in_flight, 0);
        if (r != -EAGAIN) controller_explain(c, r);
    }
    controller_leave(c);
    return r == -EPIPE ? tell_death(c) : r;
}

int burst_try_submit(burst_controller *handle, burst_request *wanted, uint64_t deadline,
                     uint64_t *number) {
    return controller_submit(handle, wanted, deadline, number, send);
}

/* The next result, whether it is wanted or not. */
static int take_result(controller *c, flight *f) {
    if (!c->count) return -ENOMSG;
    if (pthread_mutex_trylock(&c->lock)) return -EAGAIN;
    int r = controller_receive_packet(c, 0);
    if (!r) *f = controller_take_flight(c);
    pthread_mutex_unlock(&c->lock);
    return r;
}

static int receive(controller *c, uint64_t ignored, burst_outcome *o) {
    (void)ignored;
    flight f;
    int r = try_enter(c);
    if (r) return r;
    do r = take_result(c, &f);
    while (!r && !controller_land(c, &f, o));
    if (!r && o->status) r = controller_told(c, o);
    controller_leave(c);
    return r == -EPIPE ? tell_death(c) : r;
}

int burst_poll(burst_controller *handle, burst_outcome *outcome) {
    return controller_await(handle, 0, outcome, receive);
}

static int forsake(controller *c, uint64_t number) {
    int r = -ENOENT;
    pthread_mutex_lock(&c->lock);
    for (uint32_t i = 0; i < c->count; i++) {
        flight *f = &c->flights[(c->first + i) % MOST_IN_FLIGHT];
        if (f->number != number || !f->is_wanted) continue;
        f->is_wanted = false;
        if (c->lane) burst_abandon(c->lane->caller, f->id);
        r = 0;
    }
    pthread_mutex_unlock(&c->lock);
    return r;
}

int burst_cancel(burst_controller *handle, uint64_t number) {
    int r;
    controller *c = handle_take(handle, CONTROLLER, &r);
    if (!c) return r;
    pthread_rwlock_rdlock(&c->living);
    r = forsake(c, number);
    pthread_rwlock_unlock(&c->living);
    object_put(c);
    return r ? fail(r, "request %llu is not in flight", (unsigned long long)number) : 0;
}

int burst_output_shape(burst_controller *handle, uint32_t output, uint32_t *shape, uint32_t room) {
    int r;
    controller *c = handle_take(handle, CONTROLLER, &r);
    if (!c) return r;
    if ((r = controller_begin(c, RECEIVES))) return object_put(c), r;
    uint32_t *at = c->shapes;
    for (uint32_t i = 0; i < output && i < c->last.n_shapes; i++) at += 2 + at[1];
    if (output >= c->last.n_shapes)
        r = fail(-EINVAL, "the device told the shapes of %u outputs", c->last.n_shapes);
    else r = (int)at[1];
    for (int i = 0; i < r && shape && i < (int)room; i++) shape[i] = at[2 + i];
    controller_end(c, RECEIVES);
    object_put(c);
    return r;
}

int burst_count(burst_controller *handle, burst_statistics *statistics) {
    int r;
    if (!statistics) return fail(-EINVAL, "NULL where room for statistics is due");
    controller *c = handle_take(handle, CONTROLLER, &r);
    if (!c) return r;
    pthread_rwlock_rdlock(&c->living);
    const burst_statistics *n = &c->counts;
    *statistics = (burst_statistics){.requests = look(&n->requests),
                                     .results = look(&n->results),
                                     .timeouts = look(&n->timeouts),
                                     .revivals = n->revivals,
                                     .total_ns = n->total_ns,
                                     .asleep_ns = n->asleep_ns,
                                     .in_flight = c->count};
    if (c->lane) {
        const burst_client_counts *present = &c->trace->client;
        statistics->total_ns += look(&present->total_ns),
            statistics->asleep_ns += look(&present->asleep_ns);
        statistics->in_flight = look(&present->requests) - look(&present->results);
    }
    pthread_rwlock_unlock(&c->living);
    statistics->memories_sent = burst_slots_sent(c->slots);
    object_put(c);
    return 0;
}
