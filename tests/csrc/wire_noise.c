/* Packets of a peer that lies: good ones in a file, each after its length (u32), are damaged again and
 * again and decoded (wire_check.h).
 *
 *     wire_noise KIND VERSION ROUNDS SEED FILE     KIND: request or result
 *
 * It says how many were decoded, and how many of them accepted.
 */
#include "wire_check.h"

enum { MOST = 64 * ELEMENT, MOST_PACKETS = 64 };
static unsigned char packets[MOST_PACKETS][MOST];
static uint32_t sizes[MOST_PACKETS], count;
static uint64_t state;

static uint32_t draw(uint32_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % below;
}

static uint32_t damage(unsigned char *packet, uint32_t bytes, unsigned size_at) {
    static const unsigned char values[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 127, 128, 255};
    for (uint32_t n = draw(4); n; n--) {
        unsigned char *at = packet + draw(bytes);
        *at = draw(3) ? values[draw(sizeof values)] : (unsigned char)draw(256);
    }
    if (!draw(4)) bytes = draw(4) ? ELEMENT * (1 + draw(bytes / ELEMENT)) : 1 + draw(bytes);
    if (!draw(4)) packet[size_at] = (unsigned char)(bytes / ELEMENT); /* packetSize */
    return bytes;
}

int main(int argc, char **argv) {
    FILE *file = argc == 6 ? fopen(argv[5], "rb") : NULL;
    if (!file) return 2;
    bool is_request = !strcmp(argv[1], "request");
    int version = atoi(argv[2]);
    long rounds = atol(argv[3]), accepted = 0;
    state = strtoull(argv[4], NULL, 10);
    while (count < MOST_PACKETS && fread(&sizes[count], 4, 1, file) == 1) {
        if (!sizes[count] || sizes[count] > MOST) return 2;
        if (fread(packets[count], sizes[count], 1, file) != 1) return 2;
        count++;
    }
    if (!count) return 2;
    for (long i = 0; i < rounds; i++) {
        unsigned char packet[MOST];
        uint32_t which = draw(count);
        memcpy(packet, packets[which], sizes[which]);
        uint32_t bytes = damage(packet, sizes[which], is_request ? 4 : 8);
        accepted += check_packet(is_request, version, packet, bytes);
    }
    printf("%ld %ld\n", rounds, accepted);
    return 0;
}
