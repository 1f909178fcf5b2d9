#define _GNU_SOURCE
#include "fmq/thread.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

void fmq_name_thread(const char *name) { prctl(PR_SET_NAME, name); }

enum { STACK_BYTES = 64 * 1024 };

int thread_start(void *(*body)(void *), void *argument, const char *name) {
    sigset_t all, old;
    pthread_t thread;
    pthread_attr_t attributes;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int r = pthread_create(&thread, &attributes, body, argument);
    if (!r) pthread_setname_np(thread, name), pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attributes);
    return -r;
}
