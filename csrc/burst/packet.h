/* What C knows of a packet (burst/wire.py has all of it): its elements, its size, and the elements
 * at its end that differ from one execution to the next. Used by caller.c and listener.c; not
 * exported. */
#ifndef BURST_PACKET_H
#define BURST_PACKET_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "fmq/ring.h"

enum { DATUM = 24 }; /* bytes of an element */
enum { REQUEST_SIZE_AT = 4, RESULT_SIZE_AT = 8, RESULT_STATUS_AT = 12 };
enum {
    PACKET_INFORMATION = 0,
    REQUEST_IDENTIFIER = 9,
    EXECUTION_TIMING = 3,
    RESULT_IDENTIFIER = 4
};
enum {
    GENERAL_FAILURE = 2,
    INVALID_ARGUMENT = 4,
    MISSED_DEADLINE_TRANSIENT = 5,
    MISSED_DEADLINE_PERSISTENT = 6,
    RESOURCE_EXHAUSTED_TRANSIENT = 7,
    LAST_STATUS = 8
};
#define NOT_MEASURED UINT64_MAX

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "packets are little-endian, and so are we");

static inline uint32_t load_u32(const unsigned char *at) {
    uint32_t v;
    memcpy(&v, at, sizeof v);
    return v;
}
static inline uint64_t load_u64(const unsigned char *at) {
    uint64_t v;
    memcpy(&v, at, sizeof v);
    return v;
}
static inline void store_u64(unsigned char *at, uint64_t v) { memcpy(at, &v, sizeof v); }

/* An element of that kind whose payload begins at byte 8. */
static inline bool is_datum(const unsigned char *at, unsigned kind) { return load_u64(at) == kind; }

/* Copies the next packet out of the ring before it is checked; at least one element is there.
 * `size_at`: where its first element says how many there are; 0, or it says nothing: everything
 * that has arrived is one packet. Returns its bytes. */
int64_t packet_take(struct fmq_end *e, unsigned char *buffer, uint64_t buffer_bytes,
                    unsigned size_at);

/* 0, or -EAGAIN when there is no room now, -EMSGSIZE when there never will be. The end is
 * entered. */
int packet_put(struct fmq_end *e, const unsigned char *packet, uint64_t bytes);

#endif
