/* Roles, and transfers on them: as `fmq/role.py` and `fmq/end.py` do. A role is a lock on one byte
 * of the queue's memory, which the kernel drops with the process, and a word that the kernel marks
 * when the process dies. */
#define _GNU_SOURCE
#include "libfmq/queues.h"

#include "libfmq/fmq.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum {
    WRITER_LIFE_AT = 768,
    READER_LIFE_AT = 896,
    SEATS = 64,
    SEATS_AT = 4096,
    SEAT_BYTES = 128,
    LIFE_IN_SEAT = 24
};
enum { MOST_WAITED_FOR = 64 };
static const uint64_t USUAL_SPIN = 50000, MOST_SPIN = UINT64_C(10000000000);

/* A child of a fork inherits the open files, and with them the locks, so it closes its copies: the
 * roles are the parent's. A fork waits until no thread is between opening a file and noting it
 * here. */
static struct {
    pthread_mutex_t lock;
    pthread_once_t once;
    queue_role *first;
} roles = {.lock = PTHREAD_MUTEX_INITIALIZER, .once = PTHREAD_ONCE_INIT};

static void before_fork(void) { pthread_mutex_lock(&roles.lock); }
static void in_parent(void) { pthread_mutex_unlock(&roles.lock); }
static void in_child(void) {
    for (queue_role *r = roles.first; r; r = r->next) {
        close(r->lock), r->lock = -1;
        if (r->bell >= 0) close(r->bell), r->bell = -1;
    }
    roles.first = NULL;
    pthread_mutex_unlock(&roles.lock);
}
static void look_after_forks(void) { pthread_atfork(before_fork, in_parent, in_child); }

/* ---- taking a role --------------------------------------------------------------------------- */

static int set_lock(int file, int byte, short kind) {
    struct flock one = {.l_type = kind, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    return fcntl(file, F_OFD_SETLK, &one);
}

static bool is_listener(const queue_role *e, int role) {
    return role == FMQ_READER && e->memory->shape.flavour == FMQ_UNSYNCHRONIZED;
}

static int life_at(int role) {
    if (role >= FMQ_SEAT) return SEATS_AT + SEAT_BYTES * (role - FMQ_SEAT) + LIFE_IN_SEAT;
    return role == FMQ_WRITER ? WRITER_LIFE_AT : READER_LIFE_AT;
}

/* Locks the byte of the role, or of the first free seat, which is the role then. */
static int lock_role(queue_role *e, int *role) {
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", e->memory->file);
    /* Another open file: the process that gets the descriptor must not share it. */
    e->lock = open(path, O_RDWR | O_CLOEXEC);
    if (e->lock < 0) return fail_kernel("opening a queue again");
    bool has_seats = *role == FMQ_READER && e->memory->shape.flavour == FMQ_BROADCAST;
    int first = has_seats ? FMQ_SEAT : *role, count = has_seats ? SEATS : 1;
    short kind = is_listener(e, *role) ? F_RDLCK : F_WRLCK;
    for (int byte = first; byte < first + count; byte++) {
        if (!set_lock(e->lock, byte, kind)) return e->byte = *role = byte, 0;
        if (errno != EAGAIN && errno != EACCES) return fail_kernel("taking a queue's role");
    }
    return fail(-EADDRINUSE, "this queue has %s already, and %s",
                has_seats ? "64 readers"
                : *role   ? "a reader"
                          : "a writer",
                has_seats ? "all are alive" : "that is alive");
}

static int hold_role(queue_role *e, int *role) {
    pthread_once(&roles.once, look_after_forks);
    pthread_mutex_lock(&roles.lock);
    int r = lock_role(e, role);
    if (r && e->lock >= 0) close(e->lock), e->lock = -1;
    if (!r) e->next = roles.first, roles.first = e;
    pthread_mutex_unlock(&roles.lock);
    return r;
}

static void release_role(queue_role *e) {
    pthread_mutex_lock(&roles.lock);
    for (queue_role **at = &roles.first; *at; at = &(*at)->next)
        if (*at == e) {
            *at = e->next;
            break;
        }
    /* Unlocked: a child that is being forked has a copy. */
    if (e->lock >= 0) set_lock(e->lock, e->byte, F_UNLCK), close(e->lock);
    pthread_mutex_unlock(&roles.lock);
}

static void destroy(object *o) {
    queue_role *e = (queue_role *)o;
    /* As below; and it would write to a descriptor that is closed. */
    if (e->token >= 0) fmq_unhang(e->token);
    if (e->bell >= 0) close(e->bell);
    pthread_mutex_destroy(&e->lock_of_bell);
    /* Before fmq_free: the life thread would tell an end that is gone. */
    if (e->link >= 0) fmq_unlink(e->link);
    if (e->life >= 0) fmq_life_release(e->life);
    release_role(e);
    fmq_free(e->end);
    object_put(e->memory);
    free(e);
}

/* The second way to learn of the peer's death (csrc/fmq/link.c); where the system has no inotify
 * left, there is the first alone. */
static void watch_peer(queue_role *e, int role) {
    bool broadcasts = e->memory->shape.flavour == FMQ_BROADCAST;
    /* It does not know its readers. */
    if (role == FMQ_WRITER && e->memory->shape.flavour == FMQ_UNSYNCHRONIZED) return;
    e->link = fmq_link_lock(e->end, e->lock,
                            role != FMQ_WRITER ? FMQ_WRITER
                            : broadcasts       ? FMQ_SEAT
                                               : FMQ_READER);
}

static int take_role(queue_role *e, int role) {
    bool listens = is_listener(e, role);
    queue_memory *q = e->memory;
    int r = hold_role(e, &role);
    if (r) return r;
    if (role >= FMQ_SEAT && (r = fmq_clear_seat(q->control, role)))
        return fail(r, "the seat cannot be taken: %s", strerror(-r));
    if (!listens && (e->life = fmq_life_hold(e->lock, (uint64_t)life_at(role), 0)) < 0)
        return fail(e->life, "this process's life cannot be announced: %s", strerror(-e->life));
    if ((r = fmq_open(q->control, q->ring, &q->shape, role, &e->end)))
        return fail(r == -ENOMEM ? r : -EPROTO, "opening a queue: %s",
                    r == -ENOMEM ? strerror(-r) : "the memory holds no such queue any more");
    watch_peer(e, role);
    return 0;
}

static int new_end(fmq_queue *queue, int role, fmq_queue_end **out) {
    int r;
    if (!out) return fail(-EINVAL, "end=NULL: give a place for the handle");
    queue_memory *q = handle_take(queue, QUEUE, &r);
    if (!q) return r;
    queue_role *e = calloc(1, sizeof *e);
    if (!e) return object_put(q), fail(-ENOMEM, "no memory for an end");
    *e = (queue_role){.memory = q,
                      .lock = -1,
                      .life = -1,
                      .link = -1,
                      .bell = -1,
                      .token = -1,
                      .spin = USUAL_SPIN};
    pthread_mutex_init(&e->lock_of_bell, NULL);
    r = take_role(e, role);
    if (!r) r = handle_new(&e->head, END, destroy, out);
    return r ? destroy(&e->head), r : 0;
}

int fmq_queue_writer(fmq_queue *queue, fmq_queue_end **end) {
    return new_end(queue, FMQ_WRITER, end);
}
int fmq_queue_reader(fmq_queue *queue, fmq_queue_end **end) {
    return new_end(queue, FMQ_READER, end);
}

int fmq_queue_leave(fmq_queue_end *end) {
    void *closed;
    int r = handle_close(end, END, &closed);
    if (r) return r;
    queue_role *e = closed;
    fmq_stop(e->end);
    return object_put(e), 0;
}

/* ---- transfers ------------------------------------------------------------------------------- */

static const char *reason(int64_t code) {
    switch (code) {
    case -EPIPE: return "the other side died";
    case -ESHUTDOWN: return "the other side left";
    case -EBUSY: return "another thread is inside a call on this end, or a reservation is open";
    case -EOVERFLOW: return "the writer overtook this reader";
    case -ESTALE: return "the writer evicted this reader";
    case -EPROTO: return "the other side broke the protocol";
    case -EMSGSIZE: return "more elements than the queue's capacity";
    case -ECANCELED: return "this end was closed meanwhile";
    case -EAGAIN: return "not so many elements, or not so much room, now";
    default: return strerror((int)-code);
    }
}

int64_t end_with(queue_role *e, int64_t r) {
    object_put(e);
    return r < 0 ? fail((int)r, "%s", reason(r)) : r;
}

int fmq_queue_write(fmq_queue_end *end, const void *elements, uint64_t n, uint64_t deadline) {
    int r;
    if (!elements && n)
        return fail(-EINVAL, "elements=NULL, n=%llu: give the elements", (unsigned long long)n);
    queue_role *e = handle_take(end, END, &r);
    if (!e) return r;
    if (e->byte != FMQ_WRITER) return object_put(e), fail(-EINVAL, "this is a reader's end");
    do r = fmq_write(e->end, elements, n, e->spin, deadline);
    while (r == -EINTR);
    return (int)end_with(e, r);
}

int fmq_queue_read(fmq_queue_end *end, void *elements, uint64_t n, uint64_t deadline) {
    int r;
    if (!elements && n)
        return fail(-EINVAL, "elements=NULL, n=%llu: give a place for them", (unsigned long long)n);
    queue_role *e = handle_take(end, END, &r);
    if (!e) return r;
    if (e->byte == FMQ_WRITER) return object_put(e), fail(-EINVAL, "this is a writer's end");
    do r = fmq_read(e->end, elements, n, e->spin, deadline);
    while (r == -EINTR);
    return (int)end_with(e, r);
}

int fmq_queue_reserve(fmq_queue_end *end, uint64_t n, fmq_queue_spans *spans, uint64_t deadline) {
    int r;
    fmq_spans found;
    if (!spans) return fail(-EINVAL, "spans=NULL: give a place for them");
    queue_role *e = handle_take(end, END, &r);
    if (!e) return r;
    do r = fmq_reserve(e->end, n, &found, e->spin, deadline);
    while (r == -EINTR);
    char *ring = e->memory->ring;
    if (!r)
        *spans = (fmq_queue_spans){ring + found.start * e->memory->shape.element_bytes, ring,
                                   found.first, found.second};
    return (int)end_with(e, r);
}

int fmq_queue_commit(fmq_queue_end *end, uint64_t n) {
    int r;
    queue_role *e = handle_take(end, END, &r);
    return e ? (int)end_with(e, fmq_commit(e->end, n)) : r;
}

int64_t fmq_queue_available(fmq_queue_end *end) {
    int r;
    queue_role *e = handle_take(end, END, &r);
    return e ? end_with(e, fmq_available(e->end)) : r;
}

int fmq_queue_keep_latest(fmq_queue_end *end, uint64_t n) {
    int r;
    queue_role *e = handle_take(end, END, &r);
    return e ? (int)end_with(e, fmq_keep_latest(e->end, n)) : r;
}

int64_t fmq_queue_lost(fmq_queue_end *end) {
    int r;
    queue_role *e = handle_take(end, END, &r);
    /* The writer may lie: never an error. */
    return e ? end_with(e, (int64_t)(fmq_lost(e->end) & INT64_MAX)) : r;
}

int fmq_queue_spin(fmq_queue_end *end, uint64_t ns) {
    int r;
    if (ns > MOST_SPIN) return fail(-EINVAL, "ns=%llu: 10 s at most", (unsigned long long)ns);
    queue_role *e = handle_take(end, END, &r);
    if (!e) return r;
    e->spin = ns;
    return object_put(e), 0;
}

/* ---- any thread ------------------------------------------------------------------------------ */

int fmq_queue_get_peer(fmq_queue_end *end) {
    int r;
    queue_role *e = handle_take(end, END, &r);
    return e ? (int)end_with(e, fmq_peer(e->end)) : r;
}

int64_t fmq_queue_position(fmq_queue_end *end) {
    int r;
    queue_role *e = handle_take(end, END, &r);
    return e ? end_with(e, fmq_position(e->end)) : r;
}

int fmq_queue_get_readers(fmq_queue_end *writer, fmq_queue_listener *readers, unsigned room) {
    int r;
    fmq_reader found[SEATS];
    if (!readers && room)
        return fail(-EINVAL, "readers=NULL, room=%u: give a place for them", room);
    queue_role *e = handle_take(writer, END, &r);
    if (!e) return r;
    r = fmq_readers(e->end, found);
    for (int i = 0; i < r && (unsigned)i < room; i++) {
        const fmq_reader *f = &found[i];
        readers[i] =
            (fmq_queue_listener){f->position, f->unread, f->seat, f->turn, f->pid, f->is_alive};
    }
    return (int)end_with(e, r);
}

int fmq_queue_evict(fmq_queue_end *writer, uint32_t seat, uint32_t turn) {
    int r;
    queue_role *e = handle_take(writer, END, &r);
    return e ? (int)end_with(e, fmq_evict(e->end, seat, turn)) : r;
}

int fmq_queue_pollable(fmq_queue_end *end, uint64_t n) {
    int r;
    queue_role *e = handle_take(end, END, &r);
    if (!e) return r;
    pthread_mutex_lock(&e->lock_of_bell);
    if (e->bell < 0 && (e->bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) < 0) r = -errno;
    int64_t token = e->bell < 0 ? r : fmq_bridge(e->end, n, e->bell, e->token);
    if (token >= 0 || token == -EALREADY) e->token = token, r = e->bell;
    else r = (int)token;
    pthread_mutex_unlock(&e->lock_of_bell);
    return (int)end_with(e, r);
}

int fmq_queue_wait_any(fmq_queue_end *const *ends, unsigned n, uint8_t *ready, uint64_t deadline) {
    queue_role *held[MOST_WAITED_FOR];
    fmq_end *cores[MOST_WAITED_FOR];
    int r = 0;
    unsigned taken = 0;
    if (!ends || !ready || !n || n > MOST_WAITED_FOR)
        return fail(-EINVAL, "ends, n=%u, ready: 1 to 64 ends, and a place for each", n);
    for (; taken < n; taken++) {
        if (!(held[taken] = handle_take(ends[taken], END, &r))) break;
        cores[taken] = held[taken]->end;
    }
    if (taken == n) {
        do r = fmq_wait_any(cores, n, ready, deadline);
        while (r == -EINTR);
        if (r < 0) fail(r, "%s", reason(r));
    }
    while (taken) object_put(held[--taken]);
    return r;
}
