/* The two sockets of a burst, on the client's side, and the thread that answers devices on the
 * first.
 *
 * On the *callback* a device asks for the memory behind slots; messages there are rare, and one
 * thread of the process serves all bursts. On the *context* the client says which slots it frees,
 * and its end ends the burst: docs/protocol.md, sections 6 and 9.
 *
 * The thread names a burst by a token, never by an address, and marks the one that it serves; who
 * closes that waits until it is done. It takes no signals, which are the program's, and needs no
 * lock of the program's language.
 */
#define _GNU_SOURCE
#include <stdint.h>

#include "burst/api.h"

#include "burst/failure.h"
#include "burst/messages.h"
#include "burst/packet.h"
#include "burst/slots.h"
#include "fmq/thread.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

const char *burst_why(void) { return last_failure(); }

enum { EVENTS = 16, BLOCK = 512, PATIENCE_S = 5 };

struct burst_sockets {
    struct burst_sockets *next;
    uint64_t token;
    int callback, context;
    burst_slots *slots;
    _Atomic bool is_foreign;
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t was_served;
    burst_sockets *first;
    const burst_sockets *serves;
    uint64_t last_token;
    int poll; /* the thread's; or -1 */
    bool is_registered;
} callbacks = {
    .lock = PTHREAD_MUTEX_INITIALIZER, .was_served = PTHREAD_COND_INITIALIZER, .poll = -1};

/* ---- the answer ------------------------------------------------------------------------------ */

/* Memory with holes is paid by who touches them first, so a device takes from another account only
 * what has all its pages. Seals are a property of memory alone: on anything else this does nothing,
 * and the device refuses what it has to. */
void burst_fill_holes(int fd) {
    struct stat found;
    if (fcntl(fd, F_GET_SEALS) < 0 || fstat(fd, &found) || found.st_blocks * BLOCK >= found.st_size)
        return;
    while (posix_fallocate(fd, 0, found.st_size) == EINTR) {}
}

/* False: this is no question of this version. */
static bool read_question(message *m, int64_t *slots, uint32_t *n) {
    char method[16];
    int64_t values;
    bool is_known = take_as(m, ARRAY, &values) && values == 2 &&
                    take_text(m, method, sizeof method) && !strcmp(method, "get_memories");
    if (!is_known || m->n_fds || !take_as(m, ARRAY, &values) || values > MOST_FDS) return false;
    *n = (uint32_t)values;
    for (uint32_t i = 0; i < *n; i++)
        if (!take_as(m, INTEGER, &slots[i])) return false;
    return true;
}

static void *close_fds(void *argument) {
    message_close_fds(argument);
    free(argument);
    return NULL;
}

/* Closing a descriptor can take as long as it pleases who is behind it, a socket that lingers or a
 * file system, and so takes a thread. */
static void drop_fds(message *m) {
    message *dropped = m->n_fds ? calloc(1, sizeof *dropped) : NULL;
    if (!dropped) {
        message_close_fds(m);
        return;
    }
    memcpy(dropped->fds, m->fds, sizeof m->fds);
    dropped->n_fds = m->n_fds, m->n_fds = 0;
    if (thread_start(close_fds, dropped, "burst-closing")) close_fds(dropped);
}

/* False: the device gets no answer any more. One that does not read what it asked for is not waited
 * for. */
static bool answer_device(burst_sockets *b, message *question, message *answer) {
    int64_t slots[MOST_FDS];
    uint32_t n;
    if (!read_question(question, slots, &n)) return false;
    message_reset(answer);
    put_array(answer, 2);
    put_int(answer, 0);
    bool is_memory;
    int fault = slots_describe(b->slots, slots, n, answer, &is_memory);
    if (fault) {
        drop_fds(answer);
        message_reset(answer);
        put_array(answer, 2);
        put_int(answer, fault == -EMFILE ? RESOURCE_EXHAUSTED_TRANSIENT : INVALID_ARGUMENT);
        put_text(answer, last_failure());
    }
    for (int i = 0; b->is_foreign && i < answer->n_fds; i++) burst_fill_holes(answer->fds[i]);
    int r = message_offer(b->callback, answer);
    if (is_memory) message_close_fds(answer);
    else drop_fds(answer);
    return !r;
}

static bool serve_one(burst_sockets *b, message *question, message *answer) {
    int r = message_receive(b->callback, question, 0);
    if (r == -ETIMEDOUT) return true;
    bool is_answered = !r && answer_device(b, question, answer);
    drop_fds(question);
    return is_answered;
}

/* ---- the thread ------------------------------------------------------------------------------ */

static burst_sockets *begin_serving(uint64_t token) {
    pthread_mutex_lock(&callbacks.lock);
    burst_sockets *b = callbacks.first;
    while (b && b->token != token) b = b->next;
    callbacks.serves = b;
    pthread_mutex_unlock(&callbacks.lock);
    return b;
}

static void end_serving(void) {
    pthread_mutex_lock(&callbacks.lock);
    callbacks.serves = NULL;
    pthread_cond_broadcast(&callbacks.was_served);
    pthread_mutex_unlock(&callbacks.lock);
}

static void *serve_callbacks(void *argument) {
    int poll = (int)(intptr_t)argument;
    struct epoll_event events[EVENTS];
    message question = {0}, answer = {0};
    for (;;) {
        int n = epoll_wait(poll, events, EVENTS, -1);
        for (int i = 0; i < n; i++) {
            burst_sockets *b = begin_serving(events[i].data.u64);
            if (b && !serve_one(b, &question, &answer)) {
                epoll_ctl(poll, EPOLL_CTL_DEL, b->callback, NULL);
                shutdown(b->callback, SHUT_RDWR);
            }
            end_serving();
        }
    }
    return NULL;
}

/* ---- forks ----------------------------------------------------------------------------------- */

static void before_fork(void) { pthread_mutex_lock(&callbacks.lock); }
static void in_parent(void) { pthread_mutex_unlock(&callbacks.lock); }

/* The child has no thread; the bursts are its parent's, and it can only close its copies of their
 * sockets. */
static void in_child(void) {
    pthread_mutex_init(&callbacks.lock, NULL);
    pthread_cond_init(&callbacks.was_served, NULL);
    for (burst_sockets *b = callbacks.first; b; b = b->next) slots_forget_lock(b->slots);
    callbacks.first = NULL, callbacks.serves = NULL;
    if (callbacks.poll >= 0) close(callbacks.poll);
    callbacks.poll = -1;
}

/* ---- a burst's ------------------------------------------------------------------------------- */

static int begin_polling(void) {
    if (callbacks.poll >= 0) return 0;
    if (!callbacks.is_registered)
        callbacks.is_registered = !pthread_atfork(before_fork, in_parent, in_child);
    int poll = epoll_create1(EPOLL_CLOEXEC);
    if (poll < 0) return fail_kernel("epoll_create1");
    int r = thread_start(serve_callbacks, (void *)(intptr_t)poll, "burst-callbacks");
    if (r)
        return close(poll), fail(r, "no thread for the bursts of this process: %s", strerror(-r));
    callbacks.poll = poll;
    return 0;
}

static int add(burst_sockets *b) {
    pthread_mutex_lock(&callbacks.lock);
    int r = begin_polling();
    b->token = ++callbacks.last_token;
    struct epoll_event readable = {.events = EPOLLIN, .data.u64 = b->token};
    if (!r && epoll_ctl(callbacks.poll, EPOLL_CTL_ADD, b->callback, &readable))
        r = fail_kernel("epoll_ctl");
    if (!r) b->next = callbacks.first, callbacks.first = b;
    pthread_mutex_unlock(&callbacks.lock);
    return r;
}

/* From its return on the thread does not know it. */
static void discard(const burst_sockets *b) {
    pthread_mutex_lock(&callbacks.lock);
    burst_sockets **at = &callbacks.first;
    while (*at && *at != b) at = &(*at)->next;
    if (*at) {
        *at = b->next;
        epoll_ctl(callbacks.poll, EPOLL_CTL_DEL, b->callback, NULL);
    }
    while (callbacks.serves == b) pthread_cond_wait(&callbacks.was_served, &callbacks.lock);
    pthread_mutex_unlock(&callbacks.lock);
}

static int make_pair(int *near, int *far) {
    /* A device that never reads must not hold us up. */
    const struct timeval patience = {PATIENCE_S, 0};
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends))
        return fail_kernel("socketpair");
    setsockopt(ends[0], SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    *near = ends[0], *far = ends[1];
    return 0;
}

int burst_sockets_open(burst_slots *slots, int far[2], burst_sockets **out) {
    burst_sockets *b = calloc(1, sizeof *b);
    if (!b) return fail(-ENOMEM, "no memory for a burst");
    b->slots = slots_hold(slots), b->callback = b->context = far[0] = far[1] = -1;
    int r = make_pair(&b->callback, &far[0]);
    if (!r) r = make_pair(&b->context, &far[1]);
    if (!r) r = add(b);
    if (!r) return *out = b, 0;
    for (int i = 0; i < 2; i++)
        if (far[i] >= 0) close(far[i]);
    burst_sockets_free(b);
    return r;
}

void burst_sockets_fill(burst_sockets *b) { b->is_foreign = true; }
int burst_sockets_context(const burst_sockets *b) { return b->context; }

int burst_sockets_tell(burst_sockets *b, const int64_t *slots, uint32_t n) {
    message m = {0};
    put_array(&m, 1 + n);
    put_text(&m, "free_memory");
    for (uint32_t i = 0; i < n; i++) put_int(&m, slots[i]);
    int r = message_send(b->context, &m);
    message_free(&m);
    return r;
}

void burst_sockets_close(burst_sockets *b) {
    discard(b);
    if (b->callback >= 0) close(b->callback);
    if (b->context >= 0) close(b->context);
    b->callback = b->context = -1;
}

void burst_sockets_free(burst_sockets *b) {
    if (!b) return;
    burst_sockets_close(b);
    burst_slots_free(b->slots);
    free(b);
}
