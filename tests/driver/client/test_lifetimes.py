"""What an application drops is free on both sides, without `close` and without the garbage collector."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import stress

import driver
from burst import ErrorStatus, Memory, Request, RequestArgument

pytestmark = pytest.mark.integration

PROGRAM = Path(__file__).with_name("dropping.py")
FRAMES = ("execute", "execute_async", "execute_fenced", "burst", "lengths")
OBJECTS = ("models", "bursts", "results", "in flight", "run_async", "stream", "buffers")
COMPILED = ("compiled", "compiled burst", "compiled lengths")
DESCRIPTORS = 140  # about as many again as a client here needs at most


@pytest.fixture
def few(place):
    """A device that lets a client have few models, bursts and plain paths."""
    limits = Path(f"{place.path}-home/.config/burst/limits.toml")
    limits.parent.mkdir(parents=True)
    limits.write_text("client_models = 32\nclient_bursts = 32\nclient_connections = 16\n")


def drop(way, count, descriptors=DESCRIPTORS):
    """So many of them, by a client that may have so many descriptors."""
    words = [str(descriptors), f"{way}={count}"]
    environment = os.environ | {"PYTHONPATH": str(PROGRAM.parents[2])}  # where `waiting` lies
    subprocess.run([sys.executable, PROGRAM, *words], check=True, timeout=1800, env=environment)


@pytest.mark.parametrize("way", FRAMES)
def test_a_pool_for_each_frame(place, way):
    """More frames than descriptors, each on a pool of its own or of a length of its own: each succeeds, on each
    path, and client and engine have the descriptors and mappings that they had.
    """
    drop(way, 150)


@pytest.mark.parametrize("way", OBJECTS)
def test_what_is_made_and_dropped(few, way):
    """The same of prepared models, bursts, results of bursts and device buffers, beyond what a client may have."""
    drop(way, 150)


@pytest.mark.parametrize(("way", "count"), [*((way, 150) for way in COMPILED), ("compiled models", 40)])
def test_compiled_models(few, way, count):
    """The same of frames and lengths through compiled models, and of compiled models themselves."""
    drop(way, count)


@pytest.mark.stress
@pytest.mark.parametrize("way", [*FRAMES, *OBJECTS, *COMPILED, "compiled models"])
def test_ten_thousand(place, way, tally):
    """10,000 of each, or as many as the budget allows, under `ulimit -n 1024`."""
    times = max(1100, stress.times(10_000))
    drop(way, times, 1024)
    tally("objects made and dropped", times)


def is_mapped(pid, memory):
    """Whether the process has mapped it."""
    inode = os.fstat(memory.fd).st_ino
    return any(line.split()[4] == str(inode) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


def executions(prepared):
    """Each way to execute a request of one's own, by its name."""
    burst = prepared.burst(spin=0)
    return {
        "execute": prepared.execute,
        "execute_async": lambda request: prepared.execute_async(request).result(),
        "execute_fenced": lambda request: prepared.execute_fenced(request).result(),
        "burst": burst.execute,
    }


@pytest.mark.parametrize("way", ["execute", "execute_async", "execute_fenced", "burst"])
@pytest.mark.parametrize("count", [73, 300])
def test_more_pools_than_descriptors_in_a_message(device, way, count):
    """A request names more pools than a message can carry: on each path it succeeds, and the device unmaps them all
    when they are dropped.
    """
    builder = driver.ModelBuilder()
    inputs = [builder.input("float32", (1,)) for _ in range(count)]
    builder.output(builder.operation("CONCATENATION", *inputs, 0))
    with device.prepare(builder.build()) as prepared:
        pools = [Memory.create(4096) for _ in range(count + 1)]
        for n, pool in enumerate(pools):
            pool.asarray(np.float32, 1)[0] = n
        output = pools[-1].asarray(np.float32, count)
        request = Request(
            tuple(RequestArgument(pool=n, length=4) for n in range(count)),
            (RequestArgument(pool=count, length=4 * count),),
            tuple(pools),
        )
        assert executions(prepared)[way](request).status is ErrorStatus.NONE
        assert list(output) == list(range(count))


def test_free_memory_reaches_every_path(device, kit):
    """`device.free_memory` unmaps a pool that all paths have used; each of them can use it again."""
    with device.prepare(kit.add_model()) as prepared:
        request, _ = kit.request([np.ones((1, 4), np.float32)], 16)
        ways = executions(prepared)
        for _ in range(2):
            for execute in ways.values():
                assert execute(request).status is ErrorStatus.NONE
            assert all(is_mapped(device.engine_pid, pool) for pool in request.pools)
            for pool in request.pools:
                device.free_memory(pool)
            kit.until(lambda: not any(is_mapped(device.engine_pid, pool) for pool in request.pools))


def test_free_memory_during_an_execution(slow, kit):
    """A pool that is freed while another thread executes on it stays mapped until then, and goes without another call;
    the thread's next execution on it succeeds.
    """
    request, _ = kit.request([np.full((1, 4), 0.2, np.float32)], 16)
    results = []
    thread = threading.Thread(target=lambda: results.extend(slow.execute(request) for _ in range(2)))
    thread.start()
    kit.until(lambda: is_mapped(slow.device.engine_pid, request.pools[1]))
    slow.device.free_memory(request.pools[1])
    thread.join(kit.patience)
    assert [result.status for result in results] == [ErrorStatus.NONE] * 2
    slow.device.free_memory(request.pools[1])
    kit.until(lambda: not is_mapped(slow.device.engine_pid, request.pools[1]))


def test_free_memory_of_a_compiled_model(connect, kit):
    """A compiled model frees a pool on its devices."""
    with driver.compile(kit.add_model(), [connect()]) as compiled:
        request, _ = kit.request([np.ones((1, 4), np.float32)], 16)
        assert compiled.execute(request).status is ErrorStatus.NONE
        pid = connect().engine_pid
        assert is_mapped(pid, request.pools[0])
        compiled.free_memory(request.pools[0])
        kit.until(lambda: not is_mapped(pid, request.pools[0]))


def test_no_descriptor_is_left(kit):
    """Memory that cannot be made for lack of descriptors says so, with the figure and the remedy; and so does a message
    whose descriptors cannot be taken.
    """
    words = subprocess.run(
        [sys.executable, "-c", _RUN_OUT], capture_output=True, text=True, check=True, timeout=kit.patience
    ).stdout.splitlines()
    assert words[0].startswith("ResourceExhaustedTransient: nbytes=4096: Too many open files; all 40 descriptors")
    assert words[1].startswith("DescriptorsLost: descriptors that came with a message are lost: all 40 descriptors")
    assert all("ulimit -n" in line for line in words)


_RUN_OUT = """
import resource
from burst import BurstError, Memory
from burst.channel import Channel
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
near, far = Channel.pair()
far.send([], [far.fileno()])
pools = []
for step in (lambda: pools.extend(Memory.create(4096) for _ in iter(int, 1)), near.receive):
    try:
        step()
    except BurstError as error:
        print(f"{type(error).__name__}: {error}")
"""
