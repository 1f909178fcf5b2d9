/* The seats of a broadcast queue: each reader has a line with its tail, and the writer waits for
 * the least of them.
 *
 * README.md, "Broadcast", has the protocol. In short: a seat counts from JOINING on, for as long as
 * its life word says "alive" and the writer has not declared its reader out. A reader joins by a
 * tail that may be old, says JOINING, and then looks where head is: that is where it begins, and no
 * writer that missed it can be further than one ring from there.
 */
#define _GNU_SOURCE
#include "fmq/readers.h"

#include <stdint.h>

#include "fmq/api.h"

#include "fmq/life.h"
#include "fmq/sleep.h"

#include <stdlib.h>
#include <unistd.h>

static uint32_t turn_of(uint32_t state) { return state >> 2; }

/* ---- a reader -------------------------------------------------------------------------------- */

/* The holder of a seat's lock, before it holds the life word: a predecessor's state must not count
 * with a new life. */
int fmq_clear_seat(void *control, int role) {
    unsigned k = (unsigned)role - FMQ_SEAT;
    if (k >= FMQ_SEATS) return -EINVAL;
    fmq_counter *seat = (fmq_counter *)((char *)control + FMQ_SEATS_AT) + k;
    atomic_store(&seat->state, atomic_load(&seat->state) & ~3u); /* pairs: SEAT */
    return 0;
}

void reader_join(struct fmq_end *e) {
    fmq_counter *seat = e->shared.mine;
    e->readers.turn = turn_of(atomic_load(&seat->state) + 4);
    if (!e->readers.turn) e->readers.turn = 1; /* a verdict of 0 is none */
    atomic_store(&seat->pid, (uint32_t)getpid());
    /* Old by the time that the writer sees it. */
    atomic_store(&seat->counter, atomic_load(&e->shared.theirs->counter));
    /* The life word was set before, the tail too.  pairs: SEAT */
    atomic_store(&seat->state, e->readers.turn << 2 | SEAT_JOINING);
    /* seq_cst: a writer that missed the state was not beyond this head when it looked.
     * pairs: SEAT */
    e->cursor.seen = atomic_load(&e->shared.theirs->counter);
    ring_move_to(e, e->cursor.seen);
    atomic_store(&seat->counter, e->cursor.seen);
    /* From here on the tail has to be true. */
    atomic_store(&seat->state, e->readers.turn << 2 | SEAT_TAKEN);
}

int reader_verdict(const struct fmq_end *e) {
    if (e->writer) return 0;
    uint64_t verdict = atomic_load(&e->readers.verdicts[e->readers.seat]); /* pairs: OUT */
    if (verdict >> 8 != e->readers.turn) return 0;
    return (verdict & 255) == OUT_CORRUPT ? -EPROTO : -ESTALE;
}

/* After a move. The writer says which tail it needs, so that only a reader that comes past it makes
 * a system call. */
bool reader_is_awaited(const struct fmq_end *e) {
    uint64_t need = atomic_load(&e->shared.theirs->need);
    return !need ||
           ((int64_t)(e->cursor.before - need) < 0 && (int64_t)(e->cursor.position - need) >= 0);
}

/* ---- the writer's look ----------------------------------------------------------------------- */

static bool is_out(const struct fmq_end *e, unsigned k, uint32_t turn) {
    /* `out` after the verdict, which the reader sees: who finds either may overwrite.
     * pairs: OUT */
    return atomic_load(&e->readers.records[k].out) == turn ||
           atomic_load(&e->readers.verdicts[k]) >> 8 == turn;
}

static void declare_out(struct fmq_end *e, unsigned k, uint32_t turn, unsigned why) {
    /* Before anything of it is overwritten.  pairs: OUT */
    atomic_store(&e->readers.verdicts[k], (uint64_t)turn << 8 | why);
    atomic_store(&e->readers.records[k].out, turn);
}

/* A seat at one moment: who has it, and whether the writer has to wait for it. */
typedef struct {
    uint32_t turn, life;
    bool is_joining, is_alive;
    uint64_t tail;
} reader_sight;

/* Before its life and its tail, which a joining reader sets first.  pairs: SEAT */
static uint32_t state_of(const struct fmq_end *e, unsigned k) {
    return atomic_load(&e->readers.seats[k].state);
}

/* False: free, left, or out. */
static bool look_at(const struct fmq_end *e, unsigned k, uint32_t state, reader_sight *saw) {
    fmq_counter *seat = &e->readers.seats[k];
    saw->turn = turn_of(state);
    saw->is_joining = (state & 3) == SEAT_JOINING;
    if ((!saw->is_joining && (state & 3) != SEAT_TAKEN) || is_out(e, k, saw->turn)) return false;
    saw->life = atomic_load(&seat->life); /* before the tail: its last move counts.  pairs: DEAD */
    if (saw->life == LIFE_NOBODY || saw->life == LIFE_RELEASED) return false;
    saw->is_alive =
        !life_is_dead(saw->life) && saw->life != atomic_load(&e->readers.records[k].lost);
    saw->tail = atomic_load(&seat->counter); /* pairs: VISIBLE, SLEEP */
    return true;
}

/* Whether the writer has to wait for this seat; *tail: where it is. */
static bool counts(struct fmq_end *e, unsigned k, uint32_t state, uint64_t *tail) {
    struct reader_record *known = &e->readers.records[k];
    reader_sight saw;
    if (!look_at(e, k, state, &saw)) return false;
    if (!saw.is_alive) return declare_out(e, k, saw.turn, OUT_DEAD), false;
    uint64_t lag = e->cursor.position - saw.tail;
    bool went_back = known->turn == saw.turn && (int64_t)(saw.tail - known->tail) < 0;
    /* It is old. */
    if (saw.is_joining && (int64_t)lag >= 0 && lag > e->ring.capacity)
        saw.tail = e->cursor.position - e->ring.capacity;
    else if (lag > e->ring.capacity || went_back)
        return declare_out(e, k, saw.turn, OUT_CORRUPT), false;
    known->turn = saw.turn;
    known->life = saw.life;
    *tail = known->tail = saw.tail;
    return true;
}

int readers_look(struct fmq_end *e) {
    uint64_t least = e->cursor.position, tail;
    for (unsigned k = 0; k < FMQ_SEATS; k++) {
        uint32_t state = state_of(e, k);
        e->readers.records[k].life = 0;
        if (!state || !counts(e, k, state, &tail) ||
            e->cursor.position - tail < e->cursor.position - least)
            continue;
        least = tail;
        e->shared.theirs = &e->readers.seats[k]; /* whose CPU matters */
    }
    e->cursor.seen = least;
    return 0;
}

/* All that are alive: one that does not hold the writer up may be killed between its change of the
 * wait word and its wake. */
unsigned readers_words(const struct fmq_end *e, futex_entry *entries) {
    unsigned n = 0;
    for (unsigned k = 0; k < FMQ_SEATS; k++)
        if (e->readers.records[k].life)
            entries[n++] = futex_on(&e->readers.seats[k].life, e->readers.records[k].life);
    return n;
}

/* ---- any thread of the writer's process ------------------------------------------------------ */

bool readers_have_room(const struct fmq_end *e, uint64_t target) {
    reader_sight saw;
    for (unsigned k = 0; k < FMQ_SEATS; k++)
        if (look_at(e, k, state_of(e, k), &saw) && saw.is_alive && (int64_t)(saw.tail - target) < 0)
            return false;
    return true;
}

bool readers_any(const struct fmq_end *e) {
    reader_sight saw;
    for (unsigned k = 0; k < FMQ_SEATS; k++)
        if (look_at(e, k, state_of(e, k), &saw) && saw.is_alive) return true;
    return false;
}

int fmq_readers(fmq_end *e, fmq_reader *readers) {
    int n = 0;
    reader_sight saw;
    if (!e->readers.records) return -EINVAL;
    if (!end_is_ours(e)) return -ECANCELED;
    for (unsigned k = 0; k < FMQ_SEATS; k++) {
        if (!look_at(e, k, state_of(e, k), &saw)) continue;
        uint64_t head = atomic_load(&e->shared.mine->counter), unread = head - saw.tail;
        /* It joins in this moment, or its next look is its last. */
        if (unread > e->ring.capacity) unread = 0;
        readers[n++] = (fmq_reader){.seat = k,
                                    .turn = saw.turn,
                                    .position = head - unread,
                                    .unread = unread,
                                    .pid = atomic_load(&e->readers.seats[k].pid),
                                    .is_alive = saw.is_alive};
    }
    return n;
}

/* Its own threads look again, and so do sleeping readers, among them this one. */
int fmq_evict(fmq_end *e, uint32_t seat, uint32_t turn) {
    if (!e->readers.records || seat >= FMQ_SEATS || !turn) return -EINVAL;
    if (!end_is_ours(e)) return -ECANCELED;
    if (turn_of(atomic_load(&e->readers.seats[seat].state)) != turn) return 0; /* it has left */
    declare_out(e, seat, turn, OUT_EVICTED);
    sleep_look_again(e);
    sleep_greet_peer(e);
    return 0;
}

void readers_lose(struct fmq_end *e, unsigned seat, uint32_t life) {
    atomic_store(&e->readers.records[seat].lost, life);
    sleep_look_again(e);
}

/* ---- opening --------------------------------------------------------------------------------- */

int readers_attach(struct fmq_end *e, void *control, int role) {
    unsigned k = (unsigned)role - FMQ_SEAT;
    e->readers.seats = (fmq_counter *)((char *)control + FMQ_SEATS_AT);
    e->readers.verdicts = (_Atomic uint64_t *)((char *)control + FMQ_VERDICTS_AT);
    if (!e->writer) {
        if (k >= FMQ_SEATS) return -EINVAL;
        e->shared.mine = &e->readers.seats[k];
        e->readers.seat = k;
        return 0;
    }
    e->shared.their_life = &e->readers.no_life; /* no single one */
    e->readers.records = calloc(FMQ_SEATS, sizeof *e->readers.records);
    return e->readers.records ? 0 : -ENOMEM;
}
