/* The device's side of a burst: waits for a request, recognises it by its bytes, and answers.
 *
 * A plan is a request that Python checked and bound to memory once. While a packet equals a plan's,
 * nothing is parsed: what was proved for those bytes still holds, because a slot never comes to
 * stand for other memory, and freeing one ends the plans that use it (README.md, "Plans"). A plan
 * with a C function runs here, without Python and its lock.
 */
#define _GNU_SOURCE
#include <stdint.h>

#include "burst/api.h"

#include "burst/blame.h"
#include "burst/listener.h"
#include "fmq/futex.h"
#include "burst/packet.h"
#include "burst/real_time.h"
#include "burst/run_queue.h"
#include "fmq/sleep.h"
#include "burst/trace.h"

#include <stdlib.h>

/* ns that a client may leave its results unread */
static const uint64_t PATIENCE = UINT64_C(5000000000);
static const uint64_t MOST_MORE = 250000; /* ns of polling after long work, beyond the usual */
/* ns after that in which a request comes that was on its way, and its wake-up */
static const uint64_t PAUSE = 300000;
enum { HABIT = 3 }; /* so many pauses in a row make a stream */

static _Atomic uint32_t polling; /* listeners of this process */

/* ---- plans ----------------------------------------------------------------------------------- */

int burst_plans(burst_listener *l, uint32_t n) {
    l->plans = calloc(n, sizeof *l->plans);
    l->count = l->plans ? n : 0;
    return l->plans ? inflight_new(l) : -ENOMEM;
}

static void drop(struct burst_plan *p) {
    inflight_drop(p);
    free(p->packet);
    free(p->answer);
    *p = (struct burst_plan){0};
}

void burst_drop_plans(burst_listener *l) {
    for (uint32_t i = 0; i < l->count; i++) drop(&l->plans[i]);
    free(l->plans);
    inflight_free(l);
    l->plans = NULL;
    l->count = l->used = 0;
}

static unsigned char *copy_of(const void *bytes, uint64_t n) {
    unsigned char *copy = malloc(n);
    if (copy) memcpy(copy, bytes, n);
    return copy;
}

/* Only in the listener's own thread: that one alone reads what is freed here. */
int burst_learn(burst_listener *l, uint32_t i, const void *answer, uint64_t answer_bytes,
                void *function, void *context, int measure, uint64_t copied, uint64_t checked) {
    if (i >= l->count || (function && !answer)) return -EINVAL;
    struct burst_plan *p = &l->plans[i];
    if (p->pending) inflight_await(p->pending);
    drop(p);
    p->packet_bytes = l->bytes - (l->framed ? DATUM : 0);
    p->answer_bytes = answer_bytes;
    p->packet = copy_of(l->buffer, p->packet_bytes);
    p->answer = answer ? copy_of(answer, answer_bytes) : NULL;
    if (!p->packet || (answer && !p->answer)) return drop(p), -ENOMEM;
    p->function = (burst_function *)function;
    p->context = context;
    p->measure = measure;
    p->enters_itself = false;
    p->copied = copied;
    p->checked = checked;
    p->last_use = ++l->uses;
    if (l->used <= i) l->used = i + 1;
    l->current = (int32_t)i;
    atomic_store(&p->state, VALID | RUNS);
    return 0;
}

/* State 0: nothing was learnt there, or it was forgotten. */
uint32_t burst_next_plan(const burst_listener *l) {
    uint32_t found = 0;
    uint64_t first = UINT64_MAX;
    for (uint32_t i = 0; i < l->count; i++) {
        uint32_t state = atomic_load(&l->plans[i].state); /* pairs: FREE_RUN */
        if (!state) return i;
        if (state & RUNS || l->plans[i].last_use >= first) continue;
        first = l->plans[i].last_use;
        found = i;
    }
    return found;
}

int burst_expect(burst_listener *l, uint32_t i, burst_estimate *estimate) {
    if (i >= l->count) return -EINVAL;
    l->plans[i].estimate = estimate;
    return 0;
}

int burst_enters_itself(burst_listener *l, uint32_t i) {
    if (i >= l->count) return -EINVAL;
    l->plans[i].enters_itself = true;
    return 0;
}

int burst_writes(burst_listener *l, uint32_t i, uint32_t **writes, uint64_t n) {
    if (i >= l->count) return -EINVAL;
    l->plans[i].writes = writes;
    l->plans[i].n_writes = n;
    return 0;
}

/* After an execution that failed, or was not run: what it writes has no value. Relaxed, because a
 * word says nothing about memory that is being written. */
static void invalidate_outputs(const struct burst_plan *p) {
    for (uint64_t i = 0; i < p->n_writes; i++)
        atomic_store_explicit((_Atomic uint32_t *)p->writes[i], 1, memory_order_relaxed);
}

int burst_forget(burst_listener *l, uint32_t i) {
    if (i >= l->count) return 0;
    /* pairs: FREE_RUN */
    return (atomic_fetch_and(&l->plans[i].state, ~(uint32_t)VALID) & RUNS) != 0;
}

/* Marks a plan as running, unless it was forgotten. */
static bool begin(burst_listener *l, uint32_t i) {
    uint32_t idle = VALID;
    /* pairs: FREE_RUN */
    if (!atomic_compare_exchange_strong(&l->plans[i].state, &idle, VALID | RUNS)) return false;
    l->current = (int32_t)i;
    return true;
}

/* Requests usually come in the order of last time. */
static bool recognise(burst_listener *l, uint64_t bytes) {
    for (uint32_t k = 0, i = l->last + 1; k < l->used; k++, i++) {
        if (i >= l->used) i = 0;
        const struct burst_plan *p = &l->plans[i];
        if (p->packet_bytes != bytes || !bytes || memcmp(p->packet, l->buffer, bytes)) continue;
        l->last = i;
        if (p->pending) inflight_await(p->pending);
        if (!begin(l, i)) continue;
        l->plans[i].last_use = ++l->uses;
        return true;
    }
    return false;
}

/* ---- answers --------------------------------------------------------------------------------- */

static int put_answer(burst_listener *l, unsigned char *packet, uint64_t bytes) {
    if (l->framed) store_u64(packet + bytes - 16, l->id);
    int r = end_enter_unreserved(l->out);
    if (r) return r;
    if ((r = packet_put(l->out, packet, bytes)) == -EAGAIN && !l->may_not_wait) {
        uint64_t deadline = futex_now() + PATIENCE;
        /* signals are for when we return */
        while ((r = sleep_until(l->out, bytes / DATUM, 0, deadline)) == -EINTR) {}
        if (!r) r = packet_put(l->out, packet, bytes);
    }
    end_leave(l->out);
    return r;
}

/* An answer of a status alone. */
static int put_status(burst_listener *l, uint32_t status) {
    unsigned char packet[3 * DATUM];
    int32_t known = status > LAST_STATUS ? GENERAL_FAILURE : (int32_t)status;
    burst_result_packet result = {
        .on_device = NOT_MEASURED, .in_driver = NOT_MEASURED, .status = known};
    int64_t bytes =
        burst_encode_result(&result, NULL, l->framed ? 2 : 1, packet, sizeof packet, NULL);
    return put_answer(l, packet, (uint64_t)bytes);
}

/* The time on the device is what the device has measured, which Python has written; else all the
 * time of the run. */
static void put_times(const burst_listener *l, unsigned char *timing, bool is_measured) {
    const burst_attempt *x = &l->attempt;
    uint64_t run = (x->done - x->begun) / 1000, measured = load_u64(timing + 8);
    store_u64(timing + 8, is_measured && measured < run ? measured : run);
    store_u64(timing + 16, (x->done - l->taken) / 1000);
}

static int put_success(burst_listener *l, unsigned char *packet, uint64_t bytes, bool measure) {
    if (measure && !load_u32(packet + RESULT_STATUS_AT))
        put_times(l, packet + bytes - (l->framed ? 2 * DATUM : DATUM), packet == l->buffer);
    int r = put_answer(l, packet, bytes);
    return r == -EMSGSIZE ? put_status(l, GENERAL_FAILURE) : r;
}

/* That time, or when the last run that ended elsewhere was answered, if that was later. */
static uint64_t later(const burst_listener *l, uint64_t time) {
    uint64_t answered = l->overlaps ? inflight_answered_at(l) : 0;
    return answered > time ? answered : time;
}

static void note_done(burst_listener *l) {
    burst_attempt *x = &l->attempt;
    x->done = futex_now();
    if (!x->begun) x->begun = x->done;
    burst_served *record = &l->trace->served[l->id % BURST_RECORDS];
    note(&record->id, 0);
    note(&record->taken, l->taken);
    note(&record->started, x->begun);
    note(&record->done, x->done);
    note(&record->id, l->id);
    count(&l->trace->device.answered, 1);
    count(&l->trace->device.busy_ns, x->done - later(l, l->taken));
    note(&l->trace->device.running, 0);
}

static void note_copies(burst_listener *l, const struct burst_plan *p) {
    if (p->copied) count(&l->trace->device.copied, p->copied);
    if (p->checked) count(&l->trace->device.checked, p->checked);
}

static struct burst_plan *current(const burst_listener *l) {
    return l->current < 0 ? NULL : l->plans + l->current;
}

/* What Python made of a request: `answer`, or the success that the plan has learnt. */
static int put_outcome(burst_listener *l, const struct burst_plan *p, const void *answer,
                       uint64_t bytes) {
    bool measure = p && p->measure;
    if (!answer)
        return p && p->answer ? put_success(l, p->answer, p->answer_bytes, measure) : -EINVAL;
    if (bytes > l->buffer_bytes || bytes < 2 * DATUM) return put_status(l, GENERAL_FAILURE);
    memcpy(l->buffer, answer, bytes);
    return put_success(l, l->buffer, bytes, measure);
}

/* 0, or -ESTALE: the plan was forgotten while it ran, and Python now frees its memory. Called
 * before the answer goes out: a client that has the result may free the memory, and then nothing
 * runs on it. The plan's own bytes stay until we learn. */
static int leave_plan(burst_listener *l) {
    struct burst_plan *p = current(l);
    if (!p) return 0;
    l->current = -1;
    return atomic_fetch_and(&p->state, ~(uint32_t)RUNS) & VALID ? 0 : -ESTALE; /* pairs: FREE_RUN */
}

/* Of the run queue. After a run that Python began it has none any more. */
static void leave_slot(burst_listener *l) {
    if (l->ticket) burst_leave(l->ticket);
}

/* How long the request lay in the queue while earlier ones were executed: it came before those were
 * answered. When it came is what its client says, as that decides what this client is told, and
 * nothing else. */
static uint64_t waited_in_queue(const burst_listener *l) {
    const burst_sent *record = &l->trace->sent[l->id % BURST_RECORDS];
    uint64_t sent = look(&record->sent);
    return look(&record->id) == l->id && sent < l->before ? l->before - sent : 0;
}

static uint32_t with_usual_time(const burst_listener *l, uint32_t status) {
    const burst_estimate *e = l->attempt.estimate;
    if (status == MISSED_DEADLINE_TRANSIENT || status == MISSED_DEADLINE_PERSISTENT)
        note(&l->trace->device.usual_ns, e ? e->usual_ns : 0);
    return status;
}

/* What is said of the execution in hand, which has ended with that status. */
static uint32_t final_status(burst_listener *l, uint32_t status) {
    burst_attempt *x = &l->attempt;
    const struct burst_plan *p = current(l);
    x->waited = l->ticket && p && !p->enters_itself ? l->ticket->waited : 0;
    if (real_time_was_lost()) return real_time_tell(l->trace, l->id);
    return with_usual_time(l, l->is_judged ? status : burst_judge_end(x, status));
}

static bool is_any_in_flight(const burst_listener *l) { return l->overlaps && inflight_any(l); }

/* The request in hand is answered by this thread, after those that came before it. */
static int answer_here(burst_listener *l) {
    if (l->is_in_flight) inflight_abort(l, current(l));
    l->is_in_flight = 0;
    return is_any_in_flight(l) ? inflight_drain(l) : 0;
}

static int answer_python(burst_listener *l, const void *answer, uint64_t bytes) {
    if (!l->in_python) return 0;
    l->in_python = 0;
    /* Python has begun it */
    if (l->is_in_flight && !answer) return l->is_in_flight = 0, l->current = -1, 0;
    int over = answer_here(l);
    if (over) return over;
    leave_slot(l);
    note_done(l);
    const struct burst_plan *p = current(l);
    if (p) note_copies(l, p);
    uint32_t said =
        answer && bytes >= DATUM ? load_u32((const unsigned char *)answer + RESULT_STATUS_AT) : 0;
    uint32_t status = final_status(l, said);
    l->is_judged = 0;
    if (p && status) invalidate_outputs(p);
    int stale = leave_plan(l),
        r = status != said ? put_status(l, status) : put_outcome(l, p, answer, bytes);
    return r ? r : stale;
}

/* Whether an answer goes out by plain stores: there is room, the client looks, and no ticket waits
 * for the slot. */
static bool is_plain(const burst_listener *l, const struct burst_plan *p) {
    const struct fmq_end *e = l->out;
    bool fits = p && p->answer && !is_any_in_flight(l) && ring_known(e) >= p->answer_bytes / DATUM;
    return fits && !sleep_wakes(e) && !run_queue_has_waiters();
}

int64_t burst_answer(burst_listener *l) {
    return l->is_in_flight || is_plain(l, current(l)) ? answer_python(l, NULL, 0) : -EAGAIN;
}

uint32_t listener_judge(burst_listener *view, bool *is_stale) {
    const struct burst_plan *p = current(view);
    note_done(view);
    uint32_t status = final_status(view, 0);
    note_copies(view, p);
    if (status) invalidate_outputs(p);
    *is_stale = leave_plan(view);
    return status;
}

int listener_put(burst_listener *view, const struct burst_plan *p, uint32_t status) {
    return status ? put_status(view, status)
                  : put_success(view, p->answer, p->answer_bytes, p->measure);
}

/* A failure goes to Python, which knows the words for it. */
static int run_native(burst_listener *l) {
    struct burst_plan *p = &l->plans[l->current];
    l->failed = p->function(p->context);
    if (l->failed) {
        l->in_python = 1;
        return -EREMOTEIO;
    }
    leave_slot(l);
    int r = answer_here(l);
    if (r) return r;
    bool is_stale;
    uint32_t status = listener_judge(l, &is_stale);
    r = listener_put(l, p, status);
    return r ? r : is_stale ? -ESTALE : 0;
}

/* Begins a run that ends elsewhere; or Python begins it. */
static int64_t begin_run(burst_listener *l) {
    struct burst_plan *p = &l->plans[l->current];
    inflight_start(l, p);
    if (!p->function) {
        l->in_python = 1;
        return l->current + 1;
    }
    l->failed = ((burst_beginning *)(void *)p->function)(p->context, p->pending);
    if (l->failed) {
        l->in_python = 1;
        return -EREMOTEIO;
    }
    l->is_in_flight = 0;
    l->current = -1;
    return 0;
}

/* ---- requests -------------------------------------------------------------------------------- */

/* The bytes that a plan is recognised by, or 0. */
static uint64_t read_request(burst_listener *l) {
    l->id = l->framed ? 0 : l->id + 1;
    l->attempt = (burst_attempt){.deadline = UINT64_MAX};
    if (!l->framed) return l->bytes;
    if (l->bytes <= DATUM) return 0;
    const unsigned char *identifier = l->buffer + l->bytes - DATUM;
    if (!is_datum(identifier, REQUEST_IDENTIFIER)) return 0;
    l->id = load_u64(identifier + 8);
    l->attempt.deadline = load_u64(identifier + 16);
    return l->id ? l->bytes - DATUM : 0;
}

/* Polling pays only while fewer listeners poll than there are processors for them, and no execution
 * waits for a slot. */
static bool may_poll(const burst_listener *l) {
    /* Relaxed, because both are hints. Before the first look at the processors, 0 forbids
     * nothing. */
    uint32_t usable =
        atomic_load_explicit(&l->request->process->processors.usable, memory_order_relaxed);
    bool fits = atomic_fetch_add_explicit(&polling, 1, memory_order_relaxed) < usable || !usable;
    return fits && !run_queue_has_waiters();
}

/* How long to poll: longer after long work, when the client's caches are cold and it comes back
 * slowly. */
static uint64_t window(const burst_listener *l) {
    uint64_t more = (l->attempt.done - l->attempt.begun) / 64;
    return l->spin_ns + (more < MOST_MORE ? more : MOST_MORE);
}

/* In a stream the next request is a frame away, and polling would be in vain (README.md,
 * "Streams"). */
static void note_pause(burst_listener *l) {
    if (l->spin_ns > SLEEP_COSTS || l->taken - l->before <= window(l) + PAUSE) l->pauses = 0;
    else if (l->pauses < HABIT) l->pauses++;
}

static int wait_for_request(burst_listener *l) {
    bool adapts = l->spin_ns == FMQ_SPIN_ADAPTIVE;
    int r = -EAGAIN;
    if (l->spin_ns && !adapts && l->pauses < HABIT) {
        if (may_poll(l)) r = sleep_spin(l->request, 1, window(l));
        /* relaxed, because it is a hint */
        atomic_fetch_sub_explicit(&polling, 1, memory_order_relaxed);
    }
    return r == -EAGAIN ? sleep_until(l->request, 1, adapts ? FMQ_SPIN_ADAPTIVE : 0, FMQ_FOREVER)
                        : r;
}

/* The listener is inside the queue only here, and not while it runs or answers: fmq_stop waits for
 * a thread that is inside. */
static int take_request(burst_listener *l) {
    real_time_rest(l->attempt.done);
    int r = end_enter_unreserved(l->request);
    if (r) return r;
    l->before = later(l, l->attempt.done);
    r = wait_for_request(l);
    int64_t bytes =
        r ? r
          : packet_take(l->request, l->buffer, l->buffer_bytes, l->framed ? REQUEST_SIZE_AT : 0);
    end_leave(l->request);
    if (bytes < 0) return (int)bytes;
    l->bytes = (uint64_t)bytes;
    l->taken = futex_now();
    note(&l->trace->device.asleep_ns, l->request->sleep.asleep_ns);
    note_pause(l);
    return 0;
}

static void note_wait(burst_listener *l) {
    count(&l->trace->device.waits, 1);
    count(&l->trace->device.waited_ns, l->attempt.begun - l->attempt.known);
}

/* Its client does not wait for the result any more. The word has a cache line of its own, which
 * stays in our cache. */
static bool is_abandoned(const burst_listener *l) {
    return look(&l->trace->abandoned) >> (l->id % 64) & 1;
}

/* 0, with a slot for a plan; the status of a request whose deadline cannot be met; or -ECANCELED.
 * Python gets the slot for a request that it has to bind first. */
static int admitted(burst_listener *l) {
    burst_attempt *x = &l->attempt;
    if (l->due != x->deadline) burst_set_due(l->due = x->deadline);
    if (is_abandoned(l)) return GENERAL_FAILURE;
    x->since = x->known - (x->deadline == UINT64_MAX ? 0 : waited_in_queue(l));
    const struct burst_plan *p = current(l);
    burst_ticket *t = !p || p->enters_itself ? NULL
                      : p->pending           ? inflight_ticket(p->pending)
                                             : l->ticket;
    x->estimate = p ? p->estimate : NULL;
    int r = burst_judge_begin(x, t);
    if (r) return r < 0 ? r : (int)with_usual_time(l, (uint32_t)r);
    if (!t || !t->number) return 0;
    note_wait(l);
    if (!is_abandoned(l)) return 0;
    burst_leave(t);
    x->begun = 0;
    return GENERAL_FAILURE;
}

/* One request: 0 when it was answered here; else as burst_listen. */
static int64_t serve(burst_listener *l) {
    int r = take_request(l);
    if (r) return r;
    bool is_known = recognise(l, read_request(l));
    /* a comparison takes no longer than a look at the clock */
    l->attempt.known = is_known ? l->taken : futex_now();
    note(&l->trace->device.running, l->id);
    r = admitted(l);
    if (r) {
        int over = answer_here(l);
        if (over) return over;
        note_done(l);
        if (is_known) invalidate_outputs(current(l));
        int stale = leave_plan(l);
        if (r > 0) r = put_status(l, (uint32_t)r);
        return r ? r : stale;
    }
    note(&l->trace->device.begun, l->id);
    if (is_known && l->plans[l->current].pending) return begin_run(l);
    if (is_known && l->plans[l->current].function) return run_native(l);
    l->in_python = 1;
    return is_known ? l->current + 1 : -ENOENT;
}

int64_t burst_listen(burst_listener *l, const void *answer, uint64_t bytes) {
    blame_on(&l->trace->device.signal);
    int64_t r = answer_python(l, answer, bytes);
    while (!r && !(r = l->overlaps ? inflight_tend(l) : 0)) r = serve(l);
    return r;
}
