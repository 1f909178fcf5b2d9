/* What both programs that stream elements share, so that the queue and its floor do the same work around it.
 *
 * Every element carries its number in its first and its last eight bytes, and the consumer compares both: an element
 * that was lost, repeated, reordered or half-copied is an error. That is two stores and two loads of memory which is
 * being copied anyhow. In place, where nothing is copied, the producer fills the whole element and the consumer compares
 * every byte. The consumer looks at the clock PARTS times, after a warm-up: the median part is the figure, so that being
 * descheduled once is in one part and not in the figure. A part is at least twice what the ring holds.
 */
#ifndef STREAM_H
#define STREAM_H

#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LEAST_RING = 65536, BATCHES_IN_RING = 4, PARTS = 64, WARM_UP = 8 /* parts */ };

typedef struct {
    uint64_t bytes, batch; /* of an element; in elements. Powers of two */
    uint64_t capacity;     /* elements; a multiple of batch, so that no batch wraps */
    uint64_t part, warm;   /* elements between two looks at the clock, and before the first */
    uint64_t elements;     /* warm and all parts */
} stream;

/* In memory that both processes see. */
typedef struct {
    double at[PARTS + 1]; /* seconds */
    uint64_t wrong, seen;
    _Atomic int done;
} outcome;

typedef uint64_t pair __attribute__((vector_size(16), may_alias));
typedef uint64_t word __attribute__((may_alias));

static inline double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static inline void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline void *shared(uint64_t bytes) {
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) abort();
    return base;
}

/* A fork whose child does not outlive its parent. */
static inline int fork_pinned(void) {
    int pid = fork();
    pin(pid ? 0 : 1);
    if (!pid) prctl(PR_SET_PDEATHSIG, SIGKILL);
    return pid;
}

static inline unsigned char *new_batch(const stream *s) {
    unsigned char *batch = aligned_alloc(128, (s->batch * s->bytes + 127) & ~UINT64_C(127));
    if (!batch) abort();
    memset(batch, 1, s->batch * s->bytes);
    return batch;
}

/* ---- numbers: for elements that are copied ------------------------------------------------------------------------ */

static inline void number(unsigned char *at, const stream *s, uint64_t n) {
    for (uint64_t i = 0; i < s->batch; i++, at += s->bytes) *(word *)at = *(word *)(at + s->bytes - 8) = n + i;
}

static inline uint64_t misnumbered(const unsigned char *at, const stream *s, uint64_t n) {
    uint64_t difference = 0;
    for (uint64_t i = 0; i < s->batch; i++, at += s->bytes)
        difference |= (*(word *)at ^ (n + i)) | (*(word *)(at + s->bytes - 8) ^ (n + i));
    return difference != 0;
}

/* ---- contents: for elements that are produced and consumed in place ------------------------------------------------ */

static inline void fill(unsigned char *at, const stream *s, uint64_t n) {
    for (uint64_t i = 0; i < s->batch && s->bytes > 8; i++) memset(at + i * s->bytes, (int)(n + i), s->bytes);
    number(at, s, n);
}

static inline uint64_t misfilled(const unsigned char *at, const stream *s, uint64_t n) {
    uint64_t wrong = misnumbered(at, s, n), pairs = s->bytes / 16;
    pair difference = {0, 0};
    for (uint64_t i = 0; i < s->batch; i++, at += s->bytes) {
        uint64_t byte = ((n + i) & 255) * UINT64_C(0x0101010101010101);
        for (uint64_t k = 1; k + 1 < pairs; k++) difference |= ((pair *)at)[k] ^ (pair){byte, byte};
    }
    return wrong | difference[0] | difference[1];
}

/* ---- clock ----------------------------------------------------------------------------------------------------------- */

typedef struct {
    outcome *outcome;
    uint64_t next, part;
    int count;
} laps;

static inline laps laps_of(outcome *o, const stream *s) { return (laps){o, s->warm, s->part, 0}; }

/* Before element n, and once behind the last. */
static inline void tick(laps *l, uint64_t n) {
    if (n != l->next) return;
    l->outcome->at[l->count++] = seconds_now();
    l->next += l->part;
}

/* ---- command line and answer ----------------------------------------------------------------------------------------- */

static inline stream stream_of(char **argv) {
    stream s = {.bytes = strtoull(argv[1], NULL, 10), .batch = strtoull(argv[2], NULL, 10)};
    int fits = (s.bytes == 8 || s.bytes >= 64) && s.batch >= 1 && !(s.bytes & (s.bytes - 1)) && !(s.batch & (s.batch - 1));
    if (!fits) fprintf(stderr, "stream: bytes is 8 or a power of two from 64; batch is a power of two\n"), exit(2);
    uint64_t most = BATCHES_IN_RING * s.batch * s.bytes;
    s.capacity = (most > LEAST_RING ? most : LEAST_RING) / s.bytes;
    s.part = (strtoull(argv[0], NULL, 10) / PARTS / s.batch + 1) * s.batch;
    s.warm = WARM_UP * s.part;
    s.elements = s.warm + PARTS * s.part;
    return s;
}

static inline int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline int answer(const char *peer, const stream *s, const outcome *o) {
    if (o->wrong) return fprintf(stderr, "%s: elements arrived wrong\n", peer), 1;
    double parts[PARTS];
    for (int i = 0; i < PARTS; i++) parts[i] = (o->at[i + 1] - o->at[i]) * 1e9 / (double)s->part;
    qsort(parts, PARTS, sizeof *parts, ascending);
    printf("{\"peer\": \"%s\", \"bytes\": %lu, \"batch\": %lu, \"elements\": %lu, \"p50_ns\": %.4f, \"p99_ns\": %.4f, \"p999_ns\": %.4f, \"max_ns\": %.4f, \"seen\": %.4f}\n",
           peer, (unsigned long)s->bytes, (unsigned long)s->batch, (unsigned long)(PARTS * s->part), parts[PARTS / 2], parts[PARTS * 99 / 100],
           parts[PARTS - 1], parts[PARTS - 1], (double)o->seen / (double)s->elements);
    return 0;
}

#endif
