/* The table of slots by itself: its last number, descriptors that came to stand for other files, and threads that use, drop and describe. */
#define _GNU_SOURCE
#include "burst/slots.c"

#include <stdio.h>
#include <sys/mman.h>

enum { THREADS = 3, ROUNDS = 3000 };

static void check(int is_so, const char *what) {
    if (is_so) return;
    fprintf(stderr, "slots: %s\n", what);
    abort();
}

static int new_memory(void) { return memfd_create("slots", MFD_CLOEXEC); }

static void last_number(void) {
    burst_slots *s = burst_slots_new();
    s->next = INT32_MAX;
    check(burst_slots_use(s, NULL, 0, "", 0) == INT32_MAX, "the last slot can be used");
    check(burst_slots_use(s, NULL, 0, "", 0) == -EOVERFLOW, "there is no slot after the last");
    check(!!strstr(last_failure(), "open another burst"), "the error says what to do");
    burst_slots_free(s);
}

static int describes(burst_slots *s, int64_t slot) {
    message m = {0};
    bool is_memory;
    int r = slots_describe(s, &slot, 1, &m, &is_memory);
    check(is_memory && m.n_fds >= !r, "a descriptor comes with a description");
    message_close_fds(&m);
    message_free(&m);
    return r;
}

static void other_files(void) {
    burst_slots *s = burst_slots_new();
    int fd = new_memory(), other = new_memory();
    int64_t slot = burst_slots_use(s, NULL, fd, "abc", 3);
    check(!describes(s, slot), "memory that is there is described");
    close(fd);
    check(describes(s, slot) == -ENOENT, "closed memory is not there");
    check(dup2(other, fd) == fd && describes(s, slot) == -ENOENT, "another file under that number is not sent");
    close(fd), close(other);
    check(burst_slots_drop(s, slot) == 1 && burst_slots_drop(s, slot) == 0, "a slot is dropped once");
    burst_slots_free(s);
}

static void owners(void) {
    burst_slots *s = burst_slots_new();
    int64_t first = burst_slots_use(s, s, 0, "", 0), again = burst_slots_use(s, s, 0, "", 0), other = burst_slots_use(s, &first, 0, "", 0);
    check(first == again && first != other, "an owner has one slot");
    check(!burst_slots_drop(s, first) && burst_slots_drop(s, first) && burst_slots_use(s, s, 0, "", 0) > other, "numbers are not used again");
    burst_slots_free(s);
}

static void *come_and_go(void *argument) {
    burst_slots *s = argument;
    int fd = new_memory();
    int64_t held[8] = {0};
    for (int i = 0; i < ROUNDS; i++) {
        int64_t *at = &held[i % 8];
        if (i >= 8) check(burst_slots_drop(s, *at) == 1, "what was used can be dropped");
        *at = burst_slots_use(s, NULL, fd, "abc", 3);
        check(!describes(s, *at) && describes(s, *at + 1000000) == -ENOENT, "each slot stands for its own memory");
    }
    close(fd);
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS];
    last_number(), other_files(), owners();
    burst_slots *s = burst_slots_new();
    for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, come_and_go, s);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    check(burst_slots_sent(s) == THREADS * ROUNDS, "all that was described is counted");
    check(s->count < 8 * THREADS * 4, "what was dropped takes no room");
    burst_slots_free(s);
    puts("slots: good");
}
