/* A public event flag: 32 sticky bits and a count of sleepers, in eight bytes of any shared memory.
 *
 * wake sets bits; wait consumes the bits of its mask and sleeps while none is set. A waker makes a system call whenever
 * somebody sleeps, also when the bits were set already: a waker that died between setting and waking leaves the next one
 * a sleeper to wake (a count that a killed sleeper left behind costs a call, never a wake-up).
 */
#include <stdint.h>

#include "api.h"

#include "futex.h"

#include <errno.h>
#include <limits.h>

typedef struct {
    _Atomic uint32_t bits, sleepers;
} event_flag;

static uint32_t consume(event_flag *f, uint32_t mask) {
    if (!(atomic_load(&f->bits) & mask)) return 0;
    return atomic_fetch_and(&f->bits, ~mask) & mask;
}

int fmq_event_wake(void *flag, uint32_t mask) {
    event_flag *f = flag;
    if (!mask) return -EINVAL;
    atomic_fetch_or(&f->bits, mask);     /* seq_cst, then the look at sleepers.  pairs: EVENT_SLEEP */
    if (atomic_load(&f->sleepers)) futex_wake(&f->bits, INT_MAX, mask);
    return 0;
}

int fmq_event_wait(void *flag, uint32_t mask, uint64_t deadline, uint32_t *bits) {
    event_flag *f = flag;
    if (!mask) return -EINVAL;
    int r = 0;
    while (!(*bits = consume(f, mask)) && !r) {
        atomic_fetch_add(&f->sleepers, 1); /* seq_cst, then the look at bits.  pairs: EVENT_SLEEP */
        uint32_t now = atomic_load(&f->bits);
        if (!(now & mask)) r = futex_wait(&f->bits, now, mask, deadline);
        atomic_fetch_sub(&f->sleepers, 1);
        /* Woken, or another bit changed. Somebody who changes bits all the time cannot hold us beyond the deadline. */
        if (!r || r == -EAGAIN) r = futex_now() < deadline ? 0 : -ETIMEDOUT;
    }
    if (!*bits) *bits = consume(f, mask); /* a bit that came with the timeout is not lost */
    return *bits ? 0 : r;
}
