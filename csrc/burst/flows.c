/* Run queues, shares, applications, flows and tickets: how they come and go, in any order, and what
 * is known about them. */
#define _GNU_SOURCE
#include <stdint.h>

#include "burst/api.h"
#include "fmq/futex.h"
#include "fmq/thread.h"
#include "burst/run_queue.h"

#include <stdlib.h>

enum { BRIEF = 10 }; /* quanta */

static _Atomic bool inherits;

void run_queue_inherit_priorities(void) { atomic_store(&inherits, true); }

void run_queue_init_lock(pthread_mutex_t *lock) { thread_init_lock(lock, atomic_load(&inherits)); }

burst_run_queue *burst_run_queue_new(uint32_t slots, uint64_t quantum_ns) {
    if (!slots || !quantum_ns || quantum_ns > INT64_MAX / 2 / BRIEF) return NULL;
    burst_run_queue *q = aligned_alloc(FMQ_LINE, sizeof *q);
    if (!q) return NULL;
    *q = (burst_run_queue){
        .slots = slots, .users = 1, .quantum = quantum_ns, .brief = BRIEF * quantum_ns};
    run_queue_init_lock(&q->lock);
    return q;
}

static bool was_last(_Atomic uint32_t *users) { return atomic_fetch_sub(users, 1) == 1; }

void burst_run_queue_free(burst_run_queue *q) {
    if (!was_last(&q->users)) return;
    pthread_mutex_destroy(&q->lock);
    free(q);
}

/* Under the lock. */
static void join_group(fair_group *group, fair_entity *member) {
    member->next = group->members;
    group->members = member;
}

/* Under the lock. */
static void leave_group(fair_group *group, fair_entity *member) {
    fair_entity **at = &group->members;
    while (*at != member) at = &(*at)->next;
    *at = member->next;
}

burst_share *burst_share_new(burst_run_queue *q, uint32_t weight) {
    burst_share *s = weight && weight <= MOST_WEIGHT ? calloc(1, sizeof *s) : NULL;
    if (!s) return NULL;
    s->users = 1;
    s->queue = q;
    s->fair.weight = weight;
    atomic_fetch_add(&q->users, 1);
    return s;
}

void burst_share_free(burst_share *s) {
    if (!was_last(&s->users)) return;
    burst_run_queue *q = s->queue;
    free(s);
    burst_run_queue_free(q);
}

burst_application *burst_application_new(burst_share *s) {
    burst_application *a = calloc(1, sizeof *a);
    if (!a) return NULL;
    a->users = 1;
    a->share = s;
    a->fair.weight = MOST_WEIGHT;
    atomic_fetch_add(&s->users, 1);
    burst_run_queue *q = s->queue;
    pthread_mutex_lock(&q->lock);
    if (!s->applications.members) join_group(&q->shares, &s->fair);
    join_group(&s->applications, &a->fair);
    pthread_mutex_unlock(&q->lock);
    return a;
}

/* A share outlives its applications: so an account that comes again still owes what it owed. */
static void leave_share(burst_application *a) {
    burst_share *s = a->share;
    burst_run_queue *q = s->queue;
    pthread_mutex_lock(&q->lock);
    leave_group(&s->applications, &a->fair);
    if (s->turn == a) s->turn = NULL;
    if (!s->applications.members) leave_group(&q->shares, &s->fair);
    pthread_mutex_unlock(&q->lock);
}

void burst_application_free(burst_application *a) {
    if (!was_last(&a->users)) return;
    burst_share *s = a->share;
    leave_share(a);
    free(a);
    burst_share_free(s);
}

burst_flow *burst_flow_new(burst_application *a, uint32_t priority) {
    burst_flow *f = priority < PRIORITIES ? calloc(1, sizeof *f) : NULL;
    if (!f) return NULL;
    f->users = 1;
    f->application = a;
    f->priority = priority;
    atomic_fetch_add(&a->users, 1);
    return f;
}

void burst_flow_free(burst_flow *f) {
    if (!was_last(&f->users)) return;
    burst_application *a = f->application;
    burst_run_queue *q = a->share->queue;
    pthread_mutex_lock(&q->lock);
    if (f->is_used && !--a->share->used_flows) atomic_fetch_sub(&q->accounts, 1);
    if (f->is_used) atomic_fetch_sub(&a->used[f->priority], 1);
    pthread_mutex_unlock(&q->lock);
    run_queue_serve(q); /* a slot may be kept for no other account, or priority, any more */
    free(f);
    burst_application_free(a);
}

burst_ticket *burst_ticket_new(burst_flow *f) {
    burst_ticket *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->flow = f;
    t->queue = f->application->share->queue;
    atomic_fetch_add(&f->users, 1);
    pthread_mutex_lock(&t->queue->lock);
    t->sibling = f->tickets;
    f->tickets = t;
    if (!f->is_used && !f->application->share->used_flows++)
        atomic_fetch_add(&t->queue->accounts, 1);
    if (!f->is_used) atomic_fetch_add(&f->application->used[f->priority], 1);
    f->is_used = true;
    pthread_mutex_unlock(&t->queue->lock);
    return t;
}

void burst_ticket_free(burst_ticket *t) {
    burst_flow *f = t->flow;
    pthread_mutex_lock(&t->queue->lock);
    burst_ticket **at = &f->tickets;
    while (*at != t) at = &(*at)->sibling;
    *at = t->sibling;
    f->past.executions += burst_executions_of(t);
    f->past.waits += t->past.waits;
    f->past.yields += t->past.yields;
    f->past.waited_ns += t->past.waited_ns;
    pthread_mutex_unlock(&t->queue->lock);
    free(t);
    burst_flow_free(f);
}

static void add_counts(burst_flow_counts *sum, const burst_ticket *t, uint64_t now) {
    sum->executions += burst_executions_of(t);
    sum->waits += t->past.waits;
    sum->yields += t->past.yields;
    sum->waited_ns += t->past.waited_ns;
    if (!t->since) return;
    sum->waiting++;
    if (now > t->since) sum->waited_ns += now - t->since;
}

void burst_flow_count(burst_flow *f, burst_flow_counts *counts) {
    burst_application *a = f->application;
    burst_share *s = a->share;
    pthread_mutex_lock(&s->queue->lock);
    const burst_waits *past = &f->past;
    *counts = (burst_flow_counts){.executions = past->executions,
                                  .waits = past->waits,
                                  .yields = past->yields,
                                  .waited_ns = past->waited_ns,
                                  .used_ns = f->used,
                                  .application_used_ns = a->fair.used,
                                  .share_used_ns = s->fair.used,
                                  .all_used_ns = s->queue->used};
    uint64_t now = futex_now();
    for (const burst_ticket *t = f->tickets; t; t = t->sibling) add_counts(counts, t, now);
    pthread_mutex_unlock(&s->queue->lock);
}
