/* A driver for Burst in C: float32 networks on XNNPACK. Read this file from its end: the table is what Burst sees.
 *
 * An XNNPACK operator keeps the addresses that it computes on, so one operator serves one execution at a time. A *lane* is
 * one operator for each step of a model, and memory for what lies between the steps. `bind` takes an idle lane, or makes
 * one, and points its operators to the client's memory; `unbind` gives it back. So `execute` only runs operators: it
 * allocates nothing and takes no lock. The price: executions that are bound at the same time have copies of the weights.
 *
 * XNNPACK reads up to 16 bytes beyond a tensor. In a client's memory these may lie in a page that is not there, so a
 * tensor that ends with a page is copied in each run. Memory that this driver allocates has room behind each tensor.
 */
#include "plan.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 64, PAGE = 4096 };

struct burst_device {
    const burst_host *host;
};

typedef struct lane {
    struct lane *next; /* of the idle ones */
    void **memory;     /* by operand */
    xnn_operator_t operators[];
} lane;

struct burst_prepared {
    burst_device *device;
    planner plan;     /* its `graph` stays until after `release` */
    void **constants; /* by operand: those that operators read, with room behind them */
    pthread_mutex_t lock;
    lane *idle;
};

typedef struct {
    void *to;
    const void *from;
    size_t bytes;
} copy;

struct burst_execution {
    burst_prepared *prepared;
    lane *lane; /* NULL: an output has too little memory */
    uint32_t n_before, n_after;
    copy *before, *after; /* of arguments that XNNPACK cannot use where they lie */
    bool *is_sufficient;  /* by output */
    _Atomic bool is_cancelled;
};

static void *room_for(size_t bytes) {
    size_t room = (bytes + XNN_EXTRA_BYTES + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void *memory = aligned_alloc(ALIGNMENT, room);
    return memory ? memset(memory, 0, room) : NULL;
}

static size_t bytes_of(const burst_prepared *prepared, uint32_t operand) {
    return sizeof(float) * shape_elements(&prepared->plan.shapes[operand]);
}

/* ---- the device ---------------------------------------------------------------------------------------------------- */

static burst_status open_device(const burst_host *host, burst_device **device, burst_why *why) {
    static burst_device the_device; /* there is one in a process */
    if (xnn_initialize(NULL)) return burst_fail(why, BURST_DEVICE_UNAVAILABLE, "XNNPACK does not know this processor");
    the_device.host = host;
    *device = &the_device;
    return BURST_NONE;
}

static void close_device(burst_device *device) { (void)device, (void)xnn_deinitialize(); }

static burst_status supported(burst_device *device, const burst_model *model, const burst_answers *answers,
                              burst_why *why) {
    (void)device;
    char text[512];
    planner p;
    if (!plan_new(&p, model->main_graph)) return burst_fail(why, BURST_RESOURCE_EXHAUSTED_TRANSIENT, "no memory");
    for (uint32_t i = 0; i < p.graph->n_operations; i++)
        if (plan_operation(&p, i, &(burst_why){sizeof(burst_why), sizeof text, text}))
            answers->refuse(answers->context, i, text);
    plan_free(&p);
    return BURST_NONE;
}

/* ---- lanes --------------------------------------------------------------------------------------------------------- */

static bool is_temporary(const burst_prepared *prepared, uint32_t operand) {
    return burst_operand_at(prepared->plan.graph, operand)->lifetime == BURST_TEMPORARY_VARIABLE;
}

static void lane_free(const burst_prepared *prepared, lane *l) {
    for (uint32_t i = 0; i < prepared->plan.n_steps; i++) xnn_delete_operator(l->operators[i]);
    for (uint32_t i = 0; l->memory && i < prepared->plan.graph->n_operands; i++)
        if (is_temporary(prepared, i)) free(l->memory[i]);
    free(l->memory), free(l);
}

static lane *lane_new(const burst_prepared *prepared) {
    const planner *p = &prepared->plan;
    lane *l = calloc(1, sizeof *l + p->n_steps * sizeof *l->operators);
    if (!l) return NULL;
    bool is_made = (l->memory = calloc(p->graph->n_operands + 1, sizeof *l->memory));
    for (uint32_t i = 0; is_made && i < p->graph->n_operands; i++)
        if (is_temporary(prepared, i)) is_made = (l->memory[i] = room_for(bytes_of(prepared, i)));
        else l->memory[i] = prepared->constants[i];
    for (uint32_t i = 0; is_made && i < p->n_steps; i++)
        is_made = !p->steps[i].kind->create(&p->steps[i], &l->operators[i]);
    if (is_made) return l;
    lane_free(prepared, l);
    return NULL;
}

static void lane_put(burst_prepared *prepared, lane *l) {
    pthread_mutex_lock(&prepared->lock);
    l->next = prepared->idle;
    prepared->idle = l;
    pthread_mutex_unlock(&prepared->lock);
}

static lane *lane_take(burst_prepared *prepared) {
    pthread_mutex_lock(&prepared->lock);
    lane *l = prepared->idle;
    if (l) prepared->idle = l->next;
    pthread_mutex_unlock(&prepared->lock);
    return l ? l : lane_new(prepared);
}

/* Burst also calls it while the device rests: `bind` can make lanes again. */
static void free_idle_lanes(burst_prepared *prepared) {
    pthread_mutex_lock(&prepared->lock);
    lane *idle = prepared->idle;
    prepared->idle = NULL;
    pthread_mutex_unlock(&prepared->lock);
    for (lane *next; idle; idle = next) next = idle->next, lane_free(prepared, idle);
}

/* ---- models -------------------------------------------------------------------------------------------------------- */

static void release(burst_prepared *prepared) {
    free_idle_lanes(prepared);
    for (uint32_t i = 0; prepared->constants && i < prepared->plan.graph->n_operands; i++) free(prepared->constants[i]);
    free(prepared->constants);
    plan_free(&prepared->plan);
    pthread_mutex_destroy(&prepared->lock);
    free(prepared);
}

/* Those that operators read. Weights are read, and packed, while operators are created. */
static bool copy_constants(burst_prepared *prepared) {
    const burst_subgraph *graph = prepared->plan.graph;
    prepared->constants = calloc(graph->n_operands + 1, sizeof *prepared->constants);
    for (uint32_t i = 0; prepared->constants && i < graph->n_operands; i++) {
        const burst_operand *operand = burst_operand_at(graph, i);
        if (!prepared->plan.is_data[i] || !burst_is_constant(operand)) continue;
        if (!(prepared->constants[i] = room_for(operand->value_bytes))) return false;
        memcpy(prepared->constants[i], operand->value, operand->value_bytes);
    }
    return prepared->constants;
}

static burst_status prepare(burst_device *device, const burst_model *model, const burst_preparation *preparation,
                            burst_prepared **prepared, burst_why *why) {
    burst_prepared *made = *prepared = calloc(1, sizeof *made);
    if (!made || !plan_new(&made->plan, model->main_graph)) return free(made), BURST_RESOURCE_EXHAUSTED_TRANSIENT;
    made->device = device;
    pthread_mutex_init(&made->lock, NULL);
    burst_status status = BURST_NONE;
    for (uint32_t i = 0; !status && i < made->plan.graph->n_operations; i++)
        if (!(status = preparation->pace(preparation->context))) status = plan_operation(&made->plan, i, why);
    lane *first = !status && copy_constants(made) ? lane_new(made) : NULL; /* what cannot be made fails here */
    if (first) lane_put(made, first);
    else if (!status) status = burst_fail(why, BURST_GENERAL_FAILURE, "XNNPACK made no operators; is there memory?");
    if (status) release(made);
    return status;
}

/* ---- executions ---------------------------------------------------------------------------------------------------- */

static void unbind(burst_execution *e) {
    if (e->lane) lane_put(e->prepared, e->lane);
    for (uint32_t i = 0; i < e->n_before; i++) free(e->before[i].to);
    for (uint32_t i = 0; i < e->n_after; i++) free((void *)e->after[i].from);
    free(e->before), free(e->after), free(e->is_sufficient), free(e);
}

/* Points an operand to an argument, or to a copy if XNNPACK may not compute on it where it lies. */
static burst_status bind_argument(burst_execution *e, uint32_t operand, const burst_argument *argument, bool is_input) {
    void *memory = argument->buffer ? argument->buffer : argument->memory;
    size_t bytes = bytes_of(e->prepared, operand);
    if (!memory || (!argument->buffer && argument->bytes < bytes)) return BURST_INVALID_ARGUMENT;
    uintptr_t last = (uintptr_t)memory + bytes - 1;
    bool ends_with_page = last / PAGE != (last + XNN_EXTRA_BYTES) / PAGE, is_read = e->prepared->plan.is_data[operand];
    if ((is_read && ends_with_page && !argument->buffer) || (uintptr_t)memory % sizeof(float)) {
        void *staging = room_for(bytes);
        if (!staging) return BURST_RESOURCE_EXHAUSTED_TRANSIENT;
        if (is_input) e->before[e->n_before++] = (copy){staging, memory, bytes};
        else e->after[e->n_after++] = (copy){memory, staging, bytes};
        memory = staging;
    }
    e->lane->memory[operand] = memory;
    return BURST_NONE;
}

static burst_status bind_arguments(burst_execution *e, const burst_binding *binding) {
    const planner *p = &e->prepared->plan;
    burst_status status = BURST_NONE;
    for (uint32_t i = 0; !status && i < binding->n_inputs; i++)
        if (p->is_data[p->graph->inputs[i]]) /* an operation reads it */
            status = bind_argument(e, p->graph->inputs[i], burst_input_at(binding, i), true);
    for (uint32_t i = 0; !status && i < binding->n_outputs; i++)
        status = bind_argument(e, p->graph->outputs[i], burst_output_at(binding, i), false);
    for (uint32_t i = 0; !status && i < p->n_steps; i++)
        if (p->steps[i].kind->setup(&p->steps[i], e->lane->operators[i], e->lane->memory)) status = BURST_GENERAL_FAILURE;
    return status;
}

static burst_status bind(burst_prepared *prepared, const burst_binding *binding, burst_execution **execution,
                         burst_why *why) {
    burst_execution *e = *execution = calloc(1, sizeof *e);
    if (!e) return BURST_RESOURCE_EXHAUSTED_TRANSIENT;
    e->prepared = prepared;
    e->before = calloc(binding->n_inputs + 1, sizeof *e->before);
    e->after = calloc(binding->n_outputs + 1, sizeof *e->after);
    e->is_sufficient = calloc(binding->n_outputs + 1, sizeof *e->is_sufficient);
    if (!e->before || !e->after || !e->is_sufficient) return unbind(e), BURST_RESOURCE_EXHAUSTED_TRANSIENT;
    bool fits = true;
    for (uint32_t i = 0; i < binding->n_outputs; i++) {
        const burst_argument *argument = burst_output_at(binding, i);
        e->is_sufficient[i] = argument->buffer || argument->bytes >= bytes_of(prepared, prepared->plan.graph->outputs[i]);
        fits = fits && e->is_sufficient[i];
    }
    if (!fits) return BURST_NONE; /* `execute` says so, once */
    burst_status status = BURST_RESOURCE_EXHAUSTED_TRANSIENT;
    if ((e->lane = lane_take(prepared))) status = bind_arguments(e, binding);
    if (status) unbind(e), burst_fail(why, status, "the arguments cannot be used: no memory, or too little of it");
    return status;
}

/* The hot path. */
static burst_status execute(burst_execution *e, uint64_t deadline) {
    (void)deadline;
    if (!e->lane) return BURST_OUTPUT_INSUFFICIENT_SIZE;
    const burst_host *host = e->prepared->device->host;
    for (uint32_t i = 0; i < e->n_before; i++) memcpy(e->before[i].to, e->before[i].from, e->before[i].bytes);
    for (uint32_t i = 0, n = e->prepared->plan.n_steps; i < n; i++) {
        if (atomic_load_explicit(&e->is_cancelled, memory_order_relaxed)) return BURST_GENERAL_FAILURE;
        burst_status status = i ? host->checkpoint() : BURST_NONE; /* it looks at the deadline, too */
        if (status) return status;
        if (xnn_run_operator(e->lane->operators[i], NULL)) return BURST_GENERAL_FAILURE;
    }
    for (uint32_t i = 0; i < e->n_after; i++) memcpy(e->after[i].to, e->after[i].from, e->after[i].bytes);
    return BURST_NONE;
}

static void cancel(burst_execution *e) { atomic_store_explicit(&e->is_cancelled, true, memory_order_relaxed); }

static burst_status output_shape(const burst_execution *e, uint32_t output, burst_shape *found) {
    const shape *s = &e->prepared->plan.shapes[e->prepared->plan.graph->outputs[output]];
    found->rank = (uint32_t)s->rank;
    for (uint32_t i = 0; i < s->rank; i++) found->dimensions[i] = (uint32_t)s->dimensions[i];
    found->is_sufficient = e->is_sufficient[output];
    return BURST_NONE;
}

/* ---- driver-managed buffers: a burst_buffer is its memory, with room behind it, so that nothing is copied ----------- */

static burst_status allocate(burst_device *device, const burst_buffer_description *description, burst_buffer **buffer,
                             uint64_t *occupied, burst_why *why) {
    (void)device;
    *buffer = room_for(description->bytes);
    *occupied = description->bytes + XNN_EXTRA_BYTES;
    return *buffer ? BURST_NONE : burst_fail(why, BURST_RESOURCE_EXHAUSTED_TRANSIENT, "no memory");
}

static void free_buffer(burst_buffer *buffer) { free(buffer); }
static void *host_memory(burst_buffer *buffer) { return buffer; }

static burst_status copy_from(burst_buffer *buffer, const void *source, uint64_t bytes, burst_why *why) {
    return (void)why, memcpy(buffer, source, bytes), BURST_NONE;
}

static burst_status copy_to(burst_buffer *buffer, void *target, uint64_t bytes, burst_why *why) {
    return (void)why, memcpy(target, buffer, bytes), BURST_NONE;
}

/* ---- the table ----------------------------------------------------------------------------------------------------- */

static const burst_device_table table = {
    .abi = BURST_DEVICE_ABI,
    .size = sizeof table,
    .name = "xnnpack",
    .version = "1",
    .type = BURST_CPU,
    .slots = 0,        /* each execution computes in the thread that calls it */
    .is_shareable = 1, /* executions leave nothing behind in a model */
    .needs = NULL, /* it only computes */
    .open = open_device,
    .close = close_device,
    .supported = supported,
    .prepare = prepare,
    .release = release,
    .bind = bind,
    .unbind = unbind,
    .execute = execute,
    .output_shape = output_shape,
    .cancel = cancel,
    .capabilities = NULL, /* they differ from machine to machine: Burst measures them */
    .allocate = allocate,
    .free_buffer = free_buffer,
    .copy_from = copy_from,
    .copy_to = copy_to,
    .host_memory = host_memory,
    .rest_model = free_idle_lanes,
};

__attribute__((visibility("default"))) const burst_device_table *burst_device_get(uint32_t abi) {
    return abi == BURST_DEVICE_ABI ? &table : NULL;
}
