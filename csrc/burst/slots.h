/* What the thread that answers devices asks of a table of slots. burst/api.h, which is included
 * before, has the rest. Not exported. */
#ifndef BURST_SLOTS_H
#define BURST_SLOTS_H

#include "burst/messages.h"

/* Puts the memory behind n slots into an answer: descriptions, and duplicates of descriptors, which
 * the caller closes in any case. 0; or -ENOENT, where a slot stands for no memory, or for memory
 * that its owner has closed. is_memory: no descriptor is of a file that can be slow to close. */
int slots_describe(burst_slots *slots, const int64_t *numbers, uint32_t n, message *answer,
                   bool *is_memory);
/* Until burst_slots_free, which the other holders call, too. */
burst_slots *slots_hold(burst_slots *slots);
/* In the child of a fork: another thread may have held it, and does not exist here. */
void slots_forget_lock(burst_slots *slots);

#endif
