/* The queue in C as a stream, measured exactly as peers/spsc.c measures the floor.
 *
 *   queue_throughput copy|place|overwrite ELEMENTS BYTES BATCH
 *
 * One writer and one reader, pinned to CPUs 0 and 1, that never sleep. `copy`: fmq_write and fmq_read. `place`:
 * fmq_reserve and fmq_commit at both ends. `overwrite`: the writer of an unsynchronized queue, which waits for no reader,
 * beside a reader that takes what it can get; the writer measures, and `seen` is the part that the reader got whole.
 * Prints one JSON line: percentiles over parts of nanoseconds per element.
 */
#define _GNU_SOURCE
#include "stream.h"

#include "fmq/api.h"

#include <errno.h>

enum { CONTROL = 4096 };
static const uint64_t SPIN = 5000000000, FOREVER = UINT64_MAX;

typedef struct {
    fmq_shape shape;
    char *control;
    unsigned char *ring;
} queue;

static queue new_queue(const stream *s, uint32_t flavour) {
    queue q = {.shape = {s->capacity, 0, (uint32_t)s->bytes, flavour}};
    q.control = shared(CONTROL + s->capacity * s->bytes);
    q.ring = (unsigned char *)q.control + CONTROL;
    if (fmq_format(q.control, &q.shape)) abort();
    return q;
}

static fmq_end *end_of(const queue *q, int role) {
    fmq_end *end = NULL;
    if (fmq_open(q->control, q->ring, &q->shape, role, &end)) abort();
    return end;
}

/* Both sides wait until they can go on, whatever the machine does: a main thread that sleeps is sent back now and then. */
#define CALL(call)                                                           \
    do {                                                                     \
        int r;                                                               \
        while ((r = (call)) == -EINTR) continue;                             \
        if (r) fprintf(stderr, "queue_throughput: error %d\n", r), abort(); \
    } while (0)

/* A batch in place. It never wraps, because batches divide the capacity. */
static unsigned char *reserved(const queue *q, fmq_end *end, const stream *s) {
    fmq_spans spans;
    CALL(fmq_reserve(end, s->batch, &spans, SPIN, FOREVER));
    if (spans.second) abort();
    return q->ring + spans.start * s->bytes;
}

static void consume(const queue *q, const stream *s, outcome *o, int in_place) {
    fmq_end *in = end_of(q, FMQ_READER);
    unsigned char *batch = new_batch(s);
    laps clock = laps_of(o, s);
    for (uint64_t n = 0; n < s->elements; n += s->batch) {
        tick(&clock, n);
        if (in_place) {
            o->wrong |= misfilled(reserved(q, in, s), s, n);
            CALL(fmq_commit(in, s->batch));
        } else {
            CALL(fmq_read(in, batch, s->batch, SPIN, FOREVER));
            o->wrong |= misnumbered(batch, s, n);
        }
    }
    tick(&clock, s->elements);
    o->seen = s->elements;
}

static void produce(const queue *q, const stream *s, int in_place) {
    fmq_end *out = end_of(q, FMQ_WRITER);
    unsigned char *batch = new_batch(s);
    for (uint64_t n = 0; n < s->elements; n += s->batch) {
        if (in_place) {
            fill(reserved(q, out, s), s, n);
            CALL(fmq_commit(out, s->batch));
        } else {
            number(batch, s, n);
            CALL(fmq_write(out, batch, s->batch, SPIN, FOREVER));
        }
    }
}

static int streaming(const stream *s, int in_place) {
    queue q = new_queue(s, FMQ_SYNCHRONIZED);
    outcome *o = shared(sizeof *o);
    if (fork_pinned() == 0) consume(&q, s, o, in_place), _exit(0);
    produce(&q, s, in_place);
    wait(NULL);
    return answer(in_place ? "fmq-c-place" : "fmq-c-copy", s, o);
}

/* ---- the unsynchronized flavour ------------------------------------------------------------------------------------- */

/* Takes what it can get: numbers only rise, and each batch is whole. */
static void follow(const queue *q, const stream *s, outcome *o) {
    fmq_end *in = end_of(q, FMQ_READER);
    unsigned char *batch = new_batch(s);
    uint64_t next = 0;
    while (!atomic_load(&o->done)) {
        int r = fmq_read(in, batch, s->batch, 0, 0);
        if (r == -EAGAIN || r == -EOVERFLOW) continue;
        if (r) abort();
        uint64_t n = *(word *)batch;
        o->wrong |= n < next || misnumbered(batch, s, n);
        o->seen += s->batch;
        next = n + s->batch;
    }
}

static void overwrite(const queue *q, const stream *s, outcome *o) {
    fmq_end *out = end_of(q, FMQ_WRITER);
    unsigned char *batch = new_batch(s);
    laps clock = laps_of(o, s);
    for (uint64_t n = 0; n < s->elements; n += s->batch) {
        tick(&clock, n);
        number(batch, s, n);
        CALL(fmq_write(out, batch, s->batch, 0, 0));
    }
    tick(&clock, s->elements);
    atomic_store(&o->done, 1);
}

static int overwriting(const stream *s) {
    queue q = new_queue(s, FMQ_UNSYNCHRONIZED);
    outcome *o = shared(sizeof *o);
    if (fork_pinned() == 0) follow(&q, s, o), _exit(0);
    overwrite(&q, s, o);
    wait(NULL);
    return answer("fmq-c-overwrite", s, o);
}

int main(int argc, char **argv) {
    int in_place = argc == 5 && !strcmp(argv[1], "place"), overwrites = argc == 5 && !strcmp(argv[1], "overwrite");
    if (argc != 5 || (!in_place && !overwrites && strcmp(argv[1], "copy")))
        return fprintf(stderr, "usage: queue_throughput copy|place|overwrite ELEMENTS BYTES BATCH\n"), 2;
    stream s = stream_of(argv + 2);
    return overwrites ? overwriting(&s) : streaming(&s, in_place);
}
