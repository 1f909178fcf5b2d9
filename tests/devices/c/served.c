/* The toy driver, which has Burst serve its bursts: with the prepared model that a burst was opened on, or, by CHOICE, with another
 * one, or wrongly. */
#define burst_device_get toy_device_get
#include "toy.c"
#undef burst_device_get

enum { THIS, FIRST, NOTHING, BOTH, LATE };
#ifndef CHOICE
#define CHOICE THIS
#endif

struct burst_session {
    int unused;
};

static burst_prepared *first; /* that `prepare` has made */
static void *last_context;    /* of the burst before */

static burst_status served_prepare(burst_device *device, const burst_model *model, const burst_preparation *preparation,
                                   burst_prepared **prepared, burst_why *why) {
    burst_status status = toy_prepare(device, model, preparation, prepared, why);
    if (!status && !first) first = *prepared;
    return status;
}

static burst_status served_configure(burst_prepared *prepared, const burst_offer *offer, burst_session **session, burst_why *why) {
    if (offer->size < sizeof *offer) return burst_fail(why, BURST_GENERAL_FAILURE, "this Burst serves no prepared models");
    static burst_session unused;
    burst_prepared *chosen = CHOICE == FIRST ? first : CHOICE == NOTHING ? NULL : prepared;
    void *context = CHOICE == LATE && last_context ? last_context : offer->context;
    last_context = offer->context;
    if (CHOICE == BOTH) *session = &unused;
    return offer->serve(context, chosen, why);
}

static void served_end(burst_session *session) { (void)session; }

__attribute__((visibility("default"))) const burst_device_table *burst_device_get(uint32_t abi) {
    static burst_device_table served;
    const burst_device_table *toy = toy_device_get(abi);
    if (!toy) return NULL;
    served = *toy;
    served.name = "served", served.is_shareable = 0;
    served.prepare = served_prepare, served.configure_burst = served_configure, served.end_burst = served_end;
    return &served;
}
