/* A hostile client of burst_listen: packets of its own making, lies in both control pages between any two accesses, results
 * that it reads or does not, and memory that it frees at any moment. Python's part is played here, with native plans.
 *
 * Input: wire version, capacities and how long the first script is, in three bytes, and then two scripts: what the client
 * does whenever the listener sleeps, runs or returns, and what it scribbles. Whatever the input:
 *   a plan runs only for the packet that it was learnt from, and never after burst_forget said that it does not run
 *   if it said that it does, -ESTALE follows the run, and nothing else does
 *   what comes out is whole results that say their size and a status, and results of burst_listen are the documented ones
 */
#include "scheduled.h"

#include "burst/api.h"
#include "fmq/api.h"
#include "fmq/futex.h"
#include "fmq/layout.h"
#include "burst/packet.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PLANS = 4, MOST_STEPS = 2000000, LONGEST = 12 };
static const uint64_t SLEEP_NS = 200000, LOOK_NS = 100;

typedef struct { /* what a plan may touch */
    uint32_t index;
    bool knows; /* what to answer */
    uint64_t bytes;
    unsigned char packet[LONGEST * 4 * DATUM];
} memory;
typedef struct { fmq_control *control; unsigned char *ring; fmq_shape shape; fmq_end *end; } queue;

static struct {
    queue request, result;
    burst_listener l;
    burst_trace *trace;
    memory *memories[PLANS]; /* of what was learnt and not let go */
    bool stale[PLANS];
    uint64_t sent, seen; /* by the client: its counters, whatever the pages say */
    uint32_t next;
    bool gone;
} w;

static const uint8_t *acts, *acts_end, *lies, *lies_end;
static uint64_t steps, fake_now;
static int until_lie;
static bool inside;

static void fail(const char *why, int64_t result) {
    fprintf(stderr, "fuzz: %s (%ld)\n", why, (long)result);
    abort();
}

static uint8_t take(void) { return acts < acts_end ? *acts++ : 0; }
static uint8_t take_lie(void) { return lies < lies_end ? *lies++ : 0; }

/* ---- the client ---------------------------------------------------------------------------------------------------- */

static void lie(void) {
    static const uint16_t offsets[8] = {128, 256, 144, 384, 512, 768, 896, 272};
    uint8_t where = take_lie(), how = take_lie();
    queue *q = where & 128 ? &w.result : &w.request;
    uint64_t *word = (uint64_t *)((char *)q->control + offsets[where % 8]);
    switch (how % 6) {
    case 0: *word += how / 6 % 16 - 8u; break;
    case 1: *word = UINT64_MAX - how; break;
    case 2: *word ^= UINT64_C(1) << how % 64; break;
    case 3: *word = how & 8 ? UINT32_C(0x40000000) : UINT32_C(0x80000000); break;
    case 4: *word = w.sent + how / 6; break;
    default: *(uint64_t *)((char *)w.trace + where % 8 * 128) = how; /* its own trace, too */
    }
}

void step_before(const volatile void *word) {
    (void)word;
    if (++steps > MOST_STEPS) fail("a call does not end", 0);
    if (inside || lies >= lies_end || until_lie--) return;
    inside = true;
    until_lie = take_lie();
    lie();
    inside = false;
}

int step_aside(void) { return step_before(NULL), 0; }

static void put(unsigned char *packet, uint64_t at, uint64_t kind, uint64_t a, uint64_t b) {
    unsigned char *element = packet + at * DATUM;
    store_u64(element, kind), store_u64(element + 8, a), store_u64(element + 16, b);
}

/* One of a few requests, which are recognised when they come again, damaged as the script likes. */
static uint64_t make_packet(unsigned char *packet) {
    uint64_t which = take() % 6, n = 3 + which % 3;
    memset(packet, 0, LONGEST * DATUM);
    put(packet, 0, n << 32, which, 0);
    for (uint64_t i = 1; i < n; i++) put(packet, i, 6, which, i);
    if (w.l.framed) put(packet, n - 1, REQUEST_IDENTIFIER, 1 + take(), take() < 32 ? fake_now : UINT64_MAX);
    for (int damage = take() % 4 - 1; damage > 0; damage--) packet[take() % (LONGEST * DATUM)] = take();
    return take() < 64 ? 1 + take() % LONGEST : n;
}

static void send(void) {
    unsigned char packet[LONGEST * DATUM];
    uint64_t n = make_packet(packet), capacity = w.request.shape.capacity;
    for (uint64_t i = 0; i < n; i++) memcpy(w.request.ring + (w.sent + i) % capacity * DATUM, packet + i * DATUM, DATUM);
    w.sent += n;
    atomic_store(&w.request.control->head.counter, w.sent);
}

/* What the listener published since we looked is whole results. */
static void look_at_results(void) {
    uint64_t until = w.result.end->cursor.position, capacity = w.result.shape.capacity, least = w.l.framed ? 3 : 2;
    if (until - w.seen > capacity) w.seen = until; /* it was told that we had read what we had not */
    while (w.seen < until) {
        const unsigned char *first = w.result.ring + w.seen % capacity * DATUM;
        uint32_t size = load_u32(first + RESULT_SIZE_AT), status = load_u32(first + RESULT_STATUS_AT);
        if (load_u64(first) || size < least || size > until - w.seen) fail("a result that is not whole", size);
        if (status > (w.l.framed ? 8 : 4)) fail("a status that does not exist", status);
        w.seen += size;
    }
}

static void read_results(void) {
    look_at_results();
    atomic_store(&w.result.control->tail.counter, w.seen);
}

/* The other thread of a device: the client frees what plan i uses. */
static void forget(uint32_t i) {
    if (!w.memories[i]) return;
    if (burst_forget(&w.l, i)) {
        if (w.l.current != (int32_t)i) fail("told that a plan runs that does not", i);
        w.stale[i] = true;
    } else if (!w.stale[i]) {
        free(w.memories[i]); /* AddressSanitizer tells if anybody touches it */
        w.memories[i] = NULL;
    }
}

static void act(void) {
    look_at_results();
    if (acts >= acts_end) w.gone = true;
    switch (w.gone ? 7 : take() % 8) {
    case 0: case 1: case 2: send(); break;
    case 3: case 4: read_results(); break;
    case 5: forget(take() % PLANS); break;
    case 6: if (take() < 8) atomic_store(&w.request.end->signals.ended, END_STOPPED), atomic_store(&w.result.end->signals.ended, END_STOPPED); break;
    default:
        if (!w.gone) return;
        atomic_store(&w.request.control->writer_life.word, UINT32_C(0x40000000));
        atomic_store(&w.result.control->reader_life.word, UINT32_C(0x40000000));
    }
}

/* ---- the kernel ---------------------------------------------------------------------------------------------------- */

static fmq_process process = {.version = FMQ_PROCESS_VERSION};
fmq_process *fmq_this_process(void) { return &process; }
uint32_t futex_cpu(void) { return 1; }
uint64_t futex_now(void) { return step_before(NULL), fake_now += LOOK_NS; }
void futex_wake(_Atomic uint32_t *word, int count, uint32_t mask) { (void)count, (void)mask, step_before(word); }
void futex_wake_private(_Atomic uint32_t *word) { step_before(word); }
int thread_start(void *(*body)(void *), void *argument, const char *name) {
    return (void)body, (void)argument, (void)name, 0;
}

static int sleep_here(uint64_t deadline) {
    fake_now += SLEEP_NS;
    act();
    if (fake_now < deadline && !(fake_now & 1024)) return 0;
    if (fake_now < deadline) fake_now = deadline == FMQ_FOREVER ? fake_now : deadline;
    return deadline == FMQ_FOREVER ? -EINTR : -ETIMEDOUT;
}

int futex_wait(_Atomic uint32_t *a, uint32_t in_a, uint32_t mask, uint64_t deadline) {
    return (void)a, (void)in_a, (void)mask, sleep_here(deadline);
}
int futex_wait_either(_Atomic uint32_t *a, uint32_t in_a, _Atomic uint32_t *b, uint32_t in_b, _Atomic uint32_t *own, uint32_t in_own,
                      uint64_t deadline) {
    return (void)a, (void)in_a, (void)b, (void)in_b, (void)own, (void)in_own, sleep_here(deadline);
}
int futex_wait_all(futex_entry *entries, unsigned n, uint64_t deadline) { return (void)entries, (void)n, sleep_here(deadline); }

/* ---- the device ---------------------------------------------------------------------------------------------------- */

static void check_run(const memory *m, uint32_t i) {
    if (!m || m->index != i || w.l.current != (int32_t)i) fail("another plan's memory", i);
    if (m->bytes + (w.l.framed ? DATUM : 0) != w.l.bytes || memcmp(m->packet, w.l.buffer, m->bytes)) fail("another packet", i);
}

static int32_t execute(void *context) {
    const memory *m = context;
    uint32_t i = m->index;
    check_run(m, i);
    act(), act();
    check_run(m, i); /* freed meanwhile or not, it is there until -ESTALE */
    return take() < 128 ? 0 : (int32_t)take() - 8;
}

static void let_go_of_stale(bool all) {
    for (uint32_t i = 0; i < PLANS; i++) {
        if (!w.stale[i]) continue;
        if (!all && w.l.current == (int32_t)i) continue;
        free(w.memories[i]);
        w.memories[i] = NULL, w.stale[i] = false;
    }
}

static uint64_t make_answer(unsigned char *answer, uint32_t status) {
    uint64_t n = (w.l.framed ? 3 : 2) + (status ? 0 : take() % 6);
    memset(answer, 0, LONGEST * DATUM);
    put(answer, 0, 0, n | (uint64_t)status << 32, n);
    for (uint64_t i = 1; i < n; i++) put(answer, i, 2, 0, 0);
    put(answer, n - (w.l.framed ? 2 : 1), EXECUTION_TIMING, UINT64_MAX, UINT64_MAX);
    if (w.l.framed) put(answer, n - 1, RESULT_IDENTIFIER, 0, 0);
    return n * DATUM;
}

/* As burst/server.py does with a request that no plan is for. */
static void learn(void) {
    uint32_t i = w.next++ % PLANS;
    unsigned char answer[LONGEST * DATUM];
    uint64_t bytes = make_answer(answer, 0);
    bool is_native = take() & 1, knows = is_native || (take() & 1);
    if (w.memories[i]) burst_forget(&w.l, i), free(w.memories[i]);
    memory *m = w.memories[i] = calloc(1, sizeof *m);
    m->index = i;
    m->knows = knows;
    m->bytes = w.l.bytes - (w.l.framed ? DATUM : 0);
    if (m->bytes > sizeof m->packet) fail("more than was ever sent", (int64_t)m->bytes);
    memcpy(m->packet, w.l.buffer, m->bytes);
    void *function = is_native ? (void *)(uintptr_t)execute : NULL;
    int r = burst_learn(&w.l, i, knows ? answer : NULL, bytes, function, m, take() & 1, 1, 2);
    if (r) fail("cannot learn", r);
}

static bool is_whole(void) {
    const unsigned char *identifier = w.l.buffer + w.l.bytes - DATUM;
    return !w.l.framed || (w.l.bytes > DATUM && is_datum(identifier, REQUEST_IDENTIFIER) && load_u64(identifier + 8));
}

/* As the listener's loop does it: what a plan has learnt may go out before the listener waits. */
static int64_t answer_and_listen(const unsigned char *answer, uint64_t bytes) {
    int64_t r = bytes || !w.l.in_python || take() & 1 ? -EAGAIN : burst_answer(&w.l);
    return r && r != -EAGAIN ? r : burst_listen(&w.l, bytes ? answer : NULL, bytes);
}

/* Serves until the burst ends, and returns why. */
static int64_t serve(void) {
    unsigned char answer[LONGEST * DATUM];
    uint64_t bytes = 0;
    for (;;) {
        int64_t r = answer_and_listen(answer, bytes);
        look_at_results();
        bytes = 0;
        if (r == -ESTALE) {
            bool any = false;
            for (uint32_t i = 0; i < PLANS; i++) any = any || w.stale[i];
            if (!any) fail("-ESTALE, but nothing was forgotten", r);
            let_go_of_stale(true);
        } else if (r > 0) {
            if (r > PLANS) fail("a plan that does not exist", r);
            check_run(w.memories[r - 1], (uint32_t)r - 1);
            act();
            check_run(w.memories[r - 1], (uint32_t)r - 1);
            if (!w.memories[r - 1]->knows || take() < 64) bytes = make_answer(answer, take() % 5);
        } else if (r == -ENOENT) {
            bool learns = is_whole() && take() & 1;
            if (learns) learn();
            bytes = make_answer(answer, learns ? 0 : take() % (w.l.framed ? 9 : 5));
        } else if (r == -EREMOTEIO) {
            if (!w.l.failed) fail("a failure that is none", r);
            bytes = make_answer(answer, 1 + take() % 4);
        } else if (r != -EINTR) {
            return r;
        }
        for (uint32_t i = 0; i < PLANS; i++)
            if (w.stale[i] && w.l.current != (int32_t)i) fail("forgotten while it ran, and no -ESTALE came", i);
    }
}

/* ---- a world ------------------------------------------------------------------------------------------------------- */

static void make_queue(queue *q, uint64_t capacity, int role) {
    q->shape = (fmq_shape){capacity, 7, DATUM, FMQ_SYNCHRONIZED};
    q->control = aligned_alloc(FMQ_PAGE, FMQ_PAGE);
    memset(q->control, 0, FMQ_PAGE);
    void *exact;
    if (posix_memalign(&exact, 64, capacity * DATUM) || fmq_format(q->control, &q->shape)) fail("no queue", 0);
    q->ring = memset(exact, 0, capacity * DATUM);
    atomic_store(&q->control->writer_life.word, UINT32_C(0x8000002a));
    atomic_store(&q->control->reader_life.word, UINT32_C(0x8000002b));
    int r = fmq_open(q->control, q->ring, &q->shape, role, &q->end);
    if (r) fail("cannot open", r);
}

static void drop_queue(queue *q) {
    fmq_free(q->end);
    free(q->control), free(q->ring);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const int ends[] = {-EPIPE, -ESHUTDOWN, -EPROTO, -EMSGSIZE, -ECANCELED, -ETIMEDOUT, 0};
    if (size < 12) return -1;
    memset(&w, 0, sizeof w);
    fake_now = 1000, steps = 0, until_lie = 0;
    acts = data + 3, acts_end = lies = acts + (size - 3) * data[2] / 256, lies_end = data + size;
    inside = true;
    make_queue(&w.request, LONGEST + data[0] % 24, FMQ_READER);
    make_queue(&w.result, 1 + data[1] % 24, FMQ_WRITER);
    w.trace = calloc(1, sizeof *w.trace);
    uint64_t bytes = (w.request.shape.capacity > w.result.shape.capacity ? w.request : w.result).shape.capacity * DATUM;
    w.l = (burst_listener){.out = w.result.end, .request = w.request.end, .trace = w.trace, .buffer = malloc(bytes)};
    w.l.buffer_bytes = bytes, w.l.framed = data[0] >> 7, w.l.current = -1, w.l.spin_ns = data[1] & 128 ? 500 : 0;
    if (burst_plans(&w.l, PLANS)) fail("no plans", 0);
    inside = false;
    int64_t r = serve();
    inside = true;
    bool fine = false;
    for (const int *p = ends; *p; p++) fine = fine || r == *p;
    if (!fine) fail("a result that is not documented", r);
    burst_drop_plans(&w.l);
    for (uint32_t i = 0; i < PLANS; i++) free(w.memories[i]);
    drop_queue(&w.request), drop_queue(&w.result);
    free(w.trace), free(w.l.buffer);
    return 0;
}
