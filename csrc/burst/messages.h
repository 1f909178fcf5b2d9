/* Messages of msgpack with descriptors over a packet socket: docs/protocol.md, section 2. Not
 * exported. */
#ifndef BURST_MESSAGES_H
#define BURST_MESSAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MOST_BYTES = 65536, MOST_FDS = 72 };

/* What is written grows as it has to; what is read is bounded by `length`. After a failure
 * (`is_broken`) the rest does nothing. */
typedef struct {
    unsigned char *bytes;
    size_t length, room, at; /* at: how much of it was read */
    int fds[MOST_FDS], n_fds;
    bool is_broken;
} message;

void message_reset(message *m); /* its memory stays; received descriptors are closed before */
void message_close_fds(message *m);
void message_free(message *m);

void put_array(message *m, uint32_t n);
void put_int(message *m, int64_t value);
void put_uint(message *m, uint64_t value);
void put_double(message *m, double value);
void put_bool(message *m, bool value);
void put_nil(message *m);
void put_text(message *m, const char *text);
void put_bytes(message *m, const void *bytes, size_t n); /* as they are */

/* The next object, in the shortest form or not; of what is longer than the message nothing is
 * believed. */
enum form { BROKEN = 0, INTEGER, TEXT, ARRAY, OTHER };
/* Integer; bytes of a text, whose first is then at `at`; elements of an array. */
enum form take_object(message *m, int64_t *value);
bool take_as(message *m, enum form form, int64_t *value);
/* Cut to what fits, and without what cannot be printed. */
bool take_text(message *m, char *to, size_t room);
bool skip_objects(message *m, int64_t n);

int message_send(int socket, message *m);  /* its descriptors stay open */
int message_offer(int socket, message *m); /* the same; -EPIPE if the peer leaves no room for it */
int message_receive(int socket, message *m, uint64_t deadline); /* -EPIPE at the end */

#endif
