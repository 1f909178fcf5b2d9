/* A burst as long as the device lives: two queues, two sockets, and what the device asks on. Not
 * exported. */
#ifndef LIBBURST_LANE_H
#define LIBBURST_LANE_H

#include "libburst/client.h"
#include "libburst/pools.h"

#include "burst/api.h"

enum { LENGTH = 1024, ELEMENT = 24, MOST_IN_FLIGHT = 64 };

typedef struct {
    int file, lock, life;
    void *control;
    fmq_end *end;
} queue_end;

typedef struct {
    queue_end out, back;
    burst_sockets *sockets;
    int64_t link;
    void *life;
    uint64_t epoch; /* of the connection */
    int version;
    burst_caller *caller;
} lane;

/* New memory with an empty trace: its descriptor, or -errno. */
int lane_new_trace(uint32_t depth, burst_trace **trace);
void lane_free_trace(burst_trace *trace, int trace_memory);
/* `trace`, in `trace_memory`, outlives the lane. */
int lane_open(compiled *p, burst_slots *slots, uint64_t spin, burst_trace *trace, int trace_memory,
              lane **out);
void lane_stop(lane *l); /* calls inside end with -ECANCELED; any thread, while the lane lives */
void lane_free(lane *l); /* no thread is inside */
void lane_forget(lane *l, int64_t slot); /* the device lets go of its memory */

#endif
