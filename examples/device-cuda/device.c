/* A driver for Burst on CUDA, in C: ADD and FULLY_CONNECTED of float32. Read it from its end: the table is what Burst sees.
 *
 * Each execution has a stream, and memory of the GPU for every operand that is not a buffer: `execute` copies inputs in,
 * adds a kernel for each operation, copies outputs out, and waits. Buffers of this driver (`allocate`) and pools of
 * clients in memory of the GPU (`map_memory`, the kind "nvidia.cuda_fd") are read and written where they lie.
 */
#include "kernels.h"

#include "burst_device.h"

#include <cuda.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct burst_device {
    const burst_host *host;
    int64_t uuid[2]; /* of the GPU, as pools have it */
};

struct burst_prepared {
    burst_device *device;
    const burst_subgraph *graph;
    float **constants; /* by operand, on the GPU; NULL: it is none, or no tensor */
};

struct burst_buffer {
    float *values; /* on the GPU */
    uint64_t bytes;
    bool is_mapped; /* by `map_memory` */
};

typedef struct {
    float *values; /* on the GPU */
    void *client;  /* memory of the client's, which each run copies from or to; NULL: none */
    bool is_own;   /* allocated by `bind` */
} place;

struct burst_execution {
    burst_prepared *prepared;
    cudaStream_t stream;
    uint64_t *rooms; /* bytes that the client gives, by output */
    cudaError_t failed;
    place places[]; /* by operand */
};

static burst_status fail(burst_why *why, cudaError_t error, const char *what) {
    bool is_memory = error == cudaErrorMemoryAllocation;
    return burst_fail(why, is_memory ? BURST_RESOURCE_EXHAUSTED_TRANSIENT : BURST_GENERAL_FAILURE, "%s: %s", what,
                      cudaGetErrorString(error));
}

/* ---- the device ---------------------------------------------------------------------------------------------------- */

/* Takes no context: a process that only answers `supported` opens the device, too. */
static burst_status open_device(const burst_host *host, burst_device **device, burst_why *why) {
    static burst_device the_device; /* there is one in a process */
    CUuuid uuid;
    CUdevice gpu;
    if (cuInit(0) || cuDeviceGet(&gpu, 0) || cuDeviceGetUuid(&uuid, gpu))
        return burst_fail(why, BURST_DEVICE_UNAVAILABLE, "CUDA finds no GPU; nvidia-smi must list one");
    for (int i = 0; i < 2; i++) {
        uint64_t bits = 0;
        for (int k = 0; k < 8; k++) bits = bits << 8 | (unsigned char)uuid.bytes[8 * i + k];
        the_device.uuid[i] = (int64_t)bits;
    }
    the_device.host = host;
    *device = &the_device;
    return BURST_NONE;
}

static void close_device(burst_device *device) { (void)device; }

/* ---- models -------------------------------------------------------------------------------------------------------- */

static bool is_tensor(const burst_operand *operand) {
    return operand->type == BURST_TENSOR_FLOAT32 && operand->rank && burst_operand_bytes(operand);
}

static bool is_same_shape(const burst_operand *a, const burst_operand *b) {
    return a->rank == b->rank && !memcmp(a->dimensions, b->dimensions, a->rank * sizeof *a->dimensions);
}

/* Why the driver does not take an operation; NULL: it takes it. */
static const char *obstacle(const burst_subgraph *graph, const burst_operation *operation) {
    bool is_add = operation->type == BURST_OPERATION_ADD;
    if (!is_add && operation->type != BURST_OPERATION_FULLY_CONNECTED) return "this driver has ADD and FULLY_CONNECTED";
    uint32_t tensors = is_add ? 2 : 3;
    const burst_operand *result = burst_output_of(graph, operation, 0), *in[3] = {0};
    for (uint32_t i = 0; i < tensors; i++)
        if (!is_tensor(in[i] = burst_input_of(graph, operation, i))) return "its tensors have to be float32, of known sizes";
    if (!is_tensor(result)) return "its result has to be float32, of known sizes";
    const burst_operand *activation = burst_input_of(graph, operation, tensors);
    if (!burst_is_constant(activation) || burst_scalar_int(activation, -1)) return "its activation has to be NONE";
    if (is_add && !(is_same_shape(in[0], in[1]) && is_same_shape(in[0], result))) return "it does not broadcast";
    if (!is_add && (in[0]->rank != 2 || result->rank != 2)) return "its input has to be a matrix";
    return NULL;
}

static burst_status supported(burst_device *device, const burst_model *model, const burst_answers *answers,
                              burst_why *why) {
    (void)device, (void)why;
    for (uint32_t i = 0; i < model->main_graph->n_operations; i++) {
        const char *reason = obstacle(model->main_graph, burst_operation_at(model->main_graph, i));
        if (reason) answers->refuse(answers->context, i, reason);
    }
    return BURST_NONE;
}

static void release(burst_prepared *prepared) {
    for (uint32_t i = 0; prepared->constants && i < prepared->graph->n_operands; i++) cudaFree(prepared->constants[i]);
    free(prepared->constants), free(prepared);
}

static burst_status prepare(burst_device *device, const burst_model *model, const burst_preparation *preparation,
                            burst_prepared **prepared, burst_why *why) {
    burst_prepared *made = calloc(1, sizeof *made);
    if (!made) return burst_fail(why, BURST_RESOURCE_EXHAUSTED_TRANSIENT, "no memory");
    made->device = device, made->graph = model->main_graph;
    made->constants = calloc(made->graph->n_operands + 1, sizeof *made->constants);
    burst_status status = made->constants ? BURST_NONE : BURST_RESOURCE_EXHAUSTED_TRANSIENT;
    for (uint32_t i = 0; !status && i < made->graph->n_operands; i++) {
        const burst_operand *operand = burst_operand_at(made->graph, i);
        if (!burst_is_constant(operand) || !is_tensor(operand)) continue;
        size_t bytes = operand->value_bytes;
        cudaError_t error = cudaMalloc((void **)&made->constants[i], bytes);
        if (!error) error = cudaMemcpy(made->constants[i], operand->value, bytes, cudaMemcpyHostToDevice);
        status = error ? fail(why, error, "weights") : preparation->pace(preparation->context);
    }
    if (status) return release(made), status;
    *prepared = made;
    return BURST_NONE;
}

/* ---- executions ---------------------------------------------------------------------------------------------------- */

static void unbind(burst_execution *e) {
    for (uint32_t i = 0; i < e->prepared->graph->n_operands; i++)
        if (e->places[i].is_own) cudaFree(e->places[i].values);
    if (e->stream) cudaStreamDestroy(e->stream);
    free(e->rooms), free(e);
}

static cudaError_t allocate_place(burst_execution *e, uint32_t operand) {
    place *p = &e->places[operand];
    cudaError_t error = cudaMalloc((void **)&p->values, burst_operand_bytes(burst_operand_at(e->prepared->graph, operand)));
    p->is_own = !error;
    return error;
}

/* NULL: it lies in memory of the GPU, or in memory that the client copies to and from. */
static const char *bind_argument(burst_execution *e, uint32_t operand, const burst_argument *argument, bool is_input) {
    uint64_t bytes = burst_operand_bytes(burst_operand_at(e->prepared->graph, operand));
    if (argument->buffer && argument->buffer->bytes < bytes) return "a buffer is smaller than its operand";
    if (!argument->buffer && (!argument->memory || (is_input && argument->bytes < bytes))) return "an argument is too small";
    if (argument->buffer) e->places[operand].values = argument->buffer->values;
    else if (!(e->failed = allocate_place(e, operand))) e->places[operand].client = argument->memory;
    return NULL;
}

static burst_status bind(burst_prepared *prepared, const burst_binding *binding, burst_execution **execution,
                         burst_why *why) {
    const burst_subgraph *graph = prepared->graph;
    burst_execution *e = calloc(1, sizeof *e + graph->n_operands * sizeof *e->places);
    if (!e) return burst_fail(why, BURST_RESOURCE_EXHAUSTED_TRANSIENT, "no memory");
    e->prepared = prepared, e->rooms = calloc(binding->n_outputs + 1, sizeof *e->rooms);
    const char *wrong = NULL;
    e->failed = e->rooms ? cudaStreamCreateWithFlags(&e->stream, cudaStreamNonBlocking) : cudaErrorMemoryAllocation;
    for (uint32_t i = 0; !wrong && !e->failed && i < binding->n_inputs; i++)
        wrong = bind_argument(e, graph->inputs[i], burst_input_at(binding, i), true);
    for (uint32_t i = 0; !wrong && !e->failed && i < binding->n_outputs; i++) {
        const burst_argument *given = burst_output_at(binding, i);
        e->rooms[i] = given->buffer ? given->buffer->bytes : given->bytes;
        wrong = bind_argument(e, graph->outputs[i], given, false);
    }
    for (uint32_t i = 0; !wrong && !e->failed && i < graph->n_operands; i++) {
        if (prepared->constants[i]) e->places[i].values = prepared->constants[i];
        if (burst_operand_at(graph, i)->lifetime == BURST_TEMPORARY_VARIABLE) e->failed = allocate_place(e, i);
    }
    cudaError_t failed = e->failed;
    if (wrong || failed) unbind(e);
    if (failed) return fail(why, failed, "memory of an execution");
    if (wrong) return burst_fail(why, BURST_INVALID_ARGUMENT, "%s", wrong);
    *execution = e;
    return BURST_NONE;
}

static cudaError_t launch(burst_execution *e, const burst_operation *operation) {
    const burst_subgraph *graph = e->prepared->graph;
    const place *at = e->places;
    const uint32_t *in = operation->inputs;
    const burst_operand *result = burst_output_of(graph, operation, 0), *first = burst_operand_at(graph, in[0]);
    float *to = at[operation->outputs[0]].values;
    if (operation->type == BURST_OPERATION_ADD) {
        uint32_t n = (uint32_t)burst_elements(result->rank, result->dimensions);
        return launch_add(at[in[0]].values, at[in[1]].values, to, n, e->stream);
    }
    uint32_t m = result->dimensions[0], n = result->dimensions[1], k = first->dimensions[1];
    return launch_gemm(at[in[0]].values, at[in[1]].values, at[in[2]].values, to, m, n, k, e->stream);
}

static cudaError_t copy(burst_execution *e, uint32_t operand, bool is_in) {
    const place *p = &e->places[operand];
    size_t bytes = burst_operand_bytes(burst_operand_at(e->prepared->graph, operand));
    if (!p->client) return cudaSuccess;
    void *to = is_in ? p->values : p->client, *from = is_in ? p->client : p->values;
    enum cudaMemcpyKind kind = is_in ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
    return cudaMemcpyAsync(to, from, bytes, kind, e->stream);
}

static burst_status execute(burst_execution *e, uint64_t deadline) {
    (void)deadline; /* the checkpoint knows it; nothing stops a kernel */
    const burst_subgraph *graph = e->prepared->graph;
    burst_status refused = e->prepared->device->host->checkpoint();
    if (refused) return refused;
    cudaError_t error = cudaSuccess;
    for (uint32_t i = 0; !error && i < graph->n_inputs; i++) error = copy(e, graph->inputs[i], true);
    for (uint32_t i = 0; !error && i < graph->n_operations; i++) error = launch(e, burst_operation_at(graph, i));
    for (uint32_t i = 0; !error && i < graph->n_outputs; i++) error = copy(e, graph->outputs[i], false);
    cudaError_t ended = cudaStreamSynchronize(e->stream); /* also after a failure: nothing goes on in the client's memory */
    e->failed = error ? error : ended;
    return e->failed ? BURST_GENERAL_FAILURE : BURST_NONE;
}

static void explain(const burst_execution *e, burst_why *why) { fail(why, e->failed, "CUDA"); }

static burst_status output_shape(const burst_execution *e, uint32_t output, burst_shape *shape) {
    const burst_subgraph *graph = e->prepared->graph;
    const burst_operand *operand = burst_operand_at(graph, graph->outputs[output]);
    if (operand->rank > 8) return BURST_GENERAL_FAILURE;
    shape->rank = operand->rank;
    memcpy(shape->dimensions, operand->dimensions, operand->rank * sizeof *operand->dimensions);
    shape->is_sufficient = burst_operand_bytes(operand) <= e->rooms[output];
    return BURST_NONE;
}

/* ---- memory of the GPU --------------------------------------------------------------------------------------------- */

static burst_status allocate(burst_device *device, const burst_buffer_description *description, burst_buffer **buffer,
                             uint64_t *occupied, burst_why *why) {
    (void)device;
    burst_buffer *made = calloc(1, sizeof *made);
    cudaError_t error = made ? cudaMalloc((void **)&made->values, description->bytes) : cudaErrorMemoryAllocation;
    if (!error && (error = cudaMemset(made->values, 0, description->bytes))) cudaFree(made->values);
    if (error) return free(made), fail(why, error, "a buffer");
    made->bytes = description->bytes;
    *buffer = made, *occupied = description->bytes;
    return BURST_NONE;
}

static void unmap(CUdeviceptr at, size_t bytes) { cuMemUnmap(at, bytes), cuMemAddressFree(at, bytes); }

static void free_buffer(burst_buffer *buffer) {
    if (buffer->is_mapped) unmap((CUdeviceptr)(uintptr_t)buffer->values, buffer->bytes);
    else cudaFree(buffer->values);
    free(buffer);
}

static burst_status copy_from(burst_buffer *buffer, const void *source, uint64_t bytes, burst_why *why) {
    cudaError_t error = cudaMemcpy(buffer->values, source, bytes, cudaMemcpyHostToDevice);
    return error ? fail(why, error, "copy_from") : BURST_NONE;
}

static burst_status copy_to(burst_buffer *buffer, void *target, uint64_t bytes, burst_why *why) {
    cudaError_t error = cudaMemcpy(target, buffer->values, bytes, cudaMemcpyDeviceToHost);
    return error ? fail(why, error, "copy_to") : BURST_NONE;
}

/* What `cuMemExportToShareableHandle` has exported in the client. Its size is the object's: CUDA maps no other. */
static burst_status map_memory(burst_device *device, const burst_handle *handle, burst_buffer **buffer, burst_why *why) {
    CUmemGenericAllocationHandle shared;
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    CUdeviceptr at = 0;
    if (handle->n_fields != 2) return burst_fail(why, BURST_INVALID_ARGUMENT, "give two fields: the GPU's UUID");
    if (handle->fields[0] != device->uuid[0] || handle->fields[1] != device->uuid[1])
        return burst_fail(why, BURST_GENERAL_FAILURE, "the memory is of another GPU");
    burst_buffer *made = calloc(1, sizeof *made);
    if (!made) return burst_fail(why, BURST_RESOURCE_EXHAUSTED_TRANSIENT, "no memory");
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    void *fd = (void *)(uintptr_t)handle->fd;
    CUresult error = cudaSetDevice(0) ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS; /* of this thread */
    if (!error) error = cuMemImportFromShareableHandle(&shared, fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (error) return free(made), burst_fail(why, BURST_GENERAL_FAILURE, "CUDA does not import it: error %d", error);
    if (!(error = cuMemAddressReserve(&at, handle->bytes, 0, 0, 0)) && (error = cuMemMap(at, handle->bytes, 0, shared, 0)))
        cuMemAddressFree(at, handle->bytes), at = 0;
    if (!error && (error = cuMemSetAccess(at, handle->bytes, &access, 1))) unmap(at, handle->bytes);
    cuMemRelease(shared); /* the mapping keeps it */
    if (error) return free(made), burst_fail(why, BURST_GENERAL_FAILURE, "CUDA does not map it: error %d", error);
    *made = (burst_buffer){.values = (float *)(uintptr_t)at, .bytes = handle->bytes, .is_mapped = true};
    *buffer = made;
    return BURST_NONE;
}

/* ---- the table ----------------------------------------------------------------------------------------------------- */

static const char *const reads[] = {"/sys/devices/system/cpu", "/sys/bus/pci/devices", "/proc/cpuinfo", "/sys/module",
                                    "/dev/nvidia-caps", NULL};
static const char *const writes[] = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia0", NULL};
static const char *const calls[] = {"ioctl", NULL}, *const kinds[] = {"nvidia.cuda_fd", NULL};
static const burst_needs needs = {sizeof needs, reads, writes, calls};

static const burst_device_table table = {
    .abi = BURST_DEVICE_ABI, .size = sizeof table, .name = "cuda-example", .version = "1", .type = BURST_GPU,
    .is_shareable = 1, .memory_kinds = kinds, .needs = &needs,
    .open = open_device, .close = close_device, .supported = supported, .prepare = prepare, .release = release,
    .bind = bind, .unbind = unbind, .execute = execute, .output_shape = output_shape, .explain = explain,
    .allocate = allocate, .free_buffer = free_buffer, .copy_from = copy_from, .copy_to = copy_to,
    .map_memory = map_memory,
};

__attribute__((visibility("default"))) const burst_device_table *burst_device_get(uint32_t abi) {
    return abi == BURST_DEVICE_ABI ? &table : NULL;
}
