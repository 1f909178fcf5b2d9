/* What the life thread does while it lives: it watches what the kernel closes when a peer dies. */
#ifndef FMQ_LINK_H
#define FMQ_LINK_H

#include <stdint.h>

struct fmq_end;

void link_serve(void);  /* the life thread's body; does not return */
void link_forget(void); /* in the child of a fork: the thread is gone, and so are the links */
int life_start(void);   /* life.c: makes sure that the life thread runs */

/* bridge.c: hangs a bell that has the threads which wait on this end look again when its peer dies
 * or leaves. Returns a token for fmq_unhang; -ENOSPC when there are too many. */
int64_t bridge_tell(struct fmq_end *e);

#endif
