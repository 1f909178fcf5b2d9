/* One end of a ring: private state and the two halves of every transfer. Used by queue.c and
 * sleep.c; not exported. */
#ifndef FMQ_RING_H
#define FMQ_RING_H

#include "fmq/layout.h"
#include "fmq/life.h"

#include <errno.h>
#include <stdbool.h>

/* The ring of elements. A private copy: nothing that a peer may change later is believed twice. */
struct end_ring {
    unsigned char *base;
    uint64_t capacity;
    uint32_t element_bytes;
};

/* The words that both roles share, seen from this one: pointers into the control block. */
struct end_shared {
    fmq_counter *mine; /* NULL for readers of an unsynchronized queue */
    fmq_counter *theirs;
    _Atomic uint32_t *my_wait;    /* NULL without write access */
    _Atomic uint32_t *their_wait; /* NULL when the peer never waits */
    _Atomic uint32_t *their_life;
};

/* Broadcast queues; otherwise all is 0 (readers.c). */
struct end_readers {
    fmq_counter *seats;
    _Atomic uint64_t *verdicts;
    struct reader_record *records; /* the writer's, one for each seat */
    uint32_t seat, turn;           /* the reader's own */
    _Atomic uint32_t no_life;      /* what the writer's `their_life` points to */
};

/* A public event flag that every transfer wakes, for threads that wait for several queues. */
struct end_flag {
    void *notify; /* NULL: none */
    uint32_t mask;
};

/* How far this end has come. */
struct end_cursor {
    uint64_t position; /* my counter */
    uint64_t slot;     /* position % capacity */
    uint64_t seen;     /* the peer's counter when last looked at */
    uint64_t reserved; /* elements of the open reservation; 0: none is open */
    uint64_t begun;    /* writer with many readers: what head.begin holds */
    uint64_t before;   /* broadcast reader: its position before it last moved */
    uint64_t lost;     /* unsynchronized reader: elements that the last overrun cost */
    uint32_t my_cpu;   /* what mine->cpu holds */
    bool overran;      /* the next transfer reports an overrun, whichever call noticed it */
    bool broken;       /* the peer broke the protocol; sticky */
};

/* What past waits were like. */
struct end_sleep {
    uint64_t asleep_ns; /* in all */
    uint64_t usual_ns;  /* what a wait has lately taken, for FMQ_SPIN_ADAPTIVE */
    uint64_t progress;  /* `seen` at the last wake-up that brought progress */
    uint32_t spurious;  /* wake-ups since then */
    bool interrupted;   /* the last wait ended for a signal, and is going to be repeated */
    bool is_bridged;    /* broadcast writer: the bridge may sleep for it */
};

/* How other threads of this process reach the thread inside a call. */
struct end_signals {
    _Atomic uint32_t busy;      /* a thread is inside a call */
    _Atomic uint32_t called;    /* sleep_call: the sleep that goes on, or the next, is -EINTR */
    _Atomic uint32_t ended;     /* END_STOPPED, END_LOST; 0 while both sides go on */
    _Atomic uint32_t lost_life; /* END_LOST is of this life; a successor has another one */
    /* The bridge wakes the sleeper when the peer's life changes, so that one word is enough for a
     * sleep (fmq_link). */
    _Atomic uint32_t told;
};

/* Three lines by owner: fmq_open, the thread inside a call, and any thread. */
struct fmq_end {
    /* fmq_open writes these before another thread knows the end. Later fmq_follow replaces
     * `shared.their_life`, and readers_look points `shared.theirs` to the slowest reader. */
    alignas(FMQ_LINE) struct fmq_process *process; /* the one that has this end */
    int generation; /* of the process at that time; a forked child's copy is of no use */
    bool writer;
    bool overwrites; /* the unsynchronized flavour */
    struct end_ring ring;
    struct end_shared shared;
    struct end_readers readers;

    /* The thread inside a call reads and writes these: `signals.busy` lets in one at a time. */
    alignas(FMQ_LINE) struct end_cursor cursor;
    struct end_sleep sleep;
    struct end_flag flag;

    /* Any thread reads and writes these. */
    alignas(FMQ_LINE) struct end_signals signals;
};

static_assert(offsetof(struct fmq_end, cursor) == FMQ_LINE, "what fmq_open writes is one line");
static_assert(offsetof(struct fmq_end, signals) == 2 * FMQ_LINE, "the caller's words are one line");
static_assert(sizeof(struct fmq_end) == 3 * FMQ_LINE, "one line for each owner");

/* One of any number of readers, with no role and no shared counter. */
static inline bool end_is_unsynchronized_reader(const struct fmq_end *e) {
    return e->overwrites && !e->writer;
}

/* One of the readers of a broadcast queue. */
static inline bool end_has_seat(const struct fmq_end *e) { return e->readers.seats && !e->writer; }

/* One of many readers, which all sleep on one word. */
static inline bool end_is_one_of_many(const struct fmq_end *e) {
    return end_has_seat(e) || (e->overwrites && !e->writer);
}

/* Woken for nothing now and then, and looks again once a second: one of many readers, or the writer
 * that they wake. */
static inline bool end_has_many(const struct fmq_end *e) {
    return end_is_one_of_many(e) || e->readers.records;
}

/* `ended` was read before `life`. */
static inline bool end_is_lost(const struct fmq_end *e, uint32_t life, uint32_t ended) {
    return (ended & END_LOST) && life == atomic_load(&e->signals.lost_life);
}

static inline void end_leave(struct fmq_end *e) {
    atomic_store_explicit(&e->signals.busy, 0, memory_order_release); /* pairs: ONE_CALLER */
}

/* After a fork the child cannot use its copy, except for a reader that holds no role: it goes on at
 * a position of its own. Calls of the parent's other threads on it do not exist in the child. */
static inline bool end_is_ours(struct fmq_end *e) {
    if (e->generation == e->process->generation) return true;
    if (!end_is_unsynchronized_reader(e)) return false;
    e->generation = e->process->generation;
    e->cursor.reserved = 0;
    atomic_store(&e->signals.busy, 0);
    return true;
}

/* One thread at a time, else -EBUSY. */
static inline int end_enter(struct fmq_end *e) {
    if (!end_is_ours(e)) return -ECANCELED;
    /* acquire: what the last caller did to this end is visible.  pairs: ONE_CALLER. seq_cst, and
     * then the look at `ended`: either we see it, or fmq_stop sees us inside.  pairs: STOP */
    if (atomic_exchange(&e->signals.busy, 1)) return -EBUSY;
    if (!(atomic_load(&e->signals.ended) & END_STOPPED)) return 0;
    end_leave(e);
    return -ECANCELED;
}

/* Enters for a call that may not run inside a reservation: -EBUSY while one is open. */
static inline int end_enter_unreserved(struct fmq_end *e) {
    int r = end_enter(e);
    if (!r && e->cursor.reserved) r = -EBUSY, end_leave(e);
    return r;
}

/* Elements (reader) or free places (writer) as far as `seen` tells. */
static inline uint64_t ring_known(const struct fmq_end *e) {
    if (!e->writer) return e->cursor.seen - e->cursor.position;
    return e->overwrites ? e->ring.capacity
                         : e->ring.capacity - (e->cursor.position - e->cursor.seen);
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
