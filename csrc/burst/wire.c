/* The wire: a request or a result becomes a packet, and a packet is checked and taken apart.
 * burst/wire.py has the table of all elements.
 *
 * The functions are pure. They believe no count before the packet has been seen to be that long,
 * and no byte that the table does not name. The decoders accept exactly what the encoders make.
 */
#include <stdint.h>

#include "burst/api.h"
#include "burst/packet.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

/* Of a request, and of a result. packet.h has those that caller.c and listener.c know, too. */
enum { INPUT = 1, INPUT_DIMENSION, OUTPUT, OUTPUT_DIMENSION, SLOT, MEASURE, TOKEN, LOOP_TIMEOUT };
enum { OPERAND = 1, OPERAND_DIMENSION };
enum { NONE = 0, INSUFFICIENT = 3 };

/* A kind of element: a bit for each byte of its payload, and which of these is a bool (0: none). */
typedef struct {
    const char *name;
    uint32_t payload, flag;
} kind_of_element;

static const kind_of_element request_kinds[] = {
    {"PACKET_INFORMATION", 0x0ffff0, 0},
    {"INPUT_OPERAND_INFORMATION", 0xffff10, 4},
    {"INPUT_OPERAND_DIMENSION_VALUE", 0x0000f0, 0},
    {"OUTPUT_OPERAND_INFORMATION", 0xffff10, 4},
    {"OUTPUT_OPERAND_DIMENSION_VALUE", 0x0000f0, 0},
    {"POOL_IDENTIFIER", 0x0000f0, 0},
    {"MEASURE_TIMING", 0x0000f0, 0},
    {"BUFFER_TOKEN", 0x0000f0, 0},
    {"LOOP_TIMEOUT", 0x00ff00, 0},
    {"REQUEST_IDENTIFIER", 0xffff00, 0},
};
static const kind_of_element result_kinds[] = {
    {"PACKET_INFORMATION", 0x0fff00, 0},      {"OPERAND_INFORMATION", 0x00f100, 8},
    {"OPERAND_DIMENSION_VALUE", 0x000f00, 0}, {"EXECUTION_TIMING", 0xffff00, 0},
    {"REQUEST_IDENTIFIER", 0x00ff00, 0},
};

static int complain(burst_complaint *why, int error, uint64_t element, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static int complain(burst_complaint *why, int error, uint64_t element, const char *format, ...) {
    if (!why) return error;
    va_list values;
    va_start(values, format);
    why->element = element;
    vsnprintf(why->text, sizeof why->text, format, values);
    va_end(values);
    return error;
}

/* ---- what both ways check -------------------------------------------------------------------- */

static int check_pool(burst_complaint *why, int error, uint64_t element, int64_t pool, uint32_t n) {
    if (pool < n) return 0;
    return complain(why, error, element, "poolIndex is %" PRId64 ", but the packet names %u pools",
                    pool, n);
}

/* Of an argument without a value. */
static int check_omitted(burst_complaint *why, int error, uint64_t element,
                         const burst_argument *a) {
    if (!a->pool && !a->offset && !a->length && !a->rank) return 0;
    return complain(why, error, element,
                    "an argument without a value has a location or dimensions");
}

static int check_place(burst_complaint *why, int error, uint64_t element, const burst_place *p) {
    if (p->is_token && !p->number)
        return complain(why, error, element, "token 0 stands for no buffer");
    if (p->is_token || p->number >= 0) return 0;
    return complain(why, error, element, "slot %" PRId64 " is negative", p->number);
}

static int check_status(burst_complaint *why, int error, const burst_result_packet *r,
                        int version) {
    int32_t status = r->status, last = version > 1 ? LAST_STATUS : INVALID_ARGUMENT;
    if (status < NONE || status > last)
        return complain(why, error, 0, "errorStatus is %d, not one of 0 to %d", status, last);
    if (r->n_shapes && status != NONE && status != INSUFFICIENT)
        return complain(why, error, 0, "%u output shapes with errorStatus %d, which has none",
                        r->n_shapes, status);
    return 0;
}

static int check_times(burst_complaint *why, int error, uint64_t element,
                       const burst_result_packet *r) {
    bool both = r->on_device != NOT_MEASURED && r->in_driver != NOT_MEASURED;
    if (r->status != NONE && (r->on_device & r->in_driver) != NOT_MEASURED)
        return complain(why, error, element, "a time with errorStatus %d, which has none",
                        r->status);
    if (both && r->on_device > r->in_driver)
        return complain(why, error, element,
                        "timeOnDevice %" PRIu64 " is more than timeInDriver %" PRIu64, r->on_device,
                        r->in_driver);
    return 0;
}

/* ---- writing --------------------------------------------------------------------------------- */

typedef struct {
    unsigned char *packet;
    uint64_t element; /* the next one */
    burst_complaint *why;
} writer;

/* The caller has made sure that there is room. */
static unsigned char *put(writer *w, unsigned kind) {
    unsigned char *at = w->packet + DATUM * w->element++;
    memset(at, 0, DATUM);
    *at = (unsigned char)kind;
    return at;
}

static void store_u32(unsigned char *at, uint32_t v) { memcpy(at, &v, sizeof v); }

/* Writes a number, if it is from 0 to `most`. */
static int store(writer *w, unsigned kind, unsigned char *at, const char *field, int64_t value,
                 int64_t most) {
    if (value < 0 || value > most)
        return complain(w->why, -EINVAL, (uint64_t)(at - w->packet) / DATUM,
                        "%s cannot hold %s %" PRId64, request_kinds[kind].name, field, value);
    store_u32(at, (uint32_t)value);
    return 0;
}

static int put_argument(writer *w, const burst_argument *a, unsigned kind, uint32_t n_pools) {
    uint64_t element = w->element;
    unsigned char *at = put(w, kind);
    int r = a->has_no_value ? check_omitted(w->why, -EINVAL, element, a) : 0;
    at[4] = a->has_no_value != 0;
    if (!r) r = store(w, kind, at + 8, "poolIndex", a->pool, UINT32_MAX);
    if (!r) r = store(w, kind, at + 12, "offset", a->offset, UINT32_MAX);
    if (!r) r = store(w, kind, at + 16, "length", a->length, UINT32_MAX);
    if (!r && !a->has_no_value) r = check_pool(w->why, -EINVAL, element, a->pool, n_pools);
    store_u32(at + 20, a->rank);
    for (uint32_t i = 0; i < a->rank && !r; i++)
        r = store(w, kind + 1, put(w, kind + 1) + 4, "dimension", a->dimensions[i], UINT32_MAX);
    return r;
}

static int put_place(writer *w, const burst_place *place, int version) {
    unsigned kind = place->is_token ? TOKEN : SLOT;
    if (kind == TOKEN && version == 1)
        return complain(w->why, -EINVAL, w->element, "wire version 1 has no buffer tokens");
    int r = check_place(w->why, -EINVAL, w->element, place);
    if (r) return r;
    unsigned char *at = put(w, kind) + 4;
    return kind == TOKEN ? store(w, kind, at, "token", place->number, UINT32_MAX)
                         : store(w, kind, at, "slot", place->number, INT32_MAX);
}

static int put_end(writer *w, const burst_request_packet *r, int version) {
    put(w, MEASURE)[4] = r->measure != 0;
    if (version > 1) {
        store_u64(put(w, LOOP_TIMEOUT) + 8, r->loop_timeout);
        unsigned char *identifier = put(w, REQUEST_IDENTIFIER);
        store_u64(identifier + 8, r->id);
        store_u64(identifier + 16, r->deadline);
    } else if (r->loop_timeout != NOT_MEASURED || r->deadline != NOT_MEASURED)
        return complain(w->why, -EINVAL, w->element,
                        "wire version 1 has no deadline and no loop timeout");
    return 0;
}

static uint64_t elements_of(const burst_request_packet *r, int version) {
    uint64_t n = (version > 1 ? 4u : 2u) + (uint64_t)r->n_inputs + r->n_outputs + r->n_places;
    for (uint32_t i = 0; i < r->n_inputs; i++) n += r->inputs[i].rank;
    for (uint32_t i = 0; i < r->n_outputs; i++) n += r->outputs[i].rank;
    return n;
}

int64_t burst_encode_request(const burst_request_packet *r, int version, void *packet,
                             uint64_t bytes, burst_complaint *why) {
    uint64_t n = elements_of(r, version);
    if (!packet) return (int64_t)(n * DATUM);
    if (n > UINT32_MAX || n * DATUM > bytes) return -EMSGSIZE;
    writer w = {packet, 0, why};
    const uint32_t counts[] = {(uint32_t)n, r->n_inputs, r->n_outputs, r->n_places};
    memcpy(put(&w, PACKET_INFORMATION) + REQUEST_SIZE_AT, counts, sizeof counts);
    int error = 0;
    for (uint32_t i = 0; i < r->n_inputs && !error; i++)
        error = put_argument(&w, &r->inputs[i], INPUT, r->n_places);
    for (uint32_t i = 0; i < r->n_outputs && !error; i++)
        error = put_argument(&w, &r->outputs[i], OUTPUT, r->n_places);
    for (uint32_t i = 0; i < r->n_places && !error; i++)
        error = put_place(&w, &r->places[i], version);
    if (!error) error = put_end(&w, r, version);
    return error ? error : (int64_t)(n * DATUM);
}

/* Writes a shape, and returns what follows it. */
static const uint32_t *put_shape(writer *w, const uint32_t *shape) {
    unsigned char *at = put(w, OPERAND);
    at[8] = *shape++ != 0;
    uint32_t rank = *shape++;
    store_u32(at + 12, rank);
    for (uint32_t i = 0; i < rank; i++) store_u32(put(w, OPERAND_DIMENSION) + 8, *shape++);
    return shape;
}

int64_t burst_encode_result(const burst_result_packet *given, const uint32_t *shapes, int version,
                            void *packet, uint64_t bytes, burst_complaint *why) {
    burst_result_packet r = *given;
    uint64_t n = (version > 1 ? 3u : 2u) + (uint64_t)r.n_shapes;
    const uint32_t *at = shapes;
    for (uint32_t i = 0; i < r.n_shapes; i++, at += 2 + at[1]) n += at[1];
    if (!packet) return (int64_t)(n * DATUM);
    if (n > UINT32_MAX || n * DATUM > bytes) return -EMSGSIZE;
    if (version == 1 && r.status > INVALID_ARGUMENT && r.status <= LAST_STATUS)
        r.status = GENERAL_FAILURE;
    int error = check_status(why, -EINVAL, &r, version);
    if (error) return error;
    writer w = {packet, 0, why};
    const uint32_t head[] = {(uint32_t)n, (uint32_t)r.status, r.n_shapes};
    memcpy(put(&w, PACKET_INFORMATION) + RESULT_SIZE_AT, head, sizeof head);
    for (uint32_t i = 0; i < r.n_shapes; i++) shapes = put_shape(&w, shapes);
    if ((error = check_times(why, -EINVAL, w.element, &r))) return error;
    unsigned char *timing = put(&w, EXECUTION_TIMING);
    store_u64(timing + 8, r.on_device);
    store_u64(timing + 16, r.in_driver);
    if (version > 1) store_u64(put(&w, RESULT_IDENTIFIER) + 8, r.id);
    return (int64_t)(n * DATUM);
}

/* ---- reading --------------------------------------------------------------------------------- */

typedef struct {
    const unsigned char *packet;
    uint64_t size, element; /* elements in all; the next one */
    const kind_of_element *kinds;
    burst_complaint *why;
} reader;

static bool is_padded(const unsigned char *at, const kind_of_element *kind) {
    for (unsigned i = 1; i < DATUM; i++)
        if (at[i] && !(kind->payload >> i & 1)) return false;
    return !kind->flag || at[kind->flag] <= 1;
}

/* The next element, if it is of that kind. */
static const unsigned char *take(reader *r, unsigned number) {
    const unsigned char *at = r->packet + DATUM * r->element;
    const kind_of_element *kind = &r->kinds[number];
    if (r->element == r->size)
        return complain(r->why, 0, r->element, "the packet ends where %s is due", kind->name), NULL;
    if (*at != number)
        return complain(r->why, 0, r->element, "discriminator %u where %u, %s, is due", *at, number,
                        kind->name),
               NULL;
    if (!is_padded(at, kind))
        return complain(r->why, 0, r->element,
                        "%s has padding that is not 0, or a bool neither 0 nor 1", kind->name),
               NULL;
    r->element++;
    return at;
}

/* The dimensions that the element before announces must follow. */
static int check_rank(const reader *r, uint32_t rank) {
    if (rank <= r->size - r->element) return 0;
    return complain(r->why, -EBADMSG, r->element - 1, "announces %u elements; %" PRIu64 " follow",
                    rank, r->size - r->element);
}

static int check_size(const reader *r, uint32_t announced, uint64_t least) {
    if (announced != r->size)
        return complain(r->why, -EBADMSG, 0, "packetSize is %u, but %" PRIu64 " elements came",
                        announced, r->size);
    if (least > r->size)
        return complain(r->why, -EBADMSG, 0,
                        "its counts announce %" PRIu64 " elements or more, but %" PRIu64 " came",
                        least, r->size);
    return 0;
}

static int check_end(const reader *r) {
    if (r->element == r->size) return 0;
    return complain(r->why, -EBADMSG, r->element, "the packet goes on after its last element");
}

/* The first element, or NULL. */
static const unsigned char *begin(reader *r, const void *packet, uint64_t bytes) {
    r->packet = packet;
    r->size = bytes / DATUM;
    if (bytes && bytes % DATUM == 0) return take(r, PACKET_INFORMATION);
    return complain(r->why, 0, r->size, "%" PRIu64 " bytes are not one or more elements of %d",
                    bytes, DATUM),
           NULL;
}

/* `end`: of the room for dimensions, which grows downwards. */
static int take_argument(reader *r, burst_argument *a, unsigned kind, uint32_t n_pools,
                         int64_t **end) {
    uint64_t element = r->element;
    const unsigned char *at = take(r, kind);
    if (!at) return -EBADMSG;
    *a = (burst_argument){.has_no_value = at[4],
                          .rank = load_u32(at + 20),
                          .pool = load_u32(at + 8),
                          .offset = load_u32(at + 12),
                          .length = load_u32(at + 16)};
    int error = check_rank(r, a->rank);
    if (error) return error;
    int64_t *dimensions = *end -= a->rank;
    a->dimensions = dimensions;
    for (uint32_t i = 0; i < a->rank; i++) {
        if (!(at = take(r, kind + 1))) return -EBADMSG;
        dimensions[i] = load_u32(at + 4);
    }
    return a->has_no_value ? check_omitted(r->why, -EBADMSG, element, a)
                           : check_pool(r->why, -EBADMSG, element, a->pool, n_pools);
}

static int take_place(reader *r, burst_place *place, int version) {
    uint64_t element = r->element;
    bool is_token = version > 1 && element < r->size && r->packet[DATUM * element] == TOKEN;
    const unsigned char *at = take(r, is_token ? TOKEN : SLOT);
    if (!at) return -EBADMSG;
    uint32_t number = load_u32(at + 4);
    *place =
        (burst_place){.number = is_token ? (int64_t)number : (int32_t)number, .is_token = is_token};
    return check_place(r->why, -EBADMSG, element, place);
}

static int take_measure(reader *r, burst_request_packet *request) {
    const unsigned char *at = take(r, MEASURE);
    if (!at) return -EBADMSG;
    request->measure = load_u32(at + 4);
    if (request->measure <= 1) return 0;
    return complain(r->why, -EBADMSG, r->element - 1, "measureTiming is %d, neither 0 nor 1",
                    (int32_t)request->measure);
}

static int take_end(reader *r, burst_request_packet *request, int version) {
    request->loop_timeout = request->deadline = NOT_MEASURED;
    if (version == 1) return 0;
    const unsigned char *at = take(r, LOOP_TIMEOUT);
    if (!at) return -EBADMSG;
    request->loop_timeout = load_u64(at + 8);
    if (!(at = take(r, REQUEST_IDENTIFIER))) return -EBADMSG;
    request->id = load_u64(at + 8);
    request->deadline = load_u64(at + 16);
    return request->id ? 0 : complain(r->why, -EBADMSG, r->element - 1, "a request's id is not 0");
}

/* Arguments, then places, from the beginning of the room on; dimensions from its end. Each element
 * of the packet becomes one of these or none, and an argument is the largest, so they never
 * meet. */
int burst_decode_request(const void *packet, uint64_t bytes, int version,
                         burst_request_packet *request, burst_argument *room,
                         burst_complaint *why) {
    reader r = {.kinds = request_kinds, .why = why};
    const unsigned char *at = begin(&r, packet, bytes);
    if (!at) return -EBADMSG;
    uint32_t n_in = load_u32(at + 8), n_out = load_u32(at + 12), n_places = load_u32(at + 16);
    int error = check_size(&r, load_u32(at + REQUEST_SIZE_AT),
                           (version > 1 ? 4u : 2u) + (uint64_t)n_in + n_out + n_places);
    if (error) return error;
    burst_place *places = (burst_place *)(room + n_in + n_out);
    int64_t *end = (int64_t *)(room + r.size);
    *request = (burst_request_packet){.inputs = room,
                                      .outputs = room + n_in,
                                      .places = places,
                                      .n_inputs = n_in,
                                      .n_outputs = n_out,
                                      .n_places = n_places};
    for (uint32_t i = 0; i < n_in && !error; i++)
        error = take_argument(&r, room + i, INPUT, n_places, &end);
    for (uint32_t i = 0; i < n_out && !error; i++)
        error = take_argument(&r, room + n_in + i, OUTPUT, n_places, &end);
    for (uint32_t i = 0; i < n_places && !error; i++) error = take_place(&r, places + i, version);
    if (!error) error = take_measure(&r, request);
    if (!error) error = take_end(&r, request, version);
    return error ? error : check_end(&r);
}

/* Writes whether it suffices, the rank and the dimensions; returns what follows those, or NULL. */
static uint32_t *take_shape(reader *r, uint32_t *shapes) {
    const unsigned char *at = take(r, OPERAND);
    if (!at) return NULL;
    uint32_t rank = load_u32(at + 12);
    if (check_rank(r, rank)) return NULL;
    *shapes++ = at[8];
    *shapes++ = rank;
    for (uint32_t i = 0; i < rank; i++) {
        if (!(at = take(r, OPERAND_DIMENSION))) return NULL;
        *shapes++ = load_u32(at + 8);
    }
    return shapes;
}

static int take_timing(reader *r, burst_result_packet *result) {
    const unsigned char *at = take(r, EXECUTION_TIMING);
    if (!at) return -EBADMSG;
    result->on_device = load_u64(at + 8);
    result->in_driver = load_u64(at + 16);
    return check_times(r->why, -EBADMSG, r->element - 1, result);
}

static int take_identifier(reader *r, burst_result_packet *result) {
    const unsigned char *at = take(r, RESULT_IDENTIFIER);
    if (!at) return -EBADMSG;
    result->id = load_u64(at + 8);
    return 0;
}

int burst_decode_result(const void *packet, uint64_t bytes, int version,
                        burst_result_packet *result, uint32_t *shapes, burst_complaint *why) {
    reader r = {.kinds = result_kinds, .why = why};
    const unsigned char *at = begin(&r, packet, bytes);
    if (!at) return -EBADMSG;
    *result = (burst_result_packet){.status = (int32_t)load_u32(at + RESULT_STATUS_AT),
                                    .n_shapes = load_u32(at + 16)};
    int error = check_size(&r, load_u32(at + RESULT_SIZE_AT),
                           (version > 1 ? 3u : 2u) + (uint64_t)result->n_shapes);
    if (!error) error = check_status(why, -EBADMSG, result, version);
    for (uint32_t i = 0; i < result->n_shapes && !error; i++)
        error = (shapes = take_shape(&r, shapes)) ? 0 : -EBADMSG;
    if (!error) error = take_timing(&r, result);
    if (!error && version > 1) error = take_identifier(&r, result);
    return error ? error : check_end(&r);
}
