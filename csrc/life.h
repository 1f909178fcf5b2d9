/* The states of a life word, shared by the ends, the bridge and life.c. */
#ifndef FMQ_LIFE_H
#define FMQ_LIFE_H

#include <linux/futex.h>
#include <stdint.h>

/* 0                        nobody ever held it
 * tid | FUTEX_WAITERS      alive: tid is the holder's life thread, and the kernel must wake us when it is gone
 * FUTEX_WAITERS            released in good order
 * FUTEX_OWNER_DIED | …     the kernel found it in a dead thread's robust list */
#define LIFE_NOBODY 0u
#define LIFE_RELEASED ((uint32_t)FUTEX_WAITERS)

/* Counts the forks since the first word was held: what was opened before a fork belongs to the parent alone. */
int life_generation(void);

static inline int life_is_dead(uint32_t word) { return (word & FUTEX_OWNER_DIED) != 0; }

#endif
