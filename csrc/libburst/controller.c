/* Controllers: requests in flight on a lane, their results in the same order, and the lane that
 * comes after the device's death.
 *
 * One thread at a time sends, and one receives. Both look at the list of requests in flight under
 * `lock`, for a few instructions. The lane is read under `living`, which a thread takes for writing
 * to put the next lane in its place: then no thread is inside. Who puts another lane in its place,
 * or none, is inside of a side, too. So a thread that is inside of both, in `burst_run`, needs
 * neither lock while nothing is in flight, and no list: it waits for the one result that can
 * come.
 */
#define _GNU_SOURCE
#include "libburst/controller.h"

#include "burst/trace.h"
#include "fmq/api.h"
#include "fmq/thread.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { USUAL_DEPTH = 8, MOST_REVIVALS = 10 };
static const uint64_t LIFE_NS = UINT64_C(60000000000); /* that a device may take to begin one */
static const uint64_t USUAL_SPIN_NS = 50000, MOST_SPIN_NS = UINT64_C(10000000000);

/* ---- sides ----------------------------------------------------------------------------------- */

int controller_begin(controller *c, uint32_t sides) {
    uint32_t seen = 0;
    while (!atomic_compare_exchange_weak(&c->busy, &seen, seen | sides))
        if (seen & sides)
            return fail(-EBUSY, "another thread %s on this controller",
                        seen & sides & SENDS ? "sends" : "receives");
    return 0;
}

void controller_end(controller *c, uint32_t sides) {
    if (sides == (SENDS | RECEIVES)) atomic_store_explicit(&c->busy, 0, memory_order_release);
    else atomic_fetch_and(&c->busy, ~sides);
}

/* ---- opening and closing --------------------------------------------------------------------- */

static void free_trace(controller *c) {
    lane_free_trace(c->trace, c->trace_memory);
    c->trace = NULL, c->trace_memory = -1;
}

static int open_lane(controller *c) {
    int r = c->trace_memory = lane_new_trace(c->options.depth, &c->trace);
    if (r >= 0)
        r = lane_open(c->compiled, c->slots, c->options.spin, c->trace, c->trace_memory, &c->lane);
    if (r) free_trace(c);
    return r;
}

static void close_lane(controller *c) {
    if (!c->lane) return;
    c->counts.asleep_ns += c->trace->client.asleep_ns,
        c->counts.total_ns += c->trace->client.total_ns;
    lane_free(c->lane);
    free_trace(c);
    c->lane = NULL;
}

/* Requests hold their controller, so it must not hold them any more. Its own reference is not the
 * last one. */
static void drop_flights(controller *c) {
    request *dropped[MOST_IN_FLIGHT];
    pthread_mutex_lock(&c->lock);
    uint32_t n = c->count;
    for (uint32_t i = 0; i < n; i++)
        dropped[i] = c->flights[(c->first + i) % MOST_IN_FLIGHT].request;
    c->count = 0;
    pthread_mutex_unlock(&c->lock);
    for (uint32_t i = 0; i < n; i++) {
        atomic_store(&dropped[i]->in_flight, 0);
        object_put(dropped[i]);
    }
}

static void destroy(object *o) {
    controller *c = (controller *)o;
    close_lane(c);
    burst_slots_free(c->slots);
    object_put(c->compiled);
    pthread_mutex_destroy(&c->lock);
    pthread_rwlock_destroy(&c->living);
    free(c);
}

static int read_options(const burst_options *given, burst_options *o) {
    *o = (burst_options){.size = sizeof *o};
    if (given && given->size < 8)
        return fail(-EINVAL, "burst_options.size is %u: set it to sizeof(burst_options)",
                    given->size);
    if (given) memcpy(o, given, given->size < sizeof *o ? given->size : sizeof *o);
    if (o->depth > MOST_IN_FLIGHT)
        return fail(-EINVAL, "depth %u: at most %d requests are in flight", o->depth,
                    MOST_IN_FLIGHT);
    if (o->spin > MOST_SPIN_NS)
        return fail(-EINVAL, "spin %llu ns: at most 10 s", (unsigned long long)o->spin);
    if (o->loop_timeout > INT64_MAX)
        return fail(-EINVAL, "loop_timeout %llu ns", (unsigned long long)o->loop_timeout);
    if (!o->depth) o->depth = USUAL_DEPTH;
    if (!o->spin) o->spin = USUAL_SPIN_NS;
    return 0;
}

static controller *new_controller(compiled *p, const burst_options *options) {
    controller *c = calloc(1, sizeof *c);
    burst_slots *slots = burst_slots_new();
    if (!c || !slots)
        return free(c), burst_slots_free(slots), fail(-ENOMEM, "no memory for a controller"), NULL;
    c->slots = slots, c->compiled = p, c->options = *options, c->trace_memory = -1;
    pthread_rwlock_init(&c->living, NULL);
    thread_init_lock(&c->lock, true);
    return c;
}

static int revive_compiled(controller *c, uint64_t epoch);

/* The device may have died since the model was prepared: a controller that recovers begins on its
 * next life. */
static int open_first(controller *c) {
    uint64_t epoch = compiled_epoch(c->compiled);
    /* another controller may have begun that life */
    int r = compiled_prepare(c->compiled, burst_now() + LIFE_NS);
    if (!r) r = open_lane(c);
    if (r != -EPIPE || !c->options.recover) return r;
    r = revive_compiled(c, epoch);
    return r ? r : open_lane(c);
}

int burst_open(burst_compiled *handle, const burst_options *given, burst_controller **out) {
    burst_options options;
    int r = out ? read_options(given, &options)
                : fail(-EINVAL, "NULL where room for a controller is due");
    if (r) return r;
    compiled *p = handle_take(handle, COMPILED, &r);
    if (!p) return r;
    controller *c = new_controller(p, &options); /* owns p */
    if (!c) return object_put(p), -ENOMEM;
    r = open_first(c);
    if (!r && !(r = handle_new(&c->head, CONTROLLER, destroy, out))) return 0;
    destroy(&c->head);
    return r;
}

static void rest(void) {
    const struct timespec pause = {0, 50000};
    nanosleep(&pause, NULL);
}

int burst_close(burst_controller *handle) {
    void *closed;
    int r = handle_close(handle, CONTROLLER, &closed);
    if (r) return r;
    controller *c = closed;
    atomic_store(&c->is_closed, 1);
    pthread_rwlock_rdlock(&c->living);
    if (c->lane) lane_stop(c->lane);
    pthread_rwlock_unlock(&c->living);
    /* calls on the lane end now, and one that recovers in its own time */
    while (controller_begin(c, SENDS | RECEIVES)) rest();
    pthread_rwlock_wrlock(&c->living);
    drop_flights(c);
    close_lane(c);
    pthread_rwlock_unlock(&c->living);
    controller_end(c, SENDS | RECEIVES);
    object_put(c);
    return 0;
}

/* ---- the next life --------------------------------------------------------------------------- */

static int revive_compiled(controller *c, uint64_t epoch) {
    compiled *p = c->compiled;
    int r = client_revive(p->client, epoch);
    return r ? r : compiled_prepare(p, burst_now() + LIFE_NS);
}

/* What is in flight goes out again, in the same order; what is not wanted is forgotten. No other
 * thread is inside. */
static int send_again(controller *c) {
    uint32_t n = c->count;
    c->count = 0;
    int r = 0;
    for (uint32_t i = 0; i < n; i++) {
        flight f = c->flights[(c->first + i) % MOST_IN_FLIGHT];
        if (!f.is_wanted || r) {
            atomic_store(&f.request->in_flight, 0);
            object_put(f.request);
            continue;
        }
        c->lane->caller->deadline = f.deadline;
        r = burst_send(c->lane->caller, f.request->packet, f.request->bytes);
        f.id = c->lane->caller->id;
        c->flights[(c->first + c->count++) % MOST_IN_FLIGHT] = f;
    }
    return r;
}

static int next_life(controller *c) {
    uint64_t epoch = c->lane ? c->lane->epoch : compiled_epoch(c->compiled);
    int version = c->lane ? c->lane->version : 2, r = -EPIPE;
    close_lane(c);
    for (int tries = MOST_REVIVALS; r == -EPIPE && tries; tries--) {
        r = revive_compiled(c, epoch);
        if (r) break; /* bounded there */
        epoch = compiled_epoch(c->compiled);
        r = open_lane(c);
        if (r) continue;
        if (c->lane->version != version)
            return fail(-EPROTO, "the device's next life speaks another wire version");
        pthread_mutex_lock(&c->lock);
        r = send_again(c);
        pthread_mutex_unlock(&c->lock);
        if (r == -EPIPE) close_lane(c);
    }
    return r;
}

int controller_give_up(controller *c) {
    atomic_store(&c->broken, -EPIPE);
    return fail(-EPIPE, "the device died; a controller with `recover` starts it again");
}

/* After -EPIPE on the lane of that generation, without a lock: 0, and another lane is there. */
static int recover(controller *c, uint64_t generation) {
    if (!c->options.recover) return controller_give_up(c);
    pthread_rwlock_wrlock(&c->living);
    int r = atomic_load(&c->broken);
    if (!r && c->generation == generation && !atomic_load(&c->is_closed)) {
        r = next_life(c);
        c->generation++;
        c->counts.revivals += !r;
        if (r) atomic_store(&c->broken, r > 0 ? -EPIPE : r);
    }
    pthread_rwlock_unlock(&c->living);
    return r;
}

int controller_refuse(const controller *c) {
    int r = atomic_load(&c->broken);
    if (r)
        return fail(r,
                    "this burst is of no more use since an earlier call failed; open another one");
    return atomic_load(&c->is_closed) ? fail(-ECANCELED, "this controller was closed") : 0;
}

int controller_enter(controller *c, uint64_t *generation) {
    pthread_rwlock_rdlock(&c->living);
    int r = controller_refuse(c);
    *generation = c->generation;
    if (r) pthread_rwlock_unlock(&c->living);
    return r;
}

void controller_leave(controller *c) { pthread_rwlock_unlock(&c->living); }

int controller_explain(controller *c, int r) {
    switch (r) {
    case -EPIPE: return fail(r, "the device died");
    case -ESHUTDOWN: atomic_store(&c->broken, r); return fail(r, "the device ended this burst");
    case -EPROTO:
        atomic_store(&c->broken, r);
        return fail(r, "the device broke the protocol of the queues");
    case -ECANCELED: return fail(r, "this controller was closed, or is a forked parent's");
    case -ETIMEDOUT: return fail(r, "the deadline passed while the device had the request");
    case -EBUSY: return fail(r, "another thread is inside a call on this controller");
    default: return fail(r, "the queue of requests: %s", strerror(-r));
    }
}

/* ---- sending --------------------------------------------------------------------------------- */

/* As many as have room for their results, which are as long as requests or shorter. */
static uint32_t depth_of(const controller *c, const request *q) {
    uint64_t fitting = LENGTH * ELEMENT / q->bytes;
    if (c->lane->version == 1) return 1;
    return fitting < c->options.depth ? (uint32_t)fitting : c->options.depth;
}

/* The last request that was sent. Under the lock. */
static void note_flight(controller *c, request *q, uint64_t deadline, bool is_wanted) {
    c->flights[(c->first + c->count) % MOST_IN_FLIGHT] = (flight){.request = object_hold(q),
                                                                  .number = c->number,
                                                                  .id = c->lane->caller->id,
                                                                  .deadline = deadline,
                                                                  .is_wanted = is_wanted};
    atomic_store_explicit(&c->count, c->count + 1, memory_order_release);
}

static int send_packet(controller *c, request *q, uint64_t deadline) {
    c->lane->caller->deadline = deadline;
    int r = burst_send(c->lane->caller, q->packet, q->bytes);
    if (r) return r;
    c->number++;
    count(&c->counts.requests, 1);
    return 0;
}

int controller_mark(request *q) {
    uint32_t no = 0;
    return atomic_compare_exchange_strong(&q->in_flight, &no, 1)
               ? 0
               : fail(-EBUSY, "this request is in flight; await its result first");
}

int controller_send_noted(controller *c, request *q, uint64_t deadline, uint64_t *number) {
    int r = c->count < depth_of(c, q) ? send_packet(c, q, deadline) : -EAGAIN;
    if (r) return r;
    note_flight(c, q, deadline, true);
    *number = c->number;
    return 0;
}

/* Inside. */
static int send(controller *c, request *q, uint64_t deadline, uint64_t *number) {
    int r = controller_mark(q);
    if (r) return r;
    pthread_mutex_lock(&c->lock);
    r = controller_send_noted(c, q, deadline, number);
    pthread_mutex_unlock(&c->lock);
    if (!r) return 0;
    atomic_store(&q->in_flight, 0);
    return r == -EAGAIN ? fail(r, "%u requests are in flight; await a result first", c->count)
                        : controller_explain(c, r);
}

static int send_or_recover(controller *c, request *q, uint64_t deadline, uint64_t *number) {
    for (;;) {
        uint64_t generation;
        int r = controller_enter(c, &generation);
        if (r) return r;
        r = send(c, q, deadline, number);
        controller_leave(c);
        if (r != -EPIPE || (r = recover(c, generation))) return r;
    }
}

/* ---- receiving ------------------------------------------------------------------------------- */

/* The result that came, if it differs from the one before. */
static int decode(controller *c, int64_t code) {
    burst_caller *k = c->lane->caller;
    burst_complaint why;
    if (code && burst_decode_result(k->result, (uint64_t)code, c->lane->version, &c->last,
                                    c->shapes, &why)) {
        atomic_store(&c->broken, -EBADMSG);
        return fail(-EBADMSG, "the device's answer is malformed: element %llu: %s",
                    (unsigned long long)why.element, why.text);
    }
    c->last.on_device = k->on_device, c->last.in_driver = k->in_driver;
    return 0;
}

static burst_outcome outcome_of(const controller *c, uint64_t number) {
    const burst_result_packet *p = &c->last;
    return (burst_outcome){.number = number,
                           .on_device = p->on_device,
                           .in_driver = p->in_driver,
                           .status = p->status,
                           .n_shapes = p->n_shapes};
}

/* Only the receiver takes one out, or a thread that is alone inside. */
flight controller_take_flight(controller *c) {
    flight f = c->flights[c->first++ % MOST_IN_FLIGHT];
    atomic_store_explicit(&c->count, c->count - 1, memory_order_release);
    count(&c->counts.results, 1);
    if (!f.is_wanted) burst_settle(c->lane->caller, f.id);
    return f;
}

bool controller_land(controller *c, const flight *f, burst_outcome *o) {
    atomic_store_explicit(&f->request->in_flight, 0, memory_order_release);
    object_put(f->request);
    *o = outcome_of(c, f->number);
    return f->is_wanted;
}

static bool land(controller *c, burst_outcome *o) {
    pthread_mutex_lock(&c->lock);
    flight f = controller_take_flight(c);
    pthread_mutex_unlock(&c->lock);
    return controller_land(c, &f, o);
}

/* The device's own words, which it may change while we look: copied first. */
int controller_told(controller *c, const burst_outcome *o) {
    burst_failure f;
    memcpy(&f, &c->trace->failures[c->lane->caller->results % BURST_FAILURES], sizeof f);
    f.text[sizeof f.text - 1] = 0;
    for (char *at = f.text; *at; at++)
        if ((unsigned char)*at < ' ') *at = ' ';
    bool is_of_this = f.id == c->lane->caller->results && f.status == (uint64_t)o->status;
    return fail(o->status, "the device answers with status %d%s%s", o->status,
                is_of_this && *f.text ? ": " : "", is_of_this ? f.text : "");
}

static int note_miss(controller *c, int r) {
    if (r == -EAGAIN) return r; /* a look: none has come */
    if (r == -ETIMEDOUT) count(&c->counts.timeouts, 1);
    return controller_explain(c, r);
}

int controller_receive_packet(controller *c, uint64_t deadline) {
    int64_t code;
    while ((code = burst_receive(c->lane->caller, deadline)) == -EINTR) {}
    return code < 0 ? note_miss(c, (int)code) : decode(c, code);
}

/* Inside: one result that is wanted. */
static int receive(controller *c, uint64_t deadline, burst_outcome *o) {
    for (;;) {
        /* only this thread takes them out */
        if (!c->count) return fail(-ENOMSG, "no request is in flight");
        int r = controller_receive_packet(c, deadline);
        if (r) return r;
        if (land(c, o)) return o->status ? controller_told(c, o) : 0;
    }
}

static int receive_or_recover(controller *c, uint64_t deadline, burst_outcome *o) {
    for (;;) {
        uint64_t generation;
        int r = controller_enter(c, &generation);
        if (r) return r;
        r = receive(c, deadline, o);
        controller_leave(c);
        if (r != -EPIPE || (r = recover(c, generation))) return r;
    }
}

/* ---- both ------------------------------------------------------------------------------------ */

int controller_submit(burst_controller *handle, burst_request *wanted, uint64_t deadline,
                      uint64_t *number, sending *send) {
    int r;
    uint64_t ignored;
    controller *c = handle_take(handle, CONTROLLER, &r);
    if (!c) return r;
    request *q = handle_take(wanted, REQUEST, &r);
    if (!q) return object_put(c), r;
    if (q->controller != c) r = fail(-EINVAL, "this request was made for another controller");
    else if (!(r = controller_begin(c, SENDS))) {
        r = send(c, q, deadline, number ? number : &ignored);
        controller_end(c, SENDS);
    }
    object_put(q);
    object_put(c);
    return r;
}

int controller_await(burst_controller *handle, uint64_t deadline, burst_outcome *outcome,
                     receiving *receive) {
    int r;
    burst_outcome ignored;
    controller *c = handle_take(handle, CONTROLLER, &r);
    if (!c) return r;
    if (!(r = controller_begin(c, RECEIVES))) {
        r = receive(c, deadline, outcome ? outcome : &ignored);
        controller_end(c, RECEIVES);
    }
    object_put(c);
    return r;
}

int burst_submit(burst_controller *handle, burst_request *wanted, uint64_t deadline,
                 uint64_t *number) {
    return controller_submit(handle, wanted, deadline, number, send_or_recover);
}

int burst_await(burst_controller *handle, uint64_t deadline, burst_outcome *outcome) {
    return controller_await(handle, deadline, outcome, receive_or_recover);
}

static bool is_any_wanted(controller *c) {
    bool found = false;
    pthread_mutex_lock(&c->lock);
    for (uint32_t i = 0; i < c->count; i++)
        found |= c->flights[(c->first + i) % MOST_IN_FLIGHT].is_wanted;
    pthread_mutex_unlock(&c->lock);
    return found;
}

/* A request and its result, without a lock: nothing else is in flight, and no other thread is
 * inside. A request whose result does not come in time is in flight from then on. */
static int exchange(controller *c, request *q, uint64_t deadline, burst_outcome *o) {
    int r = send_packet(c, q, deadline);
    if (r) return controller_explain(c, r);
    r = controller_receive_packet(c, deadline);
    if (r == -ETIMEDOUT) {
        atomic_store(&q->in_flight, 1);
        pthread_mutex_lock(&c->lock);
        note_flight(c, q, deadline, false);
        burst_abandon(c->lane->caller, c->lane->caller->id);
        pthread_mutex_unlock(&c->lock);
    }
    /* it goes out again, as the same request */
    if (r == -EPIPE) c->number--, count(&c->counts.requests, UINT64_MAX);
    if (r) return r;
    count(&c->counts.results, 1);
    *o = outcome_of(c, c->number);
    return o->status ? controller_told(c, o) : 0;
}

/* If the device dies meanwhile, on its next life. */
static int exchange_or_recover(controller *c, request *q, uint64_t deadline, burst_outcome *o) {
    for (;;) {
        int r = controller_refuse(c);
        if (r) return r;
        r = exchange(c, q, deadline, o);
        if (r != -EPIPE || (r = recover(c, c->generation))) return r;
    }
}

/* Results of requests that timed out are taken first, as they come. This thread alone sends and
 * receives. */
static int run(controller *c, request *q, uint64_t deadline, burst_outcome *o) {
    if (c->count && !atomic_load(&c->broken)) {
        if (is_any_wanted(c))
            return fail(-EBUSY, "requests are in flight; await their results first");
        int r = receive_or_recover(c, deadline, o);
        if (r == -ETIMEDOUT)
            return fail(
                r,
                "the result of an earlier request did not come by the deadline; nothing was sent");
        if (r != -ENOMSG) return r;
    }
    return exchange_or_recover(c, q, deadline, o);
}

int burst_run(burst_controller *handle, burst_request *wanted, uint64_t deadline,
              burst_outcome *outcome) {
    int r;
    burst_outcome ignored;
    controller *c = handle_take(handle, CONTROLLER, &r);
    if (!c) return r;
    request *q = handle_take(wanted, REQUEST, &r);
    if (!q) return object_put(c), r;
    if (q->controller != c) r = fail(-EINVAL, "this request was made for another controller");
    else if (!(r = controller_begin(c, SENDS | RECEIVES))) {
        r = run(c, q, deadline, outcome ? outcome : &ignored);
        controller_end(c, SENDS | RECEIVES);
    }
    object_put(q);
    object_put(c);
    return r;
}
