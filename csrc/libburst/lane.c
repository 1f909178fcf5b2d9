/* Opening a burst on the device, and its end: docs/protocol.md, sections 6, 8 and 9. */
#define _GNU_SOURCE
#include "libburst/lane.h"

#include "fmq/api.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum { DTYPE_AT = 1024, WRITER_LIFE_AT = 768, READER_LIFE_AT = 896, QUEUE_BYTES = PAGE + LENGTH * ELEMENT };
enum { OPEN_S = 60 };
static const char DTYPE[] = "'|V24'";
static const uint64_t DTYPE_HASH = UINT64_C(0xf4cbbbf41608a154);
static const uint64_t HOLD_NS = 0;

/* ---- slots ------------------------------------------------------------------------------------------------------- */

static slot_entry *find_slot(slot_table *t, int64_t slot) {
    for (uint32_t i = 0; i < t->count; i++)
        if (t->entries[i].slot == slot) return &t->entries[i];
    return NULL;
}

static int add_slot(slot_table *t, pool *p) {
    for (uint32_t i = 0; i < t->count; i++)
        if (t->entries[i].pool == p) return t->entries[i].uses++, t->entries[i].slot;
    if (t->next == INT32_MAX) return fail(-ENOSPC, "2^31 pools were used in this burst; open another one");
    if (t->count == t->room) {
        slot_entry *entries = realloc(t->entries, (2 * t->room + 8) * sizeof *entries);
        if (!entries) return fail(-ENOMEM, "no memory for a slot");
        t->entries = entries, t->room = 2 * t->room + 8;
    }
    t->entries[t->count++] = (slot_entry){t->next, 1, object_hold(p)};
    return t->next++;
}

int slots_add(slot_table *t, pool *p) {
    pthread_mutex_lock(&t->lock);
    int slot = add_slot(t, p);
    pthread_mutex_unlock(&t->lock);
    return slot;
}

bool slots_drop(slot_table *t, int32_t slot) {
    pool *dropped = NULL;
    pthread_mutex_lock(&t->lock);
    slot_entry *found = find_slot(t, slot);
    if (found && !--found->uses) {
        dropped = found->pool;
        *found = t->entries[--t->count];
    }
    pthread_mutex_unlock(&t->lock);
    if (dropped) object_put(dropped);
    return dropped;
}

/* ---- the callback ------------------------------------------------------------------------------------------------ */

/* The memory of all slots, or of none. The descriptors are borrowed: the caller holds the table's lock until it has sent them. */
static int describe(slot_table *t, message *question, int64_t n, message *answer) {
    message_reset(answer);
    put_array(answer, 2);
    put_int(answer, 0);
    put_array(answer, (uint32_t)n);
    for (int64_t i = 0, slot; i < n; i++) {
        if (!take_as(question, INTEGER, &slot)) return -EBADMSG;
        slot_entry *found = find_slot(t, slot);
        if (!found) return BURST_INVALID_ARGUMENT;
        put_array(answer, 3);
        put_text(answer, "ashmem");
        put_uint(answer, found->pool->bytes);
        put_bool(answer, true);
        answer->fds[answer->n_fds++] = found->pool->fd;
    }
    t->sent += (uint64_t)n;
    return 0;
}

/* False: the device asks for what it may not, and gets no answer any more. */
static bool hand_over(lane *l, message *question, message *answer) {
    char method[16];
    int64_t n;
    bool is_known = take_as(question, ARRAY, &n) && n == 2 && take_text(question, method, sizeof method);
    if (!is_known || strcmp(method, "get_memories") || !take_as(question, ARRAY, &n) || n > MOST_FDS || question->n_fds) return false;
    pthread_mutex_lock(&l->slots->lock);
    int r = describe(l->slots, question, n, answer);
    if (r > 0) {
        message_reset(answer);
        put_array(answer, 2);
        put_int(answer, r);
        put_text(answer, "a slot stands for no memory");
    }
    if (r >= 0) r = message_send(l->callback, answer);
    pthread_mutex_unlock(&l->slots->lock);
    return r >= 0;
}

static void *serve_callback(void *argument) {
    lane *l = argument;
    message question = {0}, answer = {0};
    while (!message_receive(l->callback, &question, BURST_FOREVER) && hand_over(l, &question, &answer)) {}
    message_close_fds(&question);
    shutdown(l->callback, SHUT_RDWR);
    message_free(&question);
    message_free(&answer);
    return NULL;
}

/* Signals are the program's: this thread takes none. */
static int start_thread(lane *l) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int r = pthread_create(&l->thread, NULL, serve_callback, l);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (r) return fail(-r, "no thread for a burst: %s", strerror(r));
    l->has_thread = true;
    return 0;
}

/* ---- queues ------------------------------------------------------------------------------------------------------ */

static int take_role(queue_end *q, int role) {
    char path[40];
    const fmq_shape shape = {LENGTH, DTYPE_HASH, ELEMENT, FMQ_SYNCHRONIZED};
    struct flock one = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = role, .l_len = 1};
    snprintf(path, sizeof path, "/proc/self/fd/%d", q->file);
    q->lock = open(path, O_RDWR | O_CLOEXEC); /* another open file: the lock must not be shared with who gets the descriptor */
    if (q->lock < 0) return fail_kernel("opening a queue again");
    if (fcntl(q->lock, F_OFD_SETLK, &one)) return fail_kernel("taking a queue's role");
    q->life = fmq_life_hold(q->lock, role == FMQ_WRITER ? WRITER_LIFE_AT : READER_LIFE_AT, 0);
    if (q->life < 0) return fail(q->life, "no life word for a queue: %s", strerror(-q->life));
    int r = fmq_open(q->control, (char *)q->control + PAGE, &shape, role, &q->end);
    return r ? fail(r, "opening a queue: %s", strerror(-r)) : 0;
}

static int new_queue(queue_end *q, int role) {
    const fmq_shape shape = {LENGTH, DTYPE_HASH, ELEMENT, FMQ_SYNCHRONIZED};
    *q = (queue_end){.file = sealed_memory("burst-queue", QUEUE_BYTES), .lock = -1, .life = -1};
    if (q->file < 0) return q->file;
    int r = fmq_map(q->file, QUEUE_BYTES, 1, &q->control);
    if (r) return q->control = NULL, fail(r, "mapping a queue: %s", strerror(-r));
    memcpy((char *)q->control + DTYPE_AT, DTYPE, sizeof DTYPE - 1);
    r = fmq_format(q->control, &shape);
    return r ? fail(r, "formatting a queue: %s", strerror(-r)) : take_role(q, role);
}

static void free_queue(queue_end *q) {
    if (q->end) fmq_stop(q->end);
    if (q->life >= 0) fmq_life_release(q->life); /* the device is told that we left in good order */
    if (q->lock >= 0) close(q->lock);
    if (q->file >= 0) close(q->file);
    fmq_free(q->end);
    if (q->control) fmq_unmap(q->control, QUEUE_BYTES);
}

static void put_queue(message *m) {
    put_array(m, 4);
    put_int(m, 2), put_text(m, DTYPE), put_int(m, FMQ_SYNCHRONIZED);
    put_array(m, 2);
    for (int part = 0; part < 2; part++) {
        put_array(m, 3);
        put_int(m, 0), put_int(m, part * PAGE), put_int(m, part ? LENGTH * ELEMENT : PAGE);
    }
}

/* ---- opening ----------------------------------------------------------------------------------------------------- */

/* Under the client's lock. `far`: the ends of callback and context that the device gets. */
static int configure(lane *l, compiled *p, uint64_t spin, int trace_memory, const int far[2]) {
    client *c = p->client;
    int64_t values, version;
    message *m = client_begin(c, "burst", 5);
    put_int(m, p->number);
    put_queue(m), put_queue(m);
    put_double(m, (double)spin / 1e9);
    put_array(m, 2);
    put_int(m, 2), put_int(m, 1);
    memcpy(m->fds, (int[]){l->out.file, l->back.file, far[0], far[1], trace_memory}, 5 * sizeof(int));
    m->n_fds = 5;
    int r = client_call(c, burst_now() + OPEN_S * UINT64_C(1000000000), &values);
    if (r) return r;
    if (values < 1 || !take_as(&c->m, INTEGER, &version) || version < 1 || version > 2) {
        message_close_fds(&c->m);
        return fail(-EBADMSG, "the device chose a wire version that was not offered");
    }
    if ((r = life_page(&c->m, &l->life))) return r;
    l->version = (int)version, l->epoch = c->epoch;
    fmq_follow(l->out.end, l->life);
    fmq_follow(l->back.end, l->life);
    l->link = fmq_link(l->back.end, l->context);
    return l->link < 0 ? fail((int)l->link, "the burst's end cannot be watched") : 0;
}

static void new_caller(lane *l, uint64_t spin, burst_trace *trace) {
    l->caller = (burst_caller){.out = l->out.end, .back = l->back.end, .trace = trace, .spare = l->buffers[0], .result = l->buffers[1],
                               .buffer_bytes = sizeof l->buffers[0], .spin_ns = spin, .hold_ns = HOLD_NS, .deadline = BURST_FOREVER};
    l->caller.framed = l->version > 1;
}

static int open_sockets(lane *l, compiled *p, uint64_t spin, int trace_memory) {
    const struct timeval patience = {5, 0}; /* a device that never reads must not hold us up */
    int callback[2], context[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, callback)) return fail_kernel("socketpair");
    l->callback = callback[0];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, context)) return close(callback[1]), fail_kernel("socketpair");
    l->context = context[0];
    for (int i = 0; i < 2; i++) setsockopt((int[]){callback[0], context[0]}[i], SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    int r = start_thread(l);
    if (!r) {
        pthread_mutex_lock(&p->client->lock);
        r = p->epoch == p->client->epoch ? configure(l, p, spin, trace_memory, (int[]){callback[1], context[1]})
                                         : fail(-EPIPE, "the device was started again meanwhile");
        pthread_mutex_unlock(&p->client->lock);
    }
    close(callback[1]), close(context[1]);
    return r;
}

int lane_open(compiled *p, slot_table *slots, uint64_t spin, burst_trace *trace, int trace_memory, lane **out) {
    lane *l = calloc(1, sizeof *l);
    if (!l) return fail(-ENOMEM, "no memory for a burst");
    l->slots = slots;
    l->out = l->back = (queue_end){.file = -1, .lock = -1, .life = -1};
    l->callback = l->context = -1, l->link = -1;
    int r = new_queue(&l->out, FMQ_WRITER);
    if (!r) r = new_queue(&l->back, FMQ_READER);
    if (!r) r = open_sockets(l, p, spin, trace_memory);
    if (r) return lane_free(l), r;
    new_caller(l, spin, trace);
    return *out = l, 0;
}

void lane_stop(lane *l) {
    fmq_stop(l->out.end);
    fmq_stop(l->back.end);
}

void lane_free(lane *l) {
    if (l->link >= 0) fmq_unlink(l->link); /* before fmq_free: the life thread would tell an end that is gone */
    free_queue(&l->out);
    free_queue(&l->back);
    if (l->context >= 0) close(l->context);
    if (l->callback >= 0) shutdown(l->callback, SHUT_RDWR);
    if (l->has_thread) pthread_join(l->thread, NULL);
    if (l->callback >= 0) close(l->callback);
    if (l->life) fmq_unmap(l->life, PAGE);
    free(l);
}

void lane_forget(lane *l, int32_t slot) {
    message m = {0};
    put_array(&m, 2);
    put_text(&m, "free_memory");
    put_int(&m, slot);
    message_send(l->context, &m); /* a device that is gone has forgotten */
    message_free(&m);
}
