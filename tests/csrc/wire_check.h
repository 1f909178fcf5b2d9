/* Shared by wire_noise.c and fuzz_wire.c: what is claimed of any bytes that are decoded. They and the
 * room for what is in them are exactly as large as the decoder is told, so that AddressSanitizer sees
 * any access beyond them. What is accepted keeps within its own counts, and is encoded to the same
 * bytes again; all else is refused with a reason.
 */
#ifndef WIRE_CHECK_H
#define WIRE_CHECK_H

#include <stdint.h>

#include "burst/api.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ELEMENT = 24 };

static void fail(const char *why) {
    fprintf(stderr, "wire: %s\n", why);
    abort();
}

static void check_same(const void *packet, uint64_t bytes, int64_t encoded, const void *again) {
    if (encoded != (int64_t)bytes || memcmp(packet, again, bytes)) fail("accepted, but not canonical");
}

static void check_arguments(const burst_request_packet *q, const burst_argument *a, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        if (a[i].has_no_value ? a[i].pool || a[i].offset || a[i].length || a[i].rank
                              : a[i].pool < 0 || a[i].pool >= q->n_places)
            fail("an argument in no pool");
        for (uint32_t k = 0; k < a[i].rank; k++)
            if (a[i].dimensions[k] < 0 || a[i].dimensions[k] > UINT32_MAX) fail("a dimension");
    }
}

static int decode_request(const void *packet, uint64_t bytes, int version, void *again, burst_complaint *why) {
    burst_argument *room = malloc(bytes / ELEMENT * sizeof *room);
    burst_request_packet q;
    int r = burst_decode_request(packet, bytes, version, &q, room, why);
    if (!r) {
        check_arguments(&q, q.inputs, q.n_inputs);
        check_arguments(&q, q.outputs, q.n_outputs);
        for (uint32_t i = 0; i < q.n_places; i++)
            if (q.places[i].number < q.places[i].is_token) fail("a place");
        check_same(packet, bytes, burst_encode_request(&q, version, again, bytes, NULL), again);
    }
    free(room);
    return r;
}

static int decode_result(const void *packet, uint64_t bytes, int version, void *again, burst_complaint *why) {
    uint32_t n = 2 * (uint32_t)(bytes / ELEMENT), at = 0, *shapes = malloc(n * sizeof *shapes);
    burst_result_packet result;
    int r = burst_decode_result(packet, bytes, version, &result, shapes, why);
    for (uint32_t i = 0; !r && i < result.n_shapes; i++) {
        if (at + 2 > n || shapes[at] > 1 || shapes[at + 1] > n - at - 2) fail("shapes beyond their room");
        at += 2 + shapes[at + 1];
    }
    if (!r) check_same(packet, bytes, burst_encode_result(&result, shapes, version, again, bytes, NULL), again);
    free(shapes);
    return r;
}

/* True if it is accepted. */
static bool check_packet(bool is_request, int version, const void *from, uint64_t bytes) {
    unsigned char *packet = malloc(bytes), *again = malloc(bytes);
    burst_complaint why = {.text = ""};
    if (bytes) memcpy(packet, from, bytes);
    int r = (is_request ? decode_request : decode_result)(packet, bytes, version, again, &why);
    if (r && r != -EBADMSG) fail("an error that is not documented");
    if (r && (!*why.text || why.element > bytes / ELEMENT)) fail("no reason");
    free(packet), free(again);
    return !r;
}

#endif
