/* What the files of fmq._hot share. */
#ifndef FMQ_HOT_H
#define FMQ_HOT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "fmq/api.h"

#include <errno.h>

/* The beginning of a numpy array, as its ABI promises. look_at_numpy finds out whether it is so;
 * else every array goes the way of the unusual ones. */
typedef struct {
    PyObject_HEAD
    char *data;
    int nd;
    Py_ssize_t *dimensions, *strides;
    PyObject *base, *dtype;
    int flags;
} hot_array;

extern PyTypeObject *hot_array_type; /* numpy.ndarray; NULL: an unknown numpy */

/* A span of a block that is over, for the next one in its place. */
typedef struct {
    PyObject *span, *first, *lease; /* the span has the other two, and `first` the lease */
    uint64_t start, n;
    const char *data; /* of `first`; and */
    int flags;
} hot_span;

typedef struct {
    PyObject_HEAD
    const fmq_calls *calls;
    fmq_end *end;
    PyObject *keeps;        /* what `end` belongs to */
    PyObject *dtype, *span; /* span: (start, first, second) -> Span */
    unsigned long long spin_ns, hold_ns;
    Py_ssize_t itemsize, capacity;
    char has_readiness;
    hot_span *kept; /* hot_most_kept of them, or NULL */
} hot_end;

extern PyTypeObject *hot_writer_type, *hot_reader_type, *hot_transaction_type; /* kept for ever */
extern PyType_Spec hot_transaction_spec, hot_exchange_spec;

/* Fills `found` by place or by name; what is not given stays as it is. -1: an exception. */
int hot_arguments(const char *const *known, Py_ssize_t most, PyObject *const *args, Py_ssize_t n,
                  PyObject *names, PyObject **found);
int hot_count(PyObject *given, Py_ssize_t *n);
int hot_seconds(PyObject *timeout, double *seconds);
int hot_is_open(const hot_end *h); /* 0: an exception */

/* The code of a transfer; -EINTR: an exception is set. */
int hot_move(const hot_end *h, fmq_transfer function, void *elements, Py_ssize_t n, double seconds);

/* Raises the exception for a code: NULL. */
PyObject *hot_refuse(hot_end *h, int code, const char *what, Py_ssize_t n);

/* After a transfer: 0, or -1 with an exception. */
int hot_judge(hot_end *h, int code, const char *what, Py_ssize_t n);

PyObject *hot_reserve(PyObject *writer, PyObject *const *args, Py_ssize_t n, PyObject *names);
PyObject *hot_peek(PyObject *reader, PyObject *const *args, Py_ssize_t n, PyObject *names);

int hot_visit_spans(hot_end *h, visitproc visit, void *arg);
void hot_clear_spans(hot_end *h);

void hot_free(PyObject *self, inquiry clear); /* of a type that takes part in garbage collection */

#define FAST(function) (PyCFunction)(void (*)(void))(function)
enum { OPEN_TYPE = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC };
enum { ROLE_TYPE = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE }; /* the rest is inherited */
enum { CLOSED_TYPE = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION };

#endif
