/* fmq._hot: the transfers of an end, and an exchange, each in one call from Python.
 *
 * This folder and burst/hot.c are what includes Python.h: a function of cffi cannot be a method,
 * take optional arguments without parsing them in Python, or return None or an array. It moves no
 * element itself: it calls fmq._core by the table of fmq_hot_calls. What is not the usual case it
 * leaves to the Python class that is made of each type here: `_write` and `_read` take other arrays
 * than those that C knows, `_refuse` raises, `rearm` looks whether `fileno` is readable.
 *
 * What is at hand is transferred while the global lock is held, because giving it up and taking it
 * again costs more than that; a large transfer, and a wait after the first `hold_ns`, give it up.
 * `fmq_stop` is called without the global lock, so a thread that has it may be inside an end that
 * another one stops. Free-threaded Python runs the same code: an end serves one thread at a time by
 * itself, and what is here belongs to one call, is changed atomically, or does not change.
 */
#include "fmq/python/hot.h"

#include <structmember.h>

enum { MOST_WITH_LOCK = 65536, ONLY_TRY = 0, ONLY_POLL = 1 };

/* ---- arguments ------------------------------------------------------------------------------- */

int hot_arguments(const char *const *known, Py_ssize_t most, PyObject *const *args, Py_ssize_t n,
                  PyObject *names, PyObject **found) {
    Py_ssize_t by_name = names ? PyTuple_Size(names) : 0;
    if (n > most)
        return PyErr_Format(PyExc_TypeError, "%zd arguments: at most %zd are known", n, most), -1;
    for (Py_ssize_t i = 0; i < n; i++) found[i] = args[i];
    for (Py_ssize_t k = 0; k < by_name; k++) {
        PyObject *name = PyTuple_GetItem(names, k);
        Py_ssize_t i = 0;
        while (i < most && PyUnicode_CompareWithASCIIString(name, known[i])) i++;
        if (i == most)
            return PyErr_Format(PyExc_TypeError, "%R is no argument of this call", name), -1;
        if (i < n) return PyErr_Format(PyExc_TypeError, "%R is given twice", name), -1;
        found[i] = args[n + k];
    }
    if (!found[0])
        return PyErr_Format(PyExc_TypeError, "%s: this argument is needed", known[0]), -1;
    return 0;
}

/* Negative counts, and those beyond every capacity, are for `_refuse`. */
int hot_count(PyObject *given, Py_ssize_t *n) {
    *n = PyNumber_AsSsize_t(given, NULL); /* NULL: clipped */
    return *n == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Seconds from now: None is for ever. fmq.clock judges what is no usual number. */
int hot_seconds(PyObject *timeout, double *seconds) {
    *seconds = Py_HUGE_VAL;
    if (timeout == Py_None) return 0;
    *seconds = PyFloat_AsDouble(timeout);
    if (*seconds >= 0) return 0;
    PyErr_Clear();
    PyObject *clock = PyImport_ImportModule("fmq.clock");
    PyObject *judged = clock ? PyObject_CallMethod(clock, "deadline_of", "(O)", timeout) : NULL;
    Py_XDECREF(clock);
    if (!judged) return -1;
    *seconds = Py_HUGE_VAL; /* an integer that is larger than any float */
    Py_DECREF(judged);
    return 0;
}

/* ---- arrays ---------------------------------------------------------------------------------- */

enum { IS_CONTIGUOUS = 1, IS_WRITABLE = 0x400 };
PyTypeObject *hot_array_type;
static PyObject *new_empty; /* numpy.empty */
PyTypeObject *hot_writer_type, *hot_reader_type, *hot_transaction_type;

static const hot_array *plain_array(PyObject *o, PyObject *dtype, int flags) {
    if (Py_TYPE(o) != hot_array_type) return NULL;
    const hot_array *a = (const hot_array *)o;
    return a->dtype == dtype && (a->flags & flags) == flags ? a : NULL;
}

static Py_ssize_t size_of(const hot_array *a) {
    Py_ssize_t n = 1;
    for (int i = 0; i < a->nd; i++) n *= a->dimensions[i];
    return n;
}

/* ---- ends ------------------------------------------------------------------------------------ */

static uint64_t deadline_of(const hot_end *h, double seconds) {
    return seconds < 1e9 ? h->calls->now() + (uint64_t)(seconds * 1e9) + 1 : UINT64_MAX;
}

/* The code of the transfer; -EINTR: an exception is set. */
static int wait_for(const hot_end *h, fmq_transfer function, void *elements, uint64_t n,
                    double seconds) {
    uint64_t deadline = seconds > 0 ? deadline_of(h, seconds) : ONLY_TRY;
    int code;
    do {
        PyThreadState *state = PyEval_SaveThread();
        code = function(h->end, elements, n, h->spin_ns, deadline);
        PyEval_RestoreThread(state);
    } while (code == -EINTR && !PyErr_CheckSignals());
    return code;
}

int hot_move(const hot_end *h, fmq_transfer function, void *elements, Py_ssize_t n,
             double seconds) {
    if (n < 0) return -EMSGSIZE;
    if (n > MOST_WITH_LOCK / h->itemsize)
        return wait_for(h, function, elements, (uint64_t)n, seconds);
    uint64_t patience = seconds > 0 ? h->hold_ns : 0;
    int code = function(h->end, elements, (uint64_t)n, patience, patience ? ONLY_POLL : ONLY_TRY);
    return code == -EAGAIN && seconds > 0 ? wait_for(h, function, elements, (uint64_t)n, seconds)
                                          : code;
}

PyObject *hot_refuse(hot_end *h, int code, const char *what, Py_ssize_t n) {
    if (code != -EINTR)
        Py_XDECREF(PyObject_CallMethod((PyObject *)h, "_refuse", "isn", code, what, n));
    return NULL;
}

int hot_judge(hot_end *h, int code, const char *what, Py_ssize_t n) {
    if (!code && !h->has_readiness) return 0;
    PyObject *told = h->has_readiness && code != -EINTR
                         ? PyObject_CallMethod((PyObject *)h, "rearm", NULL)
                         : NULL;
    Py_XDECREF(told);
    if (PyErr_Occurred()) return -1;
    return code ? (hot_refuse(h, code, what, n), -1) : 0;
}

int hot_is_open(const hot_end *h) {
    if (h->end) return 1;
    PyErr_SetString(PyExc_ValueError,
                    "this end was never made: `queue.writer()` and `queue.reader()` make ends");
    return 0;
}

/* (calls, end, keeps, dtype, capacity, span): the first two are addresses. */
static PyObject *begin_hot(PyObject *self, PyObject *args) {
    hot_end *h = (hot_end *)self;
    PyObject *calls, *end, *keeps, *dtype, *span;
    Py_ssize_t capacity;
    if (!PyArg_ParseTuple(args, "OOOOnO", &calls, &end, &keeps, &dtype, &capacity, &span))
        return NULL;
    PyObject *itemsize = PyObject_GetAttrString(dtype, "itemsize");
    Py_ssize_t bytes = itemsize ? PyLong_AsSsize_t(itemsize) : -1;
    Py_XDECREF(itemsize);
    const fmq_calls *found = PyLong_AsVoidPtr(calls);
    fmq_end *core = PyLong_AsVoidPtr(end);
    if (PyErr_Occurred()) return NULL;
    if (h->end || !found || !core || bytes < 1)
        return PyErr_Format(PyExc_ValueError, "an end begins once, with an address");
    Py_INCREF(keeps), Py_INCREF(dtype), Py_INCREF(span);
    h->keeps = keeps, h->dtype = dtype, h->span = span;
    h->itemsize = bytes, h->capacity = capacity, h->calls = found, h->end = core;
    Py_RETURN_NONE;
}

/* (what, bytes-like, n, timeout): elements that Python has made ready. */
static PyObject *transfer_bytes(PyObject *self, PyObject *args) {
    hot_end *h = (hot_end *)self;
    const char *what;
    PyObject *elements, *timeout;
    Py_ssize_t n;
    double seconds;
    if (!PyArg_ParseTuple(args, "sOnO", &what, &elements, &n, &timeout) || !hot_is_open(h))
        return NULL;
    if (hot_seconds(timeout, &seconds)) return NULL;
    int reads = *what == 'r';
    Py_buffer view;
    if (PyObject_GetBuffer(elements, &view, reads ? PyBUF_CONTIG : PyBUF_CONTIG_RO)) return NULL;
    int code = -EMSGSIZE;
    if (n >= 0 && view.len / h->itemsize >= n)
        code = hot_move(h, reads ? h->calls->read : h->calls->write, view.buf, n, seconds);
    PyBuffer_Release(&view);
    if (hot_judge(h, code, what, n)) return NULL;
    Py_RETURN_NONE;
}

static int visit_end(PyObject *self, visitproc visit, void *arg) {
    hot_end *h = (hot_end *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(h->keeps);
    Py_VISIT(h->dtype);
    Py_VISIT(h->span);
    return hot_visit_spans(h, visit, arg);
}

static int clear_end(PyObject *self) {
    hot_end *h = (hot_end *)self;
    h->end = NULL;
    hot_clear_spans(h);
    Py_CLEAR(h->span);
    Py_CLEAR(h->dtype);
    Py_CLEAR(h->keeps);
    return 0;
}

void hot_free(PyObject *self, inquiry clear) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static void free_end(PyObject *self) { hot_free(self, clear_end); }

/* ---- the writer ------------------------------------------------------------------------------ */

static const char *const write_names[] = {"elements", "timeout"};

/* The code of a write; 1: `_write` has to look at what is written; -EINTR: an exception is set. */
static int write_array(hot_end *h, PyObject *elements, double seconds, Py_ssize_t *n) {
    const hot_array *a = plain_array(elements, h->dtype, IS_CONTIGUOUS);
    if (!a) return 1;
    *n = size_of(a);
    return hot_move(h, h->calls->write, a->data, *n, seconds);
}

static PyObject *writer_write(PyObject *self, PyObject *const *args, Py_ssize_t n_args,
                              PyObject *names) {
    hot_end *h = (hot_end *)self;
    PyObject *found[2] = {NULL, Py_None};
    double seconds;
    Py_ssize_t n = 0;
    if (hot_arguments(write_names, 2, args, n_args, names, found) || !hot_is_open(h)) return NULL;
    if (hot_seconds(found[1], &seconds)) return NULL;
    int code = write_array(h, found[0], seconds, &n);
    if (code == 1) return PyObject_CallMethod(self, "_write", "OO", found[0], found[1]);
    if (hot_judge(h, code, "write", n)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *writer_try_write(PyObject *self, PyObject *elements) {
    hot_end *h = (hot_end *)self;
    Py_ssize_t n = 0;
    if (!hot_is_open(h)) return NULL;
    int code = write_array(h, elements, 0, &n);
    if (code == 1) return PyObject_CallMethod(self, "_try_write", "(O)", elements);
    if (code == -EAGAIN) Py_RETURN_FALSE;
    if (hot_judge(h, code, "write", n)) return NULL;
    Py_RETURN_TRUE;
}

/* ---- the reader ------------------------------------------------------------------------------ */

static const char *const read_names[] = {"n", "timeout", "out"};

static PyObject *empty_array(const hot_end *h, Py_ssize_t n) {
    PyObject *count = PyLong_FromSsize_t(n),
             *arguments = count ? PyTuple_Pack(2, count, h->dtype) : NULL;
    PyObject *array = arguments ? PyObject_Call(new_empty, arguments, NULL) : NULL;
    Py_XDECREF(arguments);
    Py_XDECREF(count);
    return array;
}

/* The array with the elements; Py_None: there are too few for a read that only tries; NULL: an
 * exception, or none: then `_read` has to look at what it was given. `tries`: -EAGAIN is no
 * error. */
static PyObject *read_array(hot_end *h, Py_ssize_t n, double seconds, PyObject *out, int tries) {
    const hot_array *a = NULL;
    PyObject *array = out;
    if (n < 0 || n > h->capacity) return hot_judge(h, -EMSGSIZE, "read", n), NULL;
    if (out != Py_None) Py_INCREF(array);
    else if (!(array = empty_array(h, n))) return NULL;
    a = plain_array(array, h->dtype, IS_CONTIGUOUS | IS_WRITABLE);
    if (!a || size_of(a) != n) return Py_DECREF(array), NULL;
    int code = hot_move(h, h->calls->read, a->data, n, seconds);
    if (!code && !h->has_readiness) return array;
    if (tries && code == -EAGAIN) return Py_DECREF(array), Py_INCREF(Py_None), Py_None;
    if (!hot_judge(h, code, "read", n)) return array;
    Py_DECREF(array);
    return NULL;
}

static PyObject *reader_read(PyObject *self, PyObject *const *args, Py_ssize_t n_args,
                             PyObject *names) {
    hot_end *h = (hot_end *)self;
    PyObject *found[3] = {NULL, Py_None, Py_None};
    double seconds;
    Py_ssize_t n;
    if (hot_arguments(read_names, 3, args, n_args, names, found) || !hot_is_open(h) ||
        hot_count(found[0], &n))
        return NULL;
    if (hot_seconds(found[1], &seconds)) return NULL;
    PyObject *array = read_array(h, n, seconds, found[2], 0);
    if (array || PyErr_Occurred()) return array;
    return PyObject_CallMethod(self, "_read", "nOO", n, found[1], found[2]);
}

static PyObject *reader_try_read(PyObject *self, PyObject *given) {
    hot_end *h = (hot_end *)self;
    Py_ssize_t n;
    if (!hot_is_open(h) || hot_count(given, &n)) return NULL;
    PyObject *array = read_array(h, n, 0, Py_None, 1);
    if (array || PyErr_Occurred()) return array;
    return PyObject_CallMethod(self, "_try_read", "n", n);
}

/* (channel, packet, bytes) -> code: of another module, whose function is the first word behind
 * `channel`. The addresses are integers. The global lock is held. */
static PyObject *start(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    typedef int64_t function(void *channel, const void *packet, uint64_t bytes);
    (void)module;
    if (n != 3) return PyErr_Format(PyExc_TypeError, "start takes three integers");
    void *channel = PyLong_AsVoidPtr(args[0]), *packet = PyLong_AsVoidPtr(args[1]);
    uint64_t bytes = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred()) return NULL;
    if (!channel) return PyErr_Format(PyExc_ValueError, "channel=0: an address");
    return PyLong_FromLongLong((**(function *const *)channel)(channel, packet, bytes));
}

/* ---- the types ------------------------------------------------------------------------------- */

static PyMethodDef end_methods[] = {
    {"_begin_hot", begin_hot, METH_VARARGS, "Which end of the C core this is."},
    {"_transfer", transfer_bytes, METH_VARARGS,
     "(\"write\" or \"read\", bytes-like, n, timeout): n elements."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef end_members[] = {
    {"spin_ns", T_ULONGLONG, offsetof(hot_end, spin_ns), 0,
     "The polling window in the C core's unit."},
    {"hold_ns", T_ULONGLONG, offsetof(hot_end, hold_ns), 0,
     "So long a wait keeps the global lock."},
    {"_has_readiness", T_BOOL, offsetof(hot_end, has_readiness), 0,
     "Whether a transfer is followed by `rearm`."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot end_slots[] = {
    {Py_tp_doc, (void *)"What a writer and a reader share."},
    {Py_tp_methods, end_methods},
    {Py_tp_members, end_members},
    {Py_tp_traverse, (void *)visit_end},
    {Py_tp_clear, (void *)clear_end},
    {Py_tp_dealloc, (void *)free_end},
    {0, NULL},
};

static PyMethodDef writer_methods[] = {
    {"write", FAST(writer_write), METH_FASTCALL | METH_KEYWORDS,
     "write($self, /, elements, timeout=None)\n--\n\n"
     "Writes all elements or none, waiting for room. Raises Timeout, Closed, PeerDied, Corrupt, "
     "ValueError."},
    {"try_write", writer_try_write, METH_O,
     "try_write($self, elements, /)\n--\n\n"
     "Writes all elements if there is room for them now. Raises PeerDied or Closed when there "
     "never will be."},
    {"reserve", FAST(hot_reserve), METH_FASTCALL | METH_KEYWORDS,
     "reserve($self, /, n, timeout=None)\n--\n\n"
     "`with w.reserve(n) as span:` writes in place. All becomes visible at the end; nothing if the "
     "block raises."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot writer_slots[] = {
    {Py_tp_doc, (void *)"Writes in one call. `_write` of the class that is made of it takes what "
                        "is no plain array."},
    {Py_tp_methods, writer_methods},
    {0, NULL},
};

static PyMethodDef reader_methods[] = {
    {"read", FAST(reader_read), METH_FASTCALL | METH_KEYWORDS,
     "read($self, /, n, timeout=None, out=None)\n--\n\n"
     "Takes n elements, waiting for them. `out`: a C-contiguous array of the queue's dtype with n "
     "elements, of any shape, "
     "which is filled and returned; else a new one is.\n\n"
     "Raises Timeout, Overrun, Closed, PeerDied, Corrupt, and ValueError also for an `out` that "
     "does not fit: nothing is "
     "taken then."},
    {"try_read", reader_try_read, METH_O,
     "try_read($self, n, /)\n--\n\n"
     "n elements if they are there now. Raises PeerDied or Closed when they will not come any "
     "more."},
    {"peek", FAST(hot_peek), METH_FASTCALL | METH_KEYWORDS,
     "peek($self, /, n, timeout=None)\n--\n\n"
     "`with r.peek(n) as span:` reads in place. The end of the block takes the elements; an "
     "exception leaves them.\n\n"
     "The writer of an unsynchronized queue may overwrite them meanwhile. Then the block ends with "
     "Overrun; discard\n"
     "what it has read."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_doc, (void *)"Reads in one call. `_read` of the class that is made of it judges an "
                        "`out` that is no plain array."},
    {Py_tp_methods, reader_methods},
    {0, NULL},
};

static PyType_Spec specs[] = {
    {"fmq._hot.HotEnd", sizeof(hot_end), 0, OPEN_TYPE, end_slots},
    {"fmq._hot.HotWriter", sizeof(hot_end), 0, ROLE_TYPE, writer_slots},
    {"fmq._hot.HotReader", sizeof(hot_end), 0, ROLE_TYPE, reader_slots},
};

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec, PyTypeObject *base) {
    PyObject *bases = base ? PyTuple_Pack(1, base) : NULL;
    if (base && !bases) return NULL;
    PyObject *type = PyType_FromModuleAndSpec(module, spec, bases);
    Py_XDECREF(bases);
    if (!type || PyModule_AddType(module, (PyTypeObject *)type)) return Py_XDECREF(type), NULL;
    return (PyTypeObject *)type; /* kept for ever */
}

/* Whether an array lies in memory as hot_array says. */
static int is_known(PyObject *array, PyTypeObject *type) {
#ifdef FMQ_UNKNOWN_NUMPY
    return 0; /* for a test */
#endif
    const hot_array *a = (const hot_array *)array;
    Py_buffer view;
    if (Py_TYPE(array) != type || PyObject_GetBuffer(array, &view, PyBUF_STRIDES)) return 0;
    int same = a->data == view.buf && a->nd == 2 && view.ndim == 2;
    for (int i = 0; i < 2 && same; i++)
        same = a->dimensions[i] == view.shape[i] && a->strides[i] == view.strides[i];
    PyBuffer_Release(&view);
    PyObject *dtype = same ? PyObject_GetAttrString(array, "dtype") : NULL;
    PyObject *flags = dtype ? PyObject_GetAttrString(array, "flags") : NULL;
    PyObject *number = flags ? PyObject_GetAttrString(flags, "num") : NULL;
    same = number && dtype == a->dtype && PyLong_AsLong(number) == a->flags;
    Py_XDECREF(number);
    Py_XDECREF(flags);
    Py_XDECREF(dtype);
    return same;
}

static int look_at_numpy(void) {
    PyObject *numpy = PyImport_ImportModule("numpy");
    PyObject *type = numpy ? PyObject_GetAttrString(numpy, "ndarray") : NULL;
    new_empty = numpy ? PyObject_GetAttrString(numpy, "empty") : NULL;
    PyObject *sample =
        type && new_empty ? PyObject_CallFunction(new_empty, "(ii)s", 2, 3, "i2") : NULL;
    /* Both kept for ever. */
    if (sample && is_known(sample, (PyTypeObject *)type)) hot_array_type = (PyTypeObject *)type;
    Py_XDECREF(sample);
    Py_XDECREF(numpy);
    if (sample) PyErr_Clear();
    return sample ? 0 : -1;
}

static int add_types(PyObject *module) {
    if (look_at_numpy()) return -1;
    PyTypeObject *end = add_type(module, &specs[0], NULL);
    if (!end) return -1;
    hot_writer_type = add_type(module, &specs[1], end);
    hot_reader_type = hot_writer_type ? add_type(module, &specs[2], end) : NULL;
    hot_transaction_type = hot_reader_type ? add_type(module, &hot_transaction_spec, NULL) : NULL;
    return hot_transaction_type && add_type(module, &hot_exchange_spec, NULL) ? 0 : -1;
}

static PyMethodDef functions[] = {
    {"start", FAST(start), METH_FASTCALL,
     "start(channel, packet, nbytes, /)\n--\n\nCalls the function that is the first word behind "
     "`channel`, an address."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)add_types},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,  .m_name = "fmq._hot",    .m_doc = "Transfers in one call.",
    .m_methods = functions, .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__hot(void) { return PyModuleDef_Init(&definition); }
