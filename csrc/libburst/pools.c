/* Pools: sealed memfds, mapped for as long as their handle is open. */
#define _GNU_SOURCE
#include "libburst/pools.h"

#include "libburst/memory_limits.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SMALL = 1 << 20 };

/* The figures are less exact than a small pool is large. */
static int check_left(uint64_t bytes) {
    uint64_t left = bytes < SMALL ? bytes : memory_left();
    if (bytes <= left) return 0;
    return fail(-ENOSPC,
                "a pool needs %llu bytes, and %llu are available; make it smaller, or free others",
                (unsigned long long)bytes, (unsigned long long)left);
}

int sealed_memory(const char *name, uint64_t bytes) {
    if (check_left(bytes)) return -ENOSPC;
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING), r;
    if (fd < 0) return fail_kernel("memfd_create");
    /* Now: a device of another account refuses memory with holes. */
    do r = posix_fallocate(fd, 0, (off_t)bytes);
    while (r == EINTR);
    if (r) fail(-r, "%llu bytes of shared memory: %s", (unsigned long long)bytes, strerror(r));
    else if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        fail_kernel("sealing memory"), r = EIO;
    if (r) return close(fd), -r;
    return fd;
}

static int check_place(const pool *p, const burst_tensor *t) {
    if (t->length <= p->bytes && t->offset <= p->bytes - t->length) return 0;
    return fail(-EINVAL, "bytes %llu to %llu of a pool of %llu", (unsigned long long)t->offset,
                (unsigned long long)(t->offset + t->length), (unsigned long long)p->bytes);
}

int pool_of(const burst_tensor *t, uint32_t most, pool **found) {
    int r;
    *found = NULL;
    if (!t->pool && (t->length || t->offset || t->rank))
        return fail(-EINVAL, "an omitted tensor has a place or a shape");
    if (!t->pool) return 0;
    if (t->rank > most || (t->rank && !t->shape))
        return fail(-EINVAL, "a tensor of rank %u without a shape, or too large", t->rank);
    pool *p = handle_take(t->pool, POOL, &r);
    if (!p) return r;
    if ((r = check_place(p, t))) return object_put(p), r;
    return *found = p, 0;
}

void put_pool(message *m, const pool *p) {
    put_array(m, 3);
    put_text(m, "ashmem"), put_uint(m, p->bytes), put_bool(m, true);
}

static void unmap(pool *p) {
    if (p->base) munmap(p->base, p->bytes);
    p->base = NULL;
}

static void destroy(object *o) {
    pool *p = (pool *)o;
    unmap(p);
    close(p->fd);
    free(p);
}

/* Owns `fd`. */
static int new_pool(int fd, uint64_t bytes, burst_pool **out, void **base) {
    pool *p = calloc(1, sizeof *p);
    if (!p) return close(fd), fail(-ENOMEM, "no memory for a pool");
    *p = (pool){.fd = fd, .bytes = bytes};
    p->base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    int r = 0;
    if (p->base == MAP_FAILED) p->base = NULL, r = fail_kernel("mapping a pool");
    void *at = p->base;
    if (!r) r = handle_new(&p->head, POOL, destroy, out);
    if (r) return destroy(&p->head), r;
    return *base = at, 0;
}

static int check(uint64_t bytes, burst_pool **out, void **base) {
    if (!out || !base)
        return fail(-EINVAL, "NULL where room for a pool, and for its address, are due");
    return bytes && bytes <= INT64_MAX
               ? 0
               : fail(-EINVAL, "a pool of %llu bytes", (unsigned long long)bytes);
}

int burst_pool_new(size_t bytes, burst_pool **out, void **base) {
    int r = check(bytes, out, base), fd = r ? r : sealed_memory("burst-pool", bytes);
    return fd < 0 ? fd : new_pool(fd, bytes, out, base);
}

int burst_pool_from_fd(int given, size_t bytes, burst_pool **out, void **base) {
    int r = check(bytes, out, base), seals = fcntl(given, F_GET_SEALS);
    struct stat s;
    if (r) return r;
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return fail(-EINVAL, "descriptor %d is no memfd that is sealed against shrinking", given);
    if (fstat(given, &s)) return fail_kernel("fstat");
    if ((uint64_t)s.st_size < bytes)
        return fail(-EINVAL, "the memory has %lld bytes, less than %zu", (long long)s.st_size,
                    bytes);
    int fd = fcntl(given, F_DUPFD_CLOEXEC, 0);
    return fd < 0 ? fail_kernel("fcntl") : new_pool(fd, bytes, out, base);
}

int burst_pool_free(burst_pool *handle) {
    void *p;
    int r = handle_close(handle, POOL, &p);
    if (r) return r;
    unmap(p);
    object_put(p);
    return 0;
}
