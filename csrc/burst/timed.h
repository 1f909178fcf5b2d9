/* The watch over runs that go on too long, for runs that are no calls of a function: timed.c. */
#ifndef BURST_TIMED_H
#define BURST_TIMED_H

/* It runs from now on, and has to end by then. */
void timed_begin(burst_timed *timed, uint64_t due);
void timed_end(burst_timed *timed);

#endif
