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

/* Checks a tensor of at most so many dimensions, and that its pool holds all of it. Returns 0, and
 * that pool, held; NULL: it is omitted. */
int pool_of(const burst_tensor *t, uint32_t most, pool **found);
void put_pool(message *m, const pool *p); /* its description on the wire */

/* A descriptor of new memory that is sealed against shrinking; all of its pages exist. */
int sealed_memory(const char *name, uint64_t bytes);

#endif
