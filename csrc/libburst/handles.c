/* The table behind all handles. A handle is a slot's number and how often that slot was used, never
 * an address: so one that was closed, or that never was one, is told from all that live without a
 * look at memory that may be gone.
 */
#define _GNU_SOURCE
#include "libburst/handles.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

static_assert(sizeof(uintptr_t) == 8, "a handle is 64 bits");

/* state: 32 bits of use, 1 that says open, 31 of references. */
enum { SLOTS = 1 << 16 };
static const uint64_t OPEN = UINT64_C(1) << 31, REFERENCES = (UINT64_C(1) << 31) - 1;

static struct {
    pthread_mutex_t lock;
    _Atomic uint32_t generation;
    uint32_t next;
    bool is_registered;
    struct {
        _Atomic uint64_t state;
        object *_Atomic object;
    } slots[SLOTS];
} table = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* In the child of a fork: another thread may have held the lock, and does not exist here. */
static void forget(void) {
    pthread_mutex_init(&table.lock, NULL);
    atomic_fetch_add(&table.generation, 1);
}

uint32_t handle_generation(void) { return atomic_load(&table.generation); }

static uint32_t find_slot(void) {
    for (uint32_t n = 0; n < SLOTS; n++) {
        uint32_t slot = table.next++ % SLOTS;
        if (!atomic_load(&table.slots[slot].object)) return slot;
    }
    return SLOTS;
}

int handle_new(object *o, enum kind kind, void (*destroy)(object *), void *out) {
    pthread_mutex_lock(&table.lock);
    if (!table.is_registered) table.is_registered = !pthread_atfork(NULL, NULL, forget);
    uint32_t slot = find_slot();
    if (slot < SLOTS) {
        uint64_t use = (atomic_load(&table.slots[slot].state) >> 32) + 1;
        o->kind = kind, o->slot = slot, o->generation = atomic_load(&table.generation),
        o->destroy = destroy;
        atomic_store(&table.slots[slot].object, o);
        atomic_store(&table.slots[slot].state, use << 32 | OPEN | 1);
        uintptr_t handle = (uintptr_t)(use << 32 | (slot + 1u));
        memcpy(out, &handle, sizeof handle);
    }
    pthread_mutex_unlock(&table.lock);
    return slot < SLOTS
               ? 0
               : fail(-EMFILE, "this process has %d handles of this library; free some", SLOTS);
}

static const char *const names[] = {"",           "client", "builder", "compiled model",
                                    "controller", "pool",   "request", "queue",
                                    "end",        "stream"};

/* Takes a reference, and with `closes` the open bit. */
static object *take(const void *handle, bool closes, int *error) {
    uintptr_t value = (uintptr_t)handle;
    uint32_t slot = (uint32_t)value - 1, use = (uint32_t)(value >> 32);
    if (slot >= SLOTS || !use) return *error = -EINVAL, NULL;
    _Atomic uint64_t *state = &table.slots[slot].state;
    uint64_t seen = atomic_load(state);
    do {
        if (seen >> 32 < use) return *error = -EINVAL, NULL; /* it never was one */
        if (seen >> 32 != use || !(seen & OPEN)) return *error = -EBADF, NULL;
    } while (!atomic_compare_exchange_weak(state, &seen, (closes ? seen & ~OPEN : seen) + !closes));
    /* Closing takes over the reference of the handle itself. */
    return atomic_load(&table.slots[slot].object);
}

/* Of what was taken: is it of that kind, and of this process? */
static int judge(const object *o, enum kind kind) {
    if (o->kind != kind) return fail(-EINVAL, "a %s is no %s", names[o->kind], names[kind]);
    if (o->generation == atomic_load(&table.generation)) return 0;
    return fail(-ECANCELED, "this %s was made before a fork, and is the parent's; make another one",
                names[kind]);
}

static void say(int error, const void *handle, enum kind kind) {
    if (error == -EBADF) fail(error, "this %s was closed", names[kind]);
    else fail(error, "%p is no %s", handle, names[kind]);
}

void *handle_take(const void *handle, enum kind kind, int *error) {
    object *o = take(handle, false, error);
    if (!o) return say(*error, handle, kind), NULL;
    *error = judge(o, kind);
    if (*error) return object_put(o), NULL;
    return o;
}

/* In the child of a fork this only says so: the object is the parent's. */
int handle_close(void *handle, enum kind kind, void **out) {
    int error;
    object *o = handle_take(handle, kind, &error);
    if (!o) return error;
    object *closed = take(handle, true, &error);
    object_put(o);
    if (!closed) return say(error, handle, kind), error;
    *out = closed;
    return 0;
}

void *object_hold(void *held) {
    object *o = held;
    atomic_fetch_add(&table.slots[o->slot].state, 1);
    return o;
}

bool object_is_open(const void *held) {
    const object *o = held;
    return atomic_load(&table.slots[o->slot].state) & OPEN;
}

void object_put(void *held) {
    object *o = held;
    uint32_t slot = o->slot;
    if ((atomic_fetch_sub(&table.slots[slot].state, 1) & REFERENCES) != 1) return;
    o->destroy(o);
    atomic_store(&table.slots[slot].object, NULL);
}
