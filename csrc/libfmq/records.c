/* Messages of any length, in parts: as `fmq/records.py` does. csrc/fmq/record.c has the parts. */
#define _GNU_SOURCE
#include "libfmq/queues.h"

#include "libfmq/fmq.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { HEAD = 16, LEAST = 64 };

/* The end, for one thread; NULL and *error otherwise. */
static queue_role *take_for_records(fmq_queue_end *end, bool writes, int *error) {
    queue_role *e = handle_take(end, END, error);
    if (!e) return NULL;
    const fmq_shape *s = &e->memory->shape;
    *error = 0;
    if (writes != (e->byte == FMQ_WRITER))
        *error = fail(-EINVAL, "this is a %s's end", writes ? "reader" : "writer");
    else if (s->element_bytes != 1 || s->flavour == FMQ_UNSYNCHRONIZED || s->capacity < LEAST)
        *error =
            fail(-EINVAL,
                 "records need a queue of bytes, 64 at least, that is synchronized or broadcast");
    else if (atomic_exchange(&e->record.busy, 1))
        *error = fail(-EBUSY, "another thread is inside a call on this end");
    return *error ? object_put(e), NULL : e;
}

static int64_t end_record(queue_role *e, int64_t result) {
    atomic_store(&e->record.busy, 0);
    return end_with(e, result);
}

int fmq_queue_send(fmq_queue_end *end, const void *bytes, uint64_t n, uint64_t deadline) {
    int r;
    if (!bytes && n)
        return fail(-EINVAL, "bytes=NULL, n=%llu: give the record", (unsigned long long)n);
    queue_role *e = take_for_records(end, true, &r);
    if (!e) return r;
    uint64_t capacity = e->memory->shape.capacity, most = n <= capacity / 2 - HEAD ? n
                                                          : capacity / 4 > HEAD
                                                              ? capacity / 4 - HEAD
                                                              : 1;
    uint64_t at = 0;
    do {
        uint64_t part = n - at < most ? n - at : most;
        uint32_t flags = (at ? 0 : FMQ_FIRST) | (at + part == n ? FMQ_LAST : 0);
        do r = fmq_part_write(e->end, (const char *)bytes + at, part, n, flags, e->spin, deadline);
        while (r == -EINTR);
        at += part;
    } while (!r && at < n);
    return (int)end_record(e, r);
}

/* A part that is reserved: its bytes come to the record's. 0: more are to come; 1: the record is
 * over. */
static int join_part(queue_role *e, const fmq_part *part, void *bytes, uint64_t room) {
    uint64_t n = part->first + part->second;
    if (part->flags & FMQ_FIRST) {
        e->record.bytes = NULL;
        if (part->total > room) return -EMSGSIZE;
        e->record.bytes = bytes, e->record.room = room, e->record.total = part->total,
        e->record.got = 0;
    }
    /* Of a record that began before this reader came, or that was refused. */
    if (!e->record.bytes) return 0;
    if (part->total != e->record.total || n > e->record.total - e->record.got) return -EPROTO;
    char *to = e->record.bytes + e->record.got;
    if (part->first) memcpy(to, part->one, part->first);
    if (part->second) memcpy(to + part->first, part->two, part->second);
    e->record.got += n;
    if (!(part->flags & FMQ_LAST)) return 0;
    return e->record.got == e->record.total ? 1 : -EPROTO;
}

static int64_t receive(queue_role *e, void *bytes, uint64_t room, uint64_t deadline) {
    fmq_part part;
    int r, said;
    do {
        do r = fmq_part_peek(e->end, &part, e->spin, deadline);
        while (r == -EINTR);
        if (r == -EAGAIN || r == -ETIMEDOUT || r == -EBUSY) return r; /* what has come stays */
        if (r == -EBADMSG) r = -EPROTO;
        if (r) return e->record.bytes = NULL, r;
        said = join_part(e, &part, bytes, room);
        /* An error: evicted, so what was read may have been overwritten. */
        r = fmq_commit(e->end, part.taken);
    } while (!r && !said);
    e->record.bytes = NULL;
    return r ? r : said < 0 ? said : (int64_t)e->record.total;
}

int64_t fmq_queue_receive(fmq_queue_end *end, void *bytes, uint64_t room, uint64_t deadline) {
    int r;
    if (!bytes || room > INT64_MAX)
        return fail(-EINVAL, "bytes=%p, room=%llu: give a place for the record", bytes,
                    (unsigned long long)room);
    queue_role *e = take_for_records(end, false, &r);
    if (!e) return r;
    bool is_same = !e->record.bytes || (e->record.bytes == bytes && e->record.room == room);
    if (!is_same) {
        atomic_store(&e->record.busy, 0), object_put(e);
        return fail(-EINVAL, "bytes, room: a record has begun to come; give what the call before "
                             "this one was given");
    }
    int64_t got = receive(e, bytes, room, deadline);
    if (got != -EMSGSIZE) return end_record(e, got);
    atomic_store(&e->record.busy, 0), object_put(e);
    return fail(-EMSGSIZE, "room=%llu: the record was longer, and was skipped",
                (unsigned long long)room);
}
