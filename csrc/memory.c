/* Mapping without keeping a descriptor: Python's mmap duplicates it, so an idle queue would cost one. */
#define _GNU_SOURCE
#include <stdint.h>

#include "api.h"

#include <errno.h>
#include <stddef.h>
#include <sys/mman.h>

int fmq_map(int fd, uint64_t bytes, int writable, void **base) {
    void *p = mmap(NULL, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) return -errno;
    *base = p;
    return 0;
}

int fmq_unmap(void *base, uint64_t bytes) { return munmap(base, bytes) ? -errno : 0; }
