/* Models: put together operand by operand, or a file as it is, and prepared. docs/protocol.md,
 * section 5. */
#define _GNU_SOURCE
#include "libburst/client.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TEMPORARY = 0, INPUT = 1, OUTPUT = 2, CONSTANT = 3 };
enum { ALIGN = 64, MOST_OPERANDS = 1 << 18, MOST_RANK = 32, MOST_MESSAGE = 32 << 20 };
enum {
    FILE_PREFIX = 1 << 16,
    FILE_BYTES = FILE_PREFIX | 0x300,
    FILE_TENSORS = FILE_PREFIX | 0x100
};

typedef struct {
    int type, lifetime;
    uint32_t rank, shape[MOST_RANK];
    float scale;
    int32_t zero_point;
    uint64_t offset, bytes; /* of a constant */
} operand;

typedef struct {
    object head;
    operand *operands;
    uint32_t n_operands, room, n_operations;
    uint64_t constants; /* bytes of them, in `memory` */
    int memory;
    message operations, ends; /* as they travel; ends: inputs and outputs, once finished */
    uint32_t file_types;      /* bits: the extension's, which a model file needs */
    bool is_file;
    _Atomic uint32_t busy; /* one thread at a time */
} builder;

/* The types of files that the HAL lacks, in the order of their numbers; then those that it has. */
static const struct {
    const char *dtype, *word, *code;
} file_types[] = {{"int8", "TENSOR_INT8", "|i1"},     {"uint8", "TENSOR_UINT8", "|u1"},
                  {"int16", "TENSOR_INT16", "<i2"},   {"uint16", "TENSOR_UINT16", "<u2"},
                  {"uint32", "TENSOR_UINT32", "<u4"}, {"int64", "TENSOR_INT64", "<i8"},
                  {"uint64", "TENSOR_UINT64", "<u8"}, {"float64", "TENSOR_FLOAT64", "<f8"}};
static const struct {
    const char *dtype;
    int type;
} hal_types[] = {{"float32", BURST_FLOAT32_TENSOR},
                 {"float16", BURST_FLOAT16_TENSOR},
                 {"int32", BURST_INT32_TENSOR},
                 {"bool", BURST_BOOL8_TENSOR}};
enum {
    FILE_TYPES = sizeof file_types / sizeof *file_types,
    HAL_TYPES = sizeof hal_types / sizeof *hal_types
};

static void destroy_builder(object *o) {
    builder *b = (builder *)o;
    message_free(&b->operations);
    message_free(&b->ends);
    if (b->memory >= 0) close(b->memory);
    free(b->operands);
    free(b);
}

static builder *new_builder(void) {
    builder *b = calloc(1, sizeof *b);
    if (!b) return fail(-ENOMEM, "no memory for a model"), NULL;
    b->memory = memfd_create("burst-model", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (b->memory >= 0) return b;
    fail_kernel("memfd_create");
    destroy_builder(&b->head);
    return NULL;
}

int burst_builder_new(burst_builder **out) {
    if (!out) return fail(-EINVAL, "NULL where room for a builder is due");
    builder *b = new_builder();
    if (!b) return -ENOMEM;
    int r = handle_new(&b->head, BUILDER, destroy_builder, out);
    if (r) destroy_builder(&b->head);
    return r;
}

int burst_builder_free(burst_builder *handle) {
    void *b;
    int r = handle_close(handle, BUILDER, &b);
    if (!r) object_put(b);
    return r;
}

static builder *builder_take(burst_builder *handle, int *error) {
    builder *b = handle_take(handle, BUILDER, error);
    if (!b || !atomic_exchange(&b->busy, 1)) return b;
    object_put(b);
    *error = fail(-EBUSY, "another thread is inside a call on this builder");
    return NULL;
}

static void builder_put(builder *b) {
    atomic_store(&b->busy, 0);
    object_put(b);
}

/* ---- operands and operations ----------------------------------------------------------------- */

static int add_operand(builder *b, const operand *o, const uint32_t *shape) {
    if (o->rank > MOST_RANK || (o->rank && !shape))
        return fail(-EINVAL, "rank %u: at most %d, with a shape", o->rank, MOST_RANK);
    if (b->n_operands == MOST_OPERANDS)
        return fail(-EINVAL, "a model has at most %d operands", MOST_OPERANDS);
    if (b->n_operands == b->room) {
        uint32_t room = 2 * b->room + 8;
        operand *operands = realloc(b->operands, room * sizeof *operands);
        if (!operands) return fail(-ENOMEM, "no memory for an operand");
        b->operands = operands, b->room = room;
    }
    operand *at = &b->operands[b->n_operands];
    *at = *o;
    if (o->rank) memcpy(at->shape, shape, o->rank * sizeof *shape);
    return (int)b->n_operands++;
}

static int write_all(int fd, const void *bytes, uint64_t n, uint64_t at) {
    for (uint64_t done = 0; done < n;) {
        ssize_t count = pwrite(fd, (const char *)bytes + done, n - done, (off_t)(at + done));
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return fail_kernel("writing a model to memory");
        done += (uint64_t)count;
    }
    return 0;
}

static int add_constant(builder *b, operand *o, const uint32_t *shape, const void *bytes,
                        uint64_t n) {
    uint64_t offset = (b->constants + ALIGN - 1) / ALIGN * ALIGN;
    o->lifetime = CONSTANT, o->offset = offset, o->bytes = n;
    int r = write_all(b->memory, bytes, n, offset);
    if (!r) r = add_operand(b, o, shape);
    if (r >= 0) b->constants = offset + n;
    return r;
}

int burst_builder_operand(burst_builder *handle, int type, uint32_t rank, const uint32_t *shape,
                          float scale, int32_t zero_point) {
    int r;
    builder *b = builder_take(handle, &r);
    if (!b) return r;
    operand o = {.type = type, .rank = rank, .scale = scale, .zero_point = zero_point};
    r = add_operand(b, &o, shape);
    builder_put(b);
    return r;
}

int burst_builder_constant(burst_builder *handle, int type, uint32_t rank, const uint32_t *shape,
                           float scale, int32_t zero_point, const void *bytes, size_t n) {
    int r;
    builder *b = builder_take(handle, &r);
    if (!b) return r;
    operand o = {.type = type, .rank = rank, .scale = scale, .zero_point = zero_point};
    r = bytes && n ? add_constant(b, &o, shape, bytes, n) : fail(-EINVAL, "a constant of no bytes");
    builder_put(b);
    return r;
}

static int put_indices(builder *b, message *m, uint32_t n, const uint32_t *indices) {
    if (n && !indices) return fail(-EINVAL, "NULL where %u indices of operands are due", n);
    put_array(m, n);
    for (uint32_t i = 0; i < n; i++) {
        if (indices[i] >= b->n_operands)
            return fail(-EINVAL, "operand %u: the model has %u", indices[i], b->n_operands);
        put_uint(m, indices[i]);
    }
    return m->is_broken ? fail(-ENOMEM, "no memory for a model") : 0;
}

static int add_operation(builder *b, const char *name, uint32_t n_inputs, const uint32_t *inputs,
                         uint32_t n_outputs, const uint32_t *outputs) {
    size_t before = b->operations.length;
    put_array(&b->operations, 3);
    put_text(&b->operations, name);
    int r = put_indices(b, &b->operations, n_inputs, inputs);
    if (!r) r = put_indices(b, &b->operations, n_outputs, outputs);
    if (r) b->operations.length = before;
    else b->n_operations++;
    return r;
}

int burst_builder_operation(burst_builder *handle, const char *name, uint32_t n_inputs,
                            const uint32_t *inputs, uint32_t n_outputs, const uint32_t *outputs) {
    int r;
    builder *b = builder_take(handle, &r);
    if (!b) return r;
    r = name ? add_operation(b, name, n_inputs, inputs, n_outputs, outputs)
             : fail(-EINVAL, "NULL where an operation's name is due");
    builder_put(b);
    return r;
}

static void mark(builder *b, uint32_t n, const uint32_t *indices, int lifetime) {
    for (uint32_t i = 0; i < n; i++) b->operands[indices[i]].lifetime = lifetime;
}

static int finish(builder *b, uint32_t n_inputs, const uint32_t *inputs, uint32_t n_outputs,
                  const uint32_t *outputs) {
    if (b->ends.length) return fail(-EINVAL, "this model is finished");
    int r = put_indices(b, &b->ends, n_inputs, inputs);
    if (!r) r = put_indices(b, &b->ends, n_outputs, outputs);
    if (r) return b->ends.length = 0, r;
    mark(b, n_inputs, inputs, INPUT);
    mark(b, n_outputs, outputs, OUTPUT);
    return 0;
}

int burst_builder_finish(burst_builder *handle, uint32_t n_inputs, const uint32_t *inputs,
                         uint32_t n_outputs, const uint32_t *outputs) {
    int r;
    builder *b = builder_take(handle, &r);
    if (!b) return r;
    r = finish(b, n_inputs, inputs, n_outputs, outputs);
    builder_put(b);
    return r;
}

/* ---- as it travels --------------------------------------------------------------------------- */

static void put_operand(message *m, const operand *o) {
    put_array(m, 8);
    put_int(m, o->type);
    put_array(m, o->rank);
    for (uint32_t i = 0; i < o->rank; i++) put_uint(m, o->shape[i]);
    put_double(m, (double)o->scale);
    put_int(m, o->zero_point);
    put_int(m, o->lifetime);
    if (o->lifetime == CONSTANT) put_array(m, 2), put_uint(m, o->offset), put_uint(m, o->bytes);
    else put_nil(m);
    put_nil(m), put_nil(m);
}

static void put_file_type(message *m, int number, const char *word, const char *code) {
    put_array(m, 4);
    put_int(m, number & 0xffff);
    put_text(m, word), put_text(m, code);
    put_bool(m, false);
}

static void put_extension(message *m, uint32_t types) {
    put_array(m, 1);
    put_array(m, 3);
    put_text(m, "burst.file");
    put_int(m, 1);
    put_array(m, 1 + (uint32_t)__builtin_popcount(types));
    put_file_type(m, FILE_BYTES, "BYTES", "|u1");
    for (int i = 0; i < FILE_TYPES; i++)
        if (types >> i & 1)
            put_file_type(m, FILE_TENSORS + i, file_types[i].word, file_types[i].code);
}

static int put_model(const builder *b, message *m) {
    put_array(m, b->is_file ? 4 : 3);
    put_int(m, 1), put_bool(m, false), put_int(m, 1);
    if (b->is_file) put_extension(m, b->file_types);
    put_array(m, 4);
    put_uint(m, b->n_operands), put_uint(m, b->n_operations);
    put_bytes(m, b->ends.bytes, b->ends.length);
    for (uint32_t i = 0; i < b->n_operands; i++) put_operand(m, &b->operands[i]);
    put_bytes(m, b->operations.bytes, b->operations.length);
    return m->is_broken || m->length > MOST_MESSAGE
               ? fail(-ENOMEM, "no memory for a model's structure, or it is too large")
               : 0;
}

/* A sealed copy of its own, so that the builder may go on, or be freed. */
static int seal(builder *b, int *memory, uint64_t *offset, uint64_t *bytes) {
    message m = {0};
    int fd = memfd_create("burst-model", MFD_CLOEXEC | MFD_ALLOW_SEALING), r = put_model(b, &m);
    if (fd < 0) return message_free(&m), fail_kernel("memfd_create");
    *offset = b->constants, *bytes = m.length;
    void *constants =
        b->constants && !r ? mmap(NULL, b->constants, PROT_READ, MAP_SHARED, b->memory, 0) : NULL;
    if (constants == MAP_FAILED) r = fail_kernel("mapping constants"), constants = NULL;
    if (!r && (r = -posix_fallocate(fd, 0, (off_t)(*offset + *bytes))))
        fail(r, "no memory left for a model");
    if (!r && constants) r = write_all(fd, constants, b->constants, 0);
    if (!r) r = write_all(fd, m.bytes, m.length, *offset);
    if (!r && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL))
        r = fail_kernel("sealing a model");
    if (constants) munmap(constants, b->constants);
    message_free(&m);
    if (r) return close(fd), r;
    return *memory = fd, 0;
}

/* ---- prepared models ------------------------------------------------------------------------- */

int compiled_prepare(compiled *p, uint64_t deadline) {
    client *c = p->client;
    pthread_mutex_lock(&c->lock);
    int r = 0;
    if (p->epoch != c->epoch) {
        int64_t values;
        message *m = client_begin(c, "prepare", 6);
        put_array(m, 2);
        put_uint(m, p->offset), put_uint(m, p->bytes);
        put_nil(m), put_nil(m);
        put_text(m, p->preference);
        put_uint(m, deadline);
        put_int(m, p->priority);
        m->fds[m->n_fds++] = p->memory;
        r = client_call(c, deadline, &values);
        if (!r) message_close_fds(&c->m);
        if (!r && (values < 1 || !take_as(&c->m, INTEGER, &p->number)))
            r = fail(-EBADMSG, "prepare was not answered with a number");
        if (!r) p->epoch = c->epoch;
    }
    pthread_mutex_unlock(&c->lock);
    return r;
}

uint64_t compiled_epoch(compiled *p) {
    pthread_mutex_lock(&p->client->lock);
    uint64_t epoch = p->epoch;
    pthread_mutex_unlock(&p->client->lock);
    return epoch;
}

static void destroy_compiled(object *o) {
    compiled *p = (compiled *)o;
    if (o->generation == handle_generation()) {
        pthread_mutex_lock(&p->client->lock);
        if (p->epoch == p->client->epoch) client_tell(p->client, "free", p->number);
        pthread_mutex_unlock(&p->client->lock);
    }
    object_put(p->client);
    close(p->memory);
    free(p);
}

/* Owns `memory`. */
static int prepare(burst_client *handle, int memory, uint64_t offset, uint64_t bytes,
                   uint64_t deadline, burst_compiled **out) {
    int r;
    client *c = handle_take(handle, CLIENT, &r);
    compiled *p = c ? calloc(1, sizeof *p) : NULL;
    if (!p) {
        if (c) object_put(c), r = fail(-ENOMEM, "no memory for a model");
        return close(memory), r;
    }
    *p = (compiled){.client = c, .memory = memory, .offset = offset, .bytes = bytes};
    pthread_mutex_lock(&c->lock);
    p->priority = c->priority, p->preference = c->preference;
    pthread_mutex_unlock(&c->lock);
    r = compiled_prepare(p, deadline);
    if (!r && !(r = handle_new(&p->head, COMPILED, destroy_compiled, out))) return 0;
    p->head.generation = handle_generation();
    destroy_compiled(&p->head);
    return r;
}

int burst_prepare(burst_client *client, burst_builder *handle, uint64_t deadline,
                  burst_compiled **out) {
    int r, memory;
    uint64_t offset, bytes;
    if (!out) return fail(-EINVAL, "NULL where room for a model is due");
    builder *b = builder_take(handle, &r);
    if (!b) return r;
    r = b->ends.length ? seal(b, &memory, &offset, &bytes)
                       : fail(-EINVAL, "this model is not finished: call burst_builder_finish");
    builder_put(b);
    return r ? r : prepare(client, memory, offset, bytes, deadline, out);
}

int burst_prepare_encoded(burst_client *client, int memory, uint64_t offset, uint64_t bytes,
                          uint64_t deadline, burst_compiled **out) {
    if (!out) return fail(-EINVAL, "NULL where room for a model is due");
    int own = fcntl(memory, F_DUPFD_CLOEXEC, 0);
    return own < 0 ? fail_kernel("the memory of a model")
                   : prepare(client, own, offset, bytes, deadline, out);
}

int burst_compiled_free(burst_compiled *handle) {
    void *p;
    int r = handle_close(handle, COMPILED, &p);
    if (!r) object_put(p);
    return r;
}

/* ---- model files ----------------------------------------------------------------------------- */

static int file_operand(builder *b, const burst_file_tensor *t) {
    operand o = {.rank = t->rank, .type = -1};
    for (int i = 0; t->dtype && i < HAL_TYPES; i++)
        if (!strcmp(t->dtype, hal_types[i].dtype)) o.type = hal_types[i].type;
    for (int i = 0; t->dtype && i < FILE_TYPES; i++) {
        if (strcmp(t->dtype, file_types[i].dtype)) continue;
        o.type = FILE_TENSORS + i;
        b->file_types |= 1u << i;
    }
    if (o.type < 0) return fail(-EINVAL, "dtype '%s' is not carried", t->dtype ? t->dtype : "NULL");
    return add_operand(b, &o, t->shape);
}

static int add_file(builder *b, const char *path) {
    struct stat s;
    int fd = open(path, O_RDONLY | O_CLOEXEC), r;
    if (fd < 0) return fail_kernel(path);
    void *bytes = !fstat(fd, &s) && s.st_size
                      ? mmap(NULL, (size_t)s.st_size, PROT_READ, MAP_PRIVATE, fd, 0)
                      : MAP_FAILED;
    close(fd);
    if (bytes == MAP_FAILED) return fail(-EINVAL, "%s is empty, or cannot be mapped", path);
    uint32_t shape[] = {(uint32_t)s.st_size};
    operand o = {.type = FILE_BYTES, .rank = 1};
    r = s.st_size > INT32_MAX ? fail(-EFBIG, "%s has more than 2 GiB", path)
                              : add_constant(b, &o, shape, bytes, (uint64_t)s.st_size);
    munmap(bytes, (size_t)s.st_size);
    return r;
}

/* The file, its inputs, its outputs, in this order; one operation takes and gives them all. */
static int build_file(builder *b, const char *path, const char *operation, uint32_t n_inputs,
                      const burst_file_tensor *inputs, uint32_t n_outputs,
                      const burst_file_tensor *outputs) {
    uint32_t n = 1 + n_inputs + n_outputs, *all = malloc(n * sizeof *all);
    if (!all) return fail(-ENOMEM, "no memory for a model");
    for (uint32_t i = 0; i < n; i++) all[i] = i;
    b->is_file = true;
    int r = add_file(b, path);
    for (uint32_t i = 0; i < n_inputs && r >= 0; i++) r = file_operand(b, &inputs[i]);
    for (uint32_t i = 0; i < n_outputs && r >= 0; i++) r = file_operand(b, &outputs[i]);
    if (r >= 0) r = add_operation(b, operation, 1 + n_inputs, all, n_outputs, all + 1 + n_inputs);
    if (!r) r = finish(b, n_inputs, all + 1, n_outputs, all + 1 + n_inputs);
    free(all);
    return r;
}

static const char *operation_of(const char *path) {
    const char *suffix = path ? strrchr(path, '.') : NULL;
    if (suffix && !strcmp(suffix, ".onnx")) return "burst.file.ONNX";
    return suffix && !strcmp(suffix, ".tflite") ? "burst.file.TFLITE" : NULL;
}

int burst_prepare_file(burst_client *client, const char *path, uint32_t n_inputs,
                       const burst_file_tensor *inputs, uint32_t n_outputs,
                       const burst_file_tensor *outputs, uint64_t deadline, burst_compiled **out) {
    const char *operation = operation_of(path);
    if (!operation)
        return fail(-EINVAL, "%s: .onnx and .tflite are what is prepared as it is",
                    path ? path : "NULL");
    if (!out || (n_inputs && !inputs) || (n_outputs && !outputs) || n_inputs > MOST_OPERANDS ||
        n_outputs > MOST_OPERANDS)
        return fail(-EINVAL,
                    "NULL where inputs, outputs or room for a model are due, or too many of them");
    builder *b = new_builder();
    if (!b) return -ENOMEM;
    int memory;
    uint64_t offset, bytes;
    int r = build_file(b, path, operation, n_inputs, inputs, n_outputs, outputs);
    if (!r) r = seal(b, &memory, &offset, &bytes);
    destroy_builder(&b->head);
    return r ? r : prepare(client, memory, offset, bytes, deadline, out);
}
