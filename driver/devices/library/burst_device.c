/* The small library beside burst_device.h: iteration over arrays whose elements may grow, sizes, scalars and errors. */
#include "burst_device.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

static const void *at(const void *first, uint32_t n, uint32_t stride, uint32_t index) {
    return first && index < n ? (const char *)first + (size_t)stride * index : NULL;
}

const burst_operand *burst_operand_at(const burst_subgraph *graph, uint32_t index) {
    return (const burst_operand *)at(graph->operands, graph->n_operands, graph->operand_stride, index);
}

const burst_operation *burst_operation_at(const burst_subgraph *graph, uint32_t index) {
    return (const burst_operation *)at(graph->operations, graph->n_operations, graph->operation_stride, index);
}

const burst_subgraph *burst_subgraph_at(const burst_model *model, uint32_t index) {
    return (const burst_subgraph *)at(model->referenced, model->n_referenced, model->subgraph_stride, index);
}

const burst_operand *burst_input_of(const burst_subgraph *graph, const burst_operation *operation, uint32_t n) {
    return n < operation->n_inputs ? burst_operand_at(graph, operation->inputs[n]) : NULL;
}

const burst_operand *burst_output_of(const burst_subgraph *graph, const burst_operation *operation, uint32_t n) {
    return n < operation->n_outputs ? burst_operand_at(graph, operation->outputs[n]) : NULL;
}

const burst_argument *burst_input_at(const burst_binding *binding, uint32_t n) {
    return (const burst_argument *)at(binding->inputs, binding->n_inputs, binding->stride, n);
}

const burst_argument *burst_output_at(const burst_binding *binding, uint32_t n) {
    return (const burst_argument *)at(binding->outputs, binding->n_outputs, binding->stride, n);
}

const burst_role *burst_role_at(const burst_buffer_description *description, uint32_t n) {
    return (const burst_role *)at(description->roles, description->n_roles, description->role_stride, n);
}

uint64_t burst_element_bytes(int32_t type) {
    switch (type) {
    case 0: case 1: case 2: case 3: case 4: return 4;                 /* FLOAT32, INT32, UINT32 and tensors of these */
    case 5: case 6: case 9: case 11: case 13: case 14: return 1;      /* quantised to 8 bits, BOOL, TENSOR_BOOL8 */
    case 7: case 8: case 10: case 12: return 2;                       /* quantised to 16 bits, FLOAT16 */
    case 10001: return 1;                                             /* TENSOR_OEM_BYTE */
    default: return 0;
    }
}

uint64_t burst_elements(uint32_t rank, const uint32_t *dimensions) {
    uint64_t n = 1;
    for (uint32_t i = 0; i < rank; i++) {
        if (!dimensions[i] || n > (UINT64_MAX >> 1) / dimensions[i]) return UINT64_MAX;
        n *= dimensions[i];
    }
    return n;
}

static int is_scalar(int32_t type) { return type == 0 || type == 1 || type == 2 || type == 6 || type == 10; }

uint64_t burst_operand_bytes(const burst_operand *operand) {
    if (operand->value) return operand->value_bytes;
    uint64_t size = burst_element_bytes(operand->type), n = burst_elements(operand->rank, operand->dimensions);
    if ((!operand->rank && !is_scalar(operand->type)) || !size || n >= UINT64_MAX / size) return 0;
    return n * size;
}

int32_t burst_is_constant(const burst_operand *operand) {
    return operand->lifetime == BURST_CONSTANT_COPY || operand->lifetime == BURST_CONSTANT_REFERENCE;
}

int32_t burst_scalar_int(const burst_operand *operand, int32_t otherwise) {
    int32_t found = otherwise;
    if (!operand || !operand->value) return otherwise;
    if (operand->type == 1 && operand->value_bytes == sizeof found) memcpy(&found, operand->value, sizeof found);
    if (operand->type == 6 && operand->value_bytes == 1) found = *(const uint8_t *)operand->value != 0;
    return found;
}

float burst_scalar_float(const burst_operand *operand, float otherwise) {
    float found = otherwise;
    if (operand && operand->value && operand->type == 0 && operand->value_bytes == sizeof found)
        memcpy(&found, operand->value, sizeof found);
    return found;
}

burst_status burst_fail(burst_why *why, burst_status status, const char *format, ...) {
    if (why && why->text && why->room) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(why->text, why->room, format, arguments);
        va_end(arguments);
    }
    return status;
}
