"""Memory that comes and goes through one burst leaves nothing behind, on either side."""

import gc
import os
import time
from operator import gt

import pytest
import stress
from waiting import until

from burst import ErrorStatus, Memory
from burst.wire import VERSIONS

pytestmark = pytest.mark.integration


@pytest.fixture(params=VERSIONS)
def wire(request):
    """Everything here holds in each wire version."""
    return request.param


def resources(pid):
    """Descriptors, threads and mappings of shared memory of a process; and its resident bytes."""
    with open(f"/proc/{pid}/maps") as lines:
        shared = sum("/memfd:" in line for line in lines)
    with open(f"/proc/{pid}/statm") as line:
        resident = int(line.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    return (len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")), shared), resident


def settled(client, pool, pid, before):
    """What a process holds when the device has heard of what was freed: no more than before, or what is too much."""

    def is_settled():
        assert client.run(pool).status is ErrorStatus.NONE
        now = resources(pid)
        return now if not any(map(gt, now[0], before[0])) else None

    return until(is_settled, lambda: f"before {before}, now {resources(pid)}")


def come_and_go(client, increment, cycles, every):
    """Allocates, encodes and frees; one in `every` is also executed."""
    for n in range(cycles):
        pool = Memory.create(4096)
        packet = client.encode(increment.request(pool))
        if n % every == 0:
            assert client.send(packet).status is ErrorStatus.NONE
        client.free_memory(pool)
        pool.close()


@pytest.mark.parametrize(
    ("cycles", "every"),
    [(5000, 4), pytest.param(stress.times(1_000_000), 20, marks=pytest.mark.stress)],
    ids=["short", "stress"],
)
def test_allocate_encode_free(service, burst, memory, increment, cycles, every, tally):
    """Thousands of memories later both processes have the descriptors, threads and mappings that they had, not more
    than 16 MiB on top of what they took before, and the client's table of slots has the one memory that is in use.
    """
    process, configure = service()
    client, kept = burst(configure), memory()
    client.run(kept)
    pids = process.pid, os.getpid()
    before = [resources(pid) for pid in pids]
    come_and_go(client, increment, 1000, every)
    gc.collect()
    client.asked.clear()
    before = [settled(client, kept, pid, then) for pid, then in zip(pids, before, strict=True)]
    begin = time.monotonic()
    come_and_go(client, increment, cycles, every)
    took = time.monotonic() - begin
    tally("cycles of memory", cycles)
    client.asked.clear()
    for pid, then in zip(pids, before, strict=True):
        counts, resident = settled(client, kept, pid, then)
        assert not any(map(gt, counts, then[0]))
        assert resident - then[1] < 16 << 20
        print(f"{cycles} cycles in {took:.0f} s: {resident - then[1]} bytes more in {pid}")
    assert [name() for name in client._slots._slots] == [kept]
    assert [name() for name in client._slots._memories.values()] == [kept]


def test_what_a_device_remembers(host, burst, memory, increment):
    """A device that was given 2000 memories one after the other, each freed, remembers no mapping, no plan and nothing
    that is still to be freed.
    """
    device = host()
    client, kept = burst(device), memory()
    come_and_go(client, increment, 2000, 1)
    for _ in range(2000):
        device.wait_freed()
    for _ in range(2):
        assert client.run(kept).status is ErrorStatus.NONE
    server = device.server
    assert list(server._executor._mappings._memories) == [2000]
    assert [plan.slots for plan in server._plans if plan] == [{2000}]
    assert (server._executor._freed, server._stale) == ([], {})
