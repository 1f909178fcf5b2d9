/* Notes which burst's listener crashed this process. Used by listener.c; api.h has burst_blame. */
#ifndef BURST_BLAME_H
#define BURST_BLAME_H

#include <stdint.h>

/* From now on a fatal signal in this thread is noted there. */
void blame_on(uint64_t *there);

#endif
