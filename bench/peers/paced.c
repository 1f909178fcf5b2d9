/* The floor of a stream: one exchange by futex between two processes, so many times a second, with work in between.
 *
 *   cc -O2 -o paced paced.c && ./paced CLIENT_CPU SERVER_CPU HZ WORK_US FRAMES      (a processor of -1: wherever it is put)
 *
 * In turns, a frame each: the work in the other process, and the same work here. Prints one JSON line: percentiles of
 * both in nanoseconds, and the processor time of one frame, of both processes, in each way.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef _Atomic uint32_t word;

static uint64_t read_clock(clockid_t which) {
    struct timespec t;
    clock_gettime(which, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t now(void) { return read_clock(CLOCK_MONOTONIC); }

static void pin(int cpu) {
    cpu_set_t set;
    if (cpu < 0) return;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
}

static volatile double sink;

static void work(uint64_t ns) {
    double x = 1;
    if (ns)
        for (uint64_t end = now() + ns; now() < end;)
            for (int i = 0; i < 50; i++) x = x * 1.0000001 + 1e-9;
    sink = x;
}

static void wait_until(word *w, uint32_t number) {
    for (uint32_t seen; (seen = atomic_load(w)) < number;) syscall(SYS_futex, w, FUTEX_WAIT, seen, NULL, NULL, 0);
}

static void set(word *w, uint32_t number) {
    atomic_store(w, number);
    syscall(SYS_futex, w, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void sleep_until(uint64_t at) {
    struct timespec t = {(time_t)(at / 1000000000u), (long)(at % 1000000000u)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void serve(word *there, word *back, uint64_t busy) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (uint32_t i = 1;; i++) {
        wait_until(there, i);
        work(busy);
        set(back, i);
    }
}

int main(int argc, char **argv) {
    if (argc != 6) return fprintf(stderr, "usage: paced CLIENT_CPU SERVER_CPU HZ WORK_US FRAMES\n"), 2;
    long frames = atol(argv[5]);
    if (frames < 1 || atof(argv[3]) <= 0) return fprintf(stderr, "paced: HZ > 0, FRAMES >= 1\n"), 2;
    uint64_t step = (uint64_t)(1e9 / atof(argv[3])), busy = (uint64_t)(atof(argv[4]) * 1e3), mine[2] = {0};
    word *there = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), *back = there + 32;
    pid_t server = fork();
    if (!server) {
        pin(atoi(argv[2]));
        serve(there, back, busy);
    }
    pin(atoi(argv[1]));
    clockid_t theirs;
    clock_getcpuclockid(server, &theirs);
    double *took[2] = {malloc((size_t)frames * sizeof(double)), malloc((size_t)frames * sizeof(double))};
    uint64_t at = now(), before = read_clock(theirs), since = read_clock(CLOCK_PROCESS_CPUTIME_ID);
    for (long i = 0; i < 2 * frames; i++) {
        sleep_until(at += step);
        uint64_t begin = now();
        if (i % 2) work(busy);
        else set(there, (uint32_t)(i / 2 + 1)), wait_until(back, (uint32_t)(i / 2 + 1));
        took[i % 2][i / 2] = (double)(now() - begin);
        uint64_t used = read_clock(CLOCK_PROCESS_CPUTIME_ID);
        mine[i % 2] += used - since;
        since = used;
    }
    uint64_t served = read_clock(theirs) - before;
    kill(server, SIGKILL);
    waitpid(server, NULL, 0);
    for (int k = 0; k < 2; k++) qsort(took[k], (size_t)frames, sizeof(double), ascending);
    double *other = took[0], *own = took[1], n = (double)frames;
    printf("{\"p50_ns\": %.0f, \"p99_ns\": %.0f, \"own_p50_ns\": %.0f, \"own_p99_ns\": %.0f, \"cpu_ns\": %.0f, \"own_cpu_ns\": %.0f}\n",
           other[frames / 2], other[frames * 99 / 100], own[frames / 2], own[frames * 99 / 100],
           (double)(mine[0] + served) / n, (double)mine[1] / n);
    return 0;
}
