/* Messages: the few forms of msgpack that docs/protocol.md needs, bounded, and descriptors over a
 * packet socket. */
#define _GNU_SOURCE
#include "burst/messages.h"

#include "burst/failure.h"
#include "fmq/futex.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { TRIES = 10, MOST_DEPTH = 8 };

void message_close_fds(message *m) {
    while (m->n_fds) close(m->fds[--m->n_fds]);
}

void message_reset(message *m) { m->length = m->at = 0, m->n_fds = 0, m->is_broken = false; }

void message_free(message *m) {
    free(m->bytes);
    *m = (message){0};
}

static bool make_room(message *m, size_t more) {
    if (m->is_broken) return false;
    if (m->room - m->length >= more) return true;
    size_t room = 2 * (m->length + more) + 256;
    unsigned char *bytes = realloc(m->bytes, room);
    if (!bytes) return m->is_broken = true, false;
    m->bytes = bytes, m->room = room;
    return true;
}

/* ---- writing --------------------------------------------------------------------------------- */

void put_bytes(message *m, const void *bytes, size_t n) {
    if (!make_room(m, n)) return;
    if (n) memcpy(m->bytes + m->length, bytes, n);
    m->length += n;
}

static void put_head(message *m, unsigned head, uint64_t value, unsigned bytes) {
    unsigned char all[9] = {(unsigned char)head};
    for (unsigned i = 0; i < bytes; i++) all[1 + i] = (unsigned char)(value >> 8 * (bytes - 1 - i));
    put_bytes(m, all, 1 + bytes);
}

void put_array(message *m, uint32_t n) {
    if (n < 16) put_head(m, 0x90 | n, 0, 0);
    else if (n <= UINT16_MAX) put_head(m, 0xdc, n, 2);
    else put_head(m, 0xdd, n, 4);
}

void put_uint(message *m, uint64_t value) {
    if (value < 128) put_head(m, (unsigned)value, 0, 0);
    else if (value <= UINT8_MAX) put_head(m, 0xcc, value, 1);
    else if (value <= UINT16_MAX) put_head(m, 0xcd, value, 2);
    else if (value <= UINT32_MAX) put_head(m, 0xce, value, 4);
    else put_head(m, 0xcf, value, 8);
}

void put_int(message *m, int64_t value) {
    if (value >= 0) put_uint(m, (uint64_t)value);
    else if (value >= -32) put_head(m, (unsigned char)value, 0, 0);
    else if (value >= INT8_MIN) put_head(m, 0xd0, (uint64_t)value, 1);
    else if (value >= INT16_MIN) put_head(m, 0xd1, (uint64_t)value, 2);
    else if (value >= INT32_MIN) put_head(m, 0xd2, (uint64_t)value, 4);
    else put_head(m, 0xd3, (uint64_t)value, 8);
}

void put_double(message *m, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_head(m, 0xcb, bits, 8);
}

void put_bool(message *m, bool value) { put_head(m, value ? 0xc3 : 0xc2, 0, 0); }
void put_nil(message *m) { put_head(m, 0xc0, 0, 0); }

void put_text(message *m, const char *text) {
    size_t n = strlen(text);
    if (n < 32) put_head(m, 0xa0 | (unsigned)n, 0, 0);
    else if (n <= UINT8_MAX) put_head(m, 0xd9, n, 1);
    else put_head(m, 0xda, n, 2);
    if (n > UINT16_MAX) m->is_broken = true;
    put_bytes(m, text, n);
}

/* ---- reading --------------------------------------------------------------------------------- */

static enum form broken(message *m) { return m->is_broken = true, BROKEN; }

static bool take_number(message *m, unsigned bytes, uint64_t *value) {
    if (m->length - m->at < bytes) return false;
    for (*value = 0; bytes; bytes--) *value = *value << 8 | m->bytes[m->at++];
    return true;
}

/* The payload of a text, an array, or of what is only passed over. */
static enum form take_sized(message *m, enum form form, unsigned bytes, uint64_t size,
                            int64_t *value) {
    if (bytes && !take_number(m, bytes, &size)) return broken(m);
    if (size > m->length - m->at) return broken(m); /* an element has one byte at least */
    *value = (int64_t)size;
    if (form == OTHER) m->at += size;
    return form;
}

static enum form take_integer(message *m, unsigned head, int64_t *value) {
    unsigned bytes = 1u << (head & 3);
    uint64_t number;
    if (!take_number(m, bytes, &number)) return broken(m);
    bool is_signed = head >= 0xd0;
    if (is_signed && bytes < 8 && number >> (8 * bytes - 1)) number |= UINT64_MAX << 8 * bytes;
    if (!is_signed && number > INT64_MAX) return OTHER; /* none that this client waits for */
    *value = (int64_t)number;
    return INTEGER;
}

enum form take_object(message *m, int64_t *value) {
    uint64_t head;
    if (m->is_broken || !take_number(m, 1, &head)) return broken(m);
    if (head < 0x80 || head >= 0xe0) return *value = (int8_t)head, INTEGER;
    if (head < 0x90) return broken(m); /* a map: no message to a client has one */
    if (head < 0xa0) return take_sized(m, ARRAY, 0, head & 15, value);
    if (head < 0xc0) return take_sized(m, TEXT, 0, head & 31, value);
    if (head >= 0xcc && head <= 0xd3) return take_integer(m, (unsigned)head, value);
    switch (head) {
    case 0xc0:
    case 0xc2:
    case 0xc3: return *value = head == 0xc3, OTHER;
    /* Bin. */
    case 0xc4:
    case 0xc5:
    case 0xc6: return take_sized(m, OTHER, 1u << (head - 0xc4), 0, value);
    /* Float. */
    case 0xca:
    case 0xcb: return take_sized(m, OTHER, 0, head == 0xca ? 4 : 8, value);
    case 0xd9:
    case 0xda:
    case 0xdb: return take_sized(m, TEXT, 1u << (head - 0xd9), 0, value);
    case 0xdc:
    case 0xdd: return take_sized(m, ARRAY, head == 0xdc ? 2 : 4, 0, value);
    default: return broken(m);
    }
}

bool take_as(message *m, enum form form, int64_t *value) {
    return take_object(m, value) == form || (broken(m), false);
}

bool take_text(message *m, char *to, size_t room) {
    int64_t n;
    if (!take_as(m, TEXT, &n)) return false;
    size_t kept = (size_t)n < room ? (size_t)n : room - 1;
    for (size_t i = 0; i < kept; i++)
        to[i] = m->bytes[m->at + i] < ' ' ? ' ' : (char)m->bytes[m->at + i];
    to[kept] = 0;
    m->at += (size_t)n;
    return true;
}

static bool skip(message *m, int64_t n, int depth) {
    for (int64_t value; n > 0; n--) {
        enum form form = take_object(m, &value);
        if (!form || depth == MOST_DEPTH) return broken(m), false;
        if (form == TEXT) m->at += (size_t)value;
        if (form == ARRAY && !skip(m, value, depth + 1)) return false;
    }
    return true;
}

bool skip_objects(message *m, int64_t n) { return skip(m, n, 0); }

/* ---- the socket ------------------------------------------------------------------------------ */

typedef union {
    char bytes[CMSG_SPACE(MOST_FDS * sizeof(int))];
    struct cmsghdr first;
} side_data;

static bool is_shortage(int error) {
    return error == ENOMEM || error == ENOBUFS || error == ETOOMANYREFS;
}

static void rest(void) {
    struct timespec pause = {0, 10000000};
    nanosleep(&pause, NULL);
}

static int send_message(int socket, message *m, int flags) {
    if (m->is_broken) return fail(-ENOMEM, "no memory for a message");
    if (m->length > MOST_BYTES)
        return fail(-EMSGSIZE, "a message of %zu bytes; at most %d are allowed", m->length,
                    MOST_BYTES);
    side_data side = {{0}};
    struct iovec body = {m->bytes, m->length};
    struct msghdr whole = {.msg_iov = &body, .msg_iovlen = 1};
    if (m->n_fds) {
        size_t bytes = (size_t)m->n_fds * sizeof(int);
        whole.msg_control = &side, whole.msg_controllen = CMSG_SPACE(bytes);
        side.first.cmsg_level = SOL_SOCKET, side.first.cmsg_type = SCM_RIGHTS,
        side.first.cmsg_len = CMSG_LEN(bytes);
        memcpy(CMSG_DATA(&side.first), m->fds, bytes);
    }
    for (int tries = TRIES; sendmsg(socket, &whole, MSG_NOSIGNAL | flags) < 0;) {
        if (errno == EINTR) continue;
        if (errno == EBADF) return fail(-EBADMSG, "one of the descriptors to send is closed");
        if (!is_shortage(errno)) return fail(-EPIPE, "the connection is gone: %s", strerror(errno));
        if (!--tries) return fail_kernel("sending to the device");
        rest();
    }
    return 0;
}

int message_send(int socket, message *m) { return send_message(socket, m, 0); }
int message_offer(int socket, message *m) { return send_message(socket, m, MSG_DONTWAIT); }

static void take_fds(message *m, struct msghdr *whole) {
    for (struct cmsghdr *c = CMSG_FIRSTHDR(whole); c; c = CMSG_NXTHDR(whole, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        int n = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        /* The kernel gave no more than we have room for. */
        memcpy(m->fds + m->n_fds, CMSG_DATA(c), (size_t)n * sizeof(int));
        m->n_fds += n;
    }
}

static int await_readable(int socket, uint64_t deadline) {
    for (;;) {
        struct pollfd one = {socket, POLLIN, 0};
        uint64_t now = futex_now(), left = deadline > now ? deadline - now : 0;
        struct timespec limit = {(time_t)(left / 1000000000), (long)(left % 1000000000)};
        int n = ppoll(&one, 1, deadline == FMQ_FOREVER ? NULL : &limit, NULL);
        if (n > 0) return 0;
        if (!n) return fail(-ETIMEDOUT, "the device did not answer by the deadline");
        if (errno != EINTR) return fail_kernel("poll");
    }
}

int message_receive(int socket, message *m, uint64_t deadline) {
    message_reset(m);
    if (!make_room(m, MOST_BYTES)) return fail(-ENOMEM, "no memory for a message");
    for (int tries = TRIES;;) {
        int r = await_readable(socket, deadline);
        if (r) return r;
        side_data side;
        struct iovec body = {m->bytes, MOST_BYTES};
        struct msghdr whole = {
            .msg_iov = &body, .msg_iovlen = 1, .msg_control = &side, .msg_controllen = sizeof side};
        ssize_t n = recvmsg(socket, &whole, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        /* The device has closed it without reading all: what it sent before can still be read. */
        if (n < 0 && errno == ECONNRESET && --tries) continue;
        if (n < 0 && is_shortage(errno) && --tries) {
            rest();
            continue;
        }
        if (n >= 0) take_fds(m, &whole);
        /* A packet of no bytes may carry some, and is taken for the end. */
        if (n <= 0) message_close_fds(m);
        if (n <= 0) return fail(-EPIPE, "the device died, or ended the connection");
        m->length = (size_t)n;
        if (!(whole.msg_flags & (MSG_TRUNC | MSG_CTRUNC))) return 0;
        message_close_fds(m);
        return fail(-EBADMSG, "a message of the device exceeds %d bytes or %d descriptors",
                    MOST_BYTES, MOST_FDS);
    }
}
