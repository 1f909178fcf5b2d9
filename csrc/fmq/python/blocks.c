/* Of fmq._hot: `with` blocks on elements in place, and exchanges. */
#include "fmq/python/hot.h"

#include <stdatomic.h>

/* ---- spans ----------------------------------------------------------------------------------- */

enum { MOST_KEPT = 64 };

static int set_over(PyObject *lease, PyObject *is_over) {
    static PyObject *name;
    if (!name) name = PyUnicode_InternFromString("is_over");
    return name ? PyObject_SetAttr(lease, name, is_over) : -1;
}

static hot_span *place_of(hot_end *h, const fmq_spans *at) {
#ifdef Py_GIL_DISABLED
    return NULL; /* the counts of references say less there */
#endif
    if (!hot_array_type || at->second || !at->first) return NULL;
    if (!h->kept) h->kept = PyMem_Calloc(MOST_KEPT, sizeof *h->kept);
    return h->kept ? &h->kept[at->start / at->first % MOST_KEPT] : NULL;
}

/* Whether the program has nothing of it any more, and left it as it was: all references are ours
 * and each other's. */
static int is_free(const hot_span *k, const hot_end *h) {
    const hot_array *a = (const hot_array *)k->first;
    if (Py_REFCNT(k->span) != 1 || Py_REFCNT(k->first) != 2 || Py_REFCNT(k->lease) != 3) return 0;
    return a->nd == 1 && (uint64_t)a->dimensions[0] == k->n && a->data == k->data &&
           a->flags == k->flags && a->dtype == h->dtype;
}

static void drop(hot_span *k) {
    hot_span old = *k;
    *k = (hot_span){0};
    Py_XDECREF(old.span);
    Py_XDECREF(old.first);
    Py_XDECREF(old.lease);
}

static void keep(hot_span *k, const fmq_spans *at, PyObject *span, PyObject *lease) {
    drop(k);
    PyObject *first = PyObject_GetAttrString(span, "first");
    if (!first) return PyErr_Clear();
    Py_INCREF(span), Py_INCREF(lease);
    const hot_array *a = (const hot_array *)first;
    *k = (hot_span){span, first, lease, at->start, at->first, a->data, a->flags};
}

/* A span of these elements, and its lease. */
static PyObject *span_of(hot_end *h, const fmq_spans *at, PyObject **lease) {
    hot_span *k = place_of(h, at);
    if (k && k->span && k->start == at->start && k->n == at->first && is_free(k, h)) {
        if (set_over(k->lease, Py_False)) return NULL;
        Py_INCREF(k->span), Py_INCREF(k->lease);
        *lease = k->lease;
        return k->span;
    }
    PyObject *span = PyObject_CallFunction(h->span, "KKK", at->start, at->first, at->second);
    *lease = span ? PyObject_GetAttrString(span, "_lease") : NULL;
    if (!*lease) return Py_XDECREF(span), NULL;
    if (k) keep(k, at, span, *lease);
    return span;
}

int hot_visit_spans(hot_end *h, visitproc visit, void *arg) {
    for (int i = 0; h->kept && i < MOST_KEPT; i++) {
        Py_VISIT(h->kept[i].span);
        Py_VISIT(h->kept[i].first);
        Py_VISIT(h->kept[i].lease);
    }
    return 0;
}

void hot_clear_spans(hot_end *h) {
    hot_span *kept = h->kept;
    h->kept = NULL;
    for (int i = 0; kept && i < MOST_KEPT; i++) drop(&kept[i]);
    PyMem_Free(kept);
}

/* ---- transactions ---------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    hot_end *end;
    const char *what;
    Py_ssize_t n;
    double seconds;
    PyObject *_Atomic lease; /* of the block's span; NULL before and after it */
} transaction;

static const char *const transaction_names[] = {"n", "timeout"};

static PyObject *new_transaction(PyObject *self, PyObject *const *args, Py_ssize_t n_args,
                                 PyObject *names, const char *what) {
    PyObject *found[2] = {NULL, Py_None};
    double seconds;
    Py_ssize_t n;
    if (hot_arguments(transaction_names, 2, args, n_args, names, found) ||
        !hot_is_open((hot_end *)self))
        return NULL;
    if (hot_count(found[0], &n) || hot_seconds(found[1], &seconds)) return NULL;
    transaction *t = (transaction *)((allocfunc)PyType_GetSlot(hot_transaction_type, Py_tp_alloc))(
        hot_transaction_type, 0);
    if (!t) return NULL;
    Py_INCREF(self);
    t->end = (hot_end *)self, t->what = what, t->n = n, t->seconds = seconds;
    return (PyObject *)t;
}

PyObject *hot_reserve(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    return new_transaction(self, args, n, names, "reserve");
}

PyObject *hot_peek(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    return new_transaction(self, args, n, names, "peek");
}

static PyObject *enter_block(PyObject *self, PyObject *unused) {
    (void)unused;
    transaction *t = (transaction *)self;
    hot_end *h = t->end;
    fmq_spans at = {0, 0, 0};
    if (atomic_load(&t->lease))
        return PyErr_Format(PyExc_RuntimeError, "this block is open already; call %s again",
                            t->what);
    int code = hot_move(h, h->calls->reserve, &at, t->n, t->seconds);
    if (code) return hot_refuse(h, code, t->what, t->n);
    PyObject *lease, *span = span_of(h, &at, &lease);
    if (!span) return t->n ? h->calls->commit(h->end, 0) : 0, NULL;
    atomic_store(&t->lease, lease);
    return span;
}

/* (type of the exception or None, …). A reservation of nothing is none: one that is open may be
 * another thread's. */
static PyObject *exit_block(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    transaction *t = (transaction *)self;
    hot_end *h = t->end;
    PyObject *lease = atomic_exchange(&t->lease, NULL);
    if (!lease)
        return PyErr_Format(PyExc_RuntimeError,
                            "this block has not begun; use `with` on what %s returns", t->what);
    int is_whole = !n || args[0] == Py_None, is_over = !set_over(lease, Py_True);
    Py_DECREF(lease);
    int code = t->n ? h->calls->commit(h->end, is_whole && is_over ? (uint64_t)t->n : 0) : 0;
    if (!is_over || (t->n && hot_judge(h, is_whole ? code : 0, t->what, t->n))) return NULL;
    Py_RETURN_NONE;
}

static int visit_transaction(PyObject *self, visitproc visit, void *arg) {
    transaction *t = (transaction *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(t->end);
    Py_VISIT(atomic_load(&t->lease));
    return 0;
}

static int clear_transaction(PyObject *self) {
    transaction *t = (transaction *)self;
    Py_XDECREF(atomic_exchange(&t->lease, NULL));
    Py_CLEAR(t->end);
    return 0;
}

static void free_transaction(PyObject *self) { hot_free(self, clear_transaction); }

/* ---- exchanges ------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    hot_end *out, *back;
    fmq_channel channel;
    atomic_flag is_inside; /* a thread: until its message is copied */
} hot_exchange;

static const char *const exchange_names[] = {"packet", "deadline"};

/* Bytes received, or a code; -EINTR: an exception is set. */
static int64_t ask(hot_exchange *x, const void *packet, uint64_t bytes, uint64_t deadline) {
    const fmq_calls *calls = x->back->calls;
    x->channel.spin_ns = x->back->spin_ns;
    int64_t got = -EINTR;
    if (x->channel.start_ns) {
        got = calls->exchange_start(&x->channel, packet, bytes);
        if (got != -ETIMEDOUT || calls->now() >= deadline) return got;
        bytes = 0; /* it is out; what it may keep the lock for is over */
    }
    do {
        PyThreadState *state = PyEval_SaveThread();
        got = calls->exchange(&x->channel, bytes ? packet : NULL, bytes, deadline);
        PyEval_RestoreThread(state);
        bytes = got == -EINTR ? 0 : bytes;
    } while (got == -EINTR && !PyErr_CheckSignals());
    return got;
}

static PyObject *call_exchange(PyObject *self, PyObject *const *args, Py_ssize_t n,
                               PyObject *names) {
    hot_exchange *x = (hot_exchange *)self;
    PyObject *found[2] = {NULL, NULL}, *message = NULL;
    if (hot_arguments(exchange_names, 2, args, n, names, found)) return NULL;
    uint64_t deadline = found[1] ? PyLong_AsUnsignedLongLong(found[1]) : UINT64_MAX;
    if (found[1] && deadline == UINT64_MAX && PyErr_Occurred()) return NULL;
    if (!x->back) return PyErr_Format(PyExc_ValueError, "this exchange was never made");
    Py_buffer packet;
    if (PyObject_GetBuffer(found[0], &packet, PyBUF_SIMPLE)) return NULL;
    int64_t got = -EBUSY;
    if (!atomic_flag_test_and_set(&x->is_inside)) {
        got = ask(x, packet.buf, (uint64_t)packet.len, deadline);
        if (got >= 0) message = PyBytes_FromStringAndSize(x->channel.buffer, (Py_ssize_t)got);
        atomic_flag_clear(&x->is_inside);
    }
    Py_ssize_t sent = packet.len;
    PyBuffer_Release(&packet);
    if (got < 0 && got != -EINTR)
        Py_XDECREF(PyObject_CallMethod(self, "_refuse", "in", (int)got, sent));
    return message;
}

/* (out, back, seconds of `hold`) */
static PyObject *begin_exchange(PyObject *self, PyObject *args) {
    hot_exchange *x = (hot_exchange *)self;
    PyObject *out, *back;
    double hold;
    if (!PyArg_ParseTuple(args, "O!O!d", hot_writer_type, &out, hot_reader_type, &back, &hold))
        return NULL;
    if (!hot_is_open((hot_end *)out) || !hot_is_open((hot_end *)back)) return NULL;
    if (x->back) return PyErr_Format(PyExc_ValueError, "an exchange begins once");
    hot_end *o = (hot_end *)out, *b = (hot_end *)back;
    uint64_t bytes = (uint64_t)b->capacity * (uint64_t)b->itemsize;
    void *buffer = PyMem_Malloc(bytes);
    if (!buffer) return PyErr_NoMemory();
    x->channel = (fmq_channel){o->end, b->end, buffer, bytes, b->spin_ns, (uint64_t)(hold * 1e9)};
    Py_INCREF(out), Py_INCREF(back);
    x->out = o, x->back = b;
    Py_RETURN_NONE;
}

static int visit_exchange(PyObject *self, visitproc visit, void *arg) {
    hot_exchange *x = (hot_exchange *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(x->out);
    Py_VISIT(x->back);
    return 0;
}

static int clear_exchange(PyObject *self) {
    hot_exchange *x = (hot_exchange *)self;
    Py_CLEAR(x->out);
    Py_CLEAR(x->back);
    return 0;
}

static void free_exchange(PyObject *self) {
    PyMem_Free(((hot_exchange *)self)->channel.buffer);
    hot_free(self, clear_exchange);
}

/* ---- their types ----------------------------------------------------------------------------- */

static PyMethodDef transaction_methods[] = {
    {"__enter__", enter_block, METH_NOARGS, "The span."},
    {"__exit__", FAST(exit_block), METH_FASTCALL,
     "Ends the span: transfers, or after an exception drops the reservation."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot transaction_slots[] = {
    {Py_tp_doc, (void *)"A `with` block on elements in place: `w.reserve(n)`, `r.peek(n)`."},
    {Py_tp_methods, transaction_methods},
    {Py_tp_traverse, (void *)visit_transaction},
    {Py_tp_clear, (void *)clear_transaction},
    {Py_tp_dealloc, (void *)free_transaction},
    {0, NULL},
};

PyType_Spec hot_transaction_spec = {"fmq._hot.Transaction", sizeof(transaction), 0, CLOSED_TYPE,
                                    transaction_slots};

static PyMethodDef exchange_methods[] = {
    {"__call__", FAST(call_exchange), METH_FASTCALL | METH_KEYWORDS,
     "__call__($self, /, packet, deadline=18446744073709551615)\n--\n\n"
     "Sends `packet` (b\"\": nothing) and returns the next message. `deadline`: absolute "
     "CLOCK_MONOTONIC ns.\n\n"
     "Raises BufferError when the packet does not fit: then nothing was sent. Timeout: it was "
     "sent."},
    {"_begin_hot", begin_exchange, METH_VARARGS, "(out, back, hold)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot exchange_slots[] = {
    {Py_tp_doc,
     (void *)"A write and a read in one call. `_refuse` of the class that is made of it raises."},
    {Py_tp_methods, exchange_methods},
    {Py_tp_traverse, (void *)visit_exchange},
    {Py_tp_clear, (void *)clear_exchange},
    {Py_tp_dealloc, (void *)free_exchange},
    {0, NULL},
};

PyType_Spec hot_exchange_spec = {"fmq._hot.HotExchange", sizeof(hot_exchange), 0, OPEN_TYPE,
                                 exchange_slots};
