/* The background threads: started at first use, never at load, and deaf to signals. */
#ifndef FMQ_THREAD_H
#define FMQ_THREAD_H

/* A detached thread with that name and all signals blocked; 0 or a negative errno. */
int thread_start(void *(*body)(void *), void *argument, const char *name);

#endif
