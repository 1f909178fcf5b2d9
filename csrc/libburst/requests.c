/* Requests: where inputs and outputs lie becomes slots and a packet, once. */
#define _GNU_SOURCE
#include "libburst/controller.h"

#include <errno.h>
#include <stdlib.h>

/* Any thread, and at once: another one may wait inside of the controller. */
static void drop_slot(controller *c, int64_t slot, pool *p) {
    if (burst_slots_drop(c->slots, slot)) {
        pthread_rwlock_rdlock(&c->living);
        if (c->lane) lane_forget(c->lane, slot);
        pthread_rwlock_unlock(&c->living);
    }
    object_put(p);
}

static void free_request(object *o) {
    request *q = (request *)o;
    controller *c = q->controller;
    for (uint32_t i = 0; i < q->n_slots; i++) drop_slot(c, q->slots[i], q->pools[i]);
    free(q->slots);
    free(q->pools);
    free(q->packet);
    free(q);
    object_put(c);
}

static int64_t use_slot(burst_slots *slots, pool *p) {
    message description = {0};
    put_pool(&description, p);
    int64_t slot = description.is_broken ? fail(-ENOMEM, "no memory for a slot")
                                         : burst_slots_use(slots, p, p->fd, description.bytes,
                                                           (uint32_t)description.length);
    message_free(&description);
    return slot;
}

/* The place of a pool among those of the request, a new one if need be. Keeps the reference, or
 * gives it back. */
static int place_of(request *q, burst_place *places, pool *p) {
    for (uint32_t i = 0; i < q->n_slots; i++)
        if (q->pools[i] == p) return object_put(p), (int)i;
    int64_t slot = use_slot(q->controller->slots, p);
    if (slot < 0) return object_put(p), (int)slot;
    places[q->n_slots] = (burst_place){.number = slot};
    q->slots[q->n_slots] = slot, q->pools[q->n_slots] = p;
    return (int)q->n_slots++;
}

static int read_tensor(request *q, const burst_tensor *t, burst_argument *a, burst_place *places,
                       int64_t *dimensions) {
    pool *p;
    int r = pool_of(t, LENGTH, &p);
    *a = (burst_argument){.has_no_value = 1};
    if (!p) return r;
    int place = place_of(q, places, p);
    if (place < 0) return place;
    for (uint32_t i = 0; i < t->rank; i++) dimensions[i] = t->shape[i];
    *a = (burst_argument){.rank = t->rank,
                          .pool = place,
                          .offset = (int64_t)t->offset,
                          .length = (int64_t)t->length,
                          .dimensions = dimensions};
    return 0;
}

static int encode(request *q, const burst_request_packet *said, int version) {
    burst_complaint why = {.text = ""};
    int64_t bytes = burst_encode_request(said, version, NULL, 0, NULL);
    if (bytes > LENGTH * ELEMENT)
        return fail(-EMSGSIZE, "a request of %lld bytes does not fit into the queue",
                    (long long)bytes);
    if (!(q->packet = malloc((size_t)bytes))) return fail(-ENOMEM, "no memory for a request");
    int64_t r = burst_encode_request(said, version, q->packet, (uint64_t)bytes, &why);
    if (r < 0)
        return fail((int)r, "the request, element %llu: %s", (unsigned long long)why.element,
                    why.text);
    q->bytes = (uint64_t)r;
    return 0;
}

static uint64_t loop_of(const controller *c) {
    return c->options.loop_timeout ? c->options.loop_timeout : BURST_FOREVER;
}

static int fill(request *q, int version, uint32_t n_inputs, const burst_tensor *inputs,
                uint32_t n_outputs, const burst_tensor *outputs) {
    uint32_t n = n_inputs + n_outputs, ranks = 0;
    for (uint32_t i = 0; i < n; i++) {
        const burst_tensor *t = i < n_inputs ? &inputs[i] : &outputs[i - n_inputs];
        ranks += t->pool && t->rank <= LENGTH ? t->rank : 0;
    }
    burst_argument *arguments = calloc(n + 1, sizeof *arguments);
    burst_place *places = calloc(n + 1, sizeof *places);
    int64_t *dimensions = calloc(ranks + 1, sizeof *dimensions), *next = dimensions;
    q->slots = calloc(n + 1, sizeof *q->slots), q->pools = calloc(n + 1, sizeof *q->pools);
    int r = arguments && places && dimensions && q->slots && q->pools
                ? 0
                : fail(-ENOMEM, "no memory for a request");
    for (uint32_t i = 0; i < n && !r; i++) {
        r = read_tensor(q, i < n_inputs ? &inputs[i] : &outputs[i - n_inputs], &arguments[i],
                        places, next);
        next += arguments[i].rank;
    }
    const burst_request_packet said = {.inputs = arguments,
                                       .outputs = arguments ? arguments + n_inputs : NULL,
                                       .places = places,
                                       .n_inputs = n_inputs,
                                       .n_outputs = n_outputs,
                                       .n_places = q->n_slots,
                                       .measure = q->controller->options.measure,
                                       .loop_timeout = loop_of(q->controller),
                                       .deadline = BURST_FOREVER};
    if (!r) r = encode(q, &said, version);
    free(arguments), free(places), free(dimensions);
    return r;
}

int burst_request_new(burst_controller *handle, uint32_t n_inputs, const burst_tensor *inputs,
                      uint32_t n_outputs, const burst_tensor *outputs, burst_request **out) {
    uint64_t generation;
    int r;
    if (!out || (n_inputs && !inputs) || (n_outputs && !outputs) || n_inputs > LENGTH ||
        n_outputs > LENGTH)
        return fail(-EINVAL,
                    "NULL where tensors or room for a request are due, or more than %d tensors",
                    LENGTH);
    controller *c = handle_take(handle, CONTROLLER, &r);
    if (!c) return r;
    request *q = calloc(1, sizeof *q);
    if (!q) return object_put(c), fail(-ENOMEM, "no memory for a request");
    q->controller = c; /* owns it */
    r = controller_enter(c, &generation);
    if (!r) {
        int version = c->lane->version;
        controller_leave(c);
        r = fill(q, version, n_inputs, inputs, n_outputs, outputs);
    }
    if (!r && !(r = handle_new(&q->head, REQUEST, free_request, out))) return 0;
    free_request(&q->head);
    return r;
}

int burst_request_free(burst_request *handle) {
    int r;
    void *closed;
    request *q = handle_take(handle, REQUEST, &r);
    if (!q) return r;
    if (atomic_load(&q->in_flight))
        r = fail(-EBUSY, "this request is in flight; await its result first");
    object_put(q);
    if (r || (r = handle_close(handle, REQUEST, &closed))) return r;
    object_put(closed);
    return 0;
}
