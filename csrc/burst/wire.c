/* The client's half of the wire: a request becomes a packet, and a result packet is checked and taken apart. The table of
 * all elements stands in burst/wire.py; the device's half is there, too.
 *
 * The functions are pure. What a result says is not believed: no count before the packet has been seen to be that long,
 * and no byte that this half of the table does not name.
 */
#include <stdint.h>

#include "burst/api.h"
#include "burst/packet.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

enum { INPUT = 1, INPUT_DIMENSION = 2, OUTPUT = 3, OUTPUT_DIMENSION = 4, SLOT = 5, MEASURE = 6, TOKEN = 7, LOOP_TIMEOUT = 8 };
enum { OPERAND = 1, OPERAND_DIMENSION = 2 };
enum { NONE = 0, INSUFFICIENT = 3, INVALID_ARGUMENT = 4 };

static int __attribute__((format(printf, 4, 5)))
complain(burst_complaint *why, int error, uint64_t element, const char *format, ...) {
    if (!why) return error;
    va_list values;
    va_start(values, format);
    why->element = element;
    vsnprintf(why->text, sizeof why->text, format, values);
    va_end(values);
    return error;
}

/* ---- requests ---------------------------------------------------------------------------------------------------- */

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

static bool is_u32(int64_t value) { return value >= 0 && value <= UINT32_MAX; }

static const char *name_of(unsigned kind) {
    static const char *const names[] = {"PACKET_INFORMATION", "INPUT_OPERAND_INFORMATION", "INPUT_OPERAND_DIMENSION_VALUE",
                                        "OUTPUT_OPERAND_INFORMATION", "OUTPUT_OPERAND_DIMENSION_VALUE", "POOL_IDENTIFIER",
                                        "MEASURE_TIMING", "BUFFER_TOKEN"};
    return names[kind];
}

static int refuse_value(writer *w, unsigned kind, const char *field, int64_t value) {
    return complain(w->why, -EINVAL, w->element, "%s cannot hold %s %" PRId64, name_of(kind), field, value);
}

static int check_argument(writer *w, const burst_argument *a, unsigned kind, uint32_t n_pools) {
    if (a->has_no_value) {
        if (!a->pool && !a->offset && !a->length && !a->rank) return 0;
        return complain(w->why, -EINVAL, w->element, "an argument without a value has a location or dimensions");
    }
    if (!is_u32(a->pool)) return refuse_value(w, kind, "poolIndex", a->pool);
    if (!is_u32(a->offset)) return refuse_value(w, kind, "offset", a->offset);
    if (!is_u32(a->length)) return refuse_value(w, kind, "length", a->length);
    if (a->pool < n_pools) return 0;
    return complain(w->why, -EINVAL, w->element, "poolIndex is %" PRId64 ", but the packet names %u pools", a->pool, n_pools);
}

static int put_argument(writer *w, const burst_argument *a, unsigned kind, uint32_t n_pools) {
    int r = check_argument(w, a, kind, n_pools);
    if (r) return r;
    unsigned char *at = put(w, kind);
    at[4] = a->has_no_value != 0;
    store_u32(at + 8, (uint32_t)a->pool);
    store_u32(at + 12, (uint32_t)a->offset);
    store_u32(at + 16, (uint32_t)a->length);
    store_u32(at + 20, a->rank);
    for (uint32_t i = 0; i < a->rank; i++) {
        if (!is_u32(a->dimensions[i])) return refuse_value(w, kind + 1, "dimension", a->dimensions[i]);
        store_u32(put(w, kind + 1) + 4, (uint32_t)a->dimensions[i]);
    }
    return 0;
}

static int put_place(writer *w, const burst_place *place, int version) {
    unsigned kind = place->is_token ? TOKEN : SLOT;
    if (kind == TOKEN && version == 1) return complain(w->why, -EINVAL, w->element, "wire version 1 has no buffer tokens");
    if (kind == TOKEN && !place->number) return complain(w->why, -EINVAL, w->element, "token 0 stands for no buffer");
    if (kind == SLOT && place->number < 0)
        return complain(w->why, -EINVAL, w->element, "slot %" PRId64 " is negative", place->number);
    if (place->number < 0 || place->number > (kind == TOKEN ? UINT32_MAX : INT32_MAX))
        return refuse_value(w, kind, kind == TOKEN ? "token" : "slot", place->number);
    store_u32(put(w, kind) + 4, (uint32_t)place->number);
    return 0;
}

static int put_end(writer *w, const burst_request_packet *r, int version) {
    put(w, MEASURE)[4] = r->measure != 0;
    if (version > 1) {
        store_u64(put(w, LOOP_TIMEOUT) + 8, r->loop_timeout);
        unsigned char *identifier = put(w, REQUEST_IDENTIFIER);
        store_u64(identifier + 8, r->id);
        store_u64(identifier + 16, r->deadline);
    } else if (r->loop_timeout != NOT_MEASURED || r->deadline != NOT_MEASURED)
        return complain(w->why, -EINVAL, w->element, "wire version 1 has no deadline and no loop timeout");
    return 0;
}

static uint64_t elements_of(const burst_request_packet *r, int version) {
    uint64_t n = (version > 1 ? 4u : 2u) + (uint64_t)r->n_inputs + r->n_outputs + r->n_places;
    for (uint32_t i = 0; i < r->n_inputs; i++) n += r->inputs[i].rank;
    for (uint32_t i = 0; i < r->n_outputs; i++) n += r->outputs[i].rank;
    return n;
}

int64_t burst_encode(const burst_request_packet *r, int version, void *packet, uint64_t bytes, burst_complaint *why) {
    uint64_t n = elements_of(r, version);
    if (!packet) return (int64_t)(n * DATUM);
    if (n > UINT32_MAX || n * DATUM > bytes) return -EMSGSIZE;
    writer w = {packet, 0, why};
    unsigned char *information = put(&w, PACKET_INFORMATION);
    const uint32_t counts[] = {(uint32_t)n, r->n_inputs, r->n_outputs, r->n_places};
    memcpy(information + REQUEST_SIZE_AT, counts, sizeof counts);
    int error = 0;
    for (uint32_t i = 0; i < r->n_inputs && !error; i++) error = put_argument(&w, &r->inputs[i], INPUT, r->n_places);
    for (uint32_t i = 0; i < r->n_outputs && !error; i++) error = put_argument(&w, &r->outputs[i], OUTPUT, r->n_places);
    for (uint32_t i = 0; i < r->n_places && !error; i++) error = put_place(&w, &r->places[i], version);
    if (!error) error = put_end(&w, r, version);
    return error ? error : (int64_t)(n * DATUM);
}

/* ---- results ----------------------------------------------------------------------------------------------------- */

typedef struct {
    const unsigned char *packet;
    uint64_t size, element; /* elements in all; the next one */
    burst_complaint *why;
} reader;

/* By kind: its name, and a bit for each byte that its payload has. */
static const struct {
    const char *name;
    uint32_t payload;
} results[] = {{"PACKET_INFORMATION", 0x0fff00},
               {"OPERAND_INFORMATION", 0x00f100},
               {"OPERAND_DIMENSION_VALUE", 0x000f00},
               {"EXECUTION_TIMING", 0xffff00},
               {"REQUEST_IDENTIFIER", 0x00ff00}};

static bool is_padded(const unsigned char *at, unsigned kind) {
    for (unsigned i = 1; i < DATUM; i++)
        if (at[i] && !(results[kind].payload >> i & 1)) return false;
    return kind != OPERAND || at[8] <= 1;
}

/* The next element, if it is of that kind. */
static const unsigned char *take(reader *r, unsigned kind) {
    const unsigned char *at = r->packet + DATUM * r->element;
    if (r->element == r->size)
        return complain(r->why, 0, r->element, "the packet ends where %s is due", results[kind].name), NULL;
    if (*at != kind)
        return complain(r->why, 0, r->element, "discriminator %u where %u, %s, is due", *at, kind, results[kind].name), NULL;
    if (!is_padded(at, kind))
        return complain(r->why, 0, r->element, "%s has padding that is not 0, or a bool neither 0 nor 1", results[kind].name), NULL;
    r->element++;
    return at;
}

static int check_head(reader *r, const burst_result_packet *result, uint32_t announced, int version) {
    uint64_t least = (version > 1 ? 3u : 2u) + (uint64_t)result->n_shapes;
    int32_t status = result->status, last = version > 1 ? LAST_STATUS : INVALID_ARGUMENT;
    if (announced != r->size)
        return complain(r->why, -EBADMSG, 0, "packetSize is %u, but %" PRIu64 " elements came", announced, r->size);
    if (least > r->size)
        return complain(r->why, -EBADMSG, 0, "its counts announce %" PRIu64 " elements or more, but %" PRIu64 " came", least, r->size);
    if (status < NONE || status > last)
        return complain(r->why, -EBADMSG, 0, "errorStatus is %d, not one of 0 to %d", status, last);
    if (result->n_shapes && status != NONE && status != INSUFFICIENT)
        return complain(r->why, -EBADMSG, 0, "%u output shapes with errorStatus %d, which has none", result->n_shapes, status);
    return 0;
}

/* Writes whether it suffices, the rank and the dimensions; returns what follows those, or NULL. */
static uint32_t *take_shape(reader *r, uint32_t *shapes) {
    const unsigned char *at = take(r, OPERAND);
    if (!at) return NULL;
    uint32_t rank = load_u32(at + 12);
    if (rank > r->size - r->element)
        return complain(r->why, 0, r->element - 1, "announces %u elements; %" PRIu64 " follow", rank, r->size - r->element), NULL;
    *shapes++ = at[8];
    *shapes++ = rank;
    for (uint32_t i = 0; i < rank; i++) {
        if (!(at = take(r, OPERAND_DIMENSION))) return NULL;
        *shapes++ = load_u32(at + 8);
    }
    return shapes;
}

static int take_timing(reader *r, burst_result_packet *result) {
    uint64_t element = r->element;
    const unsigned char *at = take(r, EXECUTION_TIMING);
    if (!at) return -EBADMSG;
    result->on_device = load_u64(at + 8);
    result->in_driver = load_u64(at + 16);
    bool both = result->on_device != NOT_MEASURED && result->in_driver != NOT_MEASURED;
    if (result->status != NONE && (result->on_device & result->in_driver) != NOT_MEASURED)
        return complain(r->why, -EBADMSG, element, "a time with errorStatus %d, which has none", result->status);
    if (both && result->on_device > result->in_driver)
        return complain(r->why, -EBADMSG, element, "timeOnDevice %" PRIu64 " is more than timeInDriver %" PRIu64,
                        result->on_device, result->in_driver);
    return 0;
}

static int take_identifier(reader *r, burst_result_packet *result) {
    const unsigned char *at = take(r, RESULT_IDENTIFIER);
    if (!at) return -EBADMSG;
    result->id = load_u64(at + 8);
    return 0;
}

int burst_decode(const void *packet, uint64_t bytes, int version, burst_result_packet *result, uint32_t *shapes, burst_complaint *why) {
    reader r = {packet, bytes / DATUM, 0, why};
    if (!bytes || bytes % DATUM)
        return complain(why, -EBADMSG, r.size, "%" PRIu64 " bytes are not one or more elements of %d", bytes, DATUM);
    const unsigned char *at = take(&r, PACKET_INFORMATION);
    if (!at) return -EBADMSG;
    *result = (burst_result_packet){.status = (int32_t)load_u32(at + RESULT_STATUS_AT), .n_shapes = load_u32(at + 16)};
    int error = check_head(&r, result, load_u32(at + RESULT_SIZE_AT), version);
    for (uint32_t i = 0; i < result->n_shapes && !error; i++) error = (shapes = take_shape(&r, shapes)) ? 0 : -EBADMSG;
    if (!error) error = take_timing(&r, result);
    if (!error && version > 1) error = take_identifier(&r, result);
    if (!error && r.element != r.size)
        return complain(why, -EBADMSG, r.element, "the packet goes on after its last element");
    return error;
}
