/* A peer that writes random words over the whole control page, while a victim reads, writes, reserves, exchanges and waits
 * for several ends with deadlines: no crash, no access outside the ring, no hang, and documented results only.
 *
 *   hostile SEED MILLISECONDS [FLAVOUR]
 *
 * Run under Address- and UBSanitizer; the mapping stands between guard pages. An alarm ends a hang.
 */
#define _GNU_SOURCE
#include <stdint.h>

#include "fmq/api.h"
#include "fmq/futex.h"
#include "fmq/layout.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

enum { CAPACITY = 13, ELEMENT = 24 };
static const uint64_t us = 1000;

static _Atomic int over;
static uint64_t *page;
static uint64_t words, control_bytes; /* of the control pages */
static fmq_shape shape;

static uint64_t random_of(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

/* Random in ways that hurt: anything, near another counter, a life state, a bit of what is there, zero. */
static uint64_t nasty(uint64_t *random) {
    uint64_t near = page[128 / 8 * (1 + random_of(random) % 2)];
    switch (random_of(random) % 6) {
    case 0: return random_of(random);
    case 1: return near + random_of(random) % 32 - 16;
    case 2: return UINT64_MAX - random_of(random) % 32;
    case 3: return random_of(random) & (FUTEX_OWNER_DIED | FUTEX_WAITERS | 7);
    case 4: return near ^ (UINT64_C(1) << random_of(random) % 64);
    default: return random_of(random) % 2;
    }
}

static void *scribble(void *seed) {
    uint64_t random = (uintptr_t)seed;
    while (!atomic_load(&over)) {
        uint64_t i = random_of(&random) % words;
        if (i >= 16 && shape.flavour == FMQ_BROADCAST && random_of(&random) % 2) i = FMQ_SEATS_AT / 8 + i % 5; /* the victim's own seat */
        if (i < 16 && random_of(&random) % 64) continue; /* the geometry seldom, or nothing could be opened */
        atomic_store((_Atomic uint64_t *)&page[i], nasty(&random));
        futex_wake((_Atomic uint32_t *)&page[random_of(&random) % words], 1, UINT32_MAX);
        for (uint64_t rest = random_of(&random) % 2000; rest; rest--) atomic_load(&over);
    }
    return NULL;
}

static void expect(int64_t r, int64_t most, bool opening) {
    bool documented = r == -EAGAIN || r == -ETIMEDOUT || r == -EINTR || r == -EPIPE || r == -ESHUTDOWN || r == -EPROTO ||
                      r == -EMSGSIZE || (r == -EOVERFLOW && shape.flavour == FMQ_UNSYNCHRONIZED) || (r == -ESTALE && shape.flavour == FMQ_BROADCAST);
    if (opening) documented = documented || r == -EINVAL || r == -EPROTONOSUPPORT || r == -EOPNOTSUPP;
    if ((r >= 0 && r <= most) || documented) return;
    fprintf(stderr, "hostile: result %ld is not documented\n", (long)r);
    abort();
}

static fmq_end *open_again(int role) {
    fmq_end *end = NULL;
    for (;;) {
        bool is_seat = shape.flavour == FMQ_BROADCAST && role == FMQ_READER;
        int r = fmq_open(page, (char *)page + control_bytes, &shape, is_seat ? FMQ_SEAT : role, &end);
        expect(r, 0, true);
        if (!r) return end;
        fmq_format(page, &shape);
    }
}

/* One call; true when the end is of no more use. */
static bool use(fmq_end *end, int role, unsigned char *ring, uint64_t *random) {
    unsigned char buffer[CAPACITY * ELEMENT] = {0};
    uint64_t n = random_of(random) % (CAPACITY + 2), spin = random_of(random) % 3 * us;
    uint64_t deadline = random_of(random) % 4 ? fmq_now() + random_of(random) % 200 * us : 0;
    int64_t r = 0;
    fmq_spans s = {0};
    int64_t most = shape.flavour == FMQ_UNSYNCHRONIZED && role == FMQ_READER ? INT64_MAX : CAPACITY;
    switch (random_of(random) % 3) {
    case 0: r = role == FMQ_WRITER ? fmq_write(end, buffer, n, spin, deadline) : fmq_read(end, buffer, n, spin, deadline); break;
    case 1: expect(r = fmq_available(end), most, false); return r == -EPROTO || r == -ESTALE;
    default:
        r = fmq_reserve(end, n, &s, spin, deadline);
        if (r) break;
        for (uint64_t i = 0; i < s.first * ELEMENT; i++) ring[s.start * ELEMENT + i]++;
        for (uint64_t i = 0; i < s.second * ELEMENT; i++) ring[i]++;
        r = fmq_commit(end, random_of(random) % (n + 1));
    }
    expect(r, 0, false);
    return r == -EPROTO || r == -ESTALE;
}

static void ask(fmq_end *out, fmq_end *in, uint64_t *random) {
    unsigned char buffer[CAPACITY * ELEMENT];
    uint64_t n = random_of(random) % (CAPACITY + 2), wait = random_of(random) % 200 * us;
    unsigned char packet[(CAPACITY + 1) * ELEMENT] = {0};
    fmq_channel channel = {out, in, buffer, sizeof buffer, 0, 0};
    expect(fmq_exchange(&channel, packet, n * ELEMENT, fmq_now() + wait), sizeof buffer, false);
}

/* Both ends at once; a bell on each, which the bridge's thread rings whatever the words say; an event flag that every
 * transfer rings. */
static void watch(fmq_end **ends, int eventfd, uint64_t *random) {
    uint8_t ready[2];
    expect(fmq_wait_any(ends, 2, ready, fmq_now() + random_of(random) % 200 * us), 2, false);
    int64_t tokens[2];
    for (int i = 0; i < 2; i++) {
        tokens[i] = fmq_bridge(ends[i], random_of(random) % (CAPACITY + 1), eventfd, -1);
        if (tokens[i] != -EALREADY) expect(tokens[i], INT64_MAX, false);
        expect(fmq_notify(ends[i], random_of(random) % 2 ? page + 640 / 8 : NULL, 1), 0, false);
    }
    for (uint64_t rest = random_of(random) % 2000; rest; rest--) atomic_load(&over);
    for (int i = 0; i < 2; i++) fmq_unhang(tokens[i]);
}

int main(int argc, char **argv) {
    if (argc < 3) return fprintf(stderr, "usage: hostile SEED MILLISECONDS [FLAVOUR]\n"), 2;
    uint64_t random = strtoull(argv[1], NULL, 10) * 2 + 1, length = strtoull(argv[2], NULL, 10) * 1000 * us;
    alarm((unsigned)(length / 1000000000) + 30);
    shape = (fmq_shape){CAPACITY, 0, ELEMENT, argc > 3 ? (uint32_t)atoi(argv[3]) : FMQ_SYNCHRONIZED};
    control_bytes = fmq_control_bytes(shape.flavour);
    words = (shape.flavour == FMQ_BROADCAST ? control_bytes : sizeof(fmq_control)) / 8;
    const uint64_t bytes = control_bytes + FMQ_PAGE;
    unsigned char *guarded = mmap(NULL, bytes + 2 * FMQ_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    page = mmap(guarded + FMQ_PAGE, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (page == MAP_FAILED || fmq_format(page, &shape)) return 1;
    fmq_end *ends[2] = {open_again(FMQ_WRITER), open_again(FMQ_READER)};
    pthread_t thread;
    int rings = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (pthread_create(&thread, NULL, scribble, (void *)(uintptr_t)(random * 77 + 1))) return 1;
    uint64_t calls = 0, lost = 0;
    for (uint64_t until = fmq_now() + length; fmq_now() < until; calls++) {
        int role = (int)(random_of(&random) % 2);
        if (random_of(&random) % 8 == 0 && shape.flavour == FMQ_BROADCAST) {
            fmq_reader found[FMQ_SEATS];
            int64_t n = fmq_readers(ends[FMQ_WRITER], found);
            expect(n, FMQ_SEATS, false);
            if (n) expect(fmq_evict(ends[FMQ_WRITER], found[n - 1].seat, found[n - 1].turn), 0, true);
        }
        if (random_of(&random) % 8 == 0) watch(ends, rings, &random);
        if (random_of(&random) % 8 == 0 && shape.flavour == FMQ_SYNCHRONIZED) ask(ends[FMQ_WRITER], ends[FMQ_READER], &random);
        if (!use(ends[role], role, (unsigned char *)page + control_bytes, &random)) continue;
        fmq_free(ends[role]);
        ends[role] = open_again(role);
        lost++;
    }
    atomic_store(&over, 1);
    pthread_join(thread, NULL);
    fmq_free(ends[0]), fmq_free(ends[1]);
    printf("%lu calls, %lu ends lost\n", (unsigned long)calls, (unsigned long)lost);
    return 0;
}
