/* A peer that writes whatever the input says, between any two accesses of a call, to any word of the control page.
 *
 * Input: flavour, capacity, element size and how long the script of calls is, in three bytes, and then the scripts.
 */
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const uint32_t sizes[8] = {1, 3, 8, 13, 24, 64, 2, 5};
    if (size < 20) return -1;
    input.peer = input.peer_next = input.end = NULL;
    make_page();
    uint32_t flavour = data[0] & 64 ? FMQ_UNSYNCHRONIZED : FMQ_SYNCHRONIZED;
    world.shape = (fmq_shape){1 + data[0] % 8, 7, sizes[data[1] % 8], flavour};
    if (fmq_format(world.control, &world.shape)) fail("cannot format", 0);
    atomic_store(&world.control->writer_life.word, 42 | (uint32_t)FUTEX_WAITERS);
    atomic_store(&world.control->reader_life.word, 43 | (uint32_t)FUTEX_WAITERS);
    input.calls = data + 3, input.end = data + size;
    input.peer = input.peer_next = input.calls_end = input.calls + (size - 3) * data[2] / 256;
    input.storm = (data[0] & 128) && input.peer < input.end;
    run_script();
    drop_page();
    return 0;
}
