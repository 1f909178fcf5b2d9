/* The guarded ranges, shared by memory.c and life.c. */
#ifndef FMQ_MEMORY_H
#define FMQ_MEMORY_H

#include <stdint.h>

/* Adds memory that a peer may truncate to what fmq_guard() protects; 0 when there is no room for
 * it. `unit`: how many bytes are replaced together when one of them has vanished, from a multiple
 * of it on: what was mapped at once. */
int fmq_remember(void *base, uint64_t bytes, uint64_t unit);

/* Whether that address is of such memory. */
int memory_may_vanish(const void *at);

#endif
