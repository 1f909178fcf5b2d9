/* The readers of a broadcast queue, as its writer and each of themselves see them. Not exported. */
#ifndef FMQ_READERS_H
#define FMQ_READERS_H

#include "fmq/futex.h"
#include "fmq/ring.h"

/* What the writer keeps of a seat in private memory. */
struct reader_record {
    uint64_t tail; /* where that reader was last */
    uint32_t turn; /* which reader that was */
    /* Its life word when the writer last looked; 0: the writer does not wait for it. */
    uint32_t life;
    _Atomic uint32_t out;  /* the turn that the writer does not count any more */
    _Atomic uint32_t lost; /* the life that ended without a mark (link.c) */
};

int readers_attach(struct fmq_end *e, void *control, int role); /* fmq_open: 0, or -errno */
/* Takes the place of take_over for a reader. */
void reader_join(struct fmq_end *e);

/* The writer's ring_look: `seen` becomes the least tail. */
int readers_look(struct fmq_end *e);
int reader_verdict(const struct fmq_end *e); /* of a reader: 0, or why it is out */
/* Whether all tails are there; any thread. */
bool readers_have_room(const struct fmq_end *e, uint64_t target);
/* Whether a reader lives; any thread. */
bool readers_any(const struct fmq_end *e);
/* Whether the writer may wait for what this reader just did. */
bool reader_is_awaited(const struct fmq_end *e);
/* What the writer sleeps on, as it last looked. */
unsigned readers_words(const struct fmq_end *e, futex_entry *entries);
/* That reader is gone, though it was not marked. */
void readers_lose(struct fmq_end *e, unsigned seat, uint32_t life);

#endif
