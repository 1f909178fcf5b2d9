/* What the two kinds of handles of libfmq stand for. Not exported. */
#ifndef LIBFMQ_QUEUES_H
#define LIBFMQ_QUEUES_H

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

#endif
