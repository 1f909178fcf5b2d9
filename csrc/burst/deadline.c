/* When what a thread executes has to be done, and whether it can be, to judge by what earlier
 * executions took.
 *
 * The deadline goes by the thread, so that everything between the listener and an operation in the
 * midst of a model can look at it, and nothing on the way has to hand it on.
 */
#include <stdint.h>

#include "burst/api.h"
#include "burst/packet.h"
#include "burst/run_queue.h"

#include <stdatomic.h>
#include <stdbool.h>

static _Thread_local uint64_t due = UINT64_MAX;

uint64_t burst_due(void) { return due; }

void burst_set_due(uint64_t deadline) { due = deadline; }

/* Several listeners may execute one model. Relaxed, because it is a guess: one that gets lost does
 * no harm. */
static uint64_t look(const uint64_t *word) {
    return atomic_load_explicit((const _Atomic uint64_t *)word, memory_order_relaxed);
}

/* Relaxed, because nothing is handed over with it. */
static void put(uint64_t *word, uint64_t value) {
    atomic_store_explicit((_Atomic uint64_t *)word, value, memory_order_relaxed);
}

/* A time that is about the same as before is not stored, so that the cache line stays shared. */
static void learn_time(burst_estimate *e, uint64_t ns) {
    uint64_t usual = look(&e->usual_ns), off = ns > usual ? ns - usual : usual - ns;
    if (!usual) put(&e->usual_ns, ns);
    else if (off > usual / 8) put(&e->usual_ns, usual - usual / 8 + ns / 8);
    if (!usual || look(&e->doubts) || ns < look(&e->least_ns)) put(&e->least_ns, ns);
}

void burst_took(burst_estimate *e, uint64_t ns, int was_done) {
    if (was_done) learn_time(e, ns ? ns : 1);
    if (look(&e->doubts)) put(&e->doubts, 0);
}

/* A refusal is a guess and measures nothing. So each further refusal asks for an eighth less time,
 * until a run is tried. */
uint64_t burst_needed(const burst_estimate *e) {
    uint64_t least = look(&e->least_ns), doubts = look(&e->doubts);
    return doubts < 8 ? least - least / 8 * doubts : 0;
}

static bool is_left(uint64_t ns, uint64_t since, uint64_t deadline) {
    return since <= deadline && deadline - since >= ns;
}

int32_t burst_admit(burst_estimate *e, uint64_t since, uint64_t now, uint64_t deadline) {
    if (deadline == UINT64_MAX) return 0;
    uint64_t needed = e ? burst_needed(e) : 0;
    if (is_left(needed, now, deadline)) return 0;
    if (now <= deadline) put(&e->doubts, look(&e->doubts) + 1);
    return is_left(needed, since, deadline) ? MISSED_DEADLINE_TRANSIENT
                                            : MISSED_DEADLINE_PERSISTENT;
}

int32_t burst_missed(const burst_estimate *e, uint64_t since, uint64_t deadline, uint64_t took,
                     int is_unsure) {
    uint64_t least = e ? look(&e->least_ns) : 0;
    if (!least) least = took;
    bool could_be_done = least ? is_left(least, since, deadline) : is_unsure;
    return could_be_done ? MISSED_DEADLINE_TRANSIENT : MISSED_DEADLINE_PERSISTENT;
}
