/* A hostile process at the other end of a queue: it writes noise into the queue's memory, before the queue is opened, between
 * calls, and by a thread while calls run. Whatever it writes, a call of libfmq returns what fmq.h documents, with a reason; it writes
 * and shows nothing beyond the ring; and no descriptor stays open. Compiled with sanitizers.
 *
 *     fuzz_memory CASES SEED        prints how many calls were accepted and refused: open, role, transfer, look, wait
 */
#define _GNU_SOURCE
#include "fmq.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum step { OPEN, ROLE, TRANSFER, LOOK, WAIT, STEPS };
enum { PAGE = 4096, MOST_ENDS = 4, CANARY = 0xA5, SEATS = 4096, SEAT = 128 };
static const uint64_t MOMENT = 200000; /* ns: what a call may wait */

static struct {
    uint64_t random, control, ring; /* bytes before the ring, and of it */
    uint64_t capacity, element;
    int flavour;
    fmq_queue *queue;
    fmq_queue_end *ends[MOST_ENDS];
    bool writes[MOST_ENDS];
    unsigned char *memory; /* the peer's own mapping */
    size_t bytes;
} world;
static uint64_t accepted[STEPS], refused[STEPS];

static void stop(const char *why, int64_t result) {
    fprintf(stderr, "fuzz_memory: %s (%lld, '%s')\n", why, (long long)result, fmq_queue_why());
    abort();
}

static uint32_t draw(uint64_t *state, uint32_t below) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33) % below;
}

static uint32_t any(uint32_t below) { return draw(&world.random, below); }

/* ---- the peer ------------------------------------------------------------------------------------------------------ */

static uint64_t nasty(uint64_t *state, uint64_t was) {
    uint64_t head = *(volatile uint64_t *)(world.memory + 128), small = draw(state, 16);
    switch (draw(state, 9)) {
    case 0: return was + small - 8;
    case 1: return head + small - 8;
    case 2: return head + world.capacity + small - 8;
    case 3: return head - world.capacity + small - 8;
    case 4: return small;
    case 5: return UINT64_MAX - small;
    case 6: return small & 1 ? UINT64_C(1) << 30 | small : small & 2 ? UINT64_C(1) << 31 | 42 : small << 32;
    case 7: return was ^ UINT64_C(1) << draw(state, 64);
    default: return (uint64_t)draw(state, UINT32_MAX) << 32 | draw(state, UINT32_MAX);
    }
}

/* Where it writes: to words that have a meaning, mostly, and sometimes anywhere, also into the ring. */
static void scribble(uint64_t *state) {
    static const uint16_t words[] = {0, 8, 16, 24, 32, 128, 128, 136, 144, 160, 256, 256, 272, 384, 512, 640, 768, 896, 1024, 3072};
    size_t at = words[draw(state, sizeof words / sizeof *words)];
    if (draw(state, 4) == 0) at = draw(state, (uint32_t)(world.control + world.ring) / 8) * 8;
    else if (world.flavour == FMQ_QUEUE_BROADCAST && draw(state, 2)) at = SEATS + draw(state, 3) * SEAT + draw(state, 4) * 8;
    uint64_t *word = (uint64_t *)(void *)(world.memory + at);
    if (at + 8 <= world.control + world.ring) __atomic_store_n(word, nasty(state, __atomic_load_n(word, __ATOMIC_RELAXED)), __ATOMIC_RELAXED);
}

static struct {
    pthread_t thread;
    _Atomic bool is_over;
    uint64_t random;
} storm;

static void *scribble_on(void *unused) {
    (void)unused;
    while (!atomic_load(&storm.is_over)) scribble(&storm.random);
    return NULL;
}

/* ---- what calls may say -------------------------------------------------------------------------------------------- */

static const int open_errors[] = {-EPROTO, 0}, role_errors[] = {-EPROTO, -EADDRINUSE, 0};
static const int transfer_errors[] = {-EAGAIN, -ETIMEDOUT, -EMSGSIZE, -EPIPE, -ESHUTDOWN, -EOVERFLOW, -ESTALE, -EPROTO, -EBUSY, 0};
static const int record_errors[] = {-EINVAL, -EAGAIN, -ETIMEDOUT, -EMSGSIZE, -EPIPE, -ESHUTDOWN, -ESTALE, -EPROTO, -EBUSY, 0};
static const int commit_errors[] = {-EINVAL, -EOVERFLOW, -ESTALE, -EPROTO, 0}, wait_errors[] = {-ETIMEDOUT, -EBUSY, 0};

static bool judge(enum step step, int64_t result, int64_t most, const int *errors) {
    if (result >= 0 ? result > most : !*fmq_queue_why()) stop(result >= 0 ? "more than there can be" : "no reason", result);
    bool is_known = result >= 0;
    for (; !is_known && *errors; errors++) is_known = result == *errors;
    if (!is_known) stop("a result that fmq.h does not document here", result);
    (result < 0 ? refused : accepted)[step]++;
    return result >= 0;
}

/* ---- calls --------------------------------------------------------------------------------------------------------- */

static uint64_t some_deadline(void) { return any(4) ? 0 : fmq_now() + any((uint32_t)MOMENT); }

static void touch(int i, const fmq_queue_spans *s, uint64_t n) {
    static volatile unsigned char sum;
    const unsigned char *ring = s->second, *first = s->first;
    if (s->n_first + s->n_second != n || first < ring || first + s->n_first * world.element > ring + world.capacity * world.element)
        stop("spans that are not in the ring", i);
    if (s->n_second && s->n_second * world.element > (uint64_t)(first - ring)) stop("spans that overlap", i);
    for (uint64_t k = 0; k < s->n_first * world.element; k++) sum ^= first[k];
    for (uint64_t k = 0; k < s->n_second * world.element; k++) sum ^= ring[k];
    if (world.writes[i]) memset(s->first, 7, s->n_first * world.element), memset(s->second, 7, s->n_second * world.element);
}

static void transfer(int i) {
    fmq_queue_end *end = world.ends[i];
    uint64_t n = any((uint32_t)world.capacity + 2), fits = n <= world.capacity ? n : 0;
    unsigned char *exact = malloc(fits * world.element + 1); /* one more: not NULL, and AddressSanitizer sees the end */
    memset(exact, 3, fits * world.element);
    if (any(2)) {
        int r = world.writes[i] ? fmq_queue_write(end, exact, n, some_deadline()) : fmq_queue_read(end, exact, n, some_deadline());
        judge(TRANSFER, r, 0, transfer_errors);
    } else {
        fmq_queue_spans spans;
        if (judge(TRANSFER, fmq_queue_reserve(end, n, &spans, some_deadline()), 0, transfer_errors)) {
            touch(i, &spans, n);
            judge(TRANSFER, fmq_queue_commit(end, any((uint32_t)n + 2)), 0, commit_errors);
        }
    }
    free(exact);
}

/* On a queue of bytes; on another one -EINVAL is documented. */
static void send_or_receive(int i) {
    uint64_t n = any(200);
    unsigned char *exact = calloc(1, n + 1);
    if (world.writes[i]) judge(TRANSFER, fmq_queue_send(world.ends[i], exact, n, some_deadline()), 0, record_errors);
    else judge(TRANSFER, fmq_queue_receive(world.ends[i], exact, n, some_deadline()), (int64_t)n, record_errors);
    free(exact); /* so that a part that comes later to this place would be seen */
}

static void manage(int i) {
    static const int errors[] = {-EINVAL, -EMSGSIZE, -EBUSY, -EPROTO, -ESTALE, 0};
    fmq_queue_listener found[2];
    judge(LOOK, fmq_queue_get_readers(world.ends[i], found, 2), 64, errors);
    judge(LOOK, fmq_queue_evict(world.ends[i], any(4), any(3)), 0, errors);
    judge(LOOK, fmq_queue_position(world.ends[i]), INT64_MAX, errors);
    judge(LOOK, fmq_queue_pollable(world.ends[i], any((uint32_t)world.capacity + 2)), INT_MAX, errors);
}

static void look(int i) {
    static const int errors[] = {-EINVAL, -EPROTO, -ESTALE, -EOVERFLOW, -EPIPE, -ESHUTDOWN, 0};
    bool is_stream = world.flavour == FMQ_QUEUE_UNSYNCHRONIZED && !world.writes[i];
    judge(LOOK, fmq_queue_available(world.ends[i]), is_stream ? INT64_MAX : (int64_t)world.capacity, errors);
    judge(LOOK, fmq_queue_get_peer(world.ends[i]), FMQ_PEER_DEAD, errors);
    judge(LOOK, fmq_queue_lost(world.ends[i]), INT64_MAX, errors);
    judge(LOOK, fmq_queue_keep_latest(world.ends[i], any(2 * (uint32_t)world.capacity)), 0, errors);
}

static void wait_any(void) {
    fmq_queue_end *const *ends = world.ends;
    uint8_t ready[MOST_ENDS];
    unsigned n = 0;
    while (n < MOST_ENDS && ends[n]) n++;
    if (n) judge(WAIT, fmq_queue_wait_any(ends, n, ready, fmq_now() + any((uint32_t)MOMENT)), n, wait_errors);
}

static void take_role(int i) {
    bool is_taken;
    if (world.ends[i]) {
        int r = fmq_queue_leave(world.ends[i]);
        if (r) stop("leaving failed", r);
        world.ends[i] = NULL;
    }
    world.writes[i] = i == 0;
    is_taken = judge(ROLE, (i ? fmq_queue_reader : fmq_queue_writer)(world.queue, &world.ends[i]), 0, role_errors);
    if (!is_taken) world.ends[i] = NULL;
    else fmq_queue_spin(world.ends[i], any(3) * 1000);
}

static void one_call(void) {
    int n_ends = world.flavour == FMQ_QUEUE_SYNCHRONIZED ? 2 : MOST_ENDS, i = (int)any((uint32_t)n_ends);
    if (!world.ends[i] || any(16) == 0) take_role(i);
    else if (any(8) == 0) look(i);
    else if (any(8) == 0) wait_any();
    else if (any(8) == 0) manage(i);
    else if (world.element == 1 && any(2)) send_or_receive(i);
    else transfer(i);
}

/* ---- a queue ------------------------------------------------------------------------------------------------------- */

static int new_memory(void) {
    static const uint32_t sizes[] = {1, 3, 8, 13, 24, 64, 4096};
    world.element = sizes[any(7)], world.capacity = 1 + any(any(2) ? 8 : 600), world.flavour = 1 + (int)any(3);
    world.control = world.flavour == FMQ_QUEUE_BROADCAST ? 3 * PAGE : PAGE, world.ring = world.capacity * world.element;
    fmq_queue *made;
    int r = fmq_queue_create(NULL, NULL, (uint32_t)world.element, world.capacity, world.flavour, &made);
    if (r) stop("no queue", r);
    int fd = fmq_queue_fd(made);
    struct stat status;
    if (fd < 0 || fmq_queue_close(made) || fstat(fd, &status)) stop("no memory of a queue", fd);
    world.bytes = (size_t)status.st_size;
    world.memory = mmap(NULL, world.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (world.memory == MAP_FAILED) stop("cannot map it", -errno);
    memset(world.memory + world.control + world.ring, CANARY, world.bytes - world.control - world.ring);
    return fd;
}

/* The same memory, but fewer bytes of it, and sealed. */
static int shorter_copy(int fd) {
    int copy = memfd_create("shorter", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    size_t left = any((uint32_t)(world.bytes / PAGE)) * PAGE + any(2) * any(PAGE);
    if (write(copy, world.memory, left) != (ssize_t)left || fcntl(copy, F_ADD_SEALS, F_SEAL_SHRINK)) stop("no copy", -errno);
    return close(fd), copy;
}

static void check_canary(void) {
    for (size_t i = world.control + world.ring; i < world.bytes; i++)
        if (world.memory[i] != CANARY) stop("bytes beyond the ring were written", (int64_t)i);
}

/* What the peer wrote before it was opened counts, if the memory suffices for it. */
static void believe(const fmq_queue_shape *shape) {
    world.capacity = shape->capacity, world.element = shape->element_bytes, world.flavour = shape->flavour;
    world.control = world.flavour == FMQ_QUEUE_BROADCAST ? 3 * PAGE : PAGE, world.ring = world.capacity * world.element;
    if (world.control + world.ring > world.bytes) stop("a queue that is larger than its memory", 0);
    memset(world.memory + world.control + world.ring, CANARY, world.bytes - world.control - world.ring);
}

static void one_case(uint64_t seed) {
    memset(&world, 0, sizeof world), world.random = seed;
    int fd = new_memory();
    bool is_short = any(8) == 0, is_storm = any(8) == 0;
    for (uint32_t n = any(2) * any(4); n; n--) scribble(&world.random);
    if (is_short) fd = shorter_copy(fd);
    if (judge(OPEN, fmq_queue_open_fd(fd, any(4) ? NULL : "<f4", &world.queue), 0, open_errors)) {
        fmq_queue_shape shape;
        if (fmq_queue_get_shape(world.queue, &shape)) stop("no shape", 0);
        believe(&shape);
        /* not before: it would write where the ring no longer is */
        if (is_storm) atomic_store(&storm.is_over, false), storm.random = seed, pthread_create(&storm.thread, NULL, scribble_on, NULL);
        for (uint32_t n = 8 + any(32); n && world.capacity < 10000 && world.element <= PAGE; n--) {
            for (uint32_t k = any(3); k; k--) scribble(&world.random);
            one_call();
        }
        if (is_storm) atomic_store(&storm.is_over, true), pthread_join(storm.thread, NULL);
        for (int i = 0; i < MOST_ENDS; i++)
            if (world.ends[i] && fmq_queue_leave(world.ends[i])) stop("leaving failed", i);
        if (fmq_queue_close(world.queue)) stop("closing failed", 0);
    }
    if (!is_short) check_canary();
    munmap(world.memory, world.bytes), close(fd);
}

/* ---- all of them --------------------------------------------------------------------------------------------------- */

static long descriptors(void) {
    DIR *folder = opendir("/proc/self/fd");
    long n = 0;
    while (readdir(folder)) n++;
    return closedir(folder), n;
}

int main(int argc, char **argv) {
    if (argc != 3) return fprintf(stderr, "usage: fuzz_memory CASES SEED\n"), 2;
    uint64_t cases = strtoull(argv[1], NULL, 10), seed = strtoull(argv[2], NULL, 10);
    for (uint64_t i = 0; i < 100; i++) one_case(seed + i); /* threads start, and keep what they need */
    long before = descriptors();
    for (uint64_t i = 100; i < cases; i++) one_case(seed + i);
    if (descriptors() != before) stop("descriptors stay open", descriptors() - before);
    for (int i = 0; i < STEPS; i++) printf("%llu %llu\n", (unsigned long long)accepted[i], (unsigned long long)refused[i]);
    return 0;
}
