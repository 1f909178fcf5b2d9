/* The shared control block of a queue: one page, then the ring.
 *
 * One writer per word, one 128-byte line per writer (two 64-byte lines: the adjacent-line
 * prefetcher pulls pairs). README.md has the map with its reasons; this file is the map with its
 * proof (the asserts).
 */
#ifndef FMQ_LAYOUT_H
#define FMQ_LAYOUT_H

#include <assert.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define FMQ_LINE 128
#define FMQ_PAGE 4096
#define FMQ_MAGIC UINT64_C(0x514d465453525542) /* the bytes "BURSTFMQ" */
#define FMQ_VERSION 2

/* A counter and the CPU that last moved it, written by one side only. cpu is 1 + its number, 0 =
 * never moved. */
typedef struct {
    alignas(FMQ_LINE) _Atomic uint64_t counter;
    /* Head only, not synchronized: what is or was being written ends here. */
    _Atomic uint64_t begin;
    _Atomic uint32_t cpu;
    /* A seat of a broadcast queue has these, too: */
    _Atomic uint32_t pid;   /* as its reader says */
    _Atomic uint32_t life;  /* states in README.md, "Life words" */
    _Atomic uint32_t state; /* 4 * turn + SEAT_…: which reader this is */
    /* The head of a broadcast queue has this, too: */
    /* Where every tail has to be before the writer, which sleeps, can go on; 0: wake it in any
     * case. */
    _Atomic uint64_t need;
} fmq_counter;

typedef struct {
    alignas(FMQ_LINE) _Atomic uint32_t word;
} fmq_word;

typedef struct {
    /* Written before the queue is published, never after; copied to private memory at attach. */
    alignas(FMQ_LINE) uint64_t magic;
    uint32_t version;
    uint32_t flavour;
    uint64_t capacity;
    uint64_t dtype_hash;
    uint32_t element_bytes;

    fmq_counter head;     /* writer */
    fmq_counter tail;     /* reader; unsynchronized: unused */
    fmq_word data_wait;   /* readers make it odd to sleep, the writer even to wake */
    fmq_word space_wait;  /* the writer makes it odd to sleep, the reader even to wake */
    fmq_word event;       /* the public event flag: bits here, sleepers in the next four bytes */
    fmq_word writer_life; /* states in README.md, "Life words" */
    fmq_word reader_life;
} fmq_control;

/* A broadcast queue: verdicts behind the dtype, and two pages of seats behind the control page. */
#define FMQ_SEATS 64
/* One u64 for each seat, by the writer: 256 * turn + why that reader is out; 0: none is. */
#define FMQ_VERDICTS_AT 3072
#define FMQ_SEATS_AT FMQ_PAGE
#define FMQ_BROADCAST_CONTROL (FMQ_SEATS_AT + FMQ_SEATS * FMQ_LINE)
enum { SEAT_FREE, SEAT_JOINING, SEAT_TAKEN };
enum { OUT_EVICTED = 1, OUT_DEAD = 2, OUT_CORRUPT = 3 };

static_assert(offsetof(fmq_control, head) == 128, "writer's line");
static_assert(offsetof(fmq_control, head.begin) == 136,
              "beside head, and published before anything is overwritten");
static_assert(offsetof(fmq_control, tail) == 256, "reader's line");
static_assert(offsetof(fmq_control, data_wait) == 384, "reader sleeps here");
static_assert(offsetof(fmq_control, space_wait) == 512, "writer sleeps here");
static_assert(offsetof(fmq_control, event) == 640, "public event flag");
static_assert(offsetof(fmq_control, writer_life) == 768, "writer's life word");
static_assert(offsetof(fmq_control, reader_life) == 896, "reader's life word");
static_assert(sizeof(fmq_control) <= FMQ_PAGE, "the control block is one page");
static_assert(sizeof(fmq_counter) == FMQ_LINE, "a seat is one line");
static_assert(offsetof(fmq_counter, life) % 8 == 0, "fmq_life_hold");
static_assert(FMQ_VERDICTS_AT + FMQ_SEATS * 8 <= FMQ_PAGE,
              "verdicts are behind the dtype and before the seats");
static_assert(FMQ_BROADCAST_CONTROL % FMQ_PAGE == 0, "whole pages");
static_assert(sizeof(_Atomic uint64_t) == 8 && sizeof(_Atomic uint32_t) == 4,
              "atomics have no hidden lock");

#endif
