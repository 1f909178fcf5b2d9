/* A process is killed with SIGKILL after every single instruction of a call, and whoever slept for it has to be back within
 * 100 ms, with the elements or with the news; and then the queue has to be whole.
 *
 *   stepped STRIDE OFFSET [SCENARIO]      prints per scenario: instructions, kills, and the worst time to tell
 *
 * The victim is a forked child, single-stepped with ptrace through one call: k instructions, then SIGKILL, for k = 0, 1, 2
 * until the call has ended; with a STRIDE above 1, for every STRIDE-th k.
 */
#include "victims.h"

#include <sched.h>
#include <sys/ptrace.h>

enum { CAPACITY = 2, SKIP = 77 };

typedef struct {
    const char *name;
    uint32_t flavour;
    int victim;                           /* its role in queue 0 */
    void (*prepare)(void);                /* in the victim, before it is stepped */
    void (*call)(void);                   /* stepped */
    void (*survive[2])(survivor *);       /* each in a thread of its own, asleep before the first step */
    void (*rescue)(void);                 /* after the kill: what wakes the survivors if the death itself does not */
    bool (*accepts)(const survivor *all); /* NULL: delivered, or told -EPIPE */
} scenario;

static const scenario *playing;
static queue queues[2];    /* 1: the answers */
static player victim, victim_of_answers;
static player mine, mine_of_answers;
static fmq_end *other_reader; /* of a queue with many */
static player other_player;   /* broadcast */
static uint64_t published;    /* the number that the next element carries */

/* ---- the victim's calls -------------------------------------------------------------------------------------------- */

static void nothing(void) {}
static void write_one(void) { fmq_write(victim.end, &published, 1, 0, FMQ_FOREVER); }
static void read_one(void) { fmq_read(victim.end, &published, 1, 0, FMQ_FOREVER); }
static void stop(void) { fmq_stop(victim.end); }
static void release(void) { fmq_life_release(victim.life); }
static void wake(void) { fmq_event_wake(&queues[0].control->event.word, 2); }
static void commit(void) { fmq_commit(victim.end, 1); }
static void reserve(void) {
    fmq_spans s;
    MUST(!fmq_reserve(victim.end, 1, &s, 0, 0));
    memcpy(queues[0].ring + s.start * sizeof published, &published, sizeof published);
}
static void leave_seat(void) { leave(&victim); }
static void take_seat(void) { victim = play(&queues[0], FMQ_READER); }
static void start_life(void) { MUST(fmq_life_hold(queues[1].fd, (uint64_t)((char *)life_of(&queues[1], FMQ_READER) - (char *)queues[1].control), 0) >= 0); }
static void play_both(void) { victim_of_answers = play(&queues[1], FMQ_READER); }
static void ask(void) {
    uint64_t answer[CAPACITY];
    fmq_channel channel = {victim.end, victim_of_answers.end, answer, sizeof answer, 0, 0};
    fmq_exchange(&channel, &published, sizeof published, FMQ_FOREVER);
}

static void other_reads(void) {
    uint64_t one;
    while (!fmq_read(other_reader, &one, 1, 0, 0)) {}
}

/* ---- the survivors' calls ------------------------------------------------------------------------------------------ */

static void survive_read(survivor *s) { s->result = fmq_read(mine.end, &s->got, 1, 0, FMQ_FOREVER); }
static void survive_read_too(survivor *s) { s->result = fmq_read(other_reader, &s->got, 1, 0, FMQ_FOREVER); }
static void survive_write(survivor *s) { s->result = fmq_write(mine.end, &published, 1, 0, FMQ_FOREVER); }
static void survive_any(survivor *s) {
    uint8_t ready;
    s->result = fmq_wait_any(&other_reader, 1, &ready, FMQ_FOREVER) == 1 ? 0 : -EIO;
}
static void survive_question(survivor *s) {
    s->result = fmq_read(mine.end, &s->got, 1, 0, FMQ_FOREVER);
    if (!s->result) fmq_write(mine_of_answers.end, &s->got, 1, 0, FMQ_FOREVER);
}
static void wait_for_bit(survivor *s, uint32_t mask, unsigned lives) {
    uint32_t bits = 0;
    s->result = fmq_event_wait(&queues[0].control->event.word, mask, &mine.end, lives, FMQ_FOREVER, &bits);
    if (bits) s->got = published;
}
static void survive_event(survivor *s) { wait_for_bit(s, 2, 1); }
static void survive_other_bit(survivor *s) { wait_for_bit(s, 4, 1); }
static void survive_event_alone(survivor *s) { wait_for_bit(s, 2, 0); }

static bool delivered(const survivor *s) { return !s->result && s->got == published; }
static bool delivered_or_told(const survivor *s) { return delivered(s) || s->result == -EPIPE; }
static bool delivered_both(const survivor *s) { return delivered_or_told(s) && delivered_or_told(s + 1); }
static bool room_or_told(const survivor *s) { return !s->result || s->result == -EPIPE; }
static bool goes_on(const survivor *s) { return !s->result; }
static bool told(const survivor *s) { return s->result == -EPIPE; }
static bool first_delivered(const survivor *s) { return delivered_or_told(s) && told(s + 1); }
static bool read_and_ready(const survivor *s) { return delivered_or_told(s) && !s[1].result; }
static bool closed(const survivor *s) {
    for (int i = 0; i < 2; i++)
        if (s[i].result != -EPIPE && s[i].result != -ESHUTDOWN) return false;
    return true;
}

static const scenario scenarios[] = {
    {"write", 1, FMQ_WRITER, nothing, write_one, {survive_read}, nothing, delivered_or_told},
    {"commit", 1, FMQ_WRITER, reserve, commit, {survive_read}, nothing, delivered_or_told},
    {"read", 1, FMQ_READER, nothing, read_one, {survive_write}, nothing, room_or_told},
    {"exchange", 1, FMQ_WRITER, play_both, ask, {survive_question}, nothing, delivered_or_told},
    {"stop", 1, FMQ_READER, nothing, stop, {survive_write}, nothing, told},
    {"release", 1, FMQ_WRITER, nothing, release, {survive_read, survive_other_bit}, nothing, closed},
    {"event", 1, FMQ_WRITER, nothing, wake, {survive_event}, nothing, delivered_or_told},
    {"event, two waiters", 1, FMQ_WRITER, nothing, wake, {survive_event, survive_other_bit}, nothing, first_delivered},
    {"event, second waker", 1, FMQ_WRITER, nothing, wake, {survive_event_alone}, wake, delivered},
    {"write to two readers", 2, FMQ_WRITER, nothing, write_one, {survive_read, survive_read_too}, nothing, delivered_both},
    {"write to two ways of waiting", 2, FMQ_WRITER, nothing, write_one, {survive_read, survive_any}, nothing,
     read_and_ready},
    {"broadcast to two readers", 3, FMQ_WRITER, nothing, write_one, {survive_read, survive_read_too}, nothing, delivered_both},
    {"broadcast, read", 3, FMQ_READER, nothing, read_one, {survive_write}, nothing, goes_on},
    {"broadcast, leave", 3, FMQ_READER, nothing, leave_seat, {survive_write}, nothing, goes_on},
    {"broadcast, join", 3, FMQ_READER, start_life, take_seat, {survive_write}, other_reads, goes_on},
};

/* ---- one kill ------------------------------------------------------------------------------------------------------ */

static void mark(void) { syscall(SYS_tgkill, getpid(), getpid(), SIGSTOP); }

static pid_t fork_victim(void) {
    pid_t pid = fork();
    MUST(pid >= 0);
    if (!pid) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (playing->call != take_seat) victim = play(&queues[0], playing->victim);
        playing->prepare();
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL)) _exit(SKIP);
        mark();
        playing->call();
        mark();
        _exit(0);
    }
    int status;
    MUST(waitpid(pid, &status, 0) == pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == SKIP) printf("ptrace is not allowed here\n"), exit(0);
    MUST(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
    return pid;
}

/* True when the call ended before the k-th instruction. */
static bool step(pid_t pid, long k) {
    for (int status; k; k--) {
        MUST(!ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL));
        MUST(waitpid(pid, &status, 0) == pid && WIFSTOPPED(status));
        if (WSTOPSIG(status) == SIGSTOP) return true;
        MUST(WSTOPSIG(status) == SIGTRAP);
    }
    return false;
}

/* A successor takes the role, and what is unread, and one more element, go through in order. */
static void check_whole(void) {
    int role = playing->victim;
    player next = play(&queues[0], role);
    fmq_end *writer = role == FMQ_WRITER ? next.end : mine.end, *reader = role == FMQ_WRITER ? mine.end : next.end;
    uint64_t one = 0;
    if (other_reader) fmq_keep_latest(mine.end, 0), fmq_keep_latest(other_reader, 0);
    while (other_player.end && !fmq_read(other_reader, &one, 1, 0, 0)) {}
    while (!fmq_read(reader, &one, 1, 0, 0)) {}
    MUST(fmq_available(reader) == 0 && fmq_position(reader) == fmq_position(writer));
    published++;
    MUST(!fmq_write(writer, &published, 1, 0, 0) && !fmq_read(reader, &one, 1, 0, 0) && one == published);
    if (other_reader) MUST(!fmq_read(other_reader, &one, 1, 0, 0) && one == published);
    leave(&next);
    atomic_store(&queues[0].control->event.word, 0);
}

static void fill(void) {
    if (playing->victim != FMQ_READER) return;
    while (!fmq_write(mine.end, &published, 1, 0, 0)) {}
    if (other_reader && playing->call != take_seat) other_reads();
}

static bool kill_after(long k, uint64_t *worst) {
    survivor all[2] = {{.run = playing->survive[0]}, {.run = playing->survive[1]}};
    if (playing->flavour != FMQ_BROADCAST) fill();
    pid_t pid = fork_victim();
    if (playing->flavour == FMQ_BROADCAST) fill(); /* what a reader holds up is written after it came */
    for (int i = 0; i < 2 && all[i].run; i++) start(&all[i]), wait_until_asleep(&all[i]);
    bool ended = step(pid, k);
    uint64_t since = fmq_now();
    MUST(!kill(pid, SIGKILL));
    if (playing->rescue != nothing) { /* only when the first waker is surely dead */
        MUST(waitpid(pid, NULL, 0) == pid);
        since = fmq_now();
        playing->rescue();
    }
    for (int i = 0; i < 2 && all[i].run; i++) {
        uint64_t after = told_after(&all[i], since);
        if (after > *worst) *worst = after;
    }
    if (playing->rescue == nothing) MUST(waitpid(pid, NULL, 0) == pid);
    MUST(playing->accepts(all));
    check_whole();
    return ended;
}

static void run(const scenario *s, long stride, long offset) {
    playing = s;
    now_playing = s->name;
    int role = s->victim == FMQ_WRITER ? FMQ_READER : FMQ_WRITER;
    for (int i = 0; i < 2; i++) queues[i] = new_queue(CAPACITY, sizeof published, s->flavour);
    mine = play(&queues[0], role);
    mine_of_answers = play(&queues[1], FMQ_WRITER);
    other_reader = NULL;
    if (s->flavour == FMQ_UNSYNCHRONIZED)
        MUST(!fmq_open(queues[0].control, queues[0].ring, &queues[0].shape, FMQ_READER, &other_reader));
    other_player.end = NULL;
    queues[0].seat = 1;
    if (s->flavour == FMQ_BROADCAST) other_player = play(&queues[0], FMQ_READER), other_reader = other_player.end;
    queues[0].seat = 0;
    uint64_t worst = 0;
    long kills = 1;
    for (round_number = offset; !kill_after(round_number, &worst); round_number += stride) kills++;
    printf("%s: %ld kills in %ld instructions, told within %lu us\n", s->name, kills, round_number,
           (unsigned long)(worst / 1000));
    fflush(stdout);
    MUST(worst <= TOLD_WITHIN || is_overloaded());
    leave(&mine), leave(&mine_of_answers);
    if (other_player.end) leave(&other_player);
    else fmq_free(other_reader);
    for (int i = 0; i < 2; i++) drop_queue(&queues[i]);
}

int main(int argc, char **argv) {
    if (argc < 3) return fprintf(stderr, "usage: stepped STRIDE OFFSET [SCENARIO]\n"), 2;
    alarm(120);
    long stride = atol(argv[1]), offset = atol(argv[2]) % stride;
    if (argc > 3) give_up = 500 * MS; /* a single scenario: it is expected to fail */
    cpu_set_t one; /* a step is two switches, which are cheaper on one CPU */
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one);
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++)
        if (argc == 3 || !strcmp(argv[3], scenarios[i].name)) run(&scenarios[i], stride, offset);
    return 0;
}
