/* Two threads race through one queue, and two queues: run under ThreadSanitizer, and under Address- and UBSanitizer.
 *
 *   ring_race SEED MILLISECONDS
 *
 * Acceptable outcomes, all others abort:
 *   stream    every element arrives once and in order, whatever the sizes of transfers, by copy or in place
 *   exchange  the n-th answer belongs to the n-th question
 *   stop      the stopped side gets -ECANCELED, or what it asked for; after fmq_stop returned its counter rests; the other
 *             side, told by the life word, gets -ESHUTDOWN, or what it asked for
 *   broadcast each reader gets every element from where it joined, in order, until it leaves or is evicted
 *   busy      of two threads on one end each gets its elements or -EBUSY; no element is lost or comes twice
 */
#define _GNU_SOURCE
#include <stdint.h>

#include "fmq/api.h"
#include "fmq/futex.h"
#include "fmq/layout.h"
#include "fmq/life.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { CAPACITY = 7, MOST = 4, QUEUE_BYTES = 2 * FMQ_PAGE, READERS = 3 }; /* MOST + MOST <= CAPACITY + 1, or both could wait for each other */
static const uint64_t ms = 1000000;

typedef struct {
    fmq_control *control;
    fmq_end *writer, *reader;
    uint32_t *ring;
    uint64_t seed, until;
    uint64_t count;
} queue;

#define MUST(x)                                                                                                        \
    do {                                                                                                               \
        if (!(x)) {                                                                                                    \
            fprintf(stderr, "ring_race: line %d: not %s\n", __LINE__, #x);                                             \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

static uint64_t random_of(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

static queue new_queue(uint64_t seed, uint64_t until) {
    const fmq_shape shape = {CAPACITY, 0, sizeof(uint32_t), FMQ_SYNCHRONIZED};
    char *base = mmap(NULL, QUEUE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    queue q = {.control = (fmq_control *)base, .ring = (uint32_t *)(base + FMQ_PAGE), .seed = seed, .until = until};
    MUST((void *)base != MAP_FAILED && !fmq_format(base, &shape));
    MUST(!fmq_open(base, base + FMQ_PAGE, &shape, FMQ_WRITER, &q.writer));
    MUST(!fmq_open(base, base + FMQ_PAGE, &shape, FMQ_READER, &q.reader));
    return q;
}

static void drop(queue *q) {
    fmq_free(q->writer), fmq_free(q->reader);
    munmap(q->control, QUEUE_BYTES);
}

static void run_both(void *(*a)(void *), void *(*b)(void *), void *argument) {
    pthread_t threads[2];
    MUST(!pthread_create(&threads[0], NULL, a, argument) && !pthread_create(&threads[1], NULL, b, argument));
    pthread_join(threads[0], NULL), pthread_join(threads[1], NULL);
}

/* ---- stream -------------------------------------------------------------------------------------------------------- */

static uint64_t spin_of(uint64_t *random) { return random_of(random) % 2 ? 0 : 20000; }

static uint32_t *slot(queue *q, const fmq_spans *s, uint64_t i) {
    return q->ring + (i < s->first ? s->start + i : i - s->first);
}

static void *stream_writer(void *argument) {
    queue *q = argument;
    uint64_t random = q->seed;
    uint32_t next = 0, part[MOST];
    while (fmq_now() < q->until) {
        uint64_t n = 1 + random_of(&random) % MOST;
        if (random_of(&random) % 2) {
            for (uint64_t i = 0; i < n; i++) part[i] = next++;
            MUST(!fmq_write(q->writer, part, n, spin_of(&random), FMQ_FOREVER));
        } else {
            fmq_spans s;
            MUST(!fmq_reserve(q->writer, n, &s, spin_of(&random), FMQ_FOREVER));
            for (uint64_t i = 0; i < n; i++) *slot(q, &s, i) = next++;
            MUST(!fmq_commit(q->writer, n));
        }
    }
    for (uint64_t i = 0; i < MOST; i++) part[i] = UINT32_MAX; /* the end, whatever the reader asks for */
    MUST(!fmq_write(q->writer, part, MOST, 0, FMQ_FOREVER));
    q->count = next;
    return NULL;
}

static void *stream_reader(void *argument) {
    queue *q = argument;
    uint64_t random = q->seed * 31;
    uint32_t expected = 0, part[MOST] = {0};
    while (part[0] != UINT32_MAX) {
        uint64_t n = 1 + random_of(&random) % MOST;
        if (random_of(&random) % 2) {
            MUST(!fmq_read(q->reader, part, n, spin_of(&random), FMQ_FOREVER));
        } else {
            fmq_spans s;
            MUST(!fmq_reserve(q->reader, n, &s, spin_of(&random), FMQ_FOREVER));
            for (uint64_t i = 0; i < n; i++) part[i] = *slot(q, &s, i);
            MUST(!fmq_commit(q->reader, n));
        }
        for (uint64_t i = 0; i < n; i++) {
            MUST(part[i] == expected || part[i] == UINT32_MAX);
            if (part[i] == UINT32_MAX) part[0] = UINT32_MAX;
            expected++;
        }
    }
    return NULL;
}

static uint64_t stream(uint64_t seed, uint64_t until) {
    queue q = new_queue(seed, until);
    run_both(stream_writer, stream_reader, &q);
    drop(&q);
    return q.count;
}

/* ---- exchange ------------------------------------------------------------------------------------------------------ */

static void *asker(void *argument) {
    queue *q = argument;
    uint32_t question = 0, answer[CAPACITY];
    fmq_channel channel = {q[0].writer, q[1].reader, answer, sizeof answer, 0, 0};
    for (; fmq_now() < q[0].until; question++) {
        channel.spin_ns = question % 2 ? 0 : 20000;
        MUST(fmq_exchange(&channel, &question, 4, FMQ_FOREVER) == 4);
        MUST(answer[0] == ~question);
    }
    question = UINT32_MAX;
    MUST(!fmq_write(q[0].writer, &question, 1, 0, FMQ_FOREVER));
    return NULL;
}

static void *answerer(void *argument) {
    queue *q = argument;
    uint32_t message[CAPACITY];
    fmq_channel channel = {q[1].writer, q[0].reader, message, sizeof message, 0, 0};
    uint64_t n = 0;
    for (;;) {
        MUST(fmq_exchange(&channel, message, n, FMQ_FOREVER) == 4);
        if (message[0] == UINT32_MAX) return NULL;
        message[0] = ~message[0];
        n = sizeof message[0];
        q[1].count++;
    }
}

static uint64_t exchange(uint64_t seed, uint64_t until) {
    queue q[2] = {new_queue(seed, until), new_queue(seed, until)};
    run_both(asker, answerer, q);
    drop(&q[0]), drop(&q[1]);
    return q[1].count;
}

/* ---- stop and release ---------------------------------------------------------------------------------------------- */

static void *write_until_told(void *argument) {
    queue *q = argument;
    int r;
    uint32_t one = 1;
    while (!(r = fmq_write(q->writer, &one, 1, 0, FMQ_FOREVER))) q->count++;
    MUST(r == -ESHUTDOWN);
    return NULL;
}

static void *read_until_stopped(void *argument) {
    queue *q = argument;
    int r;
    uint32_t one;
    while (!(r = fmq_read(q->reader, &one, 1, 0, FMQ_FOREVER))) {}
    MUST(r == -ECANCELED);
    return NULL;
}

static uint64_t stop(uint64_t seed, uint64_t until) {
    uint64_t rounds = 0, random = seed;
    do {
        queue q = new_queue(seed, until);
        pthread_t writer, reader;
        MUST(!pthread_create(&writer, NULL, write_until_told, &q) && !pthread_create(&reader, NULL, read_until_stopped, &q));
        for (uint64_t i = random_of(&random) % 20000; i; i--) atomic_load(&q.control->tail.counter);
        fmq_stop(q.reader);
        uint64_t rests = atomic_load(&q.control->tail.counter);
        atomic_store(&q.control->reader_life.word, LIFE_RELEASED);
        futex_wake(&q.control->reader_life.word, 1, UINT32_MAX);
        pthread_join(writer, NULL), pthread_join(reader, NULL);
        MUST(atomic_load(&q.control->tail.counter) == rests);
        MUST(q.count - rests <= CAPACITY);
        drop(&q);
        rounds++;
    } while (fmq_now() < until);
    return rounds;
}

/* ---- broadcast ----------------------------------------------------------------------------------------------------- */

typedef struct {
    queue *q;
    fmq_shape shape;
    unsigned seat;
    uint64_t seed;
    _Atomic int *over;
    uint64_t *counts; /* joined, read, evicted */
} listener;

static void *broadcast_reader(void *argument) {
    listener *l = argument;
    char *base = (char *)l->q->control;
    _Atomic uint32_t *life = &((fmq_counter *)(base + FMQ_SEATS_AT) + l->seat)->life;
    uint64_t random = l->seed;
    while (!atomic_load(l->over)) {
        fmq_end *end;
        uint64_t part[MOST], more = random_of(&random) % 2000;
        MUST(!fmq_clear_seat(base, (int)(FMQ_SEAT + l->seat)));
        atomic_store(life, 42 | (uint32_t)FUTEX_WAITERS);
        MUST(!fmq_open(base, l->q->ring, &l->shape, (int)(FMQ_SEAT + l->seat), &end));
        uint64_t at = (uint64_t)fmq_position(end);
        l->counts[0]++;
        for (int r = 0; more && r != -ESTALE; more--) {
            uint64_t n = 1 + random_of(&random) % MOST;
            r = fmq_read(end, part, n, spin_of(&random), fmq_now() + 5 * ms);
            MUST(!r || r == -ETIMEDOUT || r == -ESTALE);
            for (uint64_t i = 0; !r && i < n; i++) MUST(part[i] == at++);
            if (!r) l->counts[1] += n;
            if (r == -ESTALE) l->counts[2]++;
            if (atomic_load(l->over)) break;
        }
        fmq_stop(end);
        futex_release(life);
        fmq_free(end);
    }
    return NULL;
}

static void *evict_now_and_then(void *argument) {
    listener *l = argument;
    fmq_reader found[FMQ_SEATS];
    uint64_t random = l->seed;
    while (!atomic_load(l->over)) {
        int n = fmq_readers(l->q->writer, found);
        MUST(n >= 0 && n <= READERS);
        if (n) MUST(!fmq_evict(l->q->writer, found[random_of(&random) % (uint64_t)n].seat, found[0].turn));
        for (uint64_t i = random_of(&random) % 100000; i; i--) atomic_load(l->over);
    }
    return NULL;
}

static uint64_t broadcast(uint64_t seed, uint64_t until) {
    const fmq_shape shape = {CAPACITY, 0, sizeof(uint64_t), FMQ_BROADCAST};
    uint64_t bytes = FMQ_BROADCAST_CONTROL + FMQ_PAGE, counts[READERS + 1][3] = {{0}}, at = 0, random = seed;
    char *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    _Atomic int over = 0;
    queue q = {.control = (fmq_control *)base, .ring = (uint32_t *)(base + FMQ_BROADCAST_CONTROL)};
    MUST((void *)base != MAP_FAILED && !fmq_format(base, &shape));
    MUST(!fmq_open(base, q.ring, &shape, FMQ_WRITER, &q.writer));
    atomic_store(&q.control->writer_life.word, 42 | (uint32_t)FUTEX_WAITERS);
    pthread_t threads[READERS + 1];
    listener all[READERS + 1];
    for (unsigned i = 0; i <= READERS; i++) {
        all[i] = (listener){&q, shape, i, seed * 31 + i, &over, counts[i]};
        MUST(!pthread_create(&threads[i], NULL, i < READERS ? broadcast_reader : evict_now_and_then, &all[i]));
    }
    while (fmq_now() < until) {
        uint64_t part[MOST], n = 1 + random_of(&random) % MOST;
        for (uint64_t i = 0; i < n; i++) part[i] = at + i;
        int r = fmq_write(q.writer, part, n, spin_of(&random), fmq_now() + 1000 * ms);
        MUST(!r || r == -EINTR); /* the main thread looks for signals */
        if (!r) at += n;
    }
    atomic_store(&over, 1);
    for (unsigned i = 0; i <= READERS; i++) pthread_join(threads[i], NULL);
    fmq_free(q.writer);
    munmap(base, bytes);
    for (unsigned i = 1; i < READERS; i++)
        for (int k = 0; k < 3; k++) counts[0][k] += counts[i][k];
    return counts[0][0] > READERS && counts[0][2] ? counts[0][1] : 0;
}

/* ---- two threads on one end ---------------------------------------------------------------------------------------- */

static void *read_some(void *argument) {
    queue *q = argument;
    uint64_t taken = 0;
    uint32_t one;
    int r;
    while ((r = fmq_read(q->reader, &one, 1, 0, fmq_now() + 20 * ms)) != -ETIMEDOUT || fmq_now() < q->until) {
        MUST(!r || r == -EBUSY || r == -ETIMEDOUT); /* timed out: the writer has to wait for a CPU */
        if (!r) taken++;
        if (!r) atomic_fetch_add((_Atomic uint64_t *)&q->count, one);
    }
    return (void *)(uintptr_t)taken;
}

static uint64_t busy(uint64_t seed, uint64_t until) {
    queue q = new_queue(seed, until);
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) MUST(!pthread_create(&threads[i], NULL, read_some, &q));
    uint64_t sum = 0, n = 0, taken = 0;
    for (uint32_t i = 1; fmq_now() < until; i++, n++) {
        int r;
        while ((r = fmq_write(q.writer, &i, 1, 0, FMQ_FOREVER)) == -EINTR) {} /* the main thread looks for signals */
        MUST(!r);
        sum += i;
    }
    for (int i = 0; i < 2; i++) {
        void *result;
        pthread_join(threads[i], &result);
        taken += (uintptr_t)result;
    }
    MUST(taken == n && q.count == sum);
    drop(&q);
    return n;
}

int main(int argc, char **argv) {
    if (argc != 3) return fprintf(stderr, "usage: ring_race SEED MILLISECONDS\n"), 2;
    uint64_t seed = strtoull(argv[1], NULL, 10) * 2 + 1, part = strtoull(argv[2], NULL, 10) * ms / 5;
    static const struct { const char *name; uint64_t (*run)(uint64_t, uint64_t); } all[] = {
        {"stream", stream}, {"exchange", exchange}, {"stop", stop}, {"broadcast", broadcast}, {"busy", busy}};
    for (int i = 0; i < 5; i++) printf("%s: %lu\n", all[i].name, (unsigned long)all[i].run(seed, fmq_now() + part));
    return 0;
}
