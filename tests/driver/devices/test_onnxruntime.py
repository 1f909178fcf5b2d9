"""The onnxruntime device around its operations: what it refuses, memory, threads, processes, options."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from operation_cases import REFUSED_BY_ALL, boxes, refused
from sent_models import arrived, sent

import driver
from burst import Memory
from burst_engine.names import install_command
from driver.errors import ExecutionFailed, OutputInsufficientSize
from driver.nn import Interpreter

pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")

from driver.devices.lowering.errors import LibraryFailed, LibraryMissing
from driver.devices.onnxruntime import OnnxRuntimeDevice, device, library, writer
from driver.formats.protobuf import ProtoWriter
from driver.interface import BindOptions, Preparation, Saved
from driver.protocol.model_codec import decode, sealed


@pytest.fixture(scope="module")
def onnxruntime():
    return OnnxRuntimeDevice(threads=1)


def now():
    """No burst wants to run."""


def prepare(onnxruntime, model):
    return onnxruntime.prepare(model, Preparation())


def bias_in_other_steps(net):
    x, weights = net.x(1, 4, 4, 2), net.filter(3, 1, 1, 2)[0]
    bias = net.builder.constant(np.zeros(3, np.int32), scale=0.5)
    return net.run("CONV_2D", x, weights, bias, 1, 1, 1, 0, scale=0.3)


REFUSED = [
    *REFUSED_BY_ALL,
    refused("negative alpha", "f", lambda m: m.run("ELU", m.x(2, 3), -0.5)),
    refused("steep alpha", "f", lambda m: m.run("ELU", m.x(2, 3), 1e6)),
    refused("far scales", "q", lambda m: m.run("ADD", m.x(3, scale=300.0), m.x(3), 0, scale=0.001)),
    refused("bias in other steps", "q", bias_in_other_steps),
    refused("no operation", "f", lambda m: m.run("AXIS_ALIGNED_BBOX_TRANSFORM", *boxes(m))),
]


@pytest.mark.parametrize(("letter", "build"), REFUSED)
def test_refuses(onnxruntime, net, letter, build):
    """What ONNX Runtime would not compute as the reference does is not claimed."""
    assert onnxruntime.supported_operations(build(net(letter)).model) == [False]


def test_each_operation_by_itself(onnxruntime):
    """An operation is claimed when it can be lowered, whatever stands before it."""
    builder = driver.ModelBuilder()
    x = builder.operation("ADD", builder.input("float32", (2, 3)), 1.0 + np.zeros(3, np.float32), 0)
    builder.output(builder.operation("EXP", builder.operation("ELU", x, -0.5)))
    assert onnxruntime.supported_operations(builder.build()) == [True, False, True]


@pytest.mark.parametrize("make", ["conv_model", "quantised_model"])
def test_networks(onnxruntime, kit, make):
    """Several operations after each other, with data in other forms in between, agree with the reference."""
    model = getattr(kit, make)()
    assert all(onnxruntime.supported_operations(model))
    operand = model.main.operands[model.main.inputs[0]]
    raw = np.random.default_rng(3).integers(0, 255, operand.dimensions, np.uint8)
    x = raw if operand.type.is_quantised else (raw / 64 - 2).astype(np.float32)
    expected = Interpreter(model).bind([x])
    expected.run()
    want = expected.results[0].array
    found = np.empty(want.nbytes, np.uint8)
    prepare(onnxruntime, model).bind([x], [found], BindOptions()).run()
    tolerance = {"rtol": 5 * 2**-23, "atol": 1e-5} if want.dtype == np.float32 else {"atol": 1}
    np.testing.assert_allclose(found.view(want.dtype).reshape(want.shape), want, **tolerance)


def test_layouts_change_once(onnxruntime, net):
    """Channels move to the front where images begin, and back where they end, whatever lies in between."""
    found = net("f")
    builder, x = found.builder, found.x(1, 8, 8, 4)
    for _ in range(3):
        x = builder.operation("CONV_2D", x, *found.filter(4, 3, 3, 4), 1, 1, 1, 1)
        x = builder.operation("MAX_POOL_2D", x, 1, 1, 1, 2, 2, 0)
    builder.output(x)
    assert prepare(onnxruntime, found.model).operations().count("Transpose") == 2


def test_a_choice_between_forms(onnxruntime, net):
    """float16 that an operation computed is float32 still, and that from outside is not: SELECT takes both."""
    found = net("h")
    chosen, a, b = found.x(2, 3, letter="b"), found.x(2, 3), found.x(2, 3)
    found.builder.output(found.builder.operation("SELECT", chosen, found.builder.operation("ABS", a), b))
    result = np.zeros(12, np.uint8)
    prepare(onnxruntime, found.model).bind(found.feeds, [result], BindOptions()).run()
    truth, a, b = found.feeds
    assert np.array_equal(result.view(np.float16).reshape(2, 3), np.where(truth, abs(a), b))


def test_in_place(onnxruntime, kit):
    """What lies on the grid of its elements is used where it lies, and what comes after it is not touched."""
    block = np.zeros(64, np.uint8)
    for shift in (0, 4, 20):
        x, result = np.arange(4, dtype=np.float32).reshape(1, 4), block[shift:]
        block[:] = 7
        bound = prepare(onnxruntime, kit.add_model()).bind([x], [result], BindOptions())
        for step in range(3):
            x += step
            bound.run()
            assert np.array_equal(result[:16].view(np.float32), x[0] + 1)
        assert bound.copied_bytes == 0
        assert (result[16:] == 7).all()
        assert (block[:shift] == 7).all()


def test_off_the_grid(onnxruntime, kit):
    """Memory at odd addresses is copied, and counted."""
    raw, result = np.zeros(17, np.uint8)[1:], np.zeros(17, np.uint8)[1:]
    x = raw.view(np.float32).reshape(1, 4)
    x[...] = 3
    bound = prepare(onnxruntime, kit.add_model()).bind([x], [result], BindOptions())
    assert bound.copied_bytes == 32
    bound.run()
    assert result.view(np.float32).tolist() == [4.0] * 4


def test_too_small_an_output(onnxruntime, kit):
    """An output that is too short is told with the shape it needs, and nothing is written."""
    short = np.full(12, 7, np.uint8)
    bound = prepare(onnxruntime, kit.add_model()).bind([np.zeros((1, 4), np.float32)], [short], BindOptions())
    assert bound.shapes == (((1, 4), False),)
    with pytest.raises(OutputInsufficientSize, match=r"output 0 needs dimensions \[1, 4\]"):
        bound.run()
    assert (short == 7).all()


@pytest.mark.parametrize("array", [np.zeros((1, 5), np.float32), np.zeros((1, 8), np.float32)[:, ::2]])
def test_wrong_arrays(onnxruntime, kit, array):
    """An array that is not one of the model's input is named."""
    with pytest.raises(ValueError, match="input 0"):
        prepare(onnxruntime, kit.add_model()).bind([array], [np.zeros(64, np.uint8)], BindOptions())


def test_dimensions_left_open(onnxruntime, kit):
    """A model for any number of rows is compiled for each number that comes."""
    model, found = kit.open_model(), np.zeros(16 * 9, np.uint8)
    assert onnxruntime.supported_operations(model) == [True]
    prepared = prepare(onnxruntime, model)
    for rows in (1, 9, 3, 1):
        x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
        bound = prepared.bind([x], [found], BindOptions())
        bound.run()
        assert bound.shapes == (((rows, 4), True),)
        assert np.array_equal(found[: x.nbytes].view(np.float32).reshape(rows, 4), x + 1)


def test_shapes_that_do_not_fit(onnxruntime):
    """Shapes that the operation cannot serve fail where they are bound, and name it."""
    builder = driver.ModelBuilder()
    x, y = builder.input("float32", (0, 4)), builder.input("float32", (0, 4))
    builder.output(builder.operation("ADD", x, y, 0))
    a, b = np.zeros((2, 4), np.float32), np.zeros((3, 4), np.float32)
    with pytest.raises(ExecutionFailed, match="ADD"):
        prepare(onnxruntime, builder.build()).bind([a, b], [np.zeros(64, np.uint8)], BindOptions())


def test_indices(onnxruntime):
    """Indices out of range, below 0 too, fail the execution and not the next one."""
    builder = driver.ModelBuilder()
    builder.output(builder.operation("GATHER", builder.input("float32", (3, 2)), 0, builder.input("int32", (4,))))
    x, result = np.arange(6, dtype=np.float32).reshape(3, 2), np.zeros(32, np.uint8)
    indices = np.array([2, 0, 1, 2], np.int32)
    bound = prepare(onnxruntime, builder.build()).bind([x, indices], [result], BindOptions())
    for bad in (3, -1, -3, 2**31 - 1, -(2**31)):
        indices[1] = bad
        with pytest.raises(ExecutionFailed, match="Gather"):
            bound.run()
    indices[1] = 1
    bound.run()
    assert np.array_equal(result.view(np.float32).reshape(4, 2), x[indices])


@pytest.mark.parametrize("found", ["none", "1.19.2", "0.5"])
def test_missing_library(monkeypatch, found):
    """Without the wheel, or with too old a version of it, the error says what to install."""
    monkeypatch.setattr(library, "library", library.library.__wrapped__)
    monkeypatch.setattr(library, "version_of", lambda _: found)
    with pytest.raises(
        LibraryMissing,
        match=r"needs onnxruntime 1\.20 or later, and .* is installed; " + re.escape(install_command("onnxruntime")),
    ):
        library.library()


def test_self_test(monkeypatch):
    """Where sums of bytes come out too small, that is found out before anything is computed for anybody."""
    device.self_test.__wrapped__()
    real = device._extreme_products
    monkeypatch.setattr(device, "_extreme_products", lambda *a: (None, real(*a)[1] - 12))
    with pytest.raises(LibraryFailed, match="self test"):
        device.self_test.__wrapped__()


def test_a_model_that_it_refuses():
    """What ONNX Runtime says about a model that it cannot take is in the error."""
    graph = writer.OrtWriter()
    (result,) = graph.node("NoSuchOperation", [])
    with pytest.raises(LibraryFailed, match="NoSuchOperation"):
        library.Session(writer.model(graph.graph([], [(result, "FLOAT")])))


def test_weights_are_no_part_of_the_message(onnxruntime, monkeypatch):
    """ONNX Runtime reads large weights where they lie, not in the message."""
    written = []
    monkeypatch.setattr(ProtoWriter, "joined", lambda m: written.append(m.nbytes) or b"".join(m._chunks))
    builder, random = driver.ModelBuilder(), np.random.default_rng(4)
    x, weights = builder.input("float32", (1, 200)), random.standard_normal((500, 200), np.float32)
    builder.output(builder.operation("FULLY_CONNECTED", x, weights, np.zeros(500, np.float32), 0))
    prepared = prepare(onnxruntime, arrived(builder.build()))
    assert written[0] < 1000
    x, found = random.standard_normal((1, 200), np.float32), np.zeros(2000, np.uint8)
    prepared.bind([x], [found], BindOptions()).run()
    np.testing.assert_allclose(found.view(np.float32), weights @ x[0], atol=1e-3)


@pytest.mark.parametrize("operator", ["Add", "MatMul", "Transpose"])
@pytest.mark.parametrize("is_optimised", [False, True], ids=["optimises", "optimised"])
def test_weights_of_sessions(operator, is_optimised):
    """A session that optimises copies its weights, whose memory may go. One that does not reads in place what its
    kernels have not packed.
    """
    graph, weights, data = writer.OrtWriter(), np.ones((64, 64), np.float32), np.eye(64, dtype=np.float32)
    name = graph.constant(weights)
    given = graph.weights[0][1]
    if operator == "Transpose":  # which optimisers move, so that the weights are other ones
        (name,) = graph.node("Add", [*graph.node("Transpose", ["x"], perm=[1, 0]), name])
    inputs = [name] if operator == "Transpose" else ["x", name]
    (result,) = graph.node(operator, inputs, **({"perm": [1, 0]} if operator == "Transpose" else {}))
    message = writer.model(graph.graph([("x", "FLOAT", (64, 64))], [(result, "FLOAT")]))
    session = library.Session(message, [(n, a.copy()) for n, a in graph.weights])
    options = library.session_options(1)
    if is_optimised:
        options.graph_optimization_level = library.library().GraphOptimizationLevel.ORT_DISABLE_ALL
    place = [graph.weights[0][0]] if is_optimised else []
    other = library.Session(message, graph.weights, options=options, in_place=place)
    given[:] = 7
    first, second = (run.session.run(None, {"x": data})[0] for run in (session, other))
    is_in_place = is_optimised and operator != "MatMul"
    np.testing.assert_array_equal(second - first, np.full((64, 64), 6.0 * is_in_place, np.float32))


def restored(onnxruntime, model):
    """The model as a cache has it, twice: of its second restoring what the first one has kept."""
    fds, where = sent(model)
    region = sealed(fds, where)
    model, root = decode(region, where), region.asarray()
    found = prepare(onnxruntime, model)
    for _ in range(2):
        kept = Saved(*([np.frombuffer(part, np.uint8) for part in side] for side in found.saved(root)))
        found = onnxruntime.restore(model, kept, root, Preparation())
        yield found


@pytest.mark.parametrize("make", ["conv_model", "quantised_model"])
def test_a_restored_model_is_not_optimised_again(onnxruntime, kit, make):
    """What is kept is what ONNX Runtime has made of it: the session is made as it is, and gives the same bits."""
    model = getattr(kit, make)()
    operand = model.main.operands[model.main.inputs[0]]
    raw = np.random.default_rng(3).integers(0, 255, operand.dimensions, np.uint8)
    x = raw if operand.type.is_quantised else (raw / 64 - 2).astype(np.float32)

    def computed(prepared):
        found = np.zeros(4096, np.uint8)
        prepared.bind([x], [found], BindOptions()).run()
        return found.tobytes()

    wanted = computed(prepare(onnxruntime, arrived(model)))
    none = library.library().GraphOptimizationLevel.ORT_DISABLE_ALL
    for found in restored(onnxruntime, model):
        assert found.only_program.session.session.get_session_options().graph_optimization_level == none
        assert computed(found) == wanted


def test_a_table_is_restored_in_place(onnxruntime):
    """A model with a table to be read in place is kept as it was lowered: an optimised one would carry the table."""
    builder, table = driver.ModelBuilder(), np.arange(2**14, dtype=np.float32).reshape(2**6, 2**8)
    rows = builder.constant(table, by_reference=True)
    builder.output(builder.operation("EMBEDDING_LOOKUP", builder.input("int32", (1,)), rows))
    for found in restored(onnxruntime, builder.build()):
        assert not found.only_program.is_optimised
        row = np.zeros(2**10, np.uint8)
        found.bind([np.ones(1, np.int32)], [row], BindOptions()).run()
        assert row.tobytes() == table[1].tobytes()


def test_a_table_is_not_copied(onnxruntime):
    """The library reads a table of 64 MB where it lies; nothing of its size stays in private memory."""

    def private():
        return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

    def first_row(table):
        builder = driver.ModelBuilder()
        rows = builder.constant(table.asarray(np.float32, (table.nbytes // 2**12, 2**10)), by_reference=True)
        builder.output(builder.operation("EMBEDDING_LOOKUP", builder.input("int32", (1,)), rows))
        sent = arrived(builder.build())
        before = private()
        prepared = prepare(onnxruntime, sent)
        found = np.zeros(2**12, np.uint8)
        prepared.bind([np.ones(1, np.int32)], [found], BindOptions()).run()
        return private() - before, found.view(np.float32)

    def filled(nbytes):
        return Memory.frozen_by(nbytes, lambda room: room.view(np.float32).fill(3))

    first_row(filled(2**16))  # what the library takes for itself, once
    grown, found = first_row(filled(2**26))
    assert grown < 30
    assert (found == 3).all()


def test_options(monkeypatch, tmp_path):
    """The number of threads comes from the caller, else from the configuration, else from the size of the model."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(device.os, "cpu_count", lambda: 6)
    found = OnnxRuntimeDevice()
    assert [found.threads_for(work) for work in (0, device.LARGE - 1, device.LARGE)] == [1, 1, 3]
    assert OnnxRuntimeDevice(threads=2).threads_for(0) == 2
    file = tmp_path / ".config/burst/onnxruntime.toml"
    file.parent.mkdir(parents=True)
    file.write_text("threads = 5\n")
    assert OnnxRuntimeDevice().threads_for(0) == 5
    for bad in ("threads = 0", "threads = 'many'", "threads =", "provider = 'cuda'"):
        file.write_text(bad)
        with pytest.raises(ValueError, match=r"onnxruntime\.toml"):
            OnnxRuntimeDevice()


def test_two_threads(kit):
    """More threads give the same result."""
    x = np.random.default_rng(1).standard_normal((1, 8, 8, 3), np.float32)
    results = []
    for threads in (1, 2):
        found = np.zeros(20, np.uint8)
        prepare(OnnxRuntimeDevice(threads=threads), kit.conv_model()).bind([x], [found], BindOptions()).run()
        results.append(found.view(np.float32))
    np.testing.assert_allclose(*results, atol=1e-6)


@pytest.mark.integration
def test_nothing_is_reported_to_anybody(tmp_path):
    """ONNX Runtime collects no telemetry in a device: it leaves no file that it would send."""
    code = "from driver.devices.onnxruntime.library import library; library()"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "HOME": str(tmp_path)}, check=True)
    assert list(tmp_path.rglob("*")) == []
