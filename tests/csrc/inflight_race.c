/* A client with several requests in flight, a listener whose plans only begin their runs, threads that end these in any order,
 * and a thread that forgets plans: run under ThreadSanitizer, and under Address- and UBSanitizer, which see any use of a plan's
 * memory after it was let go.
 *
 *   inflight_race SEED MILLISECONDS
 *
 * Acceptable outcomes, all others abort: each request is answered, once, in order; a plan that was forgotten while it ran is told
 * of by -ESTALE, once it has ended; every plan's memory is let go exactly once.
 */
#define _GNU_SOURCE
#include <stdint.h>

#include "burst/api.h"
#include "fmq/api.h"
#include "fmq/futex.h"
#include "fmq/layout.h"
#include "burst/packet.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { REQUESTS_FIT = 32, RESULTS_FIT = 8, PLANS = 4, REQUESTS = 6, ELEMENTS = 3, QUEUE_BYTES = 2 * FMQ_PAGE, DEPTH = 5, WORKERS = 2 };
static const uint64_t ms = 1000000;

typedef struct {
    uint64_t source, target;
    _Atomic uint32_t is_up;
} memory;
typedef struct { memory *of; void *run; } job;

static burst_listener listener;
static burst_caller caller;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* Python's: around learn, forget and what belongs to them */
static memory *memories[PLANS];
static bool stale[PLANS];
static uint32_t next_plan;
static uint64_t until, seed, learnt, freed, answered, caught, failed;
static _Atomic uint64_t flown, together;
static _Atomic int over, up;

static pthread_mutex_t jobs_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t some_job = PTHREAD_COND_INITIALIZER;
static job jobs[64];
static unsigned first_job, n_jobs;

#define MUST(x)                                                                                                        \
    do {                                                                                                               \
        if (!(x)) {                                                                                                    \
            fprintf(stderr, "inflight_race: line %d: not %s\n", __LINE__, #x);                                           \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

static uint64_t random_of(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

static void new_queue(uint32_t capacity, fmq_end **writer, fmq_end **reader) {
    const fmq_shape shape = {capacity, 0, DATUM, FMQ_SYNCHRONIZED};
    char *base = mmap(NULL, QUEUE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MUST((void *)base != MAP_FAILED && !fmq_format(base, &shape));
    MUST(!fmq_open(base, base + FMQ_PAGE, &shape, FMQ_WRITER, writer));
    MUST(!fmq_open(base, base + FMQ_PAGE, &shape, FMQ_READER, reader));
}

/* ---- client -------------------------------------------------------------------------------------------------------- */

static void *ask(void *argument) {
    (void)argument;
    uint64_t random = seed, sent = 0;
    unsigned char packet[ELEMENTS * DATUM];
    while (sent > answered || fmq_now() < until) {
        bool sends = sent - answered < DEPTH && fmq_now() < until && (sent == answered || random_of(&random) % 4);
        if (!sends) {
            MUST(burst_receive(&caller, FMQ_FOREVER) >= 0);
            MUST(caller.result_id == ++answered);
            continue;
        }
        memset(packet, 0, sizeof packet);
        packet[REQUEST_SIZE_AT] = ELEMENTS;
        packet[DATUM] = (unsigned char)(random_of(&random) % REQUESTS);
        packet[2 * DATUM] = REQUEST_IDENTIFIER;
        caller.deadline = UINT64_MAX;
        MUST(!burst_send(&caller, packet, sizeof packet));
        MUST(caller.id == ++sent);
    }
    atomic_store(&over, 1);
    pthread_mutex_lock(&jobs_lock);
    pthread_cond_broadcast(&some_job);
    pthread_mutex_unlock(&jobs_lock);
    return NULL;
}

/* ---- device -------------------------------------------------------------------------------------------------------- */

static void fly(job j) {
    j.of->target = j.of->source + 1;
    for (uint64_t rest = j.of->target % 3000; rest; rest--) atomic_load(&over);
    j.of->source = j.of->target;
    atomic_store(&j.of->is_up, 0);
    atomic_fetch_add(&flown, 1);
    atomic_fetch_sub(&up, 1);
    burst_inflight_complete(j.run);
}

static void *work(void *argument) {
    (void)argument;
    pthread_mutex_lock(&jobs_lock);
    for (;;) {
        while (!n_jobs && !atomic_load(&over)) pthread_cond_wait(&some_job, &jobs_lock);
        if (!n_jobs) break;
        job j = jobs[first_job++ % 64];
        n_jobs--;
        pthread_mutex_unlock(&jobs_lock);
        fly(j);
        pthread_mutex_lock(&jobs_lock);
    }
    return pthread_mutex_unlock(&jobs_lock), NULL;
}

/* A burst_beginning. Now and then it fails, or has ended when it returns. */
static int32_t begin(void *context, void *run) {
    static uint64_t random = 88172645463325252u;
    job j = {context, run};
    uint64_t dice = random_of(&random) % 16;
    if (!dice) return 2;
    MUST(!atomic_exchange(&j.of->is_up, 1));
    if (atomic_fetch_add(&up, 1)) atomic_fetch_add(&together, 1);
    if (dice == 1) return fly(j), 0;
    pthread_mutex_lock(&jobs_lock);
    jobs[(first_job + n_jobs++) % 64] = j;
    pthread_cond_signal(&some_job);
    pthread_mutex_unlock(&jobs_lock);
    return 0;
}

static void let_go(memory *m) {
    MUST(!atomic_load(&m->is_up));
    free(m);
    freed++;
}

static void learn(const void *answer, uint64_t bytes) {
    uint32_t i = next_plan++ % PLANS;
    MUST(!pthread_mutex_lock(&lock));
    memory *before = memories[i];
    memories[i] = calloc(1, sizeof(memory));
    MUST(!burst_learn(&listener, i, answer, bytes, (void *)(uintptr_t)begin, memories[i], 1, 0, 0));
    MUST(burst_inflight_new(&listener, i));
    if (before) let_go(before);
    stale[i] = false;
    learnt++;
    MUST(!pthread_mutex_unlock(&lock));
}

static void let_go_of_stale(void) {
    MUST(!pthread_mutex_lock(&lock));
    for (uint32_t i = 0; i < PLANS; i++) {
        if (!stale[i] || burst_inflight_is_pending(&listener, i)) continue;
        let_go(memories[i]);
        memories[i] = NULL, stale[i] = false;
        caught++;
    }
    MUST(!pthread_mutex_unlock(&lock));
}

static void *listen(void *argument) {
    (void)argument;
    unsigned char answer[ELEMENTS * DATUM] = {0}, failure[ELEMENTS * DATUM];
    answer[RESULT_SIZE_AT] = ELEMENTS;
    answer[DATUM] = EXECUTION_TIMING;
    memset(answer + DATUM + 8, 0xff, 16);
    answer[2 * DATUM] = RESULT_IDENTIFIER;
    memcpy(failure, answer, sizeof answer);
    failure[RESULT_STATUS_AT] = 2;
    const void *said = NULL;
    for (;;) {
        int64_t r = burst_listen(&listener, said, said ? sizeof answer : 0);
        if (r == -ECANCELED) return NULL;
        said = NULL;
        MUST(r == -ENOENT || r == -ESTALE || r == -EINTR || r == -EREMOTEIO);
        if (r == -ESTALE) let_go_of_stale();
        if (r == -ENOENT) learn(answer, sizeof answer), said = answer;
        if (r == -EREMOTEIO) failed++, said = failure;
    }
}

static void *forget(void *argument) {
    (void)argument;
    uint64_t random = seed * 31;
    while (!atomic_load(&over)) {
        uint32_t i = random_of(&random) % PLANS;
        MUST(!pthread_mutex_lock(&lock));
        if (memories[i]) {
            if (burst_forget(&listener, i)) stale[i] = true;
            else if (!stale[i]) let_go(memories[i]), memories[i] = NULL;
        }
        MUST(!pthread_mutex_unlock(&lock));
        for (uint64_t rest = random_of(&random) % 9000; rest; rest--) atomic_load(&over);
    }
    return NULL;
}

static burst_ticket *new_ticket(burst_flow **flow) {
    burst_run_queue *queue = burst_run_queue_new(WORKERS + 1, ms);
    burst_share *share = burst_share_new(queue, 100);
    burst_application *application = burst_application_new(share);
    *flow = burst_flow_new(application, BURST_MEDIUM);
    burst_application_free(application);
    burst_share_free(share);
    burst_run_queue_free(queue);
    return burst_ticket_new(*flow);
}

int main(int argc, char **argv) {
    if (argc != 3) return fprintf(stderr, "usage: inflight_race SEED MILLISECONDS\n"), 2;
    seed = strtoull(argv[1], NULL, 10) * 2 + 1, until = fmq_now() + strtoull(argv[2], NULL, 10) * ms;
    static burst_trace trace;
    static unsigned char buffers[3][REQUESTS_FIT * DATUM];
    burst_flow *flow;
    listener = (burst_listener){.trace = &trace, .buffer = buffers[0], .buffer_bytes = sizeof buffers[0], .framed = 1};
    listener.ticket = new_ticket(&flow);
    caller = (burst_caller){.trace = &trace, .spare = buffers[1], .result = buffers[2], .framed = 1};
    caller.buffer_bytes = sizeof buffers[1], caller.spin_ns = caller.hold_ns = 5000;
    listener.current = -1;
    new_queue(REQUESTS_FIT, &caller.out, &listener.request);
    new_queue(RESULTS_FIT, &listener.out, &caller.back);
    MUST(!burst_plans(&listener, PLANS));
    void *(*const bodies[])(void *) = {ask, forget, work, work, listen};
    pthread_t threads[5];
    for (int i = 0; i < 5; i++) MUST(!pthread_create(&threads[i], NULL, bodies[i], NULL));
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    burst_inflight_close(&listener);
    fmq_stop(listener.request);
    pthread_join(threads[4], NULL);
    burst_inflight_drain(&listener);
    for (uint32_t i = 0; i < PLANS; i++)
        if (memories[i]) let_go(memories[i]);
    burst_drop_plans(&listener);
    burst_leave(listener.ticket);
    burst_ticket_free(listener.ticket);
    burst_flow_free(flow);
    fmq_end *ends[] = {caller.out, caller.back, listener.out, listener.request};
    for (int i = 0; i < 4; i++) fmq_free(ends[i]);
    MUST(learnt == freed);
    printf("answered: %lu, learnt: %lu, flown: %lu, together: %lu, failed: %lu, caught: %lu\n", (unsigned long)answered,
           (unsigned long)learnt, (unsigned long)flown, (unsigned long)together, (unsigned long)failed, (unsigned long)caught);
    return 0;
}
