/* Mapping memory that a peer may truncate.
 *
 * Python's mmap duplicates its descriptor, so an idle queue would cost one: mapping is done here.
 * And a peer can truncate memory that is not sealed; touching what is gone raises SIGBUS, which
 * ends a process. A device must not end because of a client, so with fmq_guard() on, one of our
 * mappings from which a page vanished is replaced by private zero pages. The handler uses a fixed
 * table and two system calls, both allowed in a signal handler.
 *
 * The handler must not fail where the process has as many mappings as it may have
 * (vm.max_map_count). So it replaces a mapping as a whole, which splits none, and it can give up
 * some mappings that fmq_guard() made for that: the kernel maps nothing at the limit, even where
 * that needs no more mappings than before.
 */
#define _GNU_SOURCE
#include <stdint.h>

#include "fmq/api.h"
#include "fmq/memory.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

/* A mapping beyond these is refused where there is a guard; sealed memory needs none. */
enum { RANGES = 4096 };

/* bytes is written last and read first; 0 = free. A slot is claimed by moving bytes from 0 to 1. */
static struct {
    _Atomic uintptr_t base;
    _Atomic uint64_t unit; /* bytes that are replaced together, a divisor of the range's */
    _Atomic uint64_t bytes;
} ranges[RANGES];

int fmq_remember(void *base, uint64_t bytes, uint64_t unit) {
    for (int i = 0; i < RANGES; i++) {
        uint64_t none = 0;
        if (!atomic_compare_exchange_strong(&ranges[i].bytes, &none, 1)) continue;
        atomic_store(&ranges[i].unit, unit);
        atomic_store(&ranges[i].base, (uintptr_t)base);
        atomic_store(&ranges[i].bytes, bytes); /* pairs: RANGE */
        return 1;
    }
    return 0;
}

static void forget(void *base) {
    for (int i = 0; i < RANGES; i++) {
        if (atomic_load(&ranges[i].base) != (uintptr_t)base) continue;
        atomic_store(&ranges[i].base, 0);
        atomic_store(&ranges[i].bytes, 0);
        return;
    }
}

/* What has to be replaced so that this address can be touched: the bytes from *base on; 0: it is
 * not ours. */
static uint64_t range_of(uintptr_t address, uintptr_t *base) {
    for (int i = 0; i < RANGES; i++) {
        uint64_t bytes = atomic_load(&ranges[i].bytes); /* pairs: RANGE */
        uintptr_t begin = atomic_load(&ranges[i].base);
        uint64_t unit = atomic_load(&ranges[i].unit);
        /* Half reused. */
        if (!begin || address - begin >= bytes || atomic_load(&ranges[i].bytes) != bytes) continue;
        *base = begin + (address - begin) / unit * unit;
        return unit;
    }
    return 0;
}

int memory_may_vanish(const void *at) {
    uintptr_t base;
    return range_of((uintptr_t)at, &base) != 0;
}

/* ---- mappings that the handler can give up --------------------------------------------------- */

enum { SPARES = 16 };
static _Atomic(void *) spares[SPARES];

static size_t page_bytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static uint64_t whole_pages(uint64_t bytes) {
    return (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

/* Shared ones, which the kernel never merges with their neighbours. */
static void make_spares(void) {
    for (int i = 0; i < SPARES; i++) {
        void *none = NULL, *spare;
        if (atomic_load(&spares[i])) continue;
        if ((spare = mmap(NULL, page_bytes(), PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) ==
            MAP_FAILED)
            return;
        if (!atomic_compare_exchange_strong(&spares[i], &none, spare)) munmap(spare, page_bytes());
    }
}

static int give_up_spare(void) {
    for (int i = 0; i < SPARES; i++) {
        void *spare = atomic_exchange(&spares[i], NULL);
        if (spare) return munmap(spare, page_bytes()), 1;
    }
    return 0;
}

/* ---- the handler ----------------------------------------------------------------------------- */

static struct sigaction before; /* fmq_guard */
static _Atomic int is_guarded;

static int replace(void *base, uint64_t bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    while (mmap(base, bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED)
        if (errno != ENOMEM || !give_up_spare()) return 0;
    make_spares(); /* for the next time */
    return 1;
}

static void on_bus_error(int signal, siginfo_t *info, void *context) {
    (void)context;
    int error = errno;
    uintptr_t base;
    uint64_t bytes = info->si_code == BUS_ADRERR ? range_of((uintptr_t)info->si_addr, &base) : 0;
    int is_replaced = bytes && replace((void *)base, bytes);
    errno = error;
    if (is_replaced) return;          /* the access is repeated, and finds zeros */
    sigaction(signal, &before, NULL); /* the access is repeated, and is fatal as it should be */
    if (info->si_code <= 0) raise(signal); /* sent, not caused by an access */
}

int fmq_guard(void) {
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK},
                     now;
    if (sigaction(SIGBUS, NULL, &now)) return -errno;
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error) return 0;
    before = now;
    is_guarded = 1;
    make_spares();
    return sigaction(SIGBUS, &action, NULL) ? -errno : 0;
}

/* With a tail: vector kernels read some bytes beyond the end of an array, and ignore them. The tail
 * keeps other mappings, and holes, away from there. */
static uint64_t with_tail(uint64_t bytes) { return whole_pages(bytes) + page_bytes(); }

static int map_over(void *room, int fd, uint64_t bytes, uint64_t offset, int writable) {
    int protection = PROT_READ | (writable ? PROT_WRITE : 0);
    if (mmap(room, bytes, protection, MAP_SHARED | MAP_FIXED, fd, (off_t)offset) == MAP_FAILED)
        return -errno;
    int seals = fcntl(fd, F_GET_SEALS);
    int may_shrink = seals < 0 || !(seals & F_SEAL_SHRINK);
    if (is_guarded) make_spares(); /* again, if another thread was faster in the handler */
    return may_shrink && !fmq_remember(room, whole_pages(bytes), whole_pages(bytes)) && is_guarded
               ? -ENOMEM
               : 0;
}

/* File systems, as linux/magic.h has them; that of DMA-BUFs is not in the headers of older
 * systems. */
static const int64_t HUGE_PAGES = 0x958458f6, DMA_BUFS = 0x444d4142;

static int64_t file_system(int fd) {
    struct statfs found;
    return fstatfs(fd, &found) ? -errno : (int64_t)found.f_type;
}

/* What statx fills in, as linux/stat.h has it. Not every C library declares it, and some contradict
 * that header. */
enum { STATX_TYPE_ONLY = 1 };
struct file_facts {
    uint32_t up_to_mode[7];
    uint16_t mode;
    uint8_t up_to_device[106];
    uint32_t device_major;
    uint32_t up_to_end[29];
};
static_assert(offsetof(struct file_facts, mode) == 28, "where the kernel writes");
static_assert(offsetof(struct file_facts, device_major) == 136, "where the kernel writes");
static_assert(sizeof(struct file_facts) == 256, "what the kernel writes");

/* Only the kernel's own file systems are asked: one that a process serves (FUSE), or another
 * machine, may never answer. Seals are looked up in the inode; memory in a file of tmpfs has them,
 * too. */
int fmq_backing(int fd) {
    struct file_facts found;
    if (fcntl(fd, F_GET_SEALS) >= 0)
        return file_system(fd) == HUGE_PAGES ? FMQ_HUGE_PAGES : FMQ_MEMORY;
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE_ONLY, &found))
        return -errno;
    /* Only root mounts a block device. */
    if (S_ISREG(found.mode)) return found.device_major ? FMQ_DISK : FMQ_FILE;
    if (found.mode & S_IFMT) return FMQ_OTHER; /* a device, a pipe, a socket, a folder */
    return file_system(fd) == DMA_BUFS ? FMQ_DMA_BUF : FMQ_OTHER;
}

int fmq_memfd(uint64_t bytes) {
    int fd = memfd_create("fmq", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return -errno;
    if (bytes <= INT64_MAX && !ftruncate(fd, (off_t)bytes) &&
        !fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        return fd;
    int code = bytes <= INT64_MAX ? -errno : -EFBIG;
    close(fd);
    return code;
}

/* Kernels before 5.14 do not know the advice. What has been cut off, or cannot be read, is for the
 * access to find. */
int fmq_populate(void *base, uint64_t bytes) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), skew = (uintptr_t)base % page;
    char *start = (char *)base - skew;
    if (!madvise(start, bytes + skew, 22 /* MADV_POPULATE_READ */)) return 0;
    if (errno != EINVAL) return -errno;
    for (volatile const char *at = start; at < (char *)base + bytes; at += page) (void)*at;
    return 0;
}

/* A mapping of huge pages has their length and alignment, whatever was asked for: it would cover
 * what lies behind the room, and the guard could not replace a page of it. */
int fmq_map_at(int fd, uint64_t bytes, uint64_t offset, int writable, void **base) {
    if (!bytes || bytes > PTRDIFF_MAX / 2) return bytes ? -ENOMEM : -EINVAL;
    if (fcntl(fd, F_GET_SEALS) >= 0 && file_system(fd) == HUGE_PAGES) return -EOPNOTSUPP;
    void *room =
        mmap(NULL, with_tail(bytes), PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return -errno;
    int r = map_over(room, fd, bytes, offset, writable);
    if (r) munmap(room, with_tail(bytes));
    else *base = room;
    return r;
}

int fmq_map(int fd, uint64_t bytes, int writable, void **base) {
    return fmq_map_at(fd, bytes, 0, writable, base);
}

int fmq_unmap(void *base, uint64_t bytes) {
    forget(base);
    return munmap(base, with_tail(bytes)) ? -errno : 0;
}

int fmq_flush(void *base, uint64_t bytes) { return msync(base, bytes, MS_SYNC) ? -errno : 0; }
