/* Answers of a device that lies: packets in a file, each after its length (u32), are damaged again and again and
 * decoded. Both they and the room for their shapes are exactly as large as burst_decode was told, so that AddressSanitizer
 * sees any access beyond them; what is accepted keeps within its own counts.
 *
 *     wire_noise VERSION ROUNDS SEED FILE        says how many were decoded, and how many of them accepted
 */
#include <stdint.h>

#include "burst/api.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ELEMENT = 24, MOST = 64 * ELEMENT, MOST_PACKETS = 64 };
static unsigned char packets[MOST_PACKETS][MOST];
static uint32_t sizes[MOST_PACKETS], count;
static uint64_t state;

static uint32_t draw(uint32_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % below;
}

static void fail(const char *why) {
    fprintf(stderr, "wire_noise: %s\n", why);
    abort();
}

static uint32_t damage(unsigned char *packet, uint32_t bytes) {
    static const unsigned char values[] = {0, 1, 2, 3, 4, 127, 128, 255};
    for (uint32_t n = draw(4); n; n--) {
        unsigned char *at = packet + draw(bytes);
        *at = draw(3) ? values[draw(sizeof values)] : (unsigned char)draw(256);
    }
    if (!draw(4)) bytes = draw(4) ? ELEMENT * (1 + draw(bytes / ELEMENT)) : 1 + draw(bytes);
    if (!draw(4)) packet[8] = (unsigned char)(bytes / ELEMENT); /* packetSize */
    return bytes;
}

static int decode(const unsigned char *from, uint32_t bytes, int version) {
    uint32_t n = 2 * (bytes / ELEMENT), at = 0;
    unsigned char *packet = malloc(bytes);
    uint32_t *shapes = malloc(n * sizeof *shapes);
    burst_result_packet result;
    burst_complaint why = {.text = ""};
    memcpy(packet, from, bytes);
    int r = burst_decode(packet, bytes, version, &result, shapes, &why);
    if (r && r != -EBADMSG) fail("an error that is not documented");
    if (r && !*why.text) fail("no reason");
    for (uint32_t i = 0; !r && i < result.n_shapes; i++) {
        if (at + 2 > n || shapes[at] > 1 || shapes[at + 1] > n - at - 2) fail("shapes beyond their room");
        at += 2 + shapes[at + 1];
    }
    free(packet), free(shapes);
    return !r;
}

int main(int argc, char **argv) {
    FILE *file = argc == 5 ? fopen(argv[4], "rb") : NULL;
    if (!file) return 2;
    int version = atoi(argv[1]);
    long rounds = atol(argv[2]), accepted = 0;
    state = strtoull(argv[3], NULL, 10);
    while (count < MOST_PACKETS && fread(&sizes[count], 4, 1, file) == 1) {
        if (!sizes[count] || sizes[count] > MOST || fread(packets[count], sizes[count], 1, file) != 1) return 2;
        count++;
    }
    if (!count) return 2;
    for (long i = 0; i < rounds; i++) {
        unsigned char packet[MOST];
        uint32_t which = draw(count);
        memcpy(packet, packets[which], sizes[which]);
        accepted += decode(packet, damage(packet, sizes[which]), version);
    }
    printf("%ld %ld\n", rounds, accepted);
    return 0;
}
