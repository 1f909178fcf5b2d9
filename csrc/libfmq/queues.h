/* What the two kinds of handles of libfmq stand for. Not exported. */
#ifndef LIBFMQ_QUEUES_H
#define LIBFMQ_QUEUES_H

#include <pthread.h>
#include <stdint.h>

#include "fmq/api.h"
#include "libburst/handles.h"

typedef struct {
    object head;
    int file;
    uint64_t bytes; /* mapped */
    void *control, *ring;
    fmq_shape shape;
} queue_memory;

typedef struct queue_role {
    object head;
    queue_memory *memory; /* held */
    int lock;             /* the open file that has the lock */
    int byte;             /* of the memory that is locked */
    int life;             /* fmq_life_hold's; -1: none */
    int64_t link;
    _Atomic uint64_t spin;
    fmq_end *end;
    struct queue_role *next; /* of all that have a lock */
    pthread_mutex_t lock_of_bell;
    int bell;      /* an eventfd; -1: none */
    int64_t token; /* fmq_bridge's; -1: none */
    struct {       /* what has come of a record; of the thread that is inside fmq_queue_receive */
        _Atomic uint32_t busy;
        char *bytes; /* NULL: none has begun */
        uint64_t room, total, got;
    } record;
} queue_role;

int64_t end_with(queue_role *e, int64_t result); /* lets go of it, and says why it failed */

#endif
