"""A driver in C that serves bursts itself, on the sources of csrc/fmq."""

import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from c_drivers import ROOT, STRICT, compiled
from inside import controller_of, open_bursts
from libburst_sources import libburst_sources

import driver
from burst import (
    ErrorStatus,
    GeneralFailure,
    Memory,
    MissedDeadlinePersistent,
    PeerDied,
    Request,
    RequestArgument,
)
from driver.vts import SMOKE, Target, catalogue, run

pytestmark = pytest.mark.integration

FLAGS = (f"-I{ROOT}/csrc", "-fvisibility=hidden", "-pthread")


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """build(flags): the path of the driver that tests/devices/c/own_burst.c is; csrc is compiled once."""

    queue = tmp_path_factory.mktemp("queue") / "queue.o"
    command = ["cc", "-std=c11", *STRICT, *FLAGS, "-r", "-nostdlib", *libburst_sources(), "-o", queue]
    subprocess.run(command, check=True)

    def build(*flags):
        path = tmp_path_factory.mktemp("own") / "libown.so"
        return str(compiled(path, "own_burst.c", queue, flags=(*FLAGS, *flags)))

    return build


@pytest.fixture(scope="session")
def own(build):
    """The driver as it is."""
    return build()


def is_own(burst):
    """Whether the library serves it: the engine would have noted its thread in the trace."""
    return not controller_of(burst).trace.page.device.tid


def test_the_library_serves_the_burst(own, model, x):
    """The library answers the requests, in order, with several in flight; the plain path gives the same."""
    with driver.connect(own) as device, device.prepare(model) as prepared, prepared.burst(depth=4) as burst:
        for _ in range(5):
            futures = [burst.submit(x * n) for n in range(8)]
            for n, future in enumerate(futures):
                np.testing.assert_array_equal(future.result(20).outputs[0], (x * n + 1) * x * n)
            del future, futures
        np.testing.assert_array_equal(prepared.run(x)[0], (x + 1) * x)
        assert is_own(burst)
        assert open_bursts(device) == 1


def test_memory_times_and_deadlines(own, model, x, kit):
    """Freed memory is unmapped at once; times come only when they are asked for; a passed deadline is missed."""
    with driver.connect(own) as device, device.prepare(model) as prepared, prepared.burst() as burst:
        for n in range(3):
            pool = Memory.create(64)
            pool.asarray(np.float32, 4)[:] = n
            request = Request((RequestArgument(length=16),), (RequestArgument(offset=32, length=16),), (pool,))
            assert burst.execute(request).timing == (None, None)
            assert list(pool.asarray(np.float32, 4, 32)) == [(n + 1) * n] * 4
            on_device, in_driver = burst.execute(request, measure=True).timing
            assert 0 <= on_device <= in_driver < 10**7
            with pytest.raises(MissedDeadlinePersistent):
                burst.execute(request, deadline=time.monotonic() - 1).raise_for_status()
            inode, maps = str(os.fstat(pool.fd).st_ino), Path(f"/proc/{device.engine_pid}/maps")
            assert inode in maps.read_text()
            burst.free_memory(pool)
            kit.until(lambda inode=inode, maps=maps: inode not in maps.read_text())
        assert burst.execute(request._replace(inputs=())).status is ErrorStatus.INVALID_ARGUMENT
        assert is_own(burst)


@pytest.mark.parametrize("newest", [1, 2])
def test_it_passes_the_kit(build, newest):
    """All that the kit does in bursts on models that the driver supports, in both versions of the wire; in version 1
    buffers of the device take the plain path.
    """
    tests = [test for test in catalogue(scope=SMOKE) if test.category in {"burst", "request"}]
    tests += [test for test in catalogue(scope=SMOKE) if test.name.startswith("memory/buffers/") and newest == 1]
    with Target(build(f"-DNEWEST={newest}")) as target:
        found = list(run(tests, target))
    assert [o for o in found if o.outcome == "failed"] == []
    assert sum(o.outcome == "passed" and o.category == "burst" for o in found) >= 12


@pytest.mark.parametrize("flags", [["-DREFUSAL=BURST_DEVICE_UNAVAILABLE"], ["-DREFUSAL=BURST_GENERAL_FAILURE"]])
def test_a_driver_may_leave_bursts_to_the_engine(build, model, x, flags):
    """With DEVICE_UNAVAILABLE the engine serves the burst; every other status is the client's error, with the driver's
    name and words.
    """
    with driver.connect(build(*flags)) as device, device.prepare(model) as prepared:
        if flags[0].endswith("GENERAL_FAILURE"):
            with pytest.raises(GeneralFailure, match=r"'own-burst'.*no channel of the accelerator is free"):
                prepared.burst()
            np.testing.assert_array_equal(prepared.run(x)[0], (x + 1) * x)
            return
        with prepared.burst() as burst:
            np.testing.assert_array_equal(burst.run(x).outputs[0], (x + 1) * x)
            assert not is_own(burst)


CLIENT = """
import sys, numpy as np, driver
sys.path.insert(0, sys.argv[1])
from small_models import add_model
device = driver.connect(sys.argv[2])
model = device.prepare(add_model(shape=(4,)))
bursts = [model.burst(depth=4) for _ in range(4)]
futures = [burst.submit(np.zeros(4, np.float32)) for burst in bursts for _ in range(4)]
print("ready", flush=True)
while True:
    for burst in bursts:
        burst.run()
"""


def held(pid):
    """Descriptors, threads and shared mappings of a process."""
    proc = Path(f"/proc/{pid}")
    shared = sum("/memfd:" in line for line in (proc / "maps").read_text().splitlines())
    threads = int((proc / "status").read_text().split("Threads:")[1].split()[0])
    return len(os.listdir(proc / "fd")), threads, shared


def test_clients_that_are_killed_in_the_midst_of_runs(own, model, x, kit):
    """kill -9 of clients that execute all the time: nothing of their bursts is left, and others go on."""
    with driver.connect(own) as device, device.prepare(model) as prepared, prepared.burst() as burst:
        burst.run(x)
        baseline = None
        for _ in range(4):  # the first is a warm-up: some threads stay
            with kit.python(CLIENT, Path(__file__).parents[2], own, stdout=subprocess.PIPE) as client:
                assert client.stdout.readline() == b"ready\n"
                assert open_bursts(device) == 5
                client.kill()
            kit.until(lambda: open_bursts(device) == 1)
            baseline = baseline or held(device.engine_pid)
            kit.until(lambda before=baseline: np.all(np.array(held(device.engine_pid)) <= before))
        np.testing.assert_array_equal(burst.run(x).outputs[0], (x + 1) * x)


def test_the_device_is_killed(own, model, x, kit, process):
    """kill -9 of the engine: a client of the library's burst gets PeerDied."""
    with driver.connect(own) as device, device.prepare(model) as prepared, prepared.burst() as burst:
        burst.run(x)
        engine = process(device.engine_pid)
        engine.kill()
        assert engine.has_ended()
        with pytest.raises(PeerDied):
            burst.run(x, timeout=kit.patience)
