/* Threads that serve bursts in real time (SCHED_FIFO), and what bounds them.
 *
 * Such a thread comes before all ordinary ones, so one that runs away stops a processor. The kernel
 * counts how long it has run since it last slept (RLIMIT_RTTIME). At the soft limit it sends
 * SIGXCPU, which hits the thread that runs: that makes itself an ordinary thread, and the execution
 * in hand is answered with an error. A thread that handles no signals ends with the process, at the
 * hard limit. A listener whose client never pauses is no runaway: it sleeps for a moment, often
 * enough. Locks of listeners have priority inheritance, where the process may have real time. */
#define _GNU_SOURCE
#include <stdint.h>

#include "burst/api.h"

#include "burst/packet.h"
#include "burst/real_time.h"
#include "burst/run_queue.h"
#include "burst/trace.h"
#include "fmq/futex.h"
#include "fmq/ring.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { ORDINARY = 0, REAL_TIME = 1, LOST = 2, ON_FAULT = 1 /* MLOCK_ONFAULT */ };
static const uint64_t REST_EVERY = 50000000; /* ns */

/* Of this thread. */
static _Thread_local volatile sig_atomic_t state;
static _Thread_local uint64_t rested;
static struct rlimit bound;

static void on_soft_limit(int number) {
    (void)number;
    int error = errno;
    const struct sched_param none = {0};
    if (state == REAL_TIME && !sched_setscheduler(0, SCHED_OTHER, &none)) state = LOST;
    setrlimit(RLIMIT_RTTIME, &bound); /* the kernel has raised the soft one by a second */
    errno = error;
}

int burst_bound_real_time(uint64_t soft_us, uint64_t hard_us) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_soft_limit;
    action.sa_flags = (int)SA_RESTART;
    bound = (struct rlimit){soft_us, hard_us};
    run_queue_inherit_priorities();
    if (sigaction(SIGXCPU, &action, NULL)) return -errno;
    return setrlimit(RLIMIT_RTTIME, &bound) ? -errno : 0;
}

int burst_real_time(int priority) {
    const struct sched_param how = {.sched_priority = priority};
    /* Threads that a library starts meanwhile are ordinary ones. */
    if (sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &how)) return -errno;
    rested = futex_now();
    state = REAL_TIME;
    return 0;
}

void real_time_rest(uint64_t now) {
    /* Long enough that the thread really sleeps: a timer that has run out by then is no rest. */
    static const struct timespec moment = {0, 100000};
    if (state != REAL_TIME || now - rested < REST_EVERY) return;
    nanosleep(&moment, NULL);
    rested = now;
}

bool real_time_was_lost(void) {
    if (state != LOST) return false;
    state = ORDINARY;
    return true;
}

uint32_t real_time_tell(burst_trace *trace, uint64_t id) {
    static const char text[] =
        "it computed for longer than a thread in real time may without a pause (RLIMIT_RTTIME, 0.2 "
        "s): this burst goes on without real time; make smaller requests";
    static_assert(sizeof text <= sizeof trace->failures[0].text, "a failure has room for it");
    burst_failure *f = &trace->failures[id % BURST_FAILURES];
    note(&f->id, 0);
    memcpy(f->text, text, sizeof text);
    note(&f->status, RESOURCE_EXHAUSTED_TRANSIENT);
    note(&f->nbytes, sizeof text - 1), note(&f->phase, 0);
    note(&f->late_by, UINT64_MAX), note(&f->retry_after, UINT64_MAX);
    note(&f->id, id);
    return RESOURCE_EXHAUSTED_TRANSIENT;
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Pages that are touched stay in memory from then on. */
int burst_lock(const void *base, uint64_t bytes) {
    return syscall(SYS_mlock2, base, bytes, ON_FAULT) ? -errno : 0;
}

static int lock_end(const fmq_end *e) {
    int r = burst_lock(e->ring.base, e->ring.capacity * e->ring.element_bytes);
    return r ? r : burst_lock(e->shared.theirs, sizeof *e->shared.theirs); /* the control page */
}

int burst_lock_ends(const fmq_end *one, const fmq_end *other, const burst_trace *trace) {
    int r = lock_end(one);
    if (!r) r = lock_end(other);
    return r ? r : burst_lock(trace, sizeof *trace);
}
