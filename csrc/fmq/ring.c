/* An atomic circular FIFO: two free-running 64-bit counters of elements, each with one writer.
 *
 * head counts the elements ever written, tail those ever read. Only their difference matters;
 * neither wraps in practice, and full differs from empty. A slot is counter % capacity. Transfers
 * are all or nothing: the peer sees a counter move once, over everything that was copied.
 *
 * Synchronized: both roles run the same code: each publishes its own counter and looks at the
 * other's. A writer's free places and a reader's elements are the same subtraction seen from two
 * sides (ring_known).
 *
 * Unsynchronized: there is no tail. The writer says in `begin` how far it is about to write,
 * writes, and moves head. A reader copies, and then looks at begin: what was overwritten meanwhile
 * is not returned. Both touch the elements at the same time, so both use atomic accesses, which
 * cost nothing, and a fence each, which x86 has for nothing.
 *
 * Broadcast: as synchronized, with a tail for each reader (readers.c). An evicted reader may
 * be reading what the writer overwrites; it looks at its verdict afterwards, as above at begin.
 */
#define _GNU_SOURCE
#include "fmq/ring.h"

#include "fmq/futex.h"
#include "fmq/readers.h"

#include <string.h>

/* The peer broke the protocol: this end is of no more use. */
int ring_broken(struct fmq_end *e) {
    e->cursor.broken = true;
    return -EPROTO;
}

/* The writer has begun to overwrite what we have not read. Goes on at the middle of the ring, to
 * get ahead of a fast writer, or where the oldest whole element is. */
static int overrun(struct fmq_end *e, uint64_t begin) {
    uint64_t head = atomic_load(&e->shared.theirs->counter);
    if (head < e->cursor.seen || (begin > head && begin - head > e->ring.capacity))
        return ring_broken(e);
    uint64_t resume = head - (head < e->ring.capacity / 2 ? head : e->ring.capacity / 2);
    if (resume < begin - e->ring.capacity) resume = begin - e->ring.capacity;
    e->cursor.seen = head;
    e->cursor.lost = resume - e->cursor.position;
    e->cursor.overran = true;
    ring_move_to(e, resume);
    return -EOVERFLOW;
}

/* Whether what was just read, from `position` on, can be believed. */
int ring_still_whole(struct fmq_end *e) {
    /* The reads above happened before this look.  pairs: BEGIN */
    atomic_thread_fence(memory_order_acquire);
    /* relaxed, because of the fence */
    uint64_t begin = atomic_load_explicit(&e->shared.theirs->begin, memory_order_relaxed);
    return begin > e->cursor.position && begin - e->cursor.position > e->ring.capacity
               ? overrun(e, begin)
               : 0;
}

/* The stream's head without a look at what was overwritten, which the next transfer tells. */
int ring_look_ahead(struct fmq_end *e) {
    uint64_t now = atomic_load(&e->shared.theirs->counter); /* pairs: VISIBLE, SLEEP */
    if (e->cursor.broken || now < e->cursor.seen) return ring_broken(e);
    e->cursor.seen = now;
    return 0;
}

static int look_at_stream(struct fmq_end *e) {
    int r = ring_look_ahead(e);
    if (!r) r = ring_still_whole(e);
    /* Nothing was overwritten, it claims. */
    return !r && ring_known(e) > e->ring.capacity ? ring_broken(e) : r;
}

/* Refreshes the private copy of the peer's counter. The peer is not trusted: it may only have moved
 * forward, and not beyond what the ring can hold. */
int ring_look(struct fmq_end *e) {
    if (e->cursor.broken) return -EPROTO;
    if (e->overwrites) return e->writer ? 0 : look_at_stream(e);
    if (e->readers.records) return readers_look(e);
    /* acquire: what the peer published before this counter is visible after it.  pairs: VISIBLE.
     * seq_cst, because between announcing a sleep and sleeping this load must not move up.
     * pairs: SLEEP */
    uint64_t now = atomic_load_explicit(&e->shared.theirs->counter, memory_order_seq_cst);
    /* After the counter, which runs away from a reader that is out. */
    int out = e->readers.seats ? reader_verdict(e) : 0;
    if (out) return out;
    uint64_t lag = e->writer ? e->cursor.position - now : now - e->cursor.position;
    if (now - e->cursor.seen > e->ring.capacity || lag > e->ring.capacity) return ring_broken(e);
    e->cursor.seen = now;
    return 0;
}

/* 0 when n are at hand. Looks at the peer's cache line only when the private copy does not
 * suffice. */
int ring_need(struct fmq_end *e, uint64_t n) {
    if (n > e->ring.capacity) return -EMSGSIZE;
    if (e->cursor.broken) return -EPROTO; /* for good, also if enough was seen before */
    if (e->cursor.overran) return -EOVERFLOW;
    /* More than the ring holds is not at hand, but overrun; only fmq_available leaves that to
     * us. */
    if (ring_known(e) >= n && ring_known(e) <= e->ring.capacity) return 0;
    int r = ring_look(e);
    if (r) return r;
    return ring_known(e) >= n ? 0 : -EAGAIN;
}

/* Says on which CPU the counter last moved, so that a waiter on the same one sleeps at once instead
 * of spinning. */
static void note_cpu(struct fmq_end *e) {
    uint32_t cpu = futex_cpu();
    if (cpu == e->cursor.my_cpu) return;
    e->cursor.my_cpu = cpu;
    /* A hint: no order is needed. */
    atomic_store_explicit(&e->shared.mine->cpu, cpu, memory_order_relaxed);
}

void ring_move_to(struct fmq_end *e, uint64_t position) {
    e->cursor.position = position;
    e->cursor.slot = position % e->ring.capacity;
}

/* Before a writer with many readers touches its next n slots. What a dead predecessor had begun
 * stays begun. */
void ring_begin(struct fmq_end *e, uint64_t n) {
    if (!e->overwrites && !e->readers.seats) return;
    if (e->cursor.position + n > e->cursor.begun) e->cursor.begun = e->cursor.position + n;
    /* relaxed, because of the fence: a reader that sees one of the writes after it also sees begin.
     * pairs: BEGIN */
    atomic_store_explicit(&e->shared.mine->begin, e->cursor.begun, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
}

void ring_publish(struct fmq_end *e, uint64_t n) {
    e->cursor.before = e->cursor.position;
    e->cursor.position += n;
    e->cursor.slot += n;
    if (e->cursor.slot >= e->ring.capacity) e->cursor.slot -= e->ring.capacity;
    if (!e->shared.mine) return;
    note_cpu(e);
    /* release: a peer that sees this counter also sees the copies above.  pairs: VISIBLE. seq_cst,
     * because the look at the peer's wait word that follows must not move up.  pairs: SLEEP */
    atomic_store_explicit(&e->shared.mine->counter, e->cursor.position, memory_order_seq_cst);
}

/* A reader of a broadcast queue races with the writer only when it is out, and then nothing of its
 * copy is returned. So memcpy will do, which is faster than words one by one; ThreadSanitizer,
 * which would tell of that race, gets words. */
#if defined(__SANITIZE_THREAD__)
enum { BY_WORDS = 1 };
#else
enum { BY_WORDS = 0 };
#endif

/* ---- copies ---------------------------------------------------------------------------------- */

/* Relaxed, because begin and the fences say what can be believed. */
static void copy_byte(unsigned char *there, unsigned char *here, bool in) {
    if (in) atomic_store_explicit((_Atomic unsigned char *)there, *here, memory_order_relaxed);
    else *here = atomic_load_explicit((_Atomic unsigned char *)there, memory_order_relaxed);
}

/* Eight bytes, aligned in shared memory. */
static void copy_word(unsigned char *there, unsigned char *here, bool in) {
    uint64_t word;
    if (in) { /* both relaxed, because of the fences */
        memcpy(&word, here, 8);
        atomic_store_explicit((_Atomic uint64_t *)there, word, memory_order_relaxed);
    } else {
        word = atomic_load_explicit((_Atomic uint64_t *)there, memory_order_relaxed);
        memcpy(here, &word, 8);
    }
}

/* Like memcpy between shared (`there`) and private memory, by accesses that another process may
 * race with: whole words where they are aligned, bytes at the edges. */
static void copy_words(unsigned char *there, unsigned char *here, uint64_t bytes, bool in) {
    for (; bytes && (uintptr_t)there % 8; bytes--) copy_byte(there++, here++, in);
    for (; bytes >= 8; there += 8, here += 8, bytes -= 8) copy_word(there, here, in);
    for (; bytes; bytes--) copy_byte(there++, here++, in);
}

static void copy(const struct fmq_end *e, uint64_t slot, unsigned char *here, uint64_t n, bool in) {
    unsigned char *there = e->ring.base + slot * e->ring.element_bytes;
    uint64_t bytes = n * e->ring.element_bytes;
    if (e->overwrites || (e->readers.seats && BY_WORDS)) copy_words(there, here, bytes, in);
    else if (in) memcpy(there, here, bytes);
    else memcpy(here, there, bytes);
}

static void copy_both(const struct fmq_end *e, unsigned char *here, uint64_t n, bool in) {
    uint64_t straight = e->ring.capacity - e->cursor.slot;
    uint64_t first = n < straight ? n : straight;
    copy(e, e->cursor.slot, here, first, in);
    if (first < n) copy(e, 0, here + first * e->ring.element_bytes, n - first, in);
}

void ring_copy_in(struct fmq_end *e, const void *elements, uint64_t n) {
    copy_both(e, (unsigned char *)(uintptr_t)elements, n, true);
}

void ring_copy_out(struct fmq_end *e, void *elements, uint64_t n) {
    copy_both(e, elements, n, false);
}
