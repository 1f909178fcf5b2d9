/* From operations of the HAL to operators of XNNPACK: checks, shapes, numbers. To add an operation, add a row to the table
 * at the end, and what the row needs: a function that plans it, one that creates the operator, one that sets it up. */
#include "plan.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SAME = 1, VALID = 2 }; /* the HAL's padding schemes */
static const size_t MOST_ELEMENTS = (size_t)1 << 40;

/* ---- refusals. The first one counts; planning goes on, with zeros, up to the next look at `status`. ---------------- */

__attribute__((format(printf, 2, 3))) static void refuse(planner *p, const char *format, ...) {
    char text[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (!p->status) p->status = burst_fail(p->why, BURST_INVALID_ARGUMENT, "%s", text);
}

static const char *in_words(const shape *s, char *text, int room) {
    int n = snprintf(text, (size_t)room, "[");
    for (uint32_t i = 0; i < s->rank && n < room; i++)
        n += snprintf(text + n, (size_t)(room - n), "%s%zu", i ? ", " : "", s->dimensions[i]);
    return n < room ? strcat(text, "]") : text;
}
#define WORDS(s) in_words(&(s), (char[128]){0}, 126)

/* ---- operands ------------------------------------------------------------------------------------------------------ */

size_t shape_elements(const shape *s) {
    size_t n = 1;
    for (uint32_t i = 0; i < s->rank; i++) n = n > MOST_ELEMENTS ? n : n * s->dimensions[i];
    return n;
}

static bool has(const planner *p, uint32_t n) { return n < p->operation->n_inputs; }

/* The shape of a tensor that an operator reads, or packs when it is created. */
static shape tensor(planner *p, uint32_t n, size_t rank) {
    const burst_operand *operand = burst_input_of(p->graph, p->operation, n);
    uint32_t index = has(p, n) ? p->operation->inputs[n] : 0;
    shape found = p->shapes[index];
    if (!operand || operand->lifetime == BURST_NO_VALUE)
        refuse(p, "input %u is omitted", n);
    else if (operand->type != BURST_TENSOR_FLOAT32)
        refuse(p, "input %u (operand %u) is of type %d; this driver computes TENSOR_FLOAT32 (3)", n, index, operand->type);
    else if (operand->rank > MAX_RANK)
        refuse(p, "input %u (operand %u) has rank %u; XNNPACK takes %d", n, index, operand->rank, MAX_RANK);
    else if (!found.rank || !shape_elements(&found) || shape_elements(&found) > MOST_ELEMENTS)
        refuse(p, "input %u (operand %u) has dimensions %s; all have to be known when the model is prepared: give the "
               "model's inputs their shapes", n, index, WORDS(found));
    else if (rank && found.rank != rank)
        refuse(p, "input %u (operand %u) has dimensions %s; rank %zu is needed", n, index, WORDS(found), rank);
    return p->status ? (shape){0} : found;
}

static shape data(planner *p, uint32_t n, size_t rank) {
    shape found = tensor(p, n, rank);
    if (!p->status) p->is_data[p->operation->inputs[n]] = true;
    return found;
}

/* The value of an input that chooses what operator is made. */
static const void *constant(planner *p, uint32_t n, const char *what) {
    const burst_operand *operand = burst_input_of(p->graph, p->operation, n);
    if (operand && burst_is_constant(operand)) return operand->value;
    refuse(p, "input %u (%s) is no constant; XNNPACK needs it when the model is prepared", n, what);
    return NULL;
}

static int32_t number(planner *p, uint32_t n, const char *what, int32_t least) {
    int32_t value = constant(p, n, what) ? burst_scalar_int(burst_input_of(p->graph, p->operation, n), 0) : least;
    if (value < least) refuse(p, "input %u (%s) is %d; it has to be at least %d", n, what, value, least);
    return value < least ? least : value;
}

static void no_nchw(planner *p, uint32_t n) {
    if (has(p, n) && number(p, n, "layout", 0))
        refuse(p, "input %u (layout) is NCHW; XNNPACK computes NHWC: transpose the tensors", n);
}

static void activation(planner *p, step *s, uint32_t n) {
    static const float bounds[][2] = {{-INFINITY, INFINITY}, {0, INFINITY}, {-1, 1}, {0, 6}};
    int32_t code = has(p, n) ? number(p, n, "activation", 0) : 0;
    if (code > 3) refuse(p, "input %u (activation) is %d; it has to be 0 to 3", n, code), code = 0;
    s->low = bounds[code][0], s->high = bounds[code][1];
}

/* Ends a plan: the operation's result has this shape, and `s` is a step. */
static void result(planner *p, step *s, shape found) {
    uint32_t index = p->operation->outputs[0];
    int32_t type = burst_operand_at(p->graph, index)->type;
    shape *declared = &p->shapes[index];
    bool agrees = !declared->rank || declared->rank == found.rank;
    for (uint32_t i = 0; agrees && i < declared->rank; i++)
        agrees = !declared->dimensions[i] || declared->dimensions[i] == found.dimensions[i];
    if (type != BURST_TENSOR_FLOAT32)
        refuse(p, "output 0 (operand %u) is of type %d; this driver computes TENSOR_FLOAT32 (3)", index, type);
    if (!agrees || shape_elements(&found) > MOST_ELEMENTS)
        refuse(p, "output 0 (operand %u) is declared %s and becomes %s", index, WORDS(*declared), WORDS(found));
    if (p->status) return;
    *declared = found;
    s->a = p->operation->inputs[0], s->result = index;
    p->n_steps++;
}

/* ---- two tensors --------------------------------------------------------------------------------------------------- */

static void plan_binary(planner *p, step *s) {
    shape a = s->a_shape = data(p, 0, 0), b = s->b_shape = data(p, 1, 0), both = a.rank < b.rank ? b : a;
    activation(p, s, 2);
    if (p->status) return;
    for (size_t i = 1; i <= both.rank; i++) { /* from the last dimension on */
        size_t x = i > a.rank ? 1 : a.dimensions[a.rank - i], y = i > b.rank ? 1 : b.dimensions[b.rank - i];
        if (x != y && x != 1 && y != 1) refuse(p, "inputs %s and %s do not broadcast", WORDS(a), WORDS(b));
        both.dimensions[both.rank - i] = x > y ? x : y;
    }
    s->b = p->operation->inputs[1];
    result(p, s, both);
}

static enum xnn_status create_bounded(const step *s, xnn_operator_t *created) {
    return s->kind->create_bounded(s->low, s->high, 0, created);
}

static enum xnn_status create_plain(const step *s, xnn_operator_t *made) { return s->kind->create_plain(0, made); }

static enum xnn_status setup_binary(const step *s, xnn_operator_t created, void *const *memory) {
    return s->kind->setup_binary(created, s->a_shape.rank, s->a_shape.dimensions, s->b_shape.rank, s->b_shape.dimensions,
                                 memory[s->a], memory[s->b], memory[s->result], NULL);
}

/* ---- one tensor, as a matrix --------------------------------------------------------------------------------------- */

static void as_matrix(step *s, const shape *a, size_t channels) {
    s->channels = s->result_channels = s->result_stride = channels;
    s->rows = channels ? shape_elements(a) / channels : 0;
}

static void plan_elements(planner *p, step *s) {
    shape a = data(p, 0, 0);
    as_matrix(s, &a, shape_elements(&a)); /* one row: the quickest */
    s->low = s->kind->low, s->high = s->kind->high;
    result(p, s, a);
}

static void plan_softmax(planner *p, step *s) {
    shape a = data(p, 0, 0);
    float beta = burst_scalar_float(burst_input_of(p->graph, p->operation, 1), NAN);
    int32_t last = (int32_t)a.rank - 1, axis = has(p, 2) ? number(p, 2, "axis", -1) : -1;
    if (!(beta == 1)) refuse(p, "input 1 (beta) is not the constant 1; XNNPACK has no other: multiply the input by it");
    if (axis != -1 && axis != last) refuse(p, "input 2 (axis) is %d; XNNPACK takes the last: transpose the input", axis);
    if (p->status) return;
    as_matrix(s, &a, a.dimensions[last]);
    result(p, s, a);
}

static void plan_fully_connected(planner *p, step *s) {
    shape a = data(p, 0, 0), weights = tensor(p, 1, 2), bias = tensor(p, 2, 1);
    s->weights = constant(p, 1, "weights"), s->bias = constant(p, 2, "bias");
    activation(p, s, 3);
    as_matrix(s, &a, weights.dimensions[1]);
    s->result_channels = s->result_stride = weights.dimensions[0];
    if (bias.dimensions[0] != s->result_channels || s->rows * s->channels != shape_elements(&a))
        refuse(p, "input %s, weights %s and bias %s do not fit", WORDS(a), WORDS(weights), WORDS(bias));
    result(p, s, (shape){2, {s->rows, s->result_channels}});
}

static enum xnn_status create_rows(const step *s, xnn_operator_t *created) {
    return s->kind->create_rows(s->channels, s->channels, s->result_stride, 0, created);
}

static enum xnn_status create_clamp(const step *s, xnn_operator_t *created) {
    return xnn_create_clamp_nc_f32(s->channels, s->channels, s->channels, s->low, s->high, 0, created);
}

static enum xnn_status create_fully_connected(const step *s, xnn_operator_t *created) {
    return xnn_create_fully_connected_nc_f32(s->channels, s->result_channels, s->channels, s->result_stride, s->weights,
                                             s->bias, s->low, s->high, 0, created);
}

static enum xnn_status setup_rows(const step *s, xnn_operator_t created, void *const *memory) {
    return s->kind->setup_rows(created, s->rows, memory[s->a], memory[s->result], NULL);
}

/* ---- copies -------------------------------------------------------------------------------------------------------- */

static void plan_reshape(planner *p, step *s) {
    shape a = data(p, 0, 0), found = {0};
    const int32_t *target = constant(p, 1, "shape");
    if (p->status) return;
    size_t size = shape_elements(&a), known = 1;
    uint64_t rank = burst_operand_bytes(burst_input_of(p->graph, p->operation, 1)) / sizeof *target;
    found.rank = rank > MAX_RANK ? 0 : (uint32_t)rank;
    for (uint32_t i = 0; i < found.rank; i++)
        if (target[i] < -1) refuse(p, "input 1 (shape) has %d; a dimension is above 0, or -1", target[i]);
        else if (target[i] != -1) known *= found.dimensions[i] = (size_t)target[i];
    for (uint32_t i = 0; i < found.rank; i++)
        if (target[i] == -1) found.dimensions[i] = known ? size / known : 0;
    if (!found.rank || shape_elements(&found) != size)
        refuse(p, "%zu elements do not fit the shape of input 1, %s", size, WORDS(found));
    as_matrix(s, &a, size);
    result(p, s, found);
}

/* A step for each input, which copies it to its columns of the result. */
static void plan_concatenation(planner *p, step *s) {
    uint32_t tensors = p->operation->n_inputs - 1;
    shape joined = data(p, 0, 0);
    uint32_t axis = (uint32_t)number(p, tensors, "axis", 0);
    size_t columns = 0, inner = 1;
    if (axis >= joined.rank) refuse(p, "input %u (axis) is %u; the rank is %zu", tensors, axis, joined.rank);
    if (p->status) return;
    for (uint32_t i = axis + 1; i < joined.rank; i++) inner *= joined.dimensions[i];
    for (uint32_t n = 0; n < tensors; n++) {
        shape part = data(p, n, joined.rank), expected = joined;
        expected.dimensions[axis] = part.dimensions[axis];
        if (memcmp(&part, &expected, sizeof part))
            refuse(p, "inputs 0 %s and %u %s differ beside axis %u", WORDS(joined), n, WORDS(part), axis);
        s[n] = (step){.kind = s->kind, .operation = s->operation, .a = p->operation->inputs[n]};
        s[n].offset = columns * sizeof(float);
        as_matrix(&s[n], &part, part.dimensions[axis] * inner);
        columns += s[n].channels;
    }
    joined.dimensions[axis] = columns / inner;
    result(p, s, joined);
    if (p->status) return;
    for (uint32_t n = 0; n < tensors; n++) s[n].result = s->result, s[n].result_stride = columns;
    p->n_steps += tensors - 1;
}

static enum xnn_status setup_copy(const step *s, xnn_operator_t created, void *const *memory) {
    return xnn_setup_copy_nc_x32(created, s->rows, memory[s->a], (char *)memory[s->result] + s->offset, NULL);
}

/* ---- windows over images ------------------------------------------------------------------------------------------- */

/* One axis: its paddings, if a scheme chooses them, and the extent of the result. */
static size_t slide(planner *p, size_t size, int64_t reach, uint32_t stride, int32_t scheme, uint32_t *before,
                    uint32_t *after) {
    int64_t extent = (int64_t)size, needed = (extent - 1) / stride * stride + reach - extent;
    if (scheme == SAME && needed > 0) *before = (uint32_t)(needed / 2), *after = (uint32_t)(needed - needed / 2);
    extent += (int64_t)*before + *after - reach;
    if (*before >= reach || *after >= reach || extent < 0)
        refuse(p, "a window of %lld does not fit an image of %zu padded by %u and %u; paddings have to be smaller than the "
               "window", (long long)reach, size, *before, *after);
    return (size_t)(extent / stride + 1);
}

/* Reads the strides, and from input `first` on a padding scheme or four paddings. */
static void place(planner *p, window *w, const shape *image, uint32_t first, bool is_explicit) {
    uint32_t *paddings[] = {&w->left, &w->right, &w->top, &w->bottom}, at = first + (is_explicit ? 4 : 1);
    int32_t scheme = is_explicit ? 0 : number(p, first, "padding scheme", SAME);
    for (uint32_t i = 0; is_explicit && i < 4; i++) *paddings[i] = (uint32_t)number(p, first + i, "padding", 0);
    if (scheme > VALID) refuse(p, "input %u (padding scheme) is %d; it has to be 1 or 2", first, scheme);
    w->stride_x = (uint32_t)number(p, at, "stride", 1), w->stride_y = (uint32_t)number(p, at + 1, "stride", 1);
    if (p->status) return;
    int64_t rows = (int64_t)(w->height - 1) * w->dilation_y + 1, columns = (int64_t)(w->width - 1) * w->dilation_x + 1;
    w->out_height = slide(p, image->dimensions[1], rows, w->stride_y, scheme, &w->top, &w->bottom);
    w->out_width = slide(p, image->dimensions[2], columns, w->stride_x, scheme, &w->left, &w->right);
}

static void plan_pool(planner *p, step *s) {
    shape a = s->a_shape = data(p, 0, 4);
    bool is_explicit = p->operation->n_inputs >= 10;
    uint32_t at = is_explicit ? 7 : 4;
    window *w = &s->window;
    w->width = (uint32_t)number(p, at, "width", 1), w->height = (uint32_t)number(p, at + 1, "height", 1);
    w->dilation_x = w->dilation_y = 1;
    activation(p, s, at + 2);
    no_nchw(p, at + 3);
    place(p, w, &a, 1, is_explicit);
    if (w->height == 1 && w->width == 1) refuse(p, "the window is 1 x 1, which XNNPACK does not take");
    s->channels = a.dimensions[3];
    result(p, s, (shape){4, {a.dimensions[0], w->out_height, w->out_width, s->channels}});
}

static void plan_convolution(planner *p, step *s) {
    shape a = s->a_shape = data(p, 0, 4), filter = tensor(p, 1, 4), bias = tensor(p, 2, 1);
    s->weights = constant(p, 1, "filter"), s->bias = constant(p, 2, "bias");
    if (p->status) return;
    uint32_t fan = s->kind->name[0] == 'D'; /* the multiplier of DEPTHWISE_CONV_2D stands before the activation */
    bool is_explicit = has(p, 9 + fan) && burst_input_of(p->graph, p->operation, 7 + fan)->type == BURST_SCALAR_INT32;
    uint32_t at = (is_explicit ? 9 : 6) + fan;
    size_t channels = s->channels = a.dimensions[3], outputs = s->result_channels = filter.dimensions[fan ? 3 : 0];
    size_t multiplier = fan ? (size_t)number(p, at - 1, "multiplier", 1) : 0;
    activation(p, s, at);
    no_nchw(p, at + 1);
    s->window = (window){.height = (uint32_t)filter.dimensions[1], .width = (uint32_t)filter.dimensions[2]};
    s->window.dilation_x = has(p, at + 2) ? (uint32_t)number(p, at + 2, "dilation", 1) : 1;
    s->window.dilation_y = has(p, at + 3) ? (uint32_t)number(p, at + 3, "dilation", 1) : 1;
    place(p, &s->window, &a, 3, is_explicit);
    bool fits = fan ? outputs == channels * multiplier && filter.dimensions[0] == 1 : filter.dimensions[3] == channels;
    if (!fits || bias.dimensions[0] != outputs)
        refuse(p, "input %s, filter %s and bias %s do not fit", WORDS(a), WORDS(filter), WORDS(bias));
    s->flags = fan ? XNN_FLAG_DEPTHWISE_CONVOLUTION : 0;
    s->groups = fan ? (uint32_t)channels : 1;
    result(p, s, (shape){4, {a.dimensions[0], s->window.out_height, s->window.out_width, outputs}});
}

static enum xnn_status create_average(const step *s, xnn_operator_t *created) {
    const window *w = &s->window;
    size_t c = s->channels;
    return xnn_create_average_pooling2d_nhwc_f32(w->top, w->right, w->bottom, w->left, w->height, w->width, w->stride_y,
                                                 w->stride_x, c, c, c, s->low, s->high, 0, created);
}

static enum xnn_status create_maximum(const step *s, xnn_operator_t *created) {
    const window *w = &s->window;
    size_t c = s->channels;
    return xnn_create_max_pooling2d_nhwc_f32(w->top, w->right, w->bottom, w->left, w->height, w->width, w->stride_y,
                                             w->stride_x, 1, 1, c, c, c, s->low, s->high, 0, created);
}

static enum xnn_status create_convolution(const step *s, xnn_operator_t *created) {
    const window *w = &s->window;
    return xnn_create_convolution2d_nhwc_f32(w->top, w->right, w->bottom, w->left, w->height, w->width, w->stride_y,
                                             w->stride_x, w->dilation_y, w->dilation_x, s->groups,
                                             s->channels / s->groups, s->result_channels / s->groups, s->channels,
                                             s->result_channels, s->weights, s->bias, s->low, s->high, s->flags, created);
}

static enum xnn_status setup_image(const step *s, xnn_operator_t created, void *const *memory) {
    const size_t *d = s->a_shape.dimensions;
    return s->kind->setup_image(created, d[0], d[1], d[2], memory[s->a], memory[s->result], NULL);
}

/* ---- the operations ------------------------------------------------------------------------------------------------ */

#define BINARY(NAME, form, xnn) \
    {.name = NAME, .plan = plan_binary, .create = create_##form, .setup = setup_binary, \
     .create_##form = xnn_create_##xnn##_nd_f32, .setup_binary = xnn_setup_##xnn##_nd_f32}
#define UNARY(NAME, plan_it, xnn) \
    {.name = NAME, .plan = plan_it, .create = create_rows, .setup = setup_rows, \
     .create_rows = xnn_create_##xnn##_nc_f32, .setup_rows = xnn_setup_##xnn##_nc_f32}
#define ROWS(NAME, plan_it, create_it, xnn, ...) \
    {.name = NAME, .plan = plan_it, .create = create_it, .setup = setup_rows, \
     .setup_rows = xnn_setup_##xnn##_nc_f32, __VA_ARGS__}
#define IMAGE(NAME, plan_it, create_it, xnn) \
    {.name = NAME, .plan = plan_it, .create = create_it, .setup = setup_image, \
     .setup_image = xnn_setup_##xnn##2d_nhwc_f32}
#define COPY(NAME, plan_it) \
    {.name = NAME, .plan = plan_it, .create = create_rows, .setup = setup_copy, .create_rows = xnn_create_copy_nc_x32}

static const kind kinds[] = {
    BINARY("ADD", bounded, add),
    BINARY("SUB", bounded, subtract),
    BINARY("MUL", bounded, multiply),
    BINARY("DIV", bounded, divide),
    BINARY("MAXIMUM", plain, maximum),
    BINARY("MINIMUM", plain, minimum),
    UNARY("ABS", plan_elements, abs),
    UNARY("NEG", plan_elements, negate),
    UNARY("FLOOR", plan_elements, floor),
    UNARY("SQRT", plan_elements, square_root),
    UNARY("LOGISTIC", plan_elements, sigmoid),
    UNARY("HARD_SWISH", plan_elements, hardswish),
    UNARY("SOFTMAX", plan_softmax, softmax),
    ROWS("RELU", plan_elements, create_clamp, clamp, .low = 0, .high = INFINITY),
    ROWS("RELU1", plan_elements, create_clamp, clamp, .low = -1, .high = 1),
    ROWS("RELU6", plan_elements, create_clamp, clamp, .low = 0, .high = 6),
    ROWS("FULLY_CONNECTED", plan_fully_connected, create_fully_connected, fully_connected, .low = 0),
    IMAGE("CONV_2D", plan_convolution, create_convolution, convolution),
    IMAGE("DEPTHWISE_CONV_2D", plan_convolution, create_convolution, convolution),
    IMAGE("AVERAGE_POOL_2D", plan_pool, create_average, average_pooling),
    IMAGE("MAX_POOL_2D", plan_pool, create_maximum, max_pooling),
    COPY("RESHAPE", plan_reshape),
    COPY("CONCATENATION", plan_concatenation),
};

burst_status plan_operation(planner *p, uint32_t index, burst_why *why) {
    step *s = &p->steps[p->n_steps];
    p->operation = burst_operation_at(p->graph, index), p->status = BURST_NONE, p->why = why;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (!strcmp(kinds[i].name, p->operation->name)) {
            *s = (step){.kind = &kinds[i], .operation = index};
            kinds[i].plan(p, s);
            return p->status;
        }
    return burst_fail(why, BURST_INVALID_ARGUMENT, "%s: this driver does not have it", p->operation->name);
}

bool plan_new(planner *p, const burst_subgraph *graph) {
    size_t room = 1;
    for (uint32_t i = 0; i < graph->n_operations; i++) room += 1 + burst_operation_at(graph, i)->n_inputs;
    *p = (planner){.graph = graph, .shapes = calloc(graph->n_operands + 1, sizeof *p->shapes)};
    p->is_data = calloc(graph->n_operands + 1, sizeof *p->is_data);
    p->steps = calloc(room, sizeof *p->steps);
    if (!p->shapes || !p->is_data || !p->steps) return plan_free(p), false;
    for (uint32_t i = 0; i < graph->n_operands; i++) {
        const burst_operand *operand = burst_operand_at(graph, i);
        p->shapes[i].rank = operand->rank < MAX_RANK ? operand->rank : MAX_RANK;
        for (uint32_t k = 0; k < p->shapes[i].rank; k++) p->shapes[i].dimensions[k] = operand->dimensions[k];
    }
    return true;
}

void plan_free(planner *p) { free(p->shapes), free(p->is_data), free(p->steps); }
