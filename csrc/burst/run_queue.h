/* The run queue of a device: what it knows of accounts, applications, clients and executions.
 * policy.c decides with it, run_queue.c waits. */
#ifndef BURST_RUN_QUEUE_H
#define BURST_RUN_QUEUE_H

#include "fmq/layout.h"

#include <pthread.h>
#include <stdbool.h>

enum { PRIORITIES = 3, MOST_WEIGHT = 1000 };

/* What is served by the time that it used: an account of the device, an application of its
 * account. */
typedef struct fair_entity {
    struct fair_entity *next; /* in its group */
    /* Pace: contended time used, times MOST_WEIGHT / weight; only differences count. */
    uint64_t weight, pace;
    uint64_t used; /* contended ns */
    /* Tickets that wait; that are `present`; when one of these went last. */
    uint64_t waiting, present, left;
} fair_entity;

/* All shares of the queue, or all applications of a share. */
typedef struct {
    fair_entity *members;
    /* The least of those that waited when a slot was given last; and when waiting began. */
    uint64_t pace, pace_since;
} fair_group;

/* Flows of one priority of an application in which a ticket waits. The first has its turn, the
 * others follow. */
typedef struct {
    burst_flow *first, *last;
    uint64_t waiting; /* tickets */
} flow_ring;

struct burst_share {
    fair_entity fair;       /* first: a member of the queue's group is a share */
    _Atomic uint32_t users; /* its owner, and its applications */
    burst_run_queue *queue;
    fair_group applications; /* while there is one, the share is in the queue's group */
    burst_application *turn; /* that was given a slot last, or NULL */
    uint32_t long_runs;      /* slots that its long executions hold */
    uint32_t used_flows;
    /* Until then all its executions count as long, as one lasted longer than estimated. */
    _Atomic uint64_t doubted;
};

struct burst_application {
    fair_entity fair;             /* first: a member of the share's group is an application */
    _Atomic uint32_t users;       /* its owner, and its flows */
    _Atomic uint32_t preemptible; /* executions of it that can be preempted, and run */
    burst_share *share;
    flow_ring rings[PRIORITIES];
    _Atomic uint32_t used[PRIORITIES]; /* its flows that were used; written under the lock */
    /* Until then executions of lower priorities leave a slot: such executions come. */
    _Atomic uint64_t expected[PRIORITIES];
    uint32_t runs[PRIORITIES]; /* slots that executions hold which are below another one in use */
};

/* What a ticket has done. */
typedef struct {
    _Atomic uint64_t executions;       /* written by its thread alone */
    uint64_t waits, yields, waited_ns; /* under the lock */
} burst_waits;

struct burst_flow {
    _Atomic uint32_t users; /* its owner, and its tickets */
    burst_application *application;
    burst_flow *next; /* in its ring */
    burst_ticket *first, *last;
    burst_ticket *tickets; /* all */
    int64_t deficit;       /* ns that it may still use in its turn; below 0: a debt */
    uint64_t present, left;
    uint64_t used;    /* contended ns */
    burst_waits past; /* of tickets that were freed */
    uint32_t priority;
    bool has_turn; /* it was given its quantum of this round */
    /* There has been a ticket: before that a client looks on, and executes nothing. */
    bool is_used;
};

struct burst_ticket {
    burst_flow *flow;
    burst_run_queue *queue;
    burst_ticket *next;    /* that waits in its flow */
    burst_ticket *sibling; /* in its flow's `tickets` */
    /* Of its arrival, which orders tickets within a flow; 0: it began at once. */
    uint64_t number;
    uint64_t charged; /* up to here on the contended clock */
    uint64_t served;  /* contended ns since it was given its slot */
    uint64_t deadline;
    uint64_t since; /* when it began to wait */
    /* When its thread paused; what burst_leave returns: its thread's own. */
    uint64_t paused;
    _Atomic uint64_t waited;
    burst_waits past;
    /* When it was given its slot; of one that is not long, while several accounts are served. */
    uint64_t begun;
    /* It waits, or got its slot after a wait, or another ticket waited while it ran. */
    bool present;
    bool holds; /* it has a slot; its thread's own */
    /* Its execution may last longer than `brief`; a higher priority of its application is in use.
     * Its thread's own while it does not wait. */
    bool is_long, is_lower;
    _Atomic bool closed;   /* written under the lock */
    _Atomic uint32_t word; /* README.md, "Run queue" */
};

struct burst_run_queue {
    /* Tickets that have a slot, plus 2^32 times those that wait. */
    alignas(FMQ_LINE) _Atomic uint64_t turns;
    _Atomic uint64_t contended; /* the contended clock, where it stood still last */
    uint32_t slots;
    _Atomic uint32_t users;    /* its owner, and its shares */
    _Atomic uint32_t accounts; /* shares with flows that were used; written under the lock */
    /* Around all that follows, and all of shares, applications, flows and waiting tickets. */
    alignas(FMQ_LINE) pthread_mutex_t lock;
    burst_ticket *called; /* it is being woken, and hands free slots on when it is awake */
    fair_group shares;
    uint64_t quantum, brief; /* brief: ns that an execution may last without being long */
    /* Slots that long executions hold, and of how many accounts these are. */
    uint32_t long_runs, long_accounts;
    uint64_t used;              /* contended ns */
    uint64_t waiting, arrivals; /* tickets; also those that have yielded */
    uint64_t since;             /* when the contended clock began to run, because a ticket waits */
};

static inline uint64_t burst_executions_of(const burst_ticket *t) {
    /* Relaxed, because it is a figure. */
    return atomic_load_explicit(&t->past.executions, memory_order_relaxed);
}

/* Whether several accounts are served. Relaxed, because an account that comes at this moment finds
 * what it finds. */
static inline bool has_several_accounts(const burst_run_queue *q) {
    return atomic_load_explicit(&q->accounts, memory_order_relaxed) > 1;
}

/* Whether its runs are counted, which is done under the lock. No slot is kept from it else. */
static inline bool is_counted(const burst_ticket *t) { return t->is_long || t->is_lower; }
void burst_policy_doubt(burst_ticket *t, uint64_t now); /* a brief execution ends: was it? */

/* ns: the shortest that an execution took, less for each doubt; 0: not known. In deadline.c */
uint64_t burst_needed(const burst_estimate *estimate);

/* ns that its execution has waited for others so far; any thread. In run_queue.c */
uint64_t run_queue_waited(burst_ticket *t);

void run_queue_serve(burst_run_queue *q); /* hands free slots on. In run_queue.c */

/* Waiting tickets of its application with a higher priority. */
uint64_t burst_policy_outranking(const burst_ticket *t);

/* What has the ticket's slot goes on outside of this thread: checkpoints here are not for it, and
 * another thread leaves. */
void run_queue_detach(const burst_ticket *t);

/* A lock that threads which serve bursts share; in flows.c. After `inherit`, called before there is
 * one, a thread that has such a lock runs with the priority of one that waits for it. */
void run_queue_inherit_priorities(void);
void run_queue_init_lock(pthread_mutex_t *lock);

/* Hint: any ticket queued in this process? Relaxed load. In run_queue.c. */
bool run_queue_has_waiters(void);

#endif
