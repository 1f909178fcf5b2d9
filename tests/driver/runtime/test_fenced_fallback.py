"""Fenced executions with the CPU behind them: what they cost, their times, and a lack of descriptors."""

import asyncio
import concurrent.futures.thread  # noqa: F401 (an import needs a descriptor)
import os
import threading

import numpy as np
import pytest
import scarce
from waiting import last, nested

import driver
from burst import ErrorStatus, Request, RequestArgument, ResourceExhaustedTransient
from driver.client.receiver import RECEIVER
from driver.runtime.launched import FencedThread

GOOD, BAD = np.arange(4, dtype=np.float32), np.full(4, -3, np.float32)


@pytest.fixture(params=["one device", "several devices"])
def model(request, settled, runtime_kit):
    """It fails on its device for `BAD`."""
    first = (
        [settled("Picky", 0.5), settled("Failing", 0.9)] if request.param == "several devices" else [settled("Failing")]
    )
    with driver.compile(runtime_kit.mixed_model(), [*first, "cpu"]) as compiled:
        compiled.run(GOOD)
        compiled.run(BAD)
        yield compiled


@pytest.fixture
def gate():
    """A fence that the test signals."""
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


def request_on(x):
    """A request on pools of its own."""
    inputs, outputs = driver.Memory.create(16), driver.Memory.create(32)
    inputs.asarray(np.float32, (4,))[:] = x
    its = tuple(RequestArgument(pool=1, offset=16 * n, length=16) for n in range(2))
    return Request((RequestArgument(pool=0, length=16),), its, (inputs, outputs))


def failed(model, kit, **options):
    """An execution that has failed on its device, which nobody has found out yet."""
    launched = model.execute_fenced(request_on(BAD), **options)
    assert launched._launched.wait(kit.patience) == driver.FenceState.ERROR
    return launched


def copies(kind="anon_inode:[eventfd]"):
    """How many eventfds this process has."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}") == kind
        except FileNotFoundError:  # the listing's own
            continue
    return found


@pytest.fixture
def threads(monkeypatch):
    """The threads that executions take in this process."""
    found, begin = [], FencedThread.__init__
    monkeypatch.setattr(FencedThread, "__init__", lambda self, *its: (found.append(self), begin(self, *its))[1])
    return found


def attended():
    """The receiver has done what it was asked to."""
    done = threading.Event()
    RECEIVER.call(done.set)
    return done


def test_who_waits_for_success_needs_no_thread(model, threads, runtime_kit, kit, gate):
    """Neither a callback nor an await asks for a fence of this process: they watch the device's."""

    async def awaited(launched):
        waiting = asyncio.ensure_future(_of(launched))
        await asyncio.sleep(0)
        os.eventfd_write(gate, 1)
        return await waiting

    called = threading.Event()
    with model.execute_fenced(request_on(GOOD), wait_for=[gate]) as launched:
        launched.add_done_callback(lambda _: called.set())
        assert attended().wait(kit.patience)
        result = asyncio.run(awaited(launched))
        assert called.wait(kit.patience)
    np.testing.assert_array_equal(result.outputs[0], runtime_kit.mixed(GOOD)[0])
    assert not threads


async def _of(launched):
    return await launched


def test_who_waits_for_a_failure_gets_the_fallback(model, runtime_kit, kit, gate):
    """Callback and await end when the CPU has executed it."""

    async def awaited(launched):
        waiting = asyncio.ensure_future(_of(launched))
        await asyncio.sleep(0)
        os.eventfd_write(gate, 1)
        return await waiting

    called = threading.Event()
    with model.execute_fenced(request_on(BAD), wait_for=[gate]) as launched:
        launched.add_done_callback(lambda _: called.set())
        assert attended().wait(kit.patience)
        result = asyncio.run(awaited(launched))
        assert called.wait(kit.patience)
    np.testing.assert_array_equal(result.outputs[0], runtime_kit.mixed(BAD)[0])


def test_a_callback_comes_without_descriptors(model, kit):
    """Where the CPU cannot begin for lack of them, the completion ends with that error."""
    called = threading.Event()
    with failed(model, kit) as launched:
        assert attended().wait(kit.patience)
        with scarce.descriptors_left(os.getpid(), 0):
            launched.add_done_callback(lambda _: called.set())
            assert called.wait(kit.patience)
        with pytest.raises(ResourceExhaustedTransient):
            launched.result(0)


def test_a_callback_comes_without_threads(model, kit, monkeypatch):
    """Neither in this process nor for the receiver."""

    def start(thread):
        raise RuntimeError("can't start new thread")

    called = threading.Event()
    with failed(model, kit) as launched:
        assert attended().wait(kit.patience)
        monkeypatch.setattr(threading.Thread, "start", start)
        launched.add_done_callback(lambda _: called.set())
        assert called.wait(kit.patience)
        monkeypatch.undo()
        with pytest.raises(ResourceExhaustedTransient):
            launched.result(0)


def test_an_await_raises_without_descriptors(model, kit, runtime_kit):
    """It may be awaited again when there are some."""

    async def main(launched):
        with scarce.descriptors_left(os.getpid(), 0), pytest.raises(ResourceExhaustedTransient):
            await launched
        return await launched

    with failed(model, kit) as launched:
        outputs = asyncio.run(main(launched)).outputs
    np.testing.assert_array_equal(outputs[0], runtime_kit.mixed(BAD)[0])


def test_a_duration_that_is_over_is_a_missed_deadline(model, kit):
    """It counts from the launch, not from when somebody finds out that the device has failed."""
    with failed(model, kit, duration=0.05) as launched:
        last(0.15)  # twice the duration, of two steps, is over
        assert launched.result(kit.patience).status == ErrorStatus.MISSED_DEADLINE_TRANSIENT


def test_times_count_from_the_launch(model, kit):
    """Also those of the CPU that executed what the device failed."""
    with failed(model, kit, measure=True) as launched:
        last(0.05)
        assert launched.wait(kit.patience) == driver.FenceState.SIGNALED
        info = launched.info()
        nested(50_000, info.fenced.time_in_driver, info.launched.time_in_driver)


def test_copies_of_fences_end_with_success(model, kit, gate):
    """Those of fences that were pending are kept until the execution is known to have succeeded."""
    before = copies()
    with model.execute_fenced(request_on(GOOD), wait_for=[gate] * 10) as launched:
        assert copies() == before + 10
        os.eventfd_write(gate, 1)
        assert launched.result(kit.patience).status == ErrorStatus.NONE
        assert copies() == before
    with model.execute_fenced(request_on(GOOD), wait_for=[gate] * 10) as launched:
        assert launched.wait(kit.patience) == driver.FenceState.SIGNALED
        assert copies() == before


@pytest.mark.parametrize("left", [5, 15])
def test_nothing_is_launched_without_descriptors(model, kit, gate, left):
    """Neither on the device nor here, where there are too few for copies of the fences."""
    with model.execute_fenced(request_on(GOOD)) as launched:
        launched.result(kit.patience)
    request, before = request_on(GOOD), copies()
    with scarce.descriptors_left(os.getpid(), left), pytest.raises(ResourceExhaustedTransient):
        model.execute_fenced(request, wait_for=[gate] * 10)
    assert copies() == before
    with model.execute_fenced(request_on(GOOD), wait_for=[gate]) as launched:
        os.eventfd_write(gate, 1)
        launched.result(kit.patience)
    assert not request.pools[1].asarray(np.uint8, 32).any()
