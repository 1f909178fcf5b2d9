"""Model files on a third runtime."""

import contextlib
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_files import DTYPES, file_model, one, written

import driver
from burst import MissedDeadlineTransient
from driver.client import discovery
from driver.deadlines import due
from driver.devices.lowering.errors import LibraryFailed
from driver.devices.openvino import OpenVinoDevice
from driver.errors import ExecutionFailed, OutputInsufficientSize
from driver.interface import BindOptions, Preparation
from driver.nn import Interpreter, InvalidModel
from driver.nn.file_form import ModelFile, model_of_file

if lacks := OpenVinoDevice.missing():  # and no import here: that would report itself to Intel
    pytest.skip(lacks, allow_module_level=True)

FILES = Path(__file__).parents[1] / "importers"
node = helper.make_node


@pytest.fixture(scope="module")
def openvino():
    return OpenVinoDevice()


@pytest.fixture(scope="module")
def name():
    if "openvino" not in {info.name for info in driver.devices()}:
        pytest.skip("its entry point is not installed")
    return "openvino"


def prepared(device, model):
    return device.prepare(model, Preparation())


def bound(model, feeds, room=4096):
    """An execution, and the memory of its outputs."""
    outputs = [np.full(room, 0xA5, np.uint8) for _ in model.outputs]
    return model.bind(feeds, outputs, BindOptions()), outputs


def computed(model, feeds, room=4096):
    """The shapes and bytes of the outputs of one run."""
    execution, outputs = bound(model, feeds, room)
    execution.run()
    sizes = [port.nbytes(shape) for port, (shape, _) in zip(model.outputs, execution.shapes, strict=True)]
    return [(shape, raw[:n]) for (shape, _), raw, n in zip(execution.shapes, outputs, sizes, strict=True)]


def noise(model):
    """Random values for the inputs of a file, by name."""
    random = np.random.default_rng(3)
    shapes = {tensor.name: [1 if size is None else size for size in tensor.shape] for tensor in model.inputs}
    kinds = {tensor.name: tensor.dtype for tensor in model.inputs}
    return {
        name: random.random(shape, np.float32) if kinds[name] == np.float32 else np.ones(shape, kinds[name])
        for name, shape in shapes.items()
    }


REAL = ["onnx_models/encoder.onnx", "onnx_models/gru.onnx", "onnx_models/resnet.onnx", "vendor/detector_float32.tflite"]
REAL += ["vendor/gru_float32.tflite", "vendor/batches_float32.tflite", "vendor/mobilenet_float16.tflite"]


@pytest.mark.integration
@pytest.mark.parametrize("file", REAL)
def test_real_files(openvino, file):
    """Files of floats give what the reference makes of their operations."""
    whole, portable = (driver.load(FILES / file, form=form) for form in ("file", "operations"))
    inputs = noise(whole)
    outputs = computed(prepared(openvino, whole), list(inputs.values()), 1 << 16)
    wanted = [np.empty(shape, np.float32) for shape, _ in outputs]
    given = [array.astype(portable.inputs[n].dtype) for n, array in enumerate(inputs.values())]
    Interpreter(portable).bind(given, [array.reshape(-1).view(np.uint8) for array in wanted]).run()
    for (shape, raw), array in zip(outputs, wanted, strict=True):
        np.testing.assert_allclose(raw.view(array.dtype).reshape(shape), array, rtol=0, atol=1e-4 * np.ptp(array))


def test_a_file_that_is_refused(openvino):
    """OpenVINO's own words say why."""
    with pytest.raises(LibraryFailed, match="No translator found for RELU_N1_TO_1"):
        prepared(openvino, driver.load(FILES / "vendor/shuffler_float32.tflite", form="file"))
    with pytest.raises(LibraryFailed, match=r"(?s)rejected the file.*Sinh2"):
        prepared(openvino, file_model(one("Sinh2", ["float32"], (2,), out=(2,))))


@pytest.mark.integration
@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("shape", [(), (3,), (1, 2, 1, 3, 2, 1), (2, 0, 3)], ids=str)
def test_every_type_of_any_rank(openvino, dtype, shape):
    """Tensors of every type, scalars, empty ones and those of many dimensions go in and out as they are."""
    stored = {"bool": np.uint8, "bfloat16": np.uint16}.get(dtype, dtype)
    x = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(stored) % 2
    model = prepared(openvino, file_model(one("Identity", [dtype], shape, [dtype], shape)))
    assert model.is_static
    ((found, raw),) = computed(model, [x])
    assert (found, raw.tobytes()) == (shape, x.tobytes())


def test_open_sizes(openvino):
    """Each run has its own; where memory does not suffice, the shapes are told."""
    model = prepared(openvino, file_model(one("Neg", ["float32"], ["n", "m"], out=["n", "m"])))
    for shape in ((2, 3), (1, 1), (0, 4)):
        x = np.ones(shape, np.float32)
        ((found, raw),) = computed(model, [x])
        assert (found, raw.tobytes()) == (shape, (-x).tobytes())
    execution, _ = bound(model, [np.ones((20, 20), np.float32)], 64)
    with pytest.raises(OutputInsufficientSize) as caught:
        execution.run()
    assert caught.value.shapes == (((20, 20), False),)


def test_on_the_clients_memory(openvino):
    """Floats are read and written where they lie; what chooses an address, and what overlaps, is copied."""
    model = prepared(openvino, file_model(one("Neg", ["float32"], (4,), out=(4,))))
    assert bound(model, [np.ones(4, np.float32)])[0].copied_bytes == 0
    memory = np.ones(4, np.float32)
    model.bind([memory], [memory.view(np.uint8)], BindOptions()).run()
    assert memory.tolist() == [-1.0] * 4
    model = prepared(openvino, file_model(one("Neg", ["int64"], (4,), ["int64"], (4,))))
    assert bound(model, [np.ones(4, np.int64)])[0].checked_bytes == 64
    model = prepared(openvino, file_model(one("Not", ["bool"], (3,), ["bool"], (3,))))
    ((_, raw),) = computed(model, [np.array([0, 1, 77], np.uint8)])
    assert raw.tolist() == [1, 0, 0]


def elsewhere(place, **more):
    """y = x + w, and w lies in another file."""
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[256], data_location=1)
    for key, value in ({"location": place} | more).items():
        tensor.external_data.add(key=key, value=str(value))
    return written(
        [node("Add", ["x", "w"], ["y"])], [("x", "float32", [256])], [("y", "float32", [256])], {"w": tensor}
    )


def test_weights_in_other_files(openvino):
    """They are those that came along, in folders below the model's, too."""
    weights = np.arange(256, dtype=np.float32)
    beside = {"deep/er/w.bin": np.append(np.zeros(64, np.uint8), weights.view(np.uint8))}
    model = prepared(openvino, file_model(elsewhere("deep/er/w.bin", offset=64, length=1024), beside))
    assert computed(model, [np.zeros(256, np.float32)])[0][1].tobytes() == weights.tobytes()


@pytest.mark.parametrize("place", ["w.bin", "../w.bin", "/etc/hosts", "*/_ORT_MEM_ADDR_/*"])
def test_no_path_of_a_file_is_opened(openvino, place, tmp_path, monkeypatch):
    """Nor is memory read at an address that a file names. Only what came along counts, below the model's folder."""
    (tmp_path / "in").mkdir()
    for folder in (tmp_path, tmp_path / "in"):
        (folder / "w.bin").write_bytes(bytes(1024))
    monkeypatch.chdir(tmp_path / "in")
    with pytest.raises(InvalidModel, match="was not sent along"):
        prepared(openvino, file_model(elsewhere(place)))
    if place != "w.bin":
        with pytest.raises(InvalidModel, match="not below the model's folder"):
            prepared(openvino, file_model(elsewhere(place), {place: np.zeros(1024, np.uint8)}))


def hidden(data):
    """The file, whose only weight says where it lies in fields with numbers that are the schema's but for bit 29."""
    model = onnx.load_from_string(data)
    weight = model.graph.initializer.pop()
    places = [entry.SerializeToString() for entry in weight.external_data]
    bare = onnx.TensorProto(name=weight.name, data_type=weight.data_type, dims=weight.dims).SerializeToString()
    bare += b"\xf0\x80\x80\x80\x10\x01" + b"".join(field(b"\xea\x80\x80\x80\x10", place) for place in places)
    graph = model.graph.SerializeToString() + field(b"\x2a", bare)
    model.ClearField("graph")
    return model.SerializeToString() + field(b"\x3a", graph)


def field(tag, data):
    """A field of a protocol buffer."""
    return tag + bytes([len(data) & 127 | 128, len(data) >> 7]) + data


def test_fields_whose_numbers_wrap_hide_no_place(openvino):
    """OpenVINO drops what such a number has beyond 32 bits: it would read its own process's memory at an address."""
    secret = np.arange(256, dtype=np.float32)
    data = elsewhere("*/_ORT_MEM_ADDR_/*", offset=secret.ctypes.data, length=secret.nbytes)
    sides = file_model(data).main.operands[1:]
    model = model_of_file(ModelFile("onnx", np.frombuffer(hidden(data), np.uint8)), sides[:1], sides[1:])
    with pytest.raises(InvalidModel, match=r"damaged: the field at \d+ has a number of more than 29 bits"):
        prepared(openvino, model)


@pytest.mark.parametrize("more", [{"offset": 2**63}, {"length": 2**40}, {"offset": 8, "length": 1024}])
def test_a_place_beyond_the_end_of_a_file(openvino, more):
    """It is refused before OpenVINO reads it."""
    with pytest.raises(InvalidModel, match=r"a place that the file 'w.bin' does not have"):
        prepared(openvino, file_model(elsewhere("w.bin", **more), {"w.bin": np.zeros(1024, np.uint8)}))


def test_what_it_does_not_run(openvino):
    """Operations of the HAL, with a reason; and models whose inputs are not the file's."""
    builder = driver.ModelBuilder()
    builder.output(builder.operation("SOFTMAX", builder.input("float32", (1, 2)), 1.0))
    assert openvino.explain(builder.build()) == ["the device openvino runs model files, and no operations"]
    sides = file_model(one("Neg", ["float32"], (4,), out=(4,))).main.operands[1:]
    for data, words in (
        (one("Neg", ["int32"], (4,), ["int32"], (4,)), "the model says TENSOR_FLOAT32, but the file has int32"),
        (one("Neg", ["float32"], (5,), out=(5,)), r"the model says \[4\], but the file has \[5\]"),
        (one("Add", ["float32"] * 2, (4,), out=(4,)), "the model has 1 inputs, and its file has 2"),
    ):
        with pytest.raises(InvalidModel, match=words):
            prepared(openvino, model_of_file(ModelFile("onnx", np.frombuffer(data, np.uint8)), sides[:1], sides[1:]))


def test_a_file_that_is_cut_off_or_changed(openvino):
    """No damage to a file does worse than an error that is named."""
    data, random = (FILES / "vendor/gru_float32.tflite").read_bytes(), np.random.default_rng(9)
    model = driver.load(FILES / "vendor/gru_float32.tflite", form="file").main
    sides = [[model.operands[i] for i in side] for side in (model.inputs, model.outputs)]
    for n in range(20):
        damaged = bytearray(data[: len(data) - n % 2 * 100 * n])
        damaged[random.integers(min(400, len(damaged)))] ^= 1 << n % 8
        with contextlib.suppress(InvalidModel, LibraryFailed):
            prepared(openvino, model_of_file(ModelFile("tflite", np.frombuffer(damaged, np.uint8)), *sides))


def products(count=200, size=512):
    """A file that computes for seconds: one product of matrices after the other."""
    names = ["x", *(f"v{n}" for n in range(count - 1)), "y"]
    nodes = [node("MatMul", [a, "x"], [b]) for a, b in pairwise(names)]
    return written(nodes, [("x", "float32", [size, size])], [("y", "float32", [size, size])])


def test_a_long_run_ends_early(openvino):
    """At its deadline, and when its client is gone."""
    model, x = prepared(openvino, file_model(products())), np.zeros((512, 512), np.float32)
    execution, _ = bound(model, [x], x.nbytes)
    with due(time.monotonic_ns() + 50_000_000), pytest.raises(MissedDeadlineTransient):
        execution.run()
    failed = []

    def run():
        with pytest.raises(ExecutionFailed, match=r"cancell?ed") as caught:
            execution.run()
        failed.append(caught)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        execution.cancel()
        thread.join(0.01)
    assert failed


def test_in_another_process(connect, name):
    """By bursts and one by one; two clients at a time get their own results."""
    model = file_model(one("Neg", ["float32"], ["n"], out=["n"]))
    with connect(name).prepare(model) as one_by_one, one_by_one.burst(input_shapes=[(8,)]) as burst:
        for size in (8, 3):
            x = np.arange(1, size + 1, dtype=np.float32)
            assert burst.run(x).outputs[0].tobytes() == one_by_one.run(x)[0].tobytes() == (-x).tobytes()


def test_a_cached_file(connect, name, tmp_path):
    """A compiled file comes back from the cache, and computes the same."""
    x = np.arange(4, dtype=np.float32)
    for _ in range(2):
        with driver.compile(
            file_model(one("Neg", ["float32"], (4,), out=(4,))), devices=[name], cache_dir=tmp_path
        ) as compiled:
            assert compiled.run(x)[0].tobytes() == (-x).tobytes()
    assert any(tmp_path.iterdir())


def test_it_stands_in_for_the_own_runtime(name, place):
    """`driver.compile` takes it for a file that the own runtime refuses; else it is not even started."""
    x = np.array([-1, 0, 1, 2], np.float32)
    with driver.compile(file_model(one("Neg", ["float32"], (4,), out=(4,)))) as compiled:
        assert compiled.placement()[0][0] == "onnxruntime"
        assert compiled.run(x)[0].tobytes() == (-x).tobytes()
    assert not discovery.find(discovery.Place(place.path, name))
    data = onnx.load_model_from_string(one("Swish", ["float32"], (4,), out=(4,), domain="org.openvinotoolkit"))
    data.opset_import.add(domain="org.openvinotoolkit", version=1)
    with driver.compile(file_model(data.SerializeToString())) as compiled:
        assert compiled.placement()[0][0] == name
        assert compiled.stats()["fallbacks"]["dropped"] == 1
        np.testing.assert_allclose(compiled.run(x)[0], x / (1 + np.exp(-x)), rtol=1e-5)


@pytest.mark.integration
def test_its_library_is_loaded_by_devices_alone():
    """Not by whoever lists them, or imports the module; and without the part that would report that to Intel."""
    program = (
        "import sys, driver\n"
        "from driver.devices.openvino import OpenVinoDevice\n"
        "assert OpenVinoDevice.missing() is None and 'OpenVINO 20' in OpenVinoDevice.version\n"
        "assert 'openvino' not in sys.modules and 'onnxruntime' not in sys.modules\n"
        "OpenVinoDevice()\n"
        "assert 'openvino' in sys.modules and 'openvino_telemetry' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
