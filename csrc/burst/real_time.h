/* What a listener in real time does between requests, and says of one that took too long. Used by
 * listener.c; api.h has the rest. */
#ifndef BURST_REAL_TIME_H
#define BURST_REAL_TIME_H

#include <stdbool.h>
#include <stdint.h>

/* This thread, in real time, sleeps for a moment, if it has not for long. */
void real_time_rest(uint64_t now);
/* Once: this thread has lost it since it was asked. */
bool real_time_was_lost(void);
/* Says so of that request; its status. */
uint32_t real_time_tell(burst_trace *trace, uint64_t id);

#endif
