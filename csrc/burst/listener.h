/* A listener's plans, and what it shares with those of its executions that go on elsewhere
 * (inflight.c). Not exported. */
#ifndef BURST_LISTENER_H
#define BURST_LISTENER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct burst_pending;

struct burst_plan {
    /* The request up to its volatile end; the result of a success, or NULL. */
    unsigned char *packet, *answer;
    uint64_t packet_bytes, answer_bytes;
    burst_function *function; /* or NULL: Python runs it */
    void *context;
    uint64_t copied, checked; /* bytes, in each run */
    burst_estimate *estimate; /* of its runs, or NULL */
    /* Words of the buffers that it writes: 1, no value, after a failure; Python keeps them. */
    uint32_t **writes;
    uint64_t n_writes;
    /* Its run that ends elsewhere; NULL: its runs end before the listener goes on. */
    struct burst_pending *pending;
    bool measure;
    bool enters_itself; /* its runs enter the run queue when they need a slot; not the listener */
    uint64_t last_use;  /* by the listener's count of uses */
    _Atomic uint32_t state; /* of the two bits below; README.md, "Plans" */
};

enum { VALID = 1, RUNS = 2 };

/* Of an execution in C that has ended, with `view` as the listener was when it began. judge: notes
 * it, and says what its status is; the plan is left, and *is_stale is whether it was forgotten.
 * put: the answer; -EAGAIN: no room, and it may not wait. */
uint32_t listener_judge(burst_listener *view, bool *is_stale);
int listener_put(burst_listener *view, const struct burst_plan *p, uint32_t status);

/* inflight.c, from the listener's thread. All but the first three are for listeners that have such
 * plans: `overlaps`. */
int inflight_new(burst_listener *l);
void inflight_free(burst_listener *l);
void inflight_drop(struct burst_plan *p); /* with its plan */
burst_ticket *inflight_ticket(const struct burst_pending *p);
void inflight_await(struct burst_pending *p); /* until its answer is out */
void inflight_start(burst_listener *l, struct burst_plan *p);
/* The last one has not begun after all. */
void inflight_abort(burst_listener *l, struct burst_plan *p);
bool inflight_any(const burst_listener *l);
int inflight_drain(burst_listener *l); /* waits for all, and answers; 0, or why the burst is over */
/* Does what other threads left to this one; -ESTALE: as burst_listen. */
int inflight_tend(burst_listener *l);
/* When the last one was answered; 0: none was. */
uint64_t inflight_answered_at(const burst_listener *l);

#endif
