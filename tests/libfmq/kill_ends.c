/* Programs at both ends of a queue, of which one is killed with SIGKILL at random moments, and started again. The other end lives in
 * this process; it is told each time within 100 ms, and goes on with the successor.
 *
 *     kill_ends KILLS SEED            prints: kills, elements, and how late it was told (us: p50, p99, max)
 *     kill_ends writer|reader FD NOTE     a victim: the queue, and where it notes what it did
 *
 * A victim that writes begins at 0; one that reads goes on where its predecessor was killed: nothing is lost, torn or read twice.
 */
#define _GNU_SOURCE
#include "fmq.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { CAPACITY = 5, MOST = 3, MOST_KILLS = 1 << 16 };
static const uint64_t SECOND = 1000000000, TOLD_WITHIN = 100000000;

/* What a victim notes for its parent. */
typedef struct {
    _Atomic uint64_t is_ready, read; /* read: elements, by all that have read */
} note;

#define MUST(x)                                                                                                                    \
    do {                                                                                                                           \
        if (!(x)) fprintf(stderr, "kill_ends: line %d: not %s: '%s'\n", __LINE__, #x, fmq_queue_why()), fflush(NULL), _exit(1);    \
    } while (0)

static uint32_t draw(uint64_t *state, uint32_t below) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33) % below;
}

/* One transfer of random size, by copy or in place, of elements that are numbered from `from`. */
static int transfer(fmq_queue_end *end, bool writes, uint64_t *elements, uint64_t n, uint64_t from, bool in_place) {
    for (uint64_t i = 0; writes && i < n; i++) elements[i] = from + i;
    if (!in_place)
        return writes ? fmq_queue_write(end, elements, n, FMQ_FOREVER) : fmq_queue_read(end, elements, n, FMQ_FOREVER);
    fmq_queue_spans s;
    int r = fmq_queue_reserve(end, n, &s, FMQ_FOREVER);
    if (r) return r;
    uint64_t first = s.n_first * sizeof *elements, second = s.n_second * sizeof *elements;
    if (writes) memcpy(s.first, elements, first), memcpy(s.second, elements + s.n_first, second);
    else memcpy(elements, s.first, first), memcpy(elements + s.n_first, s.second, second);
    return fmq_queue_commit(end, n);
}

/* ---- the victim ---------------------------------------------------------------------------------------------------- */

static void *mapped(int fd) {
    void *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    MUST(at != MAP_FAILED);
    return at;
}

static int be_a_victim(bool writes, int fd, int note_fd) {
    fmq_queue *queue;
    fmq_queue_end *end;
    note *n = mapped(note_fd);
    uint64_t random = (uint64_t)getpid(), next = 0, elements[MOST];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    MUST(!fmq_queue_open_fd(fd, "<u8", &queue) && !(writes ? fmq_queue_writer : fmq_queue_reader)(queue, &end));
    fmq_queue_spin(end, draw(&random, 2) * 20000);
    bool is_first = true;
    atomic_store(&n->is_ready, 1);
    for (;;) {
        uint64_t count = 1 + draw(&random, MOST);
        MUST(!transfer(end, writes, elements, count, next, draw(&random, 2)));
        if (!writes && is_first) { /* the last one may have been killed between its transfer and its note */
            uint64_t noted = atomic_load(&n->read);
            MUST(elements[0] >= noted && elements[0] <= noted + MOST);
            next = elements[0], is_first = false;
        }
        for (uint64_t i = 0; !writes && i < count; i++) MUST(elements[i] == next + i);
        next += count;
        if (!writes) atomic_store(&n->read, next);
    }
}

/* ---- who survives -------------------------------------------------------------------------------------------------- */

static struct {
    bool writes; /* the survivor */
    int fd, note_fd;
    note *note;
    fmq_queue *queue;
    fmq_queue_end *end;
    uint64_t random, next, elements;
    pid_t victim;
    uint64_t killed_at;
} world;
static uint64_t times[MOST_KILLS];

static void start_a_victim(void) {
    char fd[16], note_fd[16];
    snprintf(fd, sizeof fd, "%d", world.fd), snprintf(note_fd, sizeof note_fd, "%d", world.note_fd);
    atomic_store(&world.note->is_ready, 0);
    MUST((world.victim = fork()) >= 0);
    if (!world.victim) {
        execl("/proc/self/exe", "kill_ends", world.writes ? "reader" : "writer", fd, note_fd, NULL);
        _exit(1);
    }
    for (uint64_t until = fmq_now() + 20 * SECOND; !atomic_load(&world.note->is_ready); usleep(100)) MUST(fmq_now() < until);
}

/* By a timer's signal, at any moment of the survivor's calls: a signal does not end them. */
static void kill_it(int unused) {
    (void)unused;
    world.killed_at = fmq_now();
    kill(world.victim, SIGKILL);
}

static void one_kill(uint64_t *late) {
    uint64_t elements[MOST], n = 0;
    int r = 0;
    start_a_victim();
    if (!world.writes) world.next = 0;
    timer_t timer;
    const struct itimerspec when = {.it_value.tv_nsec = 1 + (long)draw(&world.random, 3000000)};
    MUST(!timer_create(CLOCK_MONOTONIC, NULL, &timer) && !timer_settime(timer, 0, &when, NULL));
    while (!r) {
        n = 1 + draw(&world.random, MOST);
        r = transfer(world.end, world.writes, elements, n, world.next, draw(&world.random, 2));
        for (uint64_t i = 0; !r && !world.writes && i < n; i++) MUST(elements[i] == world.next + i);
        if (!r) world.next += n, world.elements += n;
    }
    *late = fmq_now() - world.killed_at;
    MUST(r == -EPIPE && world.killed_at && fmq_queue_get_peer(world.end) == FMQ_PEER_DEAD);
    for (; !world.writes && fmq_queue_available(world.end) > 0; world.elements++) { /* what is left is less than was asked for */
        MUST(!transfer(world.end, false, elements, 1, 0, false) && elements[0] == world.next++);
    }
    timer_delete(timer);
    world.killed_at = 0;
    MUST(waitpid(world.victim, NULL, 0) == world.victim);
}

static void kill_one_side(bool survivor_writes, uint64_t kills, uint64_t *late) {
    world.writes = survivor_writes, world.next = 0;
    world.note_fd = memfd_create("note", 0);
    MUST(world.note_fd >= 0 && !ftruncate(world.note_fd, 4096));
    world.note = mapped(world.note_fd);
    MUST(!fmq_queue_create(NULL, "<u8", 8, CAPACITY, FMQ_QUEUE_SYNCHRONIZED, &world.queue));
    MUST((world.fd = fmq_queue_fd(world.queue)) >= 0 && !fcntl(world.fd, F_SETFD, 0));
    MUST(!(survivor_writes ? fmq_queue_writer : fmq_queue_reader)(world.queue, &world.end));
    for (uint64_t i = 0; i < kills; i++) one_kill(&late[i]);
    MUST(!fmq_queue_leave(world.end) && !fmq_queue_close(world.queue));
    munmap(world.note, 4096), close(world.fd), close(world.note_fd);
}

static int ascending(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static bool is_overloaded(void) {
    double load = 0;
    return getloadavg(&load, 1) == 1 && load > 1.5 * (double)sysconf(_SC_NPROCESSORS_ONLN);
}

int main(int argc, char **argv) {
    if (argc == 4) return be_a_victim(!strcmp(argv[1], "writer"), atoi(argv[2]), atoi(argv[3]));
    uint64_t kills = argc == 3 ? strtoull(argv[1], NULL, 10) : 0, half = kills / 2;
    if (half < 1 || kills > MOST_KILLS) return fprintf(stderr, "usage: kill_ends KILLS SEED\n"), 2;
    struct sigaction on_time = {.sa_handler = kill_it};
    MUST(!sigaction(SIGALRM, &on_time, NULL));
    world.random = strtoull(argv[2], NULL, 10);
    kill_one_side(true, half, times);
    kill_one_side(false, half, times + half);
    qsort(times, 2 * half, sizeof *times, ascending);
    printf("%llu kills, %llu elements, told within %llu %llu %llu us\n", 2 * (unsigned long long)half, (unsigned long long)world.elements,
           (unsigned long long)times[half] / 1000, (unsigned long long)times[2 * half * 99 / 100] / 1000,
           (unsigned long long)times[2 * half - 1] / 1000);
    MUST(times[2 * half - 1 - (is_overloaded() ? half / 50 : 0)] <= TOLD_WITHIN);
    return 0;
}
