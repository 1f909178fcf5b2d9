/* The bridge: threads that sleep on the words of many queues and peers, and signal a descriptor
 * when one changes. They write to an eventfd when a transfer on a queue would not wait: that is how
 * select and asyncio wait for a queue. They shut a socket down when a peer dies: the kernel closes
 * a dead process's own sockets only after it has freed its memory, which takes about 80 ms per
 * resident GB; it marks a life word before that. And they have a thread look that sleeps on its
 * wait word alone, when the life of its peer changes.
 *
 * A bell rings once. It then hangs on in silence until it is armed again, which so wakes no thread,
 * and is taken down by the next reason to ring if it was not. The bridge costs nothing before the
 * first bell.
 */
#define _GNU_SOURCE
#include <stdint.h>

#include "fmq/api.h"
#include "fmq/futex.h"
#include "fmq/life.h"
#include "fmq/link.h"
#include "fmq/readers.h"
#include "fmq/sleep.h"
#include "fmq/thread.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

/* A wait word and a life word each, the doorbell, the process's endings: one futex_waitv, one
 * thread. */
enum { BELLS = 63, GROUPS = 64 };
/* ns: without futex_waitv everything is looked at this often. */
static const uint64_t OLD_KERNEL_SLICE = 5000000;
/* ns: and a broadcast writer's readers, whose lives are too many to sleep on. */
static const uint64_t READERS_SLICE = 50000000;

typedef struct {
    _Atomic uint32_t *life; /* NULL: a free bell */
    _Atomic uint32_t *wait; /* of a queue's end; NULL: life alone */
    const fmq_end *end;     /* NULL: life alone */
    fmq_end *readers_of;    /* the same, of a broadcast writer; else NULL */
    fmq_end *tells;         /* whose threads look when it rings; there is no descriptor then */
    _Atomic uint64_t *counter;
    uint64_t target; /* what the counter has to reach */
    bool shared;     /* see SLEEP_SHARED_SLICE */
    /* And was not armed since: `target` is the transfer after those that it rang for. */
    bool is_rung;
    int fd;
    bool is_socket;
    uint32_t uses; /* how often this bell was given out: part of its token */
} bell;

typedef struct {
    _Atomic uint32_t doorbell; /* moved by every change of the table */
    _Atomic uint32_t heard;    /* what the doorbell was when the thread last read the table */
    bool running;
    bell bells[BELLS];
} group;

static struct {
    pthread_mutex_t lock;
    group groups[GROUPS];
} bridge = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* In the child of a fork: the threads are gone. The sockets are our duplicates; an eventfd is its
 * owner's to close. */
static void forget(void) {
    pthread_mutex_init(&bridge.lock, NULL);
    for (int g = 0; g < GROUPS; g++) {
        bridge.groups[g].running = false;
        for (int i = 0; i < BELLS; i++) {
            bell *b = &bridge.groups[g].bells[i];
            if (b->life && b->is_socket) close(b->fd);
            b->life = NULL;
            b->uses++;
        }
    }
}

/* ---- ringing --------------------------------------------------------------------------------- */

static void ring(bell *b, bool is_death) {
    uint64_t one = 1;
    if (b->tells) sleep_look_again(b->tells);
    else if (b->is_socket) shutdown(b->fd, SHUT_RDWR), close(b->fd);
    else if (write(b->fd, &one, sizeof one) < 0) {} /* it rings already */
    /* The kernel wakes one sleeper of a dead process's word; that one wakes the others. */
    if (is_death) futex_wake(b->life, INT_MAX, FUTEX_BITSET_MATCH_ANY);
    b->life = NULL;
}

/* Whether there is reason to ring. `ended` was read before, and `life` after that. */
static bool is_over(const bell *b, uint32_t life, uint32_t ended) {
    if (life_is_dead(life)) return true;
    if (!b->wait) return b->tells && life == LIFE_RELEASED;
    if (end_is_lost(b->end, life, ended)) return true;
    if (b->readers_of) return readers_have_room(b->readers_of, b->target);
    /* pairs: SLEEP */
    return life == LIFE_RELEASED || (int64_t)(atomic_load(b->counter) - b->target) >= 0;
}

/* Rings for a transfer, and hangs on: true. Not for an end, which is told by taking the bell down,
 * nor twice. */
static bool ring_on(bell *b, uint32_t life, uint32_t ended) {
    if (!b->wait || b->readers_of || b->is_rung || life == LIFE_RELEASED) return false;
    if (life_is_dead(life) || end_is_lost(b->end, life, ended)) return false;
    b->is_rung = true;
    b->target = atomic_load(b->counter) + 1;
    uint64_t one = 1;
    if (write(b->fd, &one, sizeof one) < 0) {} /* it rings already */
    return true;
}

/* Announces the sleep and then looks, as an end does for itself. Returns how many entries to sleep
 * on; 0: it is taken down. */
static unsigned announce(bell *b, futex_entry *entries) {
    uint32_t ended, life, announced;
    do {
        /* pairs: DEAD */
        ended = b->wait ? atomic_load(&b->end->signals.ended) : 0, life = atomic_load(b->life);
        if (b->readers_of) sleep_ask(b->readers_of, 0);
        announced = b->wait ? sleep_announce(b->wait) : 0;
        if (!is_over(b, life, ended)) break;
        if (!ring_on(b, life, ended)) return ring(b, life_is_dead(life)), 0;
    } while (true);
    unsigned n = 0;
    entries[n++] = futex_on(b->life, life);
    if (b->wait) entries[n++] = futex_on(b->wait, announced);
    return n;
}

/* ---- the thread ------------------------------------------------------------------------------ */

static void sooner(uint64_t *until, uint64_t ns) {
    uint64_t then = futex_now() + ns;
    if (then < *until) *until = then;
}

static unsigned look_at_all(group *g, futex_entry *entries, uint64_t *until) {
    pthread_mutex_lock(&bridge.lock);
    *until = FMQ_FOREVER;
    unsigned n = 0;
    uint32_t rung = atomic_load(&g->doorbell);
    entries[n++] = futex_on(&g->doorbell, rung);
    fmq_process *process = fmq_this_process();
    entries[n++] = futex_on_private(&process->endings, atomic_load(&process->endings));
    for (int i = 0; i < BELLS; i++) {
        if (!g->bells[i].life) continue;
        if (g->bells[i].readers_of) sooner(until, READERS_SLICE);
        else if (g->bells[i].shared) sooner(until, SLEEP_SHARED_SLICE);
        n += announce(&g->bells[i], entries + n);
    }
    pthread_mutex_unlock(&bridge.lock);
    /* pairs: HEARD */
    if (atomic_exchange(&g->heard, rung) != rung)
        futex_wake(&g->heard, INT_MAX, FUTEX_BITSET_MATCH_ANY);
    return n;
}

static void *thread_main(void *argument) {
    group *g = argument;
    futex_entry entries[FUTEX_MOST];
    for (;;) {
        uint64_t until;
        unsigned n = look_at_all(g, entries, &until);
        int r = futex_wait_all(entries, n, until);
        if (r == -ENOSYS || r == -EPERM)
            futex_wait(&g->doorbell, (uint32_t)entries[0].expected, FUTEX_BITSET_MATCH_ANY,
                       n > 2 ? futex_now() + OLD_KERNEL_SLICE : FMQ_FOREVER);
    }
    return NULL;
}

/* ---- bells ----------------------------------------------------------------------------------- */

static void ring_doorbell(group *g) {
    atomic_fetch_add(&g->doorbell, 1);
    futex_wake(&g->doorbell, INT_MAX, FUTEX_BITSET_MATCH_ANY);
}

/* A free bell, in a group whose thread runs; NULL and *error otherwise. */
static bell *find_free(group **found, int *error) {
    static bool registered;
    if (!registered) registered = !pthread_atfork(NULL, NULL, forget);
    for (int k = 0; k < GROUPS; k++) {
        group *g = *found = &bridge.groups[k];
        int i = 0;
        while (i < BELLS && g->bells[i].life) i++;
        if (i == BELLS) continue;
        if (!g->running && (*error = thread_start(thread_main, g, "fmq-bridge"))) return NULL;
        g->running = true;
        return &g->bells[i];
    }
    *error = -ENOSPC;
    return NULL;
}

/* The bell of a token, if it still hangs. */
static bell *find(int64_t token, group **g) {
    uint64_t k = token >> 8 & 0xff, i = token & 0xff;
    if (token < 0 || k >= GROUPS || i >= BELLS) return NULL;
    *g = &bridge.groups[k];
    bell *b = &(*g)->bells[i];
    return b->life && b->uses == (uint32_t)(token >> 16) ? b : NULL;
}

/* Returns a token: the bell's use, its group and its place. `again`: the token of a bell that this
 * one replaces, or -1. */
static int64_t hang(bell as_described, int64_t again) {
    group *g;
    int error = 0;
    pthread_mutex_lock(&bridge.lock);
    bell *b = find(again, &g);
    if (!b) b = find_free(&g, &error);
    int64_t token = error;
    if (b) {
        /* By the bell that this one replaces; under the lock, so that no late ring is taken for a
         * new one. */
        uint64_t rung;
        /* It was not. */
        if (!as_described.is_socket && read(as_described.fd, &rung, sizeof rung) < 0) {}
        as_described.uses = b->uses + 1;
        *b = as_described;
        token = (int64_t)b->uses << 16 | (g - bridge.groups) << 8 | (b - g->bells);
        ring_doorbell(g);
    }
    pthread_mutex_unlock(&bridge.lock);
    return token;
}

/* Arms a bell that still hangs on the same end, without waking the thread: that sleeps on the end's
 * words, whatever the target, and every move of them wakes it. False: it does not hang. */
static bool arm_again(const bell *as_described, int64_t token) {
    group *g;
    pthread_mutex_lock(&bridge.lock);
    bell *b = find(token, &g);
    bool is_same =
        b && b->wait && !b->readers_of && b->end == as_described->end && b->fd == as_described->fd;
    if (is_same) {
        uint64_t rung;
        /* Another reader of the eventfd has emptied it. */
        if (b->is_rung && read(b->fd, &rung, sizeof rung) < 0) {}
        b->is_rung = false, b->target = as_described->target;
        uint32_t ended = atomic_load(&b->end->signals.ended),
                 life = atomic_load(b->life); /* pairs: DEAD */
        if (is_over(b, life, ended) && !ring_on(b, life, ended)) ring(b, life_is_dead(life));
    }
    pthread_mutex_unlock(&bridge.lock);
    return is_same;
}

int64_t fmq_watch(void *word, int socket) {
    /* Ours, so that the number cannot be reused under us. */
    int copy = fcntl(socket, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) return -errno;
    int64_t token = hang((bell){.life = word, .fd = copy, .is_socket = true}, -1);
    if (token < 0) close(copy);
    return token;
}

int64_t bridge_tell(fmq_end *e) {
    return hang((bell){.life = e->shared.their_life, .tells = e, .fd = -1}, -1);
}

int64_t fmq_bridge(fmq_end *e, uint64_t n, int eventfd, int64_t again) {
    if (!e->shared.my_wait) return -EROFS;
    if (n > e->ring.capacity) return -EMSGSIZE;
    int64_t token = end_enter_unreserved(e);
    if (token) return token;
    bell b = {.life = e->shared.their_life,
              .wait = e->shared.my_wait,
              .end = e,
              .counter = &e->shared.theirs->counter,
              .fd = eventfd};
    b.target = e->cursor.position + n - (e->writer ? e->ring.capacity : 0);
    if (e->writer && e->overwrites) b.target = atomic_load(b.counter); /* there is always room */
    b.shared = end_is_one_of_many(e);
    if (e->readers.records) b.readers_of = e, e->sleep.is_bridged = true;
    uint32_t ended = atomic_load(&e->signals.ended);
    if (arm_again(&b, again)) {
        token = again;
    } else if (is_over(&b, atomic_load(b.life), ended)) {
        fmq_unhang(again);
        ring(&b, false);
        token = -EALREADY;
    } else {
        token = hang(b, again);
    }
    end_leave(e);
    return token;
}

void fmq_unhang(int64_t token) {
    group *g;
    pthread_mutex_lock(&bridge.lock);
    bell *b = find(token, &g);
    _Atomic uint32_t *life = b ? b->life : NULL;
    if (b) {
        if (b->is_socket) close(b->fd);
        b->life = NULL;
        ring_doorbell(g);
    }
    uint32_t rung = b ? atomic_load(&g->doorbell) : 0;
    pthread_mutex_unlock(&bridge.lock);
    /* From our return on the thread does not sleep on this bell's words, where it would take wakes
     * that are for others. */
    /* pairs: HEARD */
    for (uint32_t heard; b && (int32_t)((heard = atomic_load(&g->heard)) - rung) < 0;)
        futex_wait(&g->heard, heard, FUTEX_BITSET_MATCH_ANY, FMQ_FOREVER);
    /* The kernel's one wake may have come to the thread just before, which does not look at this
     * life any more. */
    /* pairs: DEAD */
    if (b && life_is_dead(atomic_load(life))) futex_wake(life, INT_MAX, FUTEX_BITSET_MATCH_ANY);
}
