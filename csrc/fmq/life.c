/* Telling others that this process died, within microseconds and whatever its size.
 *
 * The kernel walks a dying thread's robust list before it frees the process's memory, marks each
 * listed word that holds the thread's id with FUTEX_OWNER_DIED, and wakes one waiter on it. glibc's
 * robust mutexes use that list for threads; we want processes, so one thread that does nothing else
 * owns all words of the process.
 *
 * The list must be in memory that no peer can write, the words in memory that peers can see. The
 * kernel finds a word at its node + one constant. So two arenas of equal shape: slot i of `words`
 * maps the peer-visible page, slot i of `nodes` is private; node and word have the same offset in
 * their pages, and the constant is words - nodes.
 *
 * The kernel's walk ends at the first word that it cannot touch, because a peer has truncated its
 * page, say. So the list is in order: words on pages that this process made and sealed come first,
 * and no peer can keep them from being marked. Words in sealed memory of queues follow, and last
 * those in memory that can be truncated. link.c is the second way.
 */
#define _GNU_SOURCE
#include "fmq/life.h"

#include <stdint.h>

#include "fmq/api.h"
#include "fmq/futex.h"
#include "fmq/link.h"
#include "fmq/memory.h"
#include "fmq/ring.h"
#include "fmq/thread.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SLOTS = 2048 }; /* the kernel's ROBUST_LIST_LIMIT */
/* Who can take a word's page away: no process; none, but it can make a hole; a peer. */
enum { OWN, SEALED, UNSEALED };

typedef struct node {
    struct node *_Atomic next;
} node;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t started;
    struct { /* struct robust_list_head */
        node list;
        long futex_offset;
        node *pending;
    } head;
    char *words, *nodes;
    size_t page;
    uint32_t tid;
    node *used[SLOTS];
    bool leftover[SLOTS]; /* a free slot whose page could not be taken away, for want of mappings */
    int leftovers;
    unsigned char ranks[SLOTS];
} life = {.lock = PTHREAD_MUTEX_INITIALIZER, .started = PTHREAD_COND_INITIALIZER};

static fmq_process process = {.version = FMQ_PROCESS_VERSION,
                              .end_bytes = sizeof(struct fmq_end),
                              .processors.look = processors_look};

static void *thread_main(void *unused) {
    (void)unused;
    syscall(SYS_set_robust_list, &life.head, sizeof life.head);
    pthread_mutex_lock(&life.lock);
    life.tid = (uint32_t)syscall(SYS_gettid);
    pthread_cond_broadcast(&life.started);
    pthread_mutex_unlock(&life.lock);
    link_serve();
    return NULL;
}

/* In the child of a fork: the thread is gone and the arenas were not inherited (MADV_DONTFORK). */
static void forget(void) {
    pthread_mutex_init(&life.lock, NULL);
    pthread_cond_init(&life.started, NULL);
    life.words = life.nodes = NULL;
    life.tid = 0;
    process.generation++;
    processors_forget(&process.processors);
    link_forget();
    for (int i = 0; i < SLOTS; i++) life.used[i] = NULL, life.leftover[i] = false;
    life.leftovers = 0;
}

fmq_process *fmq_this_process(void) { return &process; }

static char *reserve_arena(void) {
    char *p = mmap(NULL, SLOTS * life.page, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return NULL;
    madvise(p, SLOTS * life.page, MADV_DONTFORK);
    fmq_remember(p, SLOTS * life.page, life.page); /* pages of peers' queues are mapped in here */
    return p;
}

static int start(void) {
    static bool registered;
    if (life.tid) return 0;
    if (!registered) registered = !pthread_atfork(NULL, NULL, forget);
    life.page = (size_t)sysconf(_SC_PAGESIZE);
    if (!life.words && !(life.words = reserve_arena())) return -ENOMEM;
    if (!life.nodes && !(life.nodes = reserve_arena())) return -ENOMEM;
    life.head.list.next = &life.head.list;
    life.head.futex_offset = life.words - life.nodes;
    life.head.pending = NULL;
    int r = thread_start(thread_main, NULL, "fmq-life");
    while (!r && !life.tid) pthread_cond_wait(&life.started, &life.lock);
    return r;
}

int life_start(void) {
    pthread_mutex_lock(&life.lock);
    int r = start();
    pthread_mutex_unlock(&life.lock);
    return r;
}

static _Atomic uint32_t *word_of(node *n) {
    return (_Atomic uint32_t *)((char *)n + life.head.futex_offset);
}

static void unmap_slot(int slot) {
    void *page = life.words + (size_t)slot * life.page;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    bool failed = mmap(page, life.page, PROT_NONE, flags, -1, 0) == MAP_FAILED;
    if (!failed) madvise(page, life.page, MADV_DONTFORK);
    life.leftovers += failed - life.leftover[slot];
    life.leftover[slot] = failed;
}

/* Tries again, when slots are taken and given back. */
static void unmap_leftovers(void) {
    for (int slot = 0; life.leftovers && slot < SLOTS; slot++)
        if (life.leftover[slot]) unmap_slot(slot);
}

static int map_slot(int fd, uint64_t offset) {
    unmap_leftovers();
    int slot = 0;
    while (slot < SLOTS && life.used[slot]) slot++;
    if (slot == SLOTS) return -ENOSPC;
    uint64_t inside = offset % life.page;
    void *at = life.words + (size_t)slot * life.page;
    void *p = mmap(at, life.page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
                   (off_t)(offset - inside));
    if (p == MAP_FAILED) return -errno;
    madvise(p, life.page, MADV_DONTFORK);
    life.leftovers -= life.leftover[slot];
    life.leftover[slot] = false;
    life.used[slot] = (node *)(life.nodes + (size_t)slot * life.page + inside);
    return slot;
}

static unsigned char rank_of(int fd, int own) {
    if (own) return OWN;
    int seals = fcntl(fd, F_GET_SEALS);
    return seals >= 0 && (seals & F_SEAL_SHRINK) ? SEALED : UNSEALED;
}

/* What the kernel comes to just before a word of that rank. */
static node *last_before(unsigned char rank) {
    node *before = &life.head.list, *n;
    while ((n = atomic_load(&before->next)) != &life.head.list) {
        if (life.ranks[((char *)n - life.nodes) / (ptrdiff_t)life.page] >= rank) break;
        before = n;
    }
    return before;
}

int fmq_life_hold(int fd, uint64_t offset, int own) {
    if (offset % 8) return -EINVAL;
    pthread_mutex_lock(&life.lock);
    int slot = start();
    if (!slot) slot = map_slot(fd, offset);
    if (slot >= 0) {
        life.ranks[slot] = rank_of(fd, own);
        node *n = life.used[slot], *before = last_before(life.ranks[slot]);
        /* Each step leaves a list that the kernel can walk: we may be killed between any two.
         * Linked before the word is ours, so that there is no moment in which the word is ours and
         * unlisted. */
        atomic_store(&n->next, atomic_load(&before->next));
        atomic_store(&before->next, n);
        atomic_store(word_of(n), life.tid | FUTEX_WAITERS);
        /* Threads that sleep on a predecessor's life look again: the kernel woke only one of
         * them. */
        futex_wake(word_of(n), INT_MAX, FUTEX_BITSET_MATCH_ANY);
        slot |= process.generation << 16; /* a child's inherited slots are not its own */
    }
    pthread_mutex_unlock(&life.lock);
    return slot;
}

static void mark_dead(_Atomic uint32_t *word) {
    atomic_store(word, FUTEX_OWNER_DIED);
    futex_wake(word, INT_MAX, FUTEX_BITSET_MATCH_ANY);
}

static void let_go(int token, void (*change)(_Atomic uint32_t *)) {
    pthread_mutex_lock(&life.lock);
    int slot = token & 0xffff;
    node *n = token >> 16 == process.generation && slot < SLOTS ? life.used[slot] : NULL;
    if (n) {
        change(word_of(n)); /* pairs: DEAD */
        node *before = &life.head.list;
        while (atomic_load(&before->next) != n) before = atomic_load(&before->next);
        atomic_store(&before->next, atomic_load(&n->next));
        unmap_slot(slot);
        unmap_leftovers();
        life.used[slot] = NULL;
    }
    pthread_mutex_unlock(&life.lock);
}

void fmq_life_release(int token) { let_go(token, futex_release); }
void fmq_life_die(int token) { let_go(token, mark_dead); }
