/* A LADSPA plug-in whose effect is a model in a device of Burst: float32[1, block] becomes float32[1, block].
 *
 *     cc -std=c11 -O2 -Wall -Wextra -fPIC -shared examples/ladspa/burst_ladspa.c $(pkg-config --cflags --libs libburst) -pthread -o burst_ladspa.so
 *
 * The sound comes out one block later, always. A block whose result has not come by then, because the model is late, has failed or
 * its process has died, is heard as it went in. The host's thread makes no system call while the device is awake; at the device's
 * death it makes one, and a thread of the plug-in has the device started again. docs/howto/ladspa.md is the page.
 */
#define _GNU_SOURCE
#include <burst.h>
#include <ladspa.h>

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INPUT, OUTPUT, WAITS, LATENCY, DRY, PORTS };
enum { SLOTS = 4, USUAL_BLOCK = 1024, MOST_BLOCK = 1 << 16 };
static const uint64_t OFFLINE_NS = 10000000000, LOAD_NS = 60000000000;

/* Memory of one block on its way. */
typedef struct {
    burst_pool *pool;
    burst_request *request;
    float *in, *out;
    uint64_t number; /* of its request; 0: none is in flight */
} slot;

typedef struct {
    LADSPA_Data *ports[PORTS];
    burst_client *device;
    burst_compiled *model;
    burst_controller *burst;
    slot slots[SLOTS];
    uint32_t block, at;   /* samples of a block, and those that have come of this one */
    float *now, *playing; /* what comes in, and what is heard: of the block before */
    uint64_t awaited;     /* the request with the block before; 0: it was not sent */
    float dry;            /* blocks that were heard as they went in */
    int has_begun;        /* a block has come */
    pthread_t mender;
    sem_t has_died;
    _Atomic int is_mending, is_over;
} effect;

/* ---- the host's thread ----------------------------------------------------------------------- */

static void note_death(effect *e, int result) {
    if (result != -EPIPE && result != -ESHUTDOWN) return;
    atomic_store(&e->is_mending, 1);
    sem_post(&e->has_died);
}

static slot *slot_of(effect *e, uint64_t number) {
    for (int i = 0; i < SLOTS; i++)
        if (e->slots[i].number == number) return &e->slots[i];
    return NULL;
}

/* The next result's slot, which is free from now on; NULL: none has come. */
static slot *next_result(effect *e, int *result) {
    burst_outcome outcome;
    *result = *e->ports[WAITS] > 0 ? burst_await(e->burst, burst_now() + OFFLINE_NS, &outcome)
                                   : burst_poll(e->burst, &outcome);
    return *result >= 0 ? slot_of(e, outcome.number) : NULL;
}

/* What is heard from now on: the effect on the last block, or the block itself, as while the device is dead. Results
 * that are late come first, and are dropped. */
static void hear(effect *e, int is_alive) {
    int result = 0, has_come = 0;
    memcpy(e->playing, e->now, e->block * sizeof(float));
    int is_due = is_alive && (e->awaited || *e->ports[WAITS] <= 0);
    for (slot *s; is_due && !has_come && (s = next_result(e, &result));) {
        has_come = s->number == e->awaited; /* 0: no number of a request */
        s->number = 0;
        if (has_come && !result) memcpy(e->playing, s->out, e->block * sizeof(float));
    }
    e->dry += e->has_begun && (!has_come || result);
    note_death(e, result);
}

static void send(effect *e, int is_alive) {
    slot *s = is_alive ? slot_of(e, 0) : NULL;
    e->awaited = 0, e->has_begun = 1;
    if (!s) return;
    memcpy(s->in, e->now, e->block * sizeof(float));
    int result = burst_try_submit(e->burst, s->request, BURST_FOREVER, &s->number);
    if (result) s->number = 0, note_death(e, result);
    e->awaited = s->number;
}

static void run(LADSPA_Handle handle, unsigned long n) {
    effect *e = handle;
    const LADSPA_Data *in = e->ports[INPUT];
    for (unsigned long done = 0; done < n;) {
        unsigned long more = n - done < e->block - e->at ? n - done : e->block - e->at;
        int is_alive = !atomic_load(&e->is_mending);
        if (!e->at) hear(e, is_alive);
        memcpy(e->now + e->at, in + done, more * sizeof(float)); /* `in` may be where the output goes */
        memcpy(e->ports[OUTPUT] + done, e->playing + e->at, more * sizeof(float));
        e->at = (e->at + (uint32_t)more) % e->block, done += more;
        if (!e->at) send(e, is_alive && !atomic_load(&e->is_mending));
    }
    *e->ports[LATENCY] = (float)e->block;
    *e->ports[DRY] = e->dry;
}

/* ---- the plug-in's thread -------------------------------------------------------------------- */

/* Has the device started again: by waiting for what is in flight, which is sent again, and by a run. */
static void *mend(void *argument) {
    effect *e = argument;
    while (!sem_wait(&e->has_died) || errno == EINTR) {
        if (atomic_load(&e->is_over)) return NULL;
        int r;
        while ((r = burst_await(e->burst, burst_now() + OFFLINE_NS, NULL)) >= 0) {}
        if (r == -ENOMSG) r = burst_run(e->burst, e->slots[0].request, burst_now() + LOAD_NS, NULL);
        if (r && !atomic_load(&e->is_over))
            fprintf(stderr, "burst_ladspa: sound goes through as it is: %s\n", burst_why());
        if (r < 0) continue; /* for good */
        for (int i = 0; i < SLOTS; i++) e->slots[i].number = 0;
        e->awaited = 0;
        atomic_store(&e->is_mending, 0);
    }
    return NULL;
}

/* ---- beginning and end ----------------------------------------------------------------------- */

static const char *given(const char *name, const char *usual) {
    const char *found = getenv(name);
    return found && *found ? found : usual;
}

static int make_slot(effect *e, slot *s) {
    uint64_t bytes = e->block * sizeof(float);
    void *memory;
    int r = burst_pool_new(2 * bytes, &s->pool, &memory);
    if (r) return r;
    s->in = memory, s->out = s->in + e->block;
    const burst_tensor in = {.pool = s->pool, .length = bytes}, out = {.pool = s->pool, .offset = bytes, .length = bytes};
    return burst_request_new(e->burst, 1, &in, 1, &out, &s->request);
}

static int begin(effect *e) {
    const char *device = given("BURST_LADSPA_DEVICE", "onnxruntime"), *path = given("BURST_LADSPA_MODEL", "");
    const uint32_t shape[] = {1, e->block};
    const burst_file_tensor tensor = {.dtype = "float32", .rank = 2, .shape = shape};
    const burst_options options = {.size = sizeof options, .depth = SLOTS, .recover = 1};
    if (!*path) return fprintf(stderr, "burst_ladspa: set BURST_LADSPA_MODEL to a model file\n"), -ENOENT;
    int r = strchr(device, '/') ? burst_connect_path(device, &e->device) : burst_connect(device, &e->device);
    if (!r) r = burst_prepare_file(e->device, path, 1, &tensor, 1, &tensor, burst_now() + LOAD_NS, &e->model);
    if (!r) r = burst_open(e->model, &options, &e->burst);
    for (int i = 0; i < SLOTS && !r; i++) r = make_slot(e, &e->slots[i]);
    /* The first run is slow, and binds the request. */
    for (int i = 0; i < SLOTS && !r; i++) r = burst_run(e->burst, e->slots[i].request, burst_now() + LOAD_NS, NULL);
    return r;
}

static void end(effect *e) {
    for (int i = 0; i < SLOTS; i++) {
        if (e->slots[i].request) burst_request_free(e->slots[i].request);
        if (e->slots[i].pool) burst_pool_free(e->slots[i].pool);
    }
    if (e->model) burst_compiled_free(e->model);
    if (e->device) burst_disconnect(e->device);
    free(e->now), free(e->playing), free(e);
}

static LADSPA_Handle instantiate(const LADSPA_Descriptor *descriptor, unsigned long rate) {
    (void)descriptor, (void)rate;
    effect *e = calloc(1, sizeof *e);
    unsigned long block = strtoul(given("BURST_LADSPA_BLOCK", "0"), NULL, 10);
    if (!e) return NULL;
    e->block = block ? (uint32_t)block : USUAL_BLOCK;
    if (block <= MOST_BLOCK) e->now = calloc(e->block, sizeof(float)), e->playing = calloc(e->block, sizeof(float));
    int r = e->now && e->playing ? begin(e) : -EINVAL;
    if (!r && !sem_init(&e->has_died, 0, 0) && !pthread_create(&e->mender, NULL, mend, e)) return e;
    fprintf(stderr, "burst_ladspa: no effect: %s\n", e->now ? burst_why() : "BURST_LADSPA_BLOCK is no block");
    if (e->burst) burst_close(e->burst);
    end(e);
    return NULL;
}

static void connect_port(LADSPA_Handle handle, unsigned long port, LADSPA_Data *place) {
    ((effect *)handle)->ports[port] = place;
}

static void cleanup(LADSPA_Handle handle) {
    effect *e = handle;
    atomic_store(&e->is_over, 1);
    burst_close(e->burst); /* a call that waits ends */
    sem_post(&e->has_died);
    pthread_join(e->mender, NULL);
    sem_destroy(&e->has_died);
    end(e);
}

/* ---- what the host sees ---------------------------------------------------------------------- */

static const LADSPA_PortDescriptor kinds[PORTS] = {
    LADSPA_PORT_AUDIO | LADSPA_PORT_INPUT, LADSPA_PORT_AUDIO | LADSPA_PORT_OUTPUT, LADSPA_PORT_CONTROL | LADSPA_PORT_INPUT,
    LADSPA_PORT_CONTROL | LADSPA_PORT_OUTPUT, LADSPA_PORT_CONTROL | LADSPA_PORT_OUTPUT};
static const char *const names[PORTS] = {"Input", "Output", "Wait for the model (offline)", "latency", "Dry blocks"};
static const LADSPA_PortRangeHint hints[PORTS] = {[WAITS] = {LADSPA_HINT_TOGGLED | LADSPA_HINT_DEFAULT_0, 0, 0}};

static const LADSPA_Descriptor plugin = {.UniqueID = 721,
                                         .Label = "burst_model",
                                         .Properties = LADSPA_PROPERTY_HARD_RT_CAPABLE,
                                         .Name = "A model in a device of Burst",
                                         .Maker = "Burst",
                                         .Copyright = "Apache-2.0",
                                         .PortCount = PORTS,
                                         .PortDescriptors = kinds,
                                         .PortNames = names,
                                         .PortRangeHints = hints,
                                         .instantiate = instantiate,
                                         .connect_port = connect_port,
                                         .run = run,
                                         .cleanup = cleanup};

const LADSPA_Descriptor *ladspa_descriptor(unsigned long index) { return index ? NULL : &plugin; }
