/* What the files of burst._hot share. Not exported. */
#ifndef BURST_HOT_H
#define BURST_HOT_H

#include <Python.h>

/* A message in turn: 93 cf number8 cf end8 request; its answer: 92 cf number8 outcome
 * (driver/protocol/lane_codec.py). */
enum { IN_TURN_HEAD = 19, ANSWER_HEAD = 10, MOST_MESSAGE = 65536 };

int hot_add_type(PyObject *module, PyType_Spec *spec, const char *name);
int hot_add_lane(PyObject *module);   /* the engine's end of a socket, and a plan */
int hot_add_socket(PyObject *module); /* the client's end */

#endif
