/* libburst: a neural network in another process, from C. docs/howto/c.md begins with an example.
 *
 * A *client* is a connection to a device. It *prepares* a model, on which *controllers* open
 * bursts. Inputs and outputs lie in *pools*, memory that both sides map; a *request* says where in
 * them, and is sent as often as you like.
 *
 * Results. 0 and above: done. A HAL status, 1 to 8 (enum burst_status): the device refused, and
 * goes on. Below 0: -errno, and burst_why() says more. Everywhere:
 *   -EINVAL      an argument that cannot be: NULL, a handle of another kind, a size out of range
 *   -EBADF       a handle that was closed. Handles are never used again, so this is told at any
 *                time, and memory is never touched
 *   -ECANCELED   the handle was made before a fork, and is the parent's; or it was closed while
 *                this call waited
 *   -EBUSY       another thread is inside the same kind of call on this controller; or the request
 *                is in flight
 *   -EAGAIN      as many requests are in flight as may be; await a result first. Of calls that do
 *                not wait: not now
 *   -ETIMEDOUT   the deadline passed. A request was sent; its result is dropped when it comes, and
 *                the memory is the device's till then
 *   -ENOENT, -ECONNREFUSED   no device is there
 *   -EPIPE       the device died. A controller without `recover` is of no more use; with it, the
 *                device died too often
 *   -ESHUTDOWN   the device ended the burst, which is of no more use
 *   -EPROTO, -EBADMSG   the device broke the protocol; the controller, or the client, is of no more
 *                       use
 *   -ENOMEM, -EMFILE, -ENFILE …   as the kernel says
 *
 * Threads. Any thread may use any handle. One at a time may send on a controller (burst_run,
 * burst_submit, burst_try_submit), and one may receive (burst_run, burst_await, burst_poll);
 * another one gets -EBUSY. Calls on a client wait for each other. A signal never ends a call.
 *
 * Handles are no pointers to memory. They may be closed in any order; what they stand for lives as
 * long as others need it. A deadline is absolute CLOCK_MONOTONIC nanoseconds, as burst_now() tells;
 * BURST_FOREVER is none.
 */
#ifndef BURST_H
#define BURST_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BURST_FOREVER UINT64_MAX

enum burst_status {
    BURST_NONE = 0,
    BURST_DEVICE_UNAVAILABLE = 1,
    BURST_GENERAL_FAILURE = 2,
    BURST_OUTPUT_INSUFFICIENT_SIZE = 3,
    BURST_INVALID_ARGUMENT = 4,
    BURST_MISSED_DEADLINE_TRANSIENT = 5,
    BURST_MISSED_DEADLINE_PERSISTENT = 6,
    BURST_RESOURCE_EXHAUSTED_TRANSIENT = 7,
    BURST_RESOURCE_EXHAUSTED_PERSISTENT = 8
};
/* the HAL's numbers */
enum burst_operand_type {
    BURST_FLOAT32 = 0,
    BURST_INT32 = 1,
    BURST_UINT32 = 2,
    BURST_FLOAT32_TENSOR = 3,
    BURST_INT32_TENSOR = 4,
    BURST_QUANT8_ASYMM_TENSOR = 5,
    BURST_BOOL = 6,
    BURST_FLOAT16_TENSOR = 8,
    BURST_BOOL8_TENSOR = 9,
    BURST_QUANT8_ASYMM_SIGNED_TENSOR = 14
};

/* The NDK's numbers. */
enum burst_priority {
    BURST_PRIORITY_LOW = 90,
    BURST_PRIORITY_MEDIUM = 100,
    BURST_PRIORITY_HIGH = 110
};
enum burst_preference {
    BURST_FAST_SINGLE_ANSWER = 0,
    BURST_LOW_POWER = 1,
    BURST_SUSTAINED_SPEED = 2
};

typedef struct burst_client burst_client;         /* a connection to a device */
typedef struct burst_builder burst_builder;       /* a model that is being put together */
typedef struct burst_compiled burst_compiled;     /* a model that the device has prepared */
typedef struct burst_controller burst_controller; /* a burst */
typedef struct burst_pool burst_pool;             /* shared memory */
/* One execution, to be sent any number of times. */
typedef struct burst_request burst_request;
typedef struct burst_stream burst_stream; /* an execution that is repeated on what it leaves */

/* Why this thread's last call failed, in words; "" before the first failure. Valid until this
 * thread's next failure. Wait-free. */
const char *burst_why(void);
/* Now, as deadlines are. Wait-free. */
uint64_t burst_now(void);

/* ---- devices --------------------------------------------------------------------------------- */

/* Connects to the device of that name, and starts it if need be: by `python3 -c`, or by the program
 * that BURST_PYTHON names. Blocks until the device has answered, 60 s at most. */
int burst_connect(const char *name, burst_client **client);
/* The same, to the socket of a device that runs already (`burst serve`). Starts nothing. */
int burst_connect_path(const char *path, burst_client **client);
/* How models are prepared by calls after this one; at first with medium priority, for fast single
 * answers. A priority orders the executions of a model among those of all others that wait for the
 * device; high ones come first. Waits for other calls on this client. After an error all is as
 * before. */
int burst_prefer(burst_client *client, int priority, int preference);
/* The connection ends when no model, and no controller, needs it any more. Blocks for 1 s at
 * most. */
int burst_disconnect(burst_client *client);

/* ---- models ---------------------------------------------------------------------------------- */

/* A model, operand by operand; one thread at a time. Each function that adds an operand returns its
 * index, from 0. `shape` has `rank` dimensions; 0 is an open one. Nothing here talks to a
 * device. */
int burst_builder_new(burst_builder **builder);
int burst_builder_free(burst_builder *builder);
int burst_builder_operand(burst_builder *builder, int type, uint32_t rank, const uint32_t *shape,
                          float scale, int32_t zero_point);
/* A constant; its bytes are copied. */
int burst_builder_constant(burst_builder *builder, int type, uint32_t rank, const uint32_t *shape,
                           float scale, int32_t zero_point, const void *bytes, size_t n);
/* `name`: the HAL's, as "ADD". `inputs`, `outputs`: indices of operands. */
int burst_builder_operation(burst_builder *builder, const char *name, uint32_t n_inputs,
                            const uint32_t *inputs, uint32_t n_outputs, const uint32_t *outputs);
/* Which operands are the model's inputs and outputs; last of all, and before it is prepared. */
int burst_builder_finish(burst_builder *builder, uint32_t n_inputs, const uint32_t *inputs,
                         uint32_t n_outputs, const uint32_t *outputs);

/* Prepares a finished model. Blocks until the device has compiled it, or the deadline; then what it
 * prepared late is freed. */
int burst_prepare(burst_client *client, burst_builder *builder, uint64_t deadline,
                  burst_compiled **compiled);
/* An input or output of a model file: its element type as numpy's name ("float32", "uint8", "int64"
 * …), rank and dimensions. */
typedef struct {
    const char *dtype;
    uint32_t rank;
    const uint32_t *shape; /* 0: open */
} burst_file_tensor;
/* Prepares a model file, .onnx or .tflite, which the device runs as it is; inputs and outputs in
 * the file's order. Blocks likewise. */
int burst_prepare_file(burst_client *client, const char *path, uint32_t n_inputs,
                       const burst_file_tensor *inputs, uint32_t n_outputs,
                       const burst_file_tensor *outputs, uint64_t deadline,
                       burst_compiled **compiled);
/* Prepares a model as docs/protocol.md, section 5, lays it out: `offset` and `bytes` of its
 * structure in `memory`, which is sealed; the descriptor stays yours. Blocks likewise. */
int burst_prepare_encoded(burst_client *client, int memory, uint64_t offset, uint64_t bytes,
                          uint64_t deadline, burst_compiled **compiled);
int burst_compiled_free(burst_compiled *compiled);

/* ---- memory ---------------------------------------------------------------------------------- */

/* New memory of so many bytes, zeros, mapped at *base as long as the handle is open. -ENOSPC: not
 * enough is left. */
int burst_pool_new(size_t bytes, burst_pool **pool, void **base);
/* A sealed memfd of yours (F_SEAL_SHRINK); the descriptor stays yours. */
int burst_pool_from_fd(int fd, size_t bytes, burst_pool **pool, void **base);
/* Unmaps it; requests that name it keep it for the device until they are freed. */
int burst_pool_free(burst_pool *pool);

/* ---- bursts ---------------------------------------------------------------------------------- */

typedef struct {
    uint32_t size;  /* sizeof(burst_options): what you were compiled with */
    uint32_t depth; /* requests in flight, 1 to 64; 0: 8 */
    /* ns to poll for a result, or a request, before sleeping; 0: 50 us; 10 s at most. */
    uint64_t spin;
    /* Start the device again when it dies, ten times within ten seconds at most, and send again
     * what is in flight. */
    uint32_t recover;
    uint32_t measure; /* ask for the device's times */
    /* ns that a WHILE may take, 2^63 - 1 at most; 0: what the device chooses. */
    uint64_t loop_timeout;
} burst_options;
/* Opens a burst; options NULL: all 0. Blocks until the device has answered. A program's first burst
 * starts the thread that hands over the memory of all of them. */
int burst_open(burst_compiled *compiled, const burst_options *options,
               burst_controller **controller);
/* Ends it: calls that wait get -ECANCELED. Blocks for 1 s at most, and while another thread is
 * starting the device again. */
int burst_close(burst_controller *controller);

typedef struct {
    burst_pool *pool; /* NULL: omitted, and the rest is 0 */
    uint64_t offset, length;
    uint32_t rank; /* 0: as in the model */
    const uint32_t *shape;
} burst_tensor;
/* Where the inputs and outputs of a request lie, in the model's order. Everything is copied. Does
 * not block. */
int burst_request_new(burst_controller *controller, uint32_t n_inputs, const burst_tensor *inputs,
                      uint32_t n_outputs, const burst_tensor *outputs, burst_request **request);
/* The device lets go of memory that no request names any more; a device that does not read blocks
 * this for 5 s at most. -EBUSY while it is in flight; one that another thread runs is freed when
 * that has its result. */
int burst_request_free(burst_request *request);

typedef struct {
    uint64_t number;               /* of the request, from 1 */
    uint64_t on_device, in_driver; /* microseconds; UINT64_MAX: not measured */
    int32_t status;                /* burst_status, also the call's result */
    /* Outputs whose shapes the device told; burst_output_shape has them. */
    uint32_t n_shapes;
} burst_outcome;
/* Executes once and waits; `outcome` may be NULL. The device gets the deadline, too. -EBUSY while
 * others are in flight. */
int burst_run(burst_controller *controller, burst_request *request, uint64_t deadline,
              burst_outcome *outcome);
/* Sends only; `number` may be NULL. Does not block, unless the device has died and is started
 * again. */
int burst_submit(burst_controller *controller, burst_request *request, uint64_t deadline,
                 uint64_t *number);
/* The oldest result that is wanted, in the order of the requests. -ENOMSG: none is in flight. */
int burst_await(burst_controller *controller, uint64_t deadline, burst_outcome *outcome);
/* A request that is in flight is not wanted any more: the device need not begin it, and its result
 * is dropped. -ENOENT: it is not in flight. Does not block. */
int burst_cancel(burst_controller *controller, uint64_t number);
/* As burst_submit and burst_await, for threads that must not be late: they wait for no thread.
 * While the device is awake they make no system call, allocate nothing, and take no lock that
 * another thread has; for a device that sleeps, burst_try_submit makes one call, which wakes it.
 * -EAGAIN: no room or no result now, or another thread has a lock of the controller. -ENOMSG: as
 * of burst_await. For these two results burst_why() has no words. -EPIPE: the device died, and with
 * `recover` a call that waits starts it again. */
int burst_try_submit(burst_controller *controller, burst_request *request, uint64_t deadline,
                     uint64_t *number);
int burst_poll(burst_controller *controller, burst_outcome *outcome);
/* Of the last outcome, by the thread that received it: returns the rank, and writes at most `room`
 * dimensions; -EINVAL: not told. */
int burst_output_shape(burst_controller *controller, uint32_t output, uint32_t *shape,
                       uint32_t room);

typedef struct {
    uint64_t requests, results, timeouts, revivals, memories_sent, in_flight;
    /* Of all results: from request to result; of the thread that waited. */
    uint64_t total_ns, asleep_ns;
} burst_statistics;
/* Any thread, at any time. Does not block. */
int burst_count(burst_controller *controller, burst_statistics *statistics);

/* ---- without a burst ------------------------------------------------------------------------- */

typedef struct {
    uint32_t size;    /* sizeof(burst_execution) */
    uint32_t measure; /* ask for the device's times */
    /* Start the device again when it dies, ten times within ten seconds at most, and execute
     * again. */
    uint32_t recover;
    uint32_t room; /* words at `shapes` */
    /* Written for `n_shapes` outputs, one after another: whether its memory sufficed, rank,
     * dimensions. */
    uint32_t *shapes;
    /* ns that a WHILE may take, 2^63 - 1 at most; 0: what the device chooses. */
    uint64_t loop_timeout;
} burst_execution;
/* Executes once, by a call to the device instead of a burst: slower, but nothing has to be opened,
 * and a request may be of any length up to 64 KB. `how` NULL: all 0. `outcome` may be NULL; its
 * `number` is 0. Any thread: executions on one client wait for each other. Blocks until the device
 * has answered, or the deadline. After -ETIMEDOUT the memory is the device's until a later
 * execution on this client has been answered. After -EPIPE everything on the client is of no more
 * use, but with `recover` or in a controller that has it; after any other error all goes on. The
 * device lets go of a pool that was freed before the client's next execution, or with its
 * connection. */
int burst_execute(burst_compiled *compiled, uint32_t n_inputs, const burst_tensor *inputs,
                  uint32_t n_outputs, const burst_tensor *outputs, const burst_execution *how,
                  uint64_t deadline, burst_outcome *outcome);

/* ---- results in a stream --------------------------------------------------------------------- */

/* An output that is the input of the next step. */
typedef struct {
    uint32_t output, input;
} burst_feedback;
typedef struct {
    uint32_t size; /* sizeof(burst_stream_options) */
    uint32_t most; /* steps, 1048576 at most; 0: 4096 */
    /* How many sets of outputs there are, an even number from 2 to 64: so many results the device
     * may be ahead. */
    uint32_t sets;
    uint32_t n_values; /* 64 at most */
    /* Ends the stream after the step in which all elements of this output are true, or each is one
     * of `values`; it has memory. -1: none does. */
    int64_t until;
    const int64_t *values;
    uint32_t room;    /* words at `shapes` */
    uint32_t *shapes; /* as those of burst_execution, of the outputs that have memory */
} burst_stream_options;
/* Has the device repeat an execution, until an output or a count ends it. `inputs`: of the first
 * step; those that are not fed stay the same. `outputs`: `sets` times as many as the model has. One
 * that is fed back has no pool: it stays on the device, and may change its size; all others have
 * room for each of their values. Everything is copied, but what `shapes` points to. Blocks until
 * the device has taken it. */
int burst_stream_open(burst_compiled *compiled, uint32_t n_inputs, const burst_tensor *inputs,
                      uint32_t n_outputs, const burst_tensor *outputs, uint32_t n_feedback,
                      const burst_feedback *feedback, const burst_stream_options *options,
                      uint64_t deadline, burst_stream **stream);
/* The next result, in the order of the steps: it lies in set *set, which is yours until the next
 * call. *more: 0 if it is the last one; then, and after a status, calls get -ENOMSG. After
 * -ETIMEDOUT the stream goes on. `outcome`, `more` and `set` may be NULL. One thread at a time. */
int burst_stream_next(burst_stream *stream, uint64_t deadline, burst_outcome *outcome,
                      uint32_t *set, int *more);
/* Ends it, within a step on the device; a call that waits gets -ECANCELED. */
int burst_stream_close(burst_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
