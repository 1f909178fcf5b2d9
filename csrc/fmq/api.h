/* Every declaration that fmq._core exports: compiled by C and parsed verbatim by cffi (so: no
 * guards, no includes, no macros).
 *
 * Results below 0 are -errno. What they mean here, everywhere:
 *   -EAGAIN     not enough elements, or not enough room, right now
 *   -ETIMEDOUT  the absolute CLOCK_MONOTONIC deadline passed first; nothing was transferred
 *   -EINTR      let Python run its signal handlers, then call again; nothing was transferred
 *   -EPIPE      the peer died, and what it left does not suffice
 *   -ESHUTDOWN  the peer released its role, and what it left does not suffice
 *   -EPROTO     the peer broke the protocol (README.md, "Hostile peers"); the end is of no more use
 *   -EBUSY      another thread is inside a call on this end, or a reservation is open
 *   -EOVERFLOW  the writer overtook this reader of an unsynchronized queue
 *   -ESTALE     the writer evicted this reader of a broadcast queue
 *   -EMSGSIZE   more elements than the queue's capacity, or than the caller's buffer
 *   -ECANCELED  fmq_stop was called on this end, or it was opened before a fork
 */

typedef struct fmq_end fmq_end; /* one process's private view of one role of one queue */

typedef struct {
    /* Elements; the dtype in words follows elsewhere in the control page. */
    uint64_t capacity, dtype_hash;
    uint32_t element_bytes, flavour;
} fmq_shape;

typedef struct {
    uint64_t start;         /* slot of the first element */
    uint64_t first, second; /* elements up to the wrap point, and the rest, from slot 0 */
} fmq_spans;

typedef struct {
    fmq_end *out, *in;
    void *buffer;
    uint64_t buffer_bytes;
    uint64_t spin_ns;
    uint64_t start_ns; /* how long exchange_start may take */
} fmq_channel;

enum { FMQ_SYNCHRONIZED = 1, FMQ_UNSYNCHRONIZED = 2, FMQ_BROADCAST = 3 };
/* Observer: reads an unsynchronized queue without write access. */
enum { FMQ_WRITER = 0, FMQ_READER = 1, FMQ_OBSERVER = 2 };
/* FMQ_SEAT + k, k < 64: the reader in seat k of a broadcast queue; 128 * k + 4120: its life
 * word. */
enum { FMQ_SEAT = 16 };
enum { FMQ_NOBODY = 0, FMQ_ALIVE = 1, FMQ_RELEASED = 2, FMQ_DEAD = 3 };

/* clock: nanoseconds of CLOCK_MONOTONIC */
uint64_t fmq_now(void);

/* thread: names the calling thread, for ps -L, top -H and gdb; the kernel keeps 15 bytes */
void fmq_name_thread(const char *name);

/* memory: what lies behind a descriptor. fmq_backing never waits for a file system. The others map
 * all of fd's first `bytes`, shared; -EOPNOTSUPP: huge pages */
enum {
    FMQ_OTHER = 0,
    FMQ_MEMORY = 1,
    FMQ_HUGE_PAGES = 2,
    FMQ_DMA_BUF = 3,
    FMQ_FILE = 4,
    FMQ_DISK = 5
};
int fmq_backing(int fd);
/* Returns the descriptor of new anonymous memory whose size is sealed. */
int fmq_memfd(uint64_t bytes);
int fmq_map(int fd, uint64_t bytes, int writable, void **base);
/* From `offset` on, a multiple of pages. */
int fmq_map_at(int fd, uint64_t bytes, uint64_t offset, int writable, void **base);
int fmq_unmap(void *base, uint64_t bytes);
/* Brings the pages of a mapping, as reading each would: it may wait for a disk. */
int fmq_populate(void *base, uint64_t bytes);
/* Waits until what was written to a mapping is in its file; base: as mapped. */
int fmq_flush(void *base, uint64_t bytes);
/* From now on, memory that a peer truncates reads as zeros instead of ending the process. */
int fmq_guard(void);

/* queue: a control page (4096 bytes; of a broadcast queue, three) and a ring, formatted once; then
 * each side opens its end. Wait-free except open. -EPROTO: the page is not of the shape that the
 * caller saw before. */
uint64_t fmq_ring_bytes(uint64_t capacity, uint32_t element_bytes); /* 0: impossible */
uint64_t fmq_control_bytes(uint32_t flavour);
int fmq_format(void *control, const fmq_shape *shape);
int fmq_shape_of(const void *control, fmq_shape *shape);
/* Locks that byte of the file for its role, for as long as this description of it is open, or
 * unlocks it. -EAGAIN: another description has the lock. */
int fmq_lock(int file, uint64_t byte);
void fmq_unlock(int file, uint64_t byte);
/* Holding the role's lock. */
int fmq_open(void *control, void *ring, const fmq_shape *expected, int role, fmq_end **end);
void fmq_free(fmq_end *end);
int fmq_peer(const fmq_end *end);
/* Elements that this end, and earlier holders of its role, have transferred. */
int64_t fmq_position(fmq_end *end);
/* For onlookers: reads a counter after everything that was read before this call. */
uint64_t fmq_glance(const void *counter);
/* Ends the call in progress, waits until it has returned, refuses all later calls; any thread. */
void fmq_stop(fmq_end *end);

/* transfers: all n elements or none. They poll for spin_ns, then sleep until the deadline (0: they
 * only try, 1: they only poll, -EAGAIN). One thread at a time on an end (else -EBUSY). An observer
 * cannot sleep (-EROFS). */
int64_t fmq_available(fmq_end *end);
int fmq_write(fmq_end *end, const void *elements, uint64_t n, uint64_t spin_ns, uint64_t deadline);
int fmq_read(fmq_end *end, void *elements, uint64_t n, uint64_t spin_ns, uint64_t deadline);
/* Room, or elements. */
int fmq_reserve(fmq_end *end, uint64_t n, fmq_spans *spans, uint64_t spin_ns, uint64_t deadline);
int fmq_commit(fmq_end *end, uint64_t n); /* at most what was reserved; ends the reservation */

/* readers of an unsynchronized queue. -EOVERFLOW from read, reserve or commit: the writer overtook
 * this reader, nothing was returned, and it goes on fmq_lost() elements later, at its new
 * fmq_position(). */
uint64_t fmq_lost(const fmq_end *end);
int fmq_keep_latest(fmq_end *end, uint64_t n); /* exactly the n newest elements are unread */

/* broadcast queues. A reader that takes a seat has its lock, calls fmq_clear_seat, holds its life
 * word, and calls fmq_open. The writer asks for its readers, at most 64, and may drop one that
 * holds it up: from its next call on, that reader gets -ESTALE. Both of these by any thread of the
 * writer. */
typedef struct {
    uint64_t position, unread;
    uint32_t seat, turn, pid; /* turn: how many have had that seat; pid: as the reader says */
    uint32_t is_alive;
} fmq_reader;
int fmq_clear_seat(void *control, int role);
int fmq_readers(fmq_end *end, fmq_reader *readers);
int fmq_evict(fmq_end *end, uint32_t seat, uint32_t turn);

/* records: messages of any length on a queue of bytes that loses none, in parts that are published
 * at once. fmq_part_peek waits for a part and reserves it; fmq_commit of `taken` takes it.
 * -EBADMSG: what is there is no part, and never will be. */
enum { FMQ_FIRST = 1, FMQ_LAST = 2 }; /* part of its record */
typedef struct {
    const void *one, *two;  /* in the ring, up to the wrap point and behind it */
    uint64_t first, second; /* bytes of each */
    uint64_t total;         /* bytes of the record, as its writer says */
    uint64_t taken;
    uint32_t flags;
} fmq_part;
int fmq_part_write(fmq_end *end, const void *bytes, uint64_t n, uint64_t total, uint32_t flags,
                   uint64_t spin_ns, uint64_t deadline);
int fmq_part_peek(fmq_end *end, fmq_part *part, uint64_t spin_ns, uint64_t deadline);

/* several queues: marks the ends on which a transfer of one element would not wait, and returns how
 * many those are */
int fmq_wait_any(fmq_end *const *ends, unsigned n, uint8_t *ready, uint64_t deadline);
/* Every transfer also wakes these bits of an event flag; NULL: none. */
int fmq_notify(fmq_end *end, void *flag, uint32_t mask);

/* one message each way: writes the packet (0 bytes: none) to `out`, then takes all that arrives on
 * `in`. Returns the bytes received; all counts here are bytes. -EINVAL: not whole elements, or a
 * queue that is not synchronized. -EAGAIN: the packet did not fit, nothing was sent. After -EINTR
 * or -ETIMEDOUT the packet is out: call again with none. */
int64_t fmq_exchange(const fmq_channel *channel, const void *packet, uint64_t bytes,
                     uint64_t deadline);

/* for fmq._hot, which has no symbols of this module: fmq_write, fmq_read and fmq_reserve (into
 * fmq_spans), alike, and more */
typedef int (*fmq_transfer)(fmq_end *end, void *elements, uint64_t n, uint64_t spin_ns,
                            uint64_t deadline);
typedef struct {
    fmq_transfer write, read, reserve;
    int (*commit)(fmq_end *end, uint64_t n);
    int64_t (*exchange)(const fmq_channel *channel, const void *packet, uint64_t bytes,
                        uint64_t deadline);
    /* Never sleeps; -ETIMEDOUT. */
    int64_t (*exchange_start)(const fmq_channel *channel, const void *packet, uint64_t bytes);
    uint64_t (*now)(void);
} fmq_calls;
const fmq_calls *fmq_hot_calls(void);

/* event flag: eight bytes of any shared memory, bits and sleepers. The wait also ends (-EPIPE,
 * -ESHUTDOWN) when the peer of the first of n ends is gone; n < 127. */
int fmq_event_wake(void *flag, uint32_t mask);
int fmq_event_wait(void *flag, uint32_t mask, fmq_end *const *peers, unsigned n, uint64_t deadline,
                   uint32_t *bits);

/* bridge: a thread of this process sleeps on a queue or a life word for the caller, and signals
 * once. Returns a token; a token that is no longer valid does nothing. */
/* Empties the (non-blocking) eventfd, and writes to it as soon as a transfer of n would not wait;
 * -EALREADY: it did at once. Arms the bell of token `again`, or replaces it. Call fmq_unhang before
 * fmq_free. */
int64_t fmq_bridge(fmq_end *end, uint64_t n, int eventfd, int64_t again);
/* Shuts the socket down when the process that holds `word` dies. */
int64_t fmq_watch(void *word, int socket);
void fmq_unhang(int64_t token);

/* life: the kernel marks held words when this process dies, whatever its size. `own`: in memory
 * that this process made, and that it seals at once. Returns a slot. */
int fmq_life_hold(int fd, uint64_t offset, int own);
void fmq_life_release(int slot);
/* Marks the word as the kernel would: another process, for which it stood, has died. */
void fmq_life_die(int slot);
int fmq_life_state(const void *word);
/* The peer's life word lies there, and not in the queue; before any other call. */
void fmq_follow(fmq_end *end, void *word);

/* the second way to learn of a death, for when the kernel could not mark the word: the life thread
 * watches a descriptor that the peer's process holds open at its other end, and calls fmq_lose when
 * that hangs up; or, of a queue's memory, asks for the lock on `byte` whenever a process has closed
 * the file. -1: no such. fmq_link keeps a duplicate of the socket. It is for an end whose peer has
 * no successor: a sleep on it is then on one word, and the bridge tells it of its peer's life
 * (README, "One word"). Call fmq_unlink before you close `socket` or `file` and before fmq_free. A
 * link that is no longer valid does nothing. */
int64_t fmq_link(fmq_end *end, int socket);
int64_t fmq_link_lock(fmq_end *end, int file, int64_t byte);
void fmq_unlink(int64_t link);
void fmq_lose(fmq_end *end); /* the peer is gone: calls finish what has arrived, and then -EPIPE */

/* process: what this process has once, for burst._core, which checks that both were built from the
 * same sources */
typedef struct fmq_process fmq_process;
fmq_process *fmq_this_process(void);
