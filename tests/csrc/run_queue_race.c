/* Eight threads on a run queue of two slots, and one that closes tickets: run under ThreadSanitizer, and under Address- and
 * UBSanitizer.
 *
 *   run_queue_race SEED MILLISECONDS
 *
 * In rounds of a few requests: at the end of each, all wait for the last one, so nobody comes along any more who could
 * give it the slot that it was not given.
 *
 * Acceptable outcomes, all others abort: at most two threads have a slot at a time; whoever enters or yields gets one, or
 * is told that its deadline passed, which it had, or that its ticket was closed, which it was; and everybody comes to an end.
 * Two long executions run only if one is of each account. An estimate of "brief" is a lie now and then: then that account's
 * executions count as long for a while, which only the run queue knows, so the others are not counted here.
 */
#include <stdint.h>

#include "burst/api.h"
#include "fmq/api.h"
#include "fmq/futex.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { THREADS = 8, SLOTS = 2, FLOWS = 12, APPLICATIONS = 4, MOST = 16 /* requests in a round */ };

#define MUST(x)                                                                                                        \
    do {                                                                                                               \
        if (!(x)) {                                                                                                    \
            fprintf(stderr, "run_queue_race: line %d: not %s\n", __LINE__, #x);                                        \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

/* A client: it is closed once, with its tickets, and freed by the last of its users. */
typedef struct {
    burst_flow *flow;
    pthread_mutex_t lock; /* around `tickets`, of each thread */
    burst_ticket *tickets[THREADS];
    unsigned share;
    _Atomic bool was_closed; /* or is about to be */
    _Atomic int users;
} client;

static burst_run_queue *queue;
static burst_share *shares[2];
static burst_ticket *served_shares[2]; /* from the beginning: alone, a share may use all slots for long executions */
static burst_application *applications[APPLICATIONS]; /* every other one of the same share */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* around `clients` */
static client *clients[FLOWS];
static _Atomic int running, long_ones[2]; /* of each share */
static _Atomic uint64_t last = UINT64_MAX; /* round */
static pthread_barrier_t end_of_round;
static _Atomic uint64_t served, yielded, missed, closed;
static _Atomic unsigned threads_so_far;

static uint64_t random_of(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

static client *new_client(unsigned n) {
    client *c = calloc(1, sizeof *c);
    MUST(c && (c->flow = burst_flow_new(applications[n % APPLICATIONS], n % 3)));
    pthread_mutex_init(&c->lock, NULL);
    c->share = n % APPLICATIONS % 2;
    c->users = 1;
    return c;
}

static client *pick(unsigned n) {
    MUST(!pthread_mutex_lock(&lock));
    client *c = clients[n];
    atomic_fetch_add(&c->users, 1);
    MUST(!pthread_mutex_unlock(&lock));
    return c;
}

static void let_go(client *c) {
    if (atomic_fetch_sub(&c->users, 1) > 1) return;
    burst_flow_free(c->flow);
    free(c);
}

static burst_ticket *new_ticket(client *c, unsigned thread) {
    burst_ticket *t = burst_ticket_new(c->flow);
    MUST(t && !pthread_mutex_lock(&c->lock));
    c->tickets[thread] = t;
    if (atomic_load(&c->was_closed)) burst_ticket_close(t);
    MUST(!pthread_mutex_unlock(&c->lock));
    return t;
}

static void free_ticket(client *c, unsigned thread) {
    MUST(!pthread_mutex_lock(&c->lock));
    burst_ticket_free(c->tickets[thread]);
    c->tickets[thread] = NULL;
    MUST(!pthread_mutex_unlock(&c->lock));
}

/* Has a slot; true: still, at the end. */
static bool execute(client *c, burst_ticket *t, uint64_t deadline, uint64_t *seed, bool is_long) {
    for (uint64_t checkpoints = random_of(seed) % 6; checkpoints; checkpoints--) {
        MUST(atomic_fetch_add(&running, 1) < SLOTS);
        MUST(!is_long || atomic_fetch_add(&long_ones[c->share], 1) == 0);
        for (volatile uint64_t work = random_of(seed) % (random_of(seed) % 64 ? 3000 : 300000); work; work--) {}
        if (random_of(seed) % 4 == 0) sched_yield(); /* to others, with the slot */
        if (is_long) atomic_fetch_sub(&long_ones[c->share], 1);
        atomic_fetch_sub(&running, 1);
        burst_ticket *paused = random_of(seed) % 8 ? NULL : burst_pause();
        int r = paused ? burst_resume(paused) : burst_checkpoint();
        MUST(!paused || paused == t);
        if (!r) continue;
        atomic_fetch_add(&yielded, 1);
        MUST(!r || (r == -ETIMEDOUT && fmq_now() > deadline) || (r == -ECANCELED && atomic_load(&c->was_closed)));
        return false;
    }
    return true;
}

static void request(client *c, burst_ticket *t, uint64_t *seed) {
    uint64_t now = fmq_now(), deadline = random_of(seed) % 4 ? FMQ_FOREVER : now + random_of(seed) % 100000;
    const burst_estimate estimate = {.usual_ns = random_of(seed) % 3 * 150000}; /* not known, brief, long */
    bool is_long = estimate.usual_ns != 150000;
    int r = burst_enter(t, &estimate, deadline, now);
    MUST(!r || (r == -ETIMEDOUT && fmq_now() > deadline) || (r == -ECANCELED && atomic_load(&c->was_closed)));
    if (r) atomic_fetch_add(r == -ETIMEDOUT ? &missed : &closed, 1);
    if (r || !execute(c, t, deadline, seed, is_long)) return;
    burst_leave(t);
    atomic_fetch_add(&served, 1);
}

static void look(client *c) {
    burst_flow_counts counts;
    burst_flow_count(c->flow, &counts);
    MUST(counts.waiting <= THREADS && counts.used_ns <= counts.application_used_ns);
    MUST(counts.application_used_ns <= counts.share_used_ns && counts.share_used_ns <= counts.all_used_ns);
}

static void *hammer(void *argument) {
    uint64_t seed = (uint64_t)(uintptr_t)argument;
    unsigned thread = atomic_fetch_add(&threads_so_far, 1);
    for (uint64_t round = 0;; round++) {
        client *c = pick((unsigned)(random_of(&seed) % FLOWS));
        burst_ticket *t = new_ticket(c, thread);
        for (uint64_t n = random_of(&seed) % MOST; n; n--) request(c, t, &seed);
        free_ticket(c, thread);
        look(c);
        let_go(c);
        pthread_barrier_wait(&end_of_round);
        if (round == atomic_load(&last)) return NULL;
    }
}

static void close_one(unsigned n) {
    client *fresh = new_client(n);
    MUST(!pthread_mutex_lock(&lock));
    client *old = clients[n];
    clients[n] = fresh;
    MUST(!pthread_mutex_unlock(&lock));
    atomic_store(&old->was_closed, true);
    MUST(!pthread_mutex_lock(&old->lock));
    for (unsigned i = 0; i < THREADS; i++)
        if (old->tickets[i]) burst_ticket_close(old->tickets[i]);
    MUST(!pthread_mutex_unlock(&old->lock));
    let_go(old);
}

int main(int argc, char **argv) {
    MUST(argc == 3);
    uint64_t seed = strtoull(argv[1], NULL, 10) * 2 + 1, until = futex_now() + strtoull(argv[2], NULL, 10) * 1000000;
    pthread_t threads[THREADS];
    alarm((unsigned)(strtoull(argv[2], NULL, 10) / 1000 + 30)); /* somebody waits for ever */
    MUST((queue = burst_run_queue_new(SLOTS, 20000)));
    for (uint32_t n = 0; n < 2; n++) MUST((shares[n] = burst_share_new(queue, n ? 300 : 100)));
    for (unsigned n = 0; n < APPLICATIONS; n++) MUST((applications[n] = burst_application_new(shares[n % 2])));
    for (unsigned n = 0; n < FLOWS; n++) clients[n] = new_client(n);
    for (unsigned n = 0; n < 2; n++) MUST((served_shares[n] = burst_ticket_new(clients[n]->flow)));
    MUST(!pthread_barrier_init(&end_of_round, NULL, THREADS + 1));
    for (int n = 0; n < THREADS; n++) MUST(!pthread_create(&threads[n], NULL, hammer, (void *)(uintptr_t)random_of(&seed)));
    for (uint64_t round = 0; round <= atomic_load(&last); round++) {
        for (volatile uint64_t pause = random_of(&seed) % 100000; pause; pause--) {}
        if (random_of(&seed) % 2) close_one((unsigned)(random_of(&seed) % FLOWS));
        if (futex_now() >= until) atomic_store(&last, round);
        pthread_barrier_wait(&end_of_round);
    }
    for (int n = 0; n < THREADS; n++) pthread_join(threads[n], NULL);
    for (unsigned n = 0; n < 2; n++) burst_ticket_free(served_shares[n]);
    for (unsigned n = 0; n < FLOWS; n++) let_go(clients[n]);
    for (unsigned n = 0; n < APPLICATIONS; n++) burst_application_free(applications[n]);
    for (uint32_t n = 0; n < 2; n++) burst_share_free(shares[n]);
    burst_run_queue_free(queue);
    printf("served: %lu, yielded: %lu, missed: %lu, closed: %lu\n", (unsigned long)served, (unsigned long)yielded,
           (unsigned long)missed, (unsigned long)closed);
    return 0;
}
