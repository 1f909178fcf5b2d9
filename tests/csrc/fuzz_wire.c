/* Any bytes as a packet, for libFuzzer (wire_check.h). The first byte says which kind and version it is,
 * and whether its size is mended, without which most are refused by their first check.
 */
#include "wire_check.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size) return -1;
    bool is_request = *data & 1;
    int version = *data & 2 ? 2 : 1;
    uint64_t bytes = size - 1;
    unsigned char *packet = malloc(bytes);
    if (bytes) memcpy(packet, data + 1, bytes);
    uint32_t elements = (uint32_t)(bytes / ELEMENT);
    if (*data & 4 && elements) memcpy(packet + (is_request ? 4 : 8), &elements, sizeof elements);
    check_packet(is_request, version, packet, bytes);
    free(packet);
    return 0;
}
