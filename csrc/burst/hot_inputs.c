/* The arrays that a call gives, by position or by name, and their way into a burst's inputs. What
 * is not of the input's type and shape, and in one piece, is left to Python (InputSet.fill), which
 * converts it, or says what is wrong.
 */
#define PY_SSIZE_T_CLEAN
#include "burst/hot.h"

#include <string.h>

enum { FROM = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT, INTO = FROM | PyBUF_WRITABLE };
enum { LARGE = 65536 }; /* bytes: copies of fewer take less than another thread needs to begin */

static int is_alike(const Py_buffer *given, const Py_buffer *wanted) {
    if (given->ndim != wanted->ndim || given->len != wanted->len ||
        given->itemsize != wanted->itemsize)
        return 0;
    if (strcmp(given->format ? given->format : "B", wanted->format ? wanted->format : "B"))
        return 0;
    return !given->ndim ||
           !memcmp(given->shape, wanted->shape, (size_t)given->ndim * sizeof *given->shape);
}

static int view_of(PyObject *array, Py_buffer *view, int flags) {
    if (!PyObject_GetBuffer(array, view, flags)) return 1;
    PyErr_Clear();
    return 0;
}

/* 1: a view of an array that is like `wanted`. */
static int view_alike(PyObject *array, Py_buffer *view, const Py_buffer *wanted) {
    if (!view_of(array, view, FROM)) return 0;
    if (is_alike(view, wanted)) return 1;
    PyBuffer_Release(view);
    return 0;
}

static void move(const Py_buffer *from, const Py_buffer *into, int n) {
    for (int i = 0; i < n; i++) memmove(into[i].buf, from[i].buf, (size_t)from[i].len);
}

/* ---- the inputs ------------------------------------------------------------------------------ */

static int take_input(hot_inputs *in, PyObject *name, PyObject *array) {
    if (in->count == MOST_INPUTS || !PyUnicode_Check(name)) return 0;
    if (!view_of(array, &in->views[in->count], INTO)) return 0;
    in->names[in->count] = PyUnicode_FromObject(name); /* of a subclass: a str */
    if (!in->names[in->count]) {
        PyErr_Clear();
        PyBuffer_Release(&in->views[in->count]);
        return 0;
    }
    PyUnicode_InternInPlace(&in->names[in->count++]);
    return 1;
}

void hot_take_inputs(hot_inputs *in, PyObject *arrays) {
    PyObject *name, *array;
    Py_ssize_t at = 0;
    in->takes_arrays = 1;
    while (in->takes_arrays && PyDict_Next(arrays, &at, &name, &array))
        in->takes_arrays = take_input(in, name, array);
}

void hot_forget_inputs(hot_inputs *in) {
    int count = in->count;
    in->count = in->takes_arrays = 0;
    for (int i = 0; i < count; i++) {
        PyBuffer_Release(&in->views[i]);
        Py_CLEAR(in->names[i]);
    }
}

int hot_fill(hot_inputs *in, PyObject *const *arrays, Py_ssize_t n) {
    Py_buffer given[MOST_INPUTS];
    int taken = 0, fits = in->takes_arrays && n == in->count;
    for (; fits && taken < n; taken += fits)
        fits = view_alike(arrays[taken], &given[taken], &in->views[taken]);
    if (fits) move(given, in->views, taken);
    for (int i = 0; i < taken; i++) {
        if (fits) in->copied += (uint64_t)given[i].len;
        PyBuffer_Release(&given[i]);
    }
    return fits;
}

/* ---- what a call gives ----------------------------------------------------------------------- */

static int is_called(PyObject *name, const char *text) {
    return !PyUnicode_CompareWithASCIIString(name, text);
}

/* Keywords are interned, and so are the names: one is usually found without a look at its text. */
static int place_of(const hot_inputs *in, PyObject *name) {
    for (int i = 0; i < in->count; i++)
        if (in->names[i] == name) return i;
    for (int i = 0; i < in->count; i++)
        if (!PyUnicode_Compare(in->names[i], name)) return i;
    return -1;
}

static int take_keywords(const hot_inputs *in, PyObject *const *values, PyObject *names,
                         hot_given *g) {
    Py_ssize_t n = PyTuple_Size(names), found = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *name = PyTuple_GetItem(names, i);
        if (is_called(name, "timeout")) {
            g->timeout = values[i];
            continue;
        }
        int place = is_called(name, "deadline") ? -1 : place_of(in, name);
        if (place < 0) return 0;
        g->by_name[place] = values[i];
        found++;
    }
    if (!found) return 1;
    if (g->count || found != in->count) return 0;
    g->arrays = g->by_name;
    g->count = found;
    return 1;
}

/* The keys of a dict may be compared by Python, which may change it. */
static int take_dict(const hot_inputs *in, PyObject *dict, hot_given *g) {
    if (PyDict_Size(dict) != in->count) return 0;
    for (; g->owned < in->count; g->owned++) {
        PyObject *found = PyDict_GetItemWithError(dict, in->names[g->owned]);
        if (!found) return PyErr_Clear(), 0;
        Py_INCREF(found);
        g->by_name[g->owned] = found;
    }
    g->arrays = g->by_name;
    g->count = in->count;
    return 1;
}

int hot_take_given(const hot_inputs *in, PyObject *const *args, Py_ssize_t n, PyObject *names,
                   hot_given *g) {
    g->arrays = args;
    g->count = n;
    g->owned = 0;
    g->timeout = Py_None;
    if (names && !take_keywords(in, args + n, names, g)) return 0;
    return n != 1 || !PyDict_CheckExact(args[0]) || take_dict(in, args[0], g);
}

void hot_drop_given(hot_given *g) {
    while (g->owned) Py_DECREF(g->by_name[--g->owned]);
}

/* ---- arrays into others ---------------------------------------------------------------------- */

static PyObject *member(PyObject *of, Py_ssize_t i) {
    return PyList_Check(of) ? PyList_GetItem(of, i) : PyTuple_GetItem(of, i);
}

static int take_pair(PyObject *array, PyObject *place, Py_buffer *from, Py_buffer *into) {
    if (!view_of(place, into, INTO)) return 0;
    if (view_alike(array, from, into)) return 1;
    PyBuffer_Release(into);
    return 0;
}

PyObject *hot_copy_alike(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *places, *arrays;
    if (!PyArg_ParseTuple(args, "O!O", &PyTuple_Type, &places, &arrays)) return NULL;
    Py_ssize_t n = PyObject_Size(arrays), bytes = 0;
    if (n < 0) return NULL;
    if (!PyList_Check(arrays) && !PyTuple_Check(arrays)) return PyLong_FromLong(-1);
    if (n != PyTuple_Size(places) || n > MOST_INPUTS) return PyLong_FromLong(-1);
    Py_buffer from[MOST_INPUTS], into[MOST_INPUTS];
    int taken = 0, fits = 1;
    for (Py_ssize_t i = 0; i < n && fits; i++) {
        PyObject *array = member(arrays, i), *place = PyTuple_GetItem(places, i);
        if (array == Py_None && place == Py_None) continue; /* it is omitted */
        fits = take_pair(array, place, &from[taken], &into[taken]);
        if (fits) bytes += from[taken++].len;
    }
    if (!fits) {
        bytes = -1;
    } else if (bytes < LARGE) {
        move(from, into, taken);
    } else {
        Py_BEGIN_ALLOW_THREADS
        move(from, into, taken);
        Py_END_ALLOW_THREADS
    }
    for (int i = 0; i < taken; i++) {
        PyBuffer_Release(&from[i]);
        PyBuffer_Release(&into[i]);
    }
    return PyLong_FromSsize_t(bytes);
}
