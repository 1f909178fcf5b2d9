"""Buffers of compiled models: on the device or shared, by the same rules, and what becomes of them when it fails."""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

import driver
from burst import BuffersLost, ErrorStatus, Memory, Request, RequestArgument
from driver import BufferDesc, BufferRole, InvalidArgument
from driver.devices import device_class
from driver.options import options_of
from driver.runtime import capabilities

X = np.arange(1, 5, dtype=np.float32)
STATE = [BufferRole(0, 0)], [BufferRole(0, 0)]
WHOLE = RequestArgument()


def sum_model(shape=(4,)):
    """state + x, which is the next state."""
    builder = driver.ModelBuilder()
    state, x = (builder.input("float32", shape) for _ in range(2))
    builder.output(builder.operation("ADD", state, x, 0))
    return builder.build()


def steps_model():
    """(state + x) * x: the state is an input of `Picky`, and an output of another device."""
    builder = driver.ModelBuilder()
    state, x = (builder.input("float32", (4,)) for _ in range(2))
    builder.output(builder.operation("MUL", builder.operation("ADD", state, x, 0), x, 0))
    return builder.build()


MODELS = {"sum": (sum_model, lambda s, x: s + x), "steps": (steps_model, lambda s, x: (s + x) * x)}


def request_of(old, new, x=X):
    """old and x, to new."""
    pool = Memory.create(x.nbytes)
    pool.asarray(np.float32, x.size)[:] = x.ravel()
    return Request(
        (WHOLE._replace(pool=1), RequestArgument(length=x.nbytes)), (WHOLE._replace(pool=2),), (pool, old, new)
    )


def value_of(buffer, shape=(4,)):
    found = np.zeros(shape, np.float32)
    buffer.copy_to(found)
    return found.tolist()


def counts(compiled):
    return {kind: n for kind, n in compiled.stats()["fallbacks"].items() if kind != "reasons" and n}


PLACES = {
    "device": (["reference", "cpu"], "sum"),
    "cpu": (["cpu"], "sum"),
    "two devices": (["Picky", "reference", "cpu"], "steps"),
    "a device and the cpu": (["Picky", "cpu"], "steps"),
}


@pytest.fixture
def compiled(settled, request):
    """x + state or more, wherever the test's parameter says."""
    names, model = PLACES[getattr(request, "param", "device")]
    devices = [name if name == "cpu" else settled(name, 0.5 if name == "Picky" else 0.9) for name in names]
    with driver.compile(MODELS[model][0](), devices) as compiled:
        assert len({device for device, _ in compiled.placement()}) == min(len(names), 2 if model == "steps" else 1)
        compiled.expected = MODELS[model][1]
        yield compiled


everywhere = pytest.mark.parametrize("compiled", PLACES, indirect=True)


@everywhere
def test_state_stays_in_buffers(compiled):
    """From execution to execution, on the plain path and in a burst by turns; on the device if only one has roles."""
    old, new = (compiled.allocate(BufferDesc(), *STATE) for _ in range(2))
    assert old.is_on_device == ({device for device, _ in compiled.placement()} == {"reference"})
    old.copy_from(np.zeros(4, np.float32))
    state = np.zeros(4, np.float32)
    with compiled.burst() as burst:
        for execute in (compiled.execute, burst.execute) * 2:
            result = execute(request_of(old, new))
            result.raise_for_status()
            assert result.outputs == (None,)
            state = compiled.expected(state, X)
            assert value_of(new) == state.tolist()
            assert (new.dimensions, new.has_value) == ((4,), True)
            old, new = new, old
        assert burst.run(X, X).outputs[0].tolist() == compiled.expected(X, X).tolist()
    assert not counts(compiled)


@everywhere
def test_the_same_rules_everywhere(compiled):
    """No value, another role, other dimensions, a part of a buffer, an output that is an input, a closed one: the same
    status and message wherever the buffer lies, on the plain path and in a burst.
    """
    old, new = (compiled.allocate(BufferDesc(), *STATE) for _ in range(2))
    inner = compiled.allocate(BufferDesc(), [BufferRole(0, 1)], [])
    with compiled.burst() as burst:
        for execute in (compiled.execute, burst.execute):
            old.copy_from(X)
            good = request_of(old, new)
            bad = {
                "input 1: buffer .* not allocated for that role": good._replace(inputs=good.inputs[1::-1]),
                "dimensions .5. contradict": good._replace(
                    inputs=(WHOLE._replace(pool=1, dimensions=(5,)), good.inputs[1])
                ),
                "buffers are used whole": good._replace(outputs=(RequestArgument(pool=2, length=16),)),
                "also an input or another output": good._replace(outputs=(WHOLE._replace(pool=1),)),
            }
            for words, request in bad.items():
                result = execute(request)
                assert result.status == ErrorStatus.INVALID_ARGUMENT
                assert re.search(words, result.message or words)  # queues carry no message
            assert not new.has_value
            assert not old.has_value  # the last one would have written it
            old.copy_from(X)
            execute(good).raise_for_status()
            assert new.has_value
            fresh = compiled.allocate(BufferDesc(), *STATE)
            assert execute(request_of(fresh, new)).status == ErrorStatus.GENERAL_FAILURE
            assert new.is_fresh
            assert execute(request_of(old, inner)).status == ErrorStatus.INVALID_ARGUMENT
        closed = compiled.allocate(BufferDesc(), *STATE)
        closed.close()
        closed.close()
        for use in (lambda: closed.copy_from(X), lambda: compiled.execute(request_of(closed, new))):
            with pytest.raises(ValueError, match=f"buffer {closed.token} is closed; allocate another"):
                use()
    assert not counts(compiled)


@everywhere
def test_in_the_background_and_behind_fences(compiled, kit):
    """execute_async and execute_fenced take buffers, too; behind a fence a value is demanded when the execution begins,
    so that a launched execution reads what the one before it writes.
    """
    buffers = [compiled.allocate(BufferDesc(), *STATE) for _ in range(4)]
    buffers[0].copy_from(X)
    compiled.execute_async(request_of(*buffers[:2])).result(kit.patience).raise_for_status()
    state = compiled.expected(X, X)
    assert value_of(buffers[1]) == state.tolist()
    gate = os.eventfd(0)
    first = compiled.execute_fenced(request_of(*buffers[1:3]), [gate])
    second = compiled.execute_fenced(request_of(*buffers[2:]), [first])
    os.eventfd_write(gate, 1)
    for execution in (first, second):
        result = execution.result(kit.patience)
        result.raise_for_status()
        assert result.outputs == (None,)
    os.close(gate)
    assert value_of(buffers[3]) == compiled.expected(compiled.expected(state, X), X).tolist()


@everywhere
def test_what_allocate_refuses(compiled):
    """Roles that are given twice, do not exist or contradict the description, wherever the buffer would lie."""
    for desc, inputs, outputs, words in [
        ((), [], [], "at least one role"),
        ((), [BufferRole(0, 0), BufferRole(0, 0)], [], "given twice"),
        ((), [BufferRole(0, 9)], [], "io_index=9"),
        ((), [BufferRole(1, 0)], [], "model_index=1"),
        ((), [BufferRole(0, 0, 0.0)], [], "frequency=0"),
        ((5,), *STATE, "contradict"),
        ((-1,), *STATE, "integer of 32 bits"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            compiled.allocate(BufferDesc(desc), inputs, outputs)


def test_shared_by_two_models(settled, connect):
    """Models on one connection share a buffer on the device; models on different ones share memory. Each executes on
    what the other has left.
    """
    device = connect()
    settled("reference")
    settled("Picky")
    for others, is_on_device in ([device, "cpu"], True), ([settled("Picky"), "cpu"], False):
        with driver.compile(sum_model(), [device, "cpu"]) as one, driver.compile(sum_model(), others) as other:
            roles = [BufferRole(0, 0), BufferRole(1, 0)], [BufferRole(0, 0), BufferRole(1, 0)]
            old, new = (driver.allocate(BufferDesc(), [one, other], *roles) for _ in range(2))
            assert old.is_on_device == is_on_device
            old.copy_from(X)
            for n, execute in enumerate((one.execute, other.execute, one.execute)):
                execute(request_of(old, new)).raise_for_status()
                assert value_of(new) == (X * (n + 2)).tolist()
                old, new = new, old


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_open_dimensions(settled, name):
    """A buffer of open dimensions grows with its value, and takes its dimensions, on a device and in shared memory."""
    devices = ["cpu"] if name == "cpu" else [settled(name), "cpu"]
    with driver.compile(sum_model((0, 4)), devices) as compiled, compiled.burst(input_shapes=[(1, 4)] * 2) as burst:
        old, new = (compiled.allocate(BufferDesc(), *STATE) for _ in range(2))
        assert old.dimensions == (0, 4)
        for execute in (compiled.execute, burst.execute):
            for rows in (1, 300, 2):
                x = np.full((rows, 4), rows, np.float32)
                old.copy_from(x)
                request = request_of(old, new, x)
                inputs = request.inputs[0], request.inputs[1]._replace(dimensions=x.shape)
                execute(request._replace(inputs=inputs)).raise_for_status()
                assert new.dimensions == (rows, 4)
                assert value_of(new, x.shape) == (2 * x).tolist()


def test_copies_between_places(compiled, settled):
    """A value goes from the device to shared memory and back, with its dimensions."""
    with driver.compile(sum_model(), ["cpu"]) as here:
        there, shared, other = (each.allocate(BufferDesc(), *STATE) for each in (compiled, here, here))
        there.copy_from(X)
        shared.copy_from(there)
        assert value_of(shared) == X.tolist()
        shared.copy_from(X + 1)
        shared.copy_to(other)
        other.copy_to(there)
        assert value_of(there) == (X + 1).tolist()


def test_of_another_model(compiled):
    """A shared buffer of one compiled model is refused by another one, and by what is prepared on a device."""
    with driver.compile(sum_model(), ["cpu"]) as here, driver.compile(sum_model(), ["cpu"]) as another:
        shared, output = (here.allocate(BufferDesc(), *STATE) for _ in range(2))
        shared.copy_from(X)
        result = another.execute(request_of(shared, output))
        assert result.status == ErrorStatus.INVALID_ARGUMENT
        assert "not allocated for that role" in result.message
        with (
            compiled.prepared.open_burst(options_of("fast_single_answer")) as burst,
            compiled.burst() as its_burst,
            compiled.prepared.device.prepare(sum_model()) as prepared,
        ):
            for execute in (prepared.execute, burst.execute):
                with pytest.raises(ValueError, match="was allocated for compiled models; give the request to one"):
                    execute(request_of(shared, output))
            assert its_burst.execute(request_of(shared, output)).status == ErrorStatus.INVALID_ARGUMENT


# ---- when the device fails


@pytest.fixture
def failing(settled, kit):
    """state + x on a device that fails over a state that begins below 0."""
    with driver.compile(sum_model(), [settled("Failing"), "cpu"]) as compiled:
        assert compiled.placement() == [(kit.odd("Failing"), (0,))]
        yield compiled


def test_a_failed_request_on_buffers_is_executed_here(failing):
    """Its inputs' values come here and its outputs go back to the device, on the plain path and in a burst; counted."""
    old, new = (failing.allocate(BufferDesc(), *STATE) for _ in range(2))
    assert old.is_on_device
    with failing.burst() as burst:
        for n, execute in enumerate((failing.execute, burst.execute)):
            old.copy_from(-X)
            result = execute(request_of(old, new))
            assert result.status == ErrorStatus.NONE
            assert result.outputs == (None,)
            assert value_of(new) == [0, 0, 0, 0]
            assert value_of(old) == (-X).tolist()
            assert counts(failing) == {"whole": n + 1}
            old.copy_from(X)
            execute(request_of(old, new)).raise_for_status()
            assert value_of(new) == (2 * X).tolist()
            assert counts(failing) == {"whole": n + 1}


def test_buffers_of_a_drivers_own_layout(settled, shared):
    """They are the device's; the CPU executes on what the driver copies out of them, and the driver copies it in."""
    with driver.compile(sum_model(), [settled("burst_test_devices.heap:Troubled"), "cpu"]) as compiled:
        old, new = (compiled.allocate(BufferDesc(), *STATE) for _ in range(2))
        assert old.is_on_device
        old.copy_from(X)
        trouble = Path(shared.path, "trouble")
        with compiled.burst() as burst:
            for n, execute in enumerate((compiled.execute, burst.execute)):
                trouble.write_text("run fails")
                try:
                    assert execute(request_of(old, new)).status == ErrorStatus.NONE
                finally:
                    trouble.unlink()
                assert value_of(new) == (2 * X).tolist()
                execute(request_of(new, old)).raise_for_status()
                assert value_of(old) == (3 * X).tolist()
                assert counts(compiled) == {"whole": n + 1}
                old.copy_from(X)


def test_an_input_without_a_value_is_no_failure_of_the_device(failing):
    """It is the same everywhere: nothing is executed here, nor counted."""
    old, new = (failing.allocate(BufferDesc(), *STATE) for _ in range(2))
    with failing.burst() as burst:
        for execute in (failing.execute, burst.execute):
            assert execute(request_of(old, new)).status == ErrorStatus.GENERAL_FAILURE
    assert not counts(failing)


def test_a_failed_step_on_buffers_is_executed_here(settled, kit):
    """The step alone, when the model is on several devices, by whole requests and by a chain."""
    devices = [settled("Picky", 0.5), settled("Failing", 0.9), "cpu"]
    builder = driver.ModelBuilder()
    state, x = (builder.input("float32", (4,)) for _ in range(2))
    builder.output(builder.operation("MUL", state, x, 0), builder.operation("ADD", x, x, 0))
    with driver.compile(builder.build(), devices) as compiled, compiled.burst() as burst:
        assert {device for device, _ in compiled.placement()} == set(devices[:2])
        old, new = compiled.allocate(BufferDesc(), [BufferRole(0, 0)]), compiled.allocate(BufferDesc(), [], STATE[1])
        assert old.is_on_device
        assert new.is_on_device
        for n, execute in enumerate((compiled.execute, burst.execute)):
            old.copy_from(-X)
            request = request_of(old, new)
            outputs = request.outputs[0], RequestArgument(pool=3, length=16)
            memory = Memory.create(16)
            execute(request._replace(outputs=outputs, pools=(*request.pools, memory))).raise_for_status()
            assert value_of(new) == (-X * X).tolist()
            assert memory.asarray(np.float32).tolist() == (2 * X).tolist()
            assert counts(compiled) == {"step": n + 1}


@pytest.fixture
def store(place, runtime_kit):
    """A runtime directory of this test's own, where the speed of the reference device is known."""
    capabilities.store("reference", device_class("reference").version, runtime_kit.speed(0.9))


@pytest.mark.parametrize("how", ["plain", "burst"])
def test_a_dead_device_loses_its_buffers(store, kit, process, how):
    """The request gets BuffersLost, the model goes to the CPU, where new buffers are shared memory, and comes back;
    those buffers stay good there, and new ones are on the device again.
    """
    with driver.compile(sum_model(), ["reference", "cpu"]) as compiled, compiled.burst() as burst:
        execute = compiled.execute if how == "plain" else burst.execute
        old, new = (compiled.allocate(BufferDesc(), *STATE) for _ in range(2))
        old.copy_from(X)
        execute(request_of(old, new)).raise_for_status()
        engine = process(compiled.prepared.device.engine_pid)
        os.kill(engine.pid, signal.SIGKILL)
        assert engine.has_ended()
        with pytest.raises(BuffersLost, match=rf"buffers {old.token}, {new.token} with it; allocate new ones"):
            execute(request_of(old, new))
        assert compiled.placement() == [("cpu", (0,))]
        assert not counts(compiled)
        old, new = (compiled.allocate(BufferDesc(), *STATE) for _ in range(2))
        assert not old.is_on_device
        old.copy_from(X)
        execute(request_of(old, new)).raise_for_status()
        kit.until(lambda: compiled.placement() == [("reference", (0,))])
        before = counts(compiled)
        execute(request_of(new, old)).raise_for_status()
        assert value_of(old) == (3 * X).tolist()
        old = compiled.allocate(BufferDesc(), *STATE)
        assert old.is_on_device
        execute(request_of(new, old)).raise_for_status()
        assert value_of(old) == (3 * X).tolist()
        assert counts(compiled) == before


def test_buffers_of_a_lost_device_are_refused_here(store, process):
    """While the CPU is in the device's place, a buffer of the dead device is lost there, too, by the same error."""
    with driver.compile(sum_model(), ["reference", "cpu"]) as compiled:
        old, new = (compiled.allocate(BufferDesc(), *STATE) for _ in range(2))
        engine = process(compiled.prepared.device.engine_pid)
        os.kill(engine.pid, signal.SIGKILL)
        assert engine.has_ended()
        compiled.run(X, X)
        with compiled.burst() as burst:
            for execute in (compiled.execute, burst.execute):
                with pytest.raises(BuffersLost, match=f"buffer {old.token} belongs to a device that died"):
                    execute(request_of(old, new))
