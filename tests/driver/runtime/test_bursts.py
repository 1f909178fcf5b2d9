"""One surface: the burst of a model on one device, on several, and in this process."""

import asyncio
import dataclasses
import inspect
import json
import pickle
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest

import driver
from burst import Busy, ErrorStatus, Request, RequestArgument, Timeout
from driver.devices import device_class
from driver.runtime.local import LocalBurst, LocalDevice

X = np.arange(4, dtype=np.float32)
SLOW, QUICK = np.full(4, 0.2, np.float32), np.full(4, 0.001, np.float32)  # seconds that `slow` bursts take over them
KINDS = {
    "one device": driver.Burst,
    "several devices": driver.Chain,
    "a device and this process": driver.Chain,
    "this process": LocalBurst,
}


def equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.fixture(params=KINDS)
def compiled(request, settled, runtime_kit):
    devices = {
        "one device": [settled("reference")],
        "several devices": [settled("Picky", 0.5), settled("reference", 0.9)],
        "a device and this process": [settled("Picky", 0.5), "cpu"],
        "this process": ["cpu"],
    }
    with driver.compile(runtime_kit.mixed_model(), devices[request.param]) as found:
        with found.burst() as burst:
            assert type(burst) is KINDS[request.param]
        yield found


@pytest.fixture(params=["one device", "several devices", "this process"])
def slow(request, settled, runtime_kit, kit):
    """Opens a burst of x + 1, which takes as many seconds as the first element of x says."""
    model = driver.ModelBuilder()
    x = model.input("float32", (4,))
    y = model.operation("MUL", x, np.ones(4, np.float32), 0)
    model.output(model.operation("ADD", y, np.ones(4, np.float32), 0))
    model = model.build()
    match request.param:
        case "one device":
            prepared = driver.compile(model, [settled("Slow")])
        case "several devices":
            prepared = driver.compile(model, [settled("Picky", 0.5), settled("Slow", 0.9)])
            assert len(prepared.placement()) == 2
        case "this process":
            prepared = LocalDevice(device_class(kit.odd("Slow"))()).prepare(model)
    with prepared:
        yield prepared.burst


def request_of(x, outputs=2):
    """An explicit request on pools of the caller's own, and the pool of its outputs."""
    memory, room = driver.Memory.create(16), driver.Memory.create(16 * outputs)
    memory.asarray(np.float32, (4,))[:] = x
    its = tuple(RequestArgument(pool=1, offset=16 * n, length=16) for n in range(outputs))
    return Request((RequestArgument(pool=0, length=16),), its, (memory, room)), room


def bare(signature):
    """Its parameters after self, without their types, which a method in C does not tell."""
    return [each.replace(annotation=each.empty) for each in signature.parameters.values()][1:]


def test_the_surface_is_one():
    """Every public method has the same parameters, names and defaults in all of them; none has one that others lack."""
    expected = {name for name in dir(driver.AnyBurst) if not name.startswith("_")}
    for kind in {*KINDS.values()}:
        assert issubclass(kind, driver.AnyBurst)
        for name in expected - {"inputs", "model", "source", "tasks", "to_send", "on_memory"}:
            ours, theirs = (inspect.signature(getattr(found, name)) for found in (kind, driver.AnyBurst))
            assert bare(ours) == bare(theirs), (kind, name)


def test_every_way_in_gives_the_same(compiled, runtime_kit, kit, tmp_path):
    """Arrays, in place, futures, asyncio, streams, and pools of one's own; then figures, a trace, and the end."""

    async def asynchronously(burst):
        first = await burst.run_async(X + 3, timeout=kit.patience, deadline=time.monotonic() + kit.patience)
        frames = [result async for result in burst.stream([X + 4, (X + 5,)], timeout=kit.patience)]
        return [first, *frames]

    with compiled.burst(depth=2) as burst:
        burst.inputs[0][...] = X
        found = [burst.run(), burst.run(X + 1, timeout=kit.patience)]
        found.append(burst.submit(X + 2, timeout=1, deadline=time.monotonic() + kit.patience).result(kit.patience))
        found += asyncio.run(asynchronously(burst))
        for n, result in enumerate(found):
            assert result.status == ErrorStatus.NONE
            equal(result.outputs, runtime_kit.mixed(X + n))
        request, room = request_of(X + 6)
        for _ in range(2):
            result = burst.execute(request, timeout=kit.patience, deadline=time.monotonic() + kit.patience)
            equal(result.outputs, runtime_kit.mixed(X + 6))
            burst.free_memory(room)
        stats = burst.stats()
        assert stats["in_flight"] == stats["drops"] == stats["timeouts"] == stats["recoveries"] == 0
        assert stats["runs"]["burst"] + stats["runs"]["plain"] >= 6
        assert stats["copied_bytes"]["bulk"] == 5 * X.nbytes
        assert burst.trace(tmp_path / "trace.json") >= 6
        names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
        assert {"request", "bind", "execute", "return"} <= names
        with pytest.raises(TypeError, match="open a burst"):
            pickle.dumps(burst)
    for call in (burst.run, burst.submit, lambda x: burst.execute(request)):
        with pytest.raises(ValueError, match="closed"):
            call(X)


def test_what_a_request_lacks_is_said_alike(compiled):
    """Wrong arrays raise and send nothing; wrong requests have a status, the same everywhere."""
    request, _ = request_of(X)
    short = request._replace(outputs=tuple(a._replace(length=8) for a in request.outputs))
    with compiled.burst() as burst:
        with pytest.raises(ValueError, match="input 0 has dtype float64"):
            burst.submit(X.astype(np.float64))
        with pytest.raises(ValueError, match="2 inputs were given; the model takes 1"):
            burst.run(X, X)
        assert burst.execute(request._replace(inputs=())).status == ErrorStatus.INVALID_ARGUMENT
        found = burst.execute(short)
        assert found.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
        assert [shape.dimensions for shape in found.output_shapes] == [(4,), (4,)]
        assert burst.execute(request, deadline=1.0).status == ErrorStatus.MISSED_DEADLINE_PERSISTENT
        assert isinstance(burst.submit(X, deadline=1.0).exception(0), driver.MissedDeadlinePersistent)
        assert burst.stats()["runs"]["burst"] <= 3


def test_shapes_of_inputs_are_checked(compiled):
    """`input_shapes` may say what the model says already, and nothing else."""
    compiled.burst(input_shapes=[(4,)]).close()
    for shapes in ([(5,)], [(4,), (4,)], [(0,)]):
        with pytest.raises(ValueError, match="input_shapes"):
            compiled.burst(input_shapes=shapes)


# ---- while one is being executed


@pytest.mark.parametrize("policy", ["block", "reject", "latest"])
def test_the_policy_says_what_becomes_of_the_next_frame(slow, kit, policy):
    """ "block" waits, at most so long; "reject" raises Busy; "latest" keeps the newest, and cancels the one before."""
    with slow(policy=policy) as burst:
        first = burst.submit(SLOW)
        if policy == "latest":
            dropped, last = burst.submit(QUICK), burst.submit(QUICK * 2)
            with pytest.raises(CancelledError):
                dropped.result(kit.patience)
            equal(last.result(kit.patience).outputs, [QUICK * 2 + 1])
        else:
            with pytest.raises(Timeout if policy == "block" else Busy):
                burst.submit(QUICK, timeout=0.01)
        equal(first.result(kit.patience).outputs, [SLOW + 1])
        equal(burst.run(QUICK).outputs, [QUICK + 1])
        assert burst.stats()["drops"] == (policy != "block")


def test_who_gives_up_leaves_the_burst_usable(slow, kit):
    """After a timeout, a deadline, a cancelled future: the next results are right, and nothing is in flight."""
    with slow(depth=2) as burst:
        with pytest.raises(Timeout):
            burst.run(SLOW, timeout=0.02)
        late = burst.submit(SLOW, deadline=time.monotonic() + 0.02)
        assert isinstance(late.exception(kit.patience), driver.MissedDeadlineTransient)
        cancelled = burst.submit(SLOW)
        assert cancelled.cancel()
        waited = burst.submit(SLOW)
        with pytest.raises(Timeout):
            waited.result(0.001)
        assert waited.cancel()
        for n in range(3):
            equal(burst.run(QUICK * (n + 1)).outputs, [QUICK * (n + 1) + 1])
        assert burst.stats()["in_flight"] == 0


def test_another_thread_is_told_that_a_run_goes_on(slow, kit):
    """`run` is for one thread at a time: another one gets Busy, and may submit."""
    with slow() as burst:
        thread = threading.Thread(target=burst.run, args=(SLOW,))
        thread.start()
        try:
            with pytest.raises(Busy):
                kit.until(lambda: burst.run(QUICK) is None)
        finally:
            thread.join()
        equal(burst.submit(QUICK).result(kit.patience).outputs, [QUICK + 1])


def test_a_loop_goes_on_meanwhile(slow):
    """While `run_async` waits, other tasks run; timeout and deadline end it, for tasks in the queue too."""

    async def main(burst):
        first = asyncio.create_task(burst.run_async(SLOW))
        turns = 0
        while turns < 50:
            await asyncio.sleep(0)
            turns += 1
        assert not first.done()
        with pytest.raises(Timeout):
            await burst.run_async(QUICK, timeout=0.01)
        with pytest.raises(driver.MissedDeadlineTransient):
            await burst.run_async(QUICK, deadline=time.monotonic() + 0.01)
        equal((await first).outputs, [SLOW + 1])
        with pytest.raises(Timeout):
            await burst.run_async(SLOW, timeout=0.02)
        with pytest.raises(Timeout):
            [result async for result in burst.stream([QUICK, SLOW], timeout=0.05)]
        await asyncio.gather(*(one(burst, QUICK * n) for n in range(40)))

    async def one(burst, x):
        equal((await burst.run_async(x)).outputs, [x + 1])

    with slow() as burst:
        asyncio.run(main(burst))


def test_the_end_of_a_burst_is_told_to_all_who_wait(slow):
    """GeneralFailure for frames in flight and those that were kept, ValueError for new ones."""
    with slow(policy="latest") as burst:
        futures = [burst.submit(SLOW), burst.submit(SLOW)]
    for future in futures:
        with pytest.raises(driver.GeneralFailure, match="closed"):
            future.result(0)
    with pytest.raises(ValueError, match="closed"):
        burst.submit(QUICK)


# ---- open shapes


def test_a_chain_takes_the_shapes_of_open_inputs(settled, runtime_kit):
    """Where each step's outputs have known sizes, inputs may be open, and the burst says their shapes."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (0,))
    y = builder.operation("RESHAPE", x, np.array([4], np.int32))
    y = builder.operation("MUL", y, y, 0)
    builder.output(builder.operation("ADD", y, np.ones(4, np.float32), 0))
    main = builder.build().main
    operands = list(main.operands)
    for operation in main.operations:
        operands[operation.outputs[0]] = dataclasses.replace(operands[operation.outputs[0]], dimensions=(4,))
    model = driver.Model(dataclasses.replace(main, operands=tuple(operands)))
    with driver.compile(model, [settled("Picky", 0.5), settled("reference", 0.9)]) as compiled:
        assert len(compiled.placement()) > 1
        with pytest.raises(ValueError, match="input_shapes"):
            compiled.burst()
        with compiled.burst(input_shapes=[(4,)]) as burst:
            equal(burst.run(X).outputs, [X * X + 1])
