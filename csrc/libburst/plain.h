/* The plain path of a connection: executions without a burst. Not exported. */
#ifndef LIBBURST_PLAIN_H
#define LIBBURST_PLAIN_H

#include "libburst/client.h"

typedef struct plain plain;

/* What is to be executed. */
typedef struct {
    uint32_t n_inputs, n_outputs;
    const burst_tensor *inputs, *outputs;
    burst_execution how;
    uint64_t deadline;
    int64_t model;
    int64_t *slots; /* of all tensors; -1: omitted; below it: a buffer of the device, -1 - token */
} task;

/* Another socket of the lane, under the lock of the client. */
int plain_open(client *c, uint64_t deadline, plain **out);
void plain_free(plain *p); /* NULL: nothing */
void plain_stop(plain *p); /* another thread that receives gets -EPIPE */
int plain_send(plain *p, message *m);
int plain_receive(plain *p, uint64_t deadline, message **m);
/* The slot of a tensor's pool; -1: it is omitted. */
int plain_slot(plain *p, const burst_tensor *t, int64_t *slot);
/* A packed request. `places`: room for as many slots as there are tensors. */
void put_request(message *m, const task *t, int64_t *places);
void put_wide(message *m, uint64_t value); /* an integer in nine bytes */
/* What is told of an execution, up to its end. */
int take_outcome(message *m, const task *t, burst_outcome *o);

#endif
