"""State that grows on onnxruntime: values and shapes as in process, bound once, bounded, and nobody else's."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from onnx_files import file_model, written
from request_ways import executes

import driver
from burst import (
    GeneralFailure,
    InvalidArgument,
    Memory,
    OutputInsufficientSize,
    Request,
    RequestArgument,
    ResourceExhaustedPersistent,
    ResourceExhaustedTransient,
)
from burst.wire import Token
from driver import BufferDesc, BufferRole
from driver.client.remote_executor import RemoteExecutor

ort = pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")

from driver.devices.onnxruntime import OnnxRuntimeDevice  # noqa: E402 (it may be missing)
from driver.devices.onnxruntime.file_model import OnnxFileModel  # noqa: E402
from driver.engine.binding import execution  # noqa: E402
from driver.engine.device_memory import BufferTerms, LoadedModel, ManagedBuffers  # noqa: E402
from driver.engine.driver_memory import DriverCalls, DriverMemory  # noqa: E402
from driver.engine.models import SharedModel  # noqa: E402
from driver.engine.quota import Quota  # noqa: E402
from driver.interface import Preparation  # noqa: E402
from driver.nn import arena  # noqa: E402

node = helper.make_node
ROLES = [BufferRole(0, 0)], [BufferRole(0, 0)]
ROW = 8


def appending(dtype="float32"):
    """present = past with a row x behind it, and last = x."""
    nodes = [node("Concat", ["past", "x"], ["present"], axis=0), node("Identity", ["x"], ["last"])]
    sides = [("past", dtype, ["n", ROW]), ("x", dtype, [1, ROW])]
    return written(nodes, sides, [("present", dtype, ["m", ROW]), ("last", dtype, [1, ROW])])


def requests(old, new, x, last, dimensions=()):
    """From one buffer to the other."""
    inputs = RequestArgument(pool=2, dimensions=dimensions), RequestArgument(length=x.nbytes)
    return Request(inputs, (RequestArgument(pool=3), RequestArgument(pool=1, length=last.nbytes)), (x, last, old, new))


class Stepper:
    """A state in two buffers that take turns, and how a step is executed."""

    def __init__(self, prepared, dtype="float32"):
        self.dtype = np.dtype(dtype)
        nbytes = ROW * self.dtype.itemsize
        self.x, self.last = Memory.create(nbytes), Memory.create(nbytes)
        self.old, self.new = (prepared.device.allocate(BufferDesc(), [prepared], *ROLES) for _ in range(2))

    def step(self, execute, row, **more):
        self.x.asarray(self.dtype)[:] = row
        execute(requests(self.old, self.new, self.x, self.last, **more)).raise_for_status()
        self.old, self.new = self.new, self.old

    def state(self, buffer=None):
        buffer = buffer or self.old
        found = np.zeros(buffer.dimensions, self.dtype)
        buffer.copy_to(found)
        return found


@pytest.mark.parametrize("way", ["burst", "plain", "async"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool"])
def test_it_is_what_it_is_in_process(connect, dtype, way):
    """After each of twenty steps that append a row: the same shape and bits as ONNX Runtime's own."""
    data = appending(dtype)
    session, expected = ort.InferenceSession(data), np.zeros((1, ROW), dtype)
    with connect("onnxruntime").prepare(file_model(data)) as prepared, prepared.burst() as burst:
        stepper, execute = Stepper(prepared, dtype), executes(prepared, burst)[way]
        stepper.old.copy_from(expected)
        for n in range(20):
            row = np.arange(n, n + ROW).astype(dtype)
            expected, last = session.run(None, {"past": expected, "x": row[None]})
            stepper.step(execute, row)
            assert stepper.old.dimensions == expected.shape == (n + 2, ROW)
            assert stepper.state().tobytes() == expected.tobytes()
            assert stepper.last.asarray(np.dtype(dtype)).tobytes() == last.tobytes()


def test_a_state_begins_empty(connect):
    """A value without rows is a value."""
    with connect("onnxruntime").prepare(file_model(appending())) as prepared:
        stepper = Stepper(prepared)
        with pytest.raises(InvalidArgument, match="contradict"):
            stepper.old.copy_from(np.zeros((0, ROW), np.float32))
        with pytest.raises(GeneralFailure, match="has no value"):
            stepper.step(prepared.execute, 1)


def test_two_sequences_from_one_prefix(connect):
    """A copy of a state goes its own way: what is appended to one is not in the other."""
    with connect("onnxruntime").prepare(file_model(appending())) as prepared:
        one, other = Stepper(prepared), Stepper(prepared)
        one.old.copy_from(np.zeros((1, ROW), np.float32))
        one.step(prepared.execute, 1)
        other.old.copy_from(one.old)
        one.step(prepared.execute, 2)
        other.step(prepared.execute, 3)
        assert one.state()[:, 0].tolist() == [0, 1, 2]
        assert other.state()[:, 0].tolist() == [0, 1, 3]


def test_another_sequence_in_the_same_buffers(connect):
    """A shorter value replaces a longer one, of any step."""
    with connect("onnxruntime").prepare(file_model(appending())) as prepared, prepared.burst() as burst:
        stepper = Stepper(prepared)
        for first in range(3):
            stepper.old.copy_from(np.full((1, ROW), first, np.float32))
            for n in range(10, 15 + first):
                stepper.step(burst.execute, n)
            assert stepper.state()[:, 0].tolist() == [first, *range(10, 15 + first)]


def test_dimensions_that_a_request_gives_hold_in_each_run(connect):
    """The same request is right for one value and wrong for the next; then what it should have written is gone."""
    with connect("onnxruntime").prepare(file_model(appending())) as prepared, prepared.burst() as burst:
        for execute in (burst.execute, prepared.execute):
            stepper = Stepper(prepared)
            stepper.old.copy_from(np.zeros((1, ROW), np.float32))
            stepper.step(execute, 1, dimensions=(1, ROW))
            with pytest.raises(InvalidArgument, match=r"input 0: dimensions \[1, 8\] contradict the buffer's \[2, 8\]"):
                stepper.step(execute, 2, dimensions=(1, ROW))
            assert stepper.old.has_value
            assert not stepper.new.has_value
            stepper.step(execute, 3)
            assert stepper.state()[:, 0].tolist() == [0, 1, 3]


def test_a_failed_run_leaves_the_state_as_it_was(connect):
    """A division by zero, say: what was read is there still, what should have been written has no value."""
    nodes = [node("Gather", ["past", "at"], ["row"]), node("Concat", ["past", "row"], ["present"], axis=0)]
    data = written(nodes, [("past", "float32", ["n", ROW]), ("at", "int64", [1])], [("present", "float32", ["m", ROW])])
    with connect("onnxruntime").prepare(file_model(data)) as prepared:
        old, new = (prepared.device.allocate(BufferDesc(), [prepared], *ROLES) for _ in range(2))
        old.copy_from(np.zeros((2, ROW), np.float32))
        at = Memory.create(8)
        request = Request(
            (RequestArgument(pool=1), RequestArgument(length=8)), (RequestArgument(pool=2),), (at, old, new)
        )
        at.asarray(np.int64)[:] = 5
        with pytest.raises(GeneralFailure, match="Gather"):
            prepared.execute(request).raise_for_status()
        assert (old.has_value, new.has_value) == (True, False)
        at.asarray(np.int64)[:] = 1
        prepared.execute(request).raise_for_status()
        assert new.dimensions == (3, ROW)


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
@pytest.mark.parametrize("offset", [0, 1], ids=["", "not aligned"])
def test_an_output_that_is_an_input_is_copied(connect, dtype, offset):
    """The client may write to its memory afterwards, and run again: a buffer keeps the value that it got."""
    kind, rows = np.dtype(dtype), [("x", dtype, ["n"])]
    data = written([node("Identity", ["x"], ["y"])], rows, [*rows, ("y", dtype, ["n"])])
    with connect("onnxruntime").prepare(file_model(data)) as prepared:
        first, second = (prepared.device.allocate(BufferDesc(), [prepared], [], [BufferRole(0, 0)]) for _ in range(2))
        memory, nbytes = Memory.create(128), 4 * kind.itemsize
        inputs = (RequestArgument(offset=offset, length=nbytes, dimensions=(4,)),)
        outputs = RequestArgument(pool=1), RequestArgument(offset=64, length=nbytes)
        for buffer, value in ((first, 1), (second, 0)):
            memory.asarray()[offset : offset + nbytes] = np.full(4, value, kind).view(np.uint8)
            prepared.execute(Request(inputs, outputs, (memory, buffer))).raise_for_status()
        memory.asarray()[:] = 9
        for buffer, value in ((first, 1), (second, 0)):
            found = np.zeros(4, kind)
            buffer.copy_to(found)
            assert found.tolist() == [value] * 4


@pytest.fixture
def thread():
    """What binds a request here has its client charged for all that this thread allocates from then on."""
    before = arena.source.get(), arena.on_accelerator.get()
    yield
    arena.source.set(before[0])
    arena.on_accelerator.set(before[1])


class InProcess:
    """The engine's side in this process."""

    def __init__(self, most, room=4 * ROW, given=()):
        """`room`: bytes of the output in memory. `given`: the dimensions of that in a buffer, as the request has it."""
        device, model = OnnxRuntimeDevice(), file_model(appending())
        self.quota = Quota(most)
        self.loaded = LoadedModel(1, SharedModel(None, None, model, device.prepare(model, Preparation())), 1)
        self.buffers = ManagedBuffers(self.quota, DriverMemory(device, 10.0))
        self.x, self.last = Memory.create(4 * ROW), Memory.create(room)
        roles = [[0, 0, 1.0]], [[0, 0, 1.0]]
        self.pair = self.buffers.allocate_all([BufferTerms((), [self.loaded], *roles)] * 2)
        turns = [self.pair, self.pair[::-1]]
        self.runs = [execution(self.loaded, self._request(turn, given), self.buffers, lambda: None) for turn in turns]
        first = Memory.create(4 * ROW)
        self.pair[0].copy_from(first, (1, ROW))

    def _request(self, turn, given):
        tokens = [Token(buffer.token) for buffer in turn]
        found = requests(*tokens, self.x, self.last)
        state, last = found.outputs
        return found._replace(outputs=(state._replace(dimensions=given), last), pools=(self.x, self.last, *tokens))

    def run(self, steps):
        """Each step appends a row."""
        for n in range(steps):
            self.runs[n % 2].run()


def test_it_is_bound_once(monkeypatch, thread):
    """A hundred shapes, one `bind` for each of the two requests."""
    bound = []
    bind = OnnxFileModel.bind
    monkeypatch.setattr(OnnxFileModel, "bind", lambda *arguments: bound.append(1) or bind(*arguments))
    engine = InProcess(1 << 20)
    engine.run(100)
    assert engine.pair[0].known == (101, ROW)
    assert len(bound) == 2


def test_many_are_allocated_by_one_call_of_the_driver(monkeypatch, thread):
    """All of them, or none: what precedes a buffer that cannot be is given back."""
    engine, calls = InProcess(1 << 20), []
    whole = DriverCalls.__call__
    monkeypatch.setattr(
        DriverCalls,
        "__call__",
        lambda its, method, *more, **by: calls.append(method) or whole(its, method, *more, **by),
    )
    terms = BufferTerms((), [engine.loaded], [[0, 0, 1.0]], [[0, 0, 1.0]], in_place=True)
    assert len({buffer.token for buffer in engine.buffers.allocate_all([terms] * 20)}) == 20
    assert calls == ["allocate_growing"]
    before = engine.quota.taken, engine.quota.held
    with pytest.raises(InvalidArgument, match="io_index=7"):
        engine.buffers.allocate_all([terms, terms._replace(inputs=[[0, 7, 1.0]])])
    assert (engine.quota.taken, engine.quota.held) == before


def test_it_is_charged_as_it_grows_and_ends_at_the_limit(thread):
    """Beyond what the client may have the run is refused, with the figures; the state is there, and charges go back."""
    engine = InProcess(1 << 16)
    with pytest.raises(ResourceExhaustedTransient, match="65536"):
        engine.run(3000)
    rows = max(buffer.known[0] for buffer in engine.pair if buffer.has_value)
    assert (1 << 14) < rows * ROW * 4 < (1 << 16)
    assert sum(buffer.has_value for buffer in engine.pair) == 1
    assert engine.quota.taken <= 1 << 16
    for buffer in engine.pair:
        engine.buffers.release(buffer.token)
    engine.runs.clear()
    assert engine.quota.taken == 0


def test_a_value_that_is_lost(thread):
    """A buffer that was freed by another thread just now: the run fails, and the process lives."""
    engine = InProcess(1 << 20)
    engine.pair[0].held.buffer.drop()
    with pytest.raises(GeneralFailure, match="a buffer that it reads has lost its value"):
        engine.run(1)


@pytest.mark.parametrize(
    ("fault", "error"),
    [({"room": 4}, OutputInsufficientSize), ({"given": (7, ROW)}, GeneralFailure)],
    ids=["no room in memory", "another shape than the request says"],
)
def test_a_failed_run_keeps_no_memory(thread, fault, error):
    """What it computed is charged to nobody, and so is not kept; the state that it read is."""
    engine = InProcess(1 << 20, **fault)
    before = engine.quota.taken
    with pytest.raises(error):
        engine.run(1)
    assert [buffer.held.buffer.nbytes for buffer in engine.pair] == [4 * ROW, 0]
    assert engine.quota.taken <= before
    assert [buffer.has_value for buffer in engine.pair] == [True, False]


def telling(dtype="float32"):
    """present = past with a row x behind it, and all = present."""
    nodes = [node("Concat", ["past", "x"], ["present"], axis=0), node("Identity", ["present"], ["all"])]
    sides = [("past", dtype, ["n", ROW]), ("x", dtype, [1, ROW])]
    return written(nodes, sides, [("present", dtype, ["m", ROW]), ("all", dtype, ["m", ROW])])


class TestStreams:
    """A state that grows in a stream of results."""

    FIRST = {"past": np.zeros((1, ROW), np.float32), "x": np.arange(ROW, dtype=np.float32)[None]}  # noqa: RUF012

    def test_it_is_what_it_is_in_process(self, connect):
        """The state after forty steps, which has not come to the client, and each result."""
        data, first = appending(), self.FIRST
        session, past = ort.InferenceSession(data), first["past"]
        with connect("onnxruntime").prepare(file_model(data)) as prepared, prepared.burst(depth=3) as burst:
            stream = burst.stream_results(first, feedback={"present": "past"}, most=40)
            for result in stream:
                past, last = session.run(None, first | {"past": past})
                assert np.array_equal(result.outputs["last"], last)
                assert result.outputs["present"].size == 0
            found = np.zeros(stream.state["past"].dimensions, np.float32)
            stream.state["past"].copy_to(found)
        assert np.array_equal(found, past)

    def test_one_request_for_all_steps(self, connect, monkeypatch):
        """Steps after the first one are the same request where results have nothing: the engine binds it once. All
        buffers were allocated by one call.
        """
        nodes = [node("Concat", [f"past{n}", "x"], [f"present{n}"], axis=0) for n in range(5)]
        sides = [*((f"past{n}", "float32", ["n", ROW]) for n in range(5)), ("x", "float32", [1, ROW])]
        data = written(nodes, sides, [(f"present{n}", "float32", ["m", ROW]) for n in range(5)])
        first = {f"past{n}": np.zeros((1, ROW), np.float32) for n in range(5)} | {"x": self.FIRST["x"]}
        asked, opened, whole = [], [], RemoteExecutor.open_stream
        monkeypatch.setattr(
            RemoteExecutor, "open_stream", lambda its, *more: opened.append(more[0]) or whole(its, *more)
        )
        with connect("onnxruntime").prepare(file_model(data)) as prepared, prepared.burst(depth=8) as burst:
            connection, call = prepared.device.connection, prepared.device.connection.call
            monkeypatch.setattr(
                connection, "call", lambda word, *more, **by: asked.append(word) or call(word, *more, **by)
            )
            stream = burst.stream_results(first, feedback={f"present{n}": f"past{n}" for n in range(5)}, most=9)
            assert len([0 for _ in stream]) == 9
            assert stream.state["past4"].dimensions == (10, ROW)
        assert asked[:1] == ["allocate_all"]
        assert not {"allocate", "allocate_all"}.intersection(asked[1:])
        assert len(set(opened[0])) == 1

    def test_results_that_grow(self, connect):
        """A result that outgrows its memory: the stream goes on in larger memory, and no step is lost or repeated."""
        data, first = telling(), self.FIRST
        session, past = ort.InferenceSession(data), first["past"]
        with connect("onnxruntime").prepare(file_model(data)) as prepared, prepared.burst(depth=3) as burst:
            count = 0
            for result in burst.stream_results(first, feedback={"present": "past"}, most=40):
                past, _ = session.run(None, first | {"past": past})
                assert np.array_equal(result.outputs["all"], past)
                count += 1
        assert count == 40

    def test_what_is_told_and_fed_keeps_its_shape(self, connect):
        """Such an output lies in memory, where the next step expects its shape: another one is the end."""
        said = pytest.raises(GeneralFailure, match="the request gives dimensions")
        with connect("onnxruntime").prepare(file_model(appending())) as prepared, prepared.burst() as burst, said:
            list(burst.stream_results(self.FIRST, feedback={"present": "past"}, also=["present"]))

    def test_a_state_without_end(self, place):
        """The step for which there is no room fails with the limit; the device, and the client's next stream, go on."""
        path = Path(f"{place.path}-home/.config/burst/limits.toml")
        path.parent.mkdir(parents=True)
        path.write_text("client_bytes = 4_000_000")
        nodes = [node("Concat", ["past", "past"], ["present"], axis=0), node("Identity", ["x"], ["last"])]
        sides = [("past", "float32", ["n", ROW]), ("x", "float32", [1, ROW])]
        data = written(nodes, sides, [("present", "float32", ["m", ROW]), ("last", "float32", [1, ROW])])
        with contextlib.ExitStack() as stack:
            device = stack.enter_context(driver.connect("onnxruntime"))
            prepared = stack.enter_context(device.prepare(file_model(data)))
            burst = stack.enter_context(prepared.burst())
            with pytest.raises(ResourceExhaustedPersistent, match="4000000"):  # it alone is too large
                list(map(bool, burst.stream_results(self.FIRST, feedback={"present": "past"})))
            assert len([0 for _ in burst.stream_results(self.FIRST, feedback={"present": "past"}, most=3)]) == 3


def test_forks(connect):
    """A fork shares the value until one of the two goes on: neither sees what is written to the other."""
    with connect("onnxruntime").prepare(file_model(appending())) as prepared:
        one, other = Stepper(prepared), Stepper(prepared)
        one.old.copy_from(np.zeros((1, ROW), np.float32))
        one.step(prepared.execute, 1)
        other.old = one.old.fork()
        one.step(prepared.execute, 2)
        other.step(prepared.execute, 3)
        fork = one.old.fork()
        one.old.copy_from(np.full((2, ROW), 9, np.float32))
        assert fork.dimensions == (3, ROW)
        assert one.state(fork)[:, 0].tolist() == [0, 1, 2]
        assert other.state()[:, 0].tolist() == [0, 1, 3]


def test_a_state_in_a_file(connect, tmp_path):
    """A value of open size is kept with its size, and goes on from there."""
    with connect("onnxruntime").prepare(file_model(appending())) as prepared:
        one, other = Stepper(prepared), Stepper(prepared)
        one.old.copy_from(np.zeros((1, ROW), np.float32))
        one.step(prepared.execute, 1)
        one.old.save(tmp_path / "state")
        other.old.restore(tmp_path / "state")
        other.step(prepared.execute, 5)
        assert other.state()[:, 0].tolist() == [0, 1, 5]


@pytest.mark.parametrize("way", ["burst", "plain", "async"])
def test_in_place(connect, way):
    """One buffer for the old value and the new one, of which the driver needs no second memory."""
    with connect("onnxruntime").prepare(file_model(appending())) as prepared, prepared.burst() as burst:
        stepper, execute = Stepper(prepared), executes(prepared, burst)[way]
        stepper.old = stepper.new = prepared.device.allocate(BufferDesc(in_place=True), [prepared], *ROLES)
        stepper.old.copy_from(np.zeros((1, ROW), np.float32))
        for n in range(1, 12):
            stepper.step(execute, n)
            assert stepper.state()[:, 0].tolist() == list(range(n + 1))
