/* Records: messages of any length on a queue of bytes. A record is sent in parts; a part is a head
 * and its bytes, published at once.
 *
 * So a reader that joins, or takes a dead one's place, begins at a part's head, and goes on to the
 * first part of a record. All that the head says is the peer's word: it is checked here against the
 * queue, and by the caller against what it accepts.
 */
#define _GNU_SOURCE
#include <stdint.h>

#include "fmq/api.h"

#include "fmq/ring.h"
#include "fmq/sleep.h"

#include <errno.h>

typedef struct {
    uint32_t mark; /* RECORD + FMQ_FIRST + FMQ_LAST */
    uint32_t bytes;
    uint64_t total; /* of the record */
} part_head;

enum { RECORD = 0x52454300, HEAD = sizeof(part_head) };

/* A copy that begins `skip` bytes behind our position. */
static void copy_at(fmq_end *e, uint64_t skip, void *here, uint64_t n, bool in) {
    uint64_t slot = e->cursor.slot;
    e->cursor.slot = slot + skip < e->ring.capacity ? slot + skip : slot + skip - e->ring.capacity;
    if (in) ring_copy_in(e, here, n);
    else ring_copy_out(e, here, n);
    e->cursor.slot = slot;
}

int fmq_part_write(fmq_end *e, const void *bytes, uint64_t n, uint64_t total, uint32_t flags,
                   uint64_t spin_ns, uint64_t deadline) {
    if (!e->writer || e->ring.element_bytes != 1 || n > UINT32_MAX || n > total) return -EINVAL;
    part_head head = {RECORD | (flags & (FMQ_FIRST | FMQ_LAST)), (uint32_t)n, total};
    int r = end_enter_unreserved(e);
    if (r) return r;
    r = sleep_until(e, HEAD + n, spin_ns, deadline);
    if (!r) {
        ring_begin(e, HEAD + n);
        copy_at(e, 0, &head, HEAD, true);
        if (n) copy_at(e, HEAD, (void *)(uintptr_t)bytes, n, true);
        ring_publish(e, HEAD + n);
        sleep_wake_peer(e);
    }
    end_leave(e);
    return r;
}

static int check(const fmq_end *e, const part_head *head) {
    uint32_t flags = head->mark & 255;
    if ((head->mark & ~255u) != RECORD || flags > (FMQ_FIRST | FMQ_LAST)) return -EBADMSG;
    if (head->bytes > e->ring.capacity - HEAD || head->bytes > head->total) return -EBADMSG;
    return flags == (FMQ_FIRST | FMQ_LAST) && head->bytes != head->total ? -EBADMSG : 0;
}

int fmq_part_peek(fmq_end *e, fmq_part *part, uint64_t spin_ns, uint64_t deadline) {
    if (e->writer || e->ring.element_bytes != 1 || e->ring.capacity <= HEAD) return -EINVAL;
    part_head head;
    int r = end_enter_unreserved(e);
    if (r) return r;
    if (!(r = sleep_until(e, HEAD, spin_ns, deadline))) {
        copy_at(e, 0, &head, HEAD, false);
        r = check(e, &head);
    }
    /* Is there, if the writer is honest. */
    if (!r) r = sleep_until(e, HEAD + (uint64_t)head.bytes, spin_ns, deadline);
    if (!r) {
        uint64_t at = e->cursor.slot + HEAD < e->ring.capacity
                          ? e->cursor.slot + HEAD
                          : e->cursor.slot + HEAD - e->ring.capacity,
                 straight = e->ring.capacity - at;
        uint64_t first = head.bytes < straight ? head.bytes : straight;
        *part = (fmq_part){e->ring.base + at, e->ring.base,      first,          head.bytes - first,
                           head.total,        head.bytes + HEAD, head.mark & 255};
        e->cursor.reserved = part->taken;
    }
    end_leave(e);
    return r;
}
