/* A complete driver for the tests: ADD, MUL and RELU of float32 tensors of one shape; buffers in a native layout, memory of
 * a kind of its own, stated capabilities and needs, and hints, which it logs. */
#define _DEFAULT_SOURCE
#include "burst_device.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct burst_device {
    const burst_host *host;
};

struct burst_prepared {
    const burst_model *model;
    burst_device *device;
};

struct burst_buffer {
    float *values; /* the last one first: our native layout; memory that is mapped has the HAL's */
    uint64_t n, mapped_bytes;
};

struct burst_execution {
    burst_prepared *prepared;
    burst_buffer **buffers; /* of each operand: where its value lies in our layout, or NULL */
    float **values;     /* of each operand: the client's memory, a constant, or our own */
    unsigned char *own; /* whether it is our own */
    uint64_t n;         /* elements of each tensor */
    uint64_t room[8];
};

#ifndef AT_ONCE
#define AT_ONCE 0
#endif
#ifndef VERSION
#define VERSION "1"
#endif

enum { ADD = 0, MUL = 18, RELU = 19, TENSOR_FLOAT32 = 3 };

static burst_status toy_open(const burst_host *host, burst_device **device, burst_why *why) {
    *device = (burst_device *)calloc(1, sizeof **device);
    if (!*device) return burst_fail(why, BURST_RESOURCE_EXHAUSTED_TRANSIENT, "no memory");
    (*device)->host = host;
    return BURST_NONE;
}

static void toy_close(burst_device *device) { free(device); }

static int same_shape(const burst_operand *a, const burst_operand *b) {
    return a->rank == b->rank && !memcmp(a->dimensions, b->dimensions, a->rank * sizeof *a->dimensions);
}

/* Why the operation is not supported; NULL: it is. */
static const char *obstacle(const burst_subgraph *graph, const burst_operation *operation) {
    if (operation->type != ADD && operation->type != MUL && operation->type != RELU)
        return "only ADD, MUL and RELU are supported";
    const burst_operand *a = burst_input_of(graph, operation, 0), *result = burst_output_of(graph, operation, 0);
    if (a->type != TENSOR_FLOAT32) return "only TENSOR_FLOAT32 is supported";
    if (burst_elements(a->rank, a->dimensions) == UINT64_MAX || !a->rank) return "its dimensions have to be known";
    if (!same_shape(a, result)) return "broadcasting is not supported";
    if (operation->type == RELU) return NULL;
    if (!same_shape(a, burst_input_of(graph, operation, 1))) return "broadcasting is not supported";
    const burst_operand *activation = burst_input_of(graph, operation, 2);
    return burst_is_constant(activation) && !burst_scalar_int(activation, -1) ? NULL : "fused activations are not supported";
}

static burst_status toy_supported(burst_device *device, const burst_model *model, const burst_answers *answers, burst_why *why) {
    (void)device, (void)why;
    for (uint32_t i = 0; i < model->main_graph->n_operations; i++) {
        const char *reason = obstacle(model->main_graph, burst_operation_at(model->main_graph, i));
        if (reason) answers->refuse(answers->context, i, reason);
    }
    return BURST_NONE;
}

static burst_status toy_prepare(burst_device *device, const burst_model *model, const burst_preparation *preparation,
                                burst_prepared **prepared, burst_why *why) {
    int32_t status = preparation->pace(preparation->context);
    if (status) return burst_fail(why, status, "given up");
    for (uint32_t i = 0; i < preparation->n_parts; i++)
        if (preparation->part_bytes[i] != 3 || memcmp(preparation->parts[i], "toy", 3))
            return burst_fail(why, BURST_GENERAL_FAILURE, "part %u is not ours", i);
    *prepared = (burst_prepared *)calloc(1, sizeof **prepared);
    if (!*prepared) return burst_fail(why, BURST_RESOURCE_EXHAUSTED_TRANSIENT, "no memory");
    (*prepared)->model = model, (*prepared)->device = device;
    return BURST_NONE;
}

static void toy_release(burst_prepared *prepared) { free(prepared); }

static void toy_unbind(burst_execution *e) {
    const burst_subgraph *graph = e->prepared->model->main_graph;
    for (uint32_t i = 0; e->values && e->own && i < graph->n_operands; i++)
        if (e->own[i]) free(e->values[i]);
    free(e->values), free(e->own), free(e->buffers), free(e);
}

static void place(burst_execution *e, uint32_t operand, const void *memory) {
    e->values[operand] = (float *)(uintptr_t)memory;
}

/* Where an argument lies. Of a buffer in our layout execute makes a copy. */
static void place_argument(burst_execution *e, uint32_t operand, const burst_argument *argument) {
    if (!argument->buffer) place(e, operand, argument->memory);
    else if (argument->buffer->mapped_bytes) place(e, operand, argument->buffer->values);
    else {
        e->buffers[operand] = argument->buffer;
        e->values[operand] = (float *)malloc(argument->bytes);
        e->own[operand] = 1;
    }
}

static void reverse(float *to, const float *from, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) to[i] = from[n - 1 - i];
}

static burst_status toy_bind(burst_prepared *prepared, const burst_binding *binding, burst_execution **execution, burst_why *why) {
    const burst_subgraph *graph = prepared->model->main_graph;
    burst_execution *e = (burst_execution *)calloc(1, sizeof *e);
    if (!e) return burst_fail(why, BURST_RESOURCE_EXHAUSTED_TRANSIENT, "no memory");
    e->prepared = prepared;
    e->values = (float **)calloc(graph->n_operands, sizeof *e->values);
    e->own = (unsigned char *)calloc(graph->n_operands, 1);
    e->buffers = (burst_buffer **)calloc(graph->n_operands, sizeof *e->buffers);
    if (!e->values || !e->own || !e->buffers || binding->n_outputs > 8) {
        toy_unbind(e);
        return burst_fail(why, BURST_RESOURCE_EXHAUSTED_TRANSIENT, "no memory, or more than 8 outputs");
    }
    for (uint32_t i = 0; i < binding->n_inputs; i++) place_argument(e, graph->inputs[i], burst_input_at(binding, i));
    for (uint32_t i = 0; i < binding->n_outputs; i++) {
        place_argument(e, graph->outputs[i], burst_output_at(binding, i));
        e->room[i] = burst_output_at(binding, i)->bytes;
    }
    for (uint32_t i = 0; i < graph->n_operands; i++) {
        const burst_operand *operand = burst_operand_at(graph, i);
        if (burst_is_constant(operand)) place(e, i, operand->value);
        if (operand->lifetime != BURST_TEMPORARY_VARIABLE) continue;
        e->values[i] = (float *)malloc(burst_operand_bytes(operand));
        e->own[i] = 1;
    }
    *execution = e;
    return BURST_NONE;
}

static burst_status toy_execute(burst_execution *e, uint64_t deadline) {
    (void)deadline; /* the checkpoint knows it */
    const burst_subgraph *graph = e->prepared->model->main_graph;
    const burst_host *host = e->prepared->device->host;
    for (uint32_t i = 0; i < graph->n_inputs; i++) {
        const burst_buffer *buffer = e->buffers[graph->inputs[i]];
        if (buffer) reverse(e->values[graph->inputs[i]], buffer->values, buffer->n);
    }
    for (uint32_t i = 0; i < graph->n_operations; i++) {
        burst_status status = host->checkpoint();
        if (status) return status;
        const burst_operation *operation = burst_operation_at(graph, i);
        const burst_operand *result = burst_output_of(graph, operation, 0);
        uint64_t n = burst_elements(result->rank, result->dimensions);
        const float *a = e->values[operation->inputs[0]], *b = operation->n_inputs > 1 ? e->values[operation->inputs[1]] : a;
        float *to = e->values[operation->outputs[0]];
        for (uint64_t k = 0; k < n; k++)
            to[k] = operation->type == ADD ? a[k] + b[k] : operation->type == MUL ? a[k] * b[k] : fmaxf(a[k], 0);
    }
    for (uint32_t i = 0; i < graph->n_outputs; i++) {
        burst_buffer *buffer = e->buffers[graph->outputs[i]];
        if (buffer) reverse(buffer->values, e->values[graph->outputs[i]], buffer->n);
    }
    return BURST_NONE;
}

static burst_status toy_output_shape(const burst_execution *e, uint32_t output, burst_shape *shape) {
    const burst_subgraph *graph = e->prepared->model->main_graph;
    const burst_operand *operand = burst_operand_at(graph, graph->outputs[output]);
    shape->rank = operand->rank;
    memcpy(shape->dimensions, operand->dimensions, operand->rank * sizeof *operand->dimensions);
    shape->is_sufficient = burst_operand_bytes(operand) <= e->room[output];
    return BURST_NONE;
}

static burst_status toy_capabilities(burst_device *device, const burst_capabilities *capabilities, burst_why *why) {
    (void)device, (void)why;
    capabilities->put(capabilities->context, TENSOR_FLOAT32, 0.25f, 0.5f);
    capabilities->put(capabilities->context, -2, 0.125f, -1);
    return BURST_NONE;
}

static burst_status toy_allocate(burst_device *device, const burst_buffer_description *description, burst_buffer **buffer,
                                 uint64_t *occupied, burst_why *why) {
    (void)device;
    burst_buffer *b = (burst_buffer *)calloc(1, sizeof *b);
    float *values = b ? (float *)calloc(1, description->bytes) : NULL;
    if (!values || description->type != TENSOR_FLOAT32 || !burst_role_at(description, 0)->prepared) {
        free(values), free(b);
        return burst_fail(why, BURST_RESOURCE_EXHAUSTED_TRANSIENT, "no memory for %u roles", description->n_roles);
    }
    b->values = values, b->n = description->bytes / sizeof *values;
    *buffer = b, *occupied = description->bytes + sizeof *b;
    return BURST_NONE;
}

static void toy_free_buffer(burst_buffer *buffer) {
    if (buffer->mapped_bytes) munmap(buffer->values, buffer->mapped_bytes);
    else free(buffer->values);
    free(buffer);
}

static burst_status toy_copy_from(burst_buffer *buffer, const void *source, uint64_t bytes, burst_why *why) {
    if (bytes != buffer->n * sizeof(float)) return burst_fail(why, BURST_INVALID_ARGUMENT, "%u bytes", (unsigned)bytes);
    reverse(buffer->values, (const float *)source, buffer->n);
    return BURST_NONE;
}

static burst_status toy_copy_to(burst_buffer *buffer, void *target, uint64_t bytes, burst_why *why) {
    if (bytes != buffer->n * sizeof(float)) return burst_fail(why, BURST_INVALID_ARGUMENT, "%u bytes", (unsigned)bytes);
    reverse((float *)target, buffer->values, buffer->n);
    return BURST_NONE;
}

static void *toy_host_memory(burst_buffer *buffer) { return buffer->mapped_bytes ? buffer->values : NULL; }

/* fields: where the values begin in the memory, a multiple of the page's size. */
static burst_status toy_map_memory(burst_device *device, const burst_handle *handle, burst_buffer **buffer, burst_why *why) {
    (void)device;
    if (handle->n_fields != 1 || handle->bytes % sizeof(float))
        return burst_fail(why, BURST_INVALID_ARGUMENT, "give whole floats, and one field: their offset");
    void *values = mmap(NULL, handle->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, handle->fd, handle->fields[0]);
    if (values == MAP_FAILED) return burst_fail(why, BURST_INVALID_ARGUMENT, "the memory cannot be mapped");
    burst_buffer *b = (burst_buffer *)calloc(1, sizeof *b);
    if (!b) return burst_fail(why, BURST_RESOURCE_EXHAUSTED_TRANSIENT, "no memory");
    b->values = (float *)values, b->n = handle->bytes / sizeof(float), b->mapped_bytes = handle->bytes;
    *buffer = b;
    return BURST_NONE;
}

static void hint(const burst_host *host, const char *what, int32_t preference) {
    char text[64];
    snprintf(text, sizeof text, "%s %d", what, (int)preference);
    host->log(host->context, text);
}

static void toy_burst_began(burst_prepared *prepared, int32_t preference) { hint(prepared->device->host, "began", preference); }

static void toy_burst_ended(burst_prepared *prepared) { hint(prepared->device->host, "ended", 0); }

static void toy_rest(burst_device *device) { hint(device->host, "rest", 0); }

static burst_status toy_save(burst_prepared *prepared, const burst_saving *saving, burst_why *why) {
    (void)prepared, (void)why;
    saving->put(saving->context, 0, "toy", 3);
    return BURST_NONE;
}

static burst_device_table table;
static const char *const kinds[] = {"com.example.toy", NULL}, *const reads[] = {"/sys/class/toy", NULL}, *const calls[] = {"ioctl", NULL};
static burst_needs needs;

#if defined __GNUC__
__attribute__((visibility("default")))
#endif
const burst_device_table *burst_device_get(uint32_t abi) {
    if (abi != BURST_DEVICE_ABI) return NULL;
    table.abi = BURST_DEVICE_ABI, table.size = sizeof table;
    table.name = "toy", table.version = VERSION, table.type = BURST_CPU, table.is_shareable = 1;
    table.prepares_at_once = AT_ONCE;
    table.open = toy_open, table.close = toy_close, table.supported = toy_supported;
    table.prepare = toy_prepare, table.release = toy_release, table.bind = toy_bind, table.unbind = toy_unbind;
    table.execute = toy_execute, table.output_shape = toy_output_shape;
    table.capabilities = toy_capabilities, table.memory_kinds = kinds, table.save = toy_save;
    table.keeps_compilations = 1, table.n_data_files = 1;
    table.allocate = toy_allocate, table.free_buffer = toy_free_buffer, table.copy_from = toy_copy_from;
    table.copy_to = toy_copy_to, table.host_memory = toy_host_memory, table.map_memory = toy_map_memory;
    table.burst_began = toy_burst_began, table.burst_ended = toy_burst_ended, table.rest = toy_rest;
    needs.size = sizeof needs, needs.read_paths = reads, needs.system_calls = calls, table.needs = &needs;
    return &table;
}
