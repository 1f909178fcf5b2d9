/* A device that answers with noise: to each call, on the callback, in results, on the plain path, and in the notes of a burst. One thread is
 * the device, which answers calls; the other one is the client, and the device for what lies in queues. Whatever comes, a call of
 * libburst returns what burst.h documents, with a reason, and no descriptor stays open. Compiled with sanitizers.
 *
 *     fuzz_answers CASES SEED FILE        FILE: good results, each after its length (u32)
 */
#define _GNU_SOURCE
#include "burst.h"
#include "burst/api.h"
#include "fmq/api.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { ELEMENT = 24, LENGTH = 1024, PAGE = 4096, QUEUE = PAGE + LENGTH * ELEMENT, MOST = 64 * ELEMENT, ROOM = 4096, BATCH = 40 };
enum step { HELLO, PREPARE, BURST, LANE, CALLBACK, RESULT, PLAIN, STEPS, NONE };
static const char *const methods[] = {"hello", "prepare", "burst", "lane"};
static const uint64_t HASH = UINT64_C(0xf4cbbbf41608a154), SECOND = 1000000000;

typedef struct {
    unsigned char bytes[ROOM];
    size_t n;
    int fds[72], n_fds; /* borrowed */
} said;

static unsigned char packets[64][MOST];
static uint32_t sizes[64], n_packets;
static int life = -1, unsealed = -1, small = -1, pair_end = -1; /* what an answer may carry */

static struct { /* between the two threads */
    pthread_mutex_t lock;
    enum step lie;
    uint64_t random;
    int fds[5]; /* of the burst */
    int near;   /* of the plain path; -1: none */
    said first; /* what is said on the plain path as soon as it is there */
} shared = {.lock = PTHREAD_MUTEX_INITIALIZER, .lie = NONE, .fds = {-1, -1, -1, -1, -1}, .near = -1};
static uint64_t accepted[STEPS], refused[STEPS];

static void stop(const char *why, int result) {
    fprintf(stderr, "fuzz_answers: %s (%d, '%s')\n", why, result, burst_why());
    abort();
}

static uint32_t draw(uint64_t *state, uint32_t below) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33) % below;
}

/* ---- noise ------------------------------------------------------------------------------------------------------- */

static void replace(said *s, size_t at, size_t gone, const unsigned char *with, size_t n) {
    if (at > s->n || gone > s->n - at || s->n - gone + n > ROOM) return;
    memmove(s->bytes + at + n, s->bytes + at + gone, s->n - at - gone);
    if (n) memcpy(s->bytes + at, with, n);
    s->n += n - gone;
}

static void damage(said *s, uint64_t *random) {
    static const struct {
        unsigned char bytes[9];
        unsigned n;
    } words[] = {{{0}, 1}, {{1}, 1}, {{0x7f}, 1}, {{0xff}, 1}, {{0x80}, 1}, {{0x81, 1, 1}, 3}, {{0x90}, 1}, {{0x91}, 1}, {{0x92}, 1},
                 {{0x9f}, 1}, {{0xa0}, 1}, {{0xbf}, 1}, {{0xc0}, 1}, {{0xc1}, 1}, {{0xc3}, 1}, {{0xc4, 255}, 2}, {{0xc7, 1, 1, 1}, 4},
                 {{0xc6, 255, 255, 255, 255}, 5}, {{0xca}, 1}, {{0xcb}, 1}, {{0xce, 255, 255, 255, 255}, 5}, {{0xdc, 255, 255}, 3},
                 {{0xcf, 255, 255, 255, 255, 255, 255, 255, 255}, 9}, {{0xcf, 128}, 9}, {{0xd3, 128}, 9}, {{0xd9, 255}, 2},
                 {{0xdb, 255, 255, 255, 255}, 5}, {{0xdd, 255, 255, 255, 255}, 5}, {{0xdd, 0, 0, 0, 2}, 5}, {{0xdf, 0, 0, 0, 1}, 5}};
    for (uint32_t n = draw(random, 4); n; n--) {
        uint32_t word = draw(random, sizeof words / sizeof *words), at = draw(random, (uint32_t)s->n + 1);
        unsigned char any = (unsigned char)draw(random, 256), nested[64], half[ROOM];
        switch (draw(random, 7)) {
        case 0: replace(s, at, 1, words[word].bytes, words[word].n); break;
        case 1: replace(s, at, 0, words[word].bytes, words[word].n); break;
        case 2: replace(s, at, 1, &any, 1); break;
        case 3: replace(s, at, 1 + draw(random, 4), NULL, 0); break;
        case 4: s->n = at; break;
        case 5: memset(nested, 0x91, sizeof nested), replace(s, at, 1, nested, sizeof nested); break;
        default: memcpy(half, s->bytes, s->n / 2), replace(s, at, 0, half, s->n / 2); break;
        }
    }
}

static void damage_fds(said *s, uint64_t *random) {
    const int kinds[] = {life, unsealed, small, pair_end, STDERR_FILENO};
    if (draw(random, 2)) return;
    s->n_fds = draw(random, 8) ? (int)draw(random, 4) : 72;
    for (int i = 0; i < s->n_fds; i++) s->fds[i] = kinds[draw(random, 5)];
}

static void say(int socket, const said *s) {
    struct iovec body = {(void *)s->bytes, s->n};
    union {
        char bytes[CMSG_SPACE(sizeof s->fds)];
        struct cmsghdr first;
    } side = {{0}};
    struct msghdr whole = {.msg_iov = &body, .msg_iovlen = 1};
    if (s->n_fds) {
        size_t bytes = (size_t)s->n_fds * sizeof(int);
        whole.msg_control = &side, whole.msg_controllen = CMSG_SPACE(bytes);
        side.first.cmsg_level = SOL_SOCKET, side.first.cmsg_type = SCM_RIGHTS, side.first.cmsg_len = CMSG_LEN(bytes);
        memcpy(CMSG_DATA(&side.first), s->fds, bytes);
    }
    sendmsg(socket, &whole, MSG_NOSIGNAL);
}

/* What it says; 0 at the end. Its descriptors are ours then. */
static size_t hear(int socket, said *s, int flags) {
    struct iovec body = {s->bytes, ROOM};
    union {
        char bytes[CMSG_SPACE(sizeof s->fds)];
        struct cmsghdr first;
    } side = {{0}};
    struct msghdr whole = {.msg_iov = &body, .msg_iovlen = 1, .msg_control = &side, .msg_controllen = sizeof side};
    ssize_t n = recvmsg(socket, &whole, MSG_CMSG_CLOEXEC | flags);
    struct cmsghdr *first = n >= 0 ? CMSG_FIRSTHDR(&whole) : NULL;
    s->n = n > 0 ? (size_t)n : 0, s->n_fds = first ? (int)((first->cmsg_len - CMSG_LEN(0)) / sizeof(int)) : 0;
    if (first) memcpy(s->fds, CMSG_DATA(first), (size_t)s->n_fds * sizeof(int));
    return s->n;
}

static void drop_fds(said *s) {
    while (s->n_fds) close(s->fds[--s->n_fds]);
}

/* ---- the device: calls ------------------------------------------------------------------------------------------- */

static void drop_burst(void) {
    for (int i = 0; i < 5; i++)
        if (shared.fds[i] >= 0) close(shared.fds[i]), shared.fds[i] = -1;
}

static void drop_near(void) {
    if (shared.near >= 0) close(shared.near);
    shared.near = -1;
}

/* The good answer. *far: to be closed afterwards. */
static void answer_well(said *call, said *answer, int *far) {
    static const unsigned char hello[] = {0x9b, 0, 0, 5, 0xa4, 'l', 'i', 'a', 'r', 0xa1, '1', 0xa3, 'C', 'P', 'U', 1, 1, 0, 0, 0x90};
    static const unsigned char number[] = {0x93, 0, 0, 2}, nothing[] = {0x92, 0, 0};
    bool is_hello = memmem(call->bytes, call->n, "hello", 5), is_burst = memmem(call->bytes, call->n, "\xa5" "burst", 6);
    *answer = (said){.n = 0};
    if (is_hello) memcpy(answer->bytes, hello, answer->n = sizeof hello);
    else if (is_burst || memmem(call->bytes, call->n, "prepare", 7)) memcpy(answer->bytes, number, answer->n = sizeof number);
    else memcpy(answer->bytes, nothing, answer->n = sizeof nothing);
    answer->bytes[1] = call->bytes[1];
    if (is_burst && call->n_fds == 5) {
        drop_burst();
        memcpy(shared.fds, call->fds, sizeof shared.fds);
        call->n_fds = 0;
    }
    if (memmem(call->bytes, call->n, "\xa4" "lane", 5)) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) stop("socketpair", errno);
        drop_near();
        shared.near = pair[0], *far = pair[1];
        say(shared.near, &shared.first);
        answer->fds[answer->n_fds++] = *far;
    }
    if (is_hello || is_burst || *far >= 0) answer->fds[answer->n_fds++] = life;
}

/* False: it lied, and hangs up. */
static bool serve_call(int connection) {
    said call, answer;
    int far = -1;
    if (!hear(connection, &call, 0)) return false;
    pthread_mutex_lock(&shared.lock);
    answer_well(&call, &answer, &far);
    bool lies = shared.lie < CALLBACK && memmem(call.bytes, call.n, methods[shared.lie], strlen(methods[shared.lie]));
    if (lies) damage(&answer, &shared.random), damage_fds(&answer, &shared.random);
    pthread_mutex_unlock(&shared.lock);
    say(connection, &answer);
    if (far >= 0) close(far);
    drop_fds(&call);
    return !lies;
}

static void *serve(void *argument) {
    int listener = *(int *)argument;
    for (int connection; (connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC)) >= 0; close(connection))
        while (serve_call(connection)) {}
    return NULL;
}

static void tell_lie(enum step lie, uint64_t random) {
    pthread_mutex_lock(&shared.lock);
    shared.lie = lie, shared.random = random;
    pthread_mutex_unlock(&shared.lock);
}

/* ---- the client -------------------------------------------------------------------------------------------------- */

typedef struct {
    burst_client *client;
    burst_builder *model;
    burst_compiled *compiled;
    burst_controller *burst;
    burst_pool *pool;
    burst_request *request;
    void *base;
} victim;

static void judge(enum step step, int r) {
    bool is_documented = (r >= 0 && r <= 8) || r == -EPIPE || r == -EBADMSG || r == -EPROTO || r == -ETIMEDOUT || r == -ESHUTDOWN;
    if (!is_documented) stop("a result that is not documented", r);
    if (r && !*burst_why()) stop("no reason", r);
    if (r >= 0) accepted[step]++;
    else refused[step]++;
}

static void new_model(victim *v) {
    const uint32_t shape[] = {4}, x[] = {0}, y[] = {1};
    if (burst_builder_new(&v->model) || burst_builder_operand(v->model, BURST_FLOAT32_TENSOR, 1, shape, 0, 0) ||
        burst_builder_operand(v->model, BURST_FLOAT32_TENSOR, 1, shape, 0, 0) != 1 || burst_builder_operation(v->model, "NEG", 1, x, 1, y) ||
        burst_builder_finish(v->model, 1, x, 1, y) || burst_pool_new(32, &v->pool, &v->base))
        stop("a model", 0);
}

static void close_burst(victim *v) {
    if (v->burst && burst_close(v->burst)) stop("closing", 0);
    if (v->request && burst_request_free(v->request)) stop("freeing", 0);
    v->burst = NULL, v->request = NULL;
}

static int open_burst(victim *v) {
    const burst_options options = {.size = sizeof options, .depth = 4, .measure = 1};
    const burst_tensor in = {.pool = v->pool, .length = 16}, out = {.pool = v->pool, .offset = 16, .length = 16};
    int r = burst_open(v->compiled, &options, &v->burst);
    if (r) return v->burst = NULL, r;
    r = burst_request_new(v->burst, 1, &in, 1, &out, &v->request);
    return r ? stop("a request", r), r : 0;
}

/* As far as that step; the result of the last call. */
static int reach(victim *v, const char *path, enum step step) {
    int r = burst_connect_path(path, &v->client);
    if (r) return v->client = NULL, r;
    r = burst_prepare(v->client, v->model, burst_now() + 5 * SECOND, &v->compiled);
    if (r) return v->compiled = NULL, r;
    return step == LANE || step == PLAIN ? 0 : open_burst(v);
}

static void let_go(victim *v) {
    close_burst(v);
    if (v->compiled) burst_compiled_free(v->compiled);
    if (v->client) burst_disconnect(v->client);
    v->compiled = NULL, v->client = NULL;
}

static int execute(victim *v, uint64_t *random) {
    const burst_tensor in = {.pool = v->pool, .length = 16}, out = {.pool = v->pool, .offset = 16, .length = 16};
    uint32_t words[64], at = 0, room = draw(random, 65);
    uint32_t *exact = malloc(room * sizeof *exact + 1); /* so that an access beyond it is seen */
    const burst_execution how = {.size = sizeof how, .measure = 1, .room = room, .shapes = exact};
    burst_outcome outcome;
    int r = burst_execute(v->compiled, 1, &in, 1, &out, &how, burst_now() + 5 * SECOND, &outcome);
    if (r == -ETIMEDOUT) stop("an answer was there", r);
    for (uint32_t i = 0; r >= 0 && i < outcome.n_shapes; i++) {
        if (at + 2 > room || exact[at] > 1 || exact[at + 1] > room - at - 2) stop("shapes beyond their room", r);
        memcpy(words, exact + at + 2, exact[at + 1] * sizeof *words);
        at += 2 + exact[at + 1];
    }
    free(exact);
    return r;
}

/* ---- cases ------------------------------------------------------------------------------------------------------- */

static void lie_in_call(victim *v, const char *path, enum step step, uint64_t *random) {
    tell_lie(step, draw(random, UINT32_MAX));
    int r = reach(v, path, step);
    if (!r && step == LANE) r = execute(v, random);
    if (step != NONE) judge(step, r);
    tell_lie(NONE, 0);
    let_go(v);
}

static void ask_back(victim *v, const char *path, uint64_t *random) {
    static const unsigned char good[] = "\x92\xacget_memories\x92\x00\x01";
    if (reach(v, path, CALLBACK)) stop("a good device", 0);
    for (int i = 0; i < BATCH; i++) {
        said question = {.n = sizeof good - 1}, answer;
        memcpy(question.bytes, good, question.n);
        if (!draw(random, 2)) question.bytes[question.n - 3] = 0x91, question.n--;
        damage(&question, random);
        if (!draw(random, 4)) damage_fds(&question, random);
        say(shared.fds[2], &question);
        bool is_answered = hear(shared.fds[2], &answer, 0);
        accepted[CALLBACK] += is_answered, refused[CALLBACK] += !is_answered;
        drop_fds(&answer);
        if (is_answered) continue;
        close_burst(v);
        if (open_burst(v)) stop("a good device", 0);
    }
    let_go(v);
}

typedef struct {
    void *maps[2];
    fmq_end *ends[2];
    burst_trace *trace;
} device_side;

static void attach(device_side *d) {
    const fmq_shape shape = {LENGTH, HASH, ELEMENT, FMQ_SYNCHRONIZED};
    for (int i = 0; i < 2; i++)
        if (fmq_map(shared.fds[i], QUEUE, 1, &d->maps[i]) ||
            fmq_open(d->maps[i], (char *)d->maps[i] + PAGE, &shape, i ? FMQ_WRITER : FMQ_READER, &d->ends[i]))
            stop("a queue", i);
    d->trace = mmap(NULL, sizeof *d->trace, PROT_READ | PROT_WRITE, MAP_SHARED, shared.fds[4], 0);
    if (d->trace == MAP_FAILED) stop("a trace", errno);
}

static void detach(device_side *d) {
    for (int i = 0; i < 2; i++) fmq_free(d->ends[i]), fmq_unmap(d->maps[i], QUEUE);
    munmap(d->trace, sizeof *d->trace);
}

static void scribble(void *memory, size_t n, uint64_t *random) {
    for (int i = 0; i < 40; i++) ((unsigned char *)memory)[draw(random, (uint32_t)n)] = (unsigned char)draw(random, 256);
}

static void answer_request(device_side *d, uint64_t id, uint64_t *random) {
    unsigned char read[LENGTH * ELEMENT], packet[2 * MOST];
    uint32_t which = draw(random, n_packets), n = sizes[which];
    fmq_read(d->ends[0], read, (uint64_t)fmq_available(d->ends[0]), 0, 0);
    memcpy(packet, packets[which], n);
    memcpy(packet + n - 16, &id, sizeof id);
    for (uint32_t i = draw(random, 3); i; i--) packet[draw(random, draw(random, 8) ? n - ELEMENT : n)] = (unsigned char)(draw(random, 2) ? draw(random, 4) : draw(random, 256));
    if (!draw(random, 16)) n = ELEMENT * (1 + draw(random, n / ELEMENT));
    scribble(d->trace, sizeof *d->trace, random);
    fmq_write(d->ends[1], packet, n / ELEMENT, 0, 0);
}

/* The bursts end after a lie that is seen; the next one begins with the request 1. */
static void lie_in_results(victim *v, const char *path, uint64_t *random) {
    device_side d;
    uint64_t id = 0;
    if (reach(v, path, RESULT)) stop("a good device", 0);
    attach(&d);
    for (int i = 0; i < BATCH; i++) {
        burst_outcome outcome;
        int r = burst_submit(v->burst, v->request, BURST_FOREVER, NULL);
        if (!r) answer_request(&d, ++id, random), r = burst_await(v->burst, burst_now() + 300000, &outcome);
        judge(RESULT, r);
        for (uint32_t k = 0; r >= 0 && k < outcome.n_shapes; k++)
            if (burst_output_shape(v->burst, k, NULL, 0) < 0) stop("a shape", r);
        if (r >= 0) continue;
        detach(&d);
        close_burst(v);
        if (open_burst(v)) stop("a good device", 0);
        attach(&d), id = 0;
    }
    detach(&d);
    let_go(v);
}

static void lie_on_the_plain_path(victim *v, const char *path, uint64_t *random) {
    static const unsigned char good[] = {0x92, 1, 0x94, 0, 0x91, 0x92, 0x92, 1, 4, 0xc3, 0x92, 0xc0, 7, 0xa2, 'h', 'i'};
    bool is_open = false;
    unsigned char number = 1; /* of executions on this socket */
    if (reach(v, path, PLAIN)) stop("a good device", 0);
    for (int i = 0; i < BATCH; i++) {
        said answer = {.n = sizeof good}, heard;
        memcpy(answer.bytes, good, answer.n);
        answer.bytes[1] = number;
        damage(&answer, random);
        if (!draw(random, 8)) damage_fds(&answer, random);
        pthread_mutex_lock(&shared.lock);
        shared.first = answer;
        if (is_open) say(shared.near, &answer);
        pthread_mutex_unlock(&shared.lock);
        int r = execute(v, random);
        judge(PLAIN, r);
        is_open = r >= 0;
        number = is_open ? (unsigned char)(number + 1) : 1;
        while (hear(shared.near, &heard, MSG_DONTWAIT)) drop_fds(&heard);
    }
    let_go(v);
}

/* ---- all --------------------------------------------------------------------------------------------------------- */

static void read_packets(const char *path) {
    FILE *file = fopen(path, "rb");
    while (file && n_packets < 64 && fread(&sizes[n_packets], 4, 1, file) == 1)
        if (sizes[n_packets] > MOST || fread(packets[n_packets], sizes[n_packets], 1, file) != 1) stop("the file of results", 0);
        else n_packets++;
    if (!file || fclose(file) || !n_packets) stop("no file of results", 0);
}

static int new_memory(size_t bytes, bool is_sealed) {
    int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) || (is_sealed && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW))) stop("memory", errno);
    return fd;
}

static int listen_at(const char *path) {
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), pair[2];
    snprintf(at.sun_path, sizeof at.sun_path, "%s", path);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 8)) stop("listening", errno);
    life = new_memory(PAGE, true), unsealed = new_memory(PAGE, false), small = new_memory(100, true);
    if (fmq_life_hold(life, 0, 0) < 0 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair)) stop("a life", errno);
    pair_end = pair[0];
    return close(pair[1]), fd;
}

static int count_fds(void) {
    DIR *folder = opendir("/proc/self/fd");
    int n = 0;
    while (readdir(folder)) n++;
    return closedir(folder), n;
}

static uint64_t count_cases(void) {
    uint64_t n = 0;
    for (int i = 0; i < STEPS; i++) n += accepted[i] + refused[i];
    return n;
}

static void run_one(victim *v, const char *path, uint64_t *random) {
    uint32_t which = draw(random, 24);
    if (which == 0) lie_in_results(v, path, random);
    else if (which == 1) lie_on_the_plain_path(v, path, random);
    else if (which == 2) ask_back(v, path, random);
    else lie_in_call(v, path, which < 10 ? HELLO : which < 15 ? PREPARE : which < 19 ? BURST : LANE, random);
    drop_burst(), drop_near();
}

int main(int argc, char **argv) {
    char folder[] = "/tmp/burst-fuzz-XXXXXX", path[64];
    victim v = {.client = NULL};
    pthread_t device;
    if (argc != 4 || !mkdtemp(folder)) return fprintf(stderr, "fuzz_answers: fuzz_answers CASES SEED FILE\n"), 1;
    uint64_t cases = strtoull(argv[1], NULL, 10), random = strtoull(argv[2], NULL, 10);
    read_packets(argv[3]);
    snprintf(path, sizeof path, "%s/liar", folder);
    int listener = listen_at(path);
    pthread_create(&device, NULL, serve, &listener);
    new_model(&v);
    lie_in_call(&v, path, NONE, &random); /* what a process has once is there now */
    drop_burst();
    int before = count_fds();
    while (count_cases() < cases) run_one(&v, path, &random);
    for (int i = 0; count_fds() > before + 1; i++) /* the device's last connection, perhaps */
        if (i == 5000) stop("descriptors stay open", count_fds() - before);
        else usleep(1000);
    burst_pool_free(v.pool), burst_builder_free(v.model);
    shutdown(listener, SHUT_RDWR), pthread_join(device, NULL);
    unlink(path), rmdir(folder);
    for (int i = 0; i < STEPS; i++) printf("%llu %llu\n", (unsigned long long)accepted[i], (unsigned long long)refused[i]);
}
