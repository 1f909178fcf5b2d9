/* A writer that waits for nobody, and readers that it overtakes all the time: what a reader is given is whole, and is the
 * element that its position says.
 *
 *   torn SEED MILLISECONDS ENOUGH      rounds of all sizes, until time is up or ENOUGH elements were delivered
 *   torn SEED MILLISECONDS sleep       readers that sleep for a writer that seldom writes
 *   torn SEED MILLISECONDS stop        the same, and all but one are stopped at random
 *
 * Every word of an element holds a number made from its position, so that torn, stale and misnumbered elements are seen.
 */
#define _GNU_SOURCE
#include <stdint.h>

#include "fmq/api.h"
#include "fmq/futex.h"
#include "fmq/layout.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { CAPACITY = 8, LARGEST = 512, READERS = 2, SLEEPERS = 3, QUEUE_BYTES = 3 * FMQ_PAGE };
static const uint64_t ms = 1000000, ROUND = 40; /* milliseconds */

typedef struct {
    fmq_end *end;
    uint64_t seed;
    int cpu;
    uint64_t ok, overruns, torn;
} side;

typedef struct {
    uint32_t element_bytes, batch, readers, pause; /* pause: of the writer, in turns of a loop */
} kind;

static kind now_playing;
static fmq_control *control;
static unsigned char *ring;
static _Atomic int over;

#define MUST(x)                                                                                                        \
    do {                                                                                                               \
        if (!(x)) {                                                                                                    \
            fprintf(stderr, "torn: line %d: not %s (%u bytes, batch %u)\n", __LINE__, #x, now_playing.element_bytes,   \
                    now_playing.batch);                                                                                \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

static uint64_t random_of(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

static void set_up(kind k) {
    now_playing = k;
    const fmq_shape shape = {CAPACITY, 0, k.element_bytes, FMQ_UNSYNCHRONIZED};
    char *base = mmap(NULL, QUEUE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MUST((void *)base != MAP_FAILED && !fmq_format(base, &shape));
    control = (fmq_control *)base;
    ring = (unsigned char *)base + FMQ_PAGE;
    atomic_store(&over, 0);
}

static fmq_end *open_end(int role) {
    const fmq_shape shape = {CAPACITY, 0, now_playing.element_bytes, FMQ_UNSYNCHRONIZED};
    fmq_end *end = NULL;
    MUST(!fmq_open(control, ring, &shape, role, &end));
    return end;
}

static void pin(int cpu) {
    cpu_set_t all, one;
    CPU_ZERO(&one);
    if (sched_getaffinity(0, sizeof all, &all)) return;
    int n = CPU_COUNT(&all), wanted = cpu % n;
    for (int i = 0, k = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &all) && k++ == wanted) CPU_SET(i, &one);
    sched_setaffinity(0, sizeof one, &one);
}

#ifdef SCHEDULED_H
/* Built with -include scheduled.h, every thread pauses before one in 16 of its atomic accesses: what needs an unlucky
 * moment happens all the time. */
void step_before(const volatile void *word) {
    static _Thread_local uint64_t random;
    if (!random) random = (uintptr_t)&random | 1;
    (void)word;
    if (random_of(&random) % 16 == 0) usleep(random_of(&random) % 100);
}
int step_aside(void) { return usleep(10); }
#endif

/* ---- elements ------------------------------------------------------------------------------------------------------ */

/* By an odd factor: all bits are used, and the low ones differ for neighbours, too. */
static uint64_t number_of(uint64_t position) { return (position + 1) * UINT64_C(0x9E3779B97F4A7C15); }

static void fill(unsigned char *element, uint64_t position) {
    uint64_t word = number_of(position);
    for (uint32_t i = 0; i < now_playing.element_bytes; i += 8) {
        uint32_t rest = now_playing.element_bytes - i;
        memcpy(element + i, &word, rest < 8 ? rest : 8);
    }
}

static bool is_whole(const unsigned char *element, uint64_t position) {
    unsigned char right[8];
    uint32_t size = now_playing.element_bytes, first = size < 8 ? size : 8;
    memcpy(right, &(uint64_t){number_of(position)}, sizeof right);
    return !memcmp(element, right, first) && !memcmp(element, element + first, size - first); /* it repeats itself */
}

/* As a careful user would touch memory that another process may write meanwhile: by atomic accesses. */
static void copy_spans(const fmq_spans *s, unsigned char *mine, bool in) {
    uint32_t size = now_playing.element_bytes;
    for (uint64_t i = 0; i < s->first + s->second; i++) {
        unsigned char *slot = ring + (i < s->first ? s->start + i : i - s->first) * size;
        if (size % 8 == 0) {
            for (uint32_t b = 0; b < size; b += 8) {
                uint64_t word;
                memcpy(&word, mine + i * size + b, 8);
                if (in) __atomic_store_n((uint64_t *)(slot + b), word, __ATOMIC_RELAXED);
                else word = __atomic_load_n((uint64_t *)(slot + b), __ATOMIC_RELAXED);
                memcpy(mine + i * size + b, &word, 8);
            }
            continue;
        }
        for (uint32_t b = 0; b < size; b++) {
            if (in) __atomic_store_n(slot + b, mine[i * size + b], __ATOMIC_RELAXED);
            else mine[i * size + b] = __atomic_load_n(slot + b, __ATOMIC_RELAXED);
        }
    }
}

static int transfer(side *s, unsigned char *part, bool in) {
    uint64_t n = now_playing.batch;
    if (random_of(&s->seed) % 2) return in ? fmq_write(s->end, part, n, 0, 0) : fmq_read(s->end, part, n, 0, 0);
    fmq_spans spans;
    int r = fmq_reserve(s->end, n, &spans, 0, 0);
    if (r) return r;
    copy_spans(&spans, part, in);
    return fmq_commit(s->end, n);
}

/* ---- a torrent ----------------------------------------------------------------------------------------------------- */

static void *pour(void *argument) {
    side *s = argument;
    pin(s->cpu);
    unsigned char part[CAPACITY * LARGEST];
    uint64_t position = 0, n = now_playing.batch;
    while (!atomic_load(&over)) {
        for (uint64_t i = 0; i < n; i++) fill(part + i * now_playing.element_bytes, position + i);
        MUST(!transfer(s, part, true));
        position += n;
        MUST((uint64_t)fmq_position(s->end) == position);
        for (uint64_t pause = random_of(&s->seed) % now_playing.pause; pause; pause--) atomic_signal_fence(memory_order_seq_cst);
    }
    return NULL;
}

static void *drink(void *argument) {
    side *s = argument;
    pin(s->cpu);
    unsigned char part[CAPACITY * LARGEST];
    while (!atomic_load(&over)) {
        uint64_t position = (uint64_t)fmq_position(s->end);
        int r = transfer(s, part, false);
        if (r == -EAGAIN) {
            sched_yield();
        } else if (r == -EOVERFLOW) {
            s->overruns++;
            MUST(fmq_lost(s->end) && (uint64_t)fmq_position(s->end) == position + fmq_lost(s->end));
        } else {
            MUST(!r);
            for (uint64_t i = 0; i < now_playing.batch; i++) {
                bool whole = is_whole(part + i * now_playing.element_bytes, position + i);
                s->ok++, s->torn += !whole;
            }
            if (s->ok % 512 == 0) MUST(!fmq_keep_latest(s->end, random_of(&s->seed) % (CAPACITY + 1)));
        }
    }
    return NULL;
}

static void one_round(kind k, uint64_t seed, side *sum) {
    set_up(k);
    side sides[1 + READERS];
    pthread_t threads[1 + READERS];
    for (uint32_t i = 0; i <= k.readers; i++) {
        int role = !i ? FMQ_WRITER : i == 1 ? FMQ_READER : FMQ_OBSERVER;
        sides[i] = (side){.end = open_end(role), .seed = seed * (2 * i + 3) | 1, .cpu = (int)i};
        MUST(!pthread_create(&threads[i], NULL, i ? drink : pour, &sides[i]));
    }
    usleep((useconds_t)(ROUND * 1000));
    atomic_store(&over, 1);
    for (uint32_t i = 0; i <= k.readers; i++) {
        pthread_join(threads[i], NULL);
        fmq_free(sides[i].end);
        sum->ok += sides[i].ok, sum->overruns += sides[i].overruns, sum->torn += sides[i].torn;
    }
    munmap(control, QUEUE_BYTES);
}

static int torrent(uint64_t seed, uint64_t until, uint64_t enough) {
    static const uint32_t sizes[] = {64, 512, 24, 3, 13, 8, 1}, batches[] = {1, 4, 3, 5, 8};
    side sum = {0};
    for (uint64_t i = 0, random = seed; fmq_now() < until && sum.ok < enough && !sum.torn; i++) {
        kind k = {sizes[i % 7], batches[random_of(&random) % 5], 1 + random_of(&random) % READERS, 0};
        k.pause = 16u << random_of(&random) % 8;
        one_round(k, random_of(&random), &sum);
    }
    printf("ok: %lu, overruns: %lu, torn: %lu\n", (unsigned long)sum.ok, (unsigned long)sum.overruns,
           (unsigned long)sum.torn);
    return sum.torn ? 1 : 0;
}

/* ---- sleepers ------------------------------------------------------------------------------------------------------ */

typedef struct {
    fmq_end *_Atomic end; /* NULL: about to be opened again */
    _Atomic uint64_t next, stops;
    _Atomic int stopping;
    pthread_t thread;
} sleeper;
static sleeper sleepers[SLEEPERS];
static _Atomic uint64_t enough = UINT64_MAX;

static void *sleep_and_read(void *argument) {
    sleeper *s = argument;
    for (;;) {
        fmq_end *end = open_end(FMQ_READER);
        unsigned char one[LARGEST];
        atomic_store(&s->next, (uint64_t)fmq_position(end));
        atomic_store(&s->end, end);
        int r = 0;
        while (atomic_load(&s->next) < atomic_load(&enough) && !(r = fmq_read(end, one, 1, 0, FMQ_FOREVER))) {
            MUST(is_whole(one, atomic_load(&s->next)));
            atomic_fetch_add(&s->next, 1);
        }
        MUST(!r || r == -ECANCELED);
        atomic_store(&s->end, NULL);
        while (atomic_load(&s->stopping)) sched_yield();
        fmq_free(end);
        if (!r) return NULL;
    }
}

static bool all_have(uint64_t position) {
    for (int i = 0; i < SLEEPERS; i++)
        if (atomic_load(&sleepers[i].next) < position) return false;
    return true;
}

/* Writes one element and waits until everybody has it: a single wake-up that is lost holds this for ever. */
static void *write_seldom(void *argument) {
    uint64_t random = *(uint64_t *)argument;
    fmq_end *end = open_end(FMQ_WRITER);
    unsigned char one[LARGEST];
    for (uint64_t position = 0;; position++) {
        bool last = atomic_load(&over);
        if (last) atomic_store(&enough, position + 1);
        fill(one, position);
        MUST(!fmq_write(end, one, 1, 0, 0));
        for (uint64_t until = fmq_now() + 5000 * ms; !all_have(position + 1); sched_yield()) MUST(fmq_now() < until);
        if (last) break;
        usleep(random_of(&random) % 256 ? random_of(&random) % 100 : 30000);
    }
    fmq_free(end);
    return NULL;
}

static void stop_one(sleeper *s) {
    atomic_store(&s->stopping, 1);
    fmq_end *end = atomic_load(&s->end); /* not freed while we are stopping */
    if (end) fmq_stop(end), atomic_fetch_add(&s->stops, 1);
    atomic_store(&s->stopping, 0);
}

/* One reader is never stopped, and must not mind how often the others' stops wake it. */
static int slumber(uint64_t seed, uint64_t until, bool stopping) {
    uint64_t random = seed, stops = 0;
    pthread_t writer;
    set_up((kind){24, 1, SLEEPERS, 0});
    for (int i = 0; i < SLEEPERS; i++) MUST(!pthread_create(&sleepers[i].thread, NULL, sleep_and_read, &sleepers[i]));
    MUST(!pthread_create(&writer, NULL, write_seldom, &random));
    while (fmq_now() < until) {
        if (stopping) stop_one(&sleepers[1 + random_of(&random) % (SLEEPERS - 1)]);
        else usleep(1000); /* a stop would also wake who should have been woken by the writer */
        if (random_of(&random) % 4 == 0) usleep(random_of(&random) % 100);
    }
    atomic_store(&over, 1);
    pthread_join(writer, NULL);
    for (int i = 0; i < SLEEPERS; i++) pthread_join(sleepers[i].thread, NULL), stops += atomic_load(&sleepers[i].stops);
    printf("ok: %lu, stops: %lu\n", (unsigned long)atomic_load(&sleepers[0].next), (unsigned long)stops);
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 4) return fprintf(stderr, "usage: torn SEED MILLISECONDS ENOUGH|sleep|stop\n"), 2;
    uint64_t seed = strtoull(argv[1], NULL, 10) * 2 + 1, length = strtoull(argv[2], NULL, 10) * ms;
    alarm((unsigned)(length / (1000 * ms)) + 30);
    if (!strcmp(argv[3], "sleep") || !strcmp(argv[3], "stop")) return slumber(seed, fmq_now() + length, argv[3][1] == 't');
    return torrent(seed, fmq_now() + length, strtoull(argv[3], NULL, 10));
}
