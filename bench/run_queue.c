/* What entering and leaving a device's run queue takes, in parts of a block, as one line of JSON.
 *
 *   run_queue floor|alone|checkpoint|beside|two COUNT
 *
 * floor: two compare-and-exchanges on a word of one's own. alone: enter and leave. checkpoint: also a deadline, and a
 * look whether to yield. beside: alone, while another thread does the same on the other CPU, and each finds a slot. two: alone,
 * while another account has a client, with the clock that the caller reads before it enters.
 */
#define _GNU_SOURCE
#include <stdint.h>

#include "burst/api.h"
#include "fmq/futex.h"

#include "stream.h"

#include <pthread.h>
#include <stdbool.h>

typedef struct {
    burst_ticket *ticket;
    const char *mode;
    uint64_t each; /* of a part */
    double part[PARTS];
    int cpu;
} worker;

static _Atomic uint64_t counter;
static _Atomic int ready, over;
static int workers = 1;

static void floor_once(void) {
    uint64_t old = atomic_load_explicit(&counter, memory_order_relaxed);
    while (!atomic_compare_exchange_weak(&counter, &old, old + 1)) {}
    old = atomic_load_explicit(&counter, memory_order_relaxed);
    while (!atomic_compare_exchange_weak(&counter, &old, old - 1)) {}
}

static const burst_estimate estimate = {.least_ns = 1000, .usual_ns = 1000};

static void enter_and_leave(burst_ticket *ticket, uint64_t deadline, uint64_t now, bool looks) {
    if (burst_enter(ticket, &estimate, deadline, now) || (looks && burst_must_yield(ticket))) abort();
    burst_leave(ticket);
}

static void run(const worker *w, uint64_t n) {
    const uint64_t now = futex_now(), later = now + UINT64_C(3600000000000);
    const char mode = w->mode[0];
    if (mode == 'f')
        for (; n; n--) floor_once();
    else if (mode == 'c')
        for (; n; n--) enter_and_leave(w->ticket, later, now, true);
    else if (mode == 't')
        for (; n; n--) enter_and_leave(w->ticket, FMQ_FOREVER, futex_now(), false);
    else
        for (; n; n--) enter_and_leave(w->ticket, FMQ_FOREVER, now, false);
}

static void *work(void *argument) {
    worker *w = argument;
    pin(w->cpu);
    atomic_fetch_add(&ready, 1);
    while (atomic_load(&ready) < workers) relax();
    run(w, w->each);
    for (int i = 0; i < PARTS; i++) {
        double begin = seconds_now();
        run(w, w->each);
        w->part[i] = (seconds_now() - begin) * 1e9 / (double)w->each;
    }
    atomic_store(&over, 1);
    return NULL;
}

/* Keeps the first one company until it is done. */
static void *accompany(void *argument) {
    worker *w = argument;
    pin(w->cpu);
    atomic_fetch_add(&ready, 1);
    while (!atomic_load(&over)) run(w, 16);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 3) return fprintf(stderr, "usage: run_queue floor|alone|checkpoint|beside|two COUNT\n"), 2;
    const char *mode = argv[1];
    workers = mode[0] == 'b' ? 2 : 1;
    burst_run_queue *queue = burst_run_queue_new(2, 2000000);
    worker them[2];
    pthread_t thread;
    burst_share *own = burst_share_new(queue, 100), *other = mode[0] == 't' ? burst_share_new(queue, 100) : own;
    for (int i = 0; i < 2; i++) {
        burst_flow *flow = burst_flow_new(burst_application_new(i ? other : own), BURST_MEDIUM);
        them[i] = (worker){burst_ticket_new(flow), mode, strtoull(argv[2], NULL, 10) / PARTS + 1, {0}, i};
    }
    if (workers == 2 && pthread_create(&thread, NULL, accompany, &them[1])) abort();
    work(&them[0]);
    if (workers == 2) pthread_join(thread, NULL);
    qsort(them[0].part, PARTS, sizeof(double), ascending);
    const double *part = them[0].part;
    printf("{\"p50_ns\": %.4f, \"p99_ns\": %.4f, \"p999_ns\": %.4f, \"max_ns\": %.4f}\n", part[PARTS / 2],
           part[PARTS * 99 / 100], part[PARTS - 1], part[PARTS - 1]);
    return 0;
}
