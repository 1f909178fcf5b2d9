/* Locks, and the background threads: started at first use, never at load, and deaf to signals. */
#ifndef FMQ_THREAD_H
#define FMQ_THREAD_H

#include <pthread.h>
#include <stdbool.h>

/* `inherits`: a thread that holds it has the priority of one that waits for it, where the kernel
 * can. */
static inline void thread_init_lock(pthread_mutex_t *lock, bool inherits) {
    pthread_mutexattr_t how;
    pthread_mutexattr_init(&how);
    if (inherits) pthread_mutexattr_setprotocol(&how, PTHREAD_PRIO_INHERIT);
    if (pthread_mutex_init(lock, &how)) pthread_mutex_init(lock, NULL);
    pthread_mutexattr_destroy(&how);
}

/* A detached thread with that name and all signals blocked; 0 or a negative errno. */
int thread_start(void *(*body)(void *), void *argument, const char *name);

#endif
