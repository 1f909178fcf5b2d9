"""A client that drops what it makes and collects no garbage: `python dropping.py DESCRIPTORS WAY=COUNT…`.

After each way it waits until both processes hold no more descriptors and mappings of shared memory than before.
"""

import asyncio
import gc
import os
import resource
import sys
from itertools import chain
from operator import gt

import numpy as np
from waiting import until

import driver
from burst import ErrorStatus, Memory, Request, RequestArgument

WARM = 40  # rounds before the first look: connections are made, caches are full


def add_model(shape=(1, 4)):
    builder = driver.ModelBuilder()
    x = builder.input("float32", shape)
    builder.output(builder.operation("ADD", x, np.ones(4, np.float32), 0))
    return builder.build()


def holds(pid):
    """Descriptors, and mappings of shared memory."""
    with open(f"/proc/{pid}/maps") as lines:
        shared = sum("/memfd:" in line or "/dev/shm" in line for line in lines)
    return len(os.listdir(f"/proc/{pid}/fd")), shared


def frame(n):
    """A request on a pool of its own, and where its result will be."""
    pool = Memory.create(4096)
    pool.asarray(np.float32, (1, 4))[:] = n
    place = RequestArgument(pool=0, length=16), RequestArgument(pool=0, offset=64, length=16)
    return Request(place[:1], place[1:], (pool,)), pool.asarray(np.float32, (1, 4), 64)


def frames(execute):
    """One round for each frame: a pool, a request on it, its result."""

    def round_(n):
        request, output = frame(n)
        result = execute(request)
        assert result.status is ErrorStatus.NONE, result
        assert output[0, 0] == n + 1

    return round_


def lengths(run):
    """One round for each length of an open input."""

    def round_(n):
        (found,) = run(np.zeros((n + 1, 4), np.float32))
        assert found.shape == (n + 1, 4)
        assert found[n, 3] == 1

    return round_


async def run_async(prepared, array):
    burst = prepared.burst(spin=0)
    results = await asyncio.gather(burst.run_async(array), burst.run_async(array))
    assert [result.outputs[0][0, 0] for result in results] == [array[0, 0] + 1] * 2


async def stream(prepared, array):
    found = [r.outputs[0][0, 0] async for r in prepared.burst(spin=0, depth=2).stream([array] * 3)]
    assert found == [array[0, 0] + 1] * 3


def with_result(prepared, array):
    """A burst that is dropped with a result on its memory."""
    assert prepared.burst(spin=0).submit(array).result().outputs[0][0, 0] == array[0, 0] + 1


def in_flight(prepared, array):
    """A burst that is dropped before its results come."""
    burst = prepared.burst(spin=0, depth=2)
    burst.submit(array), burst.submit(array)


BURSTS = {  # made and dropped
    "results": with_result,
    "in flight": in_flight,
    "run_async": lambda *arguments: asyncio.run(run_async(*arguments)),
    "stream": lambda *arguments: asyncio.run(stream(*arguments)),
}
EXECUTIONS = {
    "execute": lambda prepared: prepared.execute,
    "execute_async": lambda prepared: lambda request: prepared.execute_async(request).result(),
    "execute_fenced": lambda prepared: lambda request: prepared.execute_fenced(request).result(),
    "burst": lambda prepared: prepared.burst(spin=0).execute,
    "bursts": lambda prepared: lambda request: prepared.burst(spin=0).execute(request),
}


def of_prepared(way, device):
    """The round of a way through one device."""
    if way == "lengths":
        return lengths(device.prepare(add_model((0, 4))).run)
    if way == "models":
        return lambda n: lengths(device.prepare(add_model((0, 4))).run)(n % 7)
    prepared = device.prepare(add_model())
    if way == "buffers":
        return lambda _: device.allocate(driver.BufferDesc(), [prepared], [driver.BufferRole(0, 0)])
    if way in BURSTS:
        return lambda n: BURSTS[way](prepared, np.full((1, 4), n, np.float32))
    return frames(EXECUTIONS[way](prepared))


def of_compiled(way, devices):
    """The round of a way through a compiled model."""
    if way == "compiled lengths":
        return lengths(driver.compile(add_model((0, 4)), devices).run)
    if way == "compiled models":
        return lambda n: lengths(driver.compile(add_model((0, 4)), devices).run)(n % 7)
    compiled = driver.compile(add_model(), devices)
    return frames(compiled.execute if way == "compiled" else compiled.burst(spin=0).execute)


def check(device, way, count):
    """Goes a way so often, then drops that, too."""
    pids = os.getpid(), device.engine_pid
    round_ = of_compiled(way, ["reference"]) if way.startswith("compiled") else of_prepared(way, device)
    for n in range(WARM):
        round_(n)
    before = [holds(pid) for pid in pids]
    for n in range(count):
        round_(n)
    after = before

    def has_dropped():
        nonlocal after
        device.call("free")
        after = [holds(pid) for pid in pids]
        return not any(map(gt, chain(*after), chain(*before)))

    until(has_dropped, lambda: f"{way}: before {before}, after {after} (descriptors, mappings of client and engine)")


def main(most, *ways):
    gc.disable()
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(most), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    device = driver.connect("reference")
    for way, count in (word.split("=") for word in ways):
        check(device, way, int(count))


if __name__ == "__main__":
    main(*sys.argv[1:])
