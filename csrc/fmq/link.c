/* The second way to learn of a peer's death, for when the first is broken.
 *
 * The kernel marks a dead process's life words before it frees the process's memory, unless its
 * walk meets a word that it cannot touch, whatever the reason. But it also closes all of the
 * process's descriptors, about 80 ms later per resident GB. The life thread sleeps until that
 * happens to one of two kinds:
 *
 * - a socket whose other end only the peer has. It hangs up.
 * - the file on which the peer holds the lock of its role in a queue (fmq/role.py). Its being
 *   closed is an inotify event of the queue's memory. Other files of the same memory are closed,
 *   too, so the thread asks who has the lock; and the kernel sends the event some instructions
 *   before it drops the lock, so the thread asks several times, and once more before a second is
 *   over.
 *
 * While nothing is closed the thread does not wake. Both descriptors, of epoll and of inotify, are
 * made with the first link.
 */
#define _GNU_SOURCE
#include "fmq/link.h"

#include <stdint.h>

#include "fmq/api.h"
#include "fmq/futex.h"
#include "fmq/memory.h"
#include "fmq/ring.h"
#include "fmq/readers.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <unistd.h>

enum { INOTIFY = 0, EVENTS = 16 };
enum { YIELDS = 10 };                    /* of one look: shorter than a sleep */
static const uint64_t PAUSE = 900000000; /* ns until the second look */

typedef struct link {
    struct link *next;
    int64_t token;
    fmq_end *end;
    int socket;   /* a duplicate, so that the number cannot be reused under us; or -1: */
    int file, wd; /* the caller's, open as long as the link; its watch */
    int64_t byte;
    int64_t bell; /* that tells the end of the peer's life; negative: none */
    bool closed;  /* a file of the memory was */
    uint64_t due; /* when to look once more */
} link_entry;

static struct {
    pthread_mutex_t lock;
    link_entry *first;
    int64_t last_token;
    int poll, inotify;        /* or -1 */
    _Atomic uint32_t is_made; /* the first of the two: the thread waits for it */
} links = {.lock = PTHREAD_MUTEX_INITIALIZER, .poll = -1, .inotify = -1};

/* ---- locks ----------------------------------------------------------------------------------- */

int fmq_lock(int file, uint64_t byte) {
    struct flock one = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};
    if (!fcntl(file, F_OFD_SETLK, &one)) return 0;
    return errno == EACCES ? -EAGAIN : -errno;
}

void fmq_unlock(int file, uint64_t byte) {
    struct flock one = {
        .l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};
    fcntl(file, F_OFD_SETLK, &one);
}

/* F_GETLK and not F_OFD_GETLK: to the latter, locks of this very file do not count, and both roles
 * may be this process's. */
static bool is_locked(const link_entry *l, unsigned seat) {
    struct flock asked = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)l->byte + seat, .l_len = 1};
    return fcntl(l->file, F_GETLK, &asked) || asked.l_type != F_UNLCK;
}

/* A word that says "alive" while no process has the lock is of a dead process. A release changes
 * the word before it drops the lock; a successor takes the lock before it changes the word, so it
 * would be seen at the second question. */
static bool is_dead_unmarked(const link_entry *l, unsigned seat, _Atomic uint32_t *word,
                             uint32_t life) {
    if (life == LIFE_NOBODY || life == LIFE_RELEASED || life_is_dead(life) || is_locked(l, seat))
        return false;
    return !is_locked(l, seat) && atomic_load(word) == life;
}

static void look_once(link_entry *l) {
    for (unsigned k = 0; l->end->readers.records && k < FMQ_SEATS; k++) {
        _Atomic uint32_t *word = &l->end->readers.seats[k].life;
        uint32_t life = atomic_load(word);
        if (is_dead_unmarked(l, k, word, life)) readers_lose(l->end, k, life);
    }
    if (l->end->readers.records) return;
    if (is_dead_unmarked(l, 0, l->end->shared.their_life, atomic_load(l->end->shared.their_life)))
        fmq_lose(l->end);
}

static void look_at_lock(link_entry *l) {
    for (int i = 0; i < YIELDS && (l->end->readers.records || is_locked(l, 0)); i++) sched_yield();
    look_once(l);
}

/* Returns how many ms until the next look is due, or -1. */
static int look_at_locks(void) {
    uint64_t now = futex_now(), soonest = FMQ_FOREVER;
    for (link_entry *l = links.first; l; l = l->next) {
        if (l->closed || now >= l->due) {
            look_at_lock(l);
            l->due = l->closed ? now + PAUSE : FMQ_FOREVER;
            l->closed = false;
        }
        if (l->due < soonest) soonest = l->due;
    }
    return soonest == FMQ_FOREVER ? -1 : (int)((soonest - now) / 1000000) + 1;
}

static void read_inotify(void) {
    union {
        struct inotify_event event;
        char bytes[1024];
    } found;
    ssize_t n;
    while ((n = read(links.inotify, &found, sizeof found)) > 0) {
        for (ssize_t at = 0; at < n;) {
            struct inotify_event *event = (struct inotify_event *)(void *)(found.bytes + at);
            for (link_entry *l = links.first; l; l = l->next) /* < 0: events were dropped. */
                if (l->socket < 0 && (event->wd == l->wd || event->wd < 0)) l->closed = true;
            at += (ssize_t)(sizeof *event + event->len);
        }
    }
}

/* ---- the thread ------------------------------------------------------------------------------ */

static void hang_up(int64_t token) {
    link_entry *l = links.first;
    while (l && l->token != token) l = l->next;
    if (l) fmq_lose(l->end);
}

void link_serve(void) {
    struct epoll_event events[EVENTS];
    int wait = -1;
    while (!atomic_load(&links.is_made))
        futex_wait(&links.is_made, 0, FUTEX_BITSET_MATCH_ANY, FMQ_FOREVER);
    for (;;) {
        int n = epoll_wait(links.poll, events, EVENTS, wait);
        pthread_mutex_lock(&links.lock);
        for (int i = 0; i < n; i++) {
            if (events[i].data.u64 == INOTIFY) read_inotify();
            else hang_up((int64_t)events[i].data.u64);
        }
        wait = look_at_locks();
        pthread_mutex_unlock(&links.lock);
    }
}

void link_forget(void) {
    pthread_mutex_init(&links.lock, NULL);
    for (link_entry *l = links.first, *next; l; l = next) {
        next = l->next;
        if (l->socket >= 0) close(l->socket);
        free(l);
    }
    links.first = NULL;
    if (links.poll >= 0) close(links.poll);
    if (links.inotify >= 0) close(links.inotify);
    links.poll = links.inotify = -1;
    atomic_store(&links.is_made, 0);
}

/* ---- links ----------------------------------------------------------------------------------- */

static int add_to_poll(int fd, uint32_t events, int64_t token) {
    struct epoll_event event = {.events = events, .data.u64 = (uint64_t)token};
    return epoll_ctl(links.poll, EPOLL_CTL_ADD, fd, &event) ? -errno : 0;
}

static int make_poll(void) {
    if (links.poll >= 0) return 0;
    int fd = epoll_create1(EPOLL_CLOEXEC);
    if (fd < 0) return -errno;
    links.poll = fd;
    atomic_store(&links.is_made, 1);
    futex_wake(&links.is_made, 1, FUTEX_BITSET_MATCH_ANY);
    return 0;
}

static int make_inotify(void) {
    if (links.inotify >= 0) return 0;
    int fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (fd < 0) return -errno;
    int r = add_to_poll(fd, EPOLLIN, INOTIFY);
    if (r) return close(fd), r;
    links.inotify = fd;
    return 0;
}

static int watch_socket(link_entry *l, int socket) {
    l->socket = fcntl(socket, F_DUPFD_CLOEXEC, 0);
    if (l->socket < 0) return -errno;
    /* Also EPOLLHUP, EPOLLERR. */
    int r = add_to_poll(l->socket, EPOLLRDHUP | EPOLLONESHOT, l->token);
    if (r) close(l->socket);
    return r;
}

static int watch_file(link_entry *l) {
    char path[32];
    int r = make_inotify();
    if (r) return r;
    snprintf(path, sizeof path, "/proc/self/fd/%d", l->file);
    l->wd = inotify_add_watch(links.inotify, path, IN_CLOSE_WRITE);
    return l->wd < 0 ? -errno : 0;
}

static int64_t add(fmq_end *end, int socket, int file, int64_t byte, int64_t bell) {
    int r = life_start();
    if (r) return r;
    link_entry *l = calloc(1, sizeof *l);
    if (!l) return -ENOMEM;
    pthread_mutex_lock(&links.lock);
    *l = (link_entry){.next = links.first,
                      .token = ++links.last_token,
                      .end = end,
                      .socket = -1,
                      .file = file,
                      .wd = -1,
                      .byte = byte,
                      .bell = bell,
                      .due = FMQ_FOREVER};
    r = make_poll();
    if (!r) r = socket >= 0 ? watch_socket(l, socket) : watch_file(l);
    int64_t token = r ? r : l->token;
    if (!r) links.first = l;
    if (!r && socket < 0) look_once(l); /* before we watched */
    pthread_mutex_unlock(&links.lock);
    if (r) free(l);
    return token;
}

/* Only in memory that stays: a futex word that was cut off is one that no waker reaches. */
static int64_t hang_bell(fmq_end *end) {
    const struct end_shared *s = &end->shared;
    bool is_possible = s->my_wait && !end_has_many(end) && !memory_may_vanish(s->my_wait) &&
                       !memory_may_vanish(s->their_life);
    return is_possible ? bridge_tell(end) : -1;
}

int64_t fmq_link(fmq_end *end, int socket) {
    if (socket < 0) return -EBADF;
    int64_t bell = hang_bell(end), token = add(end, socket, -1, 0, bell);
    if (token < 0 && bell >= 0) fmq_unhang(bell);
    atomic_store(&end->signals.told, token >= 0 && bell >= 0);
    return token;
}

int64_t fmq_link_lock(fmq_end *end, int file, int64_t byte) {
    return file < 0 ? -EBADF : add(end, -1, file, byte, -1);
}

/* The last link of a memory ends its watch. */
static void unwatch(int wd) {
    for (link_entry *l = links.first; l; l = l->next)
        if (l->wd == wd) return;
    inotify_rm_watch(links.inotify, wd);
}

/* From our return on neither thread touches the end any more. */
void fmq_unlink(int64_t token) {
    pthread_mutex_lock(&links.lock);
    link_entry **at = &links.first;
    while (*at && (*at)->token != token) at = &(*at)->next;
    link_entry *l = *at;
    if (l) {
        *at = l->next;
        if (l->socket >= 0) {
            /* The caller's copy keeps it open. */
            epoll_ctl(links.poll, EPOLL_CTL_DEL, l->socket, NULL);
            close(l->socket);
        } else {
            unwatch(l->wd);
        }
    }
    pthread_mutex_unlock(&links.lock);
    if (l && l->bell >= 0) {
        atomic_store(&l->end->signals.told, 0);
        fmq_unhang(l->bell);
    }
    free(l);
}
