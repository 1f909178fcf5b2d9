/* The toy driver, broken in one way: -DBROKEN=WAY. The conformance kit has to find each; see tests/driver/vts/test_broken_c.py. */
#define burst_device_get toy_get
#include "toy.c"
#undef burst_device_get

enum {
    WRONG_RESULTS, WRONG_SHAPES, GENEROUS, MORTAL, LIAR, RACY, LATCHED, SCRIBBLER, SPOILER, UNFINISHED,
    OVERFLOW, UNDEFINED
};

static float *output_of(burst_execution *e) { return e->values[e->prepared->model->main_graph->outputs[0]]; }

/* Of each tensor: all have the same shape. */
static uint64_t elements_of(burst_execution *e) {
    const burst_subgraph *graph = e->prepared->model->main_graph;
    const burst_operand *input = burst_operand_at(graph, graph->inputs[0]);
    return burst_elements(input->rank, input->dimensions);
}

/* -- executions */

static burst_status wrong_results(burst_execution *e, uint64_t deadline) {
    burst_status status = toy_execute(e, deadline);
    if (!status) output_of(e)[elements_of(e) - 1] += 1;
    return status;
}

static burst_status mortal(burst_execution *e, uint64_t deadline) {
    if (burst_operation_at(e->prepared->model->main_graph, 0)->type == RELU) abort();
    return toy_execute(e, deadline);
}

static float shared[1 << 20];

/* It computes where all executions do, slowly, and copies the answer. */
static burst_status racy(burst_execution *e, uint64_t deadline) {
    burst_status status = toy_execute(e, deadline);
    uint64_t n = elements_of(e);
    if (status || n > sizeof shared / sizeof *shared) return status;
    memcpy(shared, output_of(e), n * sizeof *shared);
    for (volatile int i = 0; i < 2000000; i++) {
    }
    memcpy(output_of(e), shared, n * sizeof *shared);
    return status;
}

static burst_status scribbler(burst_execution *e, uint64_t deadline) {
    burst_status status = toy_execute(e, deadline);
    if (!status) ((unsigned char *)output_of(e))[elements_of(e) * sizeof(float)] ^= 1;
    return status;
}

static burst_status spoiler(burst_execution *e, uint64_t deadline) {
    burst_status status = toy_execute(e, deadline);
    e->values[e->prepared->model->main_graph->inputs[0]][0] += 1;
    return status;
}

static burst_status unfinished(burst_execution *e, uint64_t deadline) {
    return toy_execute(e, deadline) ? BURST_GENERAL_FAILURE : 77;
}

static burst_status overflow(burst_execution *e, uint64_t deadline) {
    volatile char *own = (volatile char *)malloc(8);
    own[8 + (deadline == 0)] = 1;
    free((void *)(uintptr_t)own);
    return toy_execute(e, deadline);
}

static burst_status undefined(burst_execution *e, uint64_t deadline) {
    volatile int32_t large = INT32_MAX;
    large = large + (int32_t)(e->n > 0 || deadline > 0);
    return toy_execute(e, deadline);
}

/* -- the rest */

static burst_status wrong_shapes(const burst_execution *e, uint32_t output, burst_shape *shape) {
    burst_status status = toy_output_shape(e, output, shape);
    shape->dimensions[shape->rank - 1] += 1;
    return status;
}

static burst_status generous(const burst_execution *e, uint32_t output, burst_shape *shape) {
    burst_status status = toy_output_shape(e, output, shape);
    shape->is_sufficient = 1;
    return status;
}

static burst_status promises_all(burst_device *device, const burst_model *model, const burst_answers *answers, burst_why *why) {
    (void)device, (void)model, (void)answers, (void)why;
    return BURST_NONE;
}

static burst_status prepares_few(burst_device *device, const burst_model *model, const burst_preparation *preparation,
                                 burst_prepared **prepared, burst_why *why) {
    for (uint32_t i = 0; i < model->main_graph->n_operations; i++)
        if (obstacle(model->main_graph, burst_operation_at(model->main_graph, i)))
            return burst_fail(why, BURST_GENERAL_FAILURE, "operation %u is too much for this device", i);
    return toy_prepare(device, model, preparation, prepared, why);
}

/* Computes on what the inputs were when the request was bound. */
static burst_status latched(burst_prepared *prepared, const burst_binding *binding, burst_execution **execution, burst_why *why) {
    burst_status status = toy_bind(prepared, binding, execution, why);
    if (status) return status;
    const burst_subgraph *graph = prepared->model->main_graph;
    for (uint32_t i = 0; i < graph->n_inputs; i++) {
        const burst_argument *input = burst_input_at(binding, i);
        void *copy = malloc(input->bytes ? input->bytes : 1);
        if (!copy || !input->memory) return status;
        memcpy(copy, input->memory, input->bytes); /* leaks: the toy frees its own values alone */
        place(*execution, graph->inputs[i], copy);
    }
    return status;
}

static burst_device_table broken;

#if defined __GNUC__
__attribute__((visibility("default")))
#endif
const burst_device_table *burst_device_get(uint32_t abi) {
    const burst_device_table *toy = toy_get(abi);
    if (!toy) return NULL;
    broken = *toy;
    switch (BROKEN) {
    case WRONG_RESULTS: broken.execute = wrong_results; break;
    case WRONG_SHAPES: broken.output_shape = wrong_shapes; break;
    case GENEROUS: broken.output_shape = generous; break;
    case MORTAL: broken.execute = mortal; break;
    case LIAR: broken.supported = promises_all, broken.prepare = prepares_few; break;
    case RACY: broken.execute = racy, broken.slots = 8; break;
    case LATCHED: broken.bind = latched; break;
    case SCRIBBLER: broken.execute = scribbler; break;
    case SPOILER: broken.execute = spoiler; break;
    case UNFINISHED: broken.execute = unfinished; break;
    case OVERFLOW: broken.execute = overflow; break;
    case UNDEFINED: broken.execute = undefined; break;
    default: break;
    }
    return &broken;
}
