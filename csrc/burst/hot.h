/* What the files of burst._hot share. Not exported. */
#ifndef BURST_HOT_H
#define BURST_HOT_H

#include <Python.h>
#include <stdint.h>

/* A message in turn: 93 cf number8 cf end8 request; its answer: 92 cf number8 outcome
 * (driver/protocol/lane_codec.py). */
enum { IN_TURN_HEAD = 19, ANSWER_HEAD = 10, MOST_MESSAGE = 65536 };

enum { MOST_INPUTS = 32 };

/* The inputs of a burst. takes_arrays: whether all of them are here. copied: bytes, so far. */
typedef struct {
    Py_buffer views[MOST_INPUTS];
    PyObject *names[MOST_INPUTS];
    int count, takes_arrays;
    uint64_t copied;
} hot_inputs;

/* The arrays that a call gives, in the order of the inputs. timeout: None, or seconds; borrowed. */
typedef struct {
    PyObject *const *arrays;
    Py_ssize_t count;
    PyObject *timeout;
    PyObject *by_name[MOST_INPUTS];
    int owned; /* of by_name */
} hot_given;

void hot_take_inputs(hot_inputs *in, PyObject *arrays); /* a dict */
void hot_forget_inputs(hot_inputs *in);
/* Copies arrays into the inputs, all or none. 0: they do not fit as they are. */
int hot_fill(hot_inputs *in, PyObject *const *arrays, Py_ssize_t n);
/* 0: Python sorts them out. `hot_drop_given` in any case. */
int hot_take_given(const hot_inputs *in, PyObject *const *args, Py_ssize_t n, PyObject *names,
                   hot_given *g);
void hot_drop_given(hot_given *g);
/* (places, arrays): bytes that were copied, or -1. */
PyObject *hot_copy_alike(PyObject *self, PyObject *args);

int hot_add_type(PyObject *module, PyType_Spec *spec, const char *name);
int hot_add_lane(PyObject *module);   /* the engine's end of a socket, and a plan */
int hot_add_socket(PyObject *module); /* the client's end */

#endif
