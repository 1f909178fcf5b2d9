/* The states of a life word, shared by the ends, the bridge and life.c. */
#ifndef FMQ_LIFE_H
#define FMQ_LIFE_H

#include <linux/futex.h>
#include <stdint.h>

/* 0                        no process ever held it
 * tid | FUTEX_WAITERS      alive: tid is the holder's life thread, and the kernel must wake us when it is gone
 * FUTEX_WAITERS            released in good order
 * FUTEX_OWNER_DIED | …     the kernel found it in a dead thread's robust list */
#define LIFE_NOBODY 0u
#define LIFE_RELEASED ((uint32_t)FUTEX_WAITERS)

/* What a process has once and every end looks at. burst._core compiles the ring a second time, but has no state of its
 * own for it: each end brings its process along. */
struct fmq_process {
    uint32_t version;   /* FMQ_PROCESS_VERSION */
    uint32_t end_bytes; /* sizeof(struct fmq_end), where fmq._core was compiled */
    int generation;     /* counts the forks since the first word was held: what was opened before one is the parent's alone */
};
#define FMQ_PROCESS_VERSION 1u

static inline int life_is_dead(uint32_t word) { return (word & FUTEX_OWNER_DIED) != 0; }

#endif
