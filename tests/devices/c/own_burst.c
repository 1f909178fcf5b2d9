/* The toy driver, which serves bursts itself, as a firmware does: by docs/protocol.md, on the sources of csrc/fmq. */
#define _GNU_SOURCE
#define burst_device_get toy_device_get
#include "toy.c"
#undef burst_device_get

#include "fmq/api.h"
#include "burst/messages.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DATUM = 24, LONGEST = 65536, MOST_POOLS = 1024, MOST_ASKED = 32, MOST_ARGUMENTS = 16, MOST_RANK = 8 };
enum { WRITER_LIFE_AT = 768, READER_LIFE_AT = 896 };
enum { INFORMATION, INPUT, INPUT_DIMENSION, OUTPUT, OUTPUT_DIMENSION, POOL, MEASURE, TOKEN, LOOP_TIMEOUT, IDENTIFIER };
static const uint64_t DTYPE_HASH = UINT64_C(0xf4cbbbf41608a154), NONE = UINT64_MAX, PATIENCE = UINT64_C(5000000000);

typedef struct {
    int fd, lock, life;
    void *base;
    uint64_t bytes;
    fmq_end *end;
} queue;

typedef struct {
    int32_t slot; /* -1: free */
    unsigned char *memory;
    uint64_t bytes;
} pool;

struct burst_session {
    burst_prepared *prepared;
    burst_offer offer;
    queue requests, results;
    pthread_mutex_t lock; /* of is_over and the pools */
    int is_over, is_busy, callback; /* busy: a request is served */
    pool pools[MOST_POOLS];
    int32_t freed[MOST_POOLS]; /* by the client, while a request may use them */
    uint32_t n_freed;
    atomic_int holders; /* the thread, and Burst until end_burst */
    unsigned char packet[LONGEST * DATUM], result[256 * DATUM];
};

typedef struct {
    const unsigned char *at, *end;
    int is_malformed;
} cursor;

static uint32_t u32(const unsigned char *at) { uint32_t value; return memcpy(&value, at, sizeof value), value; }
static uint64_t u64(const unsigned char *at) { uint64_t value; return memcpy(&value, at, sizeof value), value; }
static void put_u32(unsigned char *at, uint32_t value) { memcpy(at, &value, sizeof value); }
static void put_u64(unsigned char *at, uint64_t value) { memcpy(at, &value, sizeof value); }

/* ---- queues ------------------------------------------------------------------------------------------------------ */

static int attach(queue *q, int fd, uint64_t control, uint64_t ring, uint32_t elements, int role) {
    const fmq_shape shape = {elements, DTYPE_HASH, DATUM, FMQ_SYNCHRONIZED};
    struct flock one = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)control + role, .l_len = 1};
    char path[40];
    *q = (queue){.fd = fd, .bytes = ring + (uint64_t)elements * DATUM, .lock = -1, .life = -1};
    if (fmq_map(fd, q->bytes, 1, &q->base)) return q->base = NULL, -1;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    q->lock = open(path, O_RDWR | O_CLOEXEC); /* a lock of our own, which ends with us */
    if (q->lock < 0 || fcntl(q->lock, F_OFD_SETLK, &one)) return -1;
    q->life = fmq_life_hold(q->lock, control + (role == FMQ_WRITER ? WRITER_LIFE_AT : READER_LIFE_AT), 0);
    unsigned char *base = (unsigned char *)q->base;
    return q->life < 0 ? -1 : fmq_open(base + control, base + ring, &shape, role, &q->end);
}

static void detach(queue *q) {
    if (q->end) fmq_stop(q->end);
    if (q->life >= 0) fmq_life_release(q->life);
    if (q->end) fmq_free(q->end);
    if (q->base) fmq_unmap(q->base, q->bytes);
    if (q->lock >= 0) close(q->lock);
}

static int transfer(int (*move)(fmq_end *, void *, uint64_t, uint64_t, uint64_t), fmq_end *end, void *to, uint64_t n, uint64_t spin) {
    int r;
    while ((r = move(end, to, n, spin, NONE)) == -EINTR) {}
    return r;
}

/* One packet: in version 2 as long as it says, in version 1 all that has arrived. Returns its elements. */
static int64_t read_packet(burst_session *s) {
    fmq_end *end = s->requests.end;
    int r = transfer(fmq_read, end, s->packet, 1, s->offer.spin_ns);
    if (r) return r;
    int64_t more = s->offer.version == 1 ? fmq_available(end) : (int64_t)u32(s->packet + 4) - 1;
    if (more < 0 || more >= s->offer.request_elements) more = 0;
    r = more ? transfer(fmq_read, end, s->packet + DATUM, (uint64_t)more, 0) : 0;
    return r ? r : more + 1;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static pool *find(burst_session *s, int32_t slot) {
    for (int i = 0; i < MOST_POOLS; i++)
        if (s->pools[i].slot == slot) return &s->pools[i];
    return NULL;
}

static void drop(pool *p) {
    if (p->memory) munmap(p->memory, p->bytes);
    *p = (pool){.slot = -1};
}

/* Under the lock: what the client has freed. */
static void drop_freed(burst_session *s) {
    for (uint32_t i = 0; i < s->n_freed; i++) {
        pool *p = find(s, s->freed[i]);
        if (p) drop(p);
    }
    s->n_freed = 0;
}

static void be_busy(burst_session *s, int is_busy) {
    pthread_mutex_lock(&s->lock);
    drop_freed(s);
    s->is_busy = is_busy;
    pthread_mutex_unlock(&s->lock);
}

/* ["ashmem", bytes, sealed], and the next descriptor. */
static int add_pool(burst_session *s, int32_t slot, message *m, int fd) {
    int64_t fields, bytes;
    struct stat status;
    char kind[8];
    if (!take_as(m, ARRAY, &fields) || fields != 3 || !take_text(m, kind, sizeof kind)) return BURST_GENERAL_FAILURE;
    if (strcmp(kind, "ashmem") != 0) return BURST_INVALID_ARGUMENT;
    if (!take_as(m, INTEGER, &bytes) || fstat(fd, &status) || bytes < 1 || bytes > status.st_size) return BURST_GENERAL_FAILURE;
    if (!skip_objects(m, 1)) return BURST_GENERAL_FAILURE; /* whether it is sealed */
    pool *p = find(s, -1);
    if (!p) return BURST_RESOURCE_EXHAUSTED_TRANSIENT;
    void *memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return BURST_GENERAL_FAILURE;
    *p = (pool){slot, (unsigned char *)memory, (uint64_t)bytes};
    return 0;
}

/* The memory of these slots, all or none. */
static int ask(burst_session *s, const int32_t *slots, int n) {
    message m = {0};
    int64_t values, status, memories;
    put_array(&m, 2);
    put_text(&m, "get_memories");
    put_array(&m, (uint32_t)n);
    for (int i = 0; i < n; i++) put_int(&m, slots[i]);
    int r = BURST_GENERAL_FAILURE, added = 0;
    if (!message_send(s->callback, &m) && !message_receive(s->callback, &m, NONE) && take_as(&m, ARRAY, &values) &&
        take_as(&m, INTEGER, &status)) {
        if (status) r = BURST_INVALID_ARGUMENT;
        else if (take_as(&m, ARRAY, &memories) && memories == n && m.n_fds == n)
            for (r = 0; !r && added < n; added += !r) r = add_pool(s, slots[added], &m, m.fds[added]);
    }
    message_close_fds(&m);
    message_free(&m);
    while (r && added) drop(find(s, slots[--added]));
    return r;
}

static int has_pools(burst_session *s, const int32_t *slots, uint32_t n) {
    int32_t missing[MOST_ASKED];
    for (uint32_t i = 0; i < n;) {
        int asked = 0, r;
        for (; i < n && asked < MOST_ASKED; i++) {
            int known = find(s, slots[i]) != NULL;
            for (int k = 0; k < asked; k++) known |= missing[k] == slots[i];
            if (!known) missing[asked++] = slots[i];
        }
        if (asked && (r = ask(s, missing, asked))) return r;
    }
    return 0;
}

/* ---- requests ---------------------------------------------------------------------------------------------------- */

/* The next element, if it is of that kind and has no other bytes; else one of zeros. */
static const unsigned char *next(cursor *c, unsigned char kind) {
    static const uint32_t used[] = {0x0ffff1, 0xffff11, 0xf1, 0xffff11, 0xf1, 0xf1, 0xf1, 0xf1, 0xff01, 0xffff01};
    static const unsigned char zeros[DATUM];
    if (c->is_malformed || c->at == c->end || *c->at != kind) return c->is_malformed = 1, zeros;
    const unsigned char *found = c->at;
    for (int i = 0; i < DATUM; i++)
        if (!(used[kind] >> i & 1) && found[i]) c->is_malformed = 1;
    c->at += DATUM;
    return found;
}

typedef struct {
    burst_argument flat;
    uint32_t is_omitted, pool, offset, length, dimensions[MOST_RANK];
} argument;

typedef struct {
    argument inputs[MOST_ARGUMENTS], outputs[MOST_ARGUMENTS];
    uint32_t n_inputs, n_outputs, n_pools, measure;
    int32_t slots[MOST_POOLS];
    int has_tokens;
    uint64_t loop_timeout, id, deadline;
} request;

static void read_arguments(cursor *c, argument *a, uint32_t n, uint32_t n_pools, unsigned char kind) {
    for (uint32_t i = 0; i < n; i++, a++) {
        const unsigned char *at = next(c, kind);
        uint32_t rank = u32(at + 20);
        *a = (argument){.is_omitted = at[4], .pool = u32(at + 8), .offset = u32(at + 12), .length = u32(at + 16)};
        if (at[4] > 1 || rank > MOST_RANK || (at[4] ? a->pool || a->offset || a->length || rank : a->pool >= n_pools)) c->is_malformed = 1;
        a->flat.rank = c->is_malformed ? 0 : rank;
        for (uint32_t d = 0; d < a->flat.rank; d++) a->dimensions[d] = u32(next(c, kind + 1) + 4);
    }
}

static int read_request(const unsigned char *packet, int64_t elements, uint32_t version, request *r) {
    cursor c = {packet, packet + elements * DATUM, 0};
    const unsigned char *head = next(&c, INFORMATION);
    *r = (request){.n_inputs = u32(head + 8), .n_outputs = u32(head + 12), .n_pools = u32(head + 16), .deadline = NONE};
    if (version > 1 && packet[(elements - 1) * DATUM] == IDENTIFIER) r->id = u64(packet + (elements - 1) * DATUM + 8);
    if (u32(head + 4) != elements || r->n_inputs > MOST_ARGUMENTS || r->n_outputs > MOST_ARGUMENTS || r->n_pools > MOST_POOLS) return 0;
    read_arguments(&c, r->inputs, r->n_inputs, r->n_pools, INPUT);
    read_arguments(&c, r->outputs, r->n_outputs, r->n_pools, OUTPUT);
    for (uint32_t i = 0; i < r->n_pools; i++) {
        int is_token = version > 1 && c.at < c.end && *c.at == TOKEN;
        r->has_tokens |= is_token;
        r->slots[i] = (int32_t)u32(next(&c, is_token ? TOKEN : POOL) + 4);
        if (is_token ? !r->slots[i] : r->slots[i] < 0) c.is_malformed = 1;
    }
    r->measure = u32(next(&c, MEASURE) + 4);
    if (version > 1) {
        r->loop_timeout = u64(next(&c, LOOP_TIMEOUT) + 8);
        const unsigned char *last = next(&c, IDENTIFIER);
        r->id = u64(last + 8), r->deadline = u64(last + 16);
        if (!r->id) c.is_malformed = 1;
    }
    return !c.is_malformed && c.at == c.end && r->measure <= 1;
}

/* Whether the request's argument fits the model's operand, of which all dimensions are known. */
static int fits(burst_session *s, argument *a, uint32_t index, const request *r, int is_input) {
    const burst_operand *operand = burst_operand_at(s->prepared->model->main_graph, index);
    if (a->is_omitted) return 0;
    if (a->flat.rank && (a->flat.rank != operand->rank)) return 0;
    for (uint32_t d = 0; d < a->flat.rank; d++)
        if (a->dimensions[d] != operand->dimensions[d]) return 0;
    const pool *p = find(s, r->slots[a->pool]);
    if ((uint64_t)a->offset + a->length > p->bytes || (is_input && a->length < burst_operand_bytes(operand))) return 0;
    a->flat = (burst_argument){p->memory + a->offset, a->length, NULL, operand->rank, operand->dimensions};
    return 1;
}

static burst_status execute(burst_session *s, request *r, burst_execution **e) {
    const burst_subgraph *graph = s->prepared->model->main_graph;
    if (r->has_tokens || r->n_inputs != graph->n_inputs || r->n_outputs != graph->n_outputs) return BURST_INVALID_ARGUMENT;
    if (r->deadline != NONE && fmq_now() > r->deadline) return BURST_MISSED_DEADLINE_PERSISTENT;
    int status = has_pools(s, r->slots, r->n_pools);
    if (status) return status;
    for (uint32_t i = 0; i < r->n_inputs; i++)
        if (!fits(s, &r->inputs[i], graph->inputs[i], r, 1)) return BURST_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < r->n_outputs; i++)
        if (!fits(s, &r->outputs[i], graph->outputs[i], r, 0)) return BURST_INVALID_ARGUMENT;
    burst_binding binding = {sizeof binding, r->n_inputs, r->n_outputs, sizeof(argument), &r->inputs[0].flat, &r->outputs[0].flat,
                             r->loop_timeout, s->offer.priority};
    burst_why why = {sizeof why, 0, NULL};
    status = toy_bind(s->prepared, &binding, e, &why);
    for (uint32_t i = 0; !status && i < r->n_outputs; i++) {
        burst_shape shape;
        toy_output_shape(*e, i, &shape);
        if (!shape.is_sufficient) status = BURST_OUTPUT_INSUFFICIENT_SIZE;
    }
    return status ? status : toy_execute(*e, r->deadline);
}

/* ---- results ----------------------------------------------------------------------------------------------------- */

static unsigned char *element(burst_session *s, uint32_t *n, int kind) {
    unsigned char *at = s->result + DATUM * (*n)++;
    memset(at, 0, DATUM);
    *at = (unsigned char)kind;
    return at;
}

static uint32_t put_result(burst_session *s, const request *r, burst_status status, const burst_execution *e, const uint64_t *times) {
    uint32_t n = 1, has_shapes = e && (!status || status == BURST_OUTPUT_INSUFFICIENT_SIZE) ? r->n_outputs : 0;
    if (s->offer.version == 1 && status > BURST_INVALID_ARGUMENT) status = BURST_GENERAL_FAILURE;
    for (uint32_t i = 0; i < has_shapes; i++) {
        burst_shape shape;
        toy_output_shape(e, i, &shape);
        unsigned char *at = element(s, &n, 1);
        at[8] = shape.is_sufficient != 0;
        put_u32(at + 12, shape.rank);
        for (uint32_t d = 0; d < shape.rank; d++) put_u32(element(s, &n, 2) + 8, shape.dimensions[d]);
    }
    unsigned char *timing = element(s, &n, 3);
    put_u64(timing + 8, r->measure && !status ? times[0] : NONE), put_u64(timing + 16, r->measure && !status ? times[1] : NONE);
    if (s->offer.version > 1) put_u64(element(s, &n, 4) + 8, r->id);
    uint32_t zero = 0;
    unsigned char *head = element(s, &zero, 0);
    put_u32(head + 8, n), put_u32(head + 12, (uint32_t)status), put_u32(head + 16, has_shapes);
    return n;
}

static int answer(burst_session *s, int64_t elements) {
    uint64_t taken = fmq_now();
    static _Thread_local request r;
    burst_execution *e = NULL;
    be_busy(s, 1);
    burst_status status = BURST_GENERAL_FAILURE;
    uint64_t begun = fmq_now();
    if (read_request(s->packet, elements, s->offer.version, &r)) status = execute(s, &r, &e);
    else r.measure = 0;
    uint64_t done = fmq_now();
    if (!status && done > r.deadline) status = BURST_MISSED_DEADLINE_TRANSIENT;
    const uint64_t times[] = {(done - begun) / 1000, (fmq_now() - taken) / 1000};
    uint32_t n = put_result(s, &r, status, e, times);
    if (n > s->offer.result_elements) n = put_result(s, &r, BURST_GENERAL_FAILURE, NULL, times);
    if (e) toy_unbind(e);
    be_busy(s, 0);
    int sent;
    while ((sent = fmq_write(s->results.end, s->result, n, 0, fmq_now() + PATIENCE)) == -EINTR) {}
    return sent;
}

/* ---- the burst --------------------------------------------------------------------------------------------------- */

static void release(burst_session *s) {
    if (atomic_fetch_sub(&s->holders, 1) > 1) return;
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static void *serve(void *of) {
    burst_session *s = (burst_session *)of;
    int64_t elements;
    while ((elements = read_packet(s)) > 0 && !answer(s, elements)) {}
    pthread_mutex_lock(&s->lock);
    s->is_over = 1;
    pthread_mutex_unlock(&s->lock);
    detach(&s->requests), detach(&s->results);
    close(s->requests.fd), close(s->results.fd), close(s->callback);
    for (int i = 0; i < MOST_POOLS; i++) drop(&s->pools[i]);
    s->offer.ended(s->offer.context);
    release(s);
    return NULL;
}

static burst_status own_configure(burst_prepared *prepared, const burst_offer *offer, burst_session **session, burst_why *why) {
#ifdef REFUSAL
    return burst_fail(why, REFUSAL, "no channel of the accelerator is free");
#endif
    burst_session *s = (burst_session *)calloc(1, sizeof *s);
    pthread_t thread;
    if (!s) return burst_fail(why, BURST_RESOURCE_EXHAUSTED_TRANSIENT, "no memory");
    s->prepared = prepared, s->offer = *offer, s->callback = offer->callback;
    for (int i = 0; i < MOST_POOLS; i++) s->pools[i].slot = -1;
    atomic_store(&s->holders, 2);
    pthread_mutex_init(&s->lock, NULL);
    s->results.lock = s->results.life = -1;
    int r = attach(&s->requests, offer->request_queue, offer->request_offset, offer->request_ring, offer->request_elements, FMQ_READER);
    if (!r) r = attach(&s->results, offer->result_queue, offer->result_offset, offer->result_ring, offer->result_elements, FMQ_WRITER);
    if (!r) r = pthread_create(&thread, NULL, serve, s);
    if (r) {
        detach(&s->requests), detach(&s->results);
        free(s);
        return burst_fail(why, BURST_GENERAL_FAILURE, "the queues cannot be used (%d)", r);
    }
    pthread_detach(thread);
    *session = s;
    return BURST_NONE;
}

static void own_free(burst_session *s, const int32_t *slots, uint32_t n) {
    pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < n && s->n_freed < MOST_POOLS; i++) s->freed[s->n_freed++] = slots[i];
    if (!s->is_busy && !s->is_over) drop_freed(s);
    pthread_mutex_unlock(&s->lock);
}

static void own_end(burst_session *s) {
    pthread_mutex_lock(&s->lock);
    if (!s->is_over) {
        shutdown(s->callback, SHUT_RDWR);
        fmq_stop(s->results.end), fmq_stop(s->requests.end);
    }
    pthread_mutex_unlock(&s->lock);
    release(s);
}

__attribute__((visibility("default"))) const burst_device_table *burst_device_get(uint32_t abi) {
    static burst_device_table own;
    const burst_device_table *toy = toy_device_get(abi);
    if (!toy) return NULL;
    own = *toy;
    own.name = "own-burst";
#ifdef NEWEST
    own.burst_version = NEWEST;
#endif
    own.configure_burst = own_configure, own.free_memory = own_free, own.end_burst = own_end;
    return &own;
}
