/* burst._hot: a socket on which requests are executed in turn, with no frame of Python's between
 * one known request and the next but what the execution itself needs.
 *
 * A request is known by its bytes: its plan is in the dict that the socket's owner hands over, has
 * run before, and its success is known beforehand. Such a one is judged, run and answered here;
 * what fails, or was not begun, goes to the method `_fail` of the Python class, which knows the
 * words for it. Every other message is returned as it came.
 *
 * The global lock is the only lock here. It is held but for the wait for a message, for a slot, and
 * while an answer is sent. No reference to a plan is kept by then: its memory may be freed while
 * the socket sleeps. Free-threaded Python has no such lock: there all messages are Python's.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include "burst/hot.h"

#include <structmember.h>

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "burst/api.h"

enum { END_AT = 11 };
/* As many descriptors as a message has on Linux: the kernel would close those without room. */
enum { MOST_DESCRIPTORS = 253 };

/* ---- a plan ---------------------------------------------------------------------------------- */

/* What burst.executor.Plan is made of: what is read of it here. */
typedef struct {
    PyObject_HEAD
    PyObject *run, *success, *flow;
    uint64_t function, context; /* of a burst_function that does what `run` does; addresses, or 0 */
    uint64_t estimate;          /* the address of its burst_estimate, or 0 */
    uint64_t last_use;          /* CLOCK_MONOTONIC ns */
    _Atomic uint32_t claimed;   /* a thread runs it, or is about to */
    char has_run, measure, enters_itself;
} plan;

static PyObject *try_claim(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(!atomic_exchange(&((plan *)self)->claimed, 1));
}

static PyObject *end_claim(PyObject *self, PyObject *unused) {
    (void)unused;
    atomic_store(&((plan *)self)->claimed, 0);
    Py_RETURN_NONE;
}

static int plan_traverse(PyObject *self, visitproc visit, void *arg) {
    plan *p = (plan *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(p->run);
    Py_VISIT(p->success);
    Py_VISIT(p->flow);
    return 0;
}

static int plan_clear(PyObject *self) {
    plan *p = (plan *)self;
    Py_CLEAR(p->run);
    Py_CLEAR(p->success);
    Py_CLEAR(p->flow);
    return 0;
}

static void plan_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    plan_clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef plan_members[] = {
    {"run", T_OBJECT, offsetof(plan, run), 0, "Executes it."},
    {"success", T_OBJECT, offsetof(plan, success), 0,
     "The answer of each success, encoded; None: it differs."},
    {"flow", T_OBJECT, offsetof(plan, flow), 0, "Of the run queue, where a path serves several."},
    {"last_use", T_ULONGLONG, offsetof(plan, last_use), 0, "CLOCK_MONOTONIC ns."},
    {"has_run", T_BOOL, offsetof(plan, has_run), 0, "Its first run has ended well."},
    {"measure", T_BOOL, offsetof(plan, measure), 0, "Its client wants to know its times."},
    {"enters_itself", T_BOOL, offsetof(plan, enters_itself), 0,
     "Its runs enter the run queue when they need a slot."},
    {"_function", T_ULONGLONG, offsetof(plan, function), 0, "Does what `run` does; 0: none."},
    {"_context", T_ULONGLONG, offsetof(plan, context), 0, "Its argument."},
    {"_estimate_at", T_ULONGLONG, offsetof(plan, estimate), 0, "An address, or 0."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef plan_methods[] = {
    {"_try_claim", try_claim, METH_NOARGS, "Return True if no other thread has it from now on."},
    {"_end_claim", end_claim, METH_NOARGS, "Another thread may have it."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot plan_slots[] = {
    {Py_tp_doc, (void *)"What a socket in C knows of a plan."},
    {Py_tp_methods, plan_methods},
    {Py_tp_members, plan_members},
    {Py_tp_traverse, (void *)plan_traverse},
    {Py_tp_clear, (void *)plan_clear},
    {Py_tp_dealloc, (void *)plan_dealloc},
    {0, NULL},
};

static PyType_Spec plan_spec = {
    .name = "burst._hot.HotPlan",
    .basicsize = sizeof(plan),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = plan_slots,
};

/* ---- a socket -------------------------------------------------------------------------------- */

typedef int beginning(burst_attempt *attempt, burst_ticket *ticket);
typedef uint32_t ending(burst_attempt *attempt, burst_ticket *ticket, uint32_t status);

typedef struct {
    PyObject_HEAD
    PyObject *running; /* the plan that runs */
    PyObject *flow;    /* of `ticket` */
    uint64_t ticket;   /* an address */
    uint64_t answered; /* requests that were executed */
    beginning *begin;
    ending *end;
    burst_attempt *attempt; /* of the execution in hand */
    PyTypeObject *plan_type;
    unsigned char *buffer; /* MOST_MESSAGE: the message in hand */
} lane;

/* A message that came. */
typedef struct {
    struct msghdr header;
    struct iovec body;
    union {
        char bytes[CMSG_SPACE(MOST_DESCRIPTORS * sizeof(int))];
        struct cmsghdr first;
    } side;
    ssize_t bytes; /* below 0: none */
} message;

static void receive(const lane *l, int socket, message *m) {
    m->body = (struct iovec){l->buffer, MOST_MESSAGE};
    m->header = (struct msghdr){.msg_iov = &m->body,
                                .msg_iovlen = 1,
                                .msg_control = m->side.bytes,
                                .msg_controllen = sizeof m->side};
    do m->bytes = recvmsg(socket, &m->header, MSG_CMSG_CLOEXEC);
    while (m->bytes < 0 && errno == EINTR);
}

static int add_descriptors(PyObject *list, const struct cmsghdr *c) {
    size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < n; i++) {
        int fd;
        memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
        PyObject *number = PyLong_FromLong(fd);
        int failed = !number || PyList_Append(list, number);
        Py_XDECREF(number);
        if (failed) return -1;
    }
    return 0;
}

/* (bytes, descriptors, flags), as socket.recvmsg; None: an error, which Python looks for again. */
static PyObject *for_python(const lane *l, message *m) {
    if (m->bytes < 0) Py_RETURN_NONE;
    PyObject *list = PyList_New(0);
    struct msghdr *h = &m->header;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(h); list && c; c = CMSG_NXTHDR(h, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && add_descriptors(list, c))
            Py_CLEAR(list);
    if (!list) return NULL;
    return Py_BuildValue("(y#Ni)", (const char *)l->buffer, (Py_ssize_t)m->bytes, list,
                         (int)h->msg_flags);
}

#ifndef Py_GIL_DISABLED
static uint64_t big_endian(const unsigned char *at) {
    uint64_t value = 0;
    for (int i = 0; i < 8; i++) value = value << 8 | at[i];
    return value;
}

static int is_ready(const lane *l, const plan *p) {
    return p->has_run && !p->measure && p->run && p->flow && p->flow == l->flow && p->success &&
           PyBytes_Check(p->success);
}

/* A new reference to the plan of that message, claimed; or NULL, if need be with an exception. */
static plan *known(const lane *l, const message *m, PyObject *plans) {
    const unsigned char *raw = l->buffer;
    Py_ssize_t n = (Py_ssize_t)m->bytes - IN_TURN_HEAD;
    if (n <= 0 || m->header.msg_controllen || m->header.msg_flags & (MSG_TRUNC | MSG_CTRUNC) ||
        raw[0] != 0x93 || raw[1] != 0xcf || raw[10] != 0xcf)
        return NULL;
    PyObject *key = PyBytes_FromStringAndSize((const char *)raw + IN_TURN_HEAD, n);
    if (!key) return NULL;
    plan *p = (plan *)PyDict_GetItemWithError(plans, key);
    Py_DECREF(key);
    if (!p || !PyObject_TypeCheck((PyObject *)p, l->plan_type) || !is_ready(l, p) ||
        atomic_exchange(&p->claimed, 1))
        return NULL;
    Py_INCREF((PyObject *)p);
    return p;
}

/* What `_fail` says of an execution that was not begun, or was late, by that code; or has failed,
 * with a status or an exception: a new reference. */
static PyObject *failed(lane *l, plan *p, int code, int status) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace) PyException_SetTraceback(error, trace);
    PyObject *answer = PyObject_CallMethod((PyObject *)l, "_fail", "OiiO", p, code, status,
                                           error ? error : Py_None);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    if (answer && !PyBytes_Check(answer)) {
        Py_CLEAR(answer);
        PyErr_SetString(PyExc_TypeError, "an answer is bytes");
    }
    return answer;
}

/* Waits for a slot, and calls the plan's C function, if it has one, which returns the status. A
 * code: it was not begun. */
static int begin_run(const lane *l, const plan *p, burst_ticket *ticket, int32_t *status) {
    burst_function *function = (burst_function *)(uintptr_t)p->function;
    int code;
    *status = 0;
    Py_BEGIN_ALLOW_THREADS
    code = l->begin(l->attempt, ticket);
    if (!code && function) *status = function((void *)(uintptr_t)p->context);
    Py_END_ALLOW_THREADS
    return code;
}

/* Whether it has run; else perhaps with an exception. */
static int has_run(const plan *p, int32_t status) {
    if (p->function) return !status;
    PyObject *done = PyObject_CallNoArgs(p->run);
    Py_XDECREF(done);
    return done != NULL;
}

/* Executes the request in hand. Returns its answer, a new reference. Takes the plan over. */
static PyObject *execute(lane *l, plan *p) {
    burst_attempt *x = l->attempt;
    *x = (burst_attempt){.deadline = big_endian(l->buffer + END_AT),
                         .estimate = (burst_estimate *)(uintptr_t)p->estimate};
    burst_ticket *ticket = p->enters_itself ? NULL : (burst_ticket *)(uintptr_t)l->ticket;
    PyObject *before = l->running, *answer = p->success;
    l->running = (PyObject *)p;
    Py_XDECREF(before);
    l->answered++;
    int32_t status;
    int code = begin_run(l, p, ticket, &status), is_done = !code && has_run(p, status);
    p->last_use = x->known;
    if (is_done) code = (int)l->end(x, ticket, 0);
    if (is_done && !code) Py_INCREF(answer);
    else answer = failed(l, p, code, status);
    l->running = NULL;
    atomic_store(&p->claimed, 0);
    Py_DECREF((PyObject *)p);
    return answer;
}

/* 0, or it is Python's to send. */
static int send_answer(const lane *l, int socket, char *outcome, Py_ssize_t bytes) {
    char head[ANSWER_HEAD];
    memcpy(head, l->buffer, sizeof head);
    head[0] = (char)0x92;
    struct iovec parts[] = {{head, sizeof head}, {outcome, (size_t)bytes}};
    struct msghdr whole = {.msg_iov = parts, .msg_iovlen = 2};
    int r;
    do r = sendmsg(socket, &whole, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 ? -errno : 0;
    while (r == -EINTR);
    return r;
}

/* Answers, and receives the next message. 0, or -1 with an exception. */
static int answer_and_receive(lane *l, int socket, PyObject *answer, message *m) {
    char *outcome = PyBytes_AsString(answer);
    Py_ssize_t bytes = PyBytes_Size(answer);
    int unsent;
    Py_BEGIN_ALLOW_THREADS
    unsent = send_answer(l, socket, outcome, bytes);
    if (!unsent) receive(l, socket, m);
    Py_END_ALLOW_THREADS
    if (!unsent) return 0;
    PyObject *sent = PyObject_CallMethod((PyObject *)l, "_send", "y#O", (const char *)l->buffer,
                                         (Py_ssize_t)ANSWER_HEAD, answer);
    if (!sent) return -1;
    Py_DECREF(sent);
    Py_BEGIN_ALLOW_THREADS
    receive(l, socket, m);
    Py_END_ALLOW_THREADS
    return 0;
}
#endif

/* (socket, plans): plans by their requests. */
static PyObject *next_message(PyObject *self, PyObject *args) {
    lane *l = (lane *)self;
    PyObject *plans;
    int socket;
    if (!PyArg_ParseTuple(args, "iO!", &socket, &PyDict_Type, &plans)) return NULL;
    if (!l->buffer) return PyErr_Format(PyExc_ValueError, "_begin_lane comes first");
    message m;
    Py_BEGIN_ALLOW_THREADS
    receive(l, socket, &m);
    Py_END_ALLOW_THREADS
#ifndef Py_GIL_DISABLED
    for (plan *p; (p = known(l, &m, plans));) {
        PyObject *answer = execute(l, p);
        int over = answer ? answer_and_receive(l, socket, answer, &m) : -1;
        Py_XDECREF(answer);
        if (over) return NULL;
    }
#endif
    return PyErr_Occurred() ? NULL : for_python(l, &m);
}

/* (begin, end, attempt, plan type): the first three are addresses: of burst_begin_attempt and
 * burst_end_attempt, and of a burst_attempt, which lives as long as this does. */
static PyObject *begin_lane(PyObject *self, PyObject *args) {
    lane *l = (lane *)self;
    unsigned long long begin, end, attempt;
    PyObject *type;
    if (!PyArg_ParseTuple(args, "KKKO!", &begin, &end, &attempt, &PyType_Type, &type)) return NULL;
    if (!begin || !end || !attempt) return PyErr_Format(PyExc_ValueError, "a null pointer");
    if (!l->buffer) l->buffer = malloc(MOST_MESSAGE);
    if (!l->buffer) return PyErr_NoMemory();
    l->begin = (beginning *)(uintptr_t)begin;
    l->end = (ending *)(uintptr_t)end;
    l->attempt = (burst_attempt *)(uintptr_t)attempt;
    Py_INCREF(type);
    Py_XDECREF((PyObject *)l->plan_type);
    l->plan_type = (PyTypeObject *)type;
    Py_RETURN_NONE;
}

static int lane_traverse(PyObject *self, visitproc visit, void *arg) {
    lane *l = (lane *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(l->running);
    Py_VISIT(l->flow);
    Py_VISIT(l->plan_type);
    return 0;
}

static int lane_clear(PyObject *self) {
    lane *l = (lane *)self;
    Py_CLEAR(l->running);
    Py_CLEAR(l->flow);
    Py_CLEAR(l->plan_type);
    return 0;
}

static void lane_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    lane_clear(self);
    free(((lane *)self)->buffer);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef lane_members[] = {
    {"_running", T_OBJECT, offsetof(lane, running), 0, "The plan that runs, or None."},
    {"_flow", T_OBJECT, offsetof(lane, flow), 0, "Of the ticket."},
    {"_ticket_at", T_ULONGLONG, offsetof(lane, ticket), 0, "Its address."},
    {"answered", T_ULONGLONG, offsetof(lane, answered), 0,
     "The number of requests that were executed in turn."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef lane_methods[] = {
    {"_begin_lane", begin_lane, METH_VARARGS, "Comes before the first `_next_message`."},
    {"_next_message", next_message, METH_VARARGS,
     "Executes and answers known requests; returns the first other message."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot lane_slots[] = {
    {Py_tp_doc, (void *)"A socket on which requests are executed in turn. `_fail` and `_send` of "
                        "the class that is made of it do the rest."},
    {Py_tp_methods, lane_methods},
    {Py_tp_members, lane_members},
    {Py_tp_traverse, (void *)lane_traverse},
    {Py_tp_clear, (void *)lane_clear},
    {Py_tp_dealloc, (void *)lane_dealloc},
    {0, NULL},
};

static PyType_Spec lane_spec = {
    .name = "burst._hot.HotLane",
    .basicsize = sizeof(lane),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = lane_slots,
};

int hot_add_lane(PyObject *module) {
    int r = hot_add_type(module, &plan_spec, "HotPlan");
    return r ? r : hot_add_type(module, &lane_spec, "HotLane");
}
