"""The litert device around its operations: what it refuses, memory, threads, processes, options."""

import ctypes
import gc
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from operation_cases import REFUSED_BY_ALL, boxes, refused
from sent_models import arrived

import driver
from burst_engine.names import install_command
from driver.errors import ExecutionFailed, OutputInsufficientSize
from driver.nn import Interpreter

pytest.importorskip("ai_edge_litert", reason="needs the extra 'litert'")

from driver.devices.litert import LiteRtDevice, device, library, wheel
from driver.devices.litert.weights import aligned
from driver.devices.lowering.errors import LibraryFailed, LibraryMissing
from driver.interface import BindOptions, Preparation


@pytest.fixture(scope="module")
def litert():
    return LiteRtDevice(threads=1)


def now():
    """No burst wants to run."""


def prepare(litert, model):
    return litert.prepare(model, Preparation())


def memory(array, shift=0):
    """The array in memory that lies `shift` bytes behind a multiple of 64."""
    place = aligned(array.nbytes + shift)[shift:]
    place[:] = array.reshape(-1).view(np.uint8)
    return place.view(array.dtype).reshape(array.shape)


def convolution(net, zero=128, bias_scale=None):
    x = net.x(1, 4, 4, 2)
    weights, bias = net.filter(3, 1, 1, 2, zero=zero)
    if bias_scale:
        bias = net.builder.constant(np.zeros(3, np.int32), scale=bias_scale)
    return net.run("CONV_2D", x, weights, bias, 1, 1, 1, 0, scale=0.3)


def huge(net):
    net.builder.output(net.builder.operation("ABS", net.builder.input("float32", (2**15, 2**14))))
    return net


REFUSED = [
    *REFUSED_BY_ALL,
    refused("alpha", "f", lambda m: m.run("ELU", m.x(2, 3), 0.5)),
    refused("integer division", "i", lambda m: m.run("DIV", m.x(3), m.x(3), 0)),
    refused("far scales", "q", lambda m: m.run("ADD", m.x(3, scale=3.0), m.x(3, scale=0.001), 0, scale=3.0)),
    refused("broadcast input", "f", lambda m: m.run("PRELU", m.x(1, 3), m.x(2, 3))),
    refused("bias in other steps", "q", lambda m: convolution(m, bias_scale=0.5)),
    refused("padded average", "q", lambda m: m.run("AVERAGE_POOL_2D", m.x(1, 4, 4, 1), 1, 0, 1, 0, 1, 1, 2, 2, 0)),
    refused("more than TFLite counts", "f", huge),
    refused("nothing but constants", "f", lambda m: m.run("TILE", m.constant(2, 3), np.array([1, 2], np.int32))),
    refused("rough positions", "f", lambda m: m.run("RESIZE_NEAREST_NEIGHBOR", m.x(1, 5, 5, 1), 9, 65536, False)),
    refused("no kernel", "f", lambda m: m.run("AXIS_ALIGNED_BBOX_TRANSFORM", *boxes(m))),
]


@pytest.mark.parametrize(("letter", "build"), REFUSED)
def test_refuses(litert, net, letter, build):
    """What TFLite would not compute exactly as the reference does is not claimed."""
    assert litert.supported_operations(build(net(letter)).model) == [False]


def test_each_operation_by_itself(litert):
    """An operation is claimed when it can be lowered, whatever stands before it."""
    builder = driver.ModelBuilder()
    x = builder.operation("ADD", builder.input("float32", (2, 3)), 1.0 + np.zeros(3, np.float32), 0)
    halves = builder.operation("ELU", x, 0.5)
    builder.output(builder.operation("EXP", halves))
    assert litert.supported_operations(builder.build()) == [True, False, True]


@pytest.mark.parametrize("make", ["conv_model", "quantised_model"])
def test_networks(litert, kit, make):
    """Several operations after each other, with data in other forms in between, agree with the reference."""
    model = getattr(kit, make)()
    assert all(litert.supported_operations(model))
    operand = model.main.operands[model.main.inputs[0]]
    raw = np.random.default_rng(3).integers(0, 255, operand.dimensions, np.uint8)
    x = memory(raw if operand.type.is_quantised else (raw / 64 - 2).astype(np.float32))
    expected = Interpreter(model).bind([x])
    expected.run()
    found = aligned(expected.results[0].array.nbytes)
    prepare(litert, model).bind([x], [found], BindOptions()).run()
    want = expected.results[0].array
    np.testing.assert_allclose(found.view(want.dtype).reshape(want.shape), want, atol=1e-5 if want.dtype == "f4" else 1)


def residual(net):
    """Two convolutions with many scales, added up, and pooled."""
    builder, x = net.builder, net.x(1, 8, 8, 4)
    like = {"scale": 0.1, "zero_point": 130}
    a = builder.operation("CONV_2D", x, *net.filter(4, 3, 3, 4, channel=0), 1, 1, 1, 1, **like)
    b = builder.operation("CONV_2D", a, *net.filter(4, 1, 1, 4, channel=0), 1, 1, 1, 0, **like)
    builder.output(builder.operation("AVERAGE_POOL_2D", builder.operation("ADD", a, b, 0, **like), 1, 2, 2, 2, 2, 0))
    return net


def test_the_sign_changes_once(litert, net):
    """Bytes get a sign where the model begins, and lose it where it ends: two operations, not two for each convolution.
    One step of difference may become two on the way.
    """
    found = residual(net("q"))
    prepared = prepare(litert, found.model)
    assert prepared.operations().count("QUANTIZE") == 2
    expected = Interpreter(found.model).bind(found.feeds)
    expected.run()
    result = aligned(64)
    prepared.bind([memory(x) for x in found.feeds], [result], BindOptions()).run()
    assert np.abs(result.astype(int) - expected.results[0].array.reshape(-1)).max() <= 2


@pytest.mark.parametrize("shifts", [(0, 0, 0), (4, 0, 0), (0, 8, 16), (60, 63 & ~3, 4)])
def test_memory_anywhere(litert, kit, shifts):
    """Memory off the 64-byte grid is copied, counted, and gives the same result; the rest is used in place."""
    builder = driver.ModelBuilder()
    x, y = builder.input("float32", (2, 5)), builder.input("float32", (2, 5))
    builder.output(builder.operation("SUB", x, y, 0))
    arrays = [
        memory(np.arange(n, n + 10, dtype=np.float32).reshape(2, 5) ** 2, s)
        for n, s in zip((9, 3), shifts[:2], strict=True)
    ]
    result = aligned(200)[shifts[2] :]
    result[:] = 7
    bound = prepare(litert, builder.build()).bind(arrays, [result], BindOptions())
    assert bound.copied_bytes == 40 * sum(shift > 0 for shift in shifts)
    for step in range(3):
        arrays[0] += step
        bound.run()
        assert np.array_equal(result[:40].view(np.float32).reshape(2, 5), arrays[0] - arrays[1])
    assert (result[40:] == 7).all()


def test_too_small_an_output(litert, kit):
    """An output that is too short is told with the shape it needs, and nothing is written."""
    short = aligned(12)
    short[:] = 7
    bound = prepare(litert, kit.add_model()).bind([np.zeros((1, 4), np.float32)], [short], BindOptions())
    assert bound.shapes == (((1, 4), False),)
    with pytest.raises(OutputInsufficientSize, match=r"output 0 needs dimensions \[1, 4\]"):
        bound.run()
    assert (short == 7).all()
    assert getattr(bound, "native", None) is None


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((1, 5), np.float32),
        np.zeros(4, np.float32),
        np.zeros((1, 4), np.float16),
        np.zeros((1, 8), np.float32)[:, ::2],
    ],
)
def test_wrong_arrays(litert, kit, array):
    """An array that is not one of the model's input is named."""
    with pytest.raises(ValueError, match="input 0"):
        prepare(litert, kit.add_model()).bind([array], [aligned(64)], BindOptions())


def test_dimensions_left_open(litert, kit):
    """A model for any number of rows is compiled for each number that comes."""
    model, found = kit.open_model(), aligned(16 * 9)
    assert litert.supported_operations(model) == [True]
    prepared = prepare(litert, model)
    for rows in (1, 9, 3, 1):
        x = memory(np.arange(rows * 4, dtype=np.float32).reshape(rows, 4))
        bound = prepared.bind([x], [found], BindOptions())
        bound.run()
        assert bound.shapes == (((rows, 4), True),)
        assert np.array_equal(found[: x.nbytes].view(np.float32).reshape(rows, 4), x + 1)


def test_shapes_that_do_not_fit(litert):
    """Shapes that the operation cannot serve fail where they are bound, and name it."""
    builder = driver.ModelBuilder()
    x, y = builder.input("float32", (0, 4)), builder.input("float32", (0, 4))
    builder.output(builder.operation("ADD", x, y, 0))
    a, b = np.zeros((2, 4), np.float32), np.zeros((3, 4), np.float32)
    with pytest.raises(ExecutionFailed, match="ADD"):
        prepare(litert, builder.build()).bind([a, b], [aligned(64)], BindOptions())


def gather_model():
    builder = driver.ModelBuilder()
    x = builder.input("float32", (3, 2))
    builder.output(builder.operation("GATHER", x, 0, builder.input("int32", (4,))))
    return builder.build()


def test_indices_are_private(litert):
    """Indices are copied before they are checked, as their client could change them meanwhile; bad ones fail."""
    x, result = memory(np.arange(6, dtype=np.float32).reshape(3, 2)), aligned(32)
    indices = memory(np.array([2, 0, 1, 2], np.int32))
    bound = prepare(litert, gather_model()).bind([x, indices], [result], BindOptions())
    assert bound.copied_bytes == indices.nbytes
    bound.run()
    assert np.array_equal(result.view(np.float32).reshape(4, 2), x[indices])
    for bad in (3, -1, 2**31 - 1):
        indices[1] = bad
        with pytest.raises(ExecutionFailed, match="LiteRT's status 3"):
            bound.run()
    indices[1] = 1
    bound.run()
    assert np.array_equal(result.view(np.float32).reshape(4, 2), x[indices])


def test_indices_of_indices(litert):
    """Indices that an operation rearranged may lie where the client's do, so these are copied, too."""
    builder = driver.ModelBuilder()
    x, rows = builder.input("float32", (3, 2)), builder.input("int32", (2, 2))
    builder.output(builder.operation("GATHER", x, 0, builder.operation("EXPAND_DIMS", rows, 0)))
    model = builder.build()
    x, rows, result = memory(np.eye(3, 2, dtype=np.float32)), memory(np.array([[2, 1], [0, 1]], np.int32)), aligned(32)
    bound = prepare(litert, model).bind([x, rows], [result], BindOptions())
    bound.run()
    assert bound.copied_bytes == rows.nbytes
    assert np.array_equal(result.view(np.float32).reshape(1, 2, 2, 2), x[rows][None])


def test_native(litert, kit):
    """The C function does what `run` does, and says GENERAL_FAILURE when the library fails."""
    x, result = memory(np.ones((1, 4), np.float32)), aligned(16)
    bound = prepare(litert, kit.add_model(constant=2.0)).bind([x], [result], BindOptions())
    function, context = bound.native
    execute = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(function)
    assert execute(context) == 0
    assert result.view(np.float32).tolist() == [3.0] * 4
    failing = prepare(litert, gather_model()).bind(
        [np.zeros((3, 2), np.float32), np.full(4, 9, np.int32)], [aligned(32)], BindOptions()
    )
    assert execute(failing.native[1]) == 2


def test_weights_stay_where_they_are(litert, kit):
    """Weights of a model that came in sealed memory are not copied, and outlive the model; private ones are copied."""
    builder = driver.ModelBuilder()
    random = np.random.default_rng(4)
    x, weights = builder.input("float32", (1, 200)), random.standard_normal((500, 200), np.float32)
    builder.output(builder.operation("FULLY_CONNECTED", x, weights, np.zeros(500, np.float32), 0))
    model = builder.build()
    sent = arrived(model)
    private, shared = prepare(litert, model), prepare(litert, sent)
    assert private.copied_weights > weights.nbytes
    assert shared.copied_weights < 10_000
    del sent
    x, found, expected = memory(random.standard_normal((1, 200), np.float32)), aligned(2000), aligned(2000)
    for prepared, result in ((private, expected), (shared, found)):
        prepared.bind([x], [result], BindOptions()).run()
    assert np.array_equal(found, expected)
    np.testing.assert_allclose(found.view(np.float32), (weights @ x[0]), atol=1e-3)


def test_weights_are_unmapped(litert, kit):
    """A prepared model that is gone leaves no mapping of its weights behind."""
    sent = arrived(kit.conv_model())
    before = _mappings()
    for _ in range(20):
        prepare(litert, sent)
    assert _mappings() - before < 10


def _mappings():
    gc.collect()
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_missing_library(monkeypatch):
    """Without the wheel, or with another version of it, the error says what to install."""
    monkeypatch.setattr(library, "library", library.library.__wrapped__)
    for found in ("2.2.0", "none"):
        monkeypatch.setattr(wheel, "version_of", lambda _, found=found: found)
        with pytest.raises(
            LibraryMissing,
            match=r"needs ai-edge-litert 2\.3\.0, and .* is installed; " + re.escape(install_command("litert")),
        ):
            library.library()


def test_self_test(monkeypatch):
    """A library that computes something else is found out before it computes for anybody."""
    monkeypatch.setattr(device, "np", _OneMore())
    with pytest.raises(LibraryFailed, match="self test"):
        device._self_test.__wrapped__()


class _OneMore:
    """numpy, with ones that are twos."""

    def __getattr__(self, name):
        return (lambda *args: 1 + np.ones(*args)) if name == "ones" else getattr(np, name)


def test_options(monkeypatch, tmp_path):
    """The number of threads comes from the caller, else from the configuration, else from the size of the model."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(device.os, "cpu_count", lambda: 6)
    found = LiteRtDevice()
    assert [found.threads_for(work) for work in (0, device.LARGE - 1, device.LARGE)] == [1, 1, 3]
    for processors, threads in ((1, 1), (2, 2), (4, 2), (64, 4)):
        monkeypatch.setattr(device.os, "cpu_count", lambda count=processors: count)
        assert found.threads_for(device.LARGE) == threads
    assert LiteRtDevice(threads=2).threads_for(0) == 2
    file = tmp_path / ".config/burst/litert.toml"
    file.parent.mkdir(parents=True)
    file.write_text("threads = 5\n")
    assert LiteRtDevice().threads_for(0) == 5
    for bad in ("threads = 0", "threads = 'many'", "threads ="):
        file.write_text(bad)
        with pytest.raises(ValueError, match=r"litert\.toml"):
            LiteRtDevice()


def test_two_threads(kit):
    """More threads give the same result."""
    x = memory(np.random.default_rng(1).standard_normal((1, 8, 8, 3), np.float32))
    results = []
    for threads in (1, 2):
        found = aligned(20)
        prepare(LiteRtDevice(threads=threads), kit.conv_model()).bind([x], [found], BindOptions()).run()
        results.append(found.view(np.float32))
    np.testing.assert_allclose(*results, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 512, 2048, 4), (1, 1080, 1920, 4)])
def test_memory_that_ends_with_its_page(shape):
    """A pooling whose kernel reads some bytes beyond its input runs on memory with nothing of ours behind it."""
    m = driver.ModelBuilder()
    m.output(m.operation("MAX_POOL_2D", m.input("quant8_asymm", shape, scale=1.0, zero_point=0), 1, 2, 2, 2, 2, 0))
    with driver.connect("litert") as device, device.prepare(m.build()) as prepared, prepared.burst() as burst:
        burst.inputs[0][...] = 7
        assert (burst.run().outputs[0] == 7).all()


def test_lines_of_info_stay_off_standard_error():
    """LiteRT tells of its first delegate, which is no error; what else it says is there."""
    program = (
        "import os\nfrom driver.devices.litert import LiteRtDevice\nLiteRtDevice()\n"
        "from driver.devices.litert.quiet import without_info_lines\n"
        "with without_info_lines():\n    os.write(2, b'INFO: made\\nERROR: broken\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "ERROR: broken\n")
