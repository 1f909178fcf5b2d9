/* A client, a listener that runs native plans, and a thread that forgets them: run under ThreadSanitizer, and under
 * Address- and UBSanitizer, which see any use of a plan's memory after burst_forget said that it does not run.
 *
 *   plan_race SEED MILLISECONDS
 *
 * Acceptable outcomes, all others abort: each request is answered, once, in order; a plan that was forgotten while it ran
 * is told of by -ESTALE; every plan's memory is let go exactly once.
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
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { CAPACITY = 32, PLANS = 4, REQUESTS = 6, ELEMENTS = 3, QUEUE_BYTES = 2 * FMQ_PAGE };
static const uint64_t ms = 1000000;

typedef struct { uint64_t source, target; } memory;

static burst_listener listener;
static burst_caller caller;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* Python's: around learn, forget and what belongs to them */
static memory *memories[PLANS];
static bool stale[PLANS];
static uint32_t next_plan;
static uint64_t until, seed, learnt, freed, answered, caught, runs;
static _Atomic int over;

#define MUST(x)                                                                                                        \
    do {                                                                                                               \
        if (!(x)) {                                                                                                    \
            fprintf(stderr, "plan_race: line %d: not %s\n", __LINE__, #x);                                             \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

static uint64_t random_of(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

static void new_queue(fmq_end **writer, fmq_end **reader) {
    const fmq_shape shape = {CAPACITY, 0, DATUM, FMQ_SYNCHRONIZED};
    char *base = mmap(NULL, QUEUE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MUST((void *)base != MAP_FAILED && !fmq_format(base, &shape));
    MUST(!fmq_open(base, base + FMQ_PAGE, &shape, FMQ_WRITER, writer));
    MUST(!fmq_open(base, base + FMQ_PAGE, &shape, FMQ_READER, reader));
}

static void let_go(uint32_t i) {
    free(memories[i]);
    memories[i] = NULL, stale[i] = false;
    freed++;
}

/* ---- client -------------------------------------------------------------------------------------------------------- */

static void *ask(void *argument) {
    (void)argument;
    uint64_t random = seed;
    unsigned char packet[ELEMENTS * DATUM];
    while (fmq_now() < until) {
        memset(packet, 0, sizeof packet);
        packet[REQUEST_SIZE_AT] = ELEMENTS;
        packet[DATUM] = (unsigned char)(random_of(&random) % REQUESTS);
        packet[2 * DATUM] = REQUEST_IDENTIFIER;
        caller.deadline = UINT64_MAX;
        int64_t r = burst_call(&caller, packet, sizeof packet);
        while (r == -ETIMEDOUT) r = burst_receive(&caller, FMQ_FOREVER);
        caller.calling = 0;
        MUST(r >= 0 && caller.results == caller.id && caller.result_id == caller.id);
    }
    answered = caller.results;
    atomic_store(&over, 1);
    return NULL;
}

/* ---- device -------------------------------------------------------------------------------------------------------- */

static int32_t execute(void *context) {
    memory *m = context;
    m->target = m->source + 1;
    for (uint64_t rest = m->target % 2000; rest; rest--) atomic_load(&over);
    m->source = m->target;
    runs++;
    return 0;
}

static void learn(const void *answer, uint64_t bytes) {
    uint32_t i = next_plan++ % PLANS;
    MUST(!pthread_mutex_lock(&lock));
    if (memories[i]) let_go(i); /* nothing runs while a request is bound */
    memories[i] = calloc(1, sizeof(memory));
    MUST(!burst_learn(&listener, i, answer, bytes, (void *)(uintptr_t)execute, memories[i], 1, 0, 0));
    learnt++;
    MUST(!pthread_mutex_unlock(&lock));
}

static void let_go_of_stale(void) {
    MUST(!pthread_mutex_lock(&lock));
    bool any = false;
    for (uint32_t i = 0; i < PLANS; i++)
        if (stale[i]) let_go(i), any = true;
    MUST(any);
    caught++;
    MUST(!pthread_mutex_unlock(&lock));
}

static void *listen(void *argument) {
    (void)argument;
    unsigned char answer[ELEMENTS * DATUM] = {0};
    answer[RESULT_SIZE_AT] = ELEMENTS;
    answer[DATUM] = EXECUTION_TIMING;
    memset(answer + DATUM + 8, 0xff, 16);
    answer[2 * DATUM] = RESULT_IDENTIFIER;
    uint64_t bytes = 0;
    for (;;) {
        int64_t r = burst_listen(&listener, bytes ? answer : NULL, bytes);
        if (r == -ECANCELED) return NULL;
        bytes = 0;
        MUST(r == -ENOENT || r == -ESTALE);
        if (r == -ESTALE) let_go_of_stale();
        else learn(answer, sizeof answer), bytes = sizeof answer;
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
            else if (!stale[i]) let_go(i);
        }
        MUST(!pthread_mutex_unlock(&lock));
        for (uint64_t rest = random_of(&random) % 3000; rest; rest--) atomic_load(&over);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 3) return fprintf(stderr, "usage: plan_race SEED MILLISECONDS\n"), 2;
    seed = strtoull(argv[1], NULL, 10) * 2 + 1, until = fmq_now() + strtoull(argv[2], NULL, 10) * ms;
    static burst_trace trace;
    static unsigned char buffers[3][CAPACITY * DATUM];
    listener = (burst_listener){.trace = &trace, .buffer = buffers[0], .buffer_bytes = sizeof buffers[0], .framed = 1};
    caller = (burst_caller){.trace = &trace, .spare = buffers[1], .result = buffers[2], .framed = 1};
    caller.buffer_bytes = sizeof buffers[1], caller.spin_ns = caller.hold_ns = 5000;
    listener.current = -1;
    new_queue(&caller.out, &listener.request);
    new_queue(&listener.out, &caller.back);
    MUST(!burst_plans(&listener, PLANS));
    void *(*const bodies[])(void *) = {ask, listen, forget};
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) MUST(!pthread_create(&threads[i], NULL, bodies[i], NULL));
    pthread_join(threads[0], NULL), pthread_join(threads[2], NULL);
    fmq_stop(listener.request);
    pthread_join(threads[1], NULL);
    for (uint32_t i = 0; i < PLANS; i++)
        if (memories[i]) let_go(i);
    burst_drop_plans(&listener);
    fmq_end *ends[] = {caller.out, caller.back, listener.out, listener.request};
    for (int i = 0; i < 4; i++) fmq_free(ends[i]);
    MUST(learnt == freed);
    printf("answered: %lu, learnt: %lu, runs: %lu, caught: %lu\n", (unsigned long)answered, (unsigned long)learnt,
           (unsigned long)runs, (unsigned long)caught);
    return 0;
}
