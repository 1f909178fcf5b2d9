/* The client's side of a burst: one C call for a request and its result. */
#define _GNU_SOURCE
#include <stdint.h>

#include "burst/api.h"

#include "fmq/futex.h"
#include "burst/packet.h"
#include "fmq/sleep.h"
#include "burst/trace.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static const uint64_t SOON = 100000; /* ns */
/* ns: the slack of a timer, and an idle processor's way back. */
static const uint64_t EARLY = 150000;
static const uint64_t MOST_EARLY = 2000000;
/* ns between a result and the next request: a stream's, and no call back to back. */
static const uint64_t PAUSE = 1000000;
enum { HABIT = 3 }; /* so many in a row */
/* ns: longer answers are not polled for throughout. */
static const uint64_t MOST_COVERED = 1000000;
/* Answers for which one way to wait is tried, and for which the better one is kept. */
enum { TRIED = 16, KEPT = 2048 };

/* One thread sends while another one receives: words of the caller that both look at are stored and
 * loaded like those of the trace (`note`, `look`). What a result is compared with was stored before
 * its request was published. */

/* ---- requests -------------------------------------------------------------------------------- */

/* Relaxed, because it decides nothing but whether to poll. */
static uint32_t in_a_row(const uint32_t *word) {
    return atomic_load_explicit((const _Atomic uint32_t *)word, memory_order_relaxed);
}

static void add_up(uint32_t *word, bool is_another) {
    uint32_t n = in_a_row(word), next = is_another ? n + (n < HABIT) : 0;
    /* Relaxed, because of the same. */
    if (next != n) atomic_store_explicit((_Atomic uint32_t *)word, next, memory_order_relaxed);
}

static void note_sent(burst_caller *c) {
    uint64_t sent = futex_now();
    add_up(&c->pauses, sent - look(&c->received) > PAUSE);
    burst_sent *record = &c->trace->sent[c->id % BURST_RECORDS];
    note(&record->id, 0);
    note(&record->begin, c->begin ? c->begin : sent);
    note(&record->sent, sent);
    note(&c->sent, sent);
    note(&record->received, 0);
    note(&record->id, c->id);
    note(&c->trace->client.requests, c->id);
    c->begin = 0;
}

/* The id and the deadline are all that differs from the last time that this packet was sent. */
static int put_request(burst_caller *c, unsigned char *packet, uint64_t bytes) {
    if (!bytes || bytes % DATUM) return -EINVAL;
    int r = ring_need(c->out, bytes / DATUM);
    if (r) return r;
    note(&c->id, c->id + 1);
    if (c->framed) {
        store_u64(packet + bytes - 16, c->id);
        store_u64(packet + bytes - 8, c->deadline);
    }
    note_sent(c);
    return packet_put(c->out, packet, bytes);
}

static int send_request(burst_caller *c, unsigned char *packet, uint64_t bytes) {
    int r = end_enter_unreserved(c->out);
    if (r) return r;
    r = put_request(c, packet, bytes);
    end_leave(c->out);
    return r;
}

static _Atomic uint32_t *calling(burst_caller *c) { return (_Atomic uint32_t *)&c->calling; }

int burst_send(burst_caller *c, void *packet, uint64_t bytes) {
    return atomic_load(calling(c)) ? -EBUSY : send_request(c, packet, bytes);
}

/* ---- results --------------------------------------------------------------------------------- */

/* Reads the elements at the end that differ from result to result. Returns their bytes, or 0: there
 * are no such. */
static uint64_t read_tail(burst_caller *c, const unsigned char *packet, uint64_t bytes) {
    uint64_t tail = c->framed ? 2 * DATUM : DATUM;
    c->result_id = c->framed ? 0 : c->results;
    if (bytes < tail + DATUM) return 0;
    const unsigned char *timing = packet + bytes - tail, *identifier = timing + DATUM;
    if (!is_datum(timing, EXECUTION_TIMING)) return 0;
    if (c->framed) {
        if (!is_datum(identifier, RESULT_IDENTIFIER) || load_u64(identifier + 16)) return 0;
        c->result_id = load_u64(identifier + 8);
    }
    c->on_device = load_u64(timing + 8);
    c->in_driver = load_u64(timing + 16);
    return tail;
}

/* Whether the times are usual: none, or both in order and the status NONE. Python checks all other
 * results. */
static bool has_usual_times(const burst_caller *c, const unsigned char *packet) {
    if (c->on_device == NOT_MEASURED && c->in_driver == NOT_MEASURED) return true;
    return c->on_device <= c->in_driver && !load_u32(packet + RESULT_STATUS_AT);
}

static void expect(burst_caller *c, uint64_t took) {
    if (!c->expected_ns) c->expected_ns = took;
    uint64_t off = took > c->expected_ns ? took - c->expected_ns : c->expected_ns - took;
    /* One that is far off does not make the others irregular. */
    if (off > MOST_EARLY) off = MOST_EARLY;
    c->deviation_ns += off / 8 - c->deviation_ns / 8;
    c->expected_ns += took / 8 - c->expected_ns / 8;
}

/* Whether polling at another time than at first may be of use: the program lets us poll, the
 * request waits for no other client's, and is no stream's. */
static bool may_foresee(const burst_caller *c) {
    return c->spin_ns && c->queued_ns < SOON && in_a_row(&c->pauses) < HABIT;
}

/* Whether polling can cover the answer that is expected: it is longer than the window that the
 * program gave, and always takes about as long. */
static bool may_cover(const burst_caller *c) {
    bool is_short = c->spin_ns < c->expected_ns && c->expected_ns <= MOST_COVERED;
    bool is_regular = c->deviation_ns <= c->expected_ns / 4;
    return c->spin_ns <= SLEEP_COSTS && is_short && is_regular && may_foresee(c);
}

/* Polling for the whole answer pays if a processor is free for it, which nobody can say; so both
 * ways are tried, and the one that brings answers sooner is kept for a while. */
static void compare(burst_caller *c, uint64_t took) {
    uint64_t *mean = &c->took_ns[c->covers];
    if (took > 2 * c->expected_ns) took = 2 * c->expected_ns; /* one alone decides nothing */
    *mean = *mean ? *mean + took / 8 - *mean / 8 : took;
    if (--c->trial_left) return;
    if (c->is_trial) c->covers = c->took_ns[1] + c->took_ns[0] / 32 < c->took_ns[0];
    else c->covers = !c->covers;
    c->is_trial = !c->is_trial;
    c->trial_left = c->is_trial ? TRIED : KEPT;
}

/* Asked once for each thread and fork: onlookers ask the kernel what this thread has met. */
static uint64_t own_tid(const burst_caller *c) {
    static _Thread_local int asked = INT_MIN;
    static _Thread_local uint64_t tid;
    int generation = c->back->process->generation;
    if (asked != generation) tid = (uint64_t)syscall(SYS_gettid), asked = generation;
    return tid;
}

/* How long the answer took. Excludes our wake-up latency, which holding the GIL exists to avoid. */
static void learn(burst_caller *c, uint64_t took) {
    const burst_sent *sent = &c->trace->sent[c->results % BURST_RECORDS];
    const burst_served *served = &c->trace->served[c->results % BURST_RECORDS];
    bool is_alone = look(&c->id) == c->results; /* no further request is in flight */
    if (is_alone && may_cover(c)) compare(c, took);
    /* Not after a short one: the line is in the device's cache. */
    bool is_known = took > SOON && served->id == c->results;
    if (took > SOON) note(&c->trace->client.tid, own_tid(c));
    if (is_known && served->done - look(&sent->sent) < took)
        took = served->done - look(&sent->sent);
    c->queued_ns = is_known ? served->started - served->taken : 0;
    if (is_alone) expect(c, took);
    add_up(&c->long_answers, took > 4 * SOON);
    if (took > 4 * SOON) took = 4 * SOON; /* one long pause does not change the habit */
    c->usual_ns += took / 8 - c->usual_ns / 8;
}

/* `since`: from when on this call has waited. */
static void note_received(burst_caller *c, uint64_t since) {
    uint64_t now = futex_now();
    burst_sent *record = &c->trace->sent[c->results % BURST_RECORDS];
    note(&record->received, now);
    note(&c->received, now);
    count(&c->trace->client.total_ns, now - look(&record->begin));
    count(&c->trace->client.busy_ns, now - since);
    learn(c, now - look(&record->sent));
    note(&c->trace->client.results, c->results);
    note(&c->trace->client.asleep_ns, c->back->sleep.asleep_ns);
}

/* 0: the same as the last one, but for its id and times. */
static int64_t take_result(burst_caller *c, uint64_t since) {
    unsigned char *fresh = c->spare, *last = c->result;
    int64_t bytes = packet_take(c->back, fresh, c->buffer_bytes, c->framed ? RESULT_SIZE_AT : 0);
    if (bytes < 0) return bytes;
    if (c->results == look(&c->id)) return ring_broken(c->back); /* a result without a request */
    c->results++;
    uint64_t tail = read_tail(c, fresh, (uint64_t)bytes);
    /* Results come in the order of requests. */
    if (tail && c->result_id != c->results) return ring_broken(c->back);
    note_received(c, since);
    bool is_same =
        tail && (uint64_t)bytes == c->result_bytes && !memcmp(fresh, last, (uint64_t)bytes - tail);
    if (is_same && has_usual_times(c, fresh)) return 0;
    c->spare = last;
    c->result = fresh;
    c->result_bytes = (uint64_t)bytes;
    return bytes;
}

/* Between the frames of a stream processors go idle, and the device's thread is best woken up on
 * the one that this thread leaves to it by sleeping (README.md, "Streams"). An answer that takes
 * long is not polled for at first, either. A window that is longer than a sleep and a wake-up take
 * is what the program wants, whatever the requests are. Where that has proved better, a window
 * covers the answer. */
static uint64_t first_window(const burst_caller *c) {
    if (c->covers && look(&c->id) == c->results + 1 && may_cover(c))
        return c->expected_ns + 2 * c->deviation_ns + c->spin_ns;
    bool is_given_up =
        c->spin_ns <= SLEEP_COSTS && (in_a_row(&c->pauses) >= HABIT || c->long_answers >= HABIT);
    return is_given_up ? 0 : c->spin_ns;
}

/* For an answer that takes long, polls from shortly before it is due: then neither side has to be
 * woken up, for the device still polls when the next request comes. Not in a stream, whose next
 * request is far away; not when the time is irregular; and not while requests of other clients are
 * served before ours: they need the processors. */
static int await_result(burst_caller *c, uint64_t deadline) {
    uint64_t margin = EARLY + 2 * c->deviation_ns, due = look(&c->sent) + c->expected_ns;
    bool is_regular = margin <= MOST_EARLY && margin <= c->expected_ns / 8;
    bool is_foreseen =
        is_regular && may_foresee(c) && look(&c->id) == c->results + 1 && due - margin < deadline;
    if (!is_foreseen) return sleep_until(c->back, 1, first_window(c), deadline);
    int r = sleep_until(c->back, 1, first_window(c), due - margin);
    return r == -ETIMEDOUT ? sleep_until(c->back, 1, margin + EARLY, deadline) : r;
}

int64_t burst_receive(burst_caller *c, uint64_t deadline) {
    int64_t r = end_enter_unreserved(c->back);
    if (r) return r;
    uint64_t since = futex_now();
    r = await_result(c, deadline);
    if (!r) r = take_result(c, since);
    end_leave(c->back);
    return r;
}

/* At most 64 requests are in flight, so each has a bit of its own. Any thread: another one may
 * settle an earlier one meanwhile. */
static _Atomic uint64_t *abandoned(burst_caller *c) {
    return (_Atomic uint64_t *)&c->trace->abandoned;
}

void burst_abandon(burst_caller *c, uint64_t id) {
    atomic_fetch_or(abandoned(c), UINT64_C(1) << id % 64);
}

void burst_settle(burst_caller *c, uint64_t id) {
    atomic_fetch_and(abandoned(c), ~(UINT64_C(1) << id % 64));
}

/* ---- both ------------------------------------------------------------------------------------ */

/* How long to wait while the caller holds the GIL. Once it is given up, a busy thread of the
 * process may keep it for 5 ms. So waiting with it pays for answers that usually come soon, even
 * from a device that has to wake up first. */
static uint64_t patience(const burst_caller *c) {
    return c->usual_ns < SOON ? 2 * c->usual_ns + c->hold_ns : c->hold_ns;
}

static int wait_holding(burst_caller *c, uint64_t sent) {
    if (c->long_answers >= HABIT && !first_window(c)) return -ETIMEDOUT;
    uint64_t hold = patience(c), window = sleep_window(c->back, first_window(c));
    int r = sleep_spin(c->back, 1, hold < window ? hold : window);
    /* Not for an answer that usually takes longer, nor when the time is over: a timer that is due
     * costs a system call that finds nothing, and the device's thread the processor meanwhile. */
    bool is_soon = window < hold && c->usual_ns <= hold;
    if (r == -EAGAIN && is_soon && futex_now() < sent + hold)
        r = sleep_until(c->back, 1, 0, sent + hold);
    /* burst_receive, which waits on, counts from its own start. */
    if (r) count(&c->trace->client.busy_ns, futex_now() - sent);
    return r == -EAGAIN || r == -EINTR ? -ETIMEDOUT : r; /* the packet is out */
}

static int64_t call(burst_caller *c, void *packet, uint64_t bytes) {
    int64_t r = end_enter_unreserved(c->back);
    if (r) return r;
    /* An earlier result is outstanding, and comes first. */
    if (c->id != c->results) return end_leave(c->back), -EALREADY;
    r = send_request(c, packet, bytes);
    uint64_t sent = c->sent;
    if (!r && !(r = wait_holding(c, sent))) r = take_result(c, sent);
    end_leave(c->back);
    return r;
}

static void over(burst_caller *c) {
    if (atomic_exchange(calling(c), 0) == 2)
        futex_wake(calling(c), INT_MAX, FUTEX_BITSET_MATCH_ANY);
}

int64_t burst_call(burst_caller *c, void *packet, uint64_t bytes) {
    uint32_t no = 0;
    if (!atomic_compare_exchange_strong(calling(c), &no, 1)) return -EBUSY;
    int64_t r = call(c, packet, bytes);
    if (r != -ETIMEDOUT) over(c);
    return r;
}

static int64_t finish(burst_caller *c, uint64_t deadline) {
    int64_t r = burst_receive(c, deadline);
    /* Python runs its handlers; an event loop looks at the results. */
    return r == -EINTR || r == -EBUSY ? -ETIMEDOUT : r;
}

/* 1 ms at most, because Python may clear the word when Ctrl-C comes. */
void burst_await_call(burst_caller *c) {
    uint32_t yes = 1;
    if (!atomic_compare_exchange_strong(calling(c), &yes, 2) && yes != 2) return;
    futex_wait(calling(c), 2, FUTEX_BITSET_MATCH_ANY, futex_now() + PAUSE);
}

/* Both buffers are behind it. `start`, `finish` and `over` are for modules that are not linked with
 * this one. */
burst_caller *burst_caller_new(fmq_end *out, fmq_end *back, burst_trace *trace, uint64_t length,
                               uint64_t spin_ns, uint64_t hold_ns) {
    uint64_t bytes = length * DATUM;
    burst_caller *c = calloc(1, sizeof *c + 2 * bytes);
    if (!c) return NULL;
    unsigned char *buffers = (unsigned char *)(c + 1);
    *c = (burst_caller){.out = out,
                        .back = back,
                        .trace = trace,
                        .spare = buffers,
                        .result = buffers + bytes,
                        .buffer_bytes = bytes,
                        .spin_ns = spin_ns,
                        .hold_ns = hold_ns,
                        .deadline = FMQ_FOREVER,
                        .trial_left = TRIED,
                        .start = burst_call,
                        .finish = finish,
                        .over = over};
    return c;
}

void burst_caller_free(burst_caller *c) { free(c); }
