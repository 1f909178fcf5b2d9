/* A listener's plans, and what it shares with those of its executions that go on elsewhere (flights.c). Not exported. */
#ifndef BURST_LISTENER_H
#define BURST_LISTENER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct burst_flight;

struct burst_plan {
    unsigned char *packet, *answer; /* the request up to its volatile end; the result of a success, or NULL */
    uint64_t packet_bytes, answer_bytes;
    burst_function *function; /* or NULL: Python runs it */
    void *context;
    uint64_t copied, checked; /* bytes, in each run */
    burst_estimate *estimate;  /* of its runs, or NULL */
    uint32_t **writes; /* words of the buffers that it writes: 1, no value, after a failure; Python keeps them */
    uint64_t n_writes;
    struct burst_flight *flight; /* NULL: its runs end before the listener goes on */
    bool measure;
    _Atomic uint32_t state; /* of the two bits below; README.md, "Plans" */
};

enum { VALID = 1, RUNS = 2 };

/* Of an execution in C that has ended, with `view` as the listener was when it began. judge: notes it, and says what its status
 * is; the plan is left, and *is_stale is whether it was forgotten. put: the answer; -EAGAIN: no room, and it may not wait. */
uint32_t listener_judge(burst_listener *view, bool *is_stale);
int listener_put(burst_listener *view, const struct burst_plan *p, uint32_t status);

/* flights.c, from the listener's thread. */
int flights_new(burst_listener *l);
void flights_free(burst_listener *l);
void flights_drop(struct burst_plan *p);      /* with its plan */
burst_ticket *flights_ticket(const struct burst_flight *f);
void flights_await(const burst_listener *l, const struct burst_plan *p); /* until that plan does not go on */
void flights_take_off(burst_listener *l, struct burst_plan *p);
void flights_abort(burst_listener *l, struct burst_plan *p); /* the last to take off has not begun after all */
bool flights_are_up(const burst_listener *l);
int flights_land(burst_listener *l);   /* waits for all, and answers; 0, or why the burst is over */
int flights_tend(burst_listener *l);   /* what a landing has left to this thread; -ESTALE: as burst_listen */
uint64_t flights_landed_at(const burst_listener *l); /* when the last one was answered; 0: none was */

#endif
