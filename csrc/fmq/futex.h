/* Sleeping, waking, clock and CPU: what the kernel is asked for, and the one seam for tests.
 *
 * Everything is process-shared and every deadline is absolute CLOCK_MONOTONIC nanoseconds
 * (FMQ_FOREVER = none). Results are 0 or a negative errno; -EAGAIN means that a word had already
 * changed.
 */
#ifndef FMQ_FUTEX_H
#define FMQ_FUTEX_H

#include <stdatomic.h>
#include <stdint.h>

#define FMQ_FOREVER UINT64_MAX

uint64_t futex_now(void);

uint32_t futex_cpu(void); /* the CPU that we run on, for a hint: 1 + its number */

/* Sleeps while *word == expected. Woken by futex_wake with an overlapping mask. */
int futex_wait(_Atomic uint32_t *word, uint32_t expected, uint32_t mask, uint64_t deadline);

/* One word to sleep on while it holds what is expected; the kernel's struct futex_waitv, which
 * older headers lack. */
typedef struct {
    uint64_t expected, address;
    uint32_t flags, reserved;
} futex_entry;

/* A word of this process's own memory. */
static inline futex_entry futex_on_private(_Atomic uint32_t *word, uint32_t expected) {
    return (futex_entry){expected, (uint64_t)(uintptr_t)word, 2 | 128 /* FUTEX_32, private */, 0};
}

static inline futex_entry futex_on(_Atomic uint32_t *word, uint32_t expected) {
    return (futex_entry){expected, (uint64_t)(uintptr_t)word, 2 /* FUTEX_32, not private */, 0};
}

/* Sleeps while all n words (at most FUTEX_MOST) hold what is expected; -ENOSYS before Linux 5.16.
 * Returns the index of the entry that was woken. */
enum { FUTEX_MOST = 128 };
int futex_wait_all(futex_entry *entries, unsigned n, uint64_t deadline);

/* Sleeps while *a == in_a, *b == in_b and *own == in_own, a word of this process; 0 when woken,
 * -ENOSYS before Linux 5.16. */
int futex_wait_either(_Atomic uint32_t *a, uint32_t in_a, _Atomic uint32_t *b, uint32_t in_b,
                      _Atomic uint32_t *own, uint32_t in_own, uint64_t deadline);

void futex_wake(_Atomic uint32_t *word, int count, uint32_t mask);

/* Wakes all that sleep on a word of this process. Needs no shared memory, which a peer may have
 * taken away. */
void futex_wake_private(_Atomic uint32_t *word);

/* Sets *word to FUTEX_WAITERS and wakes all sleepers, in one system call: a caller that is killed
 * does both or neither. */
void futex_release(_Atomic uint32_t *word);

#endif
