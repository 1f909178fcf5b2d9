/* Every declaration that burst._core exports: compiled by C and parsed verbatim by cffi (so: no
 * guards, no includes, no macros). Results below 0 are -errno, with the meanings that fmq/api.h
 * gives them.
 */

typedef struct fmq_end fmq_end; /* of fmq._core */
/* 0; -EPROTO: that fmq_this_process() is of an fmq._core built from other sources */
int burst_fits(const void *process);

/* bursts: one packet is one execution (burst/wire.py), and packets of one kind go each way through
 * a queue of 24-byte elements. `framed`: a packet is as long as its first element says and carries
 * an id (wire version 2); else all that has arrived is one packet (version 1), and its id is its
 * number. */

/* By the client; begin: before it encoded. */
typedef struct {
    uint64_t id, begin, sent, received;
} burst_sent;
/* By the device; started: bound and admitted; if it was not begun, the same as done. */
typedef struct {
    uint64_t id, taken, started, done;
} burst_served;
/* By the device, when it has looked at its accelerator's clock, which may be after the answer: when
 * that copied in, computed and copied out, from and to; both 0: it did not. */
typedef struct {
    uint64_t id, in, in_end, work, work_end, out, out_end, reserved;
} burst_worked;
/* By the device, before it answers with that status: what a result packet has no room for. phase: 1
 * + its place in Phase of burst.messages, or 0; times in ns, 2^64 - 1 where not known. Of a result
 * with status 0: late_by is the number of requests that were one run, this one among them. */
typedef struct {
    uint64_t id, status, phase, late_by, retry_after, nbytes;
    char text[464];
} burst_failure;
typedef struct {
    /* tid: of the thread that got an answer of more than 0.1 ms last; 0 before one */
    uint64_t requests, results, total_ns, busy_ns, asleep_ns, pid, depth, timeouts, drops, plain,
        tid, reserved[5];
} burst_client_counts;
typedef struct {
    uint64_t answered, running, busy_ns, asleep_ns, signal, tid, pid, copied, checked, priority,
        begun, waits, waited_ns, usual_ns, joined, reserved;
} burst_device_counts;
/* Failures: as many as requests may be in flight. */
enum { BURST_RECORDS = 256, BURST_FAILURES = 64 };
typedef struct {
    uint64_t magic, version, records;
    char model[104]; /* UTF-8, as its client describes it */
    /* One writer for each 128-byte line; all times are CLOCK_MONOTONIC nanoseconds. */
    burst_client_counts client;
    /* running: the request's id, or 0; begun: that one's, once it has its turn; waits: for turns;
     * signal: that one crashed the device; priority: 1 to 3, 0 unknown; usual: what executions like
     * the last one that missed its deadline take, 0 unknown; bytes copied because of where they
     * lay, and to be looked at in private memory; joined: executions that others shared a run with
     */
    burst_device_counts device;
    /* UTF-8: the last part of its client's application, by the device */
    char application[128];
    /* by the client, seldom: bit id % 64 is set while the client does not want that result any
     * more. At most 64 requests are in flight, so each has a bit of its own */
    uint64_t abandoned, reserved[15];
    burst_sent sent[256]; /* the last requests, by id modulo 256 */
    burst_served served[256];
    burst_failure failures[64]; /* by id modulo 64 */
    /* by id modulo 256; traces of clients that were built before it have none */
    burst_worked worked[256];
} burst_trace;

typedef struct burst_caller burst_caller;
struct burst_caller {
    /* burst_call, for fmq._hot and burst._hot */
    int64_t (*start)(burst_caller *caller, void *packet, uint64_t bytes);
    /* the rest of a burst_call that was sent; -ETIMEDOUT again: Python's */
    int64_t (*finish)(burst_caller *caller, uint64_t deadline);
    void (*over)(burst_caller *caller); /* `calling` goes */
    fmq_end *out, *back;
    burst_trace *trace;
    /* buffer_bytes each: `result` holds the last result that was not like the one before */
    unsigned char *spare, *result;
    uint64_t buffer_bytes, result_bytes;
    uint64_t spin_ns;
    /* of burst_call, at least; it takes longer while answers usually come soon */
    uint64_t hold_ns;
    uint64_t usual_ns; /* what answers to burst_call have lately taken, long ones cut */
    /* what answers to single requests take, and how far they are from that */
    uint64_t expected_ns, deviation_ns;
    /* what such answers take, when the window is `spin_ns` and when it covers them */
    uint64_t took_ns[2];
    /* for how long the last request has waited for its turn on the device */
    uint64_t queued_ns;
    uint64_t begin, deadline;      /* of the next request; begin 0: when it is sent */
    uint64_t sent, received;       /* the last one of each */
    uint64_t id, result_id;        /* of the last request, and of the last result */
    uint64_t results;              /* how many came */
    uint64_t on_device, in_driver; /* times of the last result; 2^64 - 1: not measured */
    /* requests that came long after the result before them, and answers that took long: in a row */
    uint32_t pauses, long_answers;
    /* whether the window covers answers, whether that is a trial, and for how many more */
    uint32_t covers, is_trial, trial_left;
    int framed;
    /* burst._hot may send what was sent before: no request is in flight, and nothing else has
     * changed */
    uint32_t is_ready;
    /* a burst_call is not over: from its beginning until its result is there, or Python gives it
     * up; 2: and a thread waits for that */
    uint32_t calling;
};

/* `length`: elements of each queue. Returns NULL if there is no memory. */
burst_caller *burst_caller_new(fmq_end *out, fmq_end *back, burst_trace *trace, uint64_t length,
                               uint64_t spin_ns, uint64_t hold_ns);
void burst_caller_free(burst_caller *caller); /* no thread is inside */
/* Patches id and deadline into the packet, and sends it. -EAGAIN: no room. */
int burst_send(burst_caller *caller, void *packet, uint64_t bytes);
/* Returns 0 for a result like the last one, but for id and times; else its bytes. */
int64_t burst_receive(burst_caller *caller, uint64_t deadline);
/* Sends and receives. -ETIMEDOUT: it was sent, and `calling` stays until `over`, or until Python
 * clears it. */
int64_t burst_call(burst_caller *caller, void *packet, uint64_t bytes);
/* The device need not begin that request any more; its result comes all the same. */
void burst_abandon(burst_caller *caller, uint64_t id);
void burst_settle(burst_caller *caller, uint64_t id); /* that result has come */
void burst_await_call(burst_caller *caller);          /* until `calling` is over, 1 ms at most */

/* slots: the numbers by which a client's requests name memory (README.md, "Slots"). Any thread. */
enum { BURST_LAST_SLOT = 2147483647 }; /* i32 on the wire */
typedef struct burst_slots burst_slots;
burst_slots *burst_slots_new(void); /* NULL: no memory */
void burst_slots_free(burst_slots *slots);
/* The slot of that owner, used once more; or a new one, of the memory behind `fd`, which is
 * borrowed, and its description on the wire; -1: closed already. owner NULL: always a new one.
 * -EOVERFLOW: they are used up. */
int64_t burst_slots_use(burst_slots *slots, const void *owner, int fd, const void *description,
                        uint32_t bytes);
/* used once less; 1: it stands for nothing any more */
int burst_slots_drop(burst_slots *slots, int64_t slot);
uint64_t burst_slots_sent(burst_slots *slots); /* memories that devices were given */
/* gives memory all its pages, charged to this process; what cannot have them stays as it is */
void burst_fill_holes(int fd);

/* sockets: the callback and the context of a burst, and the process's thread that hands memory
 * over. */
typedef struct burst_sockets burst_sockets;
/* far: the device's ends, which the caller closes */
int burst_sockets_open(burst_slots *slots, int far[2], burst_sockets **sockets);
/* the device is another account's: memory is handed over with all its pages */
void burst_sockets_fill(burst_sockets *sockets);
int burst_sockets_context(const burst_sockets *sockets); /* borrowed; -1: closed */
/* the device may let go of the memory of these */
int burst_sockets_tell(burst_sockets *sockets, const int64_t *slots, uint32_t n);
void burst_sockets_close(burst_sockets *sockets);
void burst_sockets_free(burst_sockets *sockets); /* and closes them */
const char *burst_why(void);                     /* what failed last in this thread, in words */

/* wire: a packet, both ways; pure, and for any thread. burst/wire.py has the table of its elements.
 * Numbers of a request that do not fit their field are refused, so they have 64 bits here. */
typedef struct {
    uint32_t has_no_value; /* then the rest is 0 */
    uint32_t rank;         /* 0: as in the model */
    int64_t pool;          /* the index of its place */
    int64_t offset, length;
    const int64_t *dimensions;
} burst_argument;
typedef struct {
    int64_t number; /* a slot of the burst, or the token of a device's buffer */
    uint32_t is_token;
} burst_place;
typedef struct {
    const burst_argument *inputs, *outputs;
    const burst_place *places;
    uint32_t n_inputs, n_outputs, n_places, measure;
    uint64_t loop_timeout, id, deadline; /* ns; 2^64 - 1: none */
} burst_request_packet;
typedef struct {
    uint64_t on_device, in_driver, id; /* us; 2^64 - 1: not measured */
    int32_t status;
    uint32_t n_shapes;
} burst_result_packet;
typedef struct { /* what is wrong, and at which element */
    uint64_t element;
    char text[120];
} burst_complaint;
/* `why` may be NULL. encode: returns the bytes of the packet; `packet` NULL: which it would have.
 * -EMSGSIZE: more than `bytes`; -EINVAL: it cannot be said. decode: 0, or -EBADMSG: no encoder
 * makes that. `room`: an argument for each element; the request points into it. `shapes`, for each
 * of n_shapes: is it sufficient, rank, dimensions; decode has room for two numbers for each
 * element. */
int64_t burst_encode_request(const burst_request_packet *request, int version, void *packet,
                             uint64_t bytes, burst_complaint *why);
int burst_decode_request(const void *packet, uint64_t bytes, int version,
                         burst_request_packet *request, burst_argument *room, burst_complaint *why);
int64_t burst_encode_result(const burst_result_packet *result, const uint32_t *shapes, int version,
                            void *packet, uint64_t bytes, burst_complaint *why);
int burst_decode_result(const void *packet, uint64_t bytes, int version,
                        burst_result_packet *result, uint32_t *shapes, burst_complaint *why);

/* deadlines, absolute CLOCK_MONOTONIC nanoseconds; UINT64_MAX: none. Any thread may judge by an
 * estimate, and add to it. */
typedef struct {
    uint64_t least_ns, usual_ns; /* of the executions so far; 0: not known */
    uint64_t begun_ns;           /* before one was done: the longest that was given up */
    uint64_t doubts;             /* refusals since the last one */
} burst_estimate;
uint64_t burst_due(void); /* of what this thread executes or prepares */
void burst_set_due(uint64_t deadline);
/* was_done 0: it was given up after that time */
void burst_took(burst_estimate *estimate, uint64_t ns, int was_done);
/* 0: the time left is what is needed, or more; else an error status (README.md, "Deadlines").
 * `since`: when it could have begun, but for other executions. `estimate` may be NULL. */
int32_t burst_admit(burst_estimate *estimate, uint64_t since, uint64_t now, uint64_t deadline);

typedef int32_t burst_function(void *context); /* executes; returns an error status, 0 to 8 */
typedef struct burst_ticket burst_ticket;      /* of a run queue; below */
/* judge: one execution of a request, however it came. It decides when that begins and what is said
 * of its end. One thread at a time; times are CLOCK_MONOTONIC nanoseconds. */
typedef struct {
    uint64_t deadline; /* UINT64_MAX: none */
    /* when it could have begun, but for other executions; before that was found out */
    uint64_t since, known;
    uint64_t begun, done;     /* 0: not yet */
    uint64_t waited;          /* for other executions, before and since it began */
    uint64_t due;             /* burst_due of its thread before it */
    burst_estimate *estimate; /* of executions like it, or NULL */
    uint32_t is_first;        /* of its request: it says little about others */
    /* In which it was bound, before `since`. That is done once, and so it may go on for as long
     * after its deadline: then it is known whether the next one is done in time. */
    uint64_t bound;
} burst_attempt;
/* `known` and `since` are set. 0: it has begun, with a slot if there is a ticket; a status: it
 * cannot be done in time; -ECANCELED: the ticket was closed. */
int burst_judge_begin(burst_attempt *attempt, burst_ticket *ticket);
/* Of one that has begun, with its times: what is said of it if it ended with that status. The
 * estimate learns from it. A success after the deadline is a miss; MISSED_DEADLINE_TRANSIENT means
 * that it was given up. */
uint32_t burst_judge_end(const burst_attempt *attempt, uint32_t status);
/* of one that has begun with that ticket and is not done by its deadline; any thread */
uint32_t burst_judge_late(const burst_attempt *attempt, burst_ticket *ticket);
/* The same in the thread that executes, with its clock and its burst_due. `since` 0: now. Only what
 * has begun is ended. */
int burst_begin_attempt(burst_attempt *attempt, burst_ticket *ticket);
uint32_t burst_end_attempt(burst_attempt *attempt, burst_ticket *ticket, uint32_t status);
typedef struct {
    void *listen, *answer; /* burst_listen and burst_answer, for burst._hot */
    fmq_end *out, *request;
    burst_trace *trace;
    unsigned char *buffer; /* buffer_bytes: the request that is being served */
    uint64_t buffer_bytes, bytes;
    uint64_t spin_ns;
    uint64_t id, taken;    /* of that request */
    burst_attempt attempt; /* to execute it */
    uint64_t before;       /* when the request before it was answered */
    uint64_t due;          /* burst_due of this thread */
    /* for executions of plans, which wait for their turn with it; NULL: they do not */
    burst_ticket *ticket;
    struct burst_plan *plans;
    uint64_t uses; /* of plans */
    uint32_t count, used, last;
    int32_t current; /* the index of the plan that runs, or -1 */
    int framed, in_python;
    int is_judged;   /* what Python says of the execution is what is said */
    uint32_t pauses; /* requests in a row that came long after polling for them would have ended */
    int32_t failed;  /* what a plan's C function returned, which Python explains and answers */
    struct burst_inflight *inflight; /* executions that have begun and end elsewhere */
    int overlaps;                    /* there are such plans, or there were */
    int is_in_flight;                /* the request in hand is one of these */
    int may_not_wait;                /* for room for an answer */
} burst_listener;

/* Answers the last request (answer NULL: with the success that its plan has learnt), and serves
 * until Python is needed. Returns 1 + the plan to run, -ENOENT for a request that is none's, in
 * `buffer`; -ESTALE: a plan was forgotten while it ran; -EREMOTEIO: the C function of the plan
 * `current` has `failed`. */
int64_t burst_listen(burst_listener *listener, const void *answer, uint64_t bytes);
/* Answers with the success that the plan has learnt, if that takes no waiting and wakes no thread:
 * 0, and burst_listen only serves. -EAGAIN: burst_listen has to answer. Else as burst_listen. */
int64_t burst_answer(burst_listener *listener);
int burst_plans(burst_listener *listener, uint32_t n);
void burst_drop_plans(burst_listener *listener);
/* From the listener's thread: where the next plan goes, in place of one that was forgotten, or else
 * of the one that was used longest ago */
uint32_t burst_next_plan(const burst_listener *listener);
/* From the listener's thread: the request in `buffer` is plan i from now on, and runs. */
int burst_learn(burst_listener *listener, uint32_t i, const void *answer, uint64_t bytes,
                void *function, void *context, int measure, uint64_t copied, uint64_t checked);
/* as burst_learn: of plan i's executions */
int burst_expect(burst_listener *listener, uint32_t i, burst_estimate *estimate);
/* as burst_learn: what Python calls for plan i takes no slot before it asks for one */
int burst_enters_itself(burst_listener *listener, uint32_t i);
/* words to set to 1 when plan i fails */
int burst_writes(burst_listener *listener, uint32_t i, uint32_t **writes, uint64_t n);
/* from any thread; true: it runs, and -ESTALE comes after it */
int burst_forget(burst_listener *listener, uint32_t i);
/* in flight: executions that only begin in the listener's thread, and end in another one, in any
 * order: work for a GPU, say. Meanwhile the listener takes the next request; answers go out in the
 * order of the requests. README.md, "In flight". */
typedef struct {
    void *to;
    const void *from;
    uint64_t bytes;
} burst_copy;
typedef struct {
    void *run;
    burst_copy *copies;
    uint64_t n;
} burst_completion;
/* 0: burst_inflight_complete(run) follows; else an error status */
typedef int32_t burst_beginning(void *context, void *run);
/* As burst_learn: from now on the function of plan i (a burst_beginning), or what Python calls for
 * it, only begins. Returns the plan's run, which lives as long as the plan; NULL: no memory.
 * burst_timed_overdue watches it. */
void *burst_inflight_new(burst_listener *listener, uint32_t i);
/* of the request that it is for, from its begin to its answer */
uint64_t burst_inflight_id(const void *run);
/* once for each execution that has begun; any thread, without waiting for any other */
void burst_inflight_complete(void *run);
/* the same, after the copies of a burst_completion, which lives as long as the run */
void burst_inflight_copy_and_complete(void *completion);
void burst_inflight_drain(burst_listener *listener); /* waits until none is in flight */
/* the client is gone: none begins any more, and those in flight have to end now; any thread */
void burst_inflight_close(burst_listener *listener);
/* whether plan i runs; any thread */
_Bool burst_inflight_is_pending(const burst_listener *listener, uint32_t i);
/* foreign: a library's calls as a burst_function. Contexts that share a turn run one after the
 * other. */
typedef int foreign_function(void *object, uint64_t number, uint64_t n_inputs, void *inputs,
                             uint64_t n_outputs, void *outputs);
typedef struct {
    uint64_t reserved[8]; /* a mutex */
    struct burst_foreign *running;
    uint64_t until; /* when the loop that runs has taken too long; 0: whenever */
    uint64_t due;   /* burst_due of the thread that runs */
} burst_turn;
typedef struct {
    uint64_t number, n_inputs, n_outputs;
    void *inputs, *outputs;
    uint64_t limit_ns; /* that this call may take; 0: as long as it likes */
} burst_step;
/* queued: overdue, and not begun */
enum { BURST_CANCELLED = 1, BURST_TIMED_OUT = 2, BURST_OVERDUE = 3, BURST_QUEUED = 4 };
typedef struct burst_foreign {
    foreign_function *function;
    void *object;
    burst_step *steps;
    burst_copy *before, *after;
    uint64_t n_steps, n_before, n_after;
    burst_turn *turn;
    int32_t status; /* of the last call: 0 is success, all else the library's own word */
    /* why the last run ended early, of the above; 0: it did not, or the call failed */
    uint32_t ended;
    uint32_t cancelled; /* for good */
} burst_foreign;
void burst_turn_init(burst_turn *turn);
/* copies, calls step by step, copies; returns an error status */
int32_t burst_foreign_run(void *foreign);
/* ends its run before the next step, and all later ones at once */
void burst_foreign_cancel(burst_foreign *foreign);
_Bool burst_foreign_runs(burst_foreign *foreign); /* whether its run is in progress; any thread */
/* for the library to call within a step: whether it has to stop */
_Bool burst_foreign_ends(void *turn);
/* timed: a driver's function that takes an object and a deadline, as a burst_function. */
/* returns an error status; UINT64_MAX: no deadline */
typedef int32_t driver_function(void *object, uint64_t deadline);
typedef struct burst_timed burst_timed;
enum { BURST_TIMED_CANCELLED = -1 };
burst_timed *burst_timed_new(driver_function *function, void *object); /* NULL: no memory */
void burst_timed_free(burst_timed *timed);                             /* it does not run */
/* calls the function; returns its status, GENERAL_FAILURE for what is none */
int32_t burst_timed_run(void *timed);
/* later runs fail at once, and one that goes on has to end now; any thread */
void burst_timed_cancel(burst_timed *timed);
/* what the function has returned last; BURST_TIMED_CANCELLED: it was not called */
int32_t burst_timed_status(const burst_timed *timed);
/* within a run: burst_checkpoint; GENERAL_FAILURE: cancelled; MISSED_DEADLINE_TRANSIENT: late */
int32_t burst_timed_checkpoint(void);
/* sleeps until a run goes on so long after its deadline or cancellation; its object */
void *burst_timed_overdue(uint64_t grace_ns);
/* managed: a burst_function on buffers of the device. A buffer is fresh (1) while it has no value;
 * then it is no input. */
typedef struct {
    burst_function *function;
    void *context;
    uint32_t **reads, **writes; /* whether those buffers are fresh */
    uint64_t n_reads, n_writes;
} burst_managed;
/* afterwards what it wrote has a value, or is fresh when the function failed */
int32_t burst_managed_run(void *managed);

/* What a run that is not in C does first: all that it writes becomes fresh. GENERAL_FAILURE:
 * something that it reads is. */
int32_t burst_managed_begin(burst_managed *managed);

/* run queue: which execution of a device runs when. A share for each account, an application for
 * each program of it, a flow for each priority of each client, a ticket for each thread that
 * executes. NULL: no memory, or a number out of range. An object that is freed lives on until all
 * that was made for it is freed, too; free a ticket only when it has no slot and no thread waits
 * with it. */
typedef struct burst_run_queue burst_run_queue;
typedef struct burst_share burst_share;
typedef struct burst_application burst_application;
typedef struct burst_flow burst_flow;
enum { BURST_LOW = 0, BURST_MEDIUM = 1, BURST_HIGH = 2 };
/* slots: that many executions at once */
burst_run_queue *burst_run_queue_new(uint32_t slots, uint64_t quantum_ns);
void burst_run_queue_free(burst_run_queue *queue);
/* a hint: no ticket has a slot, and none waits */
_Bool burst_run_queue_is_idle(const burst_run_queue *queue);
burst_share *burst_share_new(burst_run_queue *queue, uint32_t weight); /* 1 to 1000 */
void burst_share_free(burst_share *share);
burst_application *burst_application_new(burst_share *share);
void burst_application_free(burst_application *application);
burst_flow *burst_flow_new(burst_application *application, uint32_t priority);
void burst_flow_free(burst_flow *flow);
burst_ticket *burst_ticket_new(burst_flow *flow);
/* threads that wait or yield with it, now or later, get -ECANCELED; any thread */
void burst_ticket_close(burst_ticket *ticket);
void burst_ticket_free(burst_ticket *ticket);
/* One thread at a time on a ticket. After an error of enter or yield it has no slot, and leave does
 * nothing. `now` is a recent fmq_now(). -ETIMEDOUT: with the estimate, the deadline cannot be met
 * any more; or it passed after a yield. */
/* NULL: not known */
int burst_enter(burst_ticket *ticket, const burst_estimate *estimate, uint64_t deadline,
                uint64_t now);
uint64_t burst_leave(burst_ticket *ticket); /* ns that its last execution has waited for others */
/* Of this thread's execution: so much of its work was for nothing, because others came first. */
void burst_lose(uint64_t ns);
/* at a checkpoint: whether another ticket comes before this execution */
_Bool burst_must_yield(burst_ticket *ticket);
int burst_yield(burst_ticket *ticket); /* if so, gives the slot up and waits for one again */
/* Both, for the execution of this thread, so that a device need not know its ticket. Does nothing
 * without a slot. */
int burst_checkpoint(void);
/* how many tickets wait in this process; at 0 no checkpoint is needed */
const uint32_t *burst_waiters(void);
/* before this thread waits for another execution: gives its slot up, if it has one */
burst_ticket *burst_pause(void);
int burst_resume(burst_ticket *ticket); /* after that wait; as burst_yield. NULL: does nothing */
/* Preemption: an execution without checkpoints that can be stopped in the middle and run again. The
 * thread that stops such executions sleeps in burst_await_preemption. */
/* of this thread's execution: its ticket, or NULL without a slot */
burst_ticket *burst_set_preemptible(_Bool is_preemptible);
/* until a ticket begins to wait while an execution of its application is preemptible */
uint32_t burst_await_preemption(uint32_t seen);
/* waiting tickets of its application with a higher priority */
uint64_t burst_outranking(burst_ticket *ticket);
burst_application *burst_application_of(burst_ticket *ticket);
/* What a flow has done, and what its application, its account and all have used of the time in
 * which a ticket waited. */
typedef struct {
    /* waited: also by those that wait now */
    uint64_t executions, waits, yields, waited_ns, used_ns, waiting;
    uint64_t application_used_ns, share_used_ns, all_used_ns;
} burst_flow_counts;
void burst_flow_count(burst_flow *flow, burst_flow_counts *counts);
/* The scheduling policy behind those, without a clock or a lock, so that tests can run it on
 * simulated time. A ticket begins at once if none waits; else it arrives, and `next` gives it a
 * slot. It finishes, or yields and waits again. Only a ticket that waits can abandon. */
/* before each of its executions */
void burst_policy_expect(burst_ticket *ticket, const burst_estimate *estimate, uint64_t now);
/* false: the last slot is not for this one, so it arrives, too */
_Bool burst_policy_begin(burst_ticket *ticket, uint64_t now);
/* a ticket waited while it ran, so it must call finish; else it may not */
_Bool burst_policy_owes(const burst_ticket *ticket);
void burst_policy_arrive(burst_ticket *ticket, uint64_t now);
/* NULL: no ticket waits that may have the slot */
burst_ticket *burst_policy_next(burst_run_queue *queue, uint64_t now);
_Bool burst_policy_yields(burst_ticket *ticket, uint64_t now);
void burst_policy_yield(burst_ticket *ticket, uint64_t now);
void burst_policy_finish(burst_ticket *ticket, uint64_t now);
/* instead of finish, where no ticket waited while it ran, and none waits now */
void burst_policy_release(burst_ticket *ticket);
void burst_policy_abandon(burst_ticket *ticket, uint64_t now);
/* `ticket` has finished. If it would come next again, should it return now: the ticket to wake
 * meanwhile; else NULL */
burst_ticket *burst_policy_standby(const burst_ticket *ticket, uint64_t now);

/* installs handlers: a fatal signal is noted in the trace of the burst whose listener it hits */
int burst_blame(void);
/* where signals that hit this thread are noted from now on; NULL: nowhere */
void burst_blame_on(burst_trace *trace);

/* real time: SCHED_FIFO for the calling thread, where RLIMIT_RTPRIO allows that priority; threads
 * that it starts are ordinary ones */
int burst_real_time(int priority);
/* installs a handler: a thread in real time that runs for `soft_us` without a sleep is an ordinary
 * one from then on, and the request that it serves gets RESOURCE_EXHAUSTED_TRANSIENT. The kernel
 * ends the process at `hard_us`. Locks that are made from now on have priority inheritance. */
int burst_bound_real_time(uint64_t soft_us, uint64_t hard_us);
/* pages that are touched stay in memory; -ENOMEM, -EPERM, -EAGAIN: RLIMIT_MEMLOCK */
int burst_lock(const void *base, uint64_t bytes);
/* of a burst: its queues and its trace */
int burst_lock_ends(const fmq_end *one, const fmq_end *other, const burst_trace *trace);
