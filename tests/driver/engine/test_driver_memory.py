"""Buffers that a driver allocates in a layout of its own: what is called, when they end, and what bad drivers cost.

The device is a DSP (burst_test_devices.heap) whose buffers hold their elements in reverse order.
"""

import json
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import stress
from request_ways import executes
from small_models import sum_model

import driver
from burst import (
    GeneralFailure,
    InvalidArgument,
    Memory,
    Request,
    RequestArgument,
    ResourceExhaustedTransient,
    StatusError,
)
from driver import BufferDesc, BufferRole
from driver.engine.driver_execution import DriverExecution
from driver.interface import BoundExecution

X = np.array([[1, 2, 3, 4]], np.float32)
DSP = "burst_test_devices.heap:Dsp"
TROUBLED = "burst_test_devices.heap:Troubled"
BOTH = [BufferRole(0, 0), BufferRole(0, 1, 0.5)], [BufferRole(0, 0, 0.25)]


def heard(place, *whats):
    """What the device was told, of these kinds or of all."""
    path = Path(place.path, "heard")
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if not whats or line["what"] in whats]


def numbers(place, what):
    return [line["buffer"] for line in heard(place, what)]


@pytest.fixture
def prepared(place):
    """x + y on a DSP of this test's own."""
    with driver.connect(DSP) as device, device.prepare(sum_model()) as found:
        yield found


def buffers_of(prepared, count=2, roles=BOTH):
    return [prepared.device.allocate(BufferDesc(), [prepared], *roles) for _ in range(count)]


def doubling(source, target):
    """target = source + source."""
    return Request((RequestArgument(),) * 2, (RequestArgument(pool=1),), (source, target))


class TestAllocated:
    """What a client and the driver see of the driver's buffers."""

    def test_the_driver_is_told(self, prepared, place):
        """Type, dimensions and roles of each buffer."""
        buffers_of(prepared, 1)
        (said,) = heard(place, "allocate")
        assert said["type"] == "TENSOR_FLOAT32"
        assert said["dimensions"] == [1, 4]
        assert said["roles"] == [[True, 0, 1.0], [True, 1, 0.5], [False, 0, 0.25]]

    def test_values_go_in_and_out(self, prepared, place):
        """Of arrays and of memory, by the driver's own methods."""
        (a,) = buffers_of(prepared, 1)
        a.copy_from(X)
        a.copy_to(found := np.empty_like(X))
        assert found.tolist() == X.tolist()
        memory = Memory.create(16)
        memory.asarray(np.float32)[:] = [5, 6, 7, 8]
        a.copy_from(memory)
        a.copy_to(found)
        assert found.tolist() == [[5, 6, 7, 8]]
        assert numbers(place, "copy_from") == numbers(place, "copy_to") == [1, 1]

    def test_values_go_from_one_to_another(self, prepared, place):
        """Through memory of the engine, as each layout is the driver's."""
        a, b = buffers_of(prepared)
        a.copy_from(X)
        b.copy_from(a)
        b.copy_to(found := np.empty_like(X))
        assert found.tolist() == X.tolist()
        assert numbers(place, "copy_to") == [1, 2]

    @pytest.mark.parametrize("way", ["plain", "async", "fenced", "burst"])
    def test_an_execution_uses_them(self, prepared, place, way):
        """On each way, beside memory of the client; they have no value before, and none is copied."""
        a, b = buffers_of(prepared)
        burst = prepared.burst()
        execute = executes(prepared, burst)[way]
        assert execute(doubling(a, b)).status == GeneralFailure.status
        a.copy_from(X)
        for _ in range(3):
            assert execute(doubling(a, b)).status == 0
        memory = Memory.create(32)
        memory.asarray(np.float32, 4)[:] = 100
        request = Request(
            (RequestArgument(pool=1), RequestArgument(length=16)),
            (RequestArgument(offset=16, length=16),),
            (memory, b),
        )
        assert execute(request).outputs[0].tolist() == [[102, 104, 106, 108]]
        assert burst.stats()["copied_bytes"]["bulk"] == 0
        assert len(numbers(place, "copy_from")) == 1
        assert not numbers(place, "copy_to")
        burst.close()

    def test_a_chain_copies_nothing(self, prepared, place):
        """Forty executions by turns, fenced and in a burst, each on the result of the one before: 0 bytes copied."""
        a, b = buffers_of(prepared)
        a.copy_from(np.ones((1, 4), np.float32))
        with prepared.burst() as burst:
            for n in range(10):
                first = prepared.execute_fenced(doubling(a, b))
                second = prepared.execute_fenced(doubling(b, a), wait_for=[first.fence])
                assert second.result().status == 0, n
                assert first.result().status == 0
            for n in range(10):
                assert burst.execute(doubling(a, b)).status == 0, n
                assert burst.execute(doubling(b, a)).status == 0
            a.copy_to(found := np.empty_like(X))
            assert found.tolist() == [[2.0**40] * 4]
            assert burst.stats()["copied_bytes"]["bulk"] == 0
        assert (numbers(place, "copy_from"), numbers(place, "copy_to")) == ([1], [1])

    def test_an_open_one_is_the_engines(self, place):
        """A buffer of open dimensions is not the driver's: it grows with what is written."""
        with driver.connect(DSP) as device, device.prepare(sum_model((0, 4))) as prepared:
            (a,) = buffers_of(prepared, 1)
            a.copy_from(X)
            a.copy_to(found := np.empty_like(X))
            assert found.tolist() == X.tolist()
            assert not heard(place, "allocate")

    def test_one_whose_client_fixes_it_is_the_drivers(self, place):
        """The description may fix what the model leaves open."""
        with driver.connect(DSP) as device, device.prepare(sum_model((0, 4))) as prepared:
            a, b = (device.allocate(BufferDesc((1, 4)), [prepared], *BOTH) for _ in range(2))
            a.copy_from(X)
            for _ in range(2):
                assert prepared.execute(doubling(a, b)).status == 0
            b.copy_to(found := np.empty_like(X))
            assert found.tolist() == (X + X).tolist()
            assert [line["dimensions"] for line in heard(place, "allocate")] == [[1, 4]] * 2

    def test_a_burst_needs_no_python(self, prepared, place):
        """The listener calls the driver's C function on them: Python executes at most the first request."""
        a, b = buffers_of(prepared)
        a.copy_from(X)
        with prepared.burst() as burst:
            for _ in range(20):
                assert burst.execute(doubling(a, b)).status == 0
        assert len(heard(place, "run")) <= 1


class TestEnds:
    """A buffer is closed exactly once, after what was bound to it."""

    def test_released(self, prepared, place, kit):
        """When the client closes it: first the executions on it are dropped, of the plain path and of a burst."""
        a, b = buffers_of(prepared)
        a.copy_from(X)
        with prepared.burst() as burst:
            for execute in (prepared.execute, burst.execute):
                assert execute(doubling(a, b)).status == 0
            a.close()
            kit.until(lambda: numbers(place, "close"))
            found = [line["what"] for line in heard(place, "unbind", "close") if 1 in (line.get("buffers") or [1])]
            assert found == ["unbind", "unbind", "close"]
            b.close()
        kit.until(lambda: len(numbers(place, "close")) == 2)
        assert numbers(place, "close") == [1, 2]

    def test_dropped(self, prepared, place, kit):
        """When its last reference is dropped in the client."""
        buffers_of(prepared, 1)
        kit.until(lambda: numbers(place, "close") == [1])

    @pytest.mark.parametrize("clients", [1, pytest.param(stress.times(60), marks=pytest.mark.stress)])
    def test_killed(self, prepared, place, kit, clients):
        """When the client is killed while it holds buffers, with executions bound to them in a burst."""
        program = f"""
import sys, driver, numpy as np
from burst import Request, RequestArgument
from driver import BufferDesc, BufferRole
from driver.interface import BoundExecution
m = driver.ModelBuilder(); x, y = (m.input("float32", (1, 4)) for _ in range(2)); m.output(m.operation("ADD", x, y, 0))
prepared = driver.connect({DSP!r}).prepare(m.build())
roles = [BufferRole(0, 0), BufferRole(0, 1)], [BufferRole(0, 0)]
a, b = (prepared.device.allocate(BufferDesc(), [prepared], *roles) for _ in range(2))
a.copy_from(np.ones((1, 4), np.float32))
burst = prepared.burst()
request = Request((RequestArgument(),) * 2, (RequestArgument(pool=1),), (a, b))
assert burst.execute(request).status == prepared.execute(request).status == 0
print("ready", flush=True); sys.stdin.read()
"""
        for _ in range(clients):
            with kit.python(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
                assert client.stdout.readline() == "ready\n"
                client.kill()
                client.wait()
        kit.until(lambda: len(numbers(place, "close")) == 2 * clients)
        assert sorted(numbers(place, "close")) == list(range(1, 2 * clients + 1))
        (a,) = buffers_of(prepared, 1)
        a.copy_from(X)

    def test_disconnected(self, place, kit):
        """When the client closes its connection."""
        with driver.connect(DSP):  # keeps the device alive
            with driver.connect(DSP) as device, device.prepare(sum_model()) as prepared:
                kept = buffers_of(prepared)
            kit.until(lambda: sorted(numbers(place, "close")) == [1, 2])
            del kept


class Recorded(BoundExecution):
    """An execution that notes what is done with it, and when it is gone."""

    shapes, native = [((1,), True)], (1, 2)

    def __init__(self, calls):
        self.calls = calls
        self.launch = calls.append

    def run(self):
        self.calls.append("run")

    def failure(self, status):
        return status

    def cancel(self):
        self.calls.append("cancel")

    def __del__(self):
        self.calls.append("dropped")


class Held:
    """A buffer that notes when it is gone."""

    def __init__(self, calls):
        self.calls = calls

    def __del__(self):
        self.calls.append("freed")


def test_an_execution_without_parts_is_the_drivers():
    """Its methods are called directly."""
    bound = Recorded([])
    execution = DriverExecution(bound)
    assert (execution.run, execution.launch, execution.native) == (bound.run, bound.launch, (1, 2))


@pytest.mark.parametrize("way", ["execution", "run", "launch"])
def test_what_is_bound_to_buffers_is_dropped_before_they_are(way):
    """However long the engine keeps one of its methods."""
    calls = []
    execution = DriverExecution(Recorded(calls), [Held(calls)])
    kept = execution if way == "execution" else getattr(execution, way)
    execution.run()
    execution.launch("launch")
    execution.cancel()
    assert (execution.failure(5), execution.shapes, execution.native) == (5, (((1,), True),), (1, 2))
    del execution
    assert calls == ["run", "launch", "cancel"]
    del kept
    assert calls == ["run", "launch", "cancel", "dropped", "freed"]


def test_runs_that_are_counted_take_place_in_python():
    """C code would not count."""
    calls = []
    execution = DriverExecution(Recorded(calls), count=lambda: calls.append("counted"))
    execution.run()
    assert (execution.native, execution.launch, calls) == (None, None, ["run", "counted"])


@pytest.fixture
def troubled(place, configure):
    """x + y on a driver that has trouble when told so; it may take 0.3 s for what it does."""
    configure(driver_seconds=0.3, client_bytes=2**20)
    with driver.connect(TROUBLED) as device, device.prepare(sum_model()) as prepared:
        yield prepared


@contextmanager
def trouble(place, what):
    path = Path(place.path, "trouble")
    path.write_text(what)
    yield
    path.unlink()


class TestTrouble:
    """A driver that fails is named; its client gets an error, and others go on."""

    REFUSED = {  # noqa: RUF012
        "allocate hangs": (GeneralFailure, "the driver dsp has not returned from allocate for 0.3 s"),
        "allocate raises": (GeneralFailure, "the driver dsp failed in allocate: OSError: the heap is on fire"),
        "allocate raises ValueError": (
            InvalidArgument,
            "the driver dsp refuses allocate: the heap takes no such thing",
        ),
        "allocate refuses": (driver.ResourceExhaustedTransient, "the driver dsp refuses allocate: the heap is full"),
        "allocate returns nonsense": (GeneralFailure, "the driver dsp returns 42 from allocate"),
        "nbytes -1": (GeneralFailure, "the driver dsp says nbytes=-1"),
        'nbytes "many"': (GeneralFailure, "the driver dsp says nbytes='many'"),
        "nbytes 1.5": (GeneralFailure, "the driver dsp says nbytes=1.5"),
        f"nbytes {2**70}": (GeneralFailure, f"the driver dsp says nbytes={2**70}"),
        f"nbytes {2**62}": (driver.ResourceExhaustedPersistent, f"the driver dsp says nbytes={2**62}"),
    }

    @pytest.mark.parametrize("what", REFUSED)
    def test_an_allocation(self, troubled, place, what, kit):
        """It gets an error that names the driver. What the driver made is closed; afterwards all is well."""
        kind, words = self.REFUSED[what]
        with trouble(place, what), pytest.raises(kind, match=f".*{words}"):
            buffers_of(troubled, 1)
        made = numbers(place, "allocate")
        kit.until(lambda: numbers(place, "close") == made)
        if what != "allocate hangs":
            (a,) = buffers_of(troubled, 1)
            a.copy_from(X)

    def test_an_allocation_that_hangs_hinders_no_execution(self, troubled, place):
        """Buffers cannot be had any more, and that is said at once enough; executions go on, also of new clients."""
        with trouble(place, "allocate hangs"), pytest.raises(GeneralFailure):
            buffers_of(troubled, 1)
        with driver.connect(TROUBLED) as other, other.prepare(sum_model()) as prepared:
            with pytest.raises(GeneralFailure, match="the driver dsp has not returned from allocate"):
                buffers_of(prepared, 1)
            assert prepared.run(X, X)[0].tolist() == (X + X).tolist()
        assert troubled.run(X, X)[0].tolist() == (X + X).tolist()

    def test_a_late_buffer_is_closed(self, troubled, place, kit):
        """An allocation that returns after its client was refused leaves nothing, and buffers can be had again."""
        os.mkfifo(Path(place.path, "go on"))  # the device itself may not make one
        with trouble(place, "allocate is late"), pytest.raises(GeneralFailure, match="has not returned from allocate"):
            buffers_of(troubled, 1)
        Path(place.path, "go on").write_bytes(b"")
        kit.until(lambda: numbers(place, "close") == [1])
        buffers_of(troubled, 1)

    def test_the_engines_memory_is_used_for_none(self, troubled, place):
        """A driver may leave a buffer to the engine, and binds to arrays then."""
        with trouble(place, "allocate returns None"):
            a, b = buffers_of(troubled)
        a.copy_from(X)
        assert troubled.execute(doubling(a, b)).status == 0
        assert not heard(place, "allocate", "copy_from")

    @pytest.mark.parametrize("how", ["raises", "hangs"])
    def test_copying_in(self, troubled, place, how):
        """It gets an error that names the driver, and the buffer has no value then. Others copy and execute."""
        a, b = buffers_of(troubled)
        a.copy_from(X)
        with trouble(place, f"copy_from {how}"), pytest.raises(GeneralFailure, match=r"the driver dsp .* copy_from"):
            a.copy_from(X)
        assert troubled.execute(doubling(a, b)).status == GeneralFailure.status
        b.copy_from(X)
        with driver.connect(TROUBLED) as other, other.prepare(sum_model()) as prepared:
            (c,) = buffers_of(prepared, 1)
            c.copy_from(X)
        if how == "hangs":
            with pytest.raises(GeneralFailure, match="has not returned from copy_from of this buffer yet"):
                a.copy_from(X)
        else:
            a.copy_from(X)

    @pytest.mark.parametrize("how", ["raises", "hangs"])
    def test_copying_out(self, troubled, place, how):
        """It gets an error that names the driver; the value stays, for executions at least."""
        a, b = buffers_of(troubled)
        a.copy_from(X)
        with trouble(place, f"copy_to {how}"), pytest.raises(GeneralFailure, match=r"the driver dsp .* copy_to"):
            a.copy_to(np.empty_like(X))
        assert troubled.execute(doubling(a, b)).status == 0
        b.copy_to(found := np.empty_like(X))
        assert found.tolist() == (X + X).tolist()

    def test_closing(self, troubled, place, kit):
        """An error there is logged, and what was charged is given back."""
        with trouble(place, f"nbytes {2**19}"):
            a = buffers_of(troubled, 1)[0]
            with pytest.raises(StatusError):
                buffers_of(troubled, 2)
        with trouble(place, "close raises"):
            a.close()
            kit.until(lambda: 1 in numbers(place, "close"))
        with trouble(place, f"nbytes {2**19}"):
            buffers_of(troubled, 1)


def test_a_stream_whose_state_grows(configure):
    """It counts for what the client may hold: the step that would exceed it fails, and the client goes on."""
    path = configure(client_bytes=2**21)
    builder = driver.ModelBuilder()
    x = builder.input("float32", (0,))
    builder.output(builder.operation("CONCATENATION", x, x, 0))
    with driver.connect("reference") as device, device.prepare(builder.build()) as prepared, prepared.burst() as burst:
        stream = burst.stream_results([np.ones(1, np.float32)], feedback={"output_0": "input_0"}, most=100)
        said = f"of the {2**21} that a client may use.*client_bytes.*{path}"
        with pytest.raises(ResourceExhaustedTransient, match=said):
            sum(1 for _ in stream)
        assert prepared.run(np.ones(1, np.float32))[0].tolist() == [1, 1]
