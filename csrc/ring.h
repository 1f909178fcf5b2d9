/* One end of a ring: private state and the two halves of every transfer. Used by queue.c; not exported. */
#ifndef FMQ_RING_H
#define FMQ_RING_H

#include "layout.h"

#include <stdbool.h>

struct fmq_end {
    /* What the two roles share, seen from this one. All pointers go into the control block. */
    fmq_position *mine, *theirs;
    _Atomic uint32_t *my_wait, *their_wait;
    _Atomic uint32_t *their_life;
    unsigned char *ring;

    /* Private copies: nothing that a peer may change later is believed twice. */
    uint64_t capacity;
    uint32_t element_bytes;
    bool writer;
    bool broken;        /* the peer broke the protocol; sticky */
    int generation;     /* of the process that opened it; a forked child's copy is of no use */
    uint32_t my_cpu;    /* what mine->cpu holds */
    uint64_t position;  /* my counter */
    uint64_t slot;      /* position % capacity */
    uint64_t seen;      /* the peer's counter when last looked at */
    uint64_t reserved;

    _Atomic uint32_t busy;    /* a thread is inside a call */
    _Atomic uint32_t stopped; /* fmq_stop */
};

/* Elements (reader) or free places (writer) as far as `seen` tells. */
static inline uint64_t ring_known(const struct fmq_end *e) {
    return e->writer ? e->capacity - (e->position - e->seen) : e->seen - e->position;
}

int ring_look(struct fmq_end *e);
int ring_need(struct fmq_end *e, uint64_t n);
void ring_publish(struct fmq_end *e, uint64_t n);
void ring_copy_in(struct fmq_end *e, const void *elements, uint64_t n);
void ring_copy_out(struct fmq_end *e, void *elements, uint64_t n);

#endif
