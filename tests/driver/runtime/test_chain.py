"""The burst of a model on several devices: the surface of a burst, and data that stays in place."""

import asyncio
import concurrent.futures
import gc
import threading
import weakref
from concurrent.futures import CancelledError

import numpy as np
import pytest
from waiting import PATIENCE

import driver
from burst import PeerDied, Timeout
from driver.devices import device_class
from driver.runtime import capabilities

X = np.arange(4, dtype=np.float32)


def equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


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


def test_a_result_is_yours_while_you_hold_it(compiled, runtime_kit):
    """Later executions write elsewhere; who holds too many is told."""
    with compiled.burst() as burst:
        held = [burst.run(X + n) for n in range(10)]
        for n, result in enumerate(held):
            equal(result.outputs, runtime_kit.mixed(X + n))
        with pytest.raises(BufferError, match="held"):
            held += [burst.run(X) for _ in range(20)]
        held.clear()
        equal(burst.run(X).outputs, runtime_kit.mixed(X))


def test_a_wrong_array_is_named(compiled):
    """Before anything is sent."""
    with compiled.burst() as burst:
        with pytest.raises(ValueError, match="input 0 has dtype float64"):
            burst.run(X.astype(np.float64))
        with pytest.raises(ValueError, match="2 inputs were given; the model takes 1"):
            burst.run(X, X)
        assert burst.stats()["runs"]["burst"] == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_several_in_flight(compiled, runtime_kit, kit, depth):
    """Futures get the results of their own frames, whoever waits for whichever first; `run` goes in between."""
    with compiled.burst(depth=depth) as burst:
        futures = [burst.submit(X + n) for n in range(8)]
        equal(burst.run(X).outputs, runtime_kit.mixed(X))
        for n in reversed(range(8)):
            equal(futures[n].result(kit.patience).outputs, runtime_kit.mixed(X + n))
        assert burst.stats()["in_flight"] == 0


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


def test_who_stops_waiting_can_go_on(slow, runtime_kit):
    """A timeout leaves the burst usable; what comes late is dropped, and spoils nobody's result."""
    quick = np.full(4, -0.99, np.float32)
    with slow.burst() as burst:
        before = burst.run(quick)
        with pytest.raises(Timeout):
            burst.run(np.full(4, -0.8, np.float32), timeout=0.02)
        for _ in range(3):
            equal(burst.run(quick).outputs, runtime_kit.mixed(quick))
        equal(before.outputs, runtime_kit.mixed(quick))


def test_a_cancelled_frame_is_dropped(slow, runtime_kit, kit):
    """Its future says so, the others get their results, and its memory is used again only when nobody writes to it."""
    quick = np.full(4, -0.99, np.float32)
    with slow.burst(depth=2) as burst:
        first, second = burst.submit(np.full(4, -0.9, np.float32)), burst.submit(quick)
        called = []
        first.add_done_callback(called.append)
        assert first.cancel()
        assert called == [first]
        with pytest.raises(CancelledError):
            first.result()
        equal(second.result(kit.patience).outputs, runtime_kit.mixed(quick))
        equal(burst.run(quick).outputs, runtime_kit.mixed(quick))
        assert not second.cancel()


def test_asyncio(compiled, runtime_kit):
    """run_async for many tasks at once, await on a future, and stream in the order of the frames."""

    async def main():
        with compiled.burst(depth=2) as burst:
            results = await asyncio.gather(*(burst.run_async(X + n) for n in range(7)))
            for n, result in enumerate(results):
                equal(result.outputs, runtime_kit.mixed(X + n))
            equal((await burst.submit(X)).outputs, runtime_kit.mixed(X))
            n = 0
            async for result in burst.stream(X + n for n in range(5)):
                equal(result.outputs, runtime_kit.mixed(X + n))
                n += 1
            assert n == 5

    asyncio.run(main())


def test_a_cancelled_task_gives_up_its_frame_alone(slow, runtime_kit):
    """The frame's steps end by themselves, and the next ones are right."""
    quick = np.full(4, -0.99, np.float32)

    async def main():
        with slow.burst(depth=2) as burst:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(burst.run_async(np.full(4, -0.8, np.float32)), 0.02)
            for _ in range(3):
                equal((await burst.run_async(quick)).outputs, runtime_kit.mixed(quick))
            assert burst.stats()["drops"] == 1

    asyncio.run(main())


def test_threads_share_a_chain(compiled, runtime_kit, kit):
    """Each gets its own results."""
    wrong = []

    def work(burst, start):
        for n in range(start, start + 30):
            result = burst.submit(X + n).result(kit.patience)
            if not all(map(np.array_equal, result.outputs, runtime_kit.mixed(X + n))):
                wrong.append(n)

    with compiled.burst(depth=3) as burst:
        threads = [threading.Thread(target=work, args=(burst, 100 * n)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert burst.stats()["runs"]["burst"] == 120


def test_who_waits_when_it_is_closed_is_told(slow):
    """GeneralFailure for frames in flight, ValueError for new ones."""
    with slow.burst(depth=2) as burst:
        future = burst.submit(np.full(4, -0.7, np.float32))
        burst.close()
        with pytest.raises(driver.GeneralFailure, match="closed"):
            future.result(0)
        for call in (burst.run, burst.submit):
            with pytest.raises(ValueError, match="closed"):
                call(X)


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


def test_results_come_to_who_only_looks(compiled, runtime_kit, kit):
    """By `concurrent.futures.wait`, by a callback and by done(): a thread of ours takes a step's result to the next."""
    with compiled.burst(depth=2) as burst:
        futures = [burst.submit(X + n) for n in range(2)]
        assert not concurrent.futures.wait(futures, kit.patience).not_done
        for n, future in enumerate(futures):
            equal(future.result(0).outputs, runtime_kit.mixed(X + n))
        future, heard = burst.submit(X), threading.Event()
        future.add_done_callback(lambda _: heard.set())
        assert heard.wait(kit.patience)
        equal(future.result(0).outputs, runtime_kit.mixed(X))
    with compiled.burst(depth=2) as burst:
        future = burst.submit(X + 5)
        kit.until(future.done)
        equal(future.result(0).outputs, runtime_kit.mixed(X + 5))
