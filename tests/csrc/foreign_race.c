/* Threads that run contexts of one turn, and one that cancels them: run under ThreadSanitizer, and under Address- and
 * UBSanitizer.
 *
 *   foreign_race SEED MILLISECONDS
 *
 * Acceptable outcomes, all others abort: a run whose context is not cancelled makes all its calls, one after the other, and
 * no other run of the turn makes one meanwhile; a run that begins after a cancel makes none; one that is cancelled in its
 * course makes some. A call in which the library is told to end is the last one.
 */
#include <stdint.h>

#include "burst/api.h"
#include "fmq/futex.h"
#include "burst/packet.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { RUNNERS = 3, STEPS = 4 };

#define MUST(x)                                                                                                        \
    do {                                                                                                               \
        if (!(x)) {                                                                                                    \
            fprintf(stderr, "foreign_race: line %d: not %s\n", __LINE__, #x);                                          \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

typedef struct {
    burst_foreign f;
    burst_step steps[STEPS];
    unsigned calls;             /* of the run in progress */
    bool was_told;              /* to end, in the midst of a call */
    _Atomic bool was_cancelled; /* before the canceller went on */
    _Atomic int gone;           /* of its two users */
    uint64_t seed;
} job;

static burst_turn turn;
static unsigned inside; /* runs that are in a call: not atomic, because the turn is enough */
static _Atomic(job *) shown[RUNNERS];
static _Atomic uint64_t whole, before, between, within;
static _Atomic int over;

static uint64_t random_of(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

static int call(void *object, uint64_t number, uint64_t n_in, void *in, uint64_t n_out, void *out) {
    job *j = object;
    (void)n_in, (void)in, (void)n_out, (void)out;
    MUST(inside++ == 0 && number == j->calls && !j->was_told);
    j->calls++;
    for (uint64_t asked = random_of(&j->seed) % 64; asked && !j->was_told; asked--) j->was_told = burst_foreign_ends(&turn);
    inside--;
    return j->was_told ? 3 : 0;
}

static void let_go(job *j) {
    if (atomic_fetch_add(&j->gone, 1)) free(j);
}

static void check(const job *j, int32_t status, bool was_cancelled) {
    if (!status) {
        MUST(!was_cancelled && j->calls == STEPS && !j->f.ended);
        atomic_fetch_add(&whole, 1);
        return;
    }
    MUST(status == GENERAL_FAILURE && j->f.ended == BURST_CANCELLED);
    MUST(!was_cancelled || !j->calls);
    atomic_fetch_add(!j->calls ? &before : j->was_told ? &within : &between, 1);
}

static void *run(void *argument) {
    unsigned n = (unsigned)(uintptr_t)argument;
    uint64_t seed = n + 1;
    while (!atomic_load(&over)) {
        job *j = calloc(1, sizeof *j);
        MUST(j);
        for (uint64_t i = 0; i < STEPS; i++) j->steps[i].number = i;
        j->f = (burst_foreign){.function = call, .object = j, .steps = j->steps, .n_steps = STEPS, .turn = &turn};
        j->seed = random_of(&seed);
        atomic_store(&shown[n], j);
        for (int32_t status = 0; !status;) {
            j->calls = 0, j->was_told = false;
            bool was_cancelled = atomic_load(&j->was_cancelled);
            status = burst_foreign_run(&j->f);
            check(j, status, was_cancelled);
            if (atomic_load(&over)) break;
        }
        job *mine = j;
        if (atomic_compare_exchange_strong(&shown[n], &mine, NULL)) atomic_fetch_add(&j->gone, 1); /* nobody else had it */
        let_go(j);
    }
    return NULL;
}

static void cancel_one(unsigned n) {
    job *j = atomic_exchange(&shown[n], NULL);
    if (!j) return;
    burst_foreign_cancel(&j->f);
    atomic_store(&j->was_cancelled, true);
    let_go(j);
}

int main(int argc, char **argv) {
    MUST(argc == 3);
    uint64_t seed = strtoull(argv[1], NULL, 10) * 2 + 1, until = futex_now() + strtoull(argv[2], NULL, 10) * 1000000;
    pthread_t threads[RUNNERS];
    burst_turn_init(&turn);
    for (uintptr_t n = 0; n < RUNNERS; n++) MUST(!pthread_create(&threads[n], NULL, run, (void *)n));
    while (futex_now() < until) {
        for (volatile uint64_t pause = random_of(&seed) % 20000; pause; pause--) {}
        cancel_one((unsigned)(random_of(&seed) % RUNNERS));
    }
    atomic_store(&over, 1);
    for (int n = 0; n < RUNNERS; n++) pthread_join(threads[n], NULL);
    printf("whole: %lu, before: %lu, between: %lu, within: %lu\n", (unsigned long)whole, (unsigned long)before,
           (unsigned long)between, (unsigned long)within);
    return 0;
}
