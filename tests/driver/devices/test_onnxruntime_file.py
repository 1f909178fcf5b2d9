"""Files that the onnxruntime device runs as they are."""

import contextlib
import os
import threading
import time

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_files import DTYPES, file_model, one, value, written

import driver
from burst import MissedDeadlineTransient
from driver.deadlines import due
from driver.devices.lowering.errors import LibraryFailed
from driver.errors import ExecutionFailed, LoopTimeout, OutputInsufficientSize
from driver.nn import InvalidModel, Model, Subgraph
from driver.nn.file_form import ModelFile, model_of_file
from driver.protocol.model_digest import sampled_digest, structure_digest
from driver.runtime.cache.folder import Folder
from driver.runtime.cache.verify import verify

pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")

import onnxruntime as ort

from driver.devices.onnxruntime import OnnxRuntimeDevice
from driver.interface import BindOptions, Preparation

node = helper.make_node


@pytest.fixture(scope="module")
def onnxruntime():
    return OnnxRuntimeDevice(threads=1)


def now():
    """No burst wants to run."""


def computed(prepared, feeds, room=4096):
    """The shapes and bytes of the outputs of one run."""
    outputs = [np.full(room, 0xA5, np.uint8) for _ in prepared.outputs]
    bound = prepared.bind(feeds, outputs, BindOptions())
    bound.run()
    sizes = [port.nbytes(shape) for port, (shape, _) in zip(prepared.outputs, bound.shapes, strict=True)]
    return [(shape, raw[:n].tobytes()) for (shape, _), raw, n in zip(bound.shapes, outputs, sizes, strict=True)]


def own(data, feeds, threads=1):
    """The same, by ONNX Runtime as any program uses it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    found = session.run(None, {i.name: feed for i, feed in zip(session.get_inputs(), feeds, strict=True)})
    return [(array.shape, array.tobytes()) for array in found]


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("shape", [(), (3,), (1, 2, 1, 3, 2, 1), (2, 0, 3)], ids=str)
def test_every_type_of_any_rank(onnxruntime, dtype, shape):
    """Tensors of every type, scalars, empty ones and those of many dimensions go in and out as they are."""
    data = one("Identity", [dtype], shape, [dtype], shape)
    stored = {"bool": np.uint8, "bfloat16": np.uint16}.get(dtype, dtype)
    x = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(stored) % 2
    prepared = onnxruntime.prepare(file_model(data), Preparation())
    assert prepared.is_static
    assert computed(prepared, [x]) == [(shape, x.tobytes())]


def test_unknown_ranks(onnxruntime):
    """Where the file does not tell the rank of a tensor, each run has its own; a flag may be any byte."""
    prepared = onnxruntime.prepare(file_model(one("Not", ["bool"], None, ["bool"])), Preparation())
    for shape in ((), (4,), (2, 3, 1)):
        x = np.full(shape, 7, np.uint8)
        assert computed(prepared, [x]) == [(shape, np.zeros(shape, np.uint8).tobytes())]


def test_open_sizes_are_learnt_once(onnxruntime):
    """The first run with new shapes copies outputs of unforeseen shapes; later runs write where they belong."""
    nodes = [node("Concat", ["x", "x"], ["y"], axis=0), node("Shape", ["y"], ["s"])]
    data = written(nodes, [("x", "float32", ["n", 3])], [("y", "float32", ["m", 3]), ("s", "int64", [2])])
    prepared = onnxruntime.prepare(file_model(data), Preparation())
    assert not prepared.is_static
    for rows in (1, 5, 0, 5):
        x = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
        wanted = [((2 * rows, 3), np.concatenate([x, x]).tobytes()), ((2,), np.array([2 * rows, 3]).tobytes())]
        outputs = [np.empty(128, np.uint8), np.empty(16, np.uint8)]
        bound = prepared.bind([x], outputs, BindOptions())
        for _ in range(3):
            outputs[0][:] = 7
            bound.run()
            assert bound.shapes == (((2 * rows, 3), True), ((2,), True))
            assert outputs[0][: 24 * rows].tobytes() == wanted[0][1]
            assert (outputs[0][24 * rows :] == 7).all()
    again = prepared.bind([x], outputs, BindOptions())
    assert again.copied_bytes == again.checked_bytes == 16  # only sizes, which are checked in private memory
    prepared.bind([x], [np.empty(130, np.uint8)[2:], outputs[1]], BindOptions()).run()  # off the grid


def test_sizes_that_are_data(onnxruntime):
    """An output whose size depends on data is right in each run, also where runs with equal shapes came before."""
    compress = [node("Compress", ["x", "k"], ["y"])]
    data = written(compress, [("x", "float32", [4]), ("k", "bool", [4])], [("y", "float32", ["n"])])
    prepared = onnxruntime.prepare(file_model(data), Preparation())
    x, k, y = np.arange(4, dtype=np.float32), np.zeros(4, np.uint8), np.empty(12, np.uint8)
    bound = prepared.bind([x, k], [y], BindOptions())
    for flags in ([1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 9], [0, 0, 0, 0], [1, 1, 0, 0]):
        k[:] = flags
        bound.run()
        wanted = x[k != 0]
        assert bound.shapes == ((wanted.shape, True),)
        assert y[: wanted.nbytes].tobytes() == wanted.tobytes()
    k[:] = 1
    with pytest.raises(OutputInsufficientSize, match=r"output 0 needs dimensions \[4\]"):
        bound.run()
    assert bound.shapes == (((4,), False),)


def test_a_file_that_says_the_wrong_shape(onnxruntime):
    """A file may say wrongly what shape an output has: of the wrong rank, or wrongly that it is always the same."""
    reshape = [node("Reshape", ["x", "s"], ["y"])]
    for said in (["a", "b"], [6]):
        data = written(reshape, [("x", "float32", [2, 3]), ("s", "int64", ["n"])], [("y", "float32", said)])
        prepared = onnxruntime.prepare(file_model(data), Preparation())
        x, s, y = np.ones((2, 3), np.float32), np.array([1, 6, 1]), np.zeros(24, np.uint8)
        bound = prepared.bind([x, s], [y], BindOptions())
        if prepared.is_static:
            with pytest.raises(OutputInsufficientSize):  # the engine has promised that shape
                bound.run()
            assert not prepared.is_static
            bound = prepared.bind([x, s], [y], BindOptions())
        for _ in range(3):
            y[:] = 0
            bound.run()
            assert bound.shapes == (((1, 6, 1), True),)
            assert y.tobytes() == x.tobytes()


def test_too_small_an_output(onnxruntime):
    """A static file with too little memory for an output does not run."""
    prepared = onnxruntime.prepare(file_model(one("Neg", ["float32"], [4], out=[4])), Preparation())
    y = np.full(12, 7, np.uint8)
    with pytest.raises(OutputInsufficientSize, match=r"output 0 needs dimensions \[4\]"):
        prepared.bind([np.zeros(4, np.float32)], [y], BindOptions()).run()
    assert (y == 7).all()


def test_in_one_memory(onnxruntime):
    """An output may have the memory of an input: the result is as if it had its own."""
    data = written(
        [node("Add", ["a", "b"], ["y"])], [("a", "float32", [4]), ("b", "float32", [1])], [("y", "float32", [4])]
    )
    x = np.arange(1, 5, dtype=np.float32)
    onnxruntime.prepare(file_model(data), Preparation()).bind([x, x[3:]], [x.view(np.uint8)], BindOptions()).run()
    assert x.tolist() == [5, 6, 7, 8]


def test_an_input_with_a_default(onnxruntime):
    """What has a default is no input of the model, and keeps it."""
    inputs = [("x", "float32", [2]), ("w", "float32", [2])]
    data = written([node("Add", ["x", "w"], ["y"])], inputs, [("y", "float32", [2])], {"w": np.ones(2, np.float32)})
    prepared = onnxruntime.prepare(file_model(data), Preparation())
    assert computed(prepared, [np.zeros(2, np.float32)])[0][1] == np.ones(2, np.float32).tobytes()


def counting(step):
    """Counts to `limit` in steps; with a step of 0 for ever."""
    body = helper.make_graph(
        [
            node("Constant", [], ["one"], value_int=step),
            node("Add", ["i", "one"], ["j"]),
            node("Less", ["j", "limit"], ["more"]),
        ],
        "body",
        [value("n", "int64", []), value("was", "bool", []), value("i", "int64", [])],
        [value("more", "bool", []), value("j", "int64", [])],
    )
    always = node("Constant", [], ["always"], value=helper.make_tensor("", TensorProto.BOOL, [], [1]))
    loop = node("Loop", ["", "always", "start"], ["y"], body=body)
    scalars = [(name, "int64", []) for name in ("start", "limit", "y")]
    return written([always, loop], scalars[:2], scalars[2:])


def test_loops(onnxruntime):
    """Loops run as often as they say."""
    prepared = onnxruntime.prepare(file_model(counting(3)), Preparation())
    assert computed(prepared, [np.array(0), np.array(10)]) == [((), np.array(12).tobytes())]


def endless(onnxruntime, loop_timeout=1000.0):
    prepared = onnxruntime.prepare(file_model(counting(0)), Preparation())
    return prepared.bind([np.array(0), np.array(10)], [np.empty(8, np.uint8)], BindOptions(loop_timeout))


def test_a_loop_without_end(onnxruntime):
    """It ends at its loop timeout, at the deadline, or when it is cancelled, and says which."""
    with pytest.raises(LoopTimeout, match=r"loop timeout of 0\.05 s"):
        endless(onnxruntime, 0.05).run()
    with due(time.monotonic_ns() + 50_000_000), pytest.raises(MissedDeadlineTransient):
        endless(onnxruntime).run()
    bound, failed = endless(onnxruntime), []

    def run():
        with pytest.raises(ExecutionFailed, match=r"terminate|cancelled") as caught:
            bound.run()
        failed.append(caught)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        bound.cancel()
        thread.join(0.01)
    assert failed
    with pytest.raises(ExecutionFailed, match="cancelled"):
        bound.run()  # for good


def choice(big):
    """IF k THEN x + big ELSE x - big, with weights of the branches in the branches."""
    branches = {
        f"{which}_branch": helper.make_graph(
            [node(operator, ["x", f"{which}_w"], [f"{which}_y"])],
            which,
            [],
            [value(f"{which}_y", "float32", big.shape)],
            [onnx.numpy_helper.from_array(big, f"{which}_w")],
        )
        for which, operator in (("then", "Add"), ("else", "Sub"))
    }
    return written(
        [node("If", ["k"], ["y"], **branches)],
        [("k", "bool", []), ("x", "float32", big.shape)],
        [("y", "float32", big.shape)],
    )


def network():
    """Convolutions, one of integers, with weights that are large enough to lie outside of the graph."""
    random = np.random.default_rng(5)
    weights = {
        "w": random.integers(-127, 128, (16, 16, 3, 3)).astype(np.int8),
        "v": random.standard_normal((16, 16, 3, 3)).astype(np.float32),
        "b": random.standard_normal(16).astype(np.float32),
        "s": np.array(0.05, np.float32),
        "z": np.array(128, np.uint8),
        "zw": np.array(0, np.int8),
    }
    nodes = [
        node("Conv", ["x", "v", "b"], ["a"], pads=[1, 1, 1, 1]),
        node("Relu", ["a"], ["r"]),
        node("QuantizeLinear", ["r", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        node("DequantizeLinear", ["w", "s", "zw"], ["dw"]),
        node("Conv", ["d", "dw"], ["c"], pads=[1, 1, 1, 1]),
        node("QuantizeLinear", ["c", "s", "z"], ["e"]),
        node("DequantizeLinear", ["e", "s", "z"], ["y"]),
    ]
    return written(nodes, [("x", "float32", ["n", 16, 8, 8])], [("y", "float32", ["n", 16, 8, 8])], weights)


FILES = {
    "convolutions": (network(), [np.random.default_rng(6).standard_normal((2, 16, 8, 8)).astype(np.float32)]),
    "choice": (choice(np.ones((20, 20), np.float32)), [np.array(0, np.uint8), np.full((20, 20), 3, np.float32)]),
    "loop": (counting(3), [np.array(0), np.array(10)]),
}


@pytest.mark.parametrize("name", FILES)
def test_answers_are_those_of_onnx_runtime(onnxruntime, name):
    """Bit for bit, as prepared and as restored from a cache: quantised operations are fused here, too."""
    data, feeds = FILES[name]
    model = file_model(data)
    typed = [feed.astype(bool) if feed.dtype == np.uint8 else feed for feed in feeds]
    wanted = own(data, typed)
    prepared = onnxruntime.prepare(model, Preparation())
    assert computed(prepared, feeds, 2**16) == wanted
    root = np.frombuffer(data, np.uint8)
    saved = prepared.saved(root)
    kept = type(saved)(*([np.frombuffer(part, np.uint8) for part in side] for side in saved))
    restored = onnxruntime.restore(model, kept, root, Preparation())
    assert computed(restored, feeds, 2**16) == wanted
    assert restored.loops == prepared.loops == (name == "loop")


def elsewhere(name, array, place, **more):
    """A tensor whose contents are in another file."""
    tensor = TensorProto(name=name, dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype))
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in {"location": place, **more}.items():
        tensor.external_data.add(key=key, value=str(text))
    return tensor


def with_external(place, array, **more):
    outputs = [("y", "float32", array.shape)]
    tensor = elsewhere("w", array, place, **more)
    return written([node("Add", ["x", "w"], ["y"])], [("x", "float32", array.shape)], outputs, {"w": tensor})


@pytest.mark.parametrize("count", [4, 4000])
def test_weights_in_other_files(onnxruntime, count):
    """Weights may be in files beside it that were sent along, small ones and large ones, at any place in them."""
    array = np.arange(count, dtype=np.float32)
    contents = np.frombuffer(b"12345" + array.tobytes() + b"67", np.uint8)
    data = with_external("weights.bin", array, offset=5, length=array.nbytes)
    prepared = onnxruntime.prepare(file_model(data, {"weights.bin": contents}), Preparation())
    assert computed(prepared, [array], 2**16)[0][1] == (array + array).tobytes()


@pytest.mark.parametrize("count", [4, 4000])
@pytest.mark.parametrize("place", ["weights.bin", "../weights.bin", "/etc/hostname", ""])
def test_no_path_of_a_file_is_opened(onnxruntime, monkeypatch, tmp_path, place, count):
    """A file that was not sent along is refused by name, even if it lies in the folder that the process is in."""
    (tmp_path / "weights.bin").write_bytes(bytes(4 * count))
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in" if place.startswith("..") else tmp_path)
    data = with_external(place, np.zeros(count, np.float32))
    with pytest.raises(InvalidModel, match="not sent along"):
        onnxruntime.prepare(file_model(data, {"other.bin": np.zeros(4 * count, np.uint8)}), Preparation())
    with pytest.raises(InvalidModel, match="not sent along"):
        onnxruntime.prepare(file_model(data, {"other.bin": np.zeros(0, np.uint8)}), Preparation())


@pytest.mark.parametrize("wrap", ["branch", "constant", "doubled key"])
def test_no_path_within_is_opened(onnxruntime, monkeypatch, tmp_path, wrap):
    """Nor one that is named in a branch, in a constant of a node, or by a message with two keys."""
    (tmp_path / "w.bin").write_bytes(bytes(16))
    monkeypatch.chdir(tmp_path)
    array = np.zeros(4, np.float32)
    tensor = elsewhere("w", array, "w.bin")
    if wrap == "branch":
        model = onnx.load_from_string(choice(array))
        for attribute in model.graph.node[0].attribute:
            attribute.g.initializer[0].CopyFrom(elsewhere(attribute.g.initializer[0].name, array, "w.bin"))
    else:
        constant = node("Constant", [], ["w"], value=tensor)
        add = node("Add", ["x", "w"], ["y"])
        model = onnx.load_from_string(written([constant, add], [("x", "float32", [4])], [("y", "float32", [4])]))
    data = model.SerializeToString()
    if wrap == "doubled key":
        entry = tensor.external_data[0].SerializeToString()
        twice = b"\x0a\x01x" + entry
        assert data.count(b"\x6a" + bytes([len(entry)]) + entry) == 1
        tensor.ClearField("external_data")
        raw = tensor.SerializeToString() + b"\x6a" + bytes([len(twice)]) + twice
        constant = node("Constant", [], ["w"])
        constant.attribute.append(
            onnx.AttributeProto.FromString(b"\x0a\x05value\xa0\x01\x04\x2a" + bytes([len(raw)]) + raw)
        )
        model.graph.node[0].CopyFrom(constant)
        data = model.SerializeToString()
    with pytest.raises(InvalidModel, match="not sent along"):
        onnxruntime.prepare(model_of_file(ModelFile("onnx", np.frombuffer(data, np.uint8)), [], []), Preparation())


def test_two_weights_of_one_name(onnxruntime):
    """A file with two large ones is refused in ONNX Runtime's words; that is no failure of the device."""
    array = np.zeros((64, 64), np.float32)
    nodes, ends = [node("MatMul", ["x", "w"], ["y"])], ("float32", [1, 64])
    model = onnx.load_from_string(written(nodes, [("x", *ends)], [("y", *ends)], {"w": array}))
    model.graph.initializer.append(model.graph.initializer[0])
    sides = file_model(written(nodes, [("x", *ends)], [("y", *ends)], {"w": array})).main.operands[1:]
    data = np.frombuffer(model.SerializeToString(), np.uint8)
    with pytest.raises(LibraryFailed, match=r"rejected the model: .*name has already been added: w"):
        onnxruntime.prepare(model_of_file(ModelFile("onnx", data), sides[:1], sides[1:]), Preparation())


def test_a_name_that_is_no_text(onnxruntime, capfd):
    """A refusal that quotes it says so all the same, and nothing is printed."""
    data = one("Neg", ["float32"], [4], out=[4])
    assert data.count(b"\x03Neg") == 1
    sides = file_model(data).main.operands[1:]
    raw = np.frombuffer(data.replace(b"\x03Neg", b"\x03N\xfcg"), np.uint8)
    with pytest.raises(LibraryFailed, match=r"rejected the model: .*N\ufffdg"):
        onnxruntime.prepare(model_of_file(ModelFile("onnx", raw), sides[:1], sides[1:]), Preparation())
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(("what", "whose"), [(b"y0", "output 0"), (b"size", "input 0")])
def test_a_port_that_is_no_text(onnxruntime, what, whose):
    """Its name, or that of one of its sizes: it is said which input or output."""
    data = one("Neg", ["float32"], ["size"], out=["size"])
    sides = file_model(data).main.operands[1:]
    raw = np.frombuffer(data.replace(what, b"\xb6" * len(what)), np.uint8)
    with pytest.raises(InvalidModel, match=f"^{whose}: its name, or that of one of its sizes, is no UTF-8"):
        onnxruntime.prepare(model_of_file(ModelFile("onnx", raw), sides[:1], sides[1:]), Preparation())


def test_what_is_no_file_for_it(onnxruntime):
    """A .tflite file needs another device; a file among other operations is refused."""
    data = one("Neg", ["float32"], [4], out=[4])
    model = file_model(data)
    assert onnxruntime.explain(model) == [None]
    graph = model.main
    other = model_of_file(ModelFile("tflite", np.zeros(8, np.uint8)), [], [])
    assert "needs the device litert" in onnxruntime.explain(other)[0]
    twice = Model(Subgraph(graph.operands, graph.operations * 2, graph.inputs, graph.outputs))
    assert ["whole model" in reason for reason in onnxruntime.explain(twice)] == [True, True]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (written([node("Nothing", ["x"], ["y"])], [("x", "float32", [1])], [("y", "float32", [1])]), "Nothing"),
        (b"\x08\x08nonsense", r"the \.onnx file is damaged: field of unknown type 6 at 3"),
        (b"", "0 graphs"),
    ],
    ids=["operator", "damaged", "empty"],
)
def test_a_file_that_is_refused(onnxruntime, data, words):
    """The error has ONNX Runtime's own words, or says where the file is damaged."""
    model = model_of_file(ModelFile("onnx", np.frombuffer(data, np.uint8)), [], [])
    with pytest.raises((LibraryFailed, InvalidModel), match=words):
        onnxruntime.prepare(model, Preparation())


def test_ports_that_are_not_the_files(onnxruntime):
    """Inputs and outputs that differ from the file's are refused by name; so are texts and sequences."""
    data = one("Neg", ["float32"], [4], out=[4])
    operands = {
        "3 inputs": [("float32", [4])] * 3,
        r"input 0 \(x0\).*TENSOR_INT64.*tensor\(float\)": [("int64", [4])],
        r"input 0 \(x0\).*\[5\].*\[4\]": [("float32", [5])],
    }
    for words, inputs in operands.items():
        other = written([], [(f"x{n}", *kind) for n, kind in enumerate(inputs)], [("y", "float32", [4])])
        given = file_model(other).main
        found = [given.operands[i] for i in given.inputs], [given.operands[i] for i in given.outputs]
        with pytest.raises(InvalidModel, match=words):
            onnxruntime.prepare(model_of_file(ModelFile("onnx", np.frombuffer(data, np.uint8)), *found), Preparation())
    text = helper.make_tensor_value_info("x", TensorProto.STRING, [1])
    split = helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)
    floats = [given.operands[i] for i in given.outputs]
    for data, words in (
        (
            written([node("Shape", ["x"], ["y"])], [text], [("y", "int64", [1])]),
            r"input 0 \(x\): .*the file has tensor\(string\)",
        ),
        (
            written([node("SequenceConstruct", ["x"], ["y"])], [("x", "float32", [4])], [split]),
            r"y\): .*the file has seq\(tensor\(float",
        ),
    ):
        with pytest.raises(InvalidModel, match=words):
            onnxruntime.prepare(
                model_of_file(ModelFile("onnx", np.frombuffer(data, np.uint8)), floats, floats), Preparation()
            )


def test_a_file_that_is_cut_off_or_changed(onnxruntime):
    """No damage to a file does worse than an error that is named."""
    data, random = counting(3), np.random.default_rng(9)
    model = file_model(data).main
    sides = [[model.operands[i] for i in side] for side in (model.inputs, model.outputs)]
    for n in range(0, 2 * len(data), 3):
        damaged = bytearray(data)
        if n < len(data):
            del damaged[n:]
        else:
            damaged[random.integers(len(data))] = random.integers(256)
        file = ModelFile("onnx", np.frombuffer(bytes(damaged), np.uint8))
        with contextlib.suppress(InvalidModel, LibraryFailed):
            onnxruntime.prepare(model_of_file(file, *sides), Preparation())


def test_through_a_burst(connect):
    """Files run in another process, by bursts and one by one, with open sizes and data in every form."""
    data, (x,) = FILES["convolutions"]
    (_, wanted), *_ = own(data, [x])
    with connect("onnxruntime").prepare(file_model(data)) as prepared:
        assert prepared.run(x)[0].tobytes() == wanted
        with prepared.burst(input_shapes=[x.shape]) as burst:
            for _ in range(3):
                assert burst.run(x).outputs[0].tobytes() == wanted
    with connect("onnxruntime").prepare(file_model(counting(3))) as prepared, prepared.burst() as burst:
        for limit in (1, 10):
            assert burst.run(np.array(0), np.array(limit)).outputs[0].tolist() == 3 * -(-limit // 3)


def test_a_cached_file(connect, tmp_path):
    """A compiled file comes back from the cache, and computes the same."""
    data, (x,) = FILES["convolutions"]
    for _ in range(2):
        with driver.compile(file_model(data), devices=["onnxruntime"], cache_dir=tmp_path) as compiled:
            assert compiled.run(x)[0].tobytes() == own(data, [x])[0][1]
    assert os.listdir(tmp_path)


def product(weights, dtype="float32"):
    """A file that multiplies by a matrix, whose rows are open."""
    side = len(weights)
    return written(
        [node("MatMul", ["x", "w"], ["y"])], [("x", dtype, ["n", side])], [("y", dtype, None)], {"w": weights}
    )


def test_a_cached_file_serves_no_other(connect, tmp_path):
    """One that differs from it where the token does not look: the device compares all of it, and compiles it anew."""
    weights = np.random.default_rng(1).random((600, 600), np.float32)
    files = [file_model(product(weights))]
    for n in range(1100, weights.size):
        other = weights.copy()
        other.flat[n] += 1
        files[1:] = [file_model(product(other))]
        if len({sampled_digest(model, structure_digest(model)) for model in files}) == 1:
            break
    x = np.ones((2, 600), np.float32)
    for (model, matrix), outcome in zip(
        [(files[0], weights), (files[0], weights), (files[1], other), (files[1], other)],
        ["saved", "restored", "saved", "restored"],
        strict=True,
    ):
        with driver.compile(model, devices=["onnxruntime"], cache_dir=tmp_path) as compiled:
            assert compiled.stats()["compilations"][0]["outcome"] == outcome
            np.testing.assert_allclose(compiled.run(x)[0], x @ matrix, rtol=1e-5)


def test_a_cached_file_is_kept_without_its_weights(connect, tmp_path):
    """Where ONNX Runtime leaves them as they are. What is kept suffices all the same, for a client without the file."""
    data = product(np.random.default_rng(1).random((600, 600), np.float32))
    with driver.compile(file_model(data), devices=["onnxruntime"], cache_dir=tmp_path):
        pass
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1.1 * len(data)
    assert [verdict.state for verdict in verify(Folder(tmp_path))] == ["good", "good"]


def test_a_first_run_executes_once(connect):
    """Also where only the execution tells how large the output is: there is room."""
    device = connect("onnxruntime")
    with device.prepare(file_model(product(np.eye(64, dtype=np.float32)))) as prepared:
        x = np.random.default_rng(2).random((1000, 64), np.float32)
        before = device.stats()["priorities"]["medium"]["executions"]
        with prepared.burst(input_shapes=[x.shape]) as burst:
            np.testing.assert_array_equal(burst.run(x).outputs[0], x)
        np.testing.assert_array_equal(prepared.run(x)[0], x)
        assert device.stats()["priorities"]["medium"]["executions"] == before + 2
