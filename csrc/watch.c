/* Ending socket waits when a peer dies: one thread sleeps on the life words of all watched peers and shuts the socket
 * down whose peer is gone. The kernel closes a dead process's own sockets only after it has freed its memory, which takes
 * about 80 ms per resident GB; a life word is marked before that. */
#define _GNU_SOURCE
#include <stdint.h>

#include "api.h"
#include "futex.h"
#include "life.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum { WATCHES = 127 }; /* futex_waitv takes 128 words: these and the doorbell */

static struct {
    pthread_mutex_t lock;
    _Atomic uint32_t doorbell; /* moved by every change of the table */
    int running, generation;
    struct {
        _Atomic uint32_t *word;
        int socket; /* our duplicate, so that the number cannot be reused under us */
        int told;   /* the peer is dead and the socket is shut down */
    } table[WATCHES];
} watch = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void forget(void) {
    pthread_mutex_init(&watch.lock, NULL);
    watch.running = 0;
    watch.generation++;
    for (int i = 0; i < WATCHES; i++) {
        if (watch.table[i].word) close(watch.table[i].socket);
        watch.table[i].word = NULL;
    }
}

/* The kernel wakes one sleeper of a dead process's word; that one wakes the others. */
static void tell(int i) {
    watch.table[i].told = 1;
    shutdown(watch.table[i].socket, SHUT_RDWR);
    futex_wake(watch.table[i].word, INT_MAX, FUTEX_BITSET_MATCH_ANY);
}

/* Shuts down the sockets of the dead; returns how many words are worth sleeping on. */
static unsigned collect(futex_entry *entries) {
    pthread_mutex_lock(&watch.lock);
    unsigned n = 0;
    entries[n++] = futex_on(&watch.doorbell, atomic_load(&watch.doorbell));
    for (int i = 0; i < WATCHES; i++) {
        if (!watch.table[i].word || watch.table[i].told) continue;
        uint32_t life = atomic_load(watch.table[i].word); /* pairs: DEAD */
        if (life_is_dead(life)) tell(i);
        else entries[n++] = futex_on(watch.table[i].word, life);
    }
    pthread_mutex_unlock(&watch.lock);
    return n;
}

static void *thread_main(void *unused) {
    (void)unused;
    prctl(PR_SET_NAME, "fmq-watch");
    futex_entry entries[WATCHES + 1];
    for (;;) {
        unsigned n = collect(entries);
        futex_wait_all(entries, n, FMQ_FOREVER);
    }
    return NULL;
}

static int start(void) {
    static int registered;
    if (watch.running) return 0;
    if (futex_wait_all(NULL, 0, FMQ_FOREVER) == -ENOSYS) return -ENOSYS; /* no words: else refused for that */
    if (!registered) registered = !pthread_atfork(NULL, NULL, forget);
    sigset_t all, old;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int r = pthread_create(&thread, NULL, thread_main, NULL);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (r) return -r;
    pthread_detach(thread);
    watch.running = 1;
    return 0;
}

static void ring_doorbell(void) {
    atomic_fetch_add(&watch.doorbell, 1);
    futex_wake(&watch.doorbell, INT_MAX, FUTEX_BITSET_MATCH_ANY);
}

int fmq_watch(void *word, int socket) {
    pthread_mutex_lock(&watch.lock);
    int i = start();
    if (!i) {
        while (i < WATCHES && watch.table[i].word) i++;
        int copy = i < WATCHES ? fcntl(socket, F_DUPFD_CLOEXEC, 0) : -1;
        if (copy < 0) {
            i = i < WATCHES ? -errno : -ENOSPC;
        } else {
            watch.table[i].socket = copy;
            watch.table[i].word = word;
            watch.table[i].told = 0;
            ring_doorbell();
            i |= watch.generation << 16;
        }
    }
    pthread_mutex_unlock(&watch.lock);
    return i;
}

void fmq_unwatch(int token) {
    pthread_mutex_lock(&watch.lock);
    int i = token & 0xffff;
    if (token >= 0 && token >> 16 == watch.generation && i < WATCHES && watch.table[i].word) {
        close(watch.table[i].socket);
        watch.table[i].word = NULL;
        ring_doorbell();
    }
    pthread_mutex_unlock(&watch.lock);
}
