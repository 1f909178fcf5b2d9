/* What the processors of this process are like, as far as polling is concerned. */
#ifndef FMQ_PROCESSORS_H
#define FMQ_PROCESSORS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum { PROCESSORS_MOST = 1024, PROCESSORS_PATH = 256 };

/* One in a process, in fmq._core; all hints, which any thread reads and a thread that polls
 * refreshes. Before the first look all is 0: nothing is known, and nothing forbidden. Processors
 * are numbered from 1, as in a queue's `cpu` words. */
struct fmq_processors {
    _Atomic uint64_t looked;       /* when; 0: never */
    _Atomic uint64_t most_ns;      /* of polling in one wait; 0: as long as the wait likes */
    _Atomic uint32_t usable;       /* by the thread that looked */
    _Atomic uint32_t has_siblings; /* processors that are threads of one core */
    /* 1 + the first thread of its core; 0: not looked up. */
    _Atomic uint16_t core[PROCESSORS_MOST + 1];
    /* Of the thread that looks: */
    _Atomic uint32_t is_looking;
    uint64_t searched;  /* when its control groups were last searched for a quota */
    uint64_t throttled; /* how often the group was when last looked at */
    /* The directory of the control group with the least quota; "": none has one. */
    char quota[PROCESSORS_PATH];
    /* For fmq._core to set, so that burst._core's copy of sleep.c calls the same. `mine` and
     * `theirs` are processors. */
    void (*look)(struct fmq_processors *p, uint64_t now, uint32_t mine, uint32_t theirs);
};

void processors_look(struct fmq_processors *p, uint64_t now, uint32_t mine, uint32_t theirs);

/* The same, of a machine whose files lie under `root`. */
void processors_look_under(const char *root, struct fmq_processors *p, uint64_t now, uint32_t mine,
                           uint32_t theirs);

/* In the child of a fork: its affinity and its groups may become others, and a thread that looked
 * was the parent's. */
void processors_forget(struct fmq_processors *p);

static inline uint32_t processors_core(const struct fmq_processors *p, uint32_t cpu) {
    /* Relaxed: a hint. */
    return cpu <= PROCESSORS_MOST ? atomic_load_explicit(&p->core[cpu], memory_order_relaxed) : 0;
}

/* Whether two processors are threads of one core, and slow each other down. */
static inline bool processors_are_siblings(const struct fmq_processors *p, uint32_t a, uint32_t b) {
    /* Relaxed: a hint. */
    if (!atomic_load_explicit(&p->has_siblings, memory_order_relaxed)) return false;
    uint32_t core = processors_core(p, a);
    return core && core == processors_core(p, b);
}

#endif
