/* A connection to a device, and what was prepared through it; both find their way to the device's
 * next life. Not exported. */
#ifndef LIBBURST_CLIENT_H
#define LIBBURST_CLIENT_H

#include "burst/messages.h"
#include "libburst/burst.h"
#include "libburst/handles.h"

#include <pthread.h>

enum { PROTOCOL = 5, PAGE = 4096, MOST_PATH = 108, MOST_LIVES = 10 };

struct plain;

typedef struct {
    object head;
    /* Held by the thread that uses the plain path; taken before `lock`. */
    pthread_mutex_t executing;
    struct plain *plain;  /* changed under both locks */
    pthread_mutex_t lock; /* of all that follows */
    char place[256];      /* a name, or a path */
    bool is_named;
    int socket; /* -1: none */
    void *life;
    int64_t watch, number;      /* number: of the last call */
    uint64_t epoch;             /* counts the connections that there were */
    uint64_t lives[MOST_LIVES]; /* when the device was started again, modulo */
    int32_t priority;           /* of models that are prepared from now on */
    const char *preference;
    message m;
} client;

typedef struct {
    object head;
    client *client; /* held; its lock is this one's, too */
    int memory;
    uint64_t offset, bytes;
    int32_t priority; /* as the wire has it */
    const char *preference;
    uint64_t epoch; /* of the connection on which it has its number */
    int64_t number;
} compiled;

/* Under the lock of the client: writes the head of a call with so many arguments, which the caller
 * puts behind it. */
message *client_begin(client *c, const char *method, uint32_t arguments);
/* Sends it, and returns 0 with *values objects of the answer to read, else a status or -errno.
 * Descriptors of the answer are in m. */
int client_call(client *c, uint64_t deadline, int64_t *values);
/* Its device runs under another account, and takes memory with all its pages alone. */
bool client_is_foreign(const client *c);
/* Without a look at the answer; 1 s at most. */
void client_tell(client *c, const char *method, int64_t number);

/* `epoch`: of the connection that the caller found dead. Connects again, unless another thread has;
 * bounded. */
int client_revive(client *c, uint64_t epoch);
/* On the present connection, unless it is there already. */
int compiled_prepare(compiled *p, uint64_t deadline);
uint64_t compiled_epoch(compiled *p);

int life_page(message *m, void **life); /* takes the only descriptor of an answer */

#endif
