/* burst._hot: the client's end of a lane's socket: a request and its answer in one call from
 * Python, so that what runs after the wake-up, in cold caches, is little.
 *
 * What is not the usual case goes to Python, which knows the words for it. A socket serves one
 * thread at a time: its owner has a lock.
 */
#define PY_SSIZE_T_CLEAN
#include "burst/hot.h"

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

typedef struct {
    PyObject_HEAD
    PyObject *outcome;     /* the last one, bytes, or NULL */
    unsigned char *buffer; /* MOST_MESSAGE: the answer */
} hot_socket;

static void store_number(unsigned char *at, uint64_t value) {
    *at = 0xcf;
    for (int i = 8; i; i--, value >>= 8) at[i] = (unsigned char)value;
}

/* 1: it was sent; 0: nothing was. */
static int send_request(int socket, unsigned char *head, char *request, Py_ssize_t n) {
    struct iovec parts[] = {{head, IN_TURN_HEAD}, {request, (size_t)n}};
    struct msghdr whole = {.msg_iov = parts, .msg_iovlen = 2};
    return sendmsg(socket, &whole, MSG_NOSIGNAL) >= 0;
}

/* The bytes of the answer; 0 or less: there is none, or (-1) an exception. */
static ssize_t receive_answer(const hot_socket *s, int socket, ssize_t n, int error) {
    while (n < 0 && (error == EINTR || error == EAGAIN)) {
        if (PyErr_CheckSignals()) return -1;
        Py_BEGIN_ALLOW_THREADS
        /* A library has made all sockets of the process non-blocking, as gevent does. */
        if (error == EAGAIN) poll(&(struct pollfd){.fd = socket, .events = POLLIN}, 1, -1);
        n = recv(socket, s->buffer, MOST_MESSAGE, 0);
        error = errno;
        Py_END_ALLOW_THREADS
    }
    return n;
}

/* A new reference: the last outcome itself if it is the same. */
static PyObject *outcome_in(hot_socket *s, const unsigned char *head, ssize_t n) {
    if (n <= ANSWER_HEAD || memcmp(s->buffer + 1, head + 1, ANSWER_HEAD - 1))
        return PyObject_CallMethod((PyObject *)s, "_refuse", NULL);
    const char *outcome = (const char *)s->buffer + ANSWER_HEAD;
    n -= ANSWER_HEAD;
    PyObject *last = s->outcome;
    if (!last || n != PyBytes_Size(last) || memcmp(outcome, PyBytes_AsString(last), (size_t)n)) {
        s->outcome = PyBytes_FromStringAndSize(outcome, n);
        Py_XDECREF(last);
    }
    Py_XINCREF(s->outcome);
    return s->outcome;
}

/* (socket, number, end, request): the outcome; None: nothing was sent; no bytes: it was, and
 * no answer has come. */
static PyObject *exchange(PyObject *self, PyObject *args) {
    hot_socket *s = (hot_socket *)self;
    unsigned long long number, end;
    PyObject *request;
    int socket, is_sent, error = 0;
    if (!PyArg_ParseTuple(args, "iKKS", &socket, &number, &end, &request)) return NULL;
    if (!s->buffer && !(s->buffer = malloc(MOST_MESSAGE))) return PyErr_NoMemory();
    unsigned char head[IN_TURN_HEAD] = {0x93};
    store_number(head + 1, number);
    store_number(head + ANSWER_HEAD, end);
    char *bytes = PyBytes_AsString(request);
    Py_ssize_t length = PyBytes_Size(request);
    ssize_t n = 0;
    Py_BEGIN_ALLOW_THREADS
    is_sent = send_request(socket, head, bytes, length);
    if (is_sent) n = recv(socket, s->buffer, MOST_MESSAGE, 0);
    error = errno;
    Py_END_ALLOW_THREADS
    if (!is_sent) Py_RETURN_NONE;
    n = receive_answer(s, socket, n, error);
    if (PyErr_Occurred()) return NULL;
    return n <= 0 ? PyBytes_FromStringAndSize(NULL, 0) : outcome_in(s, head, n);
}

static void dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((hot_socket *)self)->outcome);
    free(((hot_socket *)self)->buffer);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"_exchange", exchange, METH_VARARGS,
     "Has a request executed in turn. None: nothing was sent; b\"\": no answer has come."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)"The client's end of a socket on which requests are executed in turn. "
                        "`_refuse` of the class that is made of it raises."},
    {Py_tp_methods, methods},
    {Py_tp_dealloc, (void *)dealloc},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "burst._hot.HotSocket",
    .basicsize = sizeof(hot_socket),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};

int hot_add_socket(PyObject *module) { return hot_add_type(module, &spec, "HotSocket"); }
