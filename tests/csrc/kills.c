/* A reader or a writer is killed with SIGKILL at a random moment, and whoever waits for it is told within 100 ms; then a
 * successor goes on where it stopped.
 *
 *   kills SEED ROUNDS MEGABYTES      MEGABYTES: resident memory of each victim, which the kernel frees after it told us
 *
 * Prints how long it took to tell. Descriptors and mappings are the same afterwards.
 */
#include "victims.h"

#include <dirent.h>
#include <sched.h>

enum { CAPACITY = 5, MOST = 3, WARM_UP = 8, MOST_ROUNDS = 1 << 16, BYSTANDERS = 2 };

typedef struct {
    queue q;
    int victim;          /* its role */
    uint64_t seed, bulk; /* bytes */
    _Atomic int *ready;  /* shared with the victim: it is in its loop */
} kill_plan;

static kill_plan plan;
static player mine[BYSTANDERS]; /* [1]: a second reader of a queue with many */
static _Atomic int go, over;
static uint64_t times[MOST_ROUNDS];
static long told_count, transferred;

static bool broadcasts(void) { return plan.q.shape.flavour == FMQ_BROADCAST; }
static bool overwrites(void) { return plan.q.shape.flavour == FMQ_UNSYNCHRONIZED; }

/* Every element carries its position. A position holds for one element, whoever wrote it. */
static void number(uint64_t *elements, uint64_t n, uint64_t from) {
    for (uint64_t i = 0; i < n; i++) elements[i] = from + i;
}

static void check_numbers(const uint64_t *elements, uint64_t n, uint64_t from) {
    for (uint64_t i = 0; i < n; i++) MUST(elements[i] == from + i);
}

static void copy_spans(const fmq_spans *s, uint64_t *elements, bool in) {
    uint64_t *ring = (uint64_t *)plan.q.ring;
    for (uint64_t i = 0; i < s->first + s->second; i++) {
        uint64_t *slot = &ring[i < s->first ? s->start + i : i - s->first];
        if (in) __atomic_store_n(slot, elements[i], __ATOMIC_RELAXED);
        else elements[i] = __atomic_load_n(slot, __ATOMIC_RELAXED);
    }
}

/* One transfer of random size, by copy or in place. */
static int transfer(fmq_end *end, int role, uint64_t *random, uint64_t deadline) {
    uint64_t part[MOST] = {0}, n = 1 + random_of(random) % MOST, from = (uint64_t)fmq_position(end);
    uint64_t spin = random_of(random) % 4 ? 0 : 20000;
    if (role == FMQ_WRITER) number(part, n, from);
    int r;
    if (random_of(random) % 2) {
        r = role == FMQ_WRITER ? fmq_write(end, part, n, spin, deadline) : fmq_read(end, part, n, spin, deadline);
    } else {
        fmq_spans s;
        r = fmq_reserve(end, n, &s, spin, deadline);
        if (!r) copy_spans(&s, part, role == FMQ_WRITER);
        if (!r) r = fmq_commit(end, n);
    }
    if (!r && role == FMQ_READER) check_numbers(part, n, from);
    if (r == -EOVERFLOW) MUST((uint64_t)fmq_position(end) == from + fmq_lost(end) && overwrites());
    return r;
}

/* ---- the victim and who survives it -------------------------------------------------------------------------------- */

static void be_the_victim(void) {
    uint64_t random = plan.seed * 7919;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (plan.bulk) {
        char *bulk = mmap(NULL, plan.bulk, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        MUST(bulk != MAP_FAILED);
        for (uint64_t i = 0; i < plan.bulk; i += FMQ_PAGE) bulk[i] = 1;
    }
    player p = play(&plan.q, plan.victim);
    atomic_store(plan.ready, 1);
    for (;;) {
        int r = transfer(p.end, plan.victim, &random, FMQ_FOREVER);
        MUST(!r || r == -EINTR || (r == -EOVERFLOW && plan.victim == FMQ_READER));
        if (overwrites() && plan.victim == FMQ_WRITER && random_of(&random) % 16 == 0) usleep(20); /* so readers sleep */
    }
}

/* Transfers until told. */
static void transfer_on(survivor *s) {
    player *p = s->of;
    uint64_t random = plan.seed * 31 + (uint64_t)(p - mine);
    while (!atomic_load(&go)) sched_yield();
    int role = plan.victim == FMQ_WRITER ? FMQ_READER : FMQ_WRITER;
    for (s->result = 0; !s->result || s->result == -EOVERFLOW;) {
        if (!s->result) s->got++;
        s->result = transfer(p->end, role, &random, FMQ_FOREVER);
    }
}

/* The writer of an unsynchronized queue needs no reader, and its other readers do not need a dead one: they just go on. */
static void write_on(survivor *s) {
    player *p = s->of;
    uint64_t random = plan.seed * 31;
    for (s->result = 0; !s->result && !atomic_load(&over); s->got++) s->result = transfer(p->end, FMQ_WRITER, &random, 0);
}

/* The writer of a broadcast queue is not told: it goes on, over more than a ring. */
static void outlive(survivor *s) {
    player *p = s->of;
    uint64_t random = plan.seed * 31;
    while (!atomic_load(&go)) sched_yield();
    for (int more = 2 * CAPACITY; more; s->got++) {
        if ((s->result = transfer(p->end, FMQ_WRITER, &random, FMQ_FOREVER))) return;
        more -= atomic_load(&over) != 0;
    }
}

static void wait_for(bool (*what)(void)) {
    for (uint64_t until = fmq_now() + MOMENT + plan.bulk * 20; !what(); sched_yield()) MUST(fmq_now() < until);
}
static bool is_ready(void) { return atomic_load(plan.ready); }
static bool victim_sleeps(void) {
    fmq_control *c = plan.q.control;
    return atomic_load(plan.victim == FMQ_WRITER ? &c->space_wait.word : &c->data_wait.word);
}

static void be_busy(uint64_t ns) {
    for (uint64_t until = fmq_now() + ns; fmq_now() < until;) {}
}

/* A third of the victims die asleep, the others within 300 us of the start. */
static uint64_t kill_at_a_random_moment(pid_t pid, uint64_t *random) {
    bool asleep = !overwrites() && random_of(random) % 3 == 0;
    if (!asleep) atomic_store(&go, 1);
    if (asleep) wait_for(victim_sleeps);
    be_busy(random_of(random) % 300000);
    uint64_t since = fmq_now();
    MUST(!kill(pid, SIGKILL));
    atomic_store(&go, 1);
    if (broadcasts()) atomic_store(&over, 1);
    return since;
}

static pid_t fork_victim(void) {
    pid_t pid = fork();
    MUST(pid >= 0);
    if (!pid) be_the_victim();
    return pid;
}

/* ---- one kill ------------------------------------------------------------------------------------------------------ */

/* A successor transfers as its predecessor did; what it finds and leaves is numbered without a gap. */
static void check_successor(uint64_t *random) {
    player next = play(&plan.q, plan.victim);
    player *writer = plan.victim == FMQ_WRITER ? &next : &mine[0], *reader = plan.victim == FMQ_WRITER ? &mine[0] : &next;
    int one_way = 0;
    for (int i = 0; i < 20; i++) {
        int r = transfer(writer->end, FMQ_WRITER, random, 0);
        MUST(!r || r == -EAGAIN);
        one_way += !r;
        if (broadcasts() && plan.victim == FMQ_WRITER) transfer(mine[1].end, FMQ_READER, random, 0);
        r = transfer(reader->end, FMQ_READER, random, 0);
        MUST(!r || r == -EAGAIN || (r == -EOVERFLOW && overwrites()));
    }
    MUST(one_way);
    leave(&next);
}

static void one_kill(uint64_t *random) {
    plan.seed = random_of(random);
    bool told_by_wait = plan.victim == FMQ_WRITER || !overwrites();
    int n = (overwrites() || broadcasts()) && plan.victim == FMQ_WRITER ? BYSTANDERS : 1;
    bool is_told = told_by_wait && !(broadcasts() && plan.victim == FMQ_READER);
    survivor all[BYSTANDERS];
    atomic_store(&go, 0), atomic_store(&over, 0), atomic_store(plan.ready, 0);
    pid_t pid = fork_victim();
    wait_for(is_ready); /* its predecessor released the role, and that would be told instead */
    for (int i = 0; i < n; i++) {
        all[i] = (survivor){.run = is_told ? transfer_on : broadcasts() ? outlive : write_on, .of = &mine[i]};
        start(&all[i]);
    }
    uint64_t since = kill_at_a_random_moment(pid, random);
    if (!told_by_wait) { /* its state is what tells */
        while (fmq_life_state(life_of(&plan.q, FMQ_READER)) == FMQ_ALIVE) MUST(fmq_now() < since + MOMENT);
        times[told_count++] = fmq_now() - since;
        atomic_store(&over, 1);
    }
    for (int i = 0; i < n; i++) {
        uint64_t after = told_after(&all[i], since);
        MUST(all[i].result == (is_told ? -EPIPE : 0));
        if (told_by_wait) times[told_count++] = after;
        transferred += (long)all[i].got;
    }
    MUST(waitpid(pid, NULL, 0) == pid);
    check_successor(random);
}

/* ---- all of them --------------------------------------------------------------------------------------------------- */

static long entries_of(const char *path) {
    DIR *folder = opendir(path);
    long n = 0;
    while (folder && readdir(folder)) n++;
    if (folder) closedir(folder);
    return n;
}

static long lines_of(const char *path) {
    FILE *file = fopen(path, "r");
    long n = 0;
    for (int c; file && (c = getc(file)) != EOF;) n += c == '\n';
    if (file) fclose(file);
    return n;
}

static void rounds_of(uint32_t flavour, int victim, long rounds, uint64_t *random) {
    static char name[64];
    snprintf(name, sizeof name, "flavour %u, role %d", flavour, victim), now_playing = name;
    plan.victim = victim;
    plan.q = new_queue(CAPACITY, sizeof(uint64_t), flavour);
    int role = victim == FMQ_WRITER ? FMQ_READER : FMQ_WRITER;
    mine[0] = play(&plan.q, role);
    plan.q.seat = 1;
    if (broadcasts() && role == FMQ_READER) mine[1] = play(&plan.q, role);
    else MUST(!fmq_open(plan.q.control, plan.q.ring, &plan.q.shape, role, &mine[1].end));
    for (round_number = 0; round_number < rounds; round_number++) one_kill(random);
    leave(&mine[0]);
    if (broadcasts() && role == FMQ_READER) leave(&mine[1]);
    else fmq_free(mine[1].end);
    drop_queue(&plan.q);
}

static void rounds_of_all(long rounds, uint64_t *random) {
    long part = (rounds + 5) / 6;
    for (uint32_t flavour = 1; flavour <= 3 && rounds > 0; flavour++)
        for (int role = 0; role < 2 && rounds > 0; role++, rounds -= part)
            rounds_of(flavour, role, part < rounds ? part : rounds, random);
}

static int ascending(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

int main(int argc, char **argv) {
    if (argc != 4) return fprintf(stderr, "usage: kills SEED ROUNDS MEGABYTES\n"), 2;
    uint64_t random = strtoull(argv[1], NULL, 10) * 2 + 1;
    long rounds = atol(argv[2]);
    alarm((unsigned)(60 + rounds / 50 + rounds * atol(argv[3]) / 200));
    plan.ready = mmap(NULL, FMQ_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    rounds_of_all(WARM_UP, &random); /* threads leave their stacks to the next ones */
    told_count = transferred = 0;
    long before[3] = {entries_of("/proc/self/fd"), lines_of("/proc/self/maps"), entries_of("/dev/shm")};
    plan.bulk = strtoull(argv[3], NULL, 10) << 20;
    rounds_of_all(rounds, &random);
    long after[3] = {entries_of("/proc/self/fd"), lines_of("/proc/self/maps"), entries_of("/dev/shm")};
    qsort(times, (size_t)told_count, sizeof *times, ascending);
    printf("%ld kills: told %ld times within p50 %lu, p99 %lu, max %lu us; %ld transfers\n", rounds, told_count,
           (unsigned long)times[told_count / 2] / 1000, (unsigned long)times[told_count * 99 / 100] / 1000,
           (unsigned long)times[told_count - 1] / 1000, transferred);
    printf("descriptors %ld -> %ld, mappings %ld -> %ld, /dev/shm %ld -> %ld\n", before[0], after[0], before[1], after[1],
           before[2], after[2]);
    MUST(before[0] == after[0] && before[1] == after[1]); /* others use /dev/shm, too */
    MUST(times[told_count - 1 - (is_overloaded() ? told_count / 100 : 0)] <= TOLD_WITHIN);
    return 0;
}
