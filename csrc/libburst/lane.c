/* Opening a burst on the device, and its end: docs/protocol.md, sections 6, 8 and 9. */
#define _GNU_SOURCE
#include "libburst/lane.h"

#include "fmq/api.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

enum {
    DTYPE_AT = 1024,
    WRITER_LIFE_AT = 768,
    READER_LIFE_AT = 896,
    QUEUE_BYTES = PAGE + LENGTH * ELEMENT
};
enum { OPEN_S = 60, TRACE_VERSION = 2 };
static const uint64_t TRACE_MAGIC = 0x4543415254535242;
static const char DTYPE[] = "'|V24'";
static const uint64_t DTYPE_HASH = UINT64_C(0xf4cbbbf41608a154);

/* ---- traces ---------------------------------------------------------------------------------- */

int lane_new_trace(uint32_t depth, burst_trace **trace) {
    void *at;
    int memory = sealed_memory("burst-trace", sizeof **trace);
    if (memory < 0) return memory;
    int r = fmq_map(memory, sizeof **trace, 1, &at);
    if (r) return close(memory), fail(r, "mapping a trace: %s", strerror(-r));
    *trace = at;
    (*trace)->version = TRACE_VERSION, (*trace)->records = BURST_RECORDS;
    (*trace)->magic = TRACE_MAGIC;
    (*trace)->client.pid = (uint64_t)getpid(), (*trace)->client.depth = depth;
    return memory;
}

void lane_free_trace(burst_trace *trace, int trace_memory) {
    if (trace) fmq_unmap(trace, sizeof *trace);
    if (trace_memory >= 0) close(trace_memory);
}

/* ---- queues ---------------------------------------------------------------------------------- */

static int take_role(queue_end *q, int role) {
    char path[40];
    const fmq_shape shape = {LENGTH, DTYPE_HASH, ELEMENT, FMQ_SYNCHRONIZED};
    struct flock one = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = role, .l_len = 1};
    snprintf(path, sizeof path, "/proc/self/fd/%d", q->file);
    /* Another open file: the lock must not be shared with who gets the descriptor. */
    q->lock = open(path, O_RDWR | O_CLOEXEC);
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

/* ---- opening --------------------------------------------------------------------------------- */

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
    memcpy(m->fds, (int[]){l->out.file, l->back.file, far[0], far[1], trace_memory},
           5 * sizeof(int));
    m->n_fds = 5;
    int r = client_call(c, burst_now() + OPEN_S * UINT64_C(1000000000), &values);
    if (r) return r;
    if (values < 1 || !take_as(&c->m, INTEGER, &version) || version < 1 || version > 2) {
        message_close_fds(&c->m);
        return fail(-EBADMSG, "the device chose a wire version that was not offered");
    }
    if ((r = life_page(&c->m, &l->life))) return r;
    l->version = (int)version, l->epoch = c->epoch;
    if (client_is_foreign(c)) burst_sockets_fill(l->sockets);
    fmq_follow(l->out.end, l->life);
    fmq_follow(l->back.end, l->life);
    l->link = fmq_link(l->back.end, burst_sockets_context(l->sockets));
    return l->link < 0 ? fail((int)l->link, "the burst's end cannot be watched") : 0;
}

static int open_sockets(lane *l, compiled *p, burst_slots *slots, uint64_t spin, int trace_memory) {
    int far[2], r = burst_sockets_open(slots, far, &l->sockets);
    if (r) return r;
    pthread_mutex_lock(&p->client->lock);
    r = p->epoch == p->client->epoch ? configure(l, p, spin, trace_memory, far)
                                     : fail(-EPIPE, "the device was started again meanwhile");
    pthread_mutex_unlock(&p->client->lock);
    close(far[0]), close(far[1]);
    return r;
}

static int new_caller(lane *l, uint64_t spin, burst_trace *trace) {
    l->caller = burst_caller_new(l->out.end, l->back.end, trace, LENGTH, spin, 0);
    if (!l->caller) return fail(-ENOMEM, "no memory for a burst");
    l->caller->framed = l->version > 1;
    return 0;
}

int lane_open(compiled *p, burst_slots *slots, uint64_t spin, burst_trace *trace, int trace_memory,
              lane **out) {
    lane *l = calloc(1, sizeof *l);
    if (!l) return fail(-ENOMEM, "no memory for a burst");
    l->out = l->back = (queue_end){.file = -1, .lock = -1, .life = -1};
    l->link = -1;
    int r = new_queue(&l->out, FMQ_WRITER);
    if (!r) r = new_queue(&l->back, FMQ_READER);
    if (!r) r = open_sockets(l, p, slots, spin, trace_memory);
    if (!r) r = new_caller(l, spin, trace);
    if (r) return lane_free(l), r;
    return *out = l, 0;
}

void lane_stop(lane *l) {
    fmq_stop(l->out.end);
    fmq_stop(l->back.end);
}

void lane_free(lane *l) {
    /* Before fmq_free: the life thread would tell an end that is gone. */
    if (l->link >= 0) fmq_unlink(l->link);
    free_queue(&l->out);
    free_queue(&l->back);
    burst_sockets_free(l->sockets);
    if (l->life) fmq_unmap(l->life, PAGE);
    burst_caller_free(l->caller);
    free(l);
}

/* A device that is gone has forgotten. */
void lane_forget(lane *l, int64_t slot) { burst_sockets_tell(l->sockets, &slot, 1); }
