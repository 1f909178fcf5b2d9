/* A burst, and the requests that were made for it. Not exported. */
#ifndef LIBBURST_CONTROLLER_H
#define LIBBURST_CONTROLLER_H

#include "libburst/lane.h"

enum { MOST_SHAPES = 2 * LENGTH };

enum { SENDS = 1, RECEIVES = 2 }; /* sides */

typedef struct request request;

typedef struct {
    request *request;    /* held */
    uint64_t number, id; /* the program's; of the lane */
    uint64_t deadline;
    bool is_wanted;
} flight;

typedef struct {
    object head;
    compiled *compiled; /* held */
    burst_options options;
    pthread_rwlock_t living;
    lane *lane;          /* NULL: the device died, and could not be started again */
    uint64_t generation; /* of the lane */
    int trace_memory;
    burst_trace *trace;
    burst_slots *slots;
    _Atomic uint32_t busy; /* the sides, SENDS and RECEIVES, that a thread is inside of */
    _Atomic uint32_t is_closed;
    _Atomic int broken;   /* why no lane comes any more, -errno; or 0 */
    pthread_mutex_t lock; /* of the flights and what is counted */
    flight flights[MOST_IN_FLIGHT];
    uint32_t first;
    _Atomic uint32_t count; /* changed under the lock */
    uint64_t number;        /* the sender's */
    /* Requests the sender's, results and timeouts the receiver's: stored and loaded by `count` and
     * `look`. */
    burst_statistics counts;
    burst_result_packet last; /* the receiver's */
    uint32_t shapes[MOST_SHAPES];
    uint64_t changes; /* of `last`, whatever the lane */
} controller;

struct request {
    object head;
    controller *controller; /* held */
    _Atomic uint32_t in_flight;
    uint32_t n_slots;
    int64_t *slots;
    pool **pools; /* held; behind the slots */
    uint64_t bytes;
    unsigned char *packet; /* of the lane's version, which its successors have to have, too */
};

/* Takes the lane for reading; `generation` counts lanes. */
int controller_enter(controller *c, uint64_t *generation);
void controller_leave(controller *c);
int controller_refuse(const controller *c); /* 0: its lane may be used */

/* Sides that this thread is inside of, from now on; -EBUSY: another one is. */
int controller_begin(controller *c, uint32_t sides);
void controller_end(controller *c, uint32_t sides);

/* In flight from now on; -EBUSY: it was. */
int controller_mark(request *q);
/* Inside, under the lock: sends it, and notes it, so that the receiver finds it. */
int controller_send_noted(controller *c, request *q, uint64_t deadline, uint64_t *number);
/* The next result; deadline 0: -EAGAIN, without words, where none has come. */
int controller_receive_packet(controller *c, uint64_t deadline);
/* Then, under the lock, takes out the oldest one that was in flight. */
flight controller_take_flight(controller *c);
/* And lets go of it. False: its result is not wanted. */
bool controller_land(controller *c, const flight *f, burst_outcome *o);
int controller_told(controller *c, const burst_outcome *o); /* says what the device says */
int controller_explain(controller *c, int r);               /* says what a lane says */

/* The calls of a program: take the handles, keep other threads out, and then send or receive. */
typedef int sending(controller *c, request *q, uint64_t deadline, uint64_t *number);
typedef int receiving(controller *c, uint64_t deadline, burst_outcome *o);
int controller_submit(burst_controller *handle, burst_request *wanted, uint64_t deadline,
                      uint64_t *number, sending *send);
int controller_await(burst_controller *handle, uint64_t deadline, burst_outcome *outcome,
                     receiving *receive);

/* After -EPIPE without `recover`: it is of no more use; -EPIPE. */
int controller_give_up(controller *c);

#endif
