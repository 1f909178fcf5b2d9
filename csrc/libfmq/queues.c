/* Making and opening the memory of a queue: as `fmq/region.py` does, so that either side opens what
 * the other one made. */
#define _GNU_SOURCE
#include "libfmq/queues.h"

#include "libfmq/dtypes.h"
#include "libfmq/fmq.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static_assert((int)FMQ_QUEUE_SYNCHRONIZED == (int)FMQ_SYNCHRONIZED &&
                  (int)FMQ_QUEUE_UNSYNCHRONIZED == (int)FMQ_UNSYNCHRONIZED &&
                  (int)FMQ_QUEUE_BROADCAST == (int)FMQ_BROADCAST,
              "the core's numbers");

#define SHM "/dev/shm" /* where glibc keeps POSIX shared memory */
enum { PAGE = 4096, NAME_ROOM = 300 };

static void destroy(object *o) {
    queue_memory *q = (queue_memory *)o;
    if (q->control) fmq_unmap(q->control, q->bytes);
    close(q->file);
    free(q);
}

/* Maps it; owns `file`. */
static int new_memory(int file, uint64_t bytes, queue_memory **out) {
    queue_memory *q = calloc(1, sizeof *q);
    if (!q) return close(file), fail(-ENOMEM, "no memory for a queue");
    *q = (queue_memory){.file = file, .bytes = bytes};
    int r = fmq_map(file, bytes, 1, &q->control);
    if (r)
        return q->control = NULL, destroy(&q->head), fail(r, "mapping a queue: %s", strerror(-r));
    return *out = q, 0;
}

static int path_of(const char *name, char path[NAME_ROOM]) {
    size_t n = name ? strlen(name) : 0;
    if (n < 2 || n >= 250 || name[0] != '/' || strchr(name + 1, '/') || !strcmp(name, "/.") ||
        !strcmp(name, "/.."))
        return fail(
            -EINVAL,
            "name=%.250s: a queue's name is '/' and up to 248 characters without another '/'",
            name ? name : "NULL");
    return snprintf(path, NAME_ROOM, SHM "%s", name), 0;
}

/* ---- creating -------------------------------------------------------------------------------- */

/* The kernel would take the pages one by one, until none is left. */
static int check_room(uint64_t bytes) {
    struct statvfs found;
    uint64_t left = statvfs(SHM, &found) || !found.f_blocks
                        ? UINT64_MAX
                        : (uint64_t)found.f_bavail * found.f_frsize;
    if (bytes <= left) return 0;
    return fail(-ENOSPC, "a queue needs %llu bytes, and %llu are free in " SHM,
                (unsigned long long)bytes, (unsigned long long)left);
}

static int reserve_memory(int file, uint64_t bytes) {
    int r;
    do r = posix_fallocate(file, 0, (off_t)bytes);
    while (r == EINTR);
    return r ? fail(-r, "%llu bytes of shared memory: %s", (unsigned long long)bytes, strerror(r))
             : 0;
}

/* Without a name yet: a process that is killed on the way leaves nothing behind. */
static int new_file(bool is_named, uint64_t bytes) {
    if (check_room(bytes)) return -ENOSPC;
    int file = is_named ? open(SHM, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)
                        : memfd_create("fmq", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file < 0) return fail_kernel("making shared memory");
    int r = reserve_memory(file, bytes);
    if (!r && !is_named && fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        r = fail_kernel("sealing memory");
    return r ? close(file), r : file;
}

static int publish(int file, const char *name, const char *path) {
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (!linkat(AT_FDCWD, link, AT_FDCWD, path, AT_SYMLINK_FOLLOW)) return 0;
    return errno == EEXIST
               ? fail(-EEXIST, "name=%s is taken; open it, or fmq_queue_unlink it first", name)
               : fail_kernel("naming a queue");
}

static int make(const fmq_shape *shape, const char *text, size_t n, const char *name,
                const char *path, queue_memory **out) {
    uint64_t control = fmq_control_bytes(shape->flavour),
             ring = fmq_ring_bytes(shape->capacity, shape->element_bytes);
    uint64_t bytes = control + (ring + PAGE - 1) / PAGE * PAGE;
    int file = new_file(name, bytes);
    if (file < 0) return file;
    int r = new_memory(file, bytes, out);
    if (r) return r;
    queue_memory *q = *out;
    q->shape = *shape, q->ring = (char *)q->control + control;
    r = fmq_format(q->control, shape);
    memcpy((char *)q->control + DTYPE_AT, text, n);
    if (!r && name) r = publish(file, name, path);
    return r ? destroy(&q->head), r : 0;
}

int fmq_queue_create(const char *name, const char *dtype, uint32_t element_bytes, uint64_t capacity,
                     int flavour, fmq_queue **queue) {
    char text[DTYPE_ROOM], path[NAME_ROOM];
    if (!queue) return fail(-EINVAL, "queue=NULL: give a place for the handle");
    if (name && path_of(name, path)) return -EINVAL;
    int n = dtype_text(dtype, element_bytes, text);
    if (n < 0)
        return fail(
            n, "dtype=%.40s, element_bytes=%u: numpy's name of a type of that size, as \"<f4\"",
            dtype ? dtype : "NULL", element_bytes);
    if (flavour < FMQ_SYNCHRONIZED || flavour > FMQ_BROADCAST)
        return fail(-EINVAL, "flavour=%d: an fmq_queue_flavour", flavour);
    if (!fmq_ring_bytes(capacity, element_bytes))
        return fail(
            -EINVAL,
            "capacity=%llu of %u bytes each: a queue holds 1 element at least, and less than 1 TiB",
            (unsigned long long)capacity, element_bytes);
    const fmq_shape shape = {capacity, dtype_hash(text, (size_t)n), element_bytes,
                             (uint32_t)flavour};
    queue_memory *q;
    int r = make(&shape, text, (size_t)n, name, path, &q);
    if (r) return r;
    r = handle_new(&q->head, QUEUE, destroy, queue);
    if (r && name) unlink(path);
    return r ? destroy(&q->head), r : 0;
}

/* ---- opening --------------------------------------------------------------------------------- */

/* What other processes wrote is read once, and compared with the memory that is there. */
static int read_shape(queue_memory *q, const char *dtype) {
    if (fmq_shape_of(q->control, &q->shape))
        return fail(-EPROTO, "the memory holds no queue that this version can use");
    uint64_t control = fmq_control_bytes(q->shape.flavour),
             ring = fmq_ring_bytes(q->shape.capacity, q->shape.element_bytes);
    if (control > q->bytes || ring > q->bytes - control)
        return fail(-EPROTO, "the memory is smaller than the queue in it");
    q->ring = (char *)q->control + control;
    if (!dtype) return 0;
    char text[DTYPE_ROOM];
    int n = dtype_text(dtype, (uint32_t)dtype_size(dtype), text);
    if (n < 0) return fail(n, "dtype=%.40s: numpy's name of a type, as \"<f4\"", dtype);
    if (dtype_hash(text, (size_t)n) == q->shape.dtype_hash &&
        dtype_size(dtype) == q->shape.element_bytes)
        return 0;
    return fail(-EPROTO, "dtype=%s: the queue's elements are of another type, of %u bytes", dtype,
                q->shape.element_bytes);
}

/* Owns `file`. */
static int open_file(int file, uint64_t bytes, const char *dtype, fmq_queue **queue) {
    queue_memory *q;
    int r = new_memory(file, bytes, &q);
    if (r) return r;
    r = read_shape(q, dtype);
    if (!r) r = handle_new(&q->head, QUEUE, destroy, queue);
    return r ? destroy(&q->head), r : 0;
}

int fmq_queue_open(const char *name, const char *dtype, fmq_queue **queue) {
    char path[NAME_ROOM];
    struct stat status;
    if (!queue) return fail(-EINVAL, "queue=NULL: give a place for the handle");
    if (path_of(name, path)) return -EINVAL;
    int file = open(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file < 0) return fail(-errno, "name=%s: %s", name, strerror(errno));
    if (fstat(file, &status) || status.st_uid != geteuid())
        return close(file), fail(-EACCES, "name=%s: it is another user's", name);
    if (!S_ISREG(status.st_mode) || status.st_size < PAGE)
        return close(file), fail(-EPROTO, "name=%s: that is no queue", name);
    return open_file(file, (uint64_t)status.st_size, dtype, queue);
}

int fmq_queue_open_fd(int fd, const char *dtype, fmq_queue **queue) {
    struct stat status;
    if (!queue) return fail(-EINVAL, "queue=NULL: give a place for the handle");
    int file = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (file < 0) return fail(-errno, "fd=%d: %s", fd, strerror(errno));
    int seals = fcntl(file, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return close(file),
               fail(-EACCES, "fd=%d: it is no memory that is sealed against shrinking", fd);
    if (fstat(file, &status) || status.st_size < PAGE)
        return close(file), fail(-EPROTO, "fd=%d: the memory is too small for a queue", fd);
    return open_file(file, (uint64_t)status.st_size, dtype, queue);
}

/* ---- the rest -------------------------------------------------------------------------------- */

int fmq_queue_fd(fmq_queue *queue) {
    int r;
    queue_memory *q = handle_take(queue, QUEUE, &r);
    if (!q) return r;
    r = fcntl(q->file, F_DUPFD_CLOEXEC, 0);
    if (r < 0) r = fail_kernel("duplicating a descriptor");
    return object_put(q), r;
}

int fmq_queue_get_shape(fmq_queue *queue, fmq_queue_shape *shape) {
    int r;
    if (!shape) return fail(-EINVAL, "shape=NULL: give a place for it");
    queue_memory *q = handle_take(queue, QUEUE, &r);
    if (!q) return r;
    *shape =
        (fmq_queue_shape){q->shape.capacity, q->shape.element_bytes, (int32_t)q->shape.flavour};
    return object_put(q), 0;
}

int fmq_queue_unlink(const char *name) {
    char path[NAME_ROOM];
    if (path_of(name, path)) return -EINVAL;
    return unlink(path) ? fail(-errno, "name=%s: %s", name, strerror(errno)) : 0;
}

int fmq_queue_close(fmq_queue *queue) {
    void *q;
    int r = handle_close(queue, QUEUE, &q);
    if (!r) object_put(q);
    return r;
}

const char *fmq_queue_why(void) { return last_failure(); }
