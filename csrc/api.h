/* Every exported declaration: compiled by C and parsed verbatim by cffi (so: no guards, no includes, no macros).
 *
 * Results below 0 are -errno. What they mean here, everywhere:
 *   -EAGAIN     not enough elements, or not enough room, right now
 *   -ETIMEDOUT  the absolute CLOCK_MONOTONIC deadline passed first; nothing was transferred
 *   -EINTR      let Python run its signal handlers, then call again; nothing was transferred
 *   -EPIPE      the peer died, and what it left does not suffice
 *   -ESHUTDOWN  the peer released its role, and what it left does not suffice
 *   -EPROTO     the peer broke the protocol (README.md, "Hostile peers"); the end is of no more use
 *   -EBUSY      another thread is inside a call on this end, or a reservation is open
 *   -EMSGSIZE   more elements than the queue's capacity, or than the caller's buffer
 *   -ECANCELED  fmq_stop was called on this end, or it was opened before a fork
 */

typedef struct fmq_end fmq_end; /* one process's private view of one role of one queue */

typedef struct {
    uint64_t start;         /* slot of the first element; slot 0 is one page (4096 bytes) after the queue's base */
    uint64_t first, second; /* elements up to the wrap point, and the rest, from slot 0 */
} fmq_spans;

enum { FMQ_SYNCHRONIZED = 1 };
enum { FMQ_WRITER = 0, FMQ_READER = 1 };
enum { FMQ_NOBODY = 0, FMQ_ALIVE = 1, FMQ_RELEASED = 2, FMQ_DEAD = 3 };

/* clock: nanoseconds of CLOCK_MONOTONIC */
uint64_t fmq_now(void);

/* memory: maps all of fd's first `bytes`, shared */
int fmq_map(int fd, uint64_t bytes, int writable, void **base);
int fmq_unmap(void *base, uint64_t bytes);
int fmq_guard(void); /* from here on, pages that a peer truncates read as zeros instead of ending the process */

/* queue: format once, then each side opens its end. Wait-free except open. */
uint64_t fmq_bytes(uint64_t capacity, uint32_t element_bytes); /* 0: impossible */
int fmq_format(void *base, uint64_t bytes, uint64_t capacity, uint32_t element_bytes, uint64_t dtype_hash);
int fmq_geometry(const void *base, uint64_t bytes, uint64_t *capacity, uint32_t *element_bytes, uint64_t *dtype_hash);
int fmq_open(void *base, uint64_t bytes, int role, fmq_end **end); /* the caller holds the role's lock */
int fmq_check(const fmq_end *end, uint64_t capacity, uint32_t element_bytes); /* -EPROTO: not what the caller saw before */
void fmq_free(fmq_end *end);
int fmq_peer(const fmq_end *end);
void fmq_stop(fmq_end *end); /* ends the call in progress and waits for that; refuses all later calls; any thread */

/* transfers: all n elements or none; spins for spin_ns, then sleeps until the deadline (0: only tries, -EAGAIN).
 * One thread at a time on an end (else -EBUSY). */
int64_t fmq_available(fmq_end *end);
int fmq_write(fmq_end *end, const void *elements, uint64_t n, uint64_t spin_ns, uint64_t deadline);
int fmq_read(fmq_end *end, void *elements, uint64_t n, uint64_t spin_ns, uint64_t deadline);
int fmq_reserve(fmq_end *end, uint64_t n, fmq_spans *spans, uint64_t spin_ns, uint64_t deadline); /* room, or elements */
int fmq_commit(fmq_end *end, uint64_t n); /* at most what was reserved; ends the reservation */

/* one message each way: writes the packet (n = 0: none) to `out`, then takes all that arrives on `in`.
 * Returns the elements received. -EAGAIN: the packet did not fit, nothing was sent. After -EINTR or -ETIMEDOUT the
 * packet is out: call again with n = 0. */
int64_t fmq_exchange(fmq_end *out, const void *packet, uint64_t n, fmq_end *in, void *buffer, uint64_t capacity,
                     uint64_t spin_ns, uint64_t deadline);

/* event flag: eight bytes of any shared memory, bits and sleepers */
int fmq_event_wake(void *flag, uint32_t mask);
int fmq_event_wait(void *flag, uint32_t mask, uint64_t deadline, uint32_t *bits);

/* life: the kernel marks held words when this process dies, whatever its size */
int fmq_life_hold(int fd, uint64_t offset); /* maps that page; returns a slot */
void fmq_life_release(int slot);
int fmq_life_state(const void *word);

/* watch: shuts `socket` down as soon as the process that holds `word` dies; -ENOSYS before Linux 5.16 */
int fmq_watch(void *word, int socket);
void fmq_unwatch(int token);
