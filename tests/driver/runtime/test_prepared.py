"""One surface: what a prepared model offers on one device, on several, with fall back, and in this process."""

import asyncio
import concurrent.futures
import inspect
import os
import pickle
import time

import numpy as np
import pytest
from same_arrays import equal
from waiting import last, nested

import driver
from burst import ErrorStatus, Request, RequestArgument, Timeout
from driver.protocol.fences import ERROR_COUNT
from driver.runtime.fallback import FallbackExecutor
from driver.runtime.launched import FencedThread
from driver.runtime.local import LocalDevice, LocalPrepared
from driver.runtime.local_burst import LocalBurst

X = np.arange(4, dtype=np.float32)
KINDS = ("one device", "one device and this process", "several devices", "a device and this process", "this process")
SURFACES = {  # the classes behind each, and what is no method
    driver.AnyPreparedModel: ((driver.RemotePreparedModel, driver.CompiledModel, LocalPrepared), {"to_send"}),
    driver.AnyBurst: (
        (driver.Burst, driver.Chain, LocalBurst),
        {"inputs", "model", "source", "tasks", "to_send", "on_memory"},
    ),
}


@pytest.fixture(params=KINDS)
def compiled(request, settled, runtime_kit):
    devices = {
        "one device": [settled("reference")],
        "one device and this process": [settled("reference", 0.1), "cpu"],
        "several devices": [settled("Picky", 0.5), settled("reference", 0.9)],
        "a device and this process": [settled("Picky", 0.5), "cpu"],
        "this process": ["cpu"],
    }
    with driver.compile(runtime_kit.mixed_model(), devices[request.param]) as found:
        yield found


class Frames:
    """Requests on pools of the caller's own, for `mixed_model`."""

    def __init__(self, x):
        self.inputs, self.outputs = driver.Memory.create(16), driver.Memory.create(32)
        self.array = self.inputs.asarray(np.float32, (4,))
        self.array[:] = x
        its = tuple(RequestArgument(pool=1, offset=16 * n, length=16) for n in range(2))
        self.request = Request((RequestArgument(pool=0, length=16),), its, (self.inputs, self.outputs))


@pytest.mark.parametrize("surface", SURFACES)
def test_the_surface_is_one(surface):
    """Every public method has the same parameters, names and defaults in all of them; none lacks one."""
    kinds, own = SURFACES[surface]
    for kind in kinds:
        assert issubclass(kind, surface)
        for name in {name for name in dir(surface) if not name.startswith("_")} - own:
            ours, theirs = (bare(inspect.signature(getattr(found, name))) for found in (kind, surface))
            assert ours == theirs, (kind, name)


def bare(signature):
    """Its parameters after self, without their types, which a method in C does not tell."""
    return [each.replace(annotation=each.empty) for each in signature.parameters.values()][1:]


@pytest.mark.parametrize("compiled", ["several devices"], indirect=True)
def test_a_launch_that_returns_late_is_counted(compiled, kit, monkeypatch):
    """`launched` begins before the first device is told, which may be done before the call that told it returns."""
    launch, frame, late, steps = FallbackExecutor.launch_or_replace, Frames(X), 0.02, []

    def launch_late(executor, job):
        launched = launch(executor, job)
        if executor.remote:
            steps.append(launched)
            last(late)
        return launched

    monkeypatch.setattr(FallbackExecutor, "launch_or_replace", launch_late)
    with compiled.execute_fenced(frame.request, measure=True) as fenced:
        fenced.result(kit.patience)
        nested(len(steps) * late * 1e6, fenced.info().launched.time_in_driver)


def test_many_at_once(compiled, runtime_kit, kit):
    """Futures of many requests; each has its own result, and the caller was not held up by any."""
    frames = [Frames(X + n) for n in range(40)]
    futures = [compiled.execute_async(frame.request) for frame in frames]
    concurrent.futures.wait(futures, kit.patience)
    for n, future in enumerate(futures):
        equal(future.result(0).outputs, runtime_kit.mixed(X + n))


def test_fences_go_from_model_to_model(compiled, runtime_kit, kit):
    """A launch waits for an eventfd, and a second model's for it; nothing runs before, all of it afterwards."""
    gate, frame = os.eventfd(0, os.EFD_NONBLOCK), Frames(X)
    after, room = driver.Memory.create(32), runtime_kit.mixed(X)[0]
    its = tuple(RequestArgument(pool=1, offset=16 * n, length=16) for n in range(2))
    second = Request((RequestArgument(pool=0, length=16),), its, (frame.outputs, after))
    try:
        with (
            compiled.execute_fenced(frame.request, wait_for=[gate]) as first,
            compiled.execute_fenced(second, wait_for=[first]) as last,
        ):
            assert not first.done()
            assert not last.done()
            assert first.info().status == ErrorStatus.GENERAL_FAILURE  # pending
            os.eventfd_write(gate, 1)
            equal(last.result(kit.patience).outputs, runtime_kit.mixed(room))
            equal(first.result(0).outputs, runtime_kit.mixed(X))
    finally:
        os.close(gate)


def test_a_fence_in_error_ends_those_that_wait_for_it(compiled, kit):
    """Nothing is executed, here neither, and the fence of the launch is in error; a deadline ends the wait, too."""
    frame = Frames(X)
    for end in ("error", "deadline"):
        gate = os.eventfd(0, os.EFD_NONBLOCK)
        deadline = time.monotonic() + 0.05 if end == "deadline" else None
        with compiled.execute_fenced(frame.request, wait_for=[gate], deadline=deadline) as launched:
            if end == "error":
                os.eventfd_write(gate, ERROR_COUNT)
            result = launched.result(kit.patience)
            assert launched.wait(0) == driver.FenceState.ERROR
        os.close(gate)
        late = ErrorStatus.MISSED_DEADLINE_TRANSIENT
        assert result.status == (late if end == "deadline" else ErrorStatus.GENERAL_FAILURE)
    assert not frame.outputs.asarray(np.uint8, 32).any()
    with pytest.raises(driver.InvalidArgument, match="wait_for"):
        compiled.execute_fenced(frame.request, wait_for=[-2 + 2**31 // 2])


def test_a_pickled_model_is_prepared_where_it_is_unpickled(runtime_kit):
    """Also the model in this process."""
    local = LocalDevice().prepare(runtime_kit.mixed_model())
    with driver.compile(runtime_kit.mixed_model(), ["cpu"]) as compiled:
        for model in (compiled, local):
            with pickle.loads(pickle.dumps(model)) as copy:
                equal(copy.run(X), runtime_kit.mixed(X))


# ---- what a device does not do


@pytest.fixture(params=["one device", "several devices"])
def failing(request, settled, runtime_kit, kit):
    """x + 1, or (x + 1)^2 and that plus x + 1: fails on its device where the operation that it has begins below 0."""
    if request.param == "one device":
        compiled = driver.compile(runtime_kit.mixed_model(), [settled("Failing"), "cpu"])
    else:
        compiled = driver.compile(runtime_kit.mixed_model(), [settled("Picky", 0.5), settled("Failing", 0.9), "cpu"])
    with compiled:
        yield compiled


def test_every_way_in_falls_back(failing, runtime_kit, kit):
    """A request that the device fails is executed here, and its result or its fence is as if the device had done it."""
    bad = np.full(4, -3, np.float32)
    frame = Frames(bad)
    expected = runtime_kit.mixed(bad)
    equal(failing.run(bad), expected)
    equal(failing.execute(frame.request).outputs, expected)
    frame.outputs.asarray(np.uint8, 32)[:] = 0
    equal(failing.execute_async(frame.request).result(kit.patience).outputs, expected)
    frame.outputs.asarray(np.uint8, 32)[:] = 0
    with failing.execute_fenced(frame.request) as launched:
        assert launched.wait(kit.patience) == driver.FenceState.SIGNALED
        equal(launched.result(0).outputs, expected)
    equal(asyncio.run(failing.run_async(bad)), expected)
    assert sum(n for kind, n in failing.stats()["fallbacks"].items() if kind != "reasons") == 5


def test_a_fenced_execution_takes_a_thread_here_only_to_fall_back(failing, runtime_kit, kit, monkeypatch):
    """While the device succeeds, its own fence is enough; the fallback needs no fence of the caller's any more."""
    threads, begin = [], FencedThread.__init__
    monkeypatch.setattr(FencedThread, "__init__", lambda self, *its: (threads.append(self), begin(self, *its))[1])
    with failing.execute_fenced(Frames(X).request, measure=True) as launched:
        equal(launched.result(kit.patience).outputs, runtime_kit.mixed(X))
        assert launched.wait(0) == driver.FenceState.SIGNALED
        assert launched.info().status == ErrorStatus.NONE
        assert not threads
    bad, gate = np.full(4, -3, np.float32), os.eventfd(0, os.EFD_NONBLOCK)
    with failing.execute_fenced(Frames(bad).request, wait_for=[gate]) as launched:
        os.eventfd_write(gate, 1)
        os.close(gate)
        equal(launched.result(kit.patience).outputs, runtime_kit.mixed(bad))
        assert launched.info().status == ErrorStatus.NONE
    assert len(threads) == 1


@pytest.mark.parametrize("failing", ["several devices"], indirect=True)
def test_requests_in_a_chain_fall_back(failing, runtime_kit, kit):
    """Those on pools of the caller's own, too; the burst goes on."""
    bad, frame = np.full(4, -3, np.float32), Frames(np.full(4, -3, np.float32))
    with failing.burst() as burst:
        for _ in range(2):
            equal(burst.execute(frame.request, timeout=kit.patience).outputs, runtime_kit.mixed(bad))
            equal(burst.run(X).outputs, runtime_kit.mixed(X))


@pytest.mark.parametrize("device", ["one device", "several devices"])
def test_run_async_ends_at_the_timeout_and_at_the_deadline(settled, runtime_kit, device):
    """Timeout after the one, MissedDeadline* at the other; the loop was not held up, and the model goes on."""
    devices = {"one device": [settled("Slow")], "several devices": [settled("Picky", 0.5), settled("Slow", 0.9)]}
    slow = {"one device": np.full(4, 0.3, np.float32), "several devices": np.full(4, -0.7, np.float32)}[device]

    async def main(compiled):
        with pytest.raises(Timeout):
            await compiled.run_async(slow, timeout=0.03)
        with pytest.raises((driver.MissedDeadlineTransient, driver.MissedDeadlinePersistent)):
            await compiled.run_async(slow, deadline=time.monotonic() + 0.03)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(compiled.run_async(slow), 0.03)
        equal(await compiled.run_async(-X), runtime_kit.mixed(-X))

    with driver.compile(runtime_kit.mixed_model(), devices[device]) as compiled:
        asyncio.run(main(compiled))


FORK = """
import os, numpy as np, driver
m = driver.ModelBuilder()
m.output(m.operation("ADD", m.input("float32", (4,)), np.ones(4, np.float32), 0))
x = np.zeros(4, np.float32)
with driver.compile(m.build(), ["cpu"]) as compiled, compiled.burst() as burst:
    assert burst.submit(x).result().outputs[0].sum() == 4
    if not (child := os.fork()):
        good = burst.submit(x).result(10).outputs[0].sum() == 4
        import asyncio
        good &= asyncio.run(compiled.run_async(x))[0].sum() == 4
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert burst.submit(x).result().outputs[0].sum() == 4
"""


def test_a_forked_child_has_threads_of_its_own(kit):
    """In this process there is nothing that belongs to the parent alone: a child submits and awaits as the parent."""
    with kit.python(FORK) as child:
        assert child.wait(kit.patience) == 0


@pytest.mark.parametrize("way", ["execute_async", "execute_fenced"])
def test_a_device_that_dies_over_a_request_is_replaced(settled, runtime_kit, kit, way):
    """The request gets its result, on one device and on several."""
    for devices in ([settled("Crashing"), "cpu"], [settled("Picky", 0.5), settled("Crashing", 0.9), "cpu"]):
        with driver.compile(runtime_kit.mixed_model(), devices) as compiled:
            for n in range(2):
                found = getattr(compiled, way)(Frames(X + n).request).result(kit.patience)
                equal(found.outputs, runtime_kit.mixed(X + n))


def test_a_cancelled_future_gives_up_its_steps(settled, runtime_kit, kit):
    """The step that goes on may end; those after it are not begun."""
    with driver.compile(runtime_kit.mixed_model(), [settled("Picky", 0.5), settled("Slow", 0.9)]) as compiled:
        frame = Frames(np.full(4, -0.8, np.float32))  # + 1: for 0.2 s
        future = compiled.execute_async(frame.request)
        assert future.cancel()
        assert future.cancelled()
        equal(compiled.run(-X), runtime_kit.mixed(-X))
