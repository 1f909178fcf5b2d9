/* toy.c with faults: the next one stands in the file ORDERS, "prepare 1", and is removed by the call that goes wrong. LIE is
 * a statement that spoils the table. */
#define _GNU_SOURCE
#define burst_device_get toy_device_get
#include "toy.c"
#undef burst_device_get

#include <signal.h>
#include <stdio.h>
#include <unistd.h>

enum { CRASH = 1, HANG = 2, FAIL = 3, WRONG_STATUS = 4, NOTHING = 5 };

#ifndef ORDERS
#define FOLDER "/dev"
#define ORDERS "/dev/null"
#endif

static _Thread_local int how; /* the fault that has just been met */

/* Whether the function is to go wrong now. */
static int is_faulty(const char *function) {
    char said[64] = "";
    FILE *orders = fopen(ORDERS, "r");
    if (!orders) return 0;
    int found = fscanf(orders, "%63s %d", said, &how);
    fclose(orders);
    if (found != 2 || strcmp(said, function) || unlink(ORDERS)) return 0;
    if (how == CRASH) raise(SIGSEGV);
    while (how == HANG) pause();
    return 1;
}

static burst_status answer(void) { return how == FAIL ? BURST_GENERAL_FAILURE : how == WRONG_STATUS ? 77 : BURST_NONE; }

static burst_status faulty_open(const burst_host *host, burst_device **device, burst_why *why) {
    return is_faulty("open") ? answer() : toy_open(host, device, why);
}

static burst_status faulty_supported(burst_device *device, const burst_model *model, const burst_answers *answers, burst_why *why) {
    if (!is_faulty("supported")) return toy_supported(device, model, answers, why);
    if (how == NOTHING) answers->refuse(answers->context, answers->n_operations, "one too many");
    return answer();
}

static burst_status faulty_prepare(burst_device *device, const burst_model *model, const burst_preparation *preparation,
                                   burst_prepared **prepared, burst_why *why) {
    return is_faulty("prepare") ? answer() : toy_prepare(device, model, preparation, prepared, why);
}

static void faulty_release(burst_prepared *prepared) {
    if (!is_faulty("release")) toy_release(prepared);
}

static burst_status faulty_bind(burst_prepared *prepared, const burst_binding *binding, burst_execution **execution, burst_why *why) {
    return is_faulty("bind") ? answer() : toy_bind(prepared, binding, execution, why);
}

static void faulty_unbind(burst_execution *execution) {
    if (!is_faulty("unbind")) toy_unbind(execution);
}

static burst_status faulty_execute(burst_execution *execution, uint64_t deadline) {
    return is_faulty("execute") ? answer() : toy_execute(execution, deadline);
}

static burst_status faulty_output_shape(const burst_execution *execution, uint32_t output, burst_shape *shape) {
    burst_status status = toy_output_shape(execution, output, shape);
    if (!is_faulty("output_shape")) return status;
    if (how == FAIL) shape->rank = 9;
    if (how == WRONG_STATUS) shape->dimensions[0] += 1;
    if (how == NOTHING) shape->is_sufficient = !shape->is_sufficient;
    return status;
}

#ifdef LIE
extern const char *const bad[];
const char *const bad[] = {"Bad Name", NULL};

static uint32_t improves(burst_prepared *prepared) { return prepared != NULL; }
#endif

#define VISIBLE __attribute__((visibility("default")))

VISIBLE const burst_device_table *burst_device_get(uint32_t abi) {
    static burst_device_table faulty;
    static const char *const folders[] = {FOLDER, NULL}; /* ORDERS is removed there */
    static burst_needs own;
    faulty = *toy_device_get(abi);
    own = *faulty.needs, own.write_paths = folders, faulty.needs = &own;
    faulty.name = "faulty";
    faulty.open = faulty_open, faulty.supported = faulty_supported, faulty.prepare = faulty_prepare;
    faulty.release = faulty_release, faulty.bind = faulty_bind, faulty.unbind = faulty_unbind;
    faulty.execute = faulty_execute, faulty.output_shape = faulty_output_shape;
#ifdef LIE
    (void)improves;
    LIE;
#endif
    return &faulty;
}
