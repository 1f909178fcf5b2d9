/* No wake-up is lost, whoever is overtaken or killed where: queue.c, sleep.c and ring.c as they are, under a scheduler that runs
 * every interleaving of two sides with at most BUDGET preemptions, on a fake futex that never wakes by itself.
 *
 *   schedules BUDGET      prints one line per scenario: its name and how many schedules it has
 *
 * A side is a coroutine; scheduled.h makes each of its accesses to the control block a point where the other side may
 * run. A schedule is the list of choices made at these points; depth-first search enumerates them all. A schedule fails
 * when somebody sleeps and nobody is left to wake him, or when a side returns what its scenario does not allow.
 */
#include "scheduled.h"

#include "fmq/api.h"
#include "fmq/futex.h"
#include "fmq/layout.h"
#include "fmq/life.h"
#include "fmq/ring.h"
#include "fmq/sleep.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

/* A sleep of reader0 is on one word, and the bridge of its process tells it of the other side's life. */
enum { TOLD = 1 };
enum { SIDES = 2, DEEPEST = 2000, MOST_STEPS = 200000, STACK = 64 * 1024, LIVE = 42 | (int)FUTEX_WAITERS, KILL = SIDES };

typedef struct {
    ucontext_t context;
    char stack[STACK];
    bool done, aside;
    _Atomic uint32_t *sleeps_on[3];
    uint64_t deadline;
    int woken_with;
    int64_t result;
} side;

typedef struct {
    const char *name;
    uint64_t capacity;
    void (*run[SIDES])(void);
    bool (*accepts)(void);
    bool may_kill; /* side 1 may be killed, once, at any point */
    int no_waitv;  /* what futex_waitv answers on this kernel; or TOLD */
    bool unmarked; /* the kernel's walk of the dead side's list has met a page that is gone */
} scenario;

static side sides[SIDES];
static ucontext_t home;
static int running, budget, most_budget;
static bool killed;
static const scenario *now_playing;
static struct { int options, chosen; } trace[DEEPEST];
static int depth, length;

static alignas(FMQ_PAGE) unsigned char memory[2][2 * FMQ_PAGE]; /* queue 0: side 1 writes; queue 1: side 0 writes */
static fmq_end *reader0, *writer0, *reader1, *writer1;
static unsigned char got[8];

static fmq_control *control(int queue) { return (fmq_control *)memory[queue]; }

/* ---- the sides' view: steps and a futex ---------------------------------------------------------------------------- */

static void to_scheduler(void) { swapcontext(&sides[running].context, &home); }

void step_before(const volatile void *word) {
    const unsigned char *p = (const unsigned char *)word;
    bool is_shared = (p >= memory[0] && p < memory[0] + sizeof memory) || (reader0 && word == &reader0->signals.ended);
    if (running >= 0 && is_shared) to_scheduler();
}

int step_aside(void) {
    sides[running].aside = true;
    to_scheduler();
    return 0;
}

uint32_t futex_cpu(void) { return 1; } /* the machine may move us; a run has to replay all the same */
uint64_t futex_now(void) { return 1000; }
static fmq_process process = {.version = FMQ_PROCESS_VERSION};
fmq_process *fmq_this_process(void) { return &process; }

static int sleep_on(_Atomic uint32_t *a, uint32_t in_a, _Atomic uint32_t *b, uint32_t in_b, _Atomic uint32_t *own, uint32_t in_own,
                    uint64_t deadline) {
    step_before(a);
    if (RAW_LOAD(a) != in_a || (b && RAW_LOAD(b) != in_b) || (own && RAW_LOAD(own) != in_own)) return -EAGAIN;
    side *s = &sides[running];
    s->sleeps_on[0] = a;
    s->sleeps_on[1] = b;
    s->sleeps_on[2] = own;
    s->deadline = deadline;
    to_scheduler();
    return s->woken_with;
}

int futex_wait(_Atomic uint32_t *word, uint32_t expected, uint32_t mask, uint64_t deadline) {
    (void)mask;
    return sleep_on(word, expected, NULL, 0, NULL, 0, deadline);
}

int futex_wait_either(_Atomic uint32_t *a, uint32_t in_a, _Atomic uint32_t *b, uint32_t in_b, _Atomic uint32_t *own, uint32_t in_own,
                      uint64_t deadline) {
    return now_playing->no_waitv < 0 ? now_playing->no_waitv : sleep_on(a, in_a, b, in_b, own, in_own, deadline);
}

/* Two ends at most: the words of the second end come third and fourth. */
int futex_wait_all(futex_entry *entries, unsigned n, uint64_t deadline) {
    (void)entries, (void)n, (void)deadline;
    abort(); /* no scenario waits for several queues yet */
}

static void end_sleep(side *s, int result) {
    s->sleeps_on[0] = s->sleeps_on[1] = s->sleeps_on[2] = NULL;
    s->woken_with = result;
}

static void wake_sleepers(_Atomic uint32_t *word) {
    for (int i = 0; i < SIDES; i++)
        for (int k = 0; k < 3; k++)
            if (sides[i].sleeps_on[k] == word) end_sleep(&sides[i], 0);
}

void futex_wake(_Atomic uint32_t *word, int count, uint32_t mask) {
    (void)count, (void)mask;
    step_before(word);
    wake_sleepers(word);
}

void futex_wake_private(_Atomic uint32_t *word) { wake_sleepers(word); }

void futex_release(_Atomic uint32_t *word) {
    step_before(word);
    RAW_STORE(word, LIFE_RELEASED);
    wake_sleepers(word);
}

/* ---- the scheduler ------------------------------------------------------------------------------------------------- */

static void fail(const char *why) {
    fprintf(stderr, "%s: %s; choices:", now_playing->name, why);
    for (int i = 0; i < depth && i < 60; i++) fprintf(stderr, " %d/%d", trace[i].chosen, trace[i].options);
    fprintf(stderr, "; results %ld %ld%s\n", (long)sides[0].result, (long)sides[1].result, killed ? ", killed" : "");
    exit(1);
}

static bool can_run(int i) { return !sides[i].done && !sides[i].sleeps_on[0] && !(i == 1 && killed); }

static void lose_writer1(fmq_end *other) {
    (void)other;
    fmq_lose(writer1);
}

/* Between two steps of the sides, whole. */
static void by_another_thread(void (*tell)(fmq_end *)) {
    int was_running = running;
    running = -1;
    tell(reader0);
    running = was_running;
}

/* What the kernel does at the victim's death. */
static void kill_victim(void) {
    killed = true;
    if (now_playing->unmarked) { /* and the life thread of side 0 sees that descriptors were closed */
        by_another_thread(fmq_lose);
        by_another_thread(lose_writer1);
        return;
    }
    for (int q = 0; q < 2; q++) {
        _Atomic uint32_t *word = q ? &control(q)->reader_life.word : &control(q)->writer_life.word;
        RAW_STORE(word, (uint32_t)FUTEX_OWNER_DIED);
        wake_sleepers(word);
    }
    if (now_playing->no_waitv == TOLD) by_another_thread(sleep_look_again);
}

/* Whom to run next; the one who runs comes first, and leaving him while he could go on costs budget. */
static int list_options(int *options) {
    int n = 0;
    bool goes_on = running >= 0 && can_run(running) && !sides[running].aside;
    if (goes_on) options[n++] = running;
    for (int i = 0; i < SIDES; i++)
        if (can_run(i) && !(goes_on && (i == running || !budget)) && !sides[i].aside) options[n++] = i;
    for (int i = 0; i < SIDES && !n; i++)
        if (can_run(i)) options[n++] = i;
    if (now_playing->may_kill && !killed && !sides[1].done) options[n++] = KILL;
    return n;
}

static int choose(int n) {
    if (n == 1) return 0;
    if (depth == DEEPEST) fail("has too many choices");
    if (depth == length) trace[length].options = n, trace[length++].chosen = 0;
    if (trace[depth].options != n) fail("replay differs");
    return trace[depth++].chosen;
}

static bool let_time_pass(void) {
    for (int k = 1; k <= SIDES; k++) {
        side *s = &sides[(running + k) % SIDES];
        if (!s->sleeps_on[0] || s->deadline == FMQ_FOREVER) continue;
        end_sleep(s, -ETIMEDOUT);
        return true;
    }
    return false;
}

static void play(void) {
    for (long steps = 0;; steps++) {
        if (steps == MOST_STEPS) fail("does not end");
        int options[SIDES + 1], n = list_options(options);
        if (!n && let_time_pass()) continue;
        if (!n) return;
        int next = options[choose(n)];
        if (next == KILL) {
            kill_victim();
            continue;
        }
        if (running >= 0 && next != running && can_run(running) && !sides[running].aside) budget--;
        for (int i = 0; i < SIDES; i++)
            if (i != next) sides[i].aside = false;
        running = next;
        sides[next].aside = false;
        swapcontext(&home, &sides[next].context);
    }
}

static void side_main(void) {
    now_playing->run[running]();
    sides[running].done = true;
    to_scheduler();
}

/* ---- one schedule, and all of them --------------------------------------------------------------------------------- */

static fmq_shape shape(void) { return (fmq_shape){now_playing->capacity, 0, 1, FMQ_SYNCHRONIZED}; }

static fmq_end *open_end(int queue, int role) {
    fmq_end *end = NULL;
    const fmq_shape expected = shape();
    if (fmq_open(memory[queue], memory[queue] + FMQ_PAGE, &expected, role, &end)) fail("cannot open");
    return end;
}

static void set_up(void) {
    running = -1;
    const fmq_shape made = shape();
    for (int q = 0; q < 2; q++) {
        memset(memory[q], 0, sizeof memory[q]);
        if (fmq_format(memory[q], &made)) fail("cannot format");
        RAW_STORE(&control(q)->writer_life.word, (uint32_t)LIVE);
        RAW_STORE(&control(q)->reader_life.word, (uint32_t)LIVE);
    }
    reader0 = open_end(0, FMQ_READER), writer0 = open_end(0, FMQ_WRITER);
    reader1 = open_end(1, FMQ_READER), writer1 = open_end(1, FMQ_WRITER);
    RAW_STORE(&reader0->signals.told, now_playing->no_waitv == TOLD);
    for (int i = 0; i < SIDES; i++) {
        side *s = &sides[i];
        s->done = s->aside = false;
        s->result = -1000;
        end_sleep(s, 0);
        getcontext(&s->context);
        s->context.uc_stack.ss_sp = s->stack;
        s->context.uc_stack.ss_size = STACK;
        makecontext(&s->context, side_main, 0);
    }
    killed = false;
    budget = most_budget;
    depth = 0;
    memset(got, 0, sizeof got);
}

static void tear_down(void) { fmq_free(reader0), fmq_free(writer0), fmq_free(reader1), fmq_free(writer1); }

static bool next_schedule(void) {
    while (length && trace[length - 1].chosen + 1 == trace[length - 1].options) length--;
    if (length) trace[length - 1].chosen++;
    return length > 0;
}

static long explore(const scenario *s) {
    now_playing = s;
    length = 0;
    long n = 0;
    do {
        set_up();
        play();
        for (int i = 0; i < SIDES; i++)
            if (!sides[i].done && !(i == 1 && killed)) fail("sleeps for ever");
        if (!s->accepts()) fail("a result that may not be");
        tear_down();
        n++;
    } while (next_schedule());
    return n;
}

/* ---- scenarios: what the two sides do, and every outcome that is right --------------------------------------------- */

static const unsigned char ab[] = {'a', 'b', 'c'};

static int64_t read_of(uint64_t n) { return fmq_read(reader0, got, n, 0, FMQ_FOREVER); }
static int64_t write_of(const void *from, uint64_t n) { return fmq_write(writer0, from, n, 0, FMQ_FOREVER); }

static void read_one(void) { sides[0].result = read_of(1); }
static void read_two(void) { sides[0].result = read_of(2); }
static void read_three_singly(void) {
    int64_t r = 0;
    for (int i = 0; i < 3 && !r; i++) r = fmq_read(reader0, got + i, 1, 0, FMQ_FOREVER);
    sides[0].result = r;
}
static void write_one(void) { sides[1].result = write_of(ab, 1); }
static void write_two_singly(void) {
    int64_t r = write_of(ab, 1);
    sides[1].result = r ? r : write_of(ab + 1, 1);
}
static void write_three_singly(void) {
    int64_t r = 0;
    for (int i = 0; i < 3 && !r; i++) r = write_of(ab + i, 1);
    sides[1].result = r;
}
static void commit_two(void) {
    fmq_spans spans;
    int64_t r = fmq_reserve(writer0, 2, &spans, 0, FMQ_FOREVER);
    if (!r) memcpy(memory[0] + FMQ_PAGE + spans.start, ab, 2);
    sides[1].result = r ? r : fmq_commit(writer0, 2);
}
static void ask(void) { sides[0].result = fmq_exchange(&(fmq_channel){writer1, reader0, got, 1, 0, 0}, ab, 1, FMQ_FOREVER); }
static void answer(void) {
    unsigned char asked[2] = {0};
    int64_t r = fmq_exchange(&(fmq_channel){writer0, reader1, asked, 1, 0, 0}, NULL, 0, FMQ_FOREVER);
    asked[0] ^= 1;
    sides[1].result = r < 0 ? r : write_of(asked, 1);
}
/* From the return of fmq_stop on nothing of the stopped end may move; what it has read it has read. */
static unsigned tail(void) { return (unsigned)RAW_LOAD(&control(0)->tail.counter); }
static void stop_reader(void) {
    fmq_stop(reader0);
    sides[1].result = tail();
}
static void write_one_and_stop_reader(void) {
    write_of(ab, 1);
    stop_reader();
}
static void release(void) {
    atomic_store(&control(0)->writer_life.word, LIFE_RELEASED);
    futex_wake(&control(0)->writer_life.word, 1, UINT32_MAX);
    sides[1].result = 0;
}
static void write_one_and_release(void) {
    write_one();
    release();
}
/* The bridge is the last side that runs: every step of it may come between any two of the reader. */
static void release_and_tell(void) {
    release();
    sleep_look_again(reader0);
}
static void write_one_release_and_tell(void) {
    write_one();
    release_and_tell();
}
static bool interrupted(void) { return sides[0].result == -EINTR; }
static void call_reader(void) { sleep_call(reader0); }

static void write_one_and_vanish(void) {
    write_one();
    fmq_lose(reader0);
}

static void idle_then_write(void) {
    static _Atomic uint32_t nobody_wakes;
    for (int i = 0; i < 3000; i++) futex_wait(&nobody_wakes, 0, UINT32_MAX, 1);
    write_one();
}

static bool got_is(const char *text) { return !memcmp(got, text, strlen(text)); }
static bool both_well(void) { return !sides[0].result && !sides[1].result; }
static bool one_crossed(void) { return both_well() && got_is("a"); }
static bool two_crossed(void) { return both_well() && got_is("ab"); }
static bool three_crossed(void) { return both_well() && got_is("abc"); }
/* Killed before it published, or after; never torn, never silent. */
static bool told_or_delivered(void) { return sides[0].result == -EPIPE ? killed : !sides[0].result && got_is("ab"); }
static bool told_or_three(void) { return sides[0].result == -EPIPE ? killed : !sides[0].result && got_is("abc"); }
static bool answered(void) { return sides[0].result == 1 && got[0] == ('a' ^ 1) && !sides[1].result; }
static bool answered_or_told(void) { return sides[0].result == -EPIPE ? killed : sides[0].result == 1; }
static bool stopped(void) { return sides[0].result == -ECANCELED && !sides[1].result && !tail(); }
static bool stopped_or_read(void) { return tail() == sides[1].result && sides[0].result == (tail() ? 0 : -ECANCELED); }
static bool closed(void) { return sides[0].result == -ESHUTDOWN; }

static const scenario scenarios[] = {
    {"reader sleeps, writer writes", 1, {read_one, write_one}, one_crossed, false, 0, false},
    {"two writes end one wait", 2, {read_two, write_two_singly}, two_crossed, false, 0, false},
    {"commit ends a wait", 2, {read_two, commit_two}, two_crossed, false, 0, false},
    {"both sleep in turn", 1, {read_three_singly, write_three_singly}, three_crossed, false, 0, false},
    {"exchange", 1, {ask, answer}, answered, false, 0, false},
    {"writer killed anywhere", 2, {read_two, write_two_singly}, told_or_delivered, true, 0, false},
    {"writer killed while both sleep in turn", 1, {read_three_singly, write_three_singly}, told_or_three, true, 0, false},
    {"server killed anywhere", 1, {ask, answer}, answered_or_told, true, 0, false},
    {"stop", 1, {read_one, stop_reader}, stopped, false, 0, false},
    {"stop of a read that may have begun", 1, {read_one, write_one_and_stop_reader}, stopped_or_read, false, 0, false},
    {"release", 1, {read_one, release}, closed, false, 0, false},
    {"what was written before the release is delivered", 1, {read_one, write_one_and_release}, one_crossed, false, 0, false},
    {"old kernel: writer killed anywhere", 2, {read_two, write_two_singly}, told_or_delivered, true, -ENOSYS, false},
    {"old kernel: looking 3000 times in vain is no offence", 1, {read_one, idle_then_write}, one_crossed, false, -ENOSYS, false},
    {"filtered kernel: writer killed anywhere", 2, {read_two, write_two_singly}, told_or_delivered, true, -EPERM, false},
    {"unmarked: what was written before the loss is delivered", 1, {read_one, write_one_and_vanish}, one_crossed, false, 0, true},
    {"unmarked: writer killed anywhere", 2, {read_two, write_two_singly}, told_or_delivered, true, 0, true},
    {"unmarked: writer killed while both sleep in turn", 1, {read_three_singly, write_three_singly}, told_or_three, true, 0, true},
    {"unmarked: server killed anywhere", 1, {ask, answer}, answered_or_told, true, 0, true},
    {"told: reader sleeps, writer writes", 1, {read_one, write_one}, one_crossed, false, TOLD, false},
    {"told: both sleep in turn", 1, {read_three_singly, write_three_singly}, three_crossed, false, TOLD, false},
    {"told: writer killed anywhere", 2, {read_two, write_two_singly}, told_or_delivered, true, TOLD, false},
    {"told: stop", 1, {read_one, stop_reader}, stopped, false, TOLD, false},
    {"told: call", 1, {read_one, call_reader}, interrupted, false, TOLD, false},
    {"told: release", 1, {read_one, release_and_tell}, closed, false, TOLD, false},
    {"told: what was written before the release is delivered", 1, {read_one, write_one_release_and_tell}, one_crossed, false, TOLD,
     false},
    {"told, unmarked: writer killed anywhere", 2, {read_two, write_two_singly}, told_or_delivered, true, TOLD, true},
    {"unmarked, old kernel: writer killed anywhere", 2, {read_two, write_two_singly}, told_or_delivered, true, -ENOSYS, true},
};

static void *all(void *argument) {
    most_budget = atoi(argument);
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++)
        printf("%s: %ld schedules\n", scenarios[i].name, explore(&scenarios[i]));
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 2) return fprintf(stderr, "usage: schedules BUDGET\n"), 2;
    pthread_t thread; /* the main thread's waits end by themselves, to look for signals; this one's do not */
    if (pthread_create(&thread, NULL, all, argv[1])) return 1;
    pthread_join(thread, NULL);
    return 0;
}
