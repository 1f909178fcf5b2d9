#define _GNU_SOURCE
#include "fmq/futex.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#if defined(__GLIBC__) && defined(__has_builtin)
#if __GLIBC_PREREQ(2, 35) && __has_builtin(__builtin_thread_pointer)
#define HAS_RSEQ
#include <sys/rseq.h>
#endif
#endif
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

uint64_t futex_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

/* glibc registers a word that the kernel keeps at the CPU's number; reading it costs nothing. */
uint32_t futex_cpu(void) {
#ifdef HAS_RSEQ
    const struct rseq *own =
        (const struct rseq *)((const char *)__builtin_thread_pointer() + __rseq_offset);
    int32_t cpu = (int32_t)*(const volatile uint32_t *)&own->cpu_id;
    if (__rseq_size && cpu >= 0) return (uint32_t)cpu + 1;
#endif
    return (uint32_t)sched_getcpu() + 1;
}

static struct timespec *absolute(uint64_t deadline, struct timespec *storage) {
    if (deadline == FMQ_FOREVER) return NULL;
    storage->tv_sec = (time_t)(deadline / UINT64_C(1000000000));
    storage->tv_nsec = (long)(deadline % UINT64_C(1000000000));
    return storage;
}

int futex_wait(_Atomic uint32_t *word, uint32_t expected, uint32_t mask, uint64_t deadline) {
    struct timespec at;
    long r =
        syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected, absolute(deadline, &at), NULL, mask);
    return r < 0 ? -errno : 0;
}

int futex_wait_all(futex_entry *entries, unsigned n, uint64_t deadline) {
    struct timespec at;
    long r = syscall(SYS_futex_waitv, entries, n, 0, absolute(deadline, &at), CLOCK_MONOTONIC);
    return r < 0 ? -errno : (int)r;
}

int futex_wait_either(_Atomic uint32_t *a, uint32_t in_a, _Atomic uint32_t *b, uint32_t in_b,
                      _Atomic uint32_t *own, uint32_t in_own, uint64_t deadline) {
    futex_entry entries[3] = {futex_on(a, in_a), futex_on(b, in_b), futex_on_private(own, in_own)};
    int r = futex_wait_all(entries, 3, deadline);
    return r < 0 ? r : 0;
}

void futex_wake(_Atomic uint32_t *word, int count, uint32_t mask) {
    syscall(SYS_futex, word, FUTEX_WAKE_BITSET, count, NULL, NULL, mask);
}

void futex_wake_private(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void futex_release(_Atomic uint32_t *word) {
    /* FUTEX_OP(…) of linux/futex.h shifts an int into its sign. */
    const unsigned operation = FUTEX_OP_SET | FUTEX_OP_OPARG_SHIFT,
                   set_bit_31 = operation << 28 | FUTEX_OP_CMP_EQ << 24 | 31 << 12;
    if (syscall(SYS_futex, word, FUTEX_WAKE_OP, INT_MAX, (void *)0, word, set_bit_31) >= 0) return;
    atomic_store(word, FUTEX_WAITERS); /* refused by a filter, or the page is gone */
    futex_wake(word, INT_MAX, FUTEX_BITSET_MATCH_ANY);
}
