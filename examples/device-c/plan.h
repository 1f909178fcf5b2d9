/* What the two files of this driver share: a model as a list of steps, each of which is one operator of XNNPACK. */
#ifndef PLAN_H
#define PLAN_H
#include "burst_device.h"

#include <stdbool.h>
#include <stddef.h>
#include <xnnpack.h>

enum { MAX_RANK = XNN_MAX_TENSOR_DIMS };

typedef struct {
    size_t rank; /* 0: not known */
    size_t dimensions[MAX_RANK]; /* 0: not known */
} shape;

typedef struct {
    uint32_t top, right, bottom, left; /* padding */
    uint32_t height, width, stride_y, stride_x, dilation_y, dilation_x;
    size_t out_height, out_width;
} window;

typedef struct step {
    const struct kind *kind;
    uint32_t operation;    /* its index in the graph */
    uint32_t a, b, result; /* operands */
    size_t offset;         /* of the result in its operand, in bytes */
    shape a_shape, b_shape;
    size_t rows, channels, result_channels, result_stride; /* as a matrix */
    float low, high; /* bounds of the activation */
    uint32_t flags, groups;
    window window;
    const float *weights, *bias;
} step;

/* How one operation of the HAL becomes an operator. `create` reads weights; `setup` points the operator to its tensors. */
struct planner;

typedef struct kind {
    const char *name;
    void (*plan)(struct planner *p, step *s);
    enum xnn_status (*create)(const step *s, xnn_operator_t *created);
    enum xnn_status (*setup)(const step *s, xnn_operator_t created, void *const *memory);
    /* What XNNPACK has for it, where several kinds share `create` and `setup`. */
    enum xnn_status (*create_bounded)(float low, float high, uint32_t flags, xnn_operator_t *);
    enum xnn_status (*create_plain)(uint32_t flags, xnn_operator_t *);
    enum xnn_status (*create_rows)(size_t channels, size_t stride, size_t result_stride, uint32_t flags, xnn_operator_t *);
    enum xnn_status (*setup_binary)(xnn_operator_t, size_t a_rank, const size_t *a_shape, size_t b_rank,
                                    const size_t *b_shape, const float *a, const float *b, float *, pthreadpool_t);
    enum xnn_status (*setup_rows)(xnn_operator_t, size_t rows, const float *a, float *, pthreadpool_t);
    enum xnn_status (*setup_image)(xnn_operator_t, size_t n, size_t height, size_t width, const float *a, float *,
                                   pthreadpool_t);
    float low, high;
} kind;

typedef struct planner {
    const burst_subgraph *graph;
    shape *shapes; /* by operand, as far as they are known */
    bool *is_data; /* by operand: an operator reads it, not only its creation */
    step *steps;
    uint32_t n_steps;
    const burst_operation *operation; /* in hand, and what became of it */
    burst_status status;
    burst_why *why;
} planner;

bool plan_new(planner *p, const burst_subgraph *graph); /* false: no memory */
void plan_free(planner *p);

/* Adds the steps of an operation and the shape of its result; else says why this driver does not do it. Operations come
 * in their order: shapes that the model leaves open follow from those before. */
burst_status plan_operation(planner *p, uint32_t index, burst_why *why);

size_t shape_elements(const shape *s);
#endif
