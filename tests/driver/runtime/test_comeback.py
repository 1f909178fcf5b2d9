"""A model whose device died is on that device again when the device is there, and no request waits for that."""

import asyncio
import gc
import os
import signal
import threading
import weakref

import numpy as np
import pytest

import driver
from driver.client.recovery import quarantine
from driver.devices import device_class
from driver.runtime import capabilities

X = np.arange(4, dtype=np.float32)


def kill(device, process):
    """Kills a device's processes, and returns when they have ended."""
    for pid in (device.engine_pid, device.service_pid):
        held = process(pid)
        held.kill(signal.SIGKILL)
        assert held.has_ended()


def waiting():
    """Threads that bring a model back."""
    return [thread for thread in threading.enumerate() if thread.name == "burst-comeback"]


def check(outputs, x):
    np.testing.assert_array_equal(outputs[0], np.asarray(x) * x)


async def asynchronously(burst, x):
    return await burst.run_async(x)


@pytest.fixture
def store(place, kit, runtime_kit):
    """A runtime directory of this test's own, where speeds are known: `Picky` lacks MUL, and is the fastest."""
    for name, exec_time in ((kit.odd("Picky"), 0.5), ("reference", 0.9), (kit.odd("Fragile"), 0.9)):
        capabilities.store(name, device_class(name).version, runtime_kit.speed(exec_time))


@pytest.fixture
def compiled(store, kit):
    """x * x on a reference device."""
    with driver.compile(kit.mul_model(), ["reference", "cpu"]) as compiled:
        assert compiled.placement() == [("reference", (0,))]
        yield compiled


WAYS = {
    "plain": lambda compiled, _, x: compiled.run(x),
    "run": lambda _, burst, x: burst.run(x).outputs,
    "submit": lambda _, burst, x: burst.submit(x).result(20).outputs,
    "asyncio": lambda _, burst, x: asyncio.run(asynchronously(burst, x)).outputs,
}


@pytest.mark.parametrize("how", WAYS)
def test_back_after_a_kill(compiled, process, kit, how):
    """After kill -9 each request has its result, on the CPU at first; when the device is there again the model is back,
    and so is the burst that was opened before.
    """
    with compiled.burst() as burst:
        check(WAYS[how](compiled, burst, X), X)
        device = compiled.prepared.device
        old = device.engine_pid
        kill(device, process)
        check(WAYS[how](compiled, burst, X + 1), X + 1)
        assert compiled.placement() == [("cpu", (0,))]
        kit.until(lambda: compiled.placement() == [("reference", (0,))])
        assert device.engine_pid != old
        before = compiled.stats()["fallbacks"]
        assert before["returned"] == 1
        for n in range(3):
            check(WAYS[how](compiled, burst, X + n), X + n)
        assert compiled.stats()["fallbacks"] == before
        if how != "plain":
            assert burst.stats()["recoveries"] == 1
            assert burst.stats()["runs"]["burst"] >= 3
    assert not waiting()


def test_back_after_each_of_several_kills(compiled, process, kit):
    """A death after a return is a death like the first one, and costs no result."""
    with compiled.burst(depth=2) as burst:
        for n in range(2):
            futures = [burst.submit(X + n) for _ in range(2)]
            kill(compiled.prepared.device, process)
            for future in futures:
                check(future.result(kit.patience).outputs, X + n)
            check(burst.run(X).outputs, X)
            kit.until(lambda n=n: compiled.stats()["fallbacks"]["returned"] == n + 1)
            check(burst.run(X - n).outputs, X - n)
        assert burst.stats()["recoveries"] == 2


def test_requests_do_not_wait_for_the_device(compiled, process, kit, monkeypatch):
    """While it cannot be started, the CPU answers, on the plain path and in old and new bursts; then it is back."""
    with compiled.burst() as old:
        place = os.environ["BURST_RUNTIME_DIR"]
        monkeypatch.setenv("BURST_RUNTIME_DIR", "/dev/null/none")
        kill(compiled.prepared.device, process)
        for n in range(20):
            with compiled.burst() as new:
                for run in (compiled.run, lambda x: old.run(x).outputs, lambda x, new=new: new.run(x).outputs):
                    check(run(X + n), X + n)
        assert compiled.placement() == [("cpu", (0,))]
        assert len(waiting()) == 1
        monkeypatch.setenv("BURST_RUNTIME_DIR", place)
        kit.until(lambda: compiled.placement() == [("reference", (0,))])
        with compiled.burst() as new:
            check(new.run(X).outputs, X)
            assert new.stats()["runs"]["burst"] == 1


@pytest.mark.parametrize("how", ["closed", "let go"])
def test_it_ends_with_the_model(store, process, kit, monkeypatch, how):
    """The thread that looks for the device ends when the model is closed, or when nothing refers to it any more."""
    with driver.connect() as device:
        compiled = driver.compile(kit.mul_model(), [device, "cpu"])
        monkeypatch.setenv("BURST_RUNTIME_DIR", "/dev/null/none")
        kill(device, process)
        check(compiled.run(X), X)
        assert waiting()
        if how == "closed":
            compiled.close()
        else:
            gone = weakref.ref(compiled)
            del compiled
            gc.collect()
            assert gone() is None
        kit.until(lambda: not waiting())


def test_a_quarantined_model_stays_on_the_cpu(store, kit):
    """A model that has crashed its device too often runs on the CPU from then on, and nothing looks for the device."""
    quarantine.clear()
    with driver.compile(kit.add_model(), [kit.odd("Fragile"), "cpu"]) as compiled:
        crashing = np.full((1, 4), np.nan, np.float32)
        with compiled.burst(recover=True) as burst:
            assert np.isnan(burst.run(crashing).outputs[0]).all()
        assert compiled.placement() == [("cpu", (0,))]
        assert not waiting()
        assert "Quarantined" in str(compiled.stats()["fallbacks"]["reasons"])
    quarantine.clear()


@pytest.mark.integration
def test_a_chain_comes_back(store, kit, runtime_kit, process):
    """The burst of a model on two devices, of which one is killed twice: each frame has its result, and the step is on
    its device again when that is there.
    """
    names = [kit.odd("Picky"), "reference", kit.odd("Picky")]
    with driver.compile(runtime_kit.mixed_model(), [*names[:2], "cpu"]) as compiled, compiled.burst(depth=2) as burst:
        (step,) = [step for step in compiled.prepared.steps if step.device == "reference"]

        def places():
            return [each["device"] for each in burst.stats()["steps"]]

        for n in range(2):
            assert places() == names
            kill(step.model.prepared.device, process)
            futures = [burst.submit(X + k) for k in range(2)]
            for k, future in enumerate(futures):
                for ours, theirs in zip(future.result(kit.patience).outputs, runtime_kit.mixed(X + k), strict=True):
                    np.testing.assert_array_equal(ours, theirs)
            assert places() == [names[0], "cpu", names[0]]
            kit.until(lambda n=n: compiled.stats()["fallbacks"]["returned"] == n + 1)
            before = compiled.stats()["fallbacks"]
            outputs = burst.run(X).outputs if n else burst.submit(X).result(kit.patience).outputs
            for ours, theirs in zip(outputs, runtime_kit.mixed(X), strict=True):
                np.testing.assert_array_equal(ours, theirs)
            assert compiled.stats()["fallbacks"] == before


def test_a_step_comes_back(store, kit, runtime_kit, process):
    """Of a model on two devices one is killed: its step moves to the CPU and back, and the other step stays."""
    names = kit.odd("Picky"), "reference"
    with driver.compile(runtime_kit.mixed_model(), [*names, "cpu"]) as compiled:
        placement = compiled.placement()
        assert {name for name, _ in placement} == set(names)
        (step,) = [step for step in compiled.prepared.steps if step.device == "reference"]
        device = step.model.prepared.device
        kill(device, process)
        for n in range(2):
            for ours, theirs in zip(compiled.run(X + n), runtime_kit.mixed(X + n), strict=True):
                np.testing.assert_array_equal(ours, theirs)
        assert [name for name, _ in compiled.placement()] == [names[0], "cpu", names[0]]
        kit.until(lambda: compiled.placement() == placement)
        before = compiled.stats()["fallbacks"]
        for ours, theirs in zip(compiled.run(X), runtime_kit.mixed(X), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert compiled.stats()["fallbacks"] == before
        with compiled.burst() as burst:
            burst.run(X)
            assert [each["device"] for each in burst.stats()["steps"]] == [names[0], "reference", names[0]]
