/* For client.c: messages of msgpack with file descriptors over a packet socket; docs/protocol.md, "Messages".
 *
 * Only the shapes that the client needs: arrays, integers, doubles, short texts, booleans and nil.
 */
#ifndef CLIENT_MESSAGES_H
#define CLIENT_MESSAGES_H

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static _Noreturn void __attribute__((format(printf, 1, 2))) die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("client: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    exit(1);
}

typedef struct {
    unsigned char bytes[65536];
    size_t length, at; /* how much there is; how much of it was read */
    int fds[64], n_fds;
} message;

static void put_big_endian(message *m, unsigned char head, uint64_t value, int bytes) {
    m->bytes[m->length++] = head;
    while (bytes--) m->bytes[m->length++] = (unsigned char)(value >> 8 * bytes);
}

/* A digit: an array of so many. i: an int; f: a double; s: a text of up to 31 bytes; b: a bool; n: nil. */
static void put(message *m, const char *format, ...) {
    va_list values;
    va_start(values, format);
    for (; *format; format++) {
        if (*format >= '0' && *format <= '9') put_big_endian(m, (unsigned char)(0x90 | (*format - '0')), 0, 0);
        if (*format == 'n') put_big_endian(m, 0xc0, 0, 0);
        if (*format == 'b') put_big_endian(m, va_arg(values, int) ? 0xc3 : 0xc2, 0, 0);
        if (*format == 'i') {
            int value = va_arg(values, int);
            if (value >= -32 && value < 128) put_big_endian(m, (unsigned char)value, 0, 0);
            else put_big_endian(m, 0xd2, (uint32_t)value, 4);
        }
        if (*format == 'f') {
            double value = va_arg(values, double);
            uint64_t bits;
            memcpy(&bits, &value, sizeof bits);
            put_big_endian(m, 0xcb, bits, 8);
        }
        if (*format == 's') {
            const char *text = va_arg(values, const char *);
            put_big_endian(m, (unsigned char)(0xa0 | strlen(text)), 0, 0);
            memcpy(m->bytes + m->length, text, strlen(text));
            m->length += strlen(text);
        }
    }
    va_end(values);
}

/* The next object: an array of *value, a text of *value bytes (its first at m->at), or the integer *value. */
static char take(message *m, int64_t *value) {
    if (m->at >= m->length) return 0;
    unsigned char head = m->bytes[m->at++];
    if (head < 0x80 || head >= 0xe0) return *value = (int8_t)head, 'i';
    if (head < 0xa0) return *value = head & 15, head < 0x90 ? 0 : 'a'; /* a map is nothing that we expect */
    char kind = head < 0xc0 || head == 0xd9 || head == 0xda ? 's' : head == 0xdc ? 'a' : 'i';
    int bytes = kind == 'a' ? 2 : head < 0xc0 ? 0 : kind == 's' ? head - 0xd8 : 1 << (head & 3);
    if ((kind == 'i' && (head < 0xcc || head > 0xd3)) || m->at + (size_t)bytes > m->length) return 0;
    uint64_t number = head < 0xc0 ? head & 31 : 0;
    if (head >= 0xd0 && kind == 'i' && m->bytes[m->at] & 0x80) number = UINT64_MAX;
    while (bytes--) number = number << 8 | m->bytes[m->at++];
    *value = (int64_t)number;
    return kind == 's' && number > m->length - m->at ? 0 : kind;
}

static int64_t take_the(char kind, message *m) {
    int64_t value;
    if (take(m, &value) != kind) die("the device's message is not what docs/protocol.md says, near byte %zu", m->at);
    return value;
}

static int send_message(int to, const message *m) {
    union {
        char bytes[CMSG_SPACE(sizeof m->fds)];
        struct cmsghdr first;
    } side = {0};
    struct iovec body = {(void *)(uintptr_t)m->bytes, m->length};
    struct msghdr whole = {.msg_iov = &body, .msg_iovlen = 1};
    if (m->n_fds) {
        size_t bytes = (size_t)m->n_fds * sizeof(int);
        whole.msg_control = &side, whole.msg_controllen = CMSG_SPACE(bytes);
        side.first.cmsg_level = SOL_SOCKET, side.first.cmsg_type = SCM_RIGHTS, side.first.cmsg_len = CMSG_LEN(bytes);
        memcpy(CMSG_DATA(&side.first), m->fds, bytes);
    }
    return sendmsg(to, &whole, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

/* Waits for a message. False: there is no connection any more. */
static int receive_message(int from, message *m) {
    union {
        char bytes[CMSG_SPACE(sizeof m->fds)];
        struct cmsghdr first;
    } side = {0};
    struct iovec body = {m->bytes, sizeof m->bytes};
    struct msghdr whole = {.msg_iov = &body, .msg_iovlen = 1, .msg_control = &side, .msg_controllen = sizeof side};
    ssize_t length = recvmsg(from, &whole, MSG_CMSG_CLOEXEC);
    m->length = length > 0 ? (size_t)length : 0, m->at = 0, m->n_fds = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&whole); c && length > 0; c = CMSG_NXTHDR(&whole, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        memcpy(m->fds, CMSG_DATA(c), c->cmsg_len - CMSG_LEN(0));
        m->n_fds = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    }
    return length > 0 && !(whole.msg_flags & (MSG_TRUNC | MSG_CTRUNC));
}

#endif
