/* Who yields while it polls: prints how often an end of each kind has called sched_yield in a wait of a millisecond for nothing.
 * Compiled with -Dsched_yield=counted_yield. */
#include <sched.h>
#include <stdint.h>

#include "fmq/api.h"
#include "fmq/futex.h"
#include "fmq/layout.h"
#include "fmq/life.h"
#include "fmq/ring.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WINDOW = 1000000 }; /* ns */

static alignas(FMQ_PAGE) unsigned char memory[FMQ_BROADCAST_CONTROL + FMQ_PAGE];
static long yields;

int counted_yield(void) { return yields++, 0; }

static fmq_process process = {.version = FMQ_PROCESS_VERSION};
fmq_process *fmq_this_process(void) { return &process; }

static fmq_end *open_end(const fmq_shape *shape, int role) {
    fmq_end *end = NULL;
    if (fmq_open(memory, memory + FMQ_BROADCAST_CONTROL, shape, role, &end)) abort();
    return end;
}

static void wait_in_vain(const char *name, uint32_t flavour, int role) {
    const fmq_shape shape = {8, 0, 1, flavour};
    unsigned char element;
    memset(memory, 0, sizeof memory);
    if (fmq_format(memory, &shape)) abort();
    fmq_end *end = open_end(&shape, role);
    yields = 0;
    int r = fmq_read(end, &element, 1, WINDOW, futex_now() + 2 * WINDOW);
    if (r != -ETIMEDOUT) fprintf(stderr, "%s: %d\n", name, r), exit(1);
    printf("%s: %ld\n", name, yields);
    fmq_free(end);
}

int main(void) {
    wait_in_vain("one reader", FMQ_SYNCHRONIZED, FMQ_READER);
    wait_in_vain("one of many", FMQ_BROADCAST, FMQ_SEAT);
    return 0;
}
