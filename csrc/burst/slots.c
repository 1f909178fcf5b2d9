/* Slots: the numbers by which requests name memory, on the client's side.
 *
 * A slot is never used again, so a late question about it can only miss. The table borrows each
 * descriptor and remembers which memory it was of: before it is sent, a duplicate is compared with
 * that. So memory that its owner has closed is not there any more, and nothing else is sent in its
 * place that got its number. Of files that are no memory it only remembers that: who serves them
 * may leave any question unanswered.
 */
#define _GNU_SOURCE
#include <stdint.h>

#include "burst/api.h"

#include "burst/failure.h"
#include "burst/slots.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FEW = 16 };

typedef struct {
    bool is_memory; /* only that has seals */
    dev_t device;
    ino_t file;
} identity;

typedef struct {
    int64_t slot;
    const void *owner;
    uint32_t uses; /* 0: it stands for nothing any more */
    uint32_t bytes;
    unsigned char *description;
    int fd;
    identity is_of;
} slot_entry;

struct burst_slots {
    _Atomic uint32_t references;
    pthread_mutex_t lock;
    slot_entry *entries; /* by slot, upwards */
    uint32_t count, room, dropped;
    int64_t next;
    uint64_t sent;
};

burst_slots *burst_slots_new(void) {
    burst_slots *s = calloc(1, sizeof *s);
    if (s) pthread_mutex_init(&s->lock, NULL), s->references = 1;
    return s;
}

burst_slots *slots_hold(burst_slots *s) {
    s->references++;
    return s;
}

void burst_slots_free(burst_slots *s) {
    if (!s || --s->references) return;
    for (uint32_t i = 0; i < s->count; i++) free(s->entries[i].description);
    pthread_mutex_destroy(&s->lock);
    free(s->entries);
    free(s);
}

void slots_forget_lock(burst_slots *s) { pthread_mutex_init(&s->lock, NULL); }

/* ---- under the lock -------------------------------------------------------------------------- */

static slot_entry *find_slot(burst_slots *s, int64_t slot) {
    uint32_t first = 0, end = s->count;
    while (first < end) {
        uint32_t middle = first + (end - first) / 2;
        if (s->entries[middle].slot < slot) first = middle + 1;
        else end = middle;
    }
    bool is_there = first < s->count && s->entries[first].slot == slot && s->entries[first].uses;
    return is_there ? &s->entries[first] : NULL;
}

static slot_entry *find_owner(burst_slots *s, const void *owner) {
    for (uint32_t i = 0; owner && i < s->count; i++)
        if (s->entries[i].owner == owner && s->entries[i].uses) return &s->entries[i];
    return NULL;
}

static void close_gaps(burst_slots *s) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < s->count; i++)
        if (s->entries[i].uses) s->entries[kept++] = s->entries[i];
    s->count = kept, s->dropped = 0;
}

static bool make_room(burst_slots *s) {
    if (s->count < s->room) return true;
    uint32_t room = 2 * s->room + FEW;
    slot_entry *entries = realloc(s->entries, room * sizeof *entries);
    if (!entries) return false;
    s->entries = entries, s->room = room;
    return true;
}

static identity identity_of(int fd) {
    struct stat found;
    if (fd < 0 || fcntl(fd, F_GET_SEALS) < 0 || fstat(fd, &found)) return (identity){0};
    return (identity){true, found.st_dev, found.st_ino};
}

static int64_t add(burst_slots *s, const void *owner, int fd, const void *description,
                   uint32_t bytes) {
    if (s->next > BURST_LAST_SLOT)
        return fail(-EOVERFLOW, "2**31 slots are used up; open another burst or connection");
    unsigned char *kept = malloc(bytes + 1);
    if (!kept || !make_room(s)) return free(kept), fail(-ENOMEM, "no memory for a slot");
    memcpy(kept, description, bytes);
    s->entries[s->count++] = (slot_entry){s->next, owner, 1, bytes, kept, fd, identity_of(fd)};
    return s->next++;
}

/* ---- any thread ------------------------------------------------------------------------------ */

int64_t burst_slots_use(burst_slots *s, const void *owner, int fd, const void *description,
                        uint32_t bytes) {
    pthread_mutex_lock(&s->lock);
    slot_entry *known = find_owner(s, owner);
    int64_t slot = known ? known->slot : add(s, owner, fd, description, bytes);
    if (known) known->uses++;
    pthread_mutex_unlock(&s->lock);
    return slot;
}

int burst_slots_drop(burst_slots *s, int64_t slot) {
    pthread_mutex_lock(&s->lock);
    slot_entry *found = find_slot(s, slot);
    bool is_last = found && !--found->uses;
    if (is_last) {
        free(found->description), found->description = NULL;
        if (++s->dropped > s->count / 2 + FEW) close_gaps(s);
    }
    pthread_mutex_unlock(&s->lock);
    return is_last;
}

uint64_t burst_slots_sent(burst_slots *s) {
    pthread_mutex_lock(&s->lock);
    uint64_t sent = s->sent;
    pthread_mutex_unlock(&s->lock);
    return sent;
}

/* -ENOENT: its owner has closed it; -EMFILE: this process can open no more. What was duplicated is
 * the answer's in any case. */
static int put_duplicate(const slot_entry *e, message *answer, bool *is_memory) {
    int fd = fcntl(e->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return errno == EBADF ? -ENOENT : -EMFILE;
    identity found = identity_of(fd);
    answer->fds[answer->n_fds++] = fd;
    *is_memory &= found.is_memory;
    return found.is_memory == e->is_of.is_memory && found.device == e->is_of.device &&
                   found.file == e->is_of.file
               ? 0
               : -ENOENT;
}

static int describe(burst_slots *s, const int64_t *numbers, uint32_t n, message *answer,
                    bool *is_memory) {
    for (uint32_t i = 0; i < n; i++) {
        const slot_entry *found = find_slot(s, numbers[i]);
        int r = found ? put_duplicate(found, answer, is_memory) : -ENOENT;
        if (r == -EMFILE) return fail(r, "the client can open no more descriptors");
        if (r) return fail(r, "slot %lld stands for no memory", (long long)numbers[i]);
        put_bytes(answer, found->description, found->bytes);
    }
    s->sent += n;
    return 0;
}

int slots_describe(burst_slots *s, const int64_t *numbers, uint32_t n, message *answer,
                   bool *is_memory) {
    *is_memory = true;
    put_array(answer, n);
    pthread_mutex_lock(&s->lock);
    int r = describe(s, numbers, n, answer, is_memory);
    pthread_mutex_unlock(&s->lock);
    return r;
}
