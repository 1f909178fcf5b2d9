/* Streams of results: an execution that the device repeats, on a socket of its own:
 * docs/protocol.md, section 10.
 *
 * What is fed back lies in two buffers of the device that take turns. Outputs in memory lie in sets
 * that take turns, too, so the requests of the steps after the first one repeat with the sets.
 */
#define _GNU_SOURCE
#include "libburst/plain.h"
#include "libburst/pools.h"

#include "burst/api.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_SETS = 64, MOST_STEPS = 1 << 20, USUAL_STEPS = 4096, MOST_VALUES = 64 };
enum { MOST_ENDS = 1024, NUMBER = 1, TURNS = 2, GOES_ON = 0 };

typedef struct {
    object head;
    compiled *prepared; /* held */
    plain *path;
    uint64_t epoch; /* of the connection that has the buffers */
    int64_t *tokens;
    uint32_t n_tokens;
    uint32_t n_outputs;    /* that have memory */
    uint64_t taken, given; /* results; for how many there is room in all */
    message *answer;       /* the last one, to several steps with one outcome */
    size_t outcome_at;
    int64_t left; /* of these steps, that the caller has not had */
    burst_stream_options how;
    _Atomic uint32_t busy;
    bool is_over;
    message m;
} stream;

/* The arguments of an opening. */
typedef struct {
    uint32_t n_inputs, n_outputs, n_feedback;
    const burst_tensor *inputs, *outputs;
    const burst_feedback *feedback;
    uint64_t deadline;
    int64_t *slots; /* of inputs, and of the outputs of all sets */
} opening;

/* ---- arguments ------------------------------------------------------------------------------- */

static int read_options(const burst_stream_options *given, burst_stream_options *how) {
    *how = (burst_stream_options){.size = sizeof *how, .until = -1};
    if (!given || given->size < 16 || given->size > 4096)
        return fail(-EINVAL, "burst_stream_options: NULL, or `size` is not sizeof of it");
    memcpy(how, given, given->size < sizeof *how ? given->size : sizeof *how);
    if (!how->most) how->most = USUAL_STEPS;
    if (how->most > MOST_STEPS) return fail(-EINVAL, "%u steps; at most %d", how->most, MOST_STEPS);
    if (how->sets < 2 || how->sets > MOST_SETS || how->sets % 2)
        return fail(-EINVAL, "%u sets of outputs; an even number from 2 to %d", how->sets,
                    MOST_SETS);
    if (how->n_values > MOST_VALUES || (how->n_values && !how->values))
        return fail(-EINVAL, "%u values, or NULL; at most %d", how->n_values, MOST_VALUES);
    return how->room && !how->shapes
               ? fail(-EINVAL, "NULL where room for %u words of shapes is due", how->room)
               : 0;
}

static bool is_fed(const opening *o, uint32_t output) {
    for (uint32_t i = 0; i < o->n_feedback; i++)
        if (o->feedback[i].output == output) return true;
    return false;
}

static int check(const opening *o, const burst_stream_options *how) {
    if ((o->n_inputs && !o->inputs) || !o->outputs || (o->n_feedback && !o->feedback) ||
        o->n_inputs > MOST_ENDS || !o->n_outputs || o->n_outputs > MOST_ENDS ||
        o->n_feedback > o->n_outputs)
        return fail(-EINVAL, "NULL where tensors are due, or more than %d of them", MOST_ENDS);
    for (uint32_t i = 0; i < o->n_feedback; i++) {
        const burst_feedback *f = &o->feedback[i];
        if (f->output >= o->n_outputs || f->input >= o->n_inputs)
            return fail(-EINVAL, "feedback %u: output %u of %u, input %u of %u", i, f->output,
                        o->n_outputs, f->input, o->n_inputs);
        for (uint32_t k = 0; k < i; k++)
            if (o->feedback[k].output == f->output || o->feedback[k].input == f->input)
                return fail(-EINVAL, "feedback %u: that output or input is in another one", i);
    }
    for (uint32_t i = 0; i < how->sets * o->n_outputs; i++)
        if (is_fed(o, i % o->n_outputs) == !!o->outputs[i].pool)
            return fail(-EINVAL, "output %u: one that is fed back has no pool, and others have one",
                        i % o->n_outputs);
    if (how->until >= 0 && (how->until >= o->n_outputs || is_fed(o, (uint32_t)how->until)))
        return fail(-EINVAL, "output %lld does not end a stream: it has no memory",
                    (long long)how->until);
    return 0;
}

/* ---- buffers of the device: under the lock of the client ------------------------------------- */

static void put_role(message *m, uint32_t index) {
    put_array(m, 1), put_array(m, 3);
    put_int(m, 0), put_uint(m, index), put_double(m, 1);
}

/* All buffers, by one call. */
static int allocate(stream *s, const opening *o) {
    client *c = s->prepared->client;
    uint32_t count = TURNS * o->n_feedback;
    int64_t values;
    message *m = client_begin(c, "allocate_all", count);
    for (uint32_t i = 0; i < count; i++) {
        const burst_feedback *f = &o->feedback[i / TURNS];
        put_array(m, 4), put_array(m, 0);
        put_array(m, 1), put_int(m, s->prepared->number);
        put_role(m, f->input), put_role(m, f->output);
    }
    int r = client_call(c, o->deadline, &values);
    if (r) return r;
    for (; s->n_tokens < count; s->n_tokens++)
        if (values != count || !take_as(&c->m, INTEGER, &s->tokens[s->n_tokens]))
            return fail(-EBADMSG, "allocate_all was answered without %u tokens", count);
    return 0;
}

static int open_path(stream *s, const opening *o) {
    client *c = s->prepared->client;
    int r = compiled_prepare(s->prepared, o->deadline);
    if (r) return r;
    pthread_mutex_lock(&c->lock);
    s->epoch = c->epoch;
    if (s->prepared->epoch != c->epoch) r = fail(-EPIPE, "the device was started again meanwhile");
    if (!r) r = plain_open(c, o->deadline, &s->path);
    if (!r && o->n_feedback) r = allocate(s, o);
    pthread_mutex_unlock(&c->lock);
    return r;
}

static void destroy(object *head) {
    stream *s = (stream *)head;
    client *c = s->prepared->client;
    plain_free(s->path);
    if (head->generation == handle_generation()) {
        pthread_mutex_lock(&c->lock);
        for (uint32_t i = 0; i < s->n_tokens && s->epoch == c->epoch; i++)
            client_tell(c, "release", s->tokens[i]);
        pthread_mutex_unlock(&c->lock);
    }
    object_put(s->prepared);
    message_free(&s->m);
    free(s->tokens);
    free(s);
}

/* ---- opening --------------------------------------------------------------------------------- */

static int find_slots(stream *s, opening *o) {
    uint32_t n = o->n_inputs + s->how.sets * o->n_outputs;
    int r = 0;
    for (uint32_t i = 0; i < n && !r; i++)
        r = plain_slot(s->path, i < o->n_inputs ? &o->inputs[i] : &o->outputs[i - o->n_inputs],
                       &o->slots[i]);
    return r;
}

/* Of one step, in `m`. `slots`: room for three times as many as there are inputs and outputs. */
static void put_step(message *m, const stream *s, const opening *o, uint32_t step, int64_t *slots,
                     burst_tensor *inputs) {
    static const burst_tensor whole = {0};
    uint32_t set = step % s->how.sets, n = o->n_inputs + o->n_outputs;
    memcpy(inputs, o->inputs, o->n_inputs * sizeof *inputs);
    memcpy(slots, o->slots, o->n_inputs * sizeof *slots);
    memcpy(slots + o->n_inputs, o->slots + o->n_inputs + set * o->n_outputs,
           o->n_outputs * sizeof *slots);
    for (uint32_t i = 0; i < o->n_feedback; i++) {
        const burst_feedback *f = &o->feedback[i];
        const int64_t *turns = &s->tokens[TURNS * i];
        slots[o->n_inputs + f->output] = -1 - turns[step % TURNS];
        if (step) slots[f->input] = -1 - turns[(step - 1) % TURNS], inputs[f->input] = whole;
    }
    const task t = {.n_inputs = o->n_inputs,
                    .n_outputs = o->n_outputs,
                    .inputs = inputs,
                    .outputs = o->outputs + set * o->n_outputs,
                    .model = s->prepared->number,
                    .slots = slots};
    put_request(m, &t, slots + n);
}

static void put_bin(message *m, const message *inner) {
    const unsigned char wide[] = {0xc5, (unsigned char)(inner->length >> 8),
                                  (unsigned char)inner->length};
    const unsigned char narrow[] = {0xc4, (unsigned char)inner->length};
    if (inner->length < 256) put_bytes(m, narrow, sizeof narrow);
    else put_bytes(m, wide, sizeof wide);
    put_bytes(m, inner->bytes, inner->length);
}

static void put_stop(message *m, const burst_stream_options *how) {
    if (how->until < 0) {
        put_nil(m);
        return;
    }
    put_array(m, 2), put_int(m, how->until), put_array(m, how->n_values);
    for (uint32_t i = 0; i < how->n_values; i++) put_int(m, how->values[i]);
}

static int send_terms(stream *s, const opening *o) {
    uint32_t n = o->n_inputs + o->n_outputs;
    int64_t *slots = calloc(2 * n + 1, sizeof *slots);
    burst_tensor *inputs = calloc(o->n_inputs + 1, sizeof *inputs);
    message step = {0}, *m = &s->m;
    bool is_whole = slots && inputs;
    message_reset(m);
    put_array(m, 6), put_wide(m, NUMBER), put_wide(m, o->deadline);
    put_uint(m, s->how.most), put_uint(m, s->how.sets), put_stop(m, &s->how);
    put_array(m, 1 + s->how.sets);
    for (uint32_t i = 0; i <= s->how.sets && is_whole; i++) {
        message_reset(&step);
        put_step(&step, s, o, i, slots, inputs);
        is_whole = !step.is_broken && step.length < MOST_BYTES;
        if (is_whole) put_bin(m, &step);
    }
    message_free(&step), free(slots), free(inputs);
    if (!is_whole || m->is_broken) return fail(-ENOMEM, "no memory for the requests of a stream");
    if (m->length > MOST_BYTES)
        return fail(-EMSGSIZE, "the requests of this stream take %zu bytes of %d; use fewer sets",
                    m->length, MOST_BYTES);
    s->given = s->how.sets;
    return plain_send(s->path, m);
}

static int begin(stream *s, opening *o) {
    uint32_t n = o->n_inputs + s->how.sets * o->n_outputs;
    o->slots = calloc(n + 1, sizeof *o->slots);
    s->tokens = calloc(TURNS * o->n_feedback + 1, sizeof *s->tokens);
    int r = o->slots && s->tokens ? 0 : fail(-ENOMEM, "no memory for a stream");
    if (!r) r = open_path(s, o);
    if (!r) r = find_slots(s, o);
    if (!r) r = send_terms(s, o);
    free(o->slots);
    return r;
}

int burst_stream_open(burst_compiled *handle, uint32_t n_inputs, const burst_tensor *inputs,
                      uint32_t n_outputs, const burst_tensor *outputs, uint32_t n_feedback,
                      const burst_feedback *feedback, const burst_stream_options *given,
                      uint64_t deadline, burst_stream **out) {
    opening o = {.n_inputs = n_inputs,
                 .n_outputs = n_outputs,
                 .n_feedback = n_feedback,
                 .inputs = inputs,
                 .outputs = outputs,
                 .feedback = feedback,
                 .deadline = deadline};
    burst_stream_options how;
    int r = out ? read_options(given, &how) : fail(-EINVAL, "NULL where room for a stream is due");
    if (!r) r = check(&o, &how);
    compiled *prepared = r ? NULL : handle_take(handle, COMPILED, &r);
    if (!prepared) return r;
    stream *s = calloc(1, sizeof *s);
    if (!s) return object_put(prepared), fail(-ENOMEM, "no memory for a stream");
    *s = (stream){.prepared = prepared, .how = how, .n_outputs = n_outputs - n_feedback};
    r = begin(s, &o);
    if (!r && !(r = handle_new(&s->head, STREAM, destroy, out))) return 0;
    s->head.generation = handle_generation();
    destroy(&s->head);
    return r;
}

/* ---- results --------------------------------------------------------------------------------- */

/* Of the sets that the caller had; half of them at once. */
static int give_room(stream *s) {
    uint64_t room = s->taken + s->how.sets;
    if (room - s->given < s->how.sets / 2 && s->given > s->taken) return 0;
    s->given = room;
    message_reset(&s->m);
    put_array(&s->m, 3);
    put_text(&s->m, "go_on"), put_int(&s->m, NUMBER), put_uint(&s->m, room);
    return plain_send(s->path, &s->m);
}

static int receive(stream *s, uint64_t deadline) {
    int64_t four, number;
    int r = plain_receive(s->path, deadline, &s->answer);
    if (r) return r;
    message *m = s->answer;
    message_close_fds(m);
    if (!take_as(m, ARRAY, &four) || four != 4 || !take_as(m, INTEGER, &number) || number != NUMBER)
        return -EBADMSG;
    s->outcome_at = m->at;
    return 0;
}

static int take_step(stream *s, burst_outcome *o, int *more) {
    const task t = {.n_outputs = s->n_outputs,
                    .how = {.room = s->how.room, .shapes = s->how.shapes}};
    message *m = s->answer;
    int64_t goes_on = -1, count = 0;
    m->at = s->outcome_at;
    int r = take_outcome(m, &t, o);
    if (r < 0) return r;
    bool is_good = take_as(m, INTEGER, &goes_on) && take_as(m, INTEGER, &count) && count >= 1 &&
                   count <= MOST_SETS && m->at == m->length;
    if (!is_good) return -EBADMSG;
    s->left = (s->left ? s->left : count) - 1;
    o->number = ++s->taken;
    *more = !r && (s->left || goes_on == GOES_ON);
    return r;
}

static int next(stream *s, uint64_t deadline, burst_outcome *o, int *more) {
    if (s->is_over) return fail(-ENOMSG, "the stream has ended");
    int r = give_room(s);
    if (!r && !s->left) r = receive(s, deadline);
    if (r == -ETIMEDOUT) return r;
    if (!r) r = take_step(s, o, more);
    if (r == -EBADMSG) fail(r, "the device's answer is malformed, or to something else");
    s->is_over = r || !*more;
    return r;
}

int burst_stream_next(burst_stream *handle, uint64_t deadline, burst_outcome *outcome,
                      uint32_t *set, int *more) {
    burst_outcome ignored;
    int r, goes_on = 0;
    stream *s = handle_take(handle, STREAM, &r);
    if (!s) return r;
    if (atomic_exchange(&s->busy, 1)) {
        object_put(s);
        return fail(-EBUSY, "another thread waits for a result of this stream");
    }
    uint32_t its = (uint32_t)(s->taken % s->how.sets);
    r = next(s, deadline, outcome ? outcome : &ignored, &goes_on);
    if (r == -EPIPE && !object_is_open(s)) r = fail(-ECANCELED, "this stream was closed");
    atomic_store(&s->busy, 0);
    object_put(s);
    if (set) *set = its;
    if (more) *more = goes_on;
    return r;
}

int burst_stream_close(burst_stream *handle) {
    void *closed;
    int r = handle_close(handle, STREAM, &closed);
    if (r) return r;
    plain_stop(((stream *)closed)->path);
    object_put(closed);
    return 0;
}
