/* The states of a life word, shared by the ends, the bridge and life.c. */
#ifndef FMQ_LIFE_H
#define FMQ_LIFE_H

#include "fmq/processors.h"

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>

/* 0                        no process ever held it
 * tid | FUTEX_WAITERS      alive: tid is the holder's life thread, and the kernel must wake us when
 *                          it is gone
 * FUTEX_WAITERS            released in good order
 * FUTEX_OWNER_DIED | …     the kernel found it in a dead thread's robust list */
#define LIFE_NOBODY 0u
#define LIFE_RELEASED ((uint32_t)FUTEX_WAITERS)

/* Why an end is over, in a word of its own process that no peer can reach. Every sleep on an end
 * sleeps on this word too. */
#define END_STOPPED 1u /* fmq_stop */
/* fmq_lose: the peer whose life word was `lost_life` is gone, though the kernel did not mark it. */
#define END_LOST 2u
/* Counts both, so that the word never returns to a value that a thread is about to sleep on. */
#define END_TOLD 4u

/* What a process has once and every end looks at. burst._core compiles the ring a second time, but
 * has no state of its own for it: each end brings its process along. */
struct fmq_process {
    uint32_t version;   /* FMQ_PROCESS_VERSION */
    uint32_t end_bytes; /* sizeof(struct fmq_end), where fmq._core was compiled */
    /* Counts the forks since the first word was held: what was opened before one is the parent's
     * alone. */
    int generation;
    /* Counts fmq_stop and fmq_lose: threads that wait for several ends sleep on it. */
    _Atomic uint32_t endings;
    struct fmq_processors processors;
};
#define FMQ_PROCESS_VERSION 4u

static inline int life_is_dead(uint32_t word) { return (word & FUTEX_OWNER_DIED) != 0; }

#endif
