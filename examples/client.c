/* A client of a running device without any Python, written from docs/protocol.md and csrc/fmq/ alone.
 *
 * Adds float32[1,4] tensors on the device "reference": connects, prepares the model, opens a burst, sends requests one
 * after the other, and says what came back and how long the median round trip took.
 *
 *     cc -std=c11 -O2 -Wall -Wextra -Werror -pthread -I csrc examples/client.c csrc/fmq/[a-z]*.c -o client
 *     ./client [requests [newest wire version to offer]]
 */
#define _GNU_SOURCE
#include <stdint.h>

#include "fmq/api.h"
#include "client_messages.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { PROTOCOL = 4, INVALID_ARGUMENT = 4 };
enum { CONTROL = 4096, DTYPE_AT = 1024, WRITER_LIFE_AT = 768, READER_LIFE_AT = 896 };
enum { DATUM = 24, LENGTH = 1024, SLOT = 0, MOST_REQUESTS = 1000000 };
enum { TENSOR_FLOAT32 = 3, INT32 = 1, MODEL_INPUT = 1, MODEL_OUTPUT = 2, CONSTANT = 3 };
enum { X_AT = 0, Y_AT = 64, SUM_AT = 128, TENSOR = 4 * sizeof(float), POOL = 192 };
static const char DTYPE[] = "'|V24'";
static const uint64_t DTYPE_HASH = UINT64_C(0xf4cbbbf41608a154), NONE = UINT64_MAX, SPIN_NS = 50000;

static int checked(int result, const char *what) {
    if (result < 0) die("%s: %s", what, strerror(result == -1 ? errno : -result));
    return result;
}

/* ---- the device: finding it, and calls --------------------------------------------------------------------------- */

static int find_device(const char *name) {
    const char *own = getenv("BURST_RUNTIME_DIR"), *base = getenv("XDG_RUNTIME_DIR");
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    const size_t most = sizeof at.sun_path;
    int length;
    if (own && *own) length = snprintf(at.sun_path, most, "%s/%s.sock", own, name);
    else if (base && *base) length = snprintf(at.sun_path, most, "%s/burst/%s.sock", base, name);
    else length = snprintf(at.sun_path, most, "/tmp/burst-%u/%s.sock", getuid(), name);
    if (length >= (int)most) die("%s...: a socket's path has at most 107 bytes", at.sun_path);
    int device = checked(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), "socket");
    if (connect(device, (struct sockaddr *)&at, sizeof at))
        die("no device at %s (%s); start it: "
            "python -c \"import driver, signal; d = driver.connect('%s'); signal.pause()\"",
            at.sun_path, strerror(errno), name);
    struct ucred peer;
    socklen_t size = sizeof peer;
    checked(getsockopt(device, SOL_SOCKET, SO_PEERCRED, &peer, &size), "SO_PEERCRED");
    if (peer.uid != getuid()) die("%s belongs to another user; remove it", at.sun_path);
    return device;
}

static void begin_call(message *m, const char *method) {
    static int number;
    m->length = 0, m->n_fds = 0;
    put(m, "is", ++number, method); /* call() puts the array's head in front */
}

/* [number, method, arguments...] there, [number, status, values...] back. Returns how many values m has next. */
static int call(int device, message *m, int arguments) {
    memmove(m->bytes + 1, m->bytes, m->length++);
    m->bytes[0] = (unsigned char)(0x90 | (2 + arguments));
    if (send_message(device, m) || !receive_message(device, m)) die("the device died, or ended, with a call to answer");
    int values = (int)take_the('a', m) - 2;
    take_the('i', m);
    int status = (int)take_the('i', m);
    if (!status) return values;
    int length = (int)take_the('s', m);
    die("the device refuses: %.*s (status %d)", length, m->bytes + m->at, status);
}

/* The life page that came with an answer: the word that tells us of a process's death while we wait for it. */
static void *life_page(message *m) {
    void *life;
    struct stat status;
    if (m->n_fds != 1) die("an answer with %d descriptors; a life page is one", m->n_fds);
    int seals = checked(fcntl(m->fds[0], F_GET_SEALS), "the life page's seals");
    if (!(seals & F_SEAL_SHRINK) || fstat(m->fds[0], &status) || status.st_size < CONTROL)
        die("the life page that came with an answer is not sealed, or too small");
    checked(fmq_map(m->fds[0], CONTROL, 0, &life), "mapping the life page");
    close(m->fds[0]);
    return life;
}

/* hello: who is there. */
static void greet(int device, message *m) {
    begin_call(m, "hello");
    put(m, "i", PROTOCOL);
    if (call(device, m, 1) != 9) die("hello was not answered with 9 values");
    checked((int)fmq_watch(life_page(m), device), "fmq_watch"); /* shuts our socket down when the device dies */
}

/* ---- memory and the model ---------------------------------------------------------------------------------------- */

static int new_memory(size_t bytes, int more_seals, const void *content) {
    int fd = checked(memfd_create("client", MFD_CLOEXEC | MFD_ALLOW_SEALING), "memfd_create");
    checked(ftruncate(fd, (off_t)bytes), "ftruncate");
    if (content && pwrite(fd, content, bytes, 0) != (ssize_t)bytes) die("%zu bytes cannot be written", bytes);
    checked(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | more_seals), "sealing memory");
    return fd;
}

/* x + y, without an activation function. Returns its number on the device. */
static int prepare_add(int device, message *m) {
    message model = {0};
    put(&model, "iiii", 0, 0, 0, 0);                                        /* the constant: int32 0, 4 bytes */
    put(&model, "3ibi", 1, 0, 1);                                           /* version, relaxed, subgraphs */
    put(&model, "4ii2ii1i", 4, 1, 0, 1, 3);                                 /* operands, operations, inputs, outputs */
    put(&model, "8i2iifiinnn", TENSOR_FLOAT32, 1, 4, 0.0, 0, MODEL_INPUT);  /* 0: x */
    put(&model, "8i2iifiinnn", TENSOR_FLOAT32, 1, 4, 0.0, 0, MODEL_INPUT);  /* 1: y */
    put(&model, "8i0fii2iinn", INT32, 0.0, 0, CONSTANT, 0, 4);              /* 2: no activation, 4 bytes at 0 */
    put(&model, "8i2iifiinnn", TENSOR_FLOAT32, 1, 4, 0.0, 0, MODEL_OUTPUT); /* 3: the sum */
    put(&model, "3s3iii1i", "ADD", 0, 1, 2, 3);
    int fd = new_memory(model.length, F_SEAL_WRITE, model.bytes);
    begin_call(m, "prepare");
    put(m, "2ii", 4, (int)model.length - 4);
    m->fds[m->n_fds++] = fd;
    call(device, m, 1);
    close(fd);
    return (int)take_the('i', m);
}

/* ---- queues ------------------------------------------------------------------------------------------------------ */

typedef struct {
    int fd, lock, life;
    fmq_end *end;
} queue;

static queue new_queue(int role) {
    const size_t bytes = CONTROL + LENGTH * DATUM; /* whole pages */
    const fmq_shape shape = {LENGTH, DTYPE_HASH, DATUM, FMQ_SYNCHRONIZED};
    queue q = {.fd = new_memory(bytes, 0, NULL)};
    void *control;
    char path[40];
    checked(fmq_map(q.fd, bytes, 1, &control), "mapping a queue");
    memcpy((char *)control + DTYPE_AT, DTYPE, sizeof DTYPE - 1);
    checked(fmq_format(control, &shape), "fmq_format");
    /* Our role: a lock that ends with us, on a file description that nobody else gets, and a life word. */
    snprintf(path, sizeof path, "/proc/self/fd/%d", q.fd);
    q.lock = checked(open(path, O_RDWR | O_CLOEXEC), path);
    struct flock one = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = role, .l_len = 1};
    checked(fcntl(q.lock, F_OFD_SETLK, &one), "taking a queue's role");
    q.life = checked(fmq_life_hold(q.lock, role == FMQ_WRITER ? WRITER_LIFE_AT : READER_LIFE_AT, 0), "fmq_life_hold");
    checked(fmq_open(control, (char *)control + CONTROL, &shape, role, &q.end), "fmq_open");
    return q;
}

/* Version, dtype, flavour, and of the control page and the ring: number of the descriptor, offset, bytes. */
static void put_queue(message *m) {
    put(m, "4isi23iii3iii", 2, DTYPE, FMQ_SYNCHRONIZED, 0, 0, CONTROL, 0, CONTROL, LENGTH * DATUM);
}

static void close_queue(queue *q) {
    fmq_stop(q->end);
    fmq_life_release(q->life); /* the other side is told that we left in good order */
    close(q->lock);
    close(q->fd);
    fmq_free(q->end);
}

static void transferred(int result) {
    if (result == -EPIPE) die("the device died with a request in flight");
    if (result == -ESHUTDOWN) die("the device ended this burst");
    checked(result, "the burst is broken");
}

static void read_elements(queue *q, unsigned char *to, uint64_t n) {
    int result;
    while ((result = fmq_read(q->end, to, n, SPIN_NS, NONE)) == -EINTR) {}
    transferred(result);
}

static void write_elements(queue *q, const unsigned char *from, uint64_t n) {
    int result;
    while ((result = fmq_write(q->end, from, n, SPIN_NS, NONE)) == -EINTR) {}
    transferred(result);
}

/* ---- the burst --------------------------------------------------------------------------------------------------- */

typedef struct {
    queue requests, results;
    int callback, context, pool, version;
    int64_t link;
} burst;

/* A thread: the device asks for the memory behind slots, all of it or none. */
static void *hand_over(void *argument) {
    const burst *b = argument;
    message question, answer;
    while (receive_message(b->callback, &question)) {
        int64_t slots, slot = SLOT, known = 0;
        if (take_the('a', &question) != 2) die("the device asks for something that we do not know");
        question.at += (size_t)take_the('s', &question); /* "get_memories", the only question */
        slots = take_the('a', &question);
        while (known < slots && (slot = take_the('i', &question)) == SLOT) known++;
        answer.length = 0, answer.n_fds = 0;
        if (slot != SLOT || slots != 1) put(&answer, "2is", INVALID_ARGUMENT, "there is one slot, 0");
        else put(&answer, "2i13sib", 0, "ashmem", POOL, 1), answer.fds[answer.n_fds++] = b->pool; /* its bytes; it is sealed */
        if (send_message(b->callback, &answer)) break;
    }
    return NULL;
}

/* Gives the device the far ends of everything. `b` must stay where it is. */
static void configure(int device, message *m, int model, int newest, burst *b) {
    int callback[2], context[2];
    pthread_t thread;
    checked(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, callback), "socketpair");
    checked(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, context), "socketpair");
    b->requests = new_queue(FMQ_WRITER), b->results = new_queue(FMQ_READER);
    b->callback = callback[0], b->context = context[0];
    checked(-pthread_create(&thread, NULL, hand_over, b), "pthread_create");
    pthread_detach(thread);
    begin_call(m, "burst");
    put(m, "i", model);
    put_queue(m), put_queue(m);
    put(m, "f", (double)SPIN_NS / 1e9);
    put(m, newest > 1 ? "2ii" : "1i", newest, 1); /* the versions that we speak */
    memcpy(m->fds, (int[]){b->requests.fd, b->results.fd, callback[1], context[1]}, 4 * sizeof(int));
    m->n_fds = 4;
    if (call(device, m, 5) != 1) die("the device names no wire version");
    b->version = (int)take_the('i', m);
    if (b->version < 1 || b->version > newest) die("the device chose wire version %d", b->version);
    /* The device's word is not in our queues; and should it never be marked, the context ends with the device. */
    void *life = life_page(m);
    fmq_follow(b->requests.end, life), fmq_follow(b->results.end, life);
    b->link = fmq_link(b->results.end, context[0]);
    checked((int)b->link, "fmq_link");
    close(callback[1]), close(context[1]);
}

static unsigned char *element(unsigned char *at, int kind) {
    memset(at, 0, DATUM);
    *at = (unsigned char)kind;
    return at;
}

/* Little-endian, as we are. */
static void put_u32(unsigned char *at, uint32_t value) { memcpy(at, &value, sizeof value); }
static void put_u64(unsigned char *at, uint64_t value) { memcpy(at, &value, sizeof value); }
static uint32_t u32(const unsigned char *at) { uint32_t value; return memcpy(&value, at, sizeof value), value; }
static uint64_t u64(const unsigned char *at) { uint64_t value; return memcpy(&value, at, sizeof value), value; }

/* x, y and the sum, all in the pool of slot 0. Returns how many elements. In version 2 the last one takes the id. */
static uint32_t encode(unsigned char *packet, int version) {
    static const struct { int kind, offset; } arguments[] = {{1, X_AT}, {1, Y_AT}, {3, SUM_AT}};
    uint32_t n = 1;
    for (int i = 0; i < 3; i++) {
        unsigned char *at = element(packet + DATUM * n++, arguments[i].kind);
        put_u32(at + 12, (uint32_t)arguments[i].offset); /* hasNoValue 0, poolIndex 0, offset, length, no dimensions */
        put_u32(at + 16, TENSOR);
    }
    put_u32(element(packet + DATUM * n++, 5) + 4, SLOT);
    element(packet + DATUM * n++, 6); /* measureTiming: NO */
    if (version >= 2) put_u64(element(packet + DATUM * n++, 8) + 8, NONE);
    if (version >= 2) put_u64(element(packet + DATUM * n++, 9) + 16, NONE);
    const uint32_t counts[] = {n, 2, 1, 1};
    memcpy(element(packet, 0) + 4, counts, sizeof counts);
    return n;
}

static void run(burst *b, const unsigned char *request, uint32_t size, uint64_t id) {
    static unsigned char result[LENGTH * DATUM];
    write_elements(&b->requests, request, size);
    read_elements(&b->results, result, 1);
    uint32_t elements = u32(result + 8), status = u32(result + 12);
    if (*result || elements < 2 || elements > LENGTH) die("a result of %u elements", elements);
    read_elements(&b->results, result + DATUM, elements - 1);
    if (status) die("request %" PRIu64 " failed with status %u", id, status);
    if (b->version >= 2 && u64(result + DATUM * (elements - 1) + 8) != id) die("a result of another request");
}

static int by_size(const void *a, const void *b) {
    uint64_t one = *(const uint64_t *)a, other = *(const uint64_t *)b;
    return (one > other) - (one < other);
}

/* Sends n requests, checks every sum, and reports. */
static void measure(burst *b, unsigned char *pool, uint64_t n) {
    static uint64_t took[MOST_REQUESTS];
    unsigned char request[8 * DATUM];
    float *x = (void *)(pool + X_AT), *y = (void *)(pool + Y_AT), *sum = (void *)(pool + SUM_AT);
    uint32_t size = encode(request, b->version);
    for (uint64_t id = 1; id <= n; id++) {
        for (int i = 0; i < 4; i++) x[i] = (float)(id + (uint64_t)i), y[i] = 10.0f * (float)(i + 1);
        if (b->version >= 2) put_u64(request + DATUM * (size - 1) + 8, id);
        uint64_t begin = fmq_now();
        run(b, request, size, id);
        took[id - 1] = fmq_now() - begin;
        for (int i = 0; i < 4; i++)
            if (sum[i] != x[i] + y[i]) die("%g + %g is not %g, in request %" PRIu64, x[i], y[i], sum[i], id);
        if (id != 1 && id != n) continue;
        printf("%" PRIu64 ": %g %g %g %g\n", id, sum[0], sum[1], sum[2], sum[3]);
        fflush(stdout);
    }
    qsort(took, n, sizeof *took, by_size);
    printf("%" PRIu64 " requests in wire version %d, median %.2f us\n", n, b->version, (double)took[n / 2] / 1e3);
}

int main(int argc, char **argv) {
    static message m;
    static burst b;
    void *pool;
    long n = argc > 1 ? atol(argv[1]) : 1000, newest = argc > 2 ? atol(argv[2]) : 2;
    if (n < 1 || n > MOST_REQUESTS || newest < 1 || newest > 2)
        die("client [requests, 1 to %d [newest wire version to offer, 1 or 2]]", MOST_REQUESTS);
    int device = find_device("reference");
    greet(device, &m);
    int model = prepare_add(device, &m);
    b.pool = new_memory(POOL, 0, NULL);
    checked(fmq_map(b.pool, POOL, 1, &pool), "mapping the pool");
    configure(device, &m, model, (int)newest, &b);
    measure(&b, pool, (uint64_t)n);
    m.length = 0, m.n_fds = 0;
    put(&m, "2si", "free_memory", SLOT); /* slot 0 would never be used again */
    send_message(b.context, &m);
    fmq_unlink(b.link); /* before fmq_free: the life thread would tell an end that is gone */
    close_queue(&b.requests), close_queue(&b.results);
    close(b.context), shutdown(b.callback, SHUT_RDWR);
    begin_call(&m, "free");
    put(&m, "i", model);
    call(device, &m, 1);
    return 0;
}
