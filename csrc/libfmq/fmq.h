/* libfmq: a message queue in shared memory, from C. Any process may be at its other end, also one
 * in Python (`import fmq`).
 *
 * A *queue* is memory that holds elements of one type. A process takes a *role* in it, the writer's
 * or a reader's, and has an *end* as long as it keeps that role. Transfers are all or nothing, and
 * happen in shared memory: the kernel is asked only for sleeping.
 *
 * Results. 0 and above: done. Below 0: -errno, and fmq_queue_why() says more. Everywhere:
 *   -EINVAL      an argument that cannot be: NULL, a handle of another kind, a number out of range
 *   -EBADF       a handle that was closed. Handles are never used again, so this is told at any
 *                time, and memory is never touched
 *   -ECANCELED   the handle was made before a fork, and is the parent's; or it was closed while
 *                this call waited
 *   -EBUSY       another thread is inside a call on this end, or a reservation is open; the end
 *                goes on
 *   -EAGAIN      without a deadline to wait for: not enough elements, or not enough room, now;
 *                nothing was transferred
 *   -ETIMEDOUT   the deadline passed first; nothing was transferred
 *   -EMSGSIZE    more elements than the queue's capacity; nothing was transferred
 *   -EPIPE       the other side died, and what it left does not suffice. Another process may take
 *                its role, and the end goes on
 *   -ESHUTDOWN   the other side left in good order, and what it left does not suffice; likewise
 *   -EOVERFLOW   the writer of an unsynchronized queue overtook this reader: nothing was returned,
 *                and the next read goes on behind
 *   -ESTALE      the writer of a broadcast queue evicted this reader; close the end
 *   -EPROTO      what lies in the memory cannot be: it is of another type, or the peer broke the
 *                protocol; close the end
 *   -ENOSPC, -ENOMEM, -EMFILE …   as the kernel says
 *
 * Threads. Any thread may use any handle; one at a time is inside a call on an end, and another one
 * gets -EBUSY. A signal never ends a call. The first role that a process takes starts a thread,
 * which tells the others when the process dies; it takes no signals.
 *
 * Handles are no pointers to memory. They may be closed in any order; what they stand for lives as
 * long as others need it. After a fork the roles stay the parent's. "Does not block" is: neither
 * for the peer nor for the kernel's disks.
 */
#ifndef FMQ_H
#define FMQ_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FMQ_FOREVER UINT64_MAX

enum fmq_queue_flavour {
    FMQ_QUEUE_SYNCHRONIZED = 1, /* one writer, one reader; nothing is ever lost */
    /* One writer that never waits, any number of readers, which may be overtaken. */
    FMQ_QUEUE_UNSYNCHRONIZED = 2,
    /* One writer, up to 64 readers, each of which gets all; the writer waits for the slowest. */
    FMQ_QUEUE_BROADCAST = 3
};
enum fmq_queue_peer { FMQ_PEER_NONE = 0, FMQ_PEER_ALIVE = 1, FMQ_PEER_LEFT = 2, FMQ_PEER_DEAD = 3 };

typedef struct fmq_queue fmq_queue;         /* memory with a queue in it */
typedef struct fmq_queue_end fmq_queue_end; /* a role in a queue */

/* Why this thread's last call failed, in words; "" before the first failure. Valid until this
 * thread's next failure. Wait-free. */
const char *fmq_queue_why(void);
/* Now, as deadlines are: CLOCK_MONOTONIC nanoseconds. A deadline is absolute; FMQ_FOREVER is none;
 * 0 does not wait. Wait-free. */
uint64_t fmq_now(void);

/* ---- queues: any thread, at any time --------------------------------------------------------- */

/* A new, empty queue. `name` ("/like-this"): other programs of this user can open it until
 * fmq_queue_unlink, also when all have died; NULL: it is reached by its descriptor alone. `dtype`
 * is numpy's name of the elements' type ("<f4", "|u1", "|V24"); NULL: any bytes, which Python sees
 * as "|V<element_bytes>". Reserves the memory at once. Does not block. -EEXIST: the name is
 * taken. */
int fmq_queue_create(const char *name, const char *dtype, uint32_t element_bytes, uint64_t capacity,
                     int flavour, fmq_queue **queue);
/* Opens a queue by its name. `dtype`: what its elements have to be; NULL: of any type. Does not
 * block. -ENOENT: there is none. -EACCES: it is another user's. This memory is not sealed: a
 * program that truncates it ends yours by SIGBUS, so open only what you trust. */
int fmq_queue_open(const char *name, const char *dtype, fmq_queue **queue);
/* The same by a descriptor that another process sent, of sealed memory (F_SEAL_SHRINK); yours stays
 * yours. -EACCES: not sealed. */
int fmq_queue_open_fd(int fd, const char *dtype, fmq_queue **queue);
/* A new descriptor of its memory, to be sent to another process; close it afterwards. The memory of
 * a queue with a name is not sealed: send the name. Does not block. */
int fmq_queue_fd(fmq_queue *queue);
typedef struct {
    uint64_t capacity; /* in elements */
    uint32_t element_bytes;
    int32_t flavour;
} fmq_queue_shape;
/* What it is. Does not block. */
int fmq_queue_get_shape(fmq_queue *queue, fmq_queue_shape *shape);
/* Removes a name. A process that has the queue open goes on with it. Does not block. -ENOENT: there
 * is none. */
int fmq_queue_unlink(const char *name);
/* Ends of it go on. Does not block. */
int fmq_queue_close(fmq_queue *queue);

/* ---- roles ----------------------------------------------------------------------------------- */

/* Takes the writer's role, until fmq_queue_leave or death; goes on where an earlier writer ended.
 * Any thread. Does not block. -EADDRINUSE: another end, of this process or another one, has the
 * role; the queue stays usable. */
int fmq_queue_writer(fmq_queue *queue, fmq_queue_end **end);
/* The same for a reader. An unsynchronized queue takes any number, a broadcast queue 64; each
 * begins with the next element. */
int fmq_queue_reader(fmq_queue *queue, fmq_queue_end **end);
/* Gives the role up and tells the other side. A call that another thread is inside ends with
 * -ECANCELED, which this one waits for; what was reserved is not committed, and its memory no
 * longer yours. Any thread. */
int fmq_queue_leave(fmq_queue_end *end);

/* ---- transfers: one thread at a time on an end ----------------------------------------------- */

/* Writes, or reads, n elements or none. Polls for the end's spin, then sleeps until there is room,
 * or the elements, or until the deadline; deadline 0 does not block. */
int fmq_queue_write(fmq_queue_end *end, const void *elements, uint64_t n, uint64_t deadline);
int fmq_queue_read(fmq_queue_end *end, void *elements, uint64_t n, uint64_t deadline);
typedef struct {
    /* In the ring: up to where it wraps, and from its beginning; a reader must not write there. */
    void *first, *second;
    uint64_t n_first, n_second; /* elements */
} fmq_queue_spans;
/* Room for n elements, or n elements, where they lie, until fmq_queue_commit. Blocks as
 * fmq_queue_write does. */
int fmq_queue_reserve(fmq_queue_end *end, uint64_t n, fmq_queue_spans *spans, uint64_t deadline);
/* Publishes, or takes, the first n of what was reserved; 0: none. Ends the reservation. Does not
 * block. */
int fmq_queue_commit(fmq_queue_end *end, uint64_t n);
/* Elements that can be read, or places that can be written, without waiting. More than the
 * capacity: this reader was overtaken. Does not block. */
int64_t fmq_queue_available(fmq_queue_end *end);
/* A reader of an unsynchronized queue skips to the n newest elements. Does not block. -EINVAL: of
 * another queue. */
int fmq_queue_keep_latest(fmq_queue_end *end, uint64_t n);
/* How many elements the last -EOVERFLOW has cost. Does not block. */
int64_t fmq_queue_lost(fmq_queue_end *end);
/* How long waits poll before they sleep, in ns; 50 us before it was called, 10 s at most. Does not
 * block. */
int fmq_queue_spin(fmq_queue_end *end, uint64_t ns);

/* ---- messages of any length: one thread at a time on an end ---------------------------------- */

/* Records, on a synchronized or broadcast queue of bytes (NULL and 1, or "|u1", of 64 bytes at
 * least), one at a time; Python's RecordWriter and RecordReader may be at the other end. Sends one.
 * What does not fit in half of the queue goes in parts. Blocks as fmq_queue_write does, for each
 * part. After an error none of it is delivered, and the end goes on. -EINVAL: of another queue. */
int fmq_queue_send(fmq_queue_end *end, const void *bytes, uint64_t n, uint64_t deadline);
/* Receives the next one: returns its bytes. Blocks as fmq_queue_read does. -EMSGSIZE: it is longer
 * than `room`, and was skipped. After -ETIMEDOUT, -EAGAIN and -EBUSY a part of it may be in
 * `bytes`: call again with the same `bytes` and `room`, else -EINVAL. A record whose writer died or
 * gave up is passed over. -EPROTO: what was written is no record. */
int64_t fmq_queue_receive(fmq_queue_end *end, void *bytes, uint64_t room, uint64_t deadline);

/* ---- any thread ------------------------------------------------------------------------------ */

/* Elements that this end, and earlier ones in its role, have transferred. Of a reader of an
 * unsynchronized queue: -EBUSY as a transfer. Does not block. */
int64_t fmq_queue_position(fmq_queue_end *end);
typedef struct {
    uint64_t position, unread; /* elements */
    uint32_t seat, turn;       /* which reader it is: turn counts those that have had that seat */
    uint32_t pid;              /* as the reader says */
    uint32_t is_alive;
} fmq_queue_listener;
/* The readers of a broadcast queue, asked by its writer: returns how many there are, and writes at
 * most `room`, 64 at most. -EINVAL: another end. Does not block. */
int fmq_queue_get_readers(fmq_queue_end *writer, fmq_queue_listener *readers, unsigned room);
/* Goes on without one that holds the writer up, from the writer's next look on; that reader's next
 * call is -ESTALE. One that has left meanwhile is no error. Does not block. */
int fmq_queue_evict(fmq_queue_end *writer, uint32_t seat, uint32_t turn);
/* For epoll and poll: returns a descriptor that becomes readable, once, when n elements (n places)
 * can be transferred without waiting, or the peer is gone; it may be readable already. Each call
 * makes it unreadable first, so call it again after each transfer that said -EAGAIN. It is the
 * end's: the same each time, and closed by fmq_queue_leave. The first call in a process starts a
 * thread. Does not block; -EBUSY as a transfer. Takes no event away from threads that sleep in
 * calls. */
int fmq_queue_pollable(fmq_queue_end *end, uint64_t n);
/* The other side, as the kernel knows it: an fmq_queue_peer. Does not block. */
int fmq_queue_get_peer(fmq_queue_end *end);
/* Sleeps until at least one of n ends (1 to 64) can transfer an element, or its peer is gone;
 * ready[i] is then 1, else 0. Returns how many are ready. No other thread may be inside a call on
 * any of them meanwhile. */
int fmq_queue_wait_any(fmq_queue_end *const *ends, unsigned n, uint8_t *ready, uint64_t deadline);

#ifdef __cplusplus
}
#endif
#endif
