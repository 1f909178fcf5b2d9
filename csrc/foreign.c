/* A burst_function out of a library's call that takes more than one argument: what a device needs to offer `native`
 * without Python between the listener and the library. What the library cannot use where it lies is copied for it. */
#include <stdint.h>

#include "api.h"
#include "packet.h"

#include <pthread.h>
#include <string.h>

_Static_assert(sizeof(pthread_mutex_t) <= sizeof(burst_turn), "a turn is a mutex");
_Static_assert(_Alignof(pthread_mutex_t) <= _Alignof(burst_turn), "a turn is a mutex");

void burst_turn_init(burst_turn *turn) { pthread_mutex_init((pthread_mutex_t *)(void *)turn, NULL); }

static void copy(const burst_copy *copies, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) memcpy(copies[i].to, copies[i].from, copies[i].bytes);
}

int32_t burst_foreign_run(void *context) {
    burst_foreign *f = context;
    pthread_mutex_t *turn = (pthread_mutex_t *)(void *)f->turn;
    copy(f->before, f->n_before);
    pthread_mutex_lock(turn);
    f->status = f->function(f->object, f->number, f->n_inputs, f->inputs, f->n_outputs, f->outputs);
    pthread_mutex_unlock(turn);
    if (f->status) return GENERAL_FAILURE;
    copy(f->after, f->n_after);
    return 0;
}
