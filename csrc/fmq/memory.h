/* The guarded ranges, shared by memory.c and life.c. */
#ifndef FMQ_MEMORY_H
#define FMQ_MEMORY_H

#include <stdint.h>

/* Adds memory that a peer may truncate to what fmq_guard() protects; 0 when there is no room for it. */
int fmq_remember(void *base, uint64_t bytes);

#endif
