/* Packets in and out of a ring. */
#include "burst/packet.h"

#include "burst/api.h"
#include "fmq/sleep.h"

int burst_fits(const void *process) {
    const struct fmq_process *p = process;
    return p->version == FMQ_PROCESS_VERSION && p->end_bytes == sizeof(struct fmq_end) ? 0
                                                                                       : -EPROTO;
}

int64_t packet_take(struct fmq_end *e, unsigned char *buffer, uint64_t buffer_bytes,
                    unsigned size_at) {
    uint64_t n = ring_known(e);
    if (size_at) {
        unsigned char first[DATUM];
        ring_copy_out(e, first, 1);
        uint32_t announced = load_u32(first) == PACKET_INFORMATION ? load_u32(first + size_at) : 0;
        /* A lie makes a packet that is refused, and what follows too. */
        if (announced && announced < n) n = announced;
    }
    if (n > buffer_bytes / DATUM) return -EMSGSIZE;
    ring_copy_out(e, buffer, n);
    ring_publish(e, n);
    sleep_wake_peer(e);
    return (int64_t)(n * DATUM);
}

int packet_put(struct fmq_end *e, const unsigned char *packet, uint64_t bytes) {
    int r = ring_need(e, bytes / DATUM);
    if (r) return r;
    ring_copy_in(e, packet, bytes / DATUM);
    ring_publish(e, bytes / DATUM);
    sleep_wake_peer(e);
    return 0;
}
