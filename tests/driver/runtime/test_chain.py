"""The burst of a model on several devices: the surface of a burst, and data that stays in place."""

import asyncio
import gc
import weakref

import numpy as np
import pytest
from same_arrays import equal
from waiting import PATIENCE

import driver
from burst import PeerDied, Timeout
from driver.devices import device_class
from driver.runtime import capabilities

X = np.arange(4, dtype=np.float32)


@pytest.fixture
def compiled(settled, runtime_kit):
    """Three steps on two processes: the odd device, the reference, and the odd device again."""
    with driver.compile(runtime_kit.mixed_model(), [settled("Picky", 0.5), settled("reference", 0.9)]) as found:
        assert [device for device, _ in found.placement()] == [settled("Picky"), "reference", settled("Picky")]
        yield found


@pytest.fixture
def slow(settled, runtime_kit):
    """The same with the reference in place of the odd device, and a MUL that takes as long as its input says."""
    devices = [settled("Picky", 0.5), settled("Slow", 0.9)]
    with driver.compile(runtime_kit.mixed_model(), devices) as found:
        yield found


def test_one_after_the_other(compiled, runtime_kit):
    """`run` takes arrays, or what was written in place; inputs stay where they are; nothing is copied on the way."""
    with compiled.burst() as burst:
        (place,) = burst.inputs
        for n in range(40):
            place[...] = X + n
            equal(burst.run().outputs, runtime_kit.mixed(X + n))
        assert burst.inputs[0] is place
        assert burst.stats()["copied_bytes"]["bulk"] == 0
        equal(burst.run(X).outputs, runtime_kit.mixed(X))
        assert burst.stats()["copied_bytes"]["bulk"] == X.nbytes
        assert burst.stats()["runs"] == {"burst": 41, "plain": 0}


def test_data_stays_in_place(compiled):
    """Whatever the number of steps, each device is sent two pieces of memory: what one writes, the next one maps."""
    with compiled.burst() as burst:
        for _ in range(3):
            burst.run(X)
        steps = burst.stats()["steps"]
        assert [step["memories_sent"] for step in steps] == [2, 2, 2]
        assert [step["operations"] for step in steps] == [(0,), (1,), (2,)]
        (reads, first), (second, _) = next(iter(burst._memory._frames.values())).steps[:2]
        assert second.memory is reads.memory
        assert second.arguments == first.arguments


def test_devices_work_at_the_same_time(slow, runtime_kit, kit):
    """While one device has a frame, the one before it executes the next one."""
    frames = np.full(4, -0.8, np.float32), np.full(4, -0.99, np.float32)
    with slow.burst(depth=2) as burst:
        futures = [burst.submit(frame) for frame in frames]
        for future in futures:
            with pytest.raises(Timeout):
                future.result(0.02)
        assert [step["runs"]["burst"] for step in burst.stats()["steps"]] == [2, 0, 0]
        for future, frame in zip(futures, frames, strict=True):
            equal(future.result(kit.patience).outputs, runtime_kit.mixed(frame))


def test_without_a_spare_a_death_ends_the_chain(settled, runtime_kit):
    """PeerDied, as from any burst, for `run` and for futures."""
    with (
        driver.compile(runtime_kit.mixed_model(), [settled("Picky", 0.5), settled("Crashing", 0.9)]) as compiled,
        compiled.burst(depth=2) as burst,
    ):
        for run in (burst.run, lambda x: burst.submit(x).result(PATIENCE)):
            with pytest.raises(PeerDied):
                run(X)


def test_a_chain_recovers_like_its_bursts(place, runtime_kit, process, kit):
    """With recover=True the device that dies is started again, and the frame comes late."""
    devices = [kit.odd("Picky"), "reference"]
    for name, exec_time in zip(devices, (0.5, 0.9), strict=True):
        capabilities.store(name, device_class(name).version, runtime_kit.speed(exec_time))
    with driver.compile(runtime_kit.mixed_model(), devices) as compiled, compiled.burst(recover=True) as burst:
        equal(burst.run(X).outputs, runtime_kit.mixed(X))
        for pid in place.pids():
            process(pid).kill()
        equal(burst.run(X + 1).outputs, runtime_kit.mixed(X + 1))
        assert max(step["recoveries"] for step in burst.stats()["steps"]) >= 1


def test_a_chain_that_is_dropped_is_gone(compiled):
    """It ends with its last reference, and the bursts of its steps with it; the garbage collector is not needed."""
    gc.disable()
    try:
        for use in (run, submit, run_async):
            chain = compiled.burst()
            use(chain)
            gone = [weakref.ref(chain), *(weakref.ref(step) for step in chain.steps)]
            del chain
            assert [found() for found in gone] == [None] * len(gone)
    finally:
        gc.enable()


def run(chain):
    return chain.run(X)


def submit(chain):
    return chain.submit(X).result()


def run_async(chain):
    async def main():
        return await chain.run_async(X)

    return asyncio.run(main())
