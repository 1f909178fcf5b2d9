/* Memory that both sides map. Not exported. */
#ifndef LIBBURST_POOLS_H
#define LIBBURST_POOLS_H

#include "burst/messages.h"
#include "libburst/handles.h"

typedef struct {
    object head;
    int fd;
    uint64_t bytes;
    void *base;
} pool;

void put_pool(message *m, const pool *p); /* its description on the wire */

/* A descriptor of new memory that is sealed against shrinking; all of its pages exist. */
int sealed_memory(const char *name, uint64_t bytes);

#endif
