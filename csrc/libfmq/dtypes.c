/* A queue names the type of its elements twice: in words, and by their BLAKE2b digest of eight
 * bytes (RFC 7693, without a key). From C these are the types that have a short name; Python has
 * records, too. */
#define _GNU_SOURCE
#include "libfmq/dtypes.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool is_number(char kind, unsigned long size) {
    switch (kind) {
    case 'b': return size == 1;
    case 'i':
    case 'u': return size == 1 || size == 2 || size == 4 || size == 8;
    case 'f': return size == 2 || size == 4 || size == 8;
    case 'c': return size == 8 || size == 16;
    default: return false;
    }
}

/* The name is numpy's own for the type: "|" is of types without a byte order. */
int64_t dtype_size(const char *dtype) {
    if (strlen(dtype) < 3 || dtype[2] < '1' || dtype[2] > '9') return -EINVAL;
    char *end;
    unsigned long size = strtoul(dtype + 2, &end, 10);
    if (*end || size > INT32_MAX || end > dtype + 12) return -EINVAL;
    bool is_plain = dtype[1] == 'V' || dtype[1] == 'S', has_order = !is_plain && size > 1;
    if (!is_plain && !is_number(dtype[1], size)) return -EINVAL;
    if (has_order ? dtype[0] != '<' && dtype[0] != '>' : dtype[0] != '|') return -EINVAL;
    return (int64_t)size;
}

int dtype_text(const char *dtype, uint32_t element_bytes, char text[DTYPE_ROOM]) {
    char plain[16];
    snprintf(plain, sizeof plain, "|V%u", element_bytes);
    if (!dtype) dtype = plain;
    if (dtype_size(dtype) != (int64_t)element_bytes) return -EINVAL;
    return snprintf(text, DTYPE_ROOM, "'%s'", dtype);
}

static const uint64_t START[8] = {UINT64_C(0x6a09e667f3bcc908), UINT64_C(0xbb67ae8584caa73b),
                                  UINT64_C(0x3c6ef372fe94f82b), UINT64_C(0xa54ff53a5f1d36f1),
                                  UINT64_C(0x510e527fade682d1), UINT64_C(0x9b05688c2b3e6c1f),
                                  UINT64_C(0x1f83d9abfb41bd6b), UINT64_C(0x5be0cd19137e2179)};
static const unsigned char ORDER[10][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                            {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
                                            {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
                                            {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
                                            {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
                                            {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
                                            {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
                                            {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
                                            {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
                                            {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

static uint64_t turned(uint64_t x, unsigned n) { return x >> n | x << (64 - n); }

static void mix(uint64_t *a, uint64_t *b, uint64_t *c, uint64_t *d, uint64_t x, uint64_t y) {
    *a += *b + x, *d = turned(*d ^ *a, 32), *c += *d, *b = turned(*b ^ *c, 24);
    *a += *b + y, *d = turned(*d ^ *a, 16), *c += *d, *b = turned(*b ^ *c, 63);
}

uint64_t dtype_hash(const char *text, size_t n) {
    uint64_t words[16] = {0}, v[16];
    const uint64_t first = START[0] ^ 0x01010000 ^ 8; /* one block, a digest of eight bytes */
    memcpy(words, text, n);
    memcpy(v, START, sizeof START);
    memcpy(v + 8, START, sizeof START);
    v[0] = first, v[12] ^= n, v[14] = ~v[14];
    for (unsigned round = 0; round < 12; round++) {
        const unsigned char *s = ORDER[round % 10];
        for (unsigned i = 0; i < 4; i++)
            mix(&v[i], &v[4 + i], &v[8 + i], &v[12 + i], words[s[2 * i]], words[s[2 * i + 1]]);
        for (unsigned i = 0; i < 4; i++)
            mix(&v[i], &v[4 + (i + 1) % 4], &v[8 + (i + 2) % 4], &v[12 + (i + 3) % 4],
                words[s[8 + 2 * i]], words[s[9 + 2 * i]]);
    }
    return first ^ v[0] ^ v[8];
}
