"""Memory over a burst: asked for once, kept while it is needed, let go when it is freed, and never mistaken."""

import contextlib
import gc
import os
import threading

import pytest
from waiting import until

from burst import ErrorStatus, GeneralFailure, NotSent, PeerDied, Request, RequestArgument
from burst import server as burst_server
from burst.channel import MAX_FDS
from burst.dropped import DropList
from burst.slots import MappingCache, SlotTable
from burst.wire import VERSIONS, RequestPacket, encode_request

NONE, GENERAL_FAILURE, INVALID_ARGUMENT = (
    ErrorStatus.NONE,
    ErrorStatus.GENERAL_FAILURE,
    ErrorStatus.INVALID_ARGUMENT,
)


@pytest.fixture(params=VERSIONS)
def wire(request):
    """Everything here holds in each wire version."""
    return request.param


def argument(pool=0, offset=0, length=4):
    return RequestArgument(pool=pool, offset=offset, length=length)


def fds():
    return len(os.listdir("/proc/self/fd"))


def test_memory_is_asked_for_once(host, burst, memory, mappings):
    """The first request makes the device ask for its memory; later ones, and other requests on it, do not."""
    client, pool = burst(host()), memory()
    for n in (4, 4, 5, 4):
        assert client.run(pool, n).status is NONE
        assert list(pool.asarray(shape=2 * n)) == [*range(n), *range(1, n + 1)]
        pool.asarray(shape=10)[:] = range(10)
    assert client.asked == [[0]]
    assert client.answered.acquire(timeout=20)
    assert client.memories_sent == 1
    assert mappings(pool) == 2  # ours and the device's


def test_two_pools_in_one_question(host, burst, memory):
    """All pools that the device does not know come with one question; those it knows are not asked for again."""
    client, pools = burst(host()), [memory() for _ in range(3)]
    client.run(pools[1])
    request = Request((argument(2),), (argument(0),), tuple(pools))
    assert client.send(client.encode(request)).status is NONE
    assert list(pools[0].asarray(shape=5)) == [1, 2, 3, 4, 4]
    assert client.asked == [[0], [1, 2]]


def test_slots_are_asked_for_without_repetition(host, burst, memory):
    """A slot that a request names twice is asked for once."""
    client, pool = burst(host()), memory()
    request = Request((argument(1),), (argument(2, offset=4),), (pool, pool, pool))
    assert client.send(client.encode(request)).status is NONE
    assert client.asked == [[0]]


def test_more_pools_than_descriptors_in_a_message(host, burst, memory):
    """More new pools than a message carries descriptors are asked for in several messages."""
    client, pools = burst(host()), [memory() for _ in range(2 * MAX_FDS + 1)]
    request = Request((argument(),), (argument(offset=4),), tuple(pools))
    assert client.send(client.encode(request)).status is NONE
    slots = list(range(2 * MAX_FDS + 1))
    assert client.asked == [slots[:MAX_FDS], slots[MAX_FDS : 2 * MAX_FDS], slots[2 * MAX_FDS :]]


def test_many_pools_are_handed_over_all_or_none(host, burst, memory, mappings):
    """When one pool of the last message is closed, the device keeps none of the others."""
    client, pools = burst(host()), [memory() for _ in range(MAX_FDS + 1)]
    pools[-1].close()
    request = Request((argument(),), (argument(offset=4),), tuple(pools))
    assert client.send(client.encode(request)).status is INVALID_ARGUMENT
    assert len(client.asked) == 2
    assert {mappings(pool) for pool in pools[:-1]} == {1}
    assert client.run(pools[0]).status is NONE


def test_one_unknown_slot_spoils_the_request(host, burst, memory, mappings, wire):
    """A packet that names one slot the client does not know is INVALID_ARGUMENT, nothing of it is kept, and the next
    good request works.
    """
    client, pool = burst(host()), memory()
    good = client.encode(Request((argument(),), (argument(offset=4),), (pool,)))
    packet = encode_request(RequestPacket((argument(),), (argument(offset=4),), (0, 2**31 - 1), False), wire)
    assert client.send_raw(packet) == (INVALID_ARGUMENT, (), (None, None), 0)
    assert mappings(pool) == 1
    assert client.send(good).status is NONE
    assert client.asked == [[0, 2**31 - 1], [0]]


def test_memory_that_its_owner_closed(host, burst, memory):
    """A pool that was closed before it was handed over is an INVALID_ARGUMENT of that request alone."""
    client, pools = burst(host()), [memory(), memory()]
    pools[0].close()
    assert client.run(pools[0]).status is INVALID_ARGUMENT
    assert client.run(pools[1]).status is NONE


def no_memory(client, slots, pools):
    client._callback.send([0, []])


def too_few(client, slots, pools):
    client._callback.send([0, [pools[0].to_wire()]], [pools[0].fd])


def too_many(client, slots, pools):
    client._callback.send([0, [p.to_wire() for p in pools]], [p.fd for p in pools])


def without_descriptors(client, slots, pools):
    client._callback.send([0, [p.to_wire() for p in pools[:2]]])


def garbage(client, slots, pools):
    client._callback.socket.send(b"\xc1 what is this")


def strange_words(client, slots, pools):
    client._callback.send([0, ["large", None]], [p.fd for p in pools[:2]])


def a_map(client, slots, pools):
    client._callback.send_raw(b"\x81\xa1a\xa1b", [p.fd for p in pools[:2]])


def too_small(client, slots, pools):
    client._callback.send([0, [pools[0].to_wire(), ["ashmem", 2**40, True]]], [p.fd for p in pools[:2]])


def negative(client, slots, pools):
    client._callback.send([0, [["ashmem", -1, True], pools[1].to_wire()]], [p.fd for p in pools[:2]])


def unsealed(client, slots, pools):
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    client._callback.send([0, [pools[0].to_wire(), ["ashmem", 4096, True]]], [pools[0].fd, fd])
    os.close(fd)


def a_socket(client, slots, pools):
    client._callback.send([0, [[1, False], [1, False]]], [client._callback.fileno()] * 2)


def no_slot(client, slots, pools):
    client._callback.send([int(INVALID_ARGUMENT), "no"])


HOSTILE = [no_memory, too_few, too_many, without_descriptors, garbage, strange_words, a_map, too_small, negative]
HOSTILE += [unsealed, a_socket, no_slot]


@pytest.mark.parametrize("answer", HOSTILE)
def test_a_callback_that_lies(host, burst, memory, mappings, answer):
    """Whatever a client answers in the place of its memory, the request fails, nothing of the answer is kept, no
    descriptor leaks, and the burst goes on.
    """
    gc.collect()  # of tests before this one
    client, pools = burst(host()), [memory() for _ in range(3)]
    known = memory()  # as long as the test: no device lets go of a memory meanwhile
    assert client.run(known).status is NONE
    assert client.answered.acquire(timeout=20)
    before = min(fds() for _ in range(50))  # the thread that answered closes its copies just after
    client.answer = lambda self, slots: answer(self, slots, pools)
    packet = client.encode(Request((argument(),), (argument(1),), tuple(pools[:2])))
    result = client.send(packet)
    assert result == (INVALID_ARGUMENT if answer is no_slot else GENERAL_FAILURE, (), (None, None), 0)
    assert [mappings(pool) for pool in pools] == [1, 1, 1]
    for _ in client.asked[1:]:
        assert client.answered.acquire(timeout=20)
    assert fds() <= before  # less: what a test before has left was closed meanwhile
    client.answer = None
    assert client.send(packet).status is NONE


def test_a_callback_that_hangs_up(host, burst, memory):
    """A client that closes its callback cannot hand over memory any more; what the device knows goes on working."""
    client, pools = burst(host()), [memory(), memory()]
    client.run(pools[0])
    client.answer = lambda self, slots: self._callback.shutdown()
    assert client.run(pools[1]).status is GENERAL_FAILURE
    assert client.run(pools[0]).status is NONE
    assert client.run(pools[1]).status is GENERAL_FAILURE


def test_a_callback_that_never_answers(monkeypatch, host, burst, memory):
    """A client that does not hand over its memory in time loses its burst: an answer that comes late would be taken
    for the answer to the next question, and that request would run on the wrong memory.
    """
    monkeypatch.setattr(burst_server, "_CALLBACK_TIMEOUT", 0.05)
    device = host()
    client, late, pool = burst(device), memory(), memory()
    client.answer = lambda self, slots: None
    with pytest.raises(GeneralFailure, match="ended this burst"):
        client.run(late)
    with contextlib.suppress(PeerDied):
        client._callback.send([0, [late.to_wire()]], [late.fd])
    device.wait_ended()
    with pytest.raises(NotSent):
        client.run(pool)
    assert list(late.asarray(shape=8)) == list(range(8))


def test_freed_memory_is_unmapped_when_idle(host, burst, memory, mappings):
    """free_memory unmaps the pool on the device, and a request on it after that has a new slot and is asked for."""
    device = host()
    client, pool = burst(device), memory()
    for slot in range(3):
        for _ in range(slot + 1):
            assert client.run(pool).status is NONE
        assert client.asked[slot:] == [[slot]]
        assert mappings(pool) == 2
        client.free_memory(pool)
        device.wait_freed()
        assert mappings(pool) == 1


def test_memory_freed_during_an_execution(host, burst, memory, mappings, gate, gated):
    """free_memory during an execution returns at once; the execution finishes on its memory, which then goes: before
    the next request is served.
    """

    device = host(gated)
    client, pool = burst(device), memory()
    results = []
    runner = threading.Thread(target=lambda: results.append(client.run(pool)))
    runner.start()
    assert gate.entered.acquire(timeout=20)
    client.free_memory(pool)
    device.wait_freed()
    assert mappings(pool) == 2
    gate.open.release()
    runner.join()
    assert results[0].status is NONE
    assert list(pool.asarray(shape=8)) == [0, 1, 2, 3, 1, 2, 3, 4]
    gate.open.release()
    assert client.run(memory()).status is NONE
    assert mappings(pool) == 1


def test_views_outlive_freed_memory(host, burst, memory, increment, mappings):
    """An array that a device keeps on freed memory stays good: its mapping goes with it and not before."""
    kept = []

    class Keeping(increment):
        def __init__(self, request):
            super().__init__(request)
            kept.append(self.target)

    device = host(Keeping)
    client, pool = burst(device), memory()
    client.run(pool)
    client.free_memory(pool)
    device.wait_freed()
    assert mappings(pool) == 2
    assert list(kept[0]) == [1, 2, 3, 4]
    kept.clear()
    assert mappings(pool) == 1


def test_what_is_unknown_or_freed_already_can_be_freed(host, burst, raw, memory):
    """Freeing memory that a burst never saw, or twice, or a slot number out of the blue, is harmless."""
    device = host()
    client, pool = burst(device), memory()
    client.run(pool)
    client.free_memory(memory())
    client.free_memory(pool)
    client.free_memory(pool)
    for slot in (0, 0, -1, 2**31, 2**63):
        client._context.send(["free_memory", slot])
    for _ in range(6):
        device.wait_freed()
    assert client.run(pool).status is NONE


def test_a_freed_slot_cannot_be_used(host, burst, memory):
    """A packet that still names a freed slot is refused: INVALID_ARGUMENT, and the client is asked in vain."""
    device = host()
    client, pool = burst(device), memory()
    packet = client.encode(Request((argument(),), (argument(offset=4),), (pool,)))
    assert client.send(packet).status is NONE
    client.free_memory(pool)
    device.wait_freed()
    for _ in range(2):
        assert client.send(packet) == (INVALID_ARGUMENT, (), (None, None), 0)
    assert client.asked == [[0], [0], [0]]


class Pool:
    """What a table of slots may refer to weakly."""

    fd, is_closed = 0, False

    def to_wire(self):
        return ["ashmem", 1, True]


class Ends:
    """A table of slots, and the slots of which a device was told."""

    def __init__(self):
        self.told = []
        self.dropped = DropList(self.tell)
        self.table = SlotTable(self.dropped)

    def tell(self, slots):
        self.table.forget(slots)
        self.told += slots


def test_slots_are_never_used_again():
    """20 000 memories that come and go get 20 000 numbers, and the device is told of each once."""
    ends = Ends()
    for n in range(20_000):
        pool = Pool()
        assert ends.table.slot_of(pool) == ends.table.slot_of(pool) == n
        if n % 2:
            ends.table.free_memory(pool)
            ends.table.free_memory(pool)
    del pool
    ends.dropped.tell_now()
    until(lambda: len(ends.told) >= 20_000)  # the thread that tells may be doing so
    assert sorted(ends.told) == list(range(20_000))
    assert not ends.table._slots
    assert not ends.table._memories


def test_the_mapping_cache_is_all_or_nothing():
    """An answer of the wrong length is refused and leaves nothing in the cache."""
    cache = MappingCache()
    with pytest.raises(ValueError, match="zip"):
        cache.resolve([1, 2], lambda slots: ["one"])
    assert cache._memories == {}
