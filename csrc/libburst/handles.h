/* Handles that can be closed twice, used after that, or be of another kind, and say so: of libburst
 * and of libfmq. Not exported. */
#ifndef LIBBURST_HANDLES_H
#define LIBBURST_HANDLES_H

#include "burst/failure.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum kind { CLIENT = 1, BUILDER, COMPILED, CONTROLLER, POOL, REQUEST, QUEUE, END, STREAM };

/* The beginning of everything that a handle stands for. */
typedef struct object {
    enum kind kind;
    uint32_t slot, generation;              /* of the table; of the process, counted in forks */
    void (*destroy)(struct object *object); /* by the thread that lets go of it last */
} object;

uint32_t handle_generation(void); /* counts forks */
/* *out: the handle; the caller has a reference. */
int handle_new(object *o, enum kind kind, void (*destroy)(object *), void *out);
/* The object, held until `object_put`; else NULL, and why in *error. */
void *handle_take(const void *handle, enum kind kind, int *error);
/* As handle_take, and no thread can take it from now on. */
int handle_close(void *handle, enum kind kind, void **out);
void *object_hold(void *o);
bool object_is_open(const void *o); /* of an object that is held: no thread has closed its handle */
void object_put(void *o);

#endif
