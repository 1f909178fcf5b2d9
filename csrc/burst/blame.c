/* A request that crashes a device is told from those that only died with it: the thread that a
 * fatal signal hits notes it in the trace of the burst that it serves, where the client finds it
 * after the device's death. */
#define _GNU_SOURCE
#include <stdint.h>

#include "burst/api.h"

#include "burst/blame.h"
#include "burst/trace.h"

#include <errno.h>
#include <signal.h>
#include <string.h>

static _Thread_local uint64_t *noted;

void blame_on(uint64_t *there) { noted = there; }

void burst_blame_on(burst_trace *trace) { noted = trace ? &trace->device.signal : NULL; }

/* The handler was reset by SA_RESETHAND: the instruction, or the signal that was raised, ends the
 * process now. */
static void crashed(int number, siginfo_t *info, void *context) {
    (void)context;
    if (noted) note(noted, (uint64_t)number);
    /* Sent, not caused by the instruction to which we return. */
    if (info->si_code <= 0) raise(number);
}

int burst_blame(void) {
    static const int fatal[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = crashed;
    action.sa_flags = SA_SIGINFO | (int)SA_RESETHAND | SA_NODEFER;
    for (unsigned i = 0; i < sizeof fatal / sizeof *fatal; i++)
        if (sigaction(fatal[i], &action, NULL)) return -errno;
    return 0;
}
