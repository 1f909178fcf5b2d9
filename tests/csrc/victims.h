/* Shared by stepped.c and kills.c: queues in a memfd whose roles are played by processes that are killed with SIGKILL, and
 * survivors that wait for them. */
#ifndef VICTIMS_H
#define VICTIMS_H
#define _GNU_SOURCE
#include <stdint.h>

#include "fmq/api.h"
#include "fmq/futex.h"
#include "fmq/layout.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MS UINT64_C(1000000)
#define TOLD_WITHIN (100 * MS) /* the bound that is promised */
#define MOMENT (5000 * MS)     /* for what the others do, however busy the machine is */

static const char *now_playing = "set-up";
static long round_number;
static uint64_t give_up = MOMENT; /* a survivor that is not back by then sleeps for ever */

#define MUST(x)                                                                                                        \
    do {                                                                                                               \
        if (!(x)) {                                                                                                    \
            fprintf(stderr, "%s, round %ld, %s:%d: not %s\n", now_playing, round_number, __FILE__, __LINE__, #x);      \
            fflush(NULL), _exit(1);                                                                                    \
        }                                                                                                              \
    } while (0)

typedef struct {
    int fd;
    fmq_control *control;
    unsigned char *ring;
    fmq_shape shape;
    int seat; /* broadcast: which one the next reader takes */
} queue;

/* One role, held by this process: the kernel marks its life word when this process dies. */
typedef struct {
    fmq_end *end;
    int life;
} player;

static inline queue new_queue(uint64_t capacity, uint32_t element_bytes, uint32_t flavour) {
    queue q = {.shape = {capacity, 0, element_bytes, flavour}};
    uint64_t bytes = fmq_control_bytes(flavour) + fmq_ring_bytes(capacity, element_bytes);
    void *base;
    q.fd = memfd_create("victims", MFD_CLOEXEC);
    MUST(q.fd >= 0 && !ftruncate(q.fd, (off_t)bytes) && !fmq_map(q.fd, bytes, 1, &base));
    q.control = base;
    q.ring = (unsigned char *)base + fmq_control_bytes(flavour);
    MUST(!fmq_format(base, &q.shape));
    return q;
}

static inline void drop_queue(queue *q) {
    fmq_unmap(q->control, fmq_control_bytes(q->shape.flavour) + fmq_ring_bytes(q->shape.capacity, q->shape.element_bytes));
    close(q->fd);
}

static inline bool takes_seat(queue *q, int role) { return role == FMQ_READER && q->shape.flavour == FMQ_BROADCAST; }

static inline fmq_counter *seat_of(queue *q) { return (fmq_counter *)((char *)q->control + FMQ_SEATS_AT) + q->seat; }

static inline _Atomic uint32_t *life_of(queue *q, int role) {
    if (takes_seat(q, role)) return &seat_of(q)->life;
    return role == FMQ_WRITER ? &q->control->writer_life.word : &q->control->reader_life.word;
}

static inline player play(queue *q, int role) {
    player p;
    if (takes_seat(q, role)) MUST(!fmq_clear_seat(q->control, FMQ_SEAT + q->seat));
    p.life = fmq_life_hold(q->fd, (uint64_t)((char *)life_of(q, role) - (char *)q->control), 0);
    MUST(p.life >= 0 && !fmq_open(q->control, q->ring, &q->shape, takes_seat(q, role) ? FMQ_SEAT + q->seat : role, &p.end));
    return p;
}

static inline void leave(player *p) {
    fmq_free(p->end);
    fmq_life_release(p->life);
}

/* ---- survivors ----------------------------------------------------------------------------------------------------- */

/* A thread that makes one call and notes when it came back. Not the main thread: there a sleep ends by itself. */
typedef struct survivor {
    void (*run)(struct survivor *);
    void *of; /* whatever run needs */
    int64_t result;
    uint64_t back_at, got;
    _Atomic int tid;
    pthread_t thread;
} survivor;

static inline void *survivor_main(void *argument) {
    survivor *s = argument;
    atomic_store(&s->tid, (int)syscall(SYS_gettid));
    s->run(s);
    s->back_at = fmq_now();
    return NULL;
}

static inline void start(survivor *s) {
    atomic_store(&s->tid, 0);
    s->got = 0;
    MUST(!pthread_create(&s->thread, NULL, survivor_main, s));
}

static inline bool is_asleep(int tid) {
    char path[64], text[256] = {0};
    snprintf(path, sizeof path, "/proc/self/task/%d/syscall", tid);
    FILE *file = tid ? fopen(path, "r") : NULL;
    if (!file) return false;
    bool ok = fgets(text, sizeof text, file) != NULL;
    fclose(file);
    long number = ok && text[0] != 'r' ? strtol(text, NULL, 10) : -1; /* "running", or the number of the system call */
    return number == SYS_futex || number == 449;                      /* futex_waitv, which older headers lack */
}

static inline void wait_until_asleep(survivor *s) {
    uint64_t until = fmq_now() + MOMENT;
    while (!is_asleep(atomic_load(&s->tid))) {
        MUST(fmq_now() < until && "falls asleep");
        sched_yield();
    }
}

/* Returns how long after `since` the survivor was back; 0 if that was before. */
static inline uint64_t told_after(survivor *s, uint64_t since) {
    struct timespec at; /* of the wall clock: musl joins by no other */
    clock_gettime(CLOCK_REALTIME, &at);
    at.tv_sec += (time_t)(give_up / (1000 * MS));
    MUST(!pthread_timedjoin_np(s->thread, NULL, &at) && "the survivor comes back");
    return s->back_at > since ? s->back_at - since : 0;
}

/* The time to tell includes waiting for a CPU: with more runnable threads than CPUs that, too, takes long, now and then. */
static inline bool is_overloaded(void) {
    double load = 0;
    return getloadavg(&load, 1) == 1 && load > 1.5 * (double)sysconf(_SC_NPROCESSORS_ONLN);
}

static inline uint64_t random_of(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

#endif
