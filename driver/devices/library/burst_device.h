/* A device for Burst, written in C (or in any language that can export a C function).
 *
 * A driver is a shared library that exports one function, `burst_device_get`, which returns a table of functions. Burst
 * loads the library into the device's engine process and calls the table; the driver calls Burst through `burst_host`.
 * The driver needs no Python, neither to be built nor while it serves requests: a burst's listener thread calls `execute`
 * straight from C.
 *
 * Processes. The engine prepares and executes. Two more processes load the library: one reads the table's first fields and
 * ends, and one opens the device and calls `supported` alone. The process that clients talk to never loads it. So a crash
 * ends one of the others, which is started again. A call that does not return is ended with its process: reading the table
 * after 10 s; `prepare`, `improve` and `save` a second after their deadline or after `prepare_seconds` of limits.toml;
 * `execute` a second after its deadline or cancellation; all others after `driver_seconds`.
 *
 *     const burst_device_table *burst_device_get(uint32_t abi) { return abi == BURST_DEVICE_ABI ? &table : NULL; }
 *
 * Run it: `burst serve ./libmydevice.so`, `driver.connect("./libmydevice.so")`, `burst vts ./libmydevice.so`, or give it a
 * name by an entry point of the group "burst.devices" whose value is the library's path.
 *
 * Versions. BURST_DEVICE_ABI counts incompatible changes; a library of another one is refused. Everything else is additive:
 * structs grow at their end, and each struct that stands alone says in `size` how large its maker knew it; only burst_shape
 * never grows. Burst reads no field beyond the driver's `size`, and a driver reads none beyond Burst's. Elements of arrays
 * are `stride` bytes apart, so use the functions of burst_device.c, which know this, to iterate. The ABI is provisional
 * until Burst 1.0.
 *
 * Errors. Functions that can fail return a burst_status, the HAL's ErrorStatus. With a status that is not BURST_NONE they may
 * write a text for people into `why`: UTF-8, ended by 0, at most `room` bytes with the 0. Clients are shown it.
 *
 * Threads. A function says from which threads it is called. "any" means: from several at once, for different objects, unless
 * it says "one at a time". No function is called while the process forks.
 *
 * Who frees what. Burst frees what it passes in; a pointer into it is valid until the function returns, unless the function
 * says for longer. The driver frees what it made when Burst calls the function that ends it: `release` for what `prepare`
 * made, and so on. Burst calls that exactly once, and nothing else with the object afterwards.
 *
 * What clients may do. Clients share the memory of inputs and outputs and may change it at any time. Copy indices, sizes and
 * conditions into memory of your own before you check them.
 */
#ifndef BURST_DEVICE_H
#define BURST_DEVICE_H
#include <stdint.h>
#include "burst_operations.h"
#ifdef __cplusplus
extern "C" {
#endif

/* cffi reads from here on: declarations, and constants of the form NAME NUMBER. */
#define BURST_DEVICE_ABI 1

typedef enum {
    BURST_NONE = 0,
    BURST_DEVICE_UNAVAILABLE = 1,
    BURST_GENERAL_FAILURE = 2,
    BURST_OUTPUT_INSUFFICIENT_SIZE = 3,
    BURST_INVALID_ARGUMENT = 4,
    BURST_MISSED_DEADLINE_TRANSIENT = 5,
    BURST_MISSED_DEADLINE_PERSISTENT = 6,
    BURST_RESOURCE_EXHAUSTED_TRANSIENT = 7,
    BURST_RESOURCE_EXHAUSTED_PERSISTENT = 8
} burst_status_code;
typedef int32_t burst_status;

typedef enum { BURST_OTHER = 1, BURST_CPU = 2, BURST_GPU = 3, BURST_ACCELERATOR = 4 } burst_device_type;
typedef enum { BURST_AVAILABLE = 0, BURST_BUSY = 1, BURST_OFFLINE = 2, BURST_UNKNOWN = 3 } burst_device_state;
typedef enum { BURST_LOW_POWER = 0, BURST_FAST_SINGLE_ANSWER = 1, BURST_SUSTAINED_SPEED = 2 } burst_preference;
typedef enum { BURST_PRIORITY_LOW = 0, BURST_PRIORITY_MEDIUM = 1, BURST_PRIORITY_HIGH = 2 } burst_priority;
typedef enum {
    BURST_TEMPORARY_VARIABLE = 0,
    BURST_SUBGRAPH_INPUT = 1,
    BURST_SUBGRAPH_OUTPUT = 2,
    BURST_CONSTANT_COPY = 3,
    BURST_CONSTANT_REFERENCE = 4,
    BURST_NO_VALUE = 5,
    BURST_SUBGRAPH = 6
} burst_lifetime;

typedef struct burst_device burst_device;       /* the driver's, one in a process */
typedef struct burst_prepared burst_prepared;   /* the driver's: a model made ready */
typedef struct burst_execution burst_execution; /* the driver's: a prepared model bound to memory */
typedef struct burst_buffer burst_buffer;       /* the driver's: a driver-managed buffer, or memory that it has mapped */
typedef struct burst_session burst_session;     /* the driver's: a burst that it serves itself */

typedef struct {
    uint32_t size, room; /* room: bytes at `text` */
    char *text;
} burst_why;

/* ---- models. Burst has validated them by all rules of the HAL. They live from `prepare` until after `release`. */

typedef struct {
    int32_t type; /* the HAL's number of the OperandType; of an extension: prefix << 16 | number */
    int32_t lifetime;
    uint32_t rank; /* 0: a scalar, or a tensor of unknown rank */
    const uint32_t *dimensions; /* 0: not known */
    float scale;
    int32_t zero_point;
    const void *value; /* of a constant, aligned to 64 bytes or to its own size if that is less; else NULL */
    uint64_t value_bytes;
    uint32_t subgraph; /* index in `referenced` of a SUBGRAPH */
    uint32_t channel_dimension, n_channel_scales; /* of TENSOR_QUANT8_SYMM_PER_CHANNEL */
    const float *channel_scales;
    const uint8_t *extension_params;
    uint64_t extension_params_bytes;
    const char *name; /* of an input or output that has one; else NULL */
} burst_operand;

typedef struct {
    int32_t type;     /* the HAL's number of the OperationType; of an extension: prefix << 16 | 65535, as its name says which */
    const char *name; /* "ADD"; of an extension "com.example.ext.NAME" */
    uint32_t n_inputs, n_outputs;
    const uint32_t *inputs, *outputs; /* indices of operands */
} burst_operation;

typedef struct {
    uint32_t n_operands, n_operations, n_inputs, n_outputs;
    uint32_t operand_stride, operation_stride; /* bytes from one to the next */
    const burst_operand *operands;
    const burst_operation *operations; /* in an order in which they can be executed */
    const uint32_t *inputs, *outputs;  /* indices of operands */
} burst_subgraph;

typedef struct {
    uint32_t size;
    uint32_t is_relaxed; /* float32 may be computed as float16 */
    const burst_subgraph *main_graph;
    uint32_t n_referenced, subgraph_stride;
    const burst_subgraph *referenced; /* of IF, WHILE */
    uint32_t n_extensions;
    const char *const *extension_names; /* that it uses */
    const uint16_t *extension_prefixes;
} burst_model;

/* ---- what Burst offers the driver. Valid from `open` on, as long as the device; any thread may call it. */

typedef struct {
    uint32_t abi, size;
    void *context;
    /* Whether the device takes work from now on, and why not. In "busy" and "offline" Burst refuses work with the reason. */
    void (*report)(void *context, int32_t state, const char *reason);
    void (*log)(void *context, const char *text); /* a line in the device's log */
    /* From the thread of `execute`, between pieces of work, holding nothing that others wait for: lets more urgent
     * executions through, and looks at the deadline. Not 0: the execution was cancelled or has no time left; return what
     * it returns, BURST_GENERAL_FAILURE or BURST_MISSED_DEADLINE_TRANSIENT. */
    int32_t (*checkpoint)(void);
    uint64_t (*now)(void); /* CLOCK_MONOTONIC nanoseconds, as all deadlines are */
} burst_host;

/* ---- arguments of the table's functions */

typedef struct {
    uint32_t size;
    uint32_t n_operations;
    void *context;
    /* Operation `index` of the main subgraph is not supported, because of `reason`: the operand, its shape, the remedy. */
    void (*refuse)(void *context, uint32_t index, const char *reason);
} burst_answers;

typedef struct {
    uint32_t size;
    int32_t preference;
    uint64_t deadline; /* CLOCK_MONOTONIC ns; UINT64_MAX: none. Past it, give up with BURST_MISSED_DEADLINE_TRANSIENT. */
    void *context;
    /* Call it often while preparing: it lets running bursts through. Not 0: give up with the status that it returns. */
    int32_t (*pace)(void *context);
    /* What `save` has kept of this model, verified: code, then data; 0 parts: it is prepared for the first time. */
    uint32_t n_parts;
    const void *const *parts;
    const uint64_t *part_bytes;
} burst_preparation;

typedef struct {
    uint32_t size;
    void *context;
    /* Copies. As many parts of each kind as the table says: n_code_files with is_code, which must not be changed by
     * others and used, and n_data_files without. */
    void (*put)(void *context, int32_t is_code, const void *data, uint64_t bytes);
} burst_saving;

/* One input or output. Exactly one of `memory` and `buffer` is there, or neither for an input that is omitted. */
typedef struct {
    void *memory; /* the client's; may be aligned to nothing */
    uint64_t bytes; /* at `memory`; for an output as many as the client gives, which may be too few */
    burst_buffer *buffer; /* the driver's own, used whole */
    uint32_t rank;
    const uint32_t *dimensions; /* of an input all are known; of an output what the model says, 0: not known */
} burst_argument;

typedef struct {
    uint32_t size;
    uint32_t n_inputs, n_outputs, stride; /* stride: bytes from one argument to the next */
    const burst_argument *inputs, *outputs; /* in the order of the main subgraph */
    uint64_t loop_timeout_ns; /* that each WHILE may take */
    int32_t priority;         /* of these executions, for the accelerator's own queues */
} burst_binding;

typedef struct {
    uint32_t rank;
    uint32_t dimensions[8];
    uint32_t is_sufficient; /* whether the client's memory holds it */
} burst_shape;

typedef struct {
    uint32_t size;
    void *context;
    /* Relative to the CPU in the client's process: lower is better. operand_type: the HAL's number of the type of an
     * operation's first input; -1 and -2: relaxed scalars and tensors; -3: IF; -4: WHILE. power below 0: not known. */
    void (*put)(void *context, int32_t operand_type, float execution_time, float power);
} burst_capabilities;

typedef struct {
    burst_prepared *prepared;
    uint32_t is_input, index;
    float frequency; /* 0 to 1: how often it will be used so */
} burst_role;

typedef struct {
    uint32_t size;
    int32_t type; /* of its elements, as of an operand */
    uint32_t rank;
    const uint32_t *dimensions; /* all known */
    uint64_t bytes; /* of its value in the HAL's layout: row-major, without gaps */
    uint32_t n_roles, role_stride;
    const burst_role *roles;
} burst_buffer_description;

/* A pool of a memory kind of the driver's own, as its client describes it. Nothing in it was checked. A client may
 * truncate a file at any time, and touching what is gone ends the process of all clients with SIGBUS: refuse a memfd that
 * is not sealed against it (F_GET_SEALS, F_SEAL_SHRINK). */
typedef struct {
    uint32_t size;
    const char *kind;
    int32_t fd; /* Burst's; duplicate it to keep it */
    uint64_t bytes;
    uint32_t n_fields;
    const int64_t *fields;
} burst_handle;

/* A burst that a client wants to open. The queues are described in docs/protocol.md. */
typedef struct {
    uint32_t size;
    uint32_t version; /* of the wire, 1 or 2 */
    int32_t request_queue, result_queue; /* descriptors of their memory; they and the next become the driver's, if it takes it */
    uint64_t request_offset, result_offset; /* of their control pages */
    uint64_t request_ring, result_ring;     /* offsets of their elements */
    uint32_t request_elements, result_elements;
    int32_t callback; /* a socket to the client, which resolves slots of memory */
    uint64_t spin_ns; /* that the client wants the driver to poll before it sleeps */
    int32_t priority; /* of its executions; the driver's own bursts take no turns with other executions */
    void *context;
    void (*ended)(void *context); /* call it once, from any thread, when the burst is over */
    /* Has Burst serve this burst, by `bind` and `execute` of `prepared`: the burst's own, or another one of this driver's
     * with the same inputs and outputs, which then lives as long as the burst. Call it in `configure_burst`, and return
     * what it returns; there is no session then, the descriptors stay Burst's, and `ended` is not called. If `prepared`
     * does not fit: BURST_INVALID_ARGUMENT, and the reason in `why`. */
    burst_status (*serve)(void *context, burst_prepared *prepared, burst_why *why);
} burst_offer;

/* What the driver needs that a sandbox would take away: files beyond its own folder, for one. Arrays end with NULL. */
typedef struct {
    uint32_t size;
    const char *const *read_paths, *const *write_paths;
    const char *const *system_calls; /* by name, beyond those of a program that computes: "ioctl" */
} burst_needs;

typedef struct {
    uint32_t abi, size; /* BURST_DEVICE_ABI, sizeof(burst_device_table) */
    const char *name, *version; /* version identifies this build: it keys caches and measurements */
    int32_t type;
    uint32_t slots;      /* executions at once; 0: as many as there are processors */
    uint64_t quantum_ns; /* that a client may run on while others of the same priority wait; 0: the default */
    uint32_t is_shareable; /* clients with equal models share a prepared one: `bind` may come from several of them */
    const char *const *extensions;   /* vendor extensions that it knows, by name, ended by NULL; NULL: none */
    const char *const *memory_kinds; /* of its own, by name ("com.example.heap"), ended by NULL; NULL: none */
    const burst_needs *needs;        /* NULL: nothing */
    uint32_t n_code_files, n_data_files, keeps_compilations; /* how a compilation is kept, if it is */
    uint32_t burst_version; /* the newest version of the wire that `configure_burst` speaks; 0: all of them */

    /* -- the device. `open` comes first, in each process that needs the device; one thread. If it fails, it is called again
     * for the next client. This version of Burst never calls `close`: a device's process ends as if it were killed. */
    burst_status (*open)(const burst_host *host, burst_device **device, burst_why *why);
    void (*close)(burst_device *device);
    /* Refuses, through `answers`, the operations of the main subgraph that `prepare` would not take; what it does not
     * refuse is a promise. Any thread, one at a time. */
    burst_status (*supported)(burst_device *device, const burst_model *model, const burst_answers *answers, burst_why *why);
    /* Makes a model ready of which all operations are supported. One at a time, unless the table says `prepares_at_once`. The
     * model stays until after `release`. */
    burst_status (*prepare)(burst_device *device, const burst_model *model, const burst_preparation *preparation,
                            burst_prepared **prepared, burst_why *why);
    void (*release)(burst_prepared *prepared); /* any thread; nothing is bound to it any more */

    /* -- executions. */
    /* Binds memory, which stays until after `unbind`. Any thread, several at once for one prepared model. */
    burst_status (*bind)(burst_prepared *prepared, const burst_binding *binding, burst_execution **execution, burst_why *why);
    void (*unbind)(burst_execution *execution); /* any thread; it does not run */
    /* Executes once, and returns when the outputs are written. One thread at a time for each execution, without Python.
     * deadline: CLOCK_MONOTONIC ns, UINT64_MAX: none; for the accelerator, and to give up with
     * BURST_MISSED_DEADLINE_TRANSIENT. An output that has too little memory: BURST_OUTPUT_INSUFFICIENT_SIZE. */
    burst_status (*execute)(burst_execution *execution, uint64_t deadline);
    /* The shape of an output: known after `bind` where it follows from the inputs' shapes, else after `execute`. The thread
     * that has called these. Not BURST_NONE: not known yet. An execution of which `bind` tells all shapes is executed only if
     * all outputs fit. */
    burst_status (*output_shape)(const burst_execution *execution, uint32_t output, burst_shape *shape);

    /* -- from here on all functions are optional: NULL where the driver has none. */
    /* Why the last `execute` failed. The thread that executed. */
    void (*explain)(const burst_execution *execution, burst_why *why);
    /* Ends a running `execute` with BURST_GENERAL_FAILURE as soon as it can, and every later one. Any thread; returns at once. */
    void (*cancel)(burst_execution *execution);
    /* What the device is worth. None: Burst measures it. Any thread, several at once. */
    burst_status (*capabilities)(burst_device *device, const burst_capabilities *capabilities, burst_why *why);

    /* Memory for a driver-managed buffer, in any layout. BURST_RESOURCE_EXHAUSTED_*: Burst's own memory is used, and `bind`
     * gets it as `memory`. One at a time for each device. occupied: bytes to charge to the client. */
    burst_status (*allocate)(burst_device *device, const burst_buffer_description *description, burst_buffer **buffer,
                             uint64_t *occupied, burst_why *why);
    void (*free_buffer)(burst_buffer *buffer); /* also of what `map_memory` made; any thread; nothing is bound to it */
    /* Copies the value in or out, in the HAL's layout, `bytes` as described. No execution writes it meanwhile. Any thread,
     * one at a time for each buffer. */
    burst_status (*copy_from)(burst_buffer *buffer, const void *source, uint64_t bytes, burst_why *why);
    burst_status (*copy_to)(burst_buffer *buffer, void *target, uint64_t bytes, burst_why *why);
    /* The value's address, if the CPU can use it in the HAL's layout as it lies there; NULL: a native layout. Called once,
     * when the buffer is made; the address holds until `free_buffer`. */
    void *(*host_memory)(burst_buffer *buffer);
    /* Maps memory of a kind of the driver's own. BURST_INVALID_ARGUMENT for a handle that describes no such memory,
     * BURST_GENERAL_FAILURE for memory that the device cannot use. Any thread, several at once. */
    burst_status (*map_memory)(burst_device *device, const burst_handle *handle, burst_buffer **buffer, burst_why *why);

    /* Keeps what `prepare` needs to be quicker next time. BURST_NONE without a call of `put`: not worth it. Any
     * thread, one at a time for each model; the model may be executing. */
    burst_status (*save)(burst_prepared *prepared, const burst_saving *saving, burst_why *why);
    /* A better model to replace this one, made while this one serves; *better NULL: there is none. Called once, after
     * `improves_after` executions, in a background thread; another model may be prepared meanwhile. */
    burst_status (*improve)(burst_prepared *prepared, const burst_preparation *preparation, burst_prepared **better,
                            burst_why *why);
    uint32_t (*improves_after)(burst_prepared *prepared); /* called once, when the model is made; 0: never */

    /* Hints about power. A burst on the model was opened, or has ended: expect executions soon, or no more. Any thread. */
    void (*burst_began)(burst_prepared *prepared, int32_t preference);
    void (*burst_ended)(burst_prepared *prepared);
    /* Nothing has run for a while: give back what the next `bind` or `execute` can make again. One thread at a time; `bind`
     * and `execute` may come meanwhile. */
    void (*rest)(burst_device *device);
    void (*rest_model)(burst_prepared *prepared);

    /* A burst whose queues the driver serves itself. BURST_DEVICE_UNAVAILABLE: Burst serves it, as always with NULL here. Any
     * thread. */
    burst_status (*configure_burst)(burst_prepared *prepared, const burst_offer *offer, burst_session **session,
                                    burst_why *why);
    /* The client frees these slots. Any thread; of `free_memory` and `end_burst` one at a time for each session. */
    void (*free_memory)(burst_session *session, const int32_t *slots, uint32_t n);
    /* Called exactly once; `ended` comes soon afterwards, or came before. When both have been called, the driver frees the
     * session. */
    void (*end_burst)(burst_session *session);
    /* Not 0: several threads may call `prepare` at once, with a model each. Then no account waits for another's model. */
    uint32_t prepares_at_once;
} burst_device_table;
/* cffi reads up to here. */

/* What the library exports. NULL for an ABI that it does not speak. */
const burst_device_table *burst_device_get(uint32_t abi);

/* ---- burst_device.c: compile it into your library. It allocates nothing, and any thread may call it. */

const burst_operand *burst_operand_at(const burst_subgraph *graph, uint32_t index);     /* NULL: there is none */
const burst_operation *burst_operation_at(const burst_subgraph *graph, uint32_t index); /* NULL: there is none */
const burst_subgraph *burst_subgraph_at(const burst_model *model, uint32_t index);      /* of `referenced`; NULL */
const burst_operand *burst_input_of(const burst_subgraph *graph, const burst_operation *operation, uint32_t n);
const burst_operand *burst_output_of(const burst_subgraph *graph, const burst_operation *operation, uint32_t n);
const burst_argument *burst_input_at(const burst_binding *binding, uint32_t n);
const burst_argument *burst_output_at(const burst_binding *binding, uint32_t n);
const burst_role *burst_role_at(const burst_buffer_description *description, uint32_t n);
uint64_t burst_element_bytes(int32_t type);           /* 0: of a type that has none, or of an extension */
uint64_t burst_elements(uint32_t rank, const uint32_t *dimensions); /* 1 for rank 0; UINT64_MAX: not known, or too many */
uint64_t burst_operand_bytes(const burst_operand *operand);         /* 0: not known */
int32_t burst_scalar_int(const burst_operand *operand, int32_t otherwise); /* the value of a constant INT32 or BOOL */
float burst_scalar_float(const burst_operand *operand, float otherwise);
int32_t burst_is_constant(const burst_operand *operand);
burst_status burst_fail(burst_why *why, burst_status status, const char *format, ...); /* writes the text, returns status */

#ifdef __cplusplus
}
#endif
#endif
