"""The weak points of Android's bursts, one test for each: what could happen there cannot happen here.

Against a device in another process, where a process matters. Where another test shows it already, it is named, and
`test_what_is_shown_elsewhere` sees to it that it is there.
"""

import os
import re
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from held_processes import is_asleep, state, switches
from waiting import PATIENCE, last, until

import fmq
from burst import Accepted, Busy, ErrorStatus, GeneralFailure, NotSent, PeerDied, Request, RequestArgument, Timeout
from burst import server as burst_server
from burst.channel import Channel
from burst.datum import DATUM, DATUM_DTYPE
from burst.messages import NO_TIMING
from burst.wire import VERSIONS, RequestPacket, ResultPacket, encode_request, encode_result

NONE, GENERAL_FAILURE = ErrorStatus.NONE, ErrorStatus.GENERAL_FAILURE
HEAD, SPACE_WAIT = 128 // 8, 512 // 8  # 64-bit words of a control page
HERE = Path(__file__).parent


@pytest.fixture(params=VERSIONS)
def wire(request):
    """Everything here holds in each wire version, unless a test says otherwise."""
    return request.param


only_with_ids = pytest.mark.parametrize("wire", [2])


def maps_of(process, memory):
    """How often that process has mapped a memory."""
    inode = str(os.fstat(memory.fd).st_ino)
    with open(f"/proc/{process.pid}/maps") as lines:
        return sum(line.split()[4] == inode for line in lines)


def statuses(client, packet):
    return {result.status for result in client.outcome(packet)}


@pytest.fixture
def lent(service, lender, memory, increment):
    """A Lender on a device in another process, that process, a good packet and its pool."""
    process, configure = service()
    client, pool = lender(configure), memory()
    good = client.encode(increment.request(pool))
    return client, process, good, pool


def test_no_abort_by_one_byte(lent):
    """12. Every discriminator, in every element: an answer each, and the device lives."""
    client, process, good, _ = lent
    for at in range(0, len(good), DATUM):
        for kind in range(256):
            found = statuses(client, good[:at] + bytes([kind]) + good[at + 1 :])
            assert found
            assert kind == good[at] or NONE not in found
    assert os.path.exists(f"/proc/{process.pid}/fd/0")


COUNTS = (4, 8, 12, 16)  # of packetInformation: its size, inputs, outputs, pools
RANK = DATUM + 20


def test_counts_reserve_nothing(lent):
    """13. Counts of four thousand millions, and of all between: refused, and the device's memory does not grow."""
    client, process, good, _ = lent
    statuses(client, bytes(DATUM))
    before = process.status("VmHWM")
    for at in (*COUNTS[1:], RANK):
        for lie in (2**32 - 1, 2**31, 2**24, 10**6):
            found = statuses(client, good[:at] + struct.pack("<I", lie) + good[at + 4 :])
            assert found <= {GENERAL_FAILURE}
    assert process.status("VmHWM") - before < 4 << 20


def test_lying_counts_and_enums_read_nothing(lent):
    """14. Each count one off, each number that stands for a choice out of its range: refused. What a device says is
    checked alike, see test_hostile_devices.
    """
    client, _, good, _ = lent
    choices = {DATUM + 4: b"\x02", len(good) - (DATUM if client.version == 1 else 3 * DATUM) + 4: b"\x02"}
    for at in (*COUNTS, RANK):
        (count,) = struct.unpack_from("<I", good, at)
        for lie in {max(0, count - 1), count + 1} - {count}:
            assert NONE not in statuses(client, good[:at] + struct.pack("<I", lie) + good[at + 4 :])
    for at, value in choices.items():
        assert statuses(client, good[:at] + value + good[at + 1 :]) == {GENERAL_FAILURE}


def nothing(wire):
    """A request without arguments."""
    return encode_request(RequestPacket((), (), (), False, id=1 if wire > 1 else 0), wire)


class Stuck:
    """An execution that never ends."""

    native, is_static, shapes = None, True, ()

    def __init__(self, request):
        pass

    def run(self):
        threading.Event().wait()


@pytest.mark.parametrize("victim", ["device", "client"])
def test_no_rescue_writes_for_the_peer(service, raw, wire, victim):
    """15. With a queue full and a side that is killed or closed, nobody writes in the other's place to wake anybody,
    and nobody waits for ever: the kernel tells.
    """
    process, configure = service(Stuck)
    client = raw(configure, lengths=(16, 16))
    packet = np.frombuffer(nothing(wire), DATUM_DTYPE)
    client.writer.write(packet, 0)
    client.wait_taken()  # from here on the device is stuck
    while client.writer.try_write(packet):
        pass
    heads = [int(client.control(which)[HEAD]) for which in (0, 1)]
    if victim == "device":
        process.kill()
        with pytest.raises(fmq.PeerDied):
            client.writer.write(packet, 20)
        with pytest.raises(fmq.PeerDied):
            client.exchange()
        assert [int(client.control(which)[HEAD]) for which in (0, 1)] == heads
    else:
        client.close()


def test_a_client_that_never_reads_holds_nobody(service, host, burst, raw, memory, wire):
    """16. While a listener waits for room in one client's result queue, the bursts of others go on, and its own can be
    stopped at once.
    """
    _, configure = service()
    device = host()
    for where in (configure, device):
        deaf = raw(where, lengths=(64, 5))
        for _ in range(4 - wire):  # the last one's answer does not fit
            deaf.send(nothing(wire))
            deaf.wait_taken()
        until(lambda deaf=deaf: int(deaf.control(1)[SPACE_WAIT]) & 1)
        client, pool = burst(where), memory()
        for _ in range(50):
            assert client.run(pool, timeout=20).status is NONE
        assert int(deaf.control(1)[SPACE_WAIT]) & 1, "it still waits"
    device.servers[0].stop()
    device.servers[0].join()


@only_with_ids
def test_two_requests_at_once_get_two_answers(service, lender, memory, increment):
    """17a. Published in one piece, taken one by one, answered in order with their ids; also among broken ones."""
    client, pool = lender(service()[1]), memory()
    for k in range(1, 30):
        packets = [client.encode(increment.request(pool, 1 + n % 3)) for n in range(k)]
        packets.insert(k // 2, b"\xff" * 3 * DATUM)  # not even the beginning of a packet
        client.send(b"".join(packets[: k // 2]))
        client.wait_taken()
        client.send(packets[k // 2])
        client.wait_taken()
        client.send(b"".join(packets[k // 2 + 1 :]) or client.encode(increment.request(pool)))
        results = client.results(client.number)
        good = [result.id for result in results if result.status is NONE]
        assert good == list(range(good[0], client.number + 1))
        assert len(results) == len(good) + 1


@pytest.mark.parametrize("wire", [1])
def test_two_requests_at_once_are_refused_without_ids(service, burst, memory, increment):
    """17a. In version 1 they would be one packet, so the second one is not sent."""
    client, pool = burst(service()[1]), memory()
    packet = client.encode(increment.request(pool))
    client.start(packet)
    with pytest.raises(Busy, match="receive"):
        client.start(packet)
    assert client.receive(20).status is NONE


def test_a_late_answer_is_not_taken_for_another(service, burst, memory, increment):
    """17b. A caller who did not wait leaves an answer behind; the next one gets its own. See test_turns."""

    class Slow(increment):
        def run(self):
            if len(self.source) == 4:
                threading.Event().wait(0.02)
            super().run()

    client, pool = burst(service(Slow)[1]), memory()
    for _ in range(5):
        with pytest.raises(Timeout):
            client.run(pool, timeout=0)
        assert client.run(pool, 5, timeout=20).output_shapes[0].dimensions == (5,)


@only_with_ids
@pytest.mark.parametrize("number", [0, 2, 2**64 - 1])
def test_a_lost_answer_is_not_replaced_by_the_next(burst, memory, closing, number):
    """17c. A device that leaves an answer out, or sends one that nobody asked for, ends the burst."""

    def device(offer):
        with fmq.MessageQueue.open(offer.results) as queue:
            writers.append(queue.writer())
        closing(Channel.from_fd(os.dup(offer.context.fileno())))
        return Accepted(2, os.dup(page.fd))

    writers, page = [], fmq.LifePage()
    client = burst(device)
    result = encode_result(ResultPacket(NONE, (), NO_TIMING, number), 2)
    writers[0].write(np.frombuffer(result, DATUM_DTYPE))
    with pytest.raises(GeneralFailure, match="ended this burst"):
        client.run(memory())
    with pytest.raises(NotSent):
        client.run(memory())
    unasked = burst(device)
    writers[1].write(np.frombuffer(encode_result(ResultPacket(NONE, (), NO_TIMING, 1), 2), DATUM_DTYPE))
    with pytest.raises(GeneralFailure, match="ended this burst"):
        unasked.receive(20)
    for writer in writers:
        writer.close()


def test_a_slot_stands_for_one_memory_for_ever(service, burst, memory, increment):
    """18. Also when the device never hears that the first memory was freed, a new one is not taken for it."""
    process, configure = service()
    client, first, second = burst(configure), memory(), memory()
    client.run(first)
    old = client.encode(increment.request(first))
    client._slots.forget([client._slots.slot_of(first)])  # and the message to the device is lost
    first.asarray()[:], second.asarray(shape=4)[:] = 0, 9
    assert client.run(second).status is NONE
    assert list(second.asarray(shape=8)) == [9] * 4 + [10] * 4
    assert not first.asarray().any()
    assert client.asked == [[0], [1]]
    client.free_memory(second)
    until(lambda: not maps_of(process, second))
    third = memory()
    assert client.run(third).status is NONE
    assert client.asked[2:] == [[2]], "numbers are not used again"
    assert client.send(old).status is NONE, "what the device still has is what the old packet means"
    assert list(first.asarray(shape=8)) == [0] * 4 + [1] * 4


@pytest.mark.integration
def test_a_stuck_callback_holds_only_its_own_burst(monkeypatch, service, burst, memory, increment):
    """19. Others go on; its own ends within the bound, and nothing was executed without the memory."""
    monkeypatch.setattr(burst_server, "_CALLBACK_TIMEOUT", 1.0)
    _, configure = service()
    stuck, client, pool, late = burst(configure), burst(configure), memory(), memory()
    stuck.answer = lambda self, slots: None
    stuck.start(stuck.encode(increment.request(late)))
    assert stuck.answered.acquire(timeout=20)
    for _ in range(50):
        assert client.run(pool, timeout=20).status is NONE
    assert stuck.in_flight == 1
    with pytest.raises(GeneralFailure, match="ended this burst"):
        stuck.receive(20)
    assert list(late.asarray(shape=8)) == list(range(8))
    assert client.run(pool, timeout=20).status is NONE


def test_free_memory_does_not_wait_for_a_run(service, burst, memory, increment):
    """20. It returns during the execution, which ends on its memory; then that is unmapped. See also test_native."""

    class Gated(increment):
        def run(self):
            while not self.source[0]:
                threading.Event().wait(0.001)
            super().run()

    process, configure = service(Gated)
    client, pool = burst(configure), memory()
    pool.asarray()[0] = 0
    client.start(client.encode(increment.request(pool)))
    until(lambda: maps_of(process, pool))
    client.free_memory(pool)
    ones = memory()
    ones.asarray()[:] = 1  # another burst, whose gate is open
    assert burst(configure).run(ones, timeout=20).status is NONE
    assert maps_of(process, pool) == 1, "it still runs"
    pool.asarray()[0] = 7
    assert client.receive(20).status is NONE
    assert pool.asarray()[4] == 8
    until(lambda: not maps_of(process, pool))


def test_what_was_sent_and_what_was_not(service, burst, memory):
    """21. A request that may have run is told from one that did not: PeerDied, and then NotSent, which can be repeated
    elsewhere without doing anything twice.
    """
    process, configure = service(Stuck)
    client, pool = burst(configure), memory()
    client.start(client.encode(Request((), (), (pool,))))
    assert client.answered.acquire(timeout=20)
    process.kill()
    with pytest.raises(PeerDied):
        client.receive(20)
    assert client.in_flight == 1
    with pytest.raises(NotSent, match="died"):
        client.run(pool)
    assert client.in_flight == 1


@pytest.mark.parametrize("length", [11, 1024, 4096])
def test_size_and_version_are_negotiated(service, burst, memory, length, wire):
    """22. Channels are as long as their client wants them, a request may be longer than 1024 elements, and both sides
    speak what they agreed upon.
    """
    client, pool = burst(service()[1], length=length), memory()
    assert client.version == wire
    assert client.run(pool).status is NONE
    argument = RequestArgument(length=1)
    packet = client.encode(Request((argument,) * 2000, (argument,), (pool,)))
    assert packet.nbytes > 1024 * DATUM
    if length < 4096:
        with pytest.raises(NotSent, match="does not fit"):
            client.send(packet)
    else:
        assert client.send(packet, timeout=20).status is GENERAL_FAILURE, "it came, and is no request for an increment"
    assert client.run(pool, timeout=20).status is NONE


def test_a_version_that_nobody_agreed_upon(burst):
    """22. What a device chose is checked against what was offered."""
    page = fmq.LifePage()
    for answer in (0, 3, None):
        with pytest.raises(GeneralFailure, match=f"version {answer}"):
            burst(lambda _, answer=answer: Accepted(answer, os.dup(page.fd)))


@pytest.mark.integration
@pytest.mark.parametrize("spin", [0.0, 50e-6, "adaptive"])
def test_polling_is_a_choice_and_idling_is_free(service, burst, memory, spin):
    """23. Each burst has its own window, or learns one; one that has nothing to do uses no CPU on either side."""
    process, configure = service(spin=spin)
    client, pool = burst(configure, spin=spin), memory()
    for _ in range(100):
        assert client.run(pool, timeout=20).status is NONE

    def receive():
        with pytest.raises(PeerDied):
            client.receive(PATIENCE)  # a result that is not to come

    waiting = threading.Thread(target=receive)
    waiting.start()
    until(lambda: state(os.getpid(), waiting.native_id) == "S" and is_asleep(process.pid))
    before = switches(os.getpid(), waiting.native_id), switches(process.pid)
    last(0.3)
    assert (switches(os.getpid(), waiting.native_id), switches(process.pid)) == before
    process.kill()
    waiting.join(PATIENCE)


def test_a_caller_knows_which_path_ran(service, burst, memory):
    """24. A request went through the burst, or NotSent says why not, so that whoever takes the plain path instead can
    count it: Session.stats, see tests/driver.
    """
    process, configure = service()
    client, pool = burst(configure), memory()
    for _ in range(3):
        client.run(pool)
    client.close()
    with pytest.raises((NotSent, GeneralFailure)):
        client.run(pool)
    assert client.trace.page.client.requests == 3
    assert client.trace.page.device.answered == 3
    assert client.trace.page.device.pid == process.pid


ELSEWHERE = {
    "test_hostile_devices.py": ["test_a_device_that_answers_nonsense"],
    "test_endings.py": ["test_a_device_is_killed_during_an_execution"],
    "test_turns.py": ["test_busy", "test_a_late_result_is_dropped"],
    "test_memory.py": ["test_slots_are_never_used_again", "test_memory_freed_during_an_execution"],
    "test_native.py": ["test_memory_freed_while_it_runs", "test_stop_while_it_runs", "test_a_deadline_that_has_passed"],
    "../driver/client/test_run.py": ["test_stats"],
}


@pytest.mark.parametrize("file", ELSEWHERE)
def test_what_is_shown_elsewhere(file):
    """The tests that this file points to exist."""
    text = (HERE / file).read_text()
    assert [name for name in ELSEWHERE[file] if not re.search(rf"^ *def {name}\(", text, re.MULTILINE)] == []
