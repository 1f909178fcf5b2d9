/* Run queues, shares, flows and tickets: how they come and go, in any order, and what is known about them. */
#include <stdint.h>

#include "burst/api.h"
#include "fmq/futex.h"
#include "burst/runqueue.h"

#include <stdlib.h>

burst_runqueue *burst_runqueue_new(uint32_t slots, uint64_t quantum_ns) {
    if (!slots || !quantum_ns || quantum_ns > INT64_MAX / 2) return NULL;
    burst_runqueue *q = aligned_alloc(FMQ_LINE, sizeof *q);
    if (!q) return NULL;
    *q = (burst_runqueue){.slots = slots, .users = 1, .quantum = quantum_ns};
    pthread_mutex_init(&q->lock, NULL);
    return q;
}

static bool was_last(_Atomic uint32_t *users) { return atomic_fetch_sub(users, 1) == 1; }

void burst_runqueue_free(burst_runqueue *q) {
    if (!was_last(&q->users)) return;
    pthread_mutex_destroy(&q->lock);
    free(q);
}

burst_share *burst_share_new(burst_runqueue *q, uint32_t weight) {
    burst_share *s = weight && weight <= MOST_WEIGHT ? calloc(1, sizeof *s) : NULL;
    if (!s) return NULL;
    s->users = 1;
    s->queue = q;
    s->weight = weight;
    atomic_fetch_add(&q->users, 1);
    pthread_mutex_lock(&q->lock);
    s->next = q->shares;
    q->shares = s;
    pthread_mutex_unlock(&q->lock);
    return s;
}

void burst_share_free(burst_share *s) {
    if (!was_last(&s->users)) return;
    burst_runqueue *q = s->queue;
    pthread_mutex_lock(&q->lock);
    burst_share **at = &q->shares;
    while (*at != s) at = &(*at)->next;
    *at = s->next;
    pthread_mutex_unlock(&q->lock);
    free(s);
    burst_runqueue_free(q);
}

burst_flow *burst_flow_new(burst_share *s, uint32_t priority) {
    burst_flow *f = priority < PRIORITIES ? calloc(1, sizeof *f) : NULL;
    if (!f) return NULL;
    f->users = 1;
    f->share = s;
    f->priority = priority;
    atomic_fetch_add(&s->users, 1);
    return f;
}

void burst_flow_free(burst_flow *f) {
    if (!was_last(&f->users)) return;
    burst_share *s = f->share;
    free(f);
    burst_share_free(s);
}

burst_ticket *burst_ticket_new(burst_flow *f) {
    burst_ticket *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->flow = f;
    atomic_fetch_add(&f->users, 1);
    pthread_mutex_lock(&burst_queue_of(t)->lock);
    t->sibling = f->tickets;
    f->tickets = t;
    pthread_mutex_unlock(&burst_queue_of(t)->lock);
    return t;
}

void burst_ticket_free(burst_ticket *t) {
    burst_flow *f = t->flow;
    pthread_mutex_lock(&burst_queue_of(t)->lock);
    burst_ticket **at = &f->tickets;
    while (*at != t) at = &(*at)->sibling;
    *at = t->sibling;
    f->past.executions += burst_executions_of(t);
    f->past.waits += t->past.waits;
    f->past.yields += t->past.yields;
    f->past.waited_ns += t->past.waited_ns;
    pthread_mutex_unlock(&burst_queue_of(t)->lock);
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
    burst_share *s = f->share;
    pthread_mutex_lock(&s->queue->lock);
    const burst_waits *past = &f->past;
    *counts = (burst_flow_counts){past->executions, past->waits, past->yields, past->waited_ns, f->used, 0, s->used, s->queue->used};
    uint64_t now = futex_now();
    for (const burst_ticket *t = f->tickets; t; t = t->sibling) add_counts(counts, t, now);
    pthread_mutex_unlock(&s->queue->lock);
}
