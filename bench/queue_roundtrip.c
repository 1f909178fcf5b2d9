/* The queue in C, measured exactly as peers/limit.c measures the floor.
 *
 *   queue_roundtrip spin|sleep ROUNDS BYTES
 *
 * Two processes, pinned to CPUs 0 and 1, exchange messages of BYTES one-byte elements through two queues; every message
 * is one fmq_exchange a side, with all checks. Prints one JSON line with round-trip percentiles in nanoseconds.
 */
#define _GNU_SOURCE
#include <stdint.h>

#include "fmq/api.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LEAST = 4096, CONTROL = 4096 };

static void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static fmq_shape shape = {LEAST, 0, 1, FMQ_SYNCHRONIZED};

static char *new_queue(void) {
    char *base = mmap(NULL, CONTROL + shape.capacity, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (fmq_format(base, &shape)) abort();
    return base;
}

/* -EINTR: the packet is out, and this was the moment to run signal handlers. */
static int64_t exchange(const fmq_channel *channel, const char *message, uint64_t n) {
    int64_t got = fmq_exchange(channel, message, n, UINT64_MAX);
    while (got == -EINTR) got = fmq_exchange(channel, NULL, 0, UINT64_MAX);
    if (got >= 0) return got;
    fprintf(stderr, "queue_roundtrip: error %ld\n", (long)got);
    exit(1);
}

static fmq_end *end_of(char *base, int role) {
    fmq_end *end = NULL;
    if (fmq_open(base, base + CONTROL, &shape, role, &end)) abort();
    return end;
}

int main(int argc, char **argv) {
    if (argc != 4) return fprintf(stderr, "usage: queue_roundtrip spin|sleep ROUNDS BYTES\n"), 2;
    uint64_t spin = strcmp(argv[1], "spin") ? 0 : 1000000000;
    long rounds = atol(argv[2]);
    uint64_t n = (uint64_t)atol(argv[3]);
    if (rounds < 1 || n < 1) return fprintf(stderr, "queue_roundtrip: rounds >= 1, bytes >= 1\n"), 2;
    if (n > LEAST) shape.capacity = n;
    char *there = new_queue(), *back = new_queue(), *message = calloc(1, shape.capacity);
    if (fork() == 0) {
        pin(1);
        fmq_end *in = end_of(there, FMQ_READER), *out = end_of(back, FMQ_WRITER);
        fmq_channel channel = {out, in, message, shape.capacity, spin, 0};
        int64_t got = 0;
        for (long i = 0; i < rounds; i++) got = exchange(&channel, message, (uint64_t)got);
        fmq_write(out, message, (uint64_t)got, 0, 0);
        _exit(0);
    }
    pin(0);
    fmq_end *out = end_of(there, FMQ_WRITER), *in = end_of(back, FMQ_READER);
    fmq_channel channel = {out, in, message, shape.capacity, spin, 0};
    double *rtt = malloc((size_t)rounds * sizeof *rtt);
    for (long i = 0; i < rounds; i++) {
        uint64_t begin = fmq_now();
        exchange(&channel, message, n);
        rtt[i] = (double)(fmq_now() - begin);
    }
    wait(NULL);
    qsort(rtt, (size_t)rounds, sizeof *rtt, ascending);
    printf("{\"peer\": \"fmq-c-%s\", \"bytes\": %lu, \"rounds\": %ld, \"p50_ns\": %.0f, \"p99_ns\": %.0f, \"p999_ns\": %.0f, \"max_ns\": %.0f}\n",
           argv[1], (unsigned long)n, rounds, rtt[rounds / 2], rtt[rounds * 99 / 100], rtt[rounds * 999 / 1000], rtt[rounds - 1]);
    return 0;
}
