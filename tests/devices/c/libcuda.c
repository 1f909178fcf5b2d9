/* A libcuda.so.1 without a GPU, for tests: what Burst uses of CUDA's driver API, as NVIDIA documents it.
 *
 * Memory of the "GPU" lies in a range that this process must not touch (PROT_NONE): the bytes are in a second mapping that only
 * this file knows. Streams are threads that do their work in order. A kernel is one of a few built-in functions, found by the
 * name of an .entry in the PTX.
 *
 * A page of words, in the file PATH.control beside this library, has counters, and faults that tests inject from any process
 * (tests/fake_cuda.py has the same numbers). Every process has a row there, so that what a killed one held is free again.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef int CUresult;
typedef uint64_t CUdeviceptr;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_CONTEXT = 201, INVALID_IMAGE = 200,
       INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
       LAUNCH_FAILED = 719, UNKNOWN = 999 };

/* ---- the page of words ------------------------------------------------------------------------------------------- */

enum word { FAIL_CALL, FAIL_AFTER, FAIL_CODE, HOLD_IN, HOLD_KERNELS, HOLD_OUT, LOST, TOTAL, DEVICES, COPIES_IN, COPIES_OUT, PAGEABLE,
            KERNELS, HOST_FUNCTIONS, HELD, UNUSED, VERSION, NO_READ_ONLY };
enum call { ANY = 0, ALLOC, FREE, HOST_ALLOC, REGISTER, UNREGISTER, COPY_IN, COPY_OUT, LAUNCH, HOST_FUNC, STREAM, CONTEXT,
            CREATE, EXPORT, IMPORT, MAP, SYNCHRONIZE, QUERY, EVENT_DESTROY };
enum { CALLS_AT = 32, ROWS_AT = 64, ROW = 4, ROWS = 64, WORDS = 512 }; /* a row: pid, bytes, registered ranges, contexts */

static _Atomic uint64_t *words, *row;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local uintptr_t contexts[8]; /* of this thread, the current one last; a device's number, and 1 */
static _Thread_local int n_contexts;

static uintptr_t current(void) { return n_contexts ? contexts[n_contexts - 1] : 0; }

static bool is_alive(uint64_t pid) { return pid && (!kill((pid_t)pid, 0) || errno == EPERM); }

static void take_row(void) {
    for (int i = 0; i < ROWS; i++) {
        _Atomic uint64_t *found = words + ROWS_AT + i * ROW;
        uint64_t pid = found[0];
        if (is_alive(pid) || !atomic_compare_exchange_strong(&found[0], &pid, (uint64_t)getpid())) continue;
        for (int k = 1; k < ROW; k++) found[k] = 0;
        row = found;
        return;
    }
    abort();
}

static uint64_t used_by_all(void) {
    uint64_t sum = 0;
    for (int i = 0; i < ROWS; i++)
        if (is_alive(words[ROWS_AT + i * ROW])) sum += words[ROWS_AT + i * ROW + 1];
    return sum;
}

static CUresult begin(enum call call) {
    atomic_fetch_add(&words[CALLS_AT + call], 1);
    if (words[LOST]) return (CUresult)words[LOST];
    if (!row || !current()) return INVALID_CONTEXT;
    if (words[FAIL_CALL] != (uint64_t)call || !call) return SUCCESS;
    uint64_t left = words[FAIL_AFTER];
    while (left && !atomic_compare_exchange_weak(&words[FAIL_AFTER], &left, left - 1)) {}
    if (left) return SUCCESS;
    words[FAIL_CALL] = 0;
    return (CUresult)words[FAIL_CODE];
}

/* ---- memory of the GPU ------------------------------------------------------------------------------------------- */

typedef struct physical {
    int fd;
    size_t bytes;
    int references;
} physical;

typedef struct range {
    CUdeviceptr address;
    size_t bytes;
    char *storage; /* NULL: reserved, nothing is mapped there */
    physical *of;
    struct range *next;
} range;

typedef struct pinned {
    char *address;
    size_t bytes;
    struct pinned *next;
} pinned;

static const size_t SPACE = (size_t)1 << 38;
static char *space;
static size_t space_used;
static range *ranges;
static pinned *pins;

static void count_bytes(int64_t more) { atomic_fetch_add(row + 1, (uint64_t)more); }

static physical *new_physical(size_t bytes) {
    if (used_by_all() + bytes > words[TOTAL]) return NULL;
    physical *p = calloc(1, sizeof *p);
    p->fd = memfd_create("gpu", MFD_CLOEXEC);
    if (ftruncate(p->fd, (off_t)bytes)) abort();
    p->bytes = bytes;
    p->references = 1;
    count_bytes((int64_t)bytes);
    return p;
}

static void release(physical *p) {
    if (--p->references) return;
    close(p->fd);
    count_bytes(-(int64_t)p->bytes);
    free(p);
}

static CUdeviceptr reserve(size_t bytes) {
    CUdeviceptr found = (CUdeviceptr)(uintptr_t)(space + space_used);
    space_used += (bytes + (2u << 20)) & ~(size_t)((2u << 20) - 1); /* a gap follows, so that what runs over its end is found */
    if (space_used > SPACE) abort();
    range *r = calloc(1, sizeof *r);
    *r = (range){found, bytes, NULL, NULL, ranges};
    ranges = r;
    return found;
}

static range **range_at(CUdeviceptr address) {
    range **r = &ranges;
    while (*r && (*r)->address != address) r = &(*r)->next;
    return r;
}

static void attach(range *r, physical *p) {
    r->storage = mmap(NULL, r->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, p->fd, 0);
    if (r->storage == MAP_FAILED) abort();
    r->of = p;
}

static void detach(range *r) {
    if (!r->storage) return;
    munmap(r->storage, r->bytes);
    release(r->of);
    r->storage = NULL;
}

/* The bytes at an address of the GPU, or NULL. */
static char *bytes_at(CUdeviceptr address, size_t bytes) {
    char *found = NULL;
    pthread_mutex_lock(&lock);
    for (range *r = ranges; r; r = r->next)
        if (r->storage && address >= r->address && address + bytes <= r->address + r->bytes) found = r->storage + (address - r->address);
    pthread_mutex_unlock(&lock);
    return found;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    CUresult r = begin(ALLOC);
    if (r || !bytes) return r ? r : INVALID_VALUE;
    pthread_mutex_lock(&lock);
    physical *p = new_physical(bytes);
    if (p) attach(*range_at(*address = reserve(bytes)), p);
    pthread_mutex_unlock(&lock);
    return p ? SUCCESS : OUT_OF_MEMORY;
}

static CUresult free_range(CUdeviceptr address) {
    pthread_mutex_lock(&lock);
    range **at = range_at(address), *r = *at;
    if (r) {
        *at = r->next;
        detach(r);
        free(r);
    }
    pthread_mutex_unlock(&lock);
    return r ? SUCCESS : INVALID_VALUE;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    CUresult r = begin(FREE);
    return r ? r : free_range(address);
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    CUresult r = begin(ANY);
    if (r) return r;
    *total = words[TOTAL];
    *free_bytes = *total - used_by_all();
    return SUCCESS;
}

/* ---- memory of the CPU ------------------------------------------------------------------------------------------- */

static pinned **pin_over(const char *address, size_t bytes) {
    pinned **p = &pins;
    while (*p && ((*p)->address + (*p)->bytes <= address || address + bytes <= (*p)->address)) p = &(*p)->next;
    return p;
}

static bool is_pinned(const char *address, size_t bytes) {
    pthread_mutex_lock(&lock);
    const pinned *p = *pin_over(address, bytes);
    bool found = p && p->address <= address && address + bytes <= p->address + p->bytes;
    pthread_mutex_unlock(&lock);
    return found;
}

/* Whether all of it is mapped, and for writing if that is wanted. */
static bool is_mapped(uintptr_t address, size_t bytes, bool writable) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512], mode[8];
    uintptr_t from, to, end = address + bytes;
    while (maps && address < end && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx %7s", &from, &to, mode) != 3 || to <= address) continue;
        if (from > address || mode[0] != 'r' || (writable && mode[1] != 'w')) break;
        address = to;
    }
    if (maps) fclose(maps);
    return address >= end;
}

static CUresult pin(char *address, size_t bytes) {
    pthread_mutex_lock(&lock);
    bool is_new = !*pin_over(address, bytes);
    if (is_new) {
        pinned *p = calloc(1, sizeof *p);
        *p = (pinned){address, bytes, pins};
        pins = p;
        atomic_fetch_add(row + 2, 1);
    }
    pthread_mutex_unlock(&lock);
    return is_new ? SUCCESS : ALREADY_REGISTERED;
}

static CUresult unpin(const char *address) {
    pthread_mutex_lock(&lock);
    pinned **at = &pins;
    while (*at && (*at)->address != address) at = &(*at)->next;
    pinned *p = *at;
    if (p) {
        *at = p->next;
        free(p);
        atomic_fetch_sub(row + 2, 1);
    }
    pthread_mutex_unlock(&lock);
    return p ? SUCCESS : NOT_REGISTERED;
}

CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    CUresult r = begin(REGISTER);
    if (r) return r;
    bool read_only = flags & 8;
    if (read_only && words[NO_READ_ONLY]) return 801;
    if (!is_mapped((uintptr_t)address, bytes, !read_only)) return INVALID_VALUE;
    return pin(address, bytes);
}

CUresult cuMemHostUnregister(void *address) {
    CUresult r = begin(UNREGISTER);
    return r ? r : unpin(address);
}

CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
    (void)flags;
    CUresult r = begin(HOST_ALLOC);
    if (r) return r;
    size_t *made = mmap(NULL, bytes + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return OUT_OF_MEMORY;
    *made = bytes + 4096;
    *address = (char *)made + 4096;
    return pin(*address, bytes);
}

CUresult cuMemFreeHost(void *address) {
    if (unpin(address)) return INVALID_VALUE;
    size_t *made = (size_t *)((char *)address - 4096);
    return munmap(made, *made) ? INVALID_VALUE : SUCCESS;
}

/* ---- streams ----------------------------------------------------------------------------------------------------- */

typedef void host_function(void *);
typedef CUresult kernel_function(void **arguments);
typedef struct event event;
typedef struct work {
    enum { NO_WORK, IN, OUT, ACROSS, FILL, KERNEL, HOST, RECORD, WAIT, END } kind;
    CUdeviceptr to, from;
    char *host;
    size_t bytes;
    host_function *function;
    kernel_function *kernel;
    uint64_t values[8];
    event *event;
    uint64_t number;
    struct work *next;
} work;

typedef struct stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    work *first, **last;
    uint64_t added, done;
    uintptr_t context;
} stream;

struct event {
    _Atomic uint64_t recorded, done; /* how often */
    bool has_no_time;
    struct timespec when;
};

static void nap(void) { nanosleep(&(struct timespec){0, 500000}, NULL); }

static void hold(enum word gate) {
    if (!words[gate]) return;
    atomic_fetch_add(&words[HELD], 1);
    while (words[gate] && !words[LOST]) nap();
    atomic_fetch_sub(&words[HELD], 1);
}

static void break_context(CUresult code) {
    uint64_t none = 0;
    atomic_compare_exchange_strong(&words[LOST], &none, (uint64_t)code);
}

static void copy(work *w, enum word gate, enum word counter) {
    hold(gate);
    char *to = w->kind == IN || w->kind == ACROSS ? bytes_at(w->to, w->bytes) : w->host;
    char *from = w->kind == IN ? w->host : bytes_at(w->from, w->bytes);
    if (words[LOST]) return;
    if (!to || !from) return break_context(ILLEGAL_ADDRESS);
    memcpy(to, from, w->bytes);
    atomic_fetch_add(&words[counter], 1);
}

static void fill(work *w) {
    char *to = bytes_at(w->to, w->bytes);
    if (!to) return break_context(ILLEGAL_ADDRESS);
    memset(to, (int)w->number, w->bytes);
}

static void run_kernel(work *w) {
    hold(HOLD_KERNELS);
    if (words[LOST]) return;
    void *arguments[8];
    for (int i = 0; i < 8; i++) arguments[i] = &w->values[i];
    CUresult r = w->kernel(arguments);
    if (r) return break_context(r);
    atomic_fetch_add(&words[KERNELS], 1);
}

static void finish_event(work *w) {
    clock_gettime(CLOCK_MONOTONIC, &w->event->when);
    w->event->done = w->number;
}

static void await_event(work *w) {
    while (w->event->done < w->number && !words[LOST]) nap();
}

static void do_work(work *w) {
    if (words[LOST]) return; /* host functions, too, are not called any more */
    switch (w->kind) {
    case IN: copy(w, HOLD_IN, COPIES_IN); break;
    case OUT: copy(w, HOLD_OUT, COPIES_OUT); break;
    case ACROSS: copy(w, HOLD_KERNELS, KERNELS); break;
    case FILL: fill(w); break;
    case KERNEL: run_kernel(w); break;
    case RECORD: finish_event(w); break;
    case WAIT: await_event(w); break;
    case HOST:
        atomic_fetch_add(&words[HOST_FUNCTIONS], 1);
        w->function(w->host);
        break;
    default: break;
    }
}

static void *serve(void *argument) {
    stream *s = argument;
    for (bool goes_on = true; goes_on;) {
        pthread_mutex_lock(&s->lock);
        while (!s->first) pthread_cond_wait(&s->changed, &s->lock);
        work *w = s->first;
        if (!(s->first = w->next)) s->last = &s->first;
        pthread_mutex_unlock(&s->lock);
        goes_on = w->kind != END;
        do_work(w);
        free(w);
        pthread_mutex_lock(&s->lock);
        s->done++;
        pthread_cond_broadcast(&s->changed);
        pthread_mutex_unlock(&s->lock);
    }
    free(s);
    return NULL;
}

static CUresult add(stream *s, const work *w) {
    if (s->context != current()) return INVALID_HANDLE;
    work *made = malloc(sizeof *made);
    *made = *w;
    made->next = NULL;
    pthread_mutex_lock(&s->lock);
    *s->last = made;
    s->last = &made->next;
    s->added++;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return SUCCESS;
}

static CUresult drain(stream *s) {
    pthread_mutex_lock(&s->lock);
    uint64_t until = s->added;
    while (s->done < until) pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
    return (CUresult)words[LOST];
}

CUresult cuStreamCreateWithPriority(stream **made, unsigned flags, int priority) {
    (void)flags, (void)priority;
    CUresult r = begin(STREAM);
    if (r) return r;
    stream *s = *made = calloc(1, sizeof *s);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    s->last = &s->first;
    s->context = current();
    pthread_t thread;
    if (pthread_create(&thread, NULL, serve, s)) return OUT_OF_MEMORY;
    return pthread_detach(thread);
}

CUresult cuStreamDestroy_v2(stream *s) { return add(s, &(work){.kind = END}); }

CUresult cuStreamSynchronize(stream *s) {
    CUresult r = begin(SYNCHRONIZE);
    return r ? r : drain(s);
}

CUresult cuStreamQuery(stream *s) {
    CUresult r = begin(QUERY);
    if (r) return r;
    pthread_mutex_lock(&s->lock);
    bool is_done = s->done == s->added;
    pthread_mutex_unlock(&s->lock);
    return is_done ? SUCCESS : NOT_READY;
}

CUresult cuLaunchHostFunc(stream *s, host_function *function, void *argument) {
    CUresult r = begin(HOST_FUNC);
    return r ? r : add(s, &(work){.kind = HOST, .function = function, .host = argument});
}

/* Memory that is not pinned is copied before the call returns. */
static CUresult add_copy(stream *s, const work *w) {
    bool is_async = is_pinned(w->host, w->bytes);
    if (!is_async) atomic_fetch_add(&words[PAGEABLE], 1);
    CUresult r = add(s, w);
    return r || is_async ? r : drain(s);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, stream *s) {
    CUresult r = begin(COPY_IN);
    return r ? r : add_copy(s, &(work){.kind = IN, .to = to, .host = (char *)(uintptr_t)from, .bytes = bytes});
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, stream *s) {
    CUresult r = begin(COPY_OUT);
    return r ? r : add_copy(s, &(work){.kind = OUT, .from = from, .host = to, .bytes = bytes});
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, stream *s) {
    CUresult r = begin(ANY);
    return r ? r : add(s, &(work){.kind = ACROSS, .to = to, .from = from, .bytes = bytes});
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, stream *s) {
    CUresult r = begin(ANY);
    return r ? r : add(s, &(work){.kind = FILL, .to = to, .bytes = bytes, .number = value});
}

static CUresult copy_now(enum call call, work w) {
    CUresult r = begin(call);
    if (r) return r;
    do_work(&w);
    return (CUresult)words[LOST];
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    return copy_now(COPY_IN, (work){.kind = IN, .to = to, .host = (char *)(uintptr_t)from, .bytes = bytes});
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    return copy_now(COPY_OUT, (work){.kind = OUT, .from = from, .host = to, .bytes = bytes});
}

/* ---- events ------------------------------------------------------------------------------------------------------ */

CUresult cuEventCreate(event **made, unsigned flags) {
    *made = calloc(1, sizeof **made);
    (*made)->has_no_time = flags & 2;
    return begin(ANY);
}

CUresult cuEventDestroy_v2(event *e) { return (void)e, begin(EVENT_DESTROY); } /* work may refer to it: tests do not mind the leak */

CUresult cuEventRecord(event *e, stream *s) {
    CUresult r = begin(ANY);
    return r ? r : add(s, &(work){.kind = RECORD, .event = e, .number = atomic_fetch_add(&e->recorded, 1) + 1});
}

CUresult cuStreamWaitEvent(stream *s, event *e, unsigned flags) {
    (void)flags;
    CUresult r = begin(ANY);
    return r ? r : add(s, &(work){.kind = WAIT, .event = e, .number = e->recorded});
}

CUresult cuEventQuery(const event *e) {
    CUresult r = begin(QUERY);
    return r ? r : e->done == e->recorded ? SUCCESS : NOT_READY;
}

CUresult cuEventSynchronize(event *e) {
    CUresult r = begin(SYNCHRONIZE);
    if (!r) await_event(&(work){.event = e, .number = e->recorded});
    return r ? r : (CUresult)words[LOST];
}

CUresult cuEventElapsedTime(float *milliseconds, const event *from, const event *to) {
    if (from->has_no_time || to->has_no_time || !from->recorded || !to->recorded) return INVALID_HANDLE;
    if (from->done < from->recorded || to->done < to->recorded) return NOT_READY;
    double seconds = (double)(to->when.tv_sec - from->when.tv_sec), more = (double)(to->when.tv_nsec - from->when.tv_nsec);
    *milliseconds = (float)(seconds * 1e3 + more / 1e6);
    return begin(ANY);
}
