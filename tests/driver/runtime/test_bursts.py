"""One suite for each burst, on one device, on several, in this process, recorded, and with the CPU behind it."""

import asyncio
import concurrent.futures
import dataclasses
import json
import pickle
import threading
import time
from concurrent.futures import CancelledError
from contextlib import nullcontext

import numpy as np
import pytest
from same_arrays import equal

import driver
from burst import Busy, ErrorStatus, Request, RequestArgument, Timeout
from driver.devices import device_class
from driver.recording import record
from driver.runtime.local import LocalDevice
from driver.runtime.local_burst import LocalBurst

X = np.arange(4, dtype=np.float32)
SLOW, QUICK = np.full(4, 0.2, np.float32), np.full(4, 0.001, np.float32)  # seconds that `slow` bursts take over them
KINDS = {
    "one device": driver.Burst,
    "one device, recorded": driver.Burst,
    "one device and this process": driver.Burst,
    "several devices": driver.Chain,
    "several devices, recorded": driver.Chain,
    "a device and this process": driver.Chain,
    "this process": LocalBurst,
}


@pytest.fixture(params=KINDS)
def compiled(request, settled, runtime_kit, tmp_path):
    where, _, recorded = request.param.partition(", ")
    devices = {
        "one device": [settled("reference")],
        "one device and this process": [settled("reference", 0.1), "cpu"],
        "several devices": [settled("Picky", 0.5), settled("reference", 0.9)],
        "a device and this process": [settled("Picky", 0.5), "cpu"],
        "this process": ["cpu"],
    }
    with (
        record(tmp_path / "requests") if recorded else nullcontext(),
        driver.compile(runtime_kit.mixed_model(), devices[where]) as found,
    ):
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
    burst.close()
    for call in (burst.run, burst.run, burst.submit, lambda x: burst.execute(request)):
        with pytest.raises(ValueError, match="closed"):
            call(X)


def test_shapes_of_inputs_are_checked(compiled):
    """`input_shapes` may say what the model says already, and nothing else."""
    compiled.burst(input_shapes=[(4,)]).close()
    for shapes in ([(5,)], [(4,), (4,)], [(0,)]):
        with pytest.raises(ValueError, match="input_shapes"):
            compiled.burst(input_shapes=shapes)


def test_a_result_is_yours_while_you_hold_it(compiled, runtime_kit):
    """Later executions write elsewhere; who holds too many is told."""
    with compiled.burst() as burst:
        held = [burst.run(X + n) for n in range(10)]
        for n, result in enumerate(held):
            equal(result.outputs, runtime_kit.mixed(X + n))
        with pytest.raises(BufferError, match="held"):
            held += [burst.run(X) for _ in range(200)]
        held.clear()
        equal(burst.run(X).outputs, runtime_kit.mixed(X))


@pytest.mark.parametrize("depth", [1, 3])
def test_several_in_flight(compiled, runtime_kit, kit, depth):
    """Futures get the results of their own frames, whoever waits for whichever first; `run` goes in between."""
    with compiled.burst(depth=depth) as burst:
        futures = [burst.submit(X + n) for n in range(8)]
        equal(burst.run(X).outputs, runtime_kit.mixed(X))
        for n in reversed(range(8)):
            equal(futures[n].result(kit.patience).outputs, runtime_kit.mixed(X + n))
        assert burst.stats()["in_flight"] == 0


def test_tasks_share_a_burst(compiled, runtime_kit):
    """Many tasks at once get their own results, a future can be awaited, and a stream keeps the order of its frames."""

    async def main():
        with compiled.burst(depth=2) as burst:
            results = await asyncio.gather(*(burst.run_async(X + n) for n in range(7)))
            for n, result in enumerate(results):
                equal(result.outputs, runtime_kit.mixed(X + n))
            equal((await burst.submit(X)).outputs, runtime_kit.mixed(X))
            results = [result.outputs[0].copy() async for result in burst.stream(X + n for n in range(5))]
            equal(results, [runtime_kit.mixed(X + n)[0] for n in range(5)])

    asyncio.run(main())


def test_threads_share_a_burst(compiled, runtime_kit, kit):
    """Each gets its own results; many may wait for the same one."""
    wrong = []

    def work(burst, start):
        for n in range(start, start + 30):
            result = burst.submit(X + n).result(kit.patience)
            if not all(map(np.array_equal, result.outputs, runtime_kit.mixed(X + n))):
                wrong.append(n)

    with compiled.burst(depth=3) as burst:
        together([threading.Thread(target=work, args=(burst, 100 * n)) for n in range(4)])
        assert wrong == []
        assert burst.stats()["runs"]["burst"] == 120
        found, future = [], burst.submit(X)
        together([threading.Thread(target=lambda: found.append(future.result())) for _ in range(6)])
        assert len(found) == 6
        assert all(each is found[0] for each in found)


def together(threads):
    """They run, and end."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_results_come_to_who_only_looks(compiled, runtime_kit, kit):
    """By `concurrent.futures.wait`, by a callback and by done(): no caller has to wait for a frame to go on."""
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


# ---- while one is being executed


def test_a_cancelled_frame_is_dropped(slow, kit):
    """Its future says so at once, the others get their results, and what it leaves behind spoils none of them."""
    with slow(depth=2) as burst:
        first, second, called = burst.submit(SLOW), burst.submit(QUICK), []
        first.add_done_callback(called.append)
        assert first.cancel()
        assert called == [first]
        with pytest.raises(CancelledError):
            first.result()
        equal(second.result(kit.patience).outputs, [QUICK + 1])
        equal(burst.run(QUICK).outputs, [QUICK + 1])
        assert not second.cancel()


def test_a_cancelled_task_gives_up_its_frame_alone(slow):
    """A timeout of asyncio's is a cancellation, too; the frame ends by itself, and the next ones are right."""

    async def main():
        with slow(depth=2) as burst:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(burst.run_async(SLOW), 0.02)
            for n in range(3):
                equal((await burst.run_async(QUICK * n)).outputs, [QUICK * n + 1])
            assert burst.stats()["drops"] == 1

    asyncio.run(main())


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


MISSED = driver.MissedDeadlineTransient, driver.MissedDeadlinePersistent


def test_who_gives_up_leaves_the_burst_usable(slow, kit):
    """After a timeout, a deadline, a cancelled future: the next results are right, and nothing is in flight."""
    with slow(depth=2) as burst:
        with pytest.raises(Timeout):
            burst.run(SLOW, timeout=0.02)
        late = burst.submit(SLOW, deadline=time.monotonic() + 0.02)
        assert isinstance(late.exception(kit.patience), MISSED)
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
        results = []
        thread = threading.Thread(target=lambda: results.append(burst.run(SLOW)))
        thread.start()
        try:
            with pytest.raises(Busy):
                kit.until(lambda: burst.run(QUICK) is None)
        finally:
            thread.join()
        equal(results[0].outputs, [SLOW + 1])
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
        with pytest.raises(MISSED):
            await burst.run_async(QUICK, deadline=time.monotonic() + 0.01)
        equal((await first).outputs, [SLOW + 1])
        with pytest.raises((Timeout, *MISSED)):  # the latter where it is known by now, or nobody ran it in time
            await burst.run_async(SLOW, timeout=0.02)
        with pytest.raises((Timeout, *MISSED)):
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
    for call in (burst.run, burst.submit):
        with pytest.raises(ValueError, match="closed"):
            call(QUICK)


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
