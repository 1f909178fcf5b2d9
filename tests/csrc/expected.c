/* A request of a higher priority comes, without the lock, between any two looks of burst_policy_next: policy.c as it is,
 * with scheduled.h, which makes each access to an atomic word such a point.
 *
 *   expected        prints at how many points it came
 *
 * Two accounts wait for a free slot. The low ticket of the first one, which has used less, may have it as long as no
 * higher one is expected, so either may get it; that neither does leaves a slot free beside a ticket that may have it.
 */
#include "scheduled.h"

#include "burst/api.h"
#include "burst/run_queue.h"

#include <stdio.h>
#include <stdlib.h>

enum { QUANTUM = 1000000 };
static const uint64_t LATER = 20000000000; /* ns: what was expected before is over */

static const burst_estimate brief = {.usual_ns = 1000};
static burst_ticket *comes; /* NULL: not now */
static unsigned points, at;

void step_before(const volatile void *word) {
    (void)word;
    if (!comes || ++points != at) return;
    burst_ticket *high = comes;
    comes = NULL;
    burst_policy_expect(high, &brief, LATER);
}

static burst_ticket *ticket(burst_application *a, uint32_t priority) {
    return burst_ticket_new(burst_flow_new(a, priority));
}

static burst_application *application(burst_run_queue *q) {
    return burst_application_new(burst_share_new(q, 100));
}

static void begin(burst_ticket *t, uint64_t now) {
    burst_policy_expect(t, &brief, now);
    if (!burst_policy_begin(t, now)) abort();
}

/* Whether it came at that point. Frees nothing: the process ends soon. */
static bool came_at(unsigned point) {
    burst_run_queue *q = burst_run_queue_new(2, QUANTUM);
    burst_application *first = application(q), *second = application(q);
    burst_ticket *high = ticket(first, BURST_HIGH), *low[] = {ticket(first, BURST_LOW), ticket(first, BURST_LOW)};
    burst_ticket *other = ticket(second, BURST_LOW);
    begin(high, 1);
    burst_policy_release(high);
    begin(low[0], LATER - 1);
    burst_ticket *waiting[] = {low[1], other};
    for (unsigned i = 0; i < 2; i++) {
        burst_policy_expect(waiting[i], &brief, LATER - 1);
        burst_policy_arrive(waiting[i], LATER - 1);
    }
    second->share->fair.pace += QUANTUM;
    comes = high, points = 0, at = point;
    burst_ticket *next = burst_policy_next(q, LATER);
    bool came = !comes;
    comes = NULL;
    if (next != low[1] && next != other) abort();
    return came;
}

int main(void) {
    unsigned point = 1;
    while (came_at(point)) point++;
    printf("%u points\n", point - 1);
}
