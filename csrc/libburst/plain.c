/* Executions without a burst, one after another on a socket of their own: docs/protocol.md, section
 * 10.
 *
 * The device maps a pool once. It lets go of it when the program has freed the pool, which the next
 * execution looks for.
 */
#define _GNU_SOURCE
#include "libburst/plain.h"

#include "libburst/pools.h"

#include "burst/api.h"
#include "fmq/api.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

enum { MOST_TENSORS = 1024, MOST_LATE = 64 };
static const uint64_t OPEN_NS = UINT64_C(60000000000), MOST_LOOP_NS = INT64_MAX;

typedef struct {
    int64_t slot;
    pool *pool; /* held */
} mapping;

struct plain {
    int socket;
    bool is_foreign; /* the device is another account's */
    void *life;
    int64_t watch;
    uint64_t epoch;  /* of the connection */
    uint64_t number; /* of the last execution */
    uint32_t late;   /* answers that no caller waits for any more */
    mapping *known;
    uint32_t n_known, room;
    int64_t next;
    message m;
};

void plain_free(plain *p) {
    if (!p) return;
    if (p->watch >= 0) fmq_unhang(p->watch);
    if (p->life) fmq_unmap(p->life, PAGE);
    /* A child of a fork may hold a copy. */
    if (p->socket >= 0) shutdown(p->socket, SHUT_RDWR), close(p->socket);
    for (uint32_t i = 0; i < p->n_known; i++) object_put(p->known[i].pool);
    free(p->known);
    message_free(&p->m);
    free(p);
}

/* ---- opening: under the lock of the client --------------------------------------------------- */

/* The answer to `lane` has the socket and its life page. */
static int take_socket(plain *p, message *m) {
    const struct timeval patience = {5, 0}; /* a device that never reads must not hold us up */
    if (m->n_fds != 2)
        return message_close_fds(m),
               fail(-EBADMSG, "lane was answered with %d descriptors", m->n_fds);
    p->socket = m->fds[0], m->fds[0] = m->fds[1], m->n_fds = 1;
    int type = 0, r = life_page(m, &p->life);
    socklen_t size = sizeof type;
    if (r) return r;
    if (getsockopt(p->socket, SOL_SOCKET, SO_TYPE, &type, &size) || type != SOCK_SEQPACKET)
        return fail(-EBADMSG, "lane was answered with a descriptor that is no packet socket");
    setsockopt(p->socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    p->watch = fmq_watch(p->life, p->socket);
    return p->watch < 0 ? fail((int)p->watch, "the device's life cannot be watched") : 0;
}

int plain_open(client *c, uint64_t deadline, plain **out) {
    int64_t values;
    uint64_t most = burst_now() + OPEN_NS;
    client_begin(c, "lane", 0);
    int r = client_call(c, deadline < most ? deadline : most, &values);
    if (r) return r;
    plain *p = calloc(1, sizeof *p);
    if (!p) return message_close_fds(&c->m), fail(-ENOMEM, "no memory for a plain path");
    p->socket = -1, p->watch = -1, p->epoch = c->epoch, p->is_foreign = client_is_foreign(c);
    r = take_socket(p, &c->m);
    if (r) return plain_free(p), r;
    return *out = p, 0;
}

void plain_stop(plain *p) { shutdown(p->socket, SHUT_RDWR); }

int plain_send(plain *p, message *m) { return message_send(p->socket, m); }

int plain_receive(plain *p, uint64_t deadline, message **m) {
    *m = &p->m;
    return message_receive(p->socket, &p->m, deadline);
}

/* The plain path of the present connection, and the model's number there. */
static int enter(compiled *prepared, uint64_t deadline, int64_t *number) {
    client *c = prepared->client;
    int r = compiled_prepare(prepared, deadline);
    if (r) return r;
    pthread_mutex_lock(&c->lock);
    if (c->plain && c->plain->epoch != c->epoch) plain_free(c->plain), c->plain = NULL;
    if (!c->plain) r = plain_open(c, deadline, &c->plain);
    if (!r && prepared->epoch != c->epoch)
        r = fail(-EPIPE, "the device was started again meanwhile");
    *number = prepared->number;
    pthread_mutex_unlock(&c->lock);
    return r;
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Of pools that the program has freed. */
static int forget_freed(plain *p) {
    int r = 0;
    for (uint32_t i = 0; i < p->n_known && !r;) {
        if (object_is_open(p->known[i].pool)) {
            i++;
            continue;
        }
        message_reset(&p->m);
        put_array(&p->m, 2), put_text(&p->m, "free_memory"), put_int(&p->m, p->known[i].slot);
        r = message_send(p->socket, &p->m);
        object_put(p->known[i].pool);
        p->known[i] = p->known[--p->n_known];
    }
    return r;
}

static int introduce(plain *p, pool *new) {
    if (p->n_known == p->room) {
        mapping *known = realloc(p->known, (2 * p->room + 8) * sizeof *known);
        if (!known) return fail(-ENOMEM, "no memory for a slot");
        p->known = known, p->room = 2 * p->room + 8;
    }
    message_reset(&p->m);
    put_array(&p->m, 3), put_text(&p->m, "memory"), put_int(&p->m, p->next);
    put_pool(&p->m, new);
    if (p->is_foreign) burst_fill_holes(new->fd);
    p->m.fds[p->m.n_fds++] = new->fd;
    int r = message_send(p->socket, &p->m);
    p->m.n_fds = 0; /* borrowed */
    if (!r) p->known[p->n_known++] = (mapping){p->next++, object_hold(new)};
    return r;
}

int plain_slot(plain *p, const burst_tensor *t, int64_t *slot) {
    pool *given;
    int r = pool_of(t, MOST_TENSORS, &given);
    *slot = -1;
    if (!given) return r;
    for (uint32_t i = 0; i < p->n_known; i++)
        if (p->known[i].pool == given) *slot = p->known[i].slot;
    if (*slot < 0 && !(r = introduce(p, given))) *slot = p->next - 1;
    object_put(given);
    return r;
}

/* ---- one execution --------------------------------------------------------------------------- */

static void put_tensors(message *m, const burst_tensor *tensors, uint32_t n, const int64_t *slots,
                        const int64_t *places, uint32_t n_places) {
    put_array(m, n);
    for (uint32_t i = 0; i < n; i++) {
        const burst_tensor *t = &tensors[i];
        uint32_t place = 0;
        while (place < n_places && places[place] != slots[i]) place++;
        if (slots[i] == -1) {
            put_nil(m);
            continue;
        }
        put_array(m, 4);
        put_uint(m, place), put_uint(m, t->offset), put_uint(m, t->length);
        put_array(m, t->rank);
        for (uint32_t d = 0; d < t->rank; d++) put_uint(m, t->shape[d]);
    }
}

/* An integer in nine bytes, also where fewer would do: so a device finds the request behind it. */
void put_wide(message *m, uint64_t value) {
    unsigned char bytes[9] = {0xcf};
    for (int i = 0; i < 8; i++) bytes[1 + i] = (unsigned char)(value >> 8 * (7 - i));
    put_bytes(m, bytes, sizeof bytes);
}

void put_request(message *m, const task *t, int64_t *places) {
    uint32_t n_places = 0;
    for (uint32_t i = 0; i < t->n_inputs + t->n_outputs; i++) {
        bool is_known = t->slots[i] == -1;
        for (uint32_t k = 0; k < n_places; k++) is_known |= places[k] == t->slots[i];
        if (!is_known) places[n_places++] = t->slots[i];
    }
    put_array(m, 6);
    put_int(m, t->model);
    put_tensors(m, t->inputs, t->n_inputs, t->slots, places, n_places);
    put_tensors(m, t->outputs, t->n_outputs, t->slots + t->n_inputs, places, n_places);
    put_array(m, n_places);
    for (uint32_t i = 0; i < n_places; i++) {
        if (places[i] < 0) put_array(m, 1);
        put_int(m, places[i] < 0 ? -1 - places[i] : places[i]);
    }
    put_bool(m, t->how.measure);
    if (t->how.loop_timeout) put_uint(m, t->how.loop_timeout);
    else put_nil(m);
}

static void put_execute(message *m, const task *t, uint64_t number, int64_t *places) {
    message_reset(m);
    put_array(m, 3);
    put_wide(m, number), put_wide(m, t->deadline);
    put_request(m, t, places);
}

static int send_task(plain *p, task *t) {
    uint32_t n = t->n_inputs + t->n_outputs;
    int r = forget_freed(p);
    t->slots = calloc(2 * n + 1, sizeof *t->slots);
    if (!r && !t->slots) r = fail(-ENOMEM, "no memory for an execution");
    for (uint32_t i = 0; i < n && !r; i++)
        r = plain_slot(p, i < t->n_inputs ? &t->inputs[i] : &t->outputs[i - t->n_inputs],
                       &t->slots[i]);
    if (!r) put_execute(&p->m, t, p->number + 1, t->slots + n);
    if (!r) r = message_send(p->socket, &p->m);
    free(t->slots);
    return r;
}

static uint64_t take_time(message *m) {
    int64_t value;
    enum form form = take_object(m, &value);
    if (form != INTEGER && form != OTHER) m->is_broken = true;
    return form == INTEGER && value >= 0 ? (uint64_t)value : UINT64_MAX;
}

/* For each output: whether its memory sufficed, its rank, its dimensions. What does not fit into
 * the room is left out. */
static uint32_t take_shapes(message *m, const task *t) {
    uint32_t at = 0, told = 0;
    int64_t n, two, rank, value;
    if (!take_as(m, ARRAY, &n) || n > t->n_outputs) return m->is_broken = true, 0;
    for (int64_t i = 0; i < n && !m->is_broken; i++) {
        if (!take_as(m, ARRAY, &two) || two != 2 || !take_as(m, ARRAY, &rank))
            return m->is_broken = true, 0;
        bool fits = told == i && t->how.shapes && (uint64_t)rank + 2 <= t->how.room - at;
        for (int64_t d = 0; d < rank && take_as(m, INTEGER, &value); d++) {
            if (value < 0 || value > UINT32_MAX) m->is_broken = true;
            else if (fits) t->how.shapes[at + 2 + d] = (uint32_t)value;
        }
        if (take_object(m, &value) != OTHER) m->is_broken = true;
        if (m->is_broken || !fits) continue;
        t->how.shapes[at] = (uint32_t)(value == 1), t->how.shapes[at + 1] = (uint32_t)rank;
        at += 2 + (uint32_t)rank, told++;
    }
    return told;
}

int take_outcome(message *m, const task *t, burst_outcome *o) {
    int64_t n, status = 0, two;
    char text[400] = "";
    *o = (burst_outcome){.on_device = UINT64_MAX, .in_driver = UINT64_MAX};
    bool is_good = take_as(m, ARRAY, &n) && n >= 4 && take_as(m, INTEGER, &status) && status >= 0 &&
                   status <= BURST_RESOURCE_EXHAUSTED_PERSISTENT;
    if (is_good) o->n_shapes = take_shapes(m, t);
    if (is_good && take_as(m, ARRAY, &two) && two == 2)
        o->on_device = take_time(m), o->in_driver = take_time(m);
    is_good = is_good && two == 2 && take_text(m, text, sizeof text) && skip_objects(m, n - 4) &&
              !m->is_broken;
    message_close_fds(m);
    if (!is_good) return fail(-EBADMSG, "the device's answer is malformed");
    o->status = (int32_t)status;
    return status ? fail((int)status, "the device answers with status %d: %s", (int)status, text)
                  : 0;
}

static int read_result(message *m, const task *t, burst_outcome *o) {
    int r = take_outcome(m, t, o);
    if (r >= 0 && m->at != m->length) r = fail(-EBADMSG, "the device's answer is malformed");
    return r;
}

/* The number of the answer that has come; behind it is its outcome. */
static bool take_number(message *m, int64_t *number) {
    int64_t two;
    return take_as(m, ARRAY, &two) && two == 2 && take_as(m, INTEGER, number);
}

/* On the path of that connection. Answers come in turn, those first for which no caller waits any
 * more. */
static int exchange(plain *p, task *t, burst_outcome *o) {
    int64_t number;
    while (p->late && !message_receive(p->socket, &p->m, 0)) message_close_fds(&p->m), p->late--;
    if (p->late == MOST_LATE)
        return fail(-EAGAIN, "%d answers are late; wait for the device", MOST_LATE);
    int r = send_task(p, t);
    if (r) return r;
    p->number++, p->late++;
    while (!(r = message_receive(p->socket, &p->m, t->deadline))) {
        bool is_good = take_number(&p->m, &number) && (uint64_t)number == p->number - --p->late;
        if (is_good && !p->late) return read_result(&p->m, t, o);
        message_close_fds(&p->m);
        if (!is_good)
            return fail(-EBADMSG, "the device's answer is malformed, or to something else");
    }
    return r;
}

/* Under the plain path's lock. */
static int attempt(compiled *prepared, task *t, burst_outcome *o) {
    client *c = prepared->client;
    int r = enter(prepared, t->deadline, &t->model);
    if (r) return r;
    r = exchange(c->plain, t, o);
    if (r == -EPIPE || r == -EBADMSG) {
        pthread_mutex_lock(&c->lock);
        plain_free(c->plain), c->plain = NULL;
        pthread_mutex_unlock(&c->lock);
    }
    return r;
}

/* The device is started again as often as `client_revive` allows it. */
static int execute(compiled *prepared, task *t, burst_outcome *o) {
    client *c = prepared->client;
    pthread_mutex_lock(&c->executing);
    int r;
    for (;;) {
        uint64_t epoch = compiled_epoch(prepared);
        r = attempt(prepared, t, o);
        if (r != -EPIPE || !t->how.recover || client_revive(c, epoch)) break;
    }
    pthread_mutex_unlock(&c->executing);
    return r;
}

static int read_how(const burst_execution *given, burst_execution *how) {
    *how = (burst_execution){.size = sizeof *how};
    if (given && given->size < 8)
        return fail(-EINVAL, "burst_execution.size is %u: set it to sizeof(burst_execution)",
                    given->size);
    if (given) memcpy(how, given, given->size < sizeof *how ? given->size : sizeof *how);
    if (how->loop_timeout > MOST_LOOP_NS)
        return fail(-EINVAL, "loop_timeout %llu ns", (unsigned long long)how->loop_timeout);
    return how->room && !how->shapes
               ? fail(-EINVAL, "NULL where room for %u words of shapes is due", how->room)
               : 0;
}

int burst_execute(burst_compiled *handle, uint32_t n_inputs, const burst_tensor *inputs,
                  uint32_t n_outputs, const burst_tensor *outputs, const burst_execution *given,
                  uint64_t deadline, burst_outcome *outcome) {
    task t = {.n_inputs = n_inputs,
              .n_outputs = n_outputs,
              .inputs = inputs,
              .outputs = outputs,
              .deadline = deadline};
    burst_outcome ignored;
    int r = read_how(given, &t.how);
    if (r) return r;
    if ((n_inputs && !inputs) || (n_outputs && !outputs) || n_inputs > MOST_TENSORS ||
        n_outputs > MOST_TENSORS)
        return fail(-EINVAL, "NULL where tensors are due, or more than %d of them", MOST_TENSORS);
    compiled *prepared = handle_take(handle, COMPILED, &r);
    if (!prepared) return r;
    r = execute(prepared, &t, outcome ? outcome : &ignored);
    object_put(prepared);
    return r;
}
