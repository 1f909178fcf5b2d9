/* burst._hot: `run()` of a burst on a request that is known, in one call from Python; and the loop
 * of a listener whose plans are run by Python, without a frame of Python's between one request and
 * the next.
 *
 * The files of this module and fmq/python/ are what includes Python.h: a function of cffi cannot
 * be a method, take optional arguments without parsing them in Python, or return an object that
 * exists already. They decide nothing. Python makes results ready, and says by `is_ready` of the
 * burst's caller that the next `run()` may use them; whatever is not the usual case goes to the
 * methods `_run` and `_go_on` of the Python class.
 *
 * The global lock is the only lock here, and it is held from the look at `is_ready` to the result,
 * if that comes before burst_call returns. Else the thread gives it up and waits in C: what it
 * would wake up to in Python is cold after a camera's 33 ms, and costs 40 us. `calling` keeps other
 * threads out meanwhile: they find the burst busy, or wait in InFlight.begin. An exchange that then
 * ends in another way than the last one is Python's. Free-threaded Python has no such lock, and
 * always uses `_run`.
 *
 * A listener never holds that lock while it waits: other threads of a device would feel it. It
 * gives the lock up when its answer is on the way, so that this costs its client nothing.
 */
#define PY_SSIZE_T_CLEAN
#include "burst/hot.h"

#include <errno.h>
#include <stdint.h>
#include <time.h>

#include "burst/api.h"

enum { MOST_READY = 4 };

typedef struct {
    PyObject *result;  /* of the request, if it succeeds as it did before */
    PyObject *outputs; /* its arrays; borrowed */
    PyObject *encoded; /* for `_go_on`; it keeps the packet */
    void *packet;
    uint64_t bytes;
    uint64_t *number; /* of the request that used it last */
} ready;

typedef struct {
    PyObject_HEAD
    burst_caller *caller;
    PyObject *keeps;   /* what `caller` belongs to */
    PyObject *locking; /* of `submitting`: acquire and release */
    ready ready[MOST_READY];
    int count, last;
    hot_inputs inputs;
} hot;

static void forget(hot *h) {
    if (h->caller) h->caller->is_ready = 0;
    h->caller = NULL;
    int n_ready = h->count;
    h->count = 0;
    for (int i = 0; i < n_ready; i++) {
        Py_CLEAR(h->ready[i].result);
        Py_CLEAR(h->ready[i].encoded);
    }
    hot_forget_inputs(&h->inputs);
    Py_CLEAR(h->keeps);
    Py_CLEAR(h->locking);
}

/* ---- one run --------------------------------------------------------------------------------- */

/* Our own references: the output set has the result and the tuple, we have the result, the result
 * the tuple, which has the arrays. One more is the program's. */
static int is_free(const ready *r) {
    if (Py_REFCNT(r->result) > 2 || Py_REFCNT(r->outputs) > 2) return 0;
    Py_ssize_t n = PyTuple_Size(r->outputs);
    for (Py_ssize_t i = 0; i < n; i++)
        if (Py_REFCNT(PyTuple_GetItem(r->outputs, i)) > 1) return 0;
    return 1;
}

static ready *next_free(hot *h) {
    for (int k = 1, i = h->last; k <= h->count; k++) {
        if (++i >= h->count) i = 0;
        if (is_free(&h->ready[i])) return h->last = i, &h->ready[i];
    }
    return NULL;
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* When so many seconds have passed, or 0 for what `_run` judges. */
static uint64_t end_of(uint64_t begin, PyObject *timeout) {
    if (!PyFloat_Check(timeout) && !PyLong_Check(timeout)) return 0;
    double seconds = PyFloat_AsDouble(timeout);
    if (PyErr_Occurred()) PyErr_Clear();
    return seconds > 0 && seconds < 1e6 ? begin + (uint64_t)(seconds * 1e9) : 0;
}

/* Leaves an exception as it is, if there is one. */
static void release(PyObject *locking) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *done = PyObject_CallMethod(locking, "release", NULL);
    if (!done) PyErr_Clear();
    Py_XDECREF(done);
    PyErr_Restore(type, value, trace);
}

/* An exchange that burst_call did not end. It has references of its own: other threads may forget
 * what is ready. */
typedef struct {
    hot *h;
    burst_caller *caller;
    PyObject *keeps, *locking, *encoded, *result, *timeout; /* timeout: borrowed */
    int64_t code;
    uint64_t end; /* of the timeout; 0: none */
} late;

static late late_of(hot *h, const ready *r, int64_t code, PyObject *timeout, uint64_t end) {
    late l = {h, h->caller, h->keeps, h->locking, r->encoded, r->result, timeout, code, end};
    Py_INCREF(l.keeps);
    Py_INCREF(l.locking);
    Py_INCREF(l.encoded);
    Py_INCREF(l.result);
    return l;
}

static void drop_late(late *l) {
    Py_DECREF(l->result);
    Py_DECREF(l->encoded);
    Py_DECREF(l->locking);
    Py_DECREF(l->keeps);
}

/* The exchange is Python's to end: it came late, or to nothing. */
static PyObject *go_on(late *l) {
    burst_caller *caller = l->caller;
    caller->is_ready = 0;
    PyObject *result =
        PyObject_CallMethod((PyObject *)l->h, "_go_on", "OLOK", l->encoded, (long long)l->code,
                            l->timeout, (unsigned long long)l->end);
    if (!result && caller->calling) { /* Ctrl-C came before Python had begun to clean up */
        caller->over(caller);
        caller->result_bytes = 0;
    }
    return result;
}

/* Whether it ended well. `calling` keeps all others out until we have the global lock again, and
 * have looked at what came. */
static int receive(late *l) {
    PyThreadState *state = PyEval_SaveThread();
    l->code = l->caller->finish(l->caller, l->end ? l->end : UINT64_MAX);
    PyEval_RestoreThread(state);
    return !l->code && !(l->end && now() > l->end);
}

/* A thread that has `submitting` already lets us have it first, as long as `calling` says that ours
 * goes on (InFlight.begin). */
static PyObject *under_lock(late *l, int has_ended) {
    PyObject *result = NULL, *locked = PyObject_CallMethod(l->locking, "acquire", NULL);
    if (locked) {
        if (has_ended) l->caller->over(l->caller);
        result = go_on(l);
        release(l->locking);
    }
    Py_XDECREF(locked);
    return result;
}

static PyObject *end_late(late l) {
    PyObject *result = NULL;
    int is_sent = l.code == -ETIMEDOUT;
    if (is_sent && receive(&l)) {
        l.caller->deadline = UINT64_MAX;
        l.caller->over(l.caller);
        PyObject *told =
            l.caller->is_ready ? NULL : PyObject_CallMethod((PyObject *)l.h, "_tell_loops", NULL);
        if (!told && PyErr_Occurred()) return drop_late(&l), NULL;
        Py_XDECREF(told);
        Py_INCREF(l.result);
        result = l.result;
    } else {
        result = under_lock(&l, is_sent && l.code != -ETIMEDOUT);
    }
    drop_late(&l);
    return result;
}

/* NULL without an exception: this run is not the usual one. */
static PyObject *usual(hot *h, const hot_given *g) {
    burst_caller *c = h->caller;
    PyObject *timeout = g->timeout;
    if (!c || !c->is_ready || c->calling) return NULL; /* the keys of a dict are Python's */
    uint64_t end = 0, begin = g->count || timeout != Py_None ? now() : 0;
    if (timeout != Py_None && !(end = end_of(begin, timeout))) return NULL;
    ready *r = next_free(h);
    if (!r || (g->count && !hot_fill(&h->inputs, g->arrays, g->count))) return NULL;
    if (h->caller != c) return NULL; /* so may the buffers of arrays be */
    if (g->count) c->begin = begin;
    if (end) c->deadline = end;
    *r->number = c->id + 1;
    int64_t code = c->start(c, r->packet, r->bytes);
    if (code || (end && now() > end)) return end_late(late_of(h, r, code, timeout, end));
    c->deadline = UINT64_MAX;
    Py_INCREF(r->result);
    return r->result;
}

static PyObject *in_python(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    Py_ssize_t n_names = names ? PyTuple_Size(names) : 0;
    PyObject *given = PyTuple_New(n), *by_name = n_names ? PyDict_New() : NULL, *result = NULL;
    PyObject *method = PyObject_GetAttrString(self, "_run");
    if (!given || (n_names && !by_name) || !method) goto done;
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_INCREF(args[i]);
        PyTuple_SetItem(given, i, args[i]);
    }
    for (Py_ssize_t i = 0; i < n_names; i++)
        if (PyDict_SetItem(by_name, PyTuple_GetItem(names, i), args[n + i])) goto done;
    result = PyObject_Call(method, given, by_name);
done:
    Py_XDECREF(given);
    Py_XDECREF(by_name);
    Py_XDECREF(method);
    return result;
}

static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    hot *h = (hot *)self;
#ifndef Py_GIL_DISABLED
    hot_given g;
    if (h->caller && h->caller->is_ready && !h->caller->calling) {
        int is_given = hot_take_given(&h->inputs, args, n, names, &g);
        PyObject *result = is_given ? usual(h, &g) : NULL;
        hot_drop_given(&g);
        if (result || PyErr_Occurred()) return result;
    }
#else
    (void)usual;
#endif
    (void)h;
    return in_python(self, args, n, names);
}

/* ---- what Python makes ready ----------------------------------------------------------------- */

static void *pointer(PyObject *address) { return PyLong_AsVoidPtr(address); }

/* (caller, keeps, locking, inputs): the caller is an address, as an integer; the inputs are a dict,
 * by name, in their order. */
static PyObject *begin_ready(PyObject *self, PyObject *args) {
    PyObject *caller, *keeps, *locking, *inputs;
    if (!PyArg_ParseTuple(args, "OOOO!", &caller, &keeps, &locking, &PyDict_Type, &inputs))
        return NULL;
    hot *h = (hot *)self;
    forget(h);
    burst_caller *found = pointer(caller);
    if (!found) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "a null pointer");
    Py_INCREF(keeps);
    h->keeps = keeps;
    Py_INCREF(locking);
    h->locking = locking;
    hot_take_inputs(&h->inputs, inputs);
    h->caller = found;
    Py_RETURN_NONE;
}

/* (result, encoded, packet, bytes, number): whether the result may be returned from now on;
 * MOST_READY may. */
static PyObject *add_ready(PyObject *self, PyObject *args) {
    PyObject *result, *encoded, *packet, *number;
    unsigned long long bytes;
    if (!PyArg_ParseTuple(args, "O!OOKO", &PyTuple_Type, &result, &encoded, &packet, &bytes,
                          &number))
        return NULL;
    hot *h = (hot *)self;
    PyObject *outputs = PyTuple_GetItem(result, 1);
    if (!outputs) return NULL;
    if (!PyTuple_Check(outputs))
        return PyErr_Format(PyExc_TypeError, "the outputs of a result are a tuple");
    ready made = {result, outputs, encoded, pointer(packet), bytes, pointer(number)};
    if (!made.packet || !made.number)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "a null pointer");
    if (!h->caller) return PyErr_Format(PyExc_ValueError, "_begin_ready comes first");
    if (h->count == MOST_READY) Py_RETURN_FALSE;
    Py_INCREF(result);
    Py_INCREF(encoded);
    h->ready[h->count++] = made;
    Py_RETURN_TRUE;
}

static PyObject *forget_ready(PyObject *self, PyObject *unused) {
    (void)unused;
    forget((hot *)self);
    Py_RETURN_NONE;
}

static PyObject *copied_bytes(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(((hot *)self)->inputs.copied);
}

/* ---- a listener ------------------------------------------------------------------------------ */

typedef int64_t listening(burst_listener *listener, const void *answer, uint64_t bytes);
typedef int64_t answering(burst_listener *listener);

static int64_t listen_unlocked(burst_listener *l, const void *answer, uint64_t bytes) {
    listening *listen = *(listening **)&l->listen;
    int64_t code;
    Py_BEGIN_ALLOW_THREADS
    code = listen(l, answer, bytes);
    Py_END_ALLOW_THREADS
    return code;
}

/* A new reference. */
static PyObject *item(PyObject *list, int64_t i) {
#ifdef Py_GIL_DISABLED
    return PyList_GetItemRef(list, (Py_ssize_t)i);
#else
    PyObject *found = PyList_GetItem(list, (Py_ssize_t)i);
    Py_XINCREF(found);
    return found;
#endif
}

enum { FAILED = -1, LEFT, DONE }; /* left: to Python */

/* Keeps no reference to the plan: while this thread waits it must not keep a plan alive that is
 * freed. */
static int run_plan(PyObject *runs, int64_t i) {
    PyObject *run = item(runs, i);
    if (!run) return FAILED;
    PyObject *done = run == Py_None ? NULL : PyObject_CallNoArgs(run);
    int outcome = done ? DONE : run == Py_None ? LEFT : FAILED;
    Py_XDECREF(done);
    Py_DECREF(run);
    return outcome;
}

/* Runs plans for as long as they succeed. `runs`: a callable for each plan, or None for one that
 * Python runs and answers. */
static PyObject *serve_plans(burst_listener *l, PyObject *runs, int64_t code) {
    answering *answer = *(answering **)&l->answer;
    int outcome = DONE;
    while (code > 0 && (outcome = run_plan(runs, code - 1)) == DONE) {
        code = answer(l);
        if (!code || code == -EAGAIN) code = listen_unlocked(l, NULL, 0);
    }
    return outcome == FAILED ? NULL : PyLong_FromLongLong(code);
}

/* (listener, runs, answer): the listener is an address, as an integer; the answer is bytes, or
 * None. */
static PyObject *serve(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *listener, *runs;
    const char *answer;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "OO!z#", &listener, &PyList_Type, &runs, &answer, &bytes))
        return NULL;
    burst_listener *l = pointer(listener);
    if (!l) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "a null pointer");
    return serve_plans(l, runs, listen_unlocked(l, answer, (uint64_t)bytes));
}

static PyMethodDef functions[] = {
    {"serve", serve, METH_VARARGS,
     "serve(listener, runs, answer, /)\n--\n\nAs burst_listen, until a request comes that is not "
     "run by calling one of `runs`."},
    {"copy_alike", hot_copy_alike, METH_VARARGS,
     "copy_alike(places, arrays, /)\n--\n\nCopies arrays into others of their types and shapes: "
     "the "
     "bytes, or -1 if one differs, and then none."},
    {NULL, NULL, 0, NULL},
};

/* ---- the type -------------------------------------------------------------------------------- */

static int traverse(PyObject *self, visitproc visit, void *arg) {
    hot *h = (hot *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(h->keeps);
    Py_VISIT(h->locking);
    for (int i = 0; i < h->count; i++) {
        Py_VISIT(h->ready[i].result);
        Py_VISIT(h->ready[i].encoded);
    }
    return 0;
}

static int clear(PyObject *self) {
    forget((hot *)self);
    return 0;
}

static void dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    forget((hot *)self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL | METH_KEYWORDS,
     "run($self, /, *arrays, timeout=None, deadline=None, **by_name)\n--\n\nAs `AnyBurst.run`."},
    {"_begin_ready", begin_ready, METH_VARARGS, "Results are for that caller from now on."},
    {"_add_ready", add_ready, METH_VARARGS,
     "A result that a run may return, and the request that leads to it."},
    {"_forget_ready", forget_ready, METH_NOARGS, "No result is ready any more."},
    {"_copied_bytes", copied_bytes, METH_NOARGS, "Bytes that `run` has copied into inputs."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)"Runs known requests in one call. `_run` and `_go_on` of the class that is "
                        "made of it do the rest."},
    {Py_tp_methods, methods},
    {Py_tp_traverse, (void *)traverse},
    {Py_tp_clear, (void *)clear},
    {Py_tp_dealloc, (void *)dealloc},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "burst._hot.HotBurst",
    .basicsize = sizeof(hot),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

int hot_add_type(PyObject *module, PyType_Spec *of, const char *name) {
    PyObject *type = PyType_FromSpec(of);
    if (!type) return -1;
    int r = PyModule_AddObjectRef(module, name, type);
    Py_DECREF(type);
    return r;
}

static int add_types(PyObject *module) {
    int r = hot_add_type(module, &spec, "HotBurst");
    if (!r) r = hot_add_lane(module);
    return r ? r : hot_add_socket(module);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)add_types}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "burst._hot",
    .m_doc = "The one call of a burst, and both ends of a lane's socket.", .m_methods = functions,
    .m_slots = module_slots};

PyMODINIT_FUNC PyInit__hot(void) { return PyModuleDef_Init(&definition); }
