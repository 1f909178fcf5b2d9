/* The floor for a stream: the smallest queue between two processes on this machine.
 *
 *   cc -O2 -I .. -o spsc spsc.c && ./spsc copy 1000000 64 16 && ./spsc place 1000000 64 16 && ./spsc roundtrip 100000 65536
 *
 * One producer, one consumer, pinned to CPUs 0 and 1. Head and tail on lines of their own, each side's copy of the
 * other's counter private, release and acquire, a power of two for a capacity and batches that never wrap, memcpy;
 * nothing is checked, neither side sleeps, a death goes unnoticed. `copy` and `place` stream elements of BYTES in batches, and
 * print nanoseconds per element; `roundtrip` is limit.c's exchange for messages of any size, through two such queues of
 * one slot, and prints percentiles of round trips in nanoseconds.
 */
#define _GNU_SOURCE
#include "stream.h"

typedef struct {
    _Alignas(128) _Atomic uint64_t head;
    _Alignas(128) _Atomic uint64_t tail;
    _Alignas(128) unsigned char data[];
} ring;

/* One side's own view. */
typedef struct {
    ring *ring;
    uint64_t mine, seen, capacity, bytes;
} side;

static inline side side_of(ring *r, uint64_t capacity, uint64_t bytes) { return (side){r, 0, 0, capacity, bytes}; }

static inline unsigned char *slot(const side *s) { return s->ring->data + (s->mine & (s->capacity - 1)) * s->bytes; }

static inline unsigned char *room(side *s, uint64_t n) {
    while (s->mine + n - s->seen > s->capacity) {
        s->seen = atomic_load_explicit(&s->ring->tail, memory_order_acquire);
        if (s->mine + n - s->seen > s->capacity) relax();
    }
    return slot(s);
}

static inline unsigned char *arrived(side *s, uint64_t n) {
    while (s->seen - s->mine < n) {
        s->seen = atomic_load_explicit(&s->ring->head, memory_order_acquire);
        if (s->seen - s->mine < n) relax();
    }
    return slot(s);
}

static inline void publish(side *s, uint64_t n) { atomic_store_explicit(&s->ring->head, s->mine += n, memory_order_release); }
static inline void release(side *s, uint64_t n) { atomic_store_explicit(&s->ring->tail, s->mine += n, memory_order_release); }

static inline void push(side *s, const void *elements, uint64_t n) {
    memcpy(room(s, n), elements, n * s->bytes);
    publish(s, n);
}

static inline void pop(side *s, void *elements, uint64_t n) {
    memcpy(elements, arrived(s, n), n * s->bytes);
    release(s, n);
}

/* ---- a stream ------------------------------------------------------------------------------------------------------ */

static void consume(side *in, const stream *s, outcome *o, int in_place) {
    unsigned char *batch = new_batch(s);
    laps clock = laps_of(o, s);
    for (uint64_t n = 0; n < s->elements; n += s->batch) {
        tick(&clock, n);
        if (in_place) o->wrong |= misfilled(arrived(in, s->batch), s, n), release(in, s->batch);
        else pop(in, batch, s->batch), o->wrong |= misnumbered(batch, s, n);
    }
    tick(&clock, s->elements);
    o->seen = s->elements;
}

static void produce(side *out, const stream *s, int in_place) {
    unsigned char *batch = new_batch(s);
    for (uint64_t n = 0; n < s->elements; n += s->batch) {
        if (in_place) fill(room(out, s->batch), s, n), publish(out, s->batch);
        else number(batch, s, n), push(out, batch, s->batch);
    }
}

static int streaming(const stream *s, int in_place) {
    ring *r = shared(sizeof *r + s->capacity * s->bytes);
    outcome *o = shared(sizeof *o);
    side here = side_of(r, s->capacity, s->bytes);
    if (fork_pinned() == 0) consume(&here, s, o, in_place), _exit(0);
    produce(&here, s, in_place);
    wait(NULL);
    return answer(in_place ? "spsc-place" : "spsc-copy", s, o);
}

/* ---- round trips --------------------------------------------------------------------------------------------------- */

static int roundtrip(long rounds, uint64_t bytes) {
    ring *there = shared(sizeof *there + bytes), *back = shared(sizeof *back + bytes);
    char *message = calloc(1, bytes);
    if (fork_pinned() == 0) {
        side in = side_of(there, 1, bytes), out = side_of(back, 1, bytes);
        for (long i = 0; i < rounds; i++) pop(&in, message, 1), push(&out, message, 1);
        _exit(0);
    }
    side out = side_of(there, 1, bytes), in = side_of(back, 1, bytes);
    double *rtt = malloc((size_t)rounds * sizeof *rtt);
    for (long i = 0; i < rounds; i++) {
        double begin = seconds_now();
        push(&out, message, 1);
        pop(&in, message, 1);
        rtt[i] = (seconds_now() - begin) * 1e9;
    }
    wait(NULL);
    qsort(rtt, (size_t)rounds, sizeof *rtt, ascending);
    printf("{\"peer\": \"spsc-roundtrip\", \"bytes\": %lu, \"rounds\": %ld, \"p50_ns\": %.0f, \"p99_ns\": %.0f, \"p999_ns\": %.0f, \"max_ns\": %.0f}\n",
           (unsigned long)bytes, rounds, rtt[rounds / 2], rtt[rounds * 99 / 100], rtt[rounds * 999 / 1000], rtt[rounds - 1]);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 4 && !strcmp(argv[1], "roundtrip") && atol(argv[2]) > 0 && atol(argv[3]) > 0)
        return roundtrip(atol(argv[2]), (uint64_t)atol(argv[3]));
    int in_place = argc == 5 && !strcmp(argv[1], "place");
    if (argc != 5 || (!in_place && strcmp(argv[1], "copy")))
        return fprintf(stderr, "usage: spsc copy|place ELEMENTS BYTES BATCH\n       spsc roundtrip ROUNDS BYTES\n"), 2;
    stream s = stream_of(argv + 2);
    return streaming(&s, in_place);
}
