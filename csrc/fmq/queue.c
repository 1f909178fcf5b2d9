/* A queue: its geometry, its ends, and transfers that wait. How they wait is sleep.c. */
#define _GNU_SOURCE
#include <stdint.h>

#include "fmq/api.h"

#include "fmq/futex.h"
#include "fmq/life.h"
#include "fmq/readers.h"
#include "fmq/sleep.h"

#include <stdlib.h>
#include <string.h>

/* ---- geometry -------------------------------------------------------------------------------- */

uint64_t fmq_now(void) { return futex_now(); }

uint64_t fmq_ring_bytes(uint64_t capacity, uint32_t element_bytes) {
    /* Far from every overflow below, far beyond every machine. */
    const uint64_t most = UINT64_C(1) << 40;
    if (!capacity || !element_bytes || capacity > most / element_bytes) return 0;
    return capacity * element_bytes;
}

uint64_t fmq_control_bytes(uint32_t flavour) {
    return flavour == FMQ_BROADCAST ? FMQ_BROADCAST_CONTROL : FMQ_PAGE;
}

int fmq_format(void *control, const fmq_shape *shape) {
    if (!fmq_ring_bytes(shape->capacity, shape->element_bytes)) return -EINVAL;
    fmq_control *c = control;
    memset(c, 0, sizeof *c);
    if (shape->flavour == FMQ_BROADCAST)
        memset((char *)control + FMQ_VERDICTS_AT, 0, FMQ_BROADCAST_CONTROL - FMQ_VERDICTS_AT);
    c->version = FMQ_VERSION;
    c->flavour = shape->flavour;
    c->capacity = shape->capacity;
    c->element_bytes = shape->element_bytes;
    c->dtype_hash = shape->dtype_hash;
    /* The region becomes reachable for others only after this call returned. */
    c->magic = FMQ_MAGIC;
    return 0;
}

int fmq_shape_of(const void *control, fmq_shape *shape) {
    /* Volatile: fetched once, and what was checked is what is used. */
    const volatile fmq_control *c = control;
    if (c->magic != FMQ_MAGIC) return -EINVAL;
    if (c->version != FMQ_VERSION) return -EPROTONOSUPPORT;
    *shape = (fmq_shape){c->capacity, c->dtype_hash, c->element_bytes, c->flavour};
    if (shape->flavour < FMQ_SYNCHRONIZED || shape->flavour > FMQ_BROADCAST) return -EOPNOTSUPP;
    return fmq_ring_bytes(shape->capacity, shape->element_bytes) ? 0 : -EMSGSIZE;
}

/* ---- ends ------------------------------------------------------------------------------------ */

static void point_at(fmq_end *e, fmq_control *c, int role) {
    e->writer = role == FMQ_WRITER;
    e->shared.theirs = e->writer ? &c->tail : &c->head;
    e->shared.their_life = e->writer ? &c->reader_life.word : &c->writer_life.word;
    e->shared.my_wait = e->writer ? &c->space_wait.word : &c->data_wait.word;
    e->shared.their_wait = e->writer ? &c->data_wait.word : &c->space_wait.word;
    e->shared.mine = e->writer ? &c->head : &c->tail;
    if (!end_is_unsynchronized_reader(e)) return;
    e->shared.mine = NULL;       /* any number of readers, each with a position of its own */
    e->shared.their_wait = NULL; /* the writer never waits */
    /* Nor can we, for want of a word that we may write. */
    if (role == FMQ_OBSERVER) e->shared.my_wait = NULL;
}

/* A restarted owner goes on where the dead one stopped: its lock is ours, so its last publish is
 * visible. */
static int take_over(fmq_end *e) {
    if (end_has_seat(e)) return reader_join(e), 0;
    e->cursor.seen = atomic_load(&e->shared.theirs->counter);
    ring_move_to(e, e->shared.mine ? atomic_load(&e->shared.mine->counter) : e->cursor.seen);
    if (e->readers.seats)
        e->cursor.seen = e->cursor.position - e->ring.capacity; /* no room before the first look */
    if (e->writer && (e->overwrites || e->readers.seats)) {
        e->cursor.begun = atomic_load(&e->shared.mine->begin);
        if (e->cursor.begun < e->cursor.position) e->cursor.begun = e->cursor.position;
        return e->cursor.begun - e->cursor.position > e->ring.capacity ? -EPROTO : 0;
    }
    return ring_known(e) > e->ring.capacity ? -EPROTO : 0; /* more than full, or less than empty */
}

int fmq_open(void *control, void *ring, const fmq_shape *expected, int role, fmq_end **out) {
    fmq_shape found;
    int r = fmq_shape_of(control, &found);
    if (r) return r;
    if (memcmp(&found, expected, sizeof found)) return -EPROTO;
    fmq_end *e = aligned_alloc(alignof(fmq_end), sizeof *e);
    if (!e) return -ENOMEM;
    memset(e, 0, sizeof *e);
    e->overwrites = found.flavour == FMQ_UNSYNCHRONIZED;
    point_at(e, control, role);
    if (found.flavour == FMQ_BROADCAST) r = readers_attach(e, control, role);
    if (r) return free(e), r;
    e->ring.base = ring;
    e->ring.capacity = found.capacity;
    e->ring.element_bytes = found.element_bytes;
    e->process = fmq_this_process();
    e->generation = e->process->generation;
    if ((r = take_over(e))) return fmq_free(e), r;
    sleep_greet_peer(e);
    *out = e;
    return 0;
}

void fmq_free(fmq_end *e) {
    if (e) free(e->readers.records);
    free(e);
}

int fmq_life_state(const void *word) {
    uint32_t life = atomic_load((_Atomic uint32_t *)(uintptr_t)word);
    if (life_is_dead(life)) return FMQ_DEAD;
    if (life == LIFE_NOBODY) return FMQ_NOBODY;
    return life == LIFE_RELEASED ? FMQ_RELEASED : FMQ_ALIVE;
}

int fmq_peer(const fmq_end *e) {
    uint32_t ended = atomic_load(&e->signals.ended), life = atomic_load(e->shared.their_life);
    if (e->readers.records) return readers_any(e) ? FMQ_ALIVE : FMQ_NOBODY;
    if (life != LIFE_RELEASED && end_is_lost(e, life, ended)) return FMQ_DEAD;
    return fmq_life_state(e->shared.their_life);
}

void fmq_follow(fmq_end *e, void *word) { e->shared.their_life = word; }

int64_t fmq_position(fmq_end *e) {
    if (e->shared.mine) return (int64_t)(atomic_load(&e->shared.mine->counter) & INT64_MAX);
    int r = end_enter(e);
    if (r) return r;
    uint64_t position = e->cursor.position;
    end_leave(e);
    return (int64_t)(position & INT64_MAX);
}

/* An onlooker copies elements and then looks how far they may have been overwritten meanwhile
 * (README.md). */
uint64_t fmq_glance(const void *counter) {
    /* The copying happened before this look.  pairs: BEGIN */
    atomic_thread_fence(memory_order_acquire);
    /* And what follows, after it.  pairs: VISIBLE */
    return atomic_load((_Atomic uint64_t *)(uintptr_t)counter);
}

int fmq_notify(fmq_end *e, void *flag, uint32_t mask) {
    int r = end_enter(e);
    if (r) return r;
    e->flag.notify = flag;
    e->flag.mask = mask;
    end_leave(e);
    return 0;
}

/* ---- transfers ------------------------------------------------------------------------------- */

int64_t fmq_available(fmq_end *e) {
    int r = end_enter(e);
    if (r) return r;
    /* An overrun is told by the next transfer. */
    r = end_is_unsynchronized_reader(e) ? ring_look_ahead(e) : ring_look(e);
    int64_t n = r ? r : (int64_t)(ring_known(e) & INT64_MAX);
    end_leave(e);
    return n;
}

/* An overrun is told once. */
static int told(fmq_end *e, int r) {
    if (r == -EOVERFLOW) e->cursor.overran = false;
    end_leave(e);
    return r;
}

int fmq_reserve(fmq_end *e, uint64_t n, fmq_spans *spans, uint64_t spin_ns, uint64_t deadline) {
    int r = end_enter_unreserved(e);
    if (r) return r;
    r = sleep_until(e, n, spin_ns, deadline);
    if (!r) {
        uint64_t straight = e->ring.capacity - e->cursor.slot;
        spans->start = e->cursor.slot;
        spans->first = n < straight ? n : straight;
        spans->second = n - spans->first;
        e->cursor.reserved = n;
        if (e->writer) ring_begin(e, n);
    }
    return told(e, r);
}

/* Whether the writer may have overwritten what was just read. */
static int still_ours(fmq_end *e) {
    if (!end_is_one_of_many(e)) return 0;
    if (e->overwrites) return ring_still_whole(e);
    /* The reads happened before this look.  pairs: OUT */
    atomic_thread_fence(memory_order_acquire);
    return reader_verdict(e);
}

int fmq_commit(fmq_end *e, uint64_t n) {
    int r = end_enter(e);
    if (r) return r;
    if (n > e->cursor.reserved) r = -EINVAL;
    e->cursor.reserved = 0;
    if (!r && n) r = still_ours(e);
    if (!r && n) ring_publish(e, n), sleep_wake_peer(e);
    return told(e, r);
}

/* n are at hand, and n may be 0. */
static void put(fmq_end *e, const void *elements, uint64_t n) {
    if (!n) return;
    ring_begin(e, n);
    ring_copy_in(e, elements, n);
    ring_publish(e, n);
    sleep_wake_peer(e);
}

static int get(fmq_end *e, void *elements, uint64_t n) {
    if (!n) return 0;
    ring_copy_out(e, elements, n);
    int r = still_ours(e);
    if (r) return r;
    ring_publish(e, n);
    sleep_wake_peer(e);
    return 0;
}

int fmq_write(fmq_end *e, const void *elements, uint64_t n, uint64_t spin_ns, uint64_t deadline) {
    int r = end_enter_unreserved(e);
    if (r) return r;
    r = sleep_until(e, n, spin_ns, deadline);
    if (!r) put(e, elements, n);
    end_leave(e);
    return r;
}

int fmq_read(fmq_end *e, void *elements, uint64_t n, uint64_t spin_ns, uint64_t deadline) {
    int r = end_enter_unreserved(e);
    if (r) return r;
    r = sleep_until(e, n, spin_ns, deadline);
    if (!r) r = get(e, elements, n);
    return told(e, r);
}

/* ---- readers of an unsynchronized queue ------------------------------------------------------ */

int fmq_keep_latest(fmq_end *e, uint64_t n) {
    if (!end_is_unsynchronized_reader(e)) return -EINVAL;
    int r = end_enter_unreserved(e);
    if (r) return r;
    if ((r = ring_look_ahead(e))) return end_leave(e), r;
    uint64_t head = e->cursor.seen, begin = atomic_load(&e->shared.theirs->begin);
    uint64_t oldest = begin > e->ring.capacity ? begin - e->ring.capacity : 0,
             from = n < head ? head - n : 0;
    if (from < oldest) from = oldest; /* the writer has begun to overwrite what is before */
    e->cursor.overran = false;
    ring_move_to(e, from < head ? from : head);
    end_leave(e);
    return 0;
}

uint64_t fmq_lost(const fmq_end *e) { return e->cursor.lost; }

/* ---- exchange -------------------------------------------------------------------------------- */

/* Everything that has arrived is one message: its writer published it at once, and has no leave to
 * send another. */
static int64_t take_message(fmq_end *e, void *buffer, uint64_t buffer_bytes) {
    uint64_t n = ring_known(e), bytes = n * e->ring.element_bytes;
    if (bytes > buffer_bytes) return -EMSGSIZE;
    get(e, buffer, n);
    return (int64_t)bytes;
}

static int send_packet(fmq_end *e, const void *packet, uint64_t bytes) {
    uint64_t n = bytes / e->ring.element_bytes;
    if (n * e->ring.element_bytes != bytes) return -EINVAL;
    int r = end_enter_unreserved(e);
    if (r) return r;
    if (!(r = ring_need(e, n))) put(e, packet, n);
    end_leave(e);
    return r;
}

static inline int64_t exchange(const fmq_channel *c, const void *packet, uint64_t bytes,
                               int (*wait)(const fmq_channel *, uint64_t), uint64_t deadline) {
    /* Every message has to arrive. */
    if (c->in->overwrites || c->out->overwrites || c->in->readers.seats || c->out->readers.seats)
        return -EINVAL;
    int64_t r = end_enter_unreserved(c->in);
    if (r) return r;
    if (bytes) r = send_packet(c->out, packet, bytes);
    if (!r && (r = wait(c, deadline)) == -EAGAIN) r = -ETIMEDOUT; /* the packet is out */
    if (!r) r = take_message(c->in, c->buffer, c->buffer_bytes);
    end_leave(c->in);
    return r;
}

static int spin_and_sleep(const fmq_channel *c, uint64_t deadline) {
    return sleep_until(c->in, 1, c->spin_ns, deadline);
}
static int spin_only(const fmq_channel *c, uint64_t until) {
    (void)until;
    return sleep_spin(c->in, 1, c->start_ns);
}

int64_t fmq_exchange(const fmq_channel *c, const void *packet, uint64_t bytes, uint64_t deadline) {
    return exchange(c, packet, bytes, spin_and_sleep, deadline);
}

static int64_t exchange_start(const fmq_channel *c, const void *packet, uint64_t bytes) {
    return exchange(c, packet, bytes, spin_only, 0);
}

/* ---- for fmq._hot ---------------------------------------------------------------------------- */

static int hot_write(fmq_end *e, void *elements, uint64_t n, uint64_t spin_ns, uint64_t deadline) {
    return fmq_write(e, elements, n, spin_ns, deadline);
}

static int hot_reserve(fmq_end *e, void *spans, uint64_t n, uint64_t spin_ns, uint64_t deadline) {
    return fmq_reserve(e, n, spans, spin_ns, deadline);
}

const fmq_calls *fmq_hot_calls(void) {
    static const fmq_calls calls = {hot_write,    fmq_read,       hot_reserve, fmq_commit,
                                    fmq_exchange, exchange_start, fmq_now};
    return &calls;
}
