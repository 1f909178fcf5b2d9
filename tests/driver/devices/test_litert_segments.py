"""Models in segments: where they are cut, that it changes nothing, and that an execution can be ended between them."""

import gc
import os
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import stress
from hypothesis import HealthCheck, assume, given, seed, settings
from inside import programs_of
from waiting import until

import driver
from driver.errors import ExecutionFailed
from driver.nn import ModelBuilder
from driver.vts.graphs import RandomGraph, disagreement, graphs

pytest.importorskip("ai_edge_litert", reason="needs the extra 'litert'")

from driver.devices.litert import LiteRtDevice, cuts
from driver.devices.litert.weights import aligned
from driver.interface import BindOptions, Preparation

UNIT = cuts.SEGMENT


@pytest.fixture(scope="module")
def litert():
    return LiteRtDevice(threads=1)


@pytest.fixture
def everywhere(monkeypatch):
    """Every operation is a segment of its own."""
    monkeypatch.setattr(cuts, "SEGMENT", 1e-3)


def bind(litert, model, feeds):
    """The program, a binding, and its outputs."""
    prepared = litert.prepare(model, Preparation())
    operands = [model.main.operands[i] for i in model.main.outputs]
    outputs = [aligned(int(np.prod(o.dimensions)) * o.type.element_size) for o in operands]
    bound = prepared.bind(feeds, outputs, BindOptions())
    arrays = [raw.view(o.type.dtype).reshape(o.dimensions) for raw, o in zip(outputs, operands, strict=True)]
    return next(iter(programs_of(prepared).values())), bound, arrays


def check(litert, model, *feeds, level="medium"):
    """Twice in a row it gives what the reference gives. Returns its program."""
    assert all(litert.supported_operations(model))
    program, bound, outputs = bind(litert, model, feeds)
    for _ in range(2):
        for output in outputs:
            output.view(np.uint8)[...] = 7
        bound.run()
        assert disagreement(lambda _: outputs, RandomGraph(model, feeds, level)) is None
    return program


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([UNIT // 2] * 3, []),
        ([UNIT] * 2, [1]),
        ([UNIT // 2] * 8, [2, 4, 6]),
        ([UNIT // 10] * 100, [10 * k for k in range(1, 10)]),
        ([UNIT * 5, 1, 1], []),
        ([1, UNIT * 5, UNIT * 5, 1], [2]),
        ([UNIT * 9], []),
        ([], []),
    ],
)
def test_where_it_is_cut(costs, expected):
    """Segments of about one unit, none of less than half of one; more than one and a half only of one operation."""
    assert cuts.cuts(costs, [0] * len(costs), ()) == expected


def test_cut_where_little_crosses():
    """Within its limits a cut goes where the fewest bytes go on."""
    costs, crossing = [UNIT // 10] * 30, [1000] * 30
    crossing[7], crossing[20] = 1, 2
    assert cuts.cuts(costs, crossing, ()) == [7, 20]


def test_loops_are_alone():
    """What runs a loop is a segment of its own, at the beginning, in the midst and at the end."""
    assert cuts.cuts([1] * 5, [0] * 5, {0, 2, 4}) == [1, 2, 3, 4]
    assert cuts.cuts([1] * 5, [0] * 5, {3}) == [3, 4]


def chain(layers, channels=8, size=8, data=None):
    """Convolutions in a row."""
    m, random = ModelBuilder(), np.random.default_rng(1)
    x = m.input("float32", (1, size, size, channels))
    for _ in range(layers):
        weights = random.standard_normal((channels, 3, 3, channels), np.float32) * np.float32(
            0.5 / np.sqrt(channels * 9)
        )
        x = m.operation("CONV_2D", x, weights, np.zeros(channels, np.float32), 1, 1, 1, 1)
    m.output(x)
    return m.build()


def test_one_segment(litert, kit):
    """A small model is one segment, with nothing between."""
    program = check(litert, chain(3), np.ones((1, 8, 8, 8), np.float32))
    assert len(program.segments) == 1
    assert len(program.between) == 0


def test_segments(litert, monkeypatch):
    """A larger one is cut; what goes from one to the next lies in the same two places all the way."""
    monkeypatch.setattr(cuts, "SEGMENT", 3 * 8 * 8 * 8 * 9 * 8)
    x = np.random.default_rng(2).standard_normal((1, 8, 8, 8), np.float32)
    program = check(litert, chain(24), x)
    assert 6 <= len(program.segments) <= 12
    places = {memory.ctypes.data for _, _, memory in program.between._arrays}
    assert (len(places), len(program.between)) == (2, len(program.segments) - 1)
    assert program.operations == ["CONV_2D"] * 24


def examples(count):
    """`count` graphs, the same in every run."""
    quiet = settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    return lambda test: quiet(seed(count)(given(graphs())(test)))


def check_in_pieces(graph):
    """It has a segment for each operation, and gives what the reference gives."""
    litert = LiteRtDevice(threads=1)
    assume(len(graph.model.main.operations) > 1 and all(litert.supported_operations(graph.model)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "SEGMENT", 1e-3)
        prepared = litert.prepare(graph.model, Preparation())
        shapes = [
            shape
            for shape, _ in prepared.bind(
                graph.feeds, [aligned(0)] * len(graph.model.main.outputs), BindOptions()
            ).shapes
        ]
        types = [graph.model.main.operands[i].type for i in graph.model.main.outputs]
        outputs = [aligned(int(np.prod(shape)) * t.element_size) for shape, t in zip(shapes, types, strict=True)]
        prepared.bind(graph.feeds, outputs, BindOptions()).run()
    assert len(next(iter(programs_of(prepared).values())).segments) == len(graph.model.main.operations)
    arrays = [raw.view(t.dtype).reshape(shape) for raw, t, shape in zip(outputs, types, shapes, strict=True)]
    assert disagreement(lambda _: arrays, graph) is None, graph


@pytest.mark.integration
@examples(25)
def test_random_graphs_in_pieces(graph):
    """Random graphs in as many segments as they have operations."""
    check_in_pieces(graph)


@pytest.mark.stress
@examples(stress.times(3000))
def test_a_great_many_graphs_in_pieces(graph):
    """The same, for long."""
    check_in_pieces(graph)


@pytest.mark.usefixtures("everywhere")
class TestCrossing:
    """What goes from one segment to another."""

    def test_in_another_form(self, litert):
        """Bytes that got a sign in one segment keep it in the next: nothing is converted twice."""
        m, zero = ModelBuilder(), {"scale": 0.05, "zero_point": 128}
        random = np.random.default_rng(1)
        x = m.input("quant8_asymm", (1, 4, 4, 2), **zero)
        for _ in range(3):
            weights = m.constant(random.integers(0, 256, (2, 3, 3, 2), np.uint8), dtype="quant8_asymm", **zero)
            bias = m.constant(np.zeros(2, np.int32), scale=float(np.float32(0.05) * np.float32(0.05)))
            x = m.operation("CONV_2D", x, weights, bias, 1, 1, 1, 0, **zero)
        m.output(x)
        program = check(litert, m.build(), random.integers(0, 256, (1, 4, 4, 2), np.uint8))
        assert program.operations == ["QUANTIZE", *["CONV_2D"] * 3, "QUANTIZE"]
        assert len(program.segments) == 3

    def test_in_another_layout(self, litert):
        """Images whose channels come first cross with their channels last."""
        m, random = ModelBuilder(), np.random.default_rng(1)
        x = m.input("float32", (1, 2, 4, 4))
        for _ in range(3):
            weights = random.standard_normal((2, 3, 3, 2), np.float32)
            x = m.operation("CONV_2D", x, weights, np.zeros(2, np.float32), 1, 1, 1, 0, True, 1, 1)
        m.output(x)
        program = check(litert, m.build(), random.standard_normal((1, 2, 4, 4), np.float32))
        assert program.operations == ["TRANSPOSE", *["CONV_2D"] * 3, "TRANSPOSE"]

    def test_what_clients_get(self, litert):
        """An output that later segments read, and an input that only the last one does."""
        m = ModelBuilder()
        x, y = m.input("float32", (4,)), m.input("float32", (4,))
        one = m.operation("MUL", x, x, 0)
        two = m.operation("NEG", one)
        m.output(one, two, m.operation("ADD", m.operation("MUL", one, two, 0), y, 0))
        program = check(litert, m.build(), np.arange(4, dtype=np.float32), np.ones(4, np.float32))
        assert len(program.segments) == 4
        assert [port.copied for port in program.outputs] == [False] * 3

    def test_indices_that_clients_get(self, litert):
        """An output by which a later segment finds elements is written to private memory, and copied in the end."""
        m = ModelBuilder()
        x, rows = m.input("float32", (3, 2)), m.input("int32", (2,))
        rows = m.operation("ADD", rows, np.ones(2, np.int32), 0)
        m.output(rows, m.operation("GATHER", x, 0, m.operation("EXPAND_DIMS", rows, 0)))
        feeds = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([1, 0], np.int32)
        program = check(litert, m.build(), *feeds)
        assert [port.copied for port in program.outputs] == [True, False]

    def test_shared_constants(self, litert):
        """Weights that several segments use are there once."""
        m, x = ModelBuilder(), None
        weights = m.constant(np.ones((64, 64), np.float32) / 64)
        x = m.input("float32", (1, 64))
        for _ in range(4):
            x = m.operation("FULLY_CONNECTED", x, weights, np.zeros(64, np.float32), 0)
        m.output(x)
        program = check(litert, m.build(), np.ones((1, 64), np.float32))
        assert len(program.segments) == 4
        assert program.copied_weights < 2 * 64 * 64 * 4

    def test_failure_in_the_midst(self, litert):
        """What fails in one segment ends the run with the library's word."""
        m = ModelBuilder()
        x, rows = m.input("float32", (3, 2)), m.input("int32", (2,))
        m.output(m.operation("NEG", m.operation("GATHER", m.operation("ABS", x), 0, rows)))
        feeds = np.ones((3, 2), np.float32), np.array([9, 0], np.int32)
        _, bound, (found,) = bind(litert, m.build(), feeds)
        with pytest.raises(ExecutionFailed, match="LiteRT's status 3"):
            bound.run()
        feeds[1][:] = 2, 1
        bound.run()
        assert (found == -1).all()

    def test_threads(self, litert):
        """Threads that run one model at the same time share what lies between its segments, and take turns."""
        model, wrong = chain(6), []
        prepared = litert.prepare(model, Preparation())

        def work(number):
            x = np.random.default_rng(number).standard_normal((1, 8, 8, 8), np.float32)
            outputs = [aligned(x.nbytes) for _ in range(2)]
            bounds = [prepared.bind([x], [output], BindOptions()) for output in outputs]
            bounds[0].run()
            for _ in range(100):
                bounds[1].run()
                if not np.array_equal(*outputs):
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def long_chain(layers=40):
    """Convolutions of 116 million products each, in one flatbuffer."""
    m, random = ModelBuilder(), np.random.default_rng(1)
    weights = m.constant(random.standard_normal((128, 3, 3, 128), np.float32) * np.float32(0.03))
    bias = m.constant(np.zeros(128, np.float32))
    x = m.input("float32", (1, 28, 28, 128))
    for _ in range(layers):
        x = m.operation("CONV_2D", x, weights, bias, 1, 1, 1, 1)
    m.output(x)
    return m.build()


IMAGE = (1, 28, 28, 128)


def test_cancelled_between_segments(litert):
    """A long execution that is cancelled soon after it began ends unfinished; what was bound later runs to its end."""
    x, result = image(), aligned(4 * 28 * 28 * 128)
    prepared = litert.prepare(long_chain(), Preparation())
    bound, other = (prepared.bind([x], [result], BindOptions()) for _ in range(2))
    other.run()
    program = next(iter(programs_of(prepared).values()))
    found = []
    thread = threading.Thread(target=lambda: found.append(_failure(bound)))
    thread.start()

    def runs():
        running = program.turn.running
        return running and not running.cancelled and _is(running, bound)

    until(runs)
    bound.cancel()
    thread.join()
    assert "it was cancelled" in found[0]
    other.run()


def _is(context, bound):
    return context == bound._context


def _failure(bound):
    try:
        bound.run()
    except ExecutionFailed as error:
        return str(error)
    return "none"


CLIENT = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1], *map(str, list(Path(sys.argv[1]).parents)[:2])  # this file, and what it imports
import driver
from test_litert_segments import LAYERS, image, long_chain
with driver.connect("litert") as device, device.prepare(long_chain(LAYERS)) as prepared, prepared.burst() as burst:
    run = {"plain": prepared, "burst": burst}[sys.argv[2]].run
    for _ in range(int(sys.argv[3])):
        run(image())
    print("ready", flush=True)
    run(image())
"""
LAYERS = 150


def image():
    return np.ones(IMAGE, np.float32)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("path", "before"),
    [
        ("burst", 0),
        ("plain", 1),
        *(pytest.param(*case, marks=pytest.mark.stress) for case in (("burst", 1), ("plain", 0))),
    ],
)
def test_a_client_that_is_killed(place, kit, path, before):
    """A client dies of kill -9 in the midst of a long execution, its first one or a later one: the device ends that,
    and has let go of the client with much of its work not done.
    """
    model = long_chain(LAYERS)
    with driver.connect("litert") as device, device.prepare(model) as prepared, prepared.burst() as burst:
        burst.run(image())
        begin = processor_time(device.engine_pid)
        prepared.run(image())
        whole = processor_time(device.engine_pid) - begin
        idle = tasks(device.engine_pid)
        arguments = Path(__file__).parent, path, before
        client = kit.python(CLIENT, *arguments, stdout=subprocess.PIPE)
        with client, client.stdout:
            assert client.stdout.readline() == b"ready\n"
            begin = processor_time(device.engine_pid)
            kit.until(lambda: processor_time(device.engine_pid) > begin + whole / 10)
            os.kill(client.pid, signal.SIGKILL)
            begin = processor_time(device.engine_pid)
            kit.until(lambda: tasks(device.engine_pid) <= idle + 2)  # those that watch overdue runs and idle clients
            spent = processor_time(device.engine_pid) - begin
            print(f"{path}: {spent * 1e3:.0f} ms of work after the kill; an execution is {whole * 1e3:.0f} ms")
        assert spent < 0.6 * whole
        prepared.run(image())


def tasks(pid):
    """Threads of a process: each burst and each plain connection has one."""
    return len(os.listdir(f"/proc/{pid}/task"))


def processor_time(pid):
    """Seconds that a process has computed."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.usefixtures("everywhere")
def test_no_garbage(litert, kit):
    """What was prepared, looked at and bound is gone with its last reference: in a device garbage is not collected
    while a burst lives.
    """
    models = [chain(3), kit.quantised_model()]
    for model in models:  # caches fill
        litert.supported_operations(model), litert.prepare(model, Preparation())
    gc.collect()
    gc.disable()
    try:
        for model in models:
            assert all(litert.supported_operations(model))
            prepared = litert.prepare(model, Preparation())
            operand = model.main.operands[model.main.inputs[0]]
            x = np.zeros(operand.dimensions, operand.type.dtype)
            prepared.bind([x], [aligned(10_000)], BindOptions()).run()
            del prepared
        assert gc.collect() == 0
    finally:
        gc.enable()
