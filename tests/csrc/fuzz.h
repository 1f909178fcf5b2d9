/* Shared by fuzz_attach.c and fuzz_peer.c, whose inputs are two scripts: calls, and what the peer writes between two
 * accesses of a call and how sleeps end. Compiled with -include scheduled.h and libFuzzer.
 *
 * Whatever the input: only documented results, no access outside the page and the exact ring (AddressSanitizer), no call
 * that does not end (time is a fake that only looking and sleeping moves), and -EPROTO is for good.
 */
#ifndef FUZZ_H
#define FUZZ_H
#include "scheduled.h"

#include "fmq/api.h"
#include "fmq/futex.h"
#include "fmq/layout.h"
#include "fmq/ring.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ROLES = 3, MOST_STEPS = 500000, TOKENS = 4 };
static const uint64_t SLEEP_NS = 200000, LOOK_NS = 100;

static struct {
    const uint8_t *calls, *calls_end;     /* what is left of the first script */
    const uint8_t *peer, *peer_next, *end; /* and the second; NULL: no peer */
    bool storm;                           /* the peer's script begins again at its end */
} input;

static struct {
    fmq_control *control;
    unsigned char *ring;
    fmq_shape shape;
    fmq_end *ends[ROLES];
    bool lost[ROLES]; /* -EPROTO was returned */
    uint64_t reserved[ROLES];
    int64_t tokens[TOKENS];
    int hang_on[TOKENS]; /* the role of each */
} world;

static uint64_t steps, fake_now;
static int until_scribble;

static void fail(const char *why, int64_t result) {
    fprintf(stderr, "fuzz: %s (%ld)\n", why, (long)result);
    abort();
}

static uint8_t take(void) { return input.calls < input.calls_end ? *input.calls++ : 0; }

static bool peer_goes_on(void) {
    if (input.storm && input.peer_next == input.end) input.peer_next = input.peer;
    return input.peer_next < input.end;
}
static uint8_t take_of_peer(void) { return peer_goes_on() ? *input.peer_next++ : 0; }

/* ---- the peer ------------------------------------------------------------------------------------------------------ */

static uint64_t nasty(uint8_t how, const uint64_t *word) {
    uint64_t small = how & 15, other = atomic_load_explicit(&world.control->head.counter, memory_order_relaxed);
    switch (how >> 4 & 7) {
    case 0: return *word + small - 8;
    case 1: return other + small - 8;
    case 2: return other + world.shape.capacity + small - 8;
    case 3: return small;
    case 4: return UINT64_MAX - small;
    case 5: return small & 1 ? FUTEX_OWNER_DIED | small : small & 2 ? LIFE_RELEASED : FUTEX_WAITERS | 42;
    case 6: return *word ^ (UINT64_C(1) << (small * 4 + 3));
    default: return other - world.shape.capacity + small - 8;
    }
}

static void scribble(void) {
    static const uint16_t offsets[16] = {128, 128, 128, 136, 136, 144, 256, 256, 256, 264, 384, 512, 640, 768, 896, 0};
    uint8_t where = take_of_peer(), how = take_of_peer();
    until_scribble = take_of_peer() % 32;
    size_t offset = where < 240 ? offsets[where % 16] : (size_t)where % 8 * 8;
    uint64_t *word = (uint64_t *)((char *)world.control + offset);
    *word = nasty(how, word);
}

void step_before(const volatile void *word) {
    (void)word;
    static bool inside;
    if (++steps > MOST_STEPS) fail("a call does not end", 0);
    if (!input.peer || inside || until_scribble--) return;
    inside = true;
    if (peer_goes_on()) scribble();
    else until_scribble = INT32_MAX;
    inside = false;
}

int step_aside(void) { return step_before(NULL), 0; }

/* ---- the kernel ---------------------------------------------------------------------------------------------------- */

static jmp_buf bridge_sleeps;
static bool in_bridge;
static void *(*bridge_body)(void *);
static void *bridge_argument;

static fmq_process process = {.version = FMQ_PROCESS_VERSION};
fmq_process *fmq_this_process(void) { return &process; }
uint32_t futex_cpu(void) { return 1; } /* the machine may move us; a run has to replay all the same */
uint64_t futex_now(void) { return step_before(NULL), fake_now += LOOK_NS; }

static int sleep_until_script_says(uint64_t deadline, bool is_new) {
    step_before(NULL);
    uint8_t how = peer_goes_on() ? take_of_peer() % 8 : 7;
    fake_now += SLEEP_NS;
    if (how < 2) return 0;
    if (how < 4) return -EAGAIN;
    if (how == 4) return -EINTR;
    if (how == 5 && is_new) return -ENOSYS;
    if (deadline == FMQ_FOREVER) return -EINTR;
    if (fake_now < deadline) fake_now = deadline;
    return -ETIMEDOUT;
}

static void turn_of_the_bridge(void);

int futex_wait(_Atomic uint32_t *word, uint32_t expected, uint32_t mask, uint64_t deadline) {
    (void)word, (void)expected, (void)mask;
    if (deadline == FMQ_FOREVER) return turn_of_the_bridge(), 0; /* fmq_unhang waits until that thread has heard */
    return sleep_until_script_says(deadline, false);
}

int futex_wait_either(_Atomic uint32_t *a, uint32_t in_a, _Atomic uint32_t *b, uint32_t in_b, _Atomic uint32_t *own, uint32_t in_own,
                      uint64_t deadline) {
    (void)a, (void)in_a, (void)b, (void)in_b, (void)own, (void)in_own;
    return sleep_until_script_says(deadline, true);
}

int futex_wait_all(futex_entry *entries, unsigned n, uint64_t deadline) {
    if (in_bridge) longjmp(bridge_sleeps, 1);
    if (!n || n > FUTEX_MOST) return -EINVAL; /* as the kernel does */
    for (unsigned i = 0; i < n; i++)
        if (!entries[i].address) fail("sleeps on nothing", i);
    int r = sleep_until_script_says(deadline, true);
    return r ? r : (int)(steps % n);
}

void futex_wake(_Atomic uint32_t *word, int count, uint32_t mask) { (void)count, (void)mask, step_before(word); }
void futex_wake_private(_Atomic uint32_t *word) { step_before(word); }

int thread_start(void *(*body)(void *), void *argument, const char *name) {
    (void)name;
    if (!bridge_body) bridge_body = body, bridge_argument = argument;
    return 0;
}

/* What the bridge's thread does between two sleeps. */
static void turn_of_the_bridge(void) {
    if (!bridge_body) return;
    in_bridge = true;
    if (!setjmp(bridge_sleeps)) bridge_body(bridge_argument);
    in_bridge = false;
}

/* ---- calls --------------------------------------------------------------------------------------------------------- */

static void expect(int64_t r, int64_t most, int role, const int *also) {
    static const int always[] = {-EAGAIN, -ETIMEDOUT, -EINTR, -EPIPE, -ESHUTDOWN, -EPROTO, -EMSGSIZE, -EBUSY, 0};
    bool fine = r >= 0 && r <= most;
    for (const int *p = always; *p; p++) fine = fine || r == *p;
    for (const int *p = also; *p; p++) fine = fine || r == *p;
    if (!fine) fail("a result that is not documented", r);
    if (role < 0) return;
    if (world.lost[role] && r != -EPROTO && r != -EMSGSIZE && r != -EBUSY) fail("-EPROTO was not for good", r);
    if (r == -EPROTO) world.lost[role] = true;
    const fmq_end *e = world.ends[role];
    if (e->cursor.slot >= e->ring.capacity) fail("slot outside the ring", (int64_t)e->cursor.slot);
    if (!e->overwrites && !e->cursor.broken && ring_known(e) > e->ring.capacity) fail("more than full", (int64_t)ring_known(e));
}

static const int none[] = {0}, open_errors[] = {-EINVAL, -EPROTONOSUPPORT, -EOPNOTSUPP, 0};
static const int read_errors[] = {-EOVERFLOW, -EROFS, 0}, commit_errors[] = {-EINVAL, -EOVERFLOW, 0};
static const int any_errors[] = {-EINVAL, -EROFS, 0}, bridge_errors[] = {-EROFS, -ENOSPC, -EALREADY, 0};

static bool open_end(int role) {
    world.lost[role] = false;
    world.reserved[role] = 0;
    for (int i = 0; i < TOKENS; i++) /* the bridge would look at an end that is gone */
        if (world.hang_on[i] == role) fmq_unhang(world.tokens[i]), world.tokens[i] = -1;
    if (world.ends[role]) fmq_free(world.ends[role]);
    world.ends[role] = NULL;
    int r = fmq_open(world.control, world.ring, &world.shape, role, &world.ends[role]);
    expect(r, 0, -1, open_errors);
    return !r;
}

static uint64_t some_deadline(void) {
    uint8_t how = take();
    return how < 64 ? 0 : how == 255 ? FMQ_FOREVER : fake_now + (how - 63) * UINT64_C(10000);
}

static void touch(const fmq_spans *s, uint64_t n, int role) {
    uint64_t capacity = world.shape.capacity, size = world.shape.element_bytes;
    if (s->first + s->second != n || s->start + s->first > capacity || s->second > s->start) fail("spans", (int64_t)n);
    unsigned char *a = world.ring + s->start * size, sum = 0;
    for (uint64_t i = 0; i < s->first * size; i++) role == FMQ_WRITER ? a[i]++ : (sum ^= a[i]);
    for (uint64_t i = 0; i < s->second * size; i++) role == FMQ_WRITER ? world.ring[i]++ : (sum ^= world.ring[i]);
    (void)sum;
}

static void transfer(int role, int how) {
    uint64_t n = take() % (world.shape.capacity + 2), fits = n <= world.shape.capacity ? n : 0;
    uint64_t spin = take() % 4 * 1000, deadline = some_deadline();
    unsigned char *buffer = calloc(1, fits * world.shape.element_bytes); /* exactly, so that AddressSanitizer sees all */
    fmq_end *end = world.ends[role];
    fmq_spans s;
    int r;
    if (how == 0) {
        r = role == FMQ_WRITER ? fmq_write(end, buffer, n, spin, deadline) : fmq_read(end, buffer, n, spin, deadline);
        expect(r, 0, role, read_errors);
    } else if (how == 1) {
        r = fmq_reserve(end, n, &s, spin, deadline);
        expect(r, 0, role, read_errors);
        if (!r) touch(&s, n, role), world.reserved[role] = n;
    } else {
        world.lost[role] = false; /* what was reserved may be committed; a broken end tells it in the next call */
        r = fmq_commit(end, n);
        expect(r, 0, role, commit_errors);
        if (r != -EINVAL && n > world.reserved[role]) fail("committed more than was reserved", r);
        world.reserved[role] = 0;
        world.lost[role] = end->cursor.broken;
    }
    free(buffer);
}

static void exchange(int in) {
    if (in == FMQ_WRITER) in = FMQ_READER;
    uint64_t n = take() % (world.shape.capacity + 2), capacity = take() % (3 * world.shape.capacity + 2);
    uint64_t size = world.shape.element_bytes, spin = take() % 4 * 1000;
    unsigned char *packet = calloc(1, (n <= world.shape.capacity ? n : 0) * size), *buffer = calloc(1, capacity * size);
    fmq_channel c = {world.ends[FMQ_WRITER], world.ends[in], buffer, capacity * size, spin, spin};
    int64_t r = take() % 2 ? fmq_exchange(&c, packet, n * size, some_deadline()) : fmq_hot_calls()->exchange_start(&c, packet, n * size);
    if (world.shape.flavour == FMQ_SYNCHRONIZED) expect(r, (int64_t)(capacity * size), -1, read_errors);
    else expect(r, -1, -1, (const int[]){-EINVAL, 0});
    world.lost[FMQ_WRITER] = c.out->cursor.broken, world.lost[in] = c.in->cursor.broken;
    free(packet), free(buffer);
}

static void wait_any(void) {
    uint8_t ready[ROLES];
    unsigned n = take() % (world.ends[FMQ_OBSERVER] ? 4 : 3);
    expect(fmq_wait_any(world.ends, n, ready, some_deadline()), n, -1, any_errors);
    for (int i = 0; i < ROLES; i++) world.lost[i] = world.ends[i] && world.ends[i]->cursor.broken;
}

static void event(void) {
    fmq_end *const *peers = world.ends;
    void *flag = &world.control->event;
    uint32_t mask = take(), bits = 0;
    if (take() % 2) expect(fmq_event_wake(flag, mask), 0, -1, open_errors);
    uint8_t how = take();
    expect(fmq_event_wait(flag, mask, peers, how % 3, fake_now + how * UINT64_C(10000), &bits), 0, -1, open_errors);
    if (bits & ~mask) fail("bits of somebody else", bits);
}

static void bridge(int role) {
    static int nowhere = -1;
    if (nowhere < 0) nowhere = open("/dev/null", O_WRONLY);
    int which = take() % TOKENS;
    int64_t *token = &world.tokens[which];
    int64_t again = take() % 2 ? *token : -1;
    if (again < 0) fmq_unhang(*token);
    int64_t r = fmq_bridge(world.ends[role], take(), nowhere, again);
    expect(r, INT64_MAX, -1, bridge_errors);
    if (again < 0 || r >= 0 || r == -EALREADY) *token = r, world.hang_on[which] = role; /* else the old bell still hangs */
    for (int i = take() % 4; i; i--) turn_of_the_bridge();
}

static void look(int role) {
    fmq_end *end = world.ends[role];
    bool stream = end->overwrites && role != FMQ_WRITER;
    expect(fmq_available(end), stream ? INT64_MAX : (int64_t)world.shape.capacity, role, none);
    expect(fmq_position(end), INT64_MAX, -1, none);
    if (fmq_peer(end) < FMQ_NOBODY || fmq_peer(end) > FMQ_DEAD || (fmq_lost(end) && !stream)) fail("peer or lost", role);
    if (stream) expect(fmq_keep_latest(end, take()), 0, role, none);
    else if (fmq_keep_latest(end, 1) != -EINVAL) fail("keep_latest of a synchronized end", 0);
}

static void notify(int role, bool on) {
    expect(fmq_notify(world.ends[role], on ? &world.control->event : NULL, take()), 0, -1, none);
}

/* False when an end could not be opened again. */
static bool one_call(void) {
    uint8_t what = take();
    int role = what % ROLES;
    steps = 0;
    if (!world.ends[role]) role = FMQ_READER;
    switch (what / ROLES % 12) {
    case 0: case 1: return transfer(role, 0), true;
    case 2: case 3: return transfer(role, 1), true;
    case 4: case 5: return transfer(role, 2), true;
    case 6: return look(role), true;
    case 7: return exchange(role), true;
    case 8: return wait_any(), true;
    case 9: return event(), true;
    case 10: return bridge(role), true;
    default:
        if (what & 128) return notify(role, what & 64), true;
        fmq_stop(world.ends[role]);
        if (fmq_available(world.ends[role]) != -ECANCELED) fail("stopped", 0);
        return open_end(role);
    }
}

/* ---- a world ------------------------------------------------------------------------------------------------------- */

static void make_page(void) {
    world.control = aligned_alloc(FMQ_PAGE, FMQ_PAGE);
    memset(world.control, 0, FMQ_PAGE);
    fake_now = 1000, steps = 0;
    until_scribble = 0;
}

static void run_script(void) {
    uint64_t bytes = fmq_ring_bytes(world.shape.capacity, world.shape.element_bytes);
    void *exact; /* AddressSanitizer knows its end to the byte */
    if (posix_memalign(&exact, 64, bytes)) fail("no memory", 0);
    world.ring = exact;
    memset(world.ring, 0, bytes);
    for (int i = 0; i < TOKENS; i++) world.tokens[i] = -1;
    bool open = true;
    for (int role = 0; role < ROLES && open; role++)
        if (role != FMQ_OBSERVER || world.shape.flavour == FMQ_UNSYNCHRONIZED) open = open_end(role);
    while (open && input.calls < input.calls_end) open = one_call();
    for (int i = 0; i < TOKENS; i++) fmq_unhang(world.tokens[i]);
    for (int i = 0; i < ROLES; i++)
        if (world.ends[i]) fmq_free(world.ends[i]), world.ends[i] = NULL;
    free(world.ring);
}

static void drop_page(void) { free(world.control); }

#endif
