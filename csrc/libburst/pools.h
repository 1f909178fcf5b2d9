/* Memory that both sides map. Not exported. */
#ifndef LIBBURST_POOLS_H
#define LIBBURST_POOLS_H

#include "burst/messages.h"
#include "libburst/burst.h"
#include "libburst/handles.h"

typedef struct {
    object head;
    int fd;
    uint64_t bytes;
    void *base;
} pool;

int pool_holds(const pool *p, const burst_tensor *t); /* 0; -EINVAL: the tensor is not all in it */
void put_pool(message *m, const pool *p);             /* its description on the wire */

/* A descriptor of new memory that is sealed against shrinking; all of its pages exist. */
int sealed_memory(const char *name, uint64_t bytes);

#endif
