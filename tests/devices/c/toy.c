/* A complete driver for the tests: ADD, MUL and RELU of float32 tensors of one shape. */
#include "burst_device.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct burst_device {
    const burst_host *host;
};

struct burst_prepared {
    const burst_model *model;
    burst_device *device;
};

struct burst_execution {
    burst_prepared *prepared;
    float **values;     /* of each operand: the client's memory, a constant, or our own */
    unsigned char *own; /* whether it is our own */
    uint64_t n;         /* elements of each tensor */
    uint64_t room[8];
};

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
    free(e->values), free(e->own), free(e);
}

static void place(burst_execution *e, uint32_t operand, const void *memory) {
    e->values[operand] = (float *)(uintptr_t)memory;
}

static burst_status toy_bind(burst_prepared *prepared, const burst_binding *binding, burst_execution **execution, burst_why *why) {
    const burst_subgraph *graph = prepared->model->main_graph;
    burst_execution *e = (burst_execution *)calloc(1, sizeof *e);
    if (!e) return burst_fail(why, BURST_RESOURCE_EXHAUSTED_TRANSIENT, "no memory");
    e->prepared = prepared;
    e->values = (float **)calloc(graph->n_operands, sizeof *e->values);
    e->own = (unsigned char *)calloc(graph->n_operands, 1);
    if (!e->values || !e->own || binding->n_outputs > 8) {
        toy_unbind(e);
        return burst_fail(why, BURST_RESOURCE_EXHAUSTED_TRANSIENT, "no memory, or more than 8 outputs");
    }
    for (uint32_t i = 0; i < binding->n_inputs; i++) place(e, graph->inputs[i], burst_input_at(binding, i)->memory);
    for (uint32_t i = 0; i < binding->n_outputs; i++) {
        place(e, graph->outputs[i], burst_output_at(binding, i)->memory);
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
    const burst_subgraph *graph = e->prepared->model->main_graph;
    const burst_host *host = e->prepared->device->host;
    for (uint32_t i = 0; i < graph->n_operations; i++) {
        if (deadline != UINT64_MAX && host->now() > deadline) return BURST_MISSED_DEADLINE_TRANSIENT;
        if (i && host->checkpoint()) return BURST_GENERAL_FAILURE;
        const burst_operation *operation = burst_operation_at(graph, i);
        const burst_operand *result = burst_output_of(graph, operation, 0);
        uint64_t n = burst_elements(result->rank, result->dimensions);
        const float *a = e->values[operation->inputs[0]], *b = operation->n_inputs > 1 ? e->values[operation->inputs[1]] : a;
        float *to = e->values[operation->outputs[0]];
        for (uint64_t k = 0; k < n; k++)
            to[k] = operation->type == ADD ? a[k] + b[k] : operation->type == MUL ? a[k] * b[k] : fmaxf(a[k], 0);
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

static burst_device_table table;

#if defined __GNUC__
__attribute__((visibility("default")))
#endif
const burst_device_table *burst_device_get(uint32_t abi) {
    if (abi != BURST_DEVICE_ABI) return NULL;
    table.abi = BURST_DEVICE_ABI, table.size = sizeof table;
    table.name = "toy", table.version = "1", table.type = BURST_CPU, table.is_shareable = 1;
    table.open = toy_open, table.close = toy_close, table.supported = toy_supported;
    table.prepare = toy_prepare, table.release = toy_release, table.bind = toy_bind, table.unbind = toy_unbind;
    table.execute = toy_execute, table.output_shape = toy_output_shape;
    return &table;
}
