/* Before libc (LD_PRELOAD): counts the futex waits that have less than 20 us until their deadline. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>

enum { WAITV = 449, SOON = 20000 /* ns */ };

static _Atomic long soon;

long timed_waits(void) { return soon; }

static int64_t left(const struct timespec *until) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)(until->tv_sec - now.tv_sec) * 1000000000 + until->tv_nsec - now.tv_nsec;
}

long syscall(long number, ...) {
    static long (*next)(long, ...);
    if (!next) next = (long (*)(long, ...))(uintptr_t)dlsym(RTLD_NEXT, "syscall");
    long a[6];
    va_list all;
    va_start(all, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(all, long);
    va_end(all);
    int waits = number == WAITV || (number == SYS_futex && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET);
    if (waits && a[3] && left((const struct timespec *)(uintptr_t)a[3]) < SOON) soon++;
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
