/* A burst, and the requests that were made for it. Not exported. */
#ifndef LIBBURST_CONTROLLER_H
#define LIBBURST_CONTROLLER_H

#include "libburst/lane.h"

enum { MOST_SHAPES = 2 * LENGTH };

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

#endif
