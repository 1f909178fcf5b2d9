"""Graphs inside of IF and WHILE run on devices that lack the control flow: the results are the whole model's."""

import asyncio
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from same_arrays import equal

import driver
from burst import ErrorStatus, Memory, MissedDeadlineTransient, Request, RequestArgument, Timeout

X = np.arange(1, 5, dtype=np.float32)
ONE = np.ones(1, np.float32)


def graph(*operations, inputs=1, size=4):
    """(kind, other operand) one after the other, on the last of some inputs."""
    builder = driver.ModelBuilder()
    x = [builder.input("float32", (size,)) for _ in range(inputs)][-1]
    for kind, other in operations:
        x = builder.operation(kind, x, x if other is None else np.full(1, other, np.float32), 0)
    builder.output(x)
    return builder.build()


def branching(then, otherwise, condition=None):
    """IF between two graphs of one input, on a condition that is an input, or a constant."""
    builder = driver.ModelBuilder()
    given = builder.input("bool8", (1,)) if condition is None else builder.constant(np.array([condition]))
    builder.output(builder.operation("IF", given, then, otherwise, builder.input("float32", (4,))))
    return builder.build()


def counting(rounds):
    """The condition of a loop over a counter and a value."""
    builder = driver.ModelBuilder()
    n, _ = builder.input("int32", (1,)), builder.input("float32", (4,))
    builder.output(builder.operation("LESS", n, np.full(1, rounds, np.int32)))
    return builder.build()


def looping(rounds, work):
    """WHILE with a counter; `work(builder, n, x)` makes the next x of the present one."""
    body, builder = driver.ModelBuilder(), driver.ModelBuilder()
    n, x = body.input("int32", (1,)), body.input("float32", (4,))
    body.output(body.operation("ADD", n, np.ones(1, np.int32), 0), work(body, n, x))
    x = builder.input("float32", (4,))
    outputs = builder.operation("WHILE", counting(rounds), body.build(), np.zeros(1, np.int32), x, outputs=2)
    builder.output(*outputs)
    return builder.build()


def squares(body, n, x):
    """x * x + 1: of two devices."""
    del n
    return body.operation("ADD", body.operation("MUL", x, x, 0), ONE, 0)


def endless():
    """WHILE that goes on, in a condition and a body of the device."""
    return looping(2**30, lambda body, n, x: body.operation("ADD", x, x, 0))


def request_of(compiled, *arrays):
    """These inputs, and outputs of 64 bytes each."""
    inputs, outputs = Memory.create(64 * len(arrays)), Memory.create(64 * len(compiled.model.outputs))
    for n, array in enumerate(arrays):
        inputs.asarray(array.dtype, array.shape, 64 * n)[...] = array
    return Request(
        tuple(RequestArgument(pool=0, offset=64 * n, length=array.nbytes) for n, array in enumerate(arrays)),
        tuple(RequestArgument(pool=1, offset=64 * n, length=64) for n in range(len(compiled.model.outputs))),
        (inputs, outputs),
    )


def ways(compiled, *arrays):
    """The outputs of every way in."""
    yield compiled.run(*arrays)
    yield asyncio.run(compiled.run_async(*arrays))
    with compiled.burst(depth=2) as burst:
        yield burst.run(*arrays).outputs
        yield burst.submit(*arrays).result(20).outputs
    request = request_of(compiled, *arrays)
    found = compiled.execute(request).outputs
    yield found
    yield compiled.execute_async(request).result(20).outputs
    whole = zip(request.outputs, found, strict=True)  # a fenced request says all shapes
    request = request._replace(outputs=tuple(a._replace(dimensions=array.shape) for a, array in whole))
    with compiled.execute_fenced(request) as fenced:
        yield fenced.result(20).outputs


@pytest.fixture
def straight(settled):
    """A device without control flow, and the CPU."""
    return [settled("Straight", 0.5), "cpu"]


@pytest.mark.parametrize("condition", [None, True, False])
def test_a_branch_runs_on_a_device_without_if(straight, condition):
    """Also where the condition is a constant."""
    model = branching(graph(("ADD", 1)), graph(("SUB", 1)), condition)
    with driver.compile(model, straight) as compiled:
        assert compiled.placement() == [("cpu", (0,)), (straight[0], (0,))]
        for flag in (True, False):
            given = [np.array([flag]), X] if condition is None else [X]
            chosen = flag if condition is None else condition
            for found in ways(compiled, *given):
                equal(found, [X + (1 if chosen else -1)])
        assert not any(compiled.stats()["fallbacks"][kind] for kind in ("compile", "dropped", "step", "whole"))


def test_a_loop_is_divided(straight):
    """Its body runs on two devices, and after no round the outputs are the inputs."""
    for rounds in (0, 1, 5):
        model = looping(rounds, squares)
        with driver.compile(model, ["cpu"]) as here, driver.compile(model, straight) as compiled:
            assert compiled.placement() == [("cpu", (0,)), (straight[0], (0,))]
            expected = here.run(X / 8)
            for found in ways(compiled, X / 8):
                equal(found, expected)


def test_control_flow_inside_of_control_flow(straight):
    """Two graphs refer to the same ones, which are prepared once."""
    add, sub = graph(("ADD", 1)), graph(("SUB", 2))

    def work(body, n, x):
        is_first = body.operation("LESS", n, np.ones(1, np.int32))
        y = body.operation("IF", is_first, add, sub, x)
        return body.operation("IF", body.operation("LOGICAL_NOT", is_first), sub, add, y)

    model = looping(3, work)
    with driver.compile(model, ["cpu"]) as here, driver.compile(model, straight) as compiled:
        assert {device for device, _ in compiled.placement()} == set(straight)
        expected = here.run(X)
        for found in ways(compiled, X):
            equal(found, expected)


def random_graph(random, depth, builder, values):
    """Add operations to a list of values, control flow among them; each value stays within 9."""
    for _ in range(int(random.integers(1, 4))):
        kind = random.choice(["ADD", "MUL", "SUB", "ABS", "NEG"])
        operands = [values[random.integers(len(values))] for _ in range(1 if kind in {"ABS", "NEG"} else 2)]
        values.append(builder.operation(kind, *operands, *([0] if len(operands) > 1 else [])))
    if depth:
        values.append(random_control(random, depth - 1, builder, values))
    low = builder.operation("MAXIMUM", values[-1], np.full(1, -9, np.float32))
    values.append(builder.operation("MINIMUM", low, np.full(1, 9, np.float32)))
    return values[-1]


def random_control(random, depth, builder, values):
    """IF or WHILE over some of the values."""
    x = values[random.integers(len(values))]
    if random.random() < 0.5:
        highest = builder.operation("REDUCE_MAX", x, np.zeros(1, np.int32), True)
        graphs = []
        for _ in range(2):
            inner = driver.ModelBuilder()
            inner.output(random_graph(random, depth, inner, [inner.input("float32", (4,))]))
            graphs.append(inner.build())
        return builder.operation("IF", builder.operation("GREATER", highest, np.full(1, 0.5, np.float32)), *graphs, x)
    body = driver.ModelBuilder()
    n, inner = body.input("int32", (1,)), body.input("float32", (4,))
    body.output(body.operation("ADD", n, np.ones(1, np.int32), 0), random_graph(random, depth, body, [inner]))
    condition = counting(int(random.integers(0, 4)))
    return builder.operation("WHILE", condition, body.build(), np.zeros(1, np.int32), x, outputs=2)[1]


@pytest.mark.parametrize("seed", range(10))
def test_any_control_flow_gives_the_same(straight, seed):
    """Random graphs in random graphs, in every way: what the whole model gives here, bit by bit."""
    random, builder = np.random.default_rng(seed), driver.ModelBuilder()
    builder.output(random_graph(random, 2, builder, [builder.input("float32", (4,)) for _ in range(2)]))
    model, arrays = builder.build(), [random.standard_normal(4, np.float32) for _ in range(2)]
    with driver.compile(model, ["cpu"]) as here, driver.compile(model, straight) as compiled:
        expected = here.run(*arrays)
        for found in ways(compiled, *arrays):
            assert [array.tobytes() for array in found] == [array.tobytes() for array in expected]
        assert not any(compiled.stats()["fallbacks"][kind] for kind in ("compile", "step", "whole"))


def test_sizes_may_be_open_inside(straight):
    """A value that only its execution tells the size of goes from one device to the other in each round."""
    body, condition, builder = driver.ModelBuilder(), driver.ModelBuilder(), driver.ModelBuilder()
    size, x = body.input("int32", (1,)), body.input("float32", (4,))
    part = body.operation("SLICE", body.operation("ADD", x, ONE, 0), np.zeros(1, np.int32), size)
    padded = body.operation("CONCATENATION", body.operation("MUL", part, part, 0), x, 0)
    first = body.operation("SLICE", padded, np.zeros(1, np.int32), np.full(1, 4, np.int32))
    body.output(body.operation("SUB", size, np.ones(1, np.int32), 0), first)
    n, _ = condition.input("int32", (1,)), condition.input("float32", (4,))
    condition.output(condition.operation("GREATER", n, np.ones(1, np.int32)))
    sizes = builder.input("int32", (1,))
    builder.output(
        *builder.operation("WHILE", condition.build(), body.build(), sizes, builder.input("float32", (4,)), outputs=2)
    )
    model = builder.build()
    with driver.compile(model, ["cpu"]) as here, driver.compile(model, straight) as compiled:
        assert {device for device, _ in compiled.placement()} == set(straight)
        for size in (1, 2, 4):
            arrays = np.full(1, size, np.int32), X / 4
            expected = here.run(*arrays)
            for found in ways(compiled, *arrays):
                equal(found, expected)


def test_a_loop_ends_in_time(straight):
    """By its loop timeout, by a deadline, and by the caller's timeout; none of these is done again elsewhere."""
    with driver.compile(endless(), straight) as compiled:
        assert {device for device, _ in compiled.placement()} == set(straight)
        request = request_of(compiled, X)
        assert compiled.execute(request, loop_timeout=0.001).status == ErrorStatus.MISSED_DEADLINE_TRANSIENT
        with compiled.burst(loop_timeout=0.001) as burst, pytest.raises(MissedDeadlineTransient, match="loop timeout"):
            burst.run(X)
        late = compiled.execute(request, loop_timeout=15, deadline=time.monotonic() + 0.05)
        assert late.status == ErrorStatus.MISSED_DEADLINE_TRANSIENT
        fenced = compiled.execute_fenced(request, loop_timeout=0.001)
        with fenced:
            assert fenced.result(20).status == ErrorStatus.MISSED_DEADLINE_TRANSIENT
        with pytest.raises((Timeout, MissedDeadlineTransient)):  # whichever side says it first
            compiled.run(X, timeout=0.05)
        assert not any(compiled.stats()["fallbacks"][kind] for kind in ("step", "whole"))


def test_a_cancelled_loop_ends(straight, kit):
    """No round begins after it was cancelled: the thread is free for others."""
    with driver.compile(endless(), straight) as compiled:
        request = request_of(compiled, X)
        many = [compiled.execute_async(request, loop_timeout=15) for _ in range(8)]
        for future in many:
            assert future.cancel()
        done = threading.Event()
        last = compiled.execute_async(request, loop_timeout=0.001)
        last.add_done_callback(lambda _: done.set())
        kit.until(done.is_set)
        assert last.result().status == ErrorStatus.MISSED_DEADLINE_TRANSIENT


def test_jobs_that_wait_for_devices_are_in_nobodys_way(straight, kit):
    """However many of them go on in the background, the CPU executes there what needs no device."""
    with driver.compile(endless(), straight) as compiled, driver.compile(kit.add_model(), ["cpu"]) as here:
        request = request_of(compiled, X)
        many = [compiled.execute_async(request, loop_timeout=15) for _ in range(2 * os.cpu_count())]
        assert here.execute_async(request_of(here, X)).result(kit.patience).status == ErrorStatus.NONE
        assert not any(future.done() for future in many)
        for future in many:
            assert future.cancel()


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_burst_goes_on_until_it_is_closed(straight, is_dropped):
    """Also when its model is closed before; then the graphs are freed with it, closed or dropped."""
    with driver.connect(straight[0]) as device, driver.compile(looping(2, squares), [device, "cpu"]) as compiled:
        expected = compiled.run(X / 8)
        burst, other = compiled.burst(), compiled.burst()
        (step,) = compiled.prepared.steps
        graphs = step.model.prepared.graphs
        compiled.close()
        other.close()
        equal(burst.run(X / 8).outputs, expected)
        assert graphs.executors
        if is_dropped:
            del burst
        else:
            burst.close()
            burst.close()
        assert not graphs.executors


def test_a_burst_has_its_devices_unmap_a_pool(straight, kit):
    """As every burst has; and its figures have the model's fallbacks."""
    with (
        driver.connect(straight[0]) as device,
        driver.compile(looping(2, squares), [device, "cpu"]) as compiled,
        compiled.burst() as burst,
    ):
        request = request_of(compiled, X)
        assert burst.execute(request).status == ErrorStatus.NONE
        inode, maps = os.fstat(request.pools[0].fd).st_ino, Path(f"/proc/{device.engine_pid}/maps")
        assert f" {inode} " in maps.read_text()
        burst.free_memory(request.pools[0])
        kit.until(lambda: f" {inode} " not in maps.read_text())
        assert burst.stats()["fallbacks"] == compiled.stats()["fallbacks"]


def test_a_step_inside_that_fails_runs_here(settled):
    """The CPU executes that step, with the same result; the device stays in use."""
    devices = [settled("StraightFailing", 0.5), "cpu"]
    with driver.compile(branching(graph(("SUB", 1)), graph(("ADD", 1)), True), devices) as compiled:
        equal(compiled.run(X), [X - 1])
        assert compiled.stats()["fallbacks"]["step"] == 0
        equal(compiled.run(X - 5), [X - 6])
        assert compiled.stats()["fallbacks"]["step"] == 1
        assert not compiled.stats()["fallbacks"]["whole"]
        assert compiled.placement() == [("cpu", (0,)), (devices[0], (0,))]


def test_outputs_that_are_too_small_are_told(straight):
    """With the sizes that they need, and nothing is executed elsewhere."""
    with driver.compile(looping(2, squares), straight) as compiled:
        request = request_of(compiled, X)
        counter, value = request.outputs
        result = compiled.execute(request._replace(outputs=(counter, value._replace(length=12))))
        assert result.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
        assert result.output_shapes == (((1,), True), ((4,), False))
        assert not any(compiled.stats()["fallbacks"][kind] for kind in ("step", "whole"))


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("length", [12, 16])
def test_an_output_beside_the_inputs_is_told_from_them(straight, rounds, length):
    """In the inputs' pool, too, an output that is too small is told, and one that is not is written."""
    with driver.compile(looping(rounds, squares), straight) as compiled:
        request, pool = request_of(compiled, X), Memory.create(256)
        pool.asarray(np.float32, 4)[:] = X
        counter, value = (a._replace(pool=0, offset=64 * (n + 1)) for n, a in enumerate(request.outputs))
        result = compiled.execute(Request(request.inputs, (counter, value._replace(length=length)), (pool,)))
        is_enough = length >= X.nbytes
        assert result.status == (ErrorStatus.NONE if is_enough else ErrorStatus.OUTPUT_INSUFFICIENT_SIZE)
        assert result.output_shapes == (((1,), True), ((4,), is_enough))
        if is_enough:
            equal([pool.asarray(np.float32, 4, 128)], [X if rounds == 0 else (X * X + 1) ** 2 + 1])


def test_buffers_of_divided_control_flow_are_shared_memory(straight):
    """Several places are behind their roles; values stay there from one request to the next."""
    with driver.compile(looping(2, squares), straight) as compiled:
        role = [driver.BufferRole(0, 0)]
        given = compiled.allocate(driver.BufferDesc(), input_roles=role)
        made = compiled.allocate(driver.BufferDesc(), output_roles=[driver.BufferRole(0, 1)])
        assert not given.is_on_device
        pool = Memory.create(16)
        pool.asarray(np.float32, 4)[:] = X
        given.copy_from(pool)
        request = request_of(compiled, X)
        whole = RequestArgument(pool=0), request.outputs[0]._replace(pool=1), RequestArgument(pool=2)
        pools = given, request.pools[1], made
        assert compiled.execute(Request(whole[:1], whole[1:], pools)).status == ErrorStatus.NONE
        made.copy_to(pool)
        equal([pool.asarray(np.float32, 4)], [(X * X + 1) ** 2 + 1])


def test_a_device_that_has_the_whole_gets_it_where_that_is_cheaper(settled):
    """What interpreting costs is what IF or WHILE costs on the CPU."""
    model = branching(graph(("ADD", 1)), graph(("SUB", 1)))
    whole, straight = settled("Picky", 0.5), settled("Straight", 0.1)
    with driver.compile(model, [whole, straight, "cpu"]) as compiled:
        assert compiled.placement() == [(whole, (0,))]
    settled("Picky", 2.0)
    with driver.compile(model, [whole, straight, "cpu"]) as compiled:
        assert compiled.placement() == [("cpu", (0,)), (straight, (0,))]


def test_without_the_cpu_nothing_decides(straight):
    """It is the CPU that interprets, so it has to be in the list; and what is required has to have all."""
    model = branching(graph(("ADD", 1)), graph(("SUB", 1)))
    with pytest.raises(driver.NotPlaced, match=r"operation 0 \(IF\).*add 'cpu'"):
        driver.compile(model, straight[:1])
    with pytest.raises(driver.NotPlaced, match=r"operation 0 \(IF\)"):
        driver.compile(model, require_device=straight[0])


def test_graphs_are_kept_in_the_cache(straight, tmp_path):
    """Each step inside has a place of its own there."""
    model = looping(2, squares)
    outcomes = []
    for _ in range(2):
        with driver.compile(model, straight, cache_dir=tmp_path) as compiled:
            equal(compiled.run(X), [np.full(1, 2), (X * X + 1) ** 2 + 1])
            outcomes.append([each["outcome"] for each in compiled.stats()["compilations"] if each["device"] != "cpu"])
    assert set(outcomes[0]) == {"saved"}
    assert outcomes[1] == ["restored"] * len(outcomes[0])
