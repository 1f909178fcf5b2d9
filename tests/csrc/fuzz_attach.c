/* Arbitrary bytes as a control page: what fmq_shape_of and fmq_open accept of it can be used by every call of every role.
 *
 * Input: SCRIPT bytes of calls, then the page as far as it goes; the rest of the page is zeros. Nothing changes it but us.
 */
#include "fuzz.h"

enum { SCRIPT = 32, LARGEST = 1 << 16 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < SCRIPT) return -1;
    size_t rest = size - SCRIPT;
    input.calls = data, input.calls_end = data + SCRIPT;
    make_page();
    memcpy(world.control, data + SCRIPT, rest < FMQ_PAGE ? rest : FMQ_PAGE);
    int r = fmq_shape_of(world.control, &world.shape);
    expect(r, 0, -1, open_errors);
    uint64_t bytes = r ? 0 : fmq_ring_bytes(world.shape.capacity, world.shape.element_bytes);
    if (!r && !bytes) fail("a shape without a ring", 0);
    if (!r && bytes <= LARGEST) run_script(); /* else the file would be too short for it, and the caller refuses it */
    drop_page();
    return 0;
}
