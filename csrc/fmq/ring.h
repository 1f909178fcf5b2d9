/* One end of a ring: private state and the two halves of every transfer. Used by queue.c and
 * sleep.c; not exported. */
#ifndef FMQ_RING_H
#define FMQ_RING_H

#include "fmq/layout.h"
#include "fmq/life.h"

#include <errno.h>
#include <stdbool.h>

struct fmq_end {
    struct fmq_process *process; /* the one that has this end */

    /* What the two roles share, seen from this one. All pointers go into the control block. */
    fmq_counter *mine, *theirs; /* mine: NULL for readers of an unsynchronized queue */
    /* my_wait: NULL without write access; their_wait: NULL when the peer never waits. */
    _Atomic uint32_t *my_wait, *their_wait;
    _Atomic uint32_t *their_life;
    unsigned char *ring;

    /* Private copies: nothing that a peer may change later is believed twice. */
    uint64_t capacity;
    uint32_t element_bytes;
    bool writer;
    bool overwrites;  /* the unsynchronized flavour */
    bool rung;        /* broadcast writer: the bridge may sleep for it */
    bool interrupted; /* the last wait ended for a signal, and is going to be repeated */
    bool broken;      /* the peer broke the protocol; sticky */
    /* Of the process when it opened this end; a forked child's copy is of no use. */
    int generation;
    uint32_t my_cpu;   /* what mine->cpu holds */
    uint32_t spurious; /* wakes for nothing since `seen` was `progress` */
    uint64_t position; /* my counter */
    uint64_t slot;     /* position % capacity */
    uint64_t seen;     /* the peer's counter when last looked at */
    uint64_t progress;
    uint64_t reserved;
    uint64_t begun; /* unsynchronized writer: what head.begin holds */
    uint64_t lost;  /* unsynchronized reader: elements that the last overrun cost */
    bool overran;   /* the next transfer tells of an overrun, whichever call noticed it */

    /* Broadcast, or NULL (seats.c). */
    fmq_counter *seats;
    _Atomic uint64_t *verdicts;
    struct seat_record *records; /* the writer's, of each seat */
    uint32_t seat, turn;         /* the reader's */
    uint64_t before;             /* reader: its position before it last moved */
    _Atomic uint32_t no_life;    /* writer: what `their_life` points to */

    /* A public event flag that every transfer wakes, for threads that wait for several queues; or
     * NULL. */
    void *notify;
    uint32_t notify_mask;

    uint64_t asleep_ns;  /* in all */
    uint64_t usual_wait; /* ns: what a wait has lately taken, for FMQ_SPIN_ADAPTIVE */

    _Atomic uint32_t busy; /* a thread is inside a call */
    /* sleep_call: the next sleep, or the one that goes on, ends with -EINTR. */
    _Atomic uint32_t called;
    _Atomic uint32_t ended;     /* END_STOPPED, END_LOST; 0 while both sides go on */
    _Atomic uint32_t lost_life; /* END_LOST is of this life; a successor has another one */
};

/* A reader of an unsynchronized queue: one of any number, with no role and no shared counter. */
static inline bool end_is_listener(const struct fmq_end *e) { return e->overwrites && !e->writer; }

/* One of many readers, which all sleep on one word. */
static inline bool end_is_one_of_many(const struct fmq_end *e) {
    return !e->writer && (e->overwrites || e->seats);
}

/* Woken for nothing now and then, and looks again once a second: one of many readers, or the writer
 * that they wake. */
static inline bool end_has_many(const struct fmq_end *e) {
    return end_is_one_of_many(e) || e->records;
}

/* `ended` was read before `life`. */
static inline bool end_is_lost(const struct fmq_end *e, uint32_t life, uint32_t ended) {
    return (ended & END_LOST) && life == atomic_load(&e->lost_life);
}

static inline void end_leave(struct fmq_end *e) {
    atomic_store_explicit(&e->busy, 0, memory_order_release); /* pairs: ONE_CALLER */
}

/* After a fork the child cannot use its copy, except for a reader that holds no role: it goes on at
 * a position of its own. Calls of the parent's other threads on it do not exist in the child. */
static inline bool end_is_ours(struct fmq_end *e) {
    if (e->generation == e->process->generation) return true;
    if (!end_is_listener(e)) return false;
    e->generation = e->process->generation;
    e->reserved = 0;
    atomic_store(&e->busy, 0);
    return true;
}

/* One thread at a time, else -EBUSY. */
static inline int end_enter(struct fmq_end *e) {
    if (!end_is_ours(e)) return -ECANCELED;
    /* acquire: what the last caller did to this end is visible.  pairs: ONE_CALLER. seq_cst, and
     * then the look at `ended`: either we see it, or fmq_stop sees us inside.  pairs: STOP */
    if (atomic_exchange(&e->busy, 1)) return -EBUSY;
    if (!(atomic_load(&e->ended) & END_STOPPED)) return 0;
    end_leave(e);
    return -ECANCELED;
}

/* As end_enter, for calls that may not run inside a reservation. */
static inline int end_enter_free(struct fmq_end *e) {
    int r = end_enter(e);
    if (!r && e->reserved) r = -EBUSY, end_leave(e);
    return r;
}

/* Elements (reader) or free places (writer) as far as `seen` tells. */
static inline uint64_t ring_known(const struct fmq_end *e) {
    if (!e->writer) return e->seen - e->position;
    return e->overwrites ? e->capacity : e->capacity - (e->position - e->seen);
}

int ring_broken(struct fmq_end *e);
int ring_look(struct fmq_end *e);
int ring_look_ahead(struct fmq_end *e);
int ring_need(struct fmq_end *e, uint64_t n);
void ring_begin(struct fmq_end *e, uint64_t n);
int ring_still_whole(struct fmq_end *e);
void ring_publish(struct fmq_end *e, uint64_t n);
void ring_copy_in(struct fmq_end *e, const void *elements, uint64_t n);
void ring_copy_out(struct fmq_end *e, void *elements, uint64_t n);
void ring_move_to(struct fmq_end *e, uint64_t position);

#endif
