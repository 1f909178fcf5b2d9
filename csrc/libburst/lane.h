/* A burst as long as the device lives: two queues, two sockets, and the thread that hands memory over. Not exported. */
#ifndef LIBBURST_LANE_H
#define LIBBURST_LANE_H

#include "libburst/client.h"
#include "libburst/pools.h"

#include "burst/api.h"

enum { LENGTH = 1024, ELEMENT = 24, MOST_IN_FLIGHT = 64 };

/* Which pool a slot stands for. A slot is never used again, so late questions about it can only miss. */
typedef struct {
    int32_t slot;
    uint32_t uses; /* requests that name it */
    pool *pool;
} slot_entry;

typedef struct {
    pthread_mutex_t lock;
    slot_entry *entries;
    uint32_t count, room;
    int32_t next;
    uint64_t sent; /* memories */
} slot_table;

typedef struct {
    int file, lock, life;
    void *control;
    fmq_end *end;
} queue_end;

typedef struct {
    queue_end out, back;
    int callback, context;
    pthread_t thread;
    bool has_thread;
    int64_t link;
    void *life;
    slot_table *slots;
    uint64_t epoch; /* of the connection */
    int version;
    burst_caller caller;
    unsigned char buffers[2][LENGTH * ELEMENT];
} lane;

int slots_add(slot_table *t, pool *p);           /* its slot, used once more */
bool slots_drop(slot_table *t, int32_t slot);    /* used once less; true: it stands for nothing any more */

/* `trace`, in `trace_memory`, outlives the lane. */
int lane_open(compiled *p, slot_table *slots, uint64_t spin, burst_trace *trace, int trace_memory, lane **out);
void lane_stop(lane *l); /* calls inside end with -ECANCELED; any thread, while the lane lives */
void lane_free(lane *l); /* no thread is inside */
void lane_forget(lane *l, int32_t slot); /* the device lets go of its memory */

#endif
