"""Clients that mean harm, against a device in another process: it goes on serving others, and keeps nothing of them."""

import os
import random
import threading
import time

import numpy as np
import pytest
import stress
from waiting import PATIENCE, until

import fmq
from burst import GeneralFailure, OutputShape, PeerDied, RequestArgument
from burst.datum import DATUM
from burst.wire import VERSIONS, RequestPacket, encode_request

SEED = 20260101
STRESS_SECONDS, SECONDS = stress.seconds(60), 0.4


@pytest.fixture(params=VERSIONS)
def wire(request):
    """Everything here holds in each wire version."""
    return request.param


def nothing(wire, number=1):
    """A request without arguments."""
    return encode_request(RequestPacket((), (), (), False, id=number if wire > 1 else 0), wire)


@pytest.fixture(params=[SECONDS, pytest.param(STRESS_SECONDS, marks=pytest.mark.stress)], ids=["short", "stress"])
def attempts(request):
    """attempts(): a source of randomness for each attempt, until the time is up; prints what it takes to repeat."""

    def generate():
        seed = SEED if request.param == SECONDS else int(time.time())
        end, count = time.monotonic() + request.param, 0
        while time.monotonic() < end:
            count += 1
            yield random.Random(f"{seed} {count}")
        print(f"{request.node.name}: seed {seed}, {count} attempts")

    return generate


def holds_no_more(process, before):
    """The mappings may be those of one burst more: the loop of contexts keeps the last one until its next event."""
    return all(now <= then + more for now, then, more in zip(process.holdings(), before, (0, 0, 4), strict=True))


@pytest.fixture
def victim(service, burst, memory):
    """A device in another process, and its Configure. At the end it serves others and holds what it held before."""
    process, configure = service()

    def check():
        client, pool = burst(configure), memory()
        for n in (4, 5):
            assert client.run(pool, n, timeout=PATIENCE).output_shapes == (OutputShape((n,)),)
        client.close()
        pool.close()

    check()
    process.holdings()
    check()
    before, resident = process.holdings(), process.status("VmRSS")
    yield process, configure
    check()
    until(lambda: holds_no_more(process, before))  # a thread that was joined is gone for the kernel a moment later
    assert process.status("VmRSS") - resident < 64 << 20


def random_packet(rng, good):
    """Elements of a good packet in disorder, with some damage and often with the size that fits."""
    elements = [good[n : n + DATUM] for n in range(0, len(good), DATUM)]
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(elements) + 1)
        elements[at : at + rng.randrange(2)] = [rng.choice([rng.choice(elements), rng.randbytes(DATUM)])]
    packet = bytearray(b"".join(elements))
    for _ in range(rng.randrange(3)):
        packet[rng.randrange(len(packet))] = rng.choice([0, 1, 2, 127, 255])
    if rng.random() < 0.8:
        packet[:8] = b"\0\0\0\0" + (len(packet) // DATUM).to_bytes(4, "little")
    return bytes(packet)


def random_answer(rng, pools):
    """Something to say instead of handing over memory: often nearly right."""

    def answer(client, slots):
        chosen = [rng.choice(pools) for _ in range(max(0, len(slots) + rng.choice([0, 0, 0, -1, 1])))]
        plain = [pool.to_wire() for pool in chosen]
        if plain and rng.random() < 0.3:
            plain[rng.randrange(len(plain))] = rng.choice(
                [None, ["ashmem", 0, True], ["ashmem", -1, True], ["ashmem", 2**63, True], ["ashmem", 4096, False], []]
            )
        body = rng.choice([[0, plain], [0, plain], [4, "no"], [0], [], [plain, 0], ["0", plain]])
        client.callback.send(body, [pool.fd for pool in chosen])

    return answer


def test_random_packets(victim, clients, memory, attempts, wire):
    """Each of many damaged packets gets a result, whatever the client says when it is asked for memory. In version 2 a
    good request that follows is answered with its own id.
    """
    pools, statuses, client = [memory(), memory(64)], set(), None
    one, other = RequestArgument(length=4, dimensions=(2, 2)), RequestArgument(pool=1, offset=4, length=4)
    good = encode_request(RequestPacket((one,), (other,), (0, 1), True, id=1 if wire > 1 else 0), wire)
    for n, rng in enumerate(attempts()):
        if n % 1000 == 0:
            if client:
                client.close()
            client = clients[2](victim[1], wire)
        client.answer = random_answer(rng, pools)
        results = client.outcome(random_packet(rng, good))
        assert results
        statuses.update(result.status for result in results)
    client.close()
    assert len(statuses) >= 3  # some were executed, some did not fit, some were malformed


def test_scribbling_over_the_control_page(victim, clients, attempts, wire):
    """A client may write anything into the queues' control pages at any time: at worst its own burst ends."""
    _, configure = victim
    packet = nothing(wire)
    for rng in attempts():
        client = clients[0](configure, wire, lengths=(16, 16))
        for _ in range(rng.randrange(1, 6)):
            page = client.control(rng.randrange(2))
            word = rng.choice([rng.randrange(512), rng.choice([128, 256, 384, 512, 640, 768, 896]) // 8])
            now = int(page[word])
            value = rng.choice([0, 1, now + 1, now - 1, now ^ 2**31, 2**32 - 1, 2**64 - 1, rng.getrandbits(64)])
            page[word] = value % 2**64
            try:
                client.exchange(packet, timeout=0.001)
            except (fmq.FmqError, BufferError):
                continue
        client.close()


def test_scribbling_over_requests_that_run(victim, raw, attempts, wire):
    """A client may change a request while the device reads it: the device looks at its own copy only, and answers."""
    _, configure = victim
    client = raw(configure, lengths=(16, 16))
    ring = client.queues[0].descriptor.region().asarray(np.uint8, 16 * DATUM, 4096)
    good = nothing(wire) * 3
    noise = np.frombuffer(random.Random(SEED).randbytes(len(ring)), np.uint8)
    over = threading.Event()

    def scribble():
        while not over.is_set():
            ring[:] = noise
            ring[:] = 0

    scribbler = threading.Thread(target=scribble)
    scribbler.start()
    try:
        for rng in attempts():
            answer = client.exchange(random_packet(rng, good)[: 16 * DATUM])
            assert answer
            assert len(answer) % ((1 + wire) * DATUM) == 0, "answers without shapes"
            assert wire > 1 or len(answer) == 2 * DATUM
            client.wait_taken()
    finally:
        over.set()
        scribbler.join()
    client.close()


def test_results_that_nobody_reads(victim, clients, attempts, wire):
    """Clients that send and never read, and go without a word, cost the device nothing."""
    _, configure = victim
    packet = nothing(wire)
    for rng in attempts():
        client = clients[0](configure, wire, lengths=(64, rng.randrange(2, 8)))
        for _ in range(rng.randrange(20)):
            try:
                client.send(packet)
            except fmq.FmqError:
                break
        client.close()


@pytest.mark.parametrize(
    ("dtype", "lengths", "why"),
    [
        ("V1", (1024, 1024), "24 bytes"),
        ("V48", (1024, 1024), "24 bytes"),
        ("u8", (1024, 1024), "24 bytes"),
        ("V24", (2**22, 16), "elements"),
        ("V24", (16, 2**22), "elements"),
    ],
)
def test_queues_of_a_strange_shape(victim, raw, dtype, lengths, why):
    """Queues that are not of packets' elements, or longer than any packet, are refused: a device does not allocate
    what a client fancies.
    """
    process, configure = victim
    with pytest.raises(GeneralFailure, match=why):
        raw(configure, dtype=dtype, lengths=lengths)
    assert process.status("VmHWM") < 1 << 30


def test_memory_that_shrinks(victim, burst, increment, memory):
    """Memory that its client truncates after handing it over does not take the device with it."""
    _, configure = victim
    pool, client = memory(), burst(configure)
    fd = os.memfd_create("shrinks")
    os.ftruncate(fd, 4096)
    client.answer = lambda self, slots: self._callback.send([0, [["ashmem", 4096, False]]], [fd])
    assert client.run(pool, timeout=PATIENCE).status == 0
    os.ftruncate(fd, 0)
    for _ in range(3):
        client.run(pool, timeout=PATIENCE)
    os.close(fd)
    client.close()


def test_callbacks_that_close_in_the_middle(victim, clients, memory, attempts, wire):
    """A client that hangs up, or leaves entirely, while the device waits for its memory costs the device nothing."""
    _, configure = victim
    pool = memory()

    def hang_up(client, slots):
        client._callback.shutdown()

    def leave(client, slots):
        client._callback.shutdown()
        client._context.close()
        client._writer.close()

    for rng in attempts():
        client = clients[1](configure, spin=0.0, versions=[wire])
        client.answer = rng.choice([hang_up, leave])
        try:
            client.run(pool, timeout=PATIENCE)
        except (GeneralFailure, PeerDied):
            assert client.answer is leave
        client.close()
