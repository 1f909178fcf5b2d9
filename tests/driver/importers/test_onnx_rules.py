"""What a model imported from .onnx keeps of its file, and what is refused."""

import math
import os
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_cases import CASES, C, Case, one, real

import driver
from driver.formats.onnx_schema import FIELDS
from driver.formats.protobuf import ProtoBytes, ProtoMessage
from driver.importers.onnx import file as onnx_file
from driver.importers.onnx import reader as importer
from driver.importers.onnx.table import TABLE
from driver.nn import OperandLifeTime
from driver.nn.file_form import file_of


def read(data):
    return importer.read(memoryview(data))


def made(kind, *inputs, **more):
    """The bytes of a model of one operator."""
    one(kind, *inputs, name=" for a moment", **more)
    return CASES.pop(f"{kind} for a moment").data


def graph(nodes, inputs, constants=None, outputs=("y",), opset=17):
    """The bytes of a model that is not checked. inputs: name -> (type, shape)."""
    held = [numpy_helper.from_array(np.asarray(a), name) for name, a in (constants or {}).items()]
    infos = [helper.make_tensor_value_info(name, *info) for name, info in inputs.items()]
    results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    imports = [helper.make_opsetid("", opset)]
    return helper.make_model(helper.make_graph(nodes, "g", infos, results, held), opset_imports=imports, ir_version=8)


def operands(model, which):
    return [model.main.operands[i] for i in getattr(model.main, which)]


F = TensorProto.FLOAT
NODE = helper.make_node

# ---- what is kept --------------------------------------------------------------------------------------------------


def test_operands_have_their_names():
    """Inputs, outputs, constants and what lies between."""
    nodes = [NODE("Add", ["left", "right"], ["sum"]), NODE("Abs", ["sum"], ["size"])]
    data = graph(nodes, {"left": (F, [2])}, {"right": np.float32([1, 2])}, ["size"]).SerializeToString()
    found = read(data).main
    assert [o.extra["name"] for o in found.operands if o.extra] == ["left", "right", "sum", "size"]
    assert [found.operands[i].extra for i in found.inputs] == [{"name": "left"}]


@pytest.mark.parametrize("shift", range(4))
def test_weights_stay_in_the_file(shift):
    """A constant that the HAL wants as it is stored is a view of the file where it lies at a multiple of its size."""
    weights = real(64, 32)
    data = bytes([0x32, shift]) + b" " * shift + made("Gemm", real(3, 32), C(weights), transB=1)  # a longer doc string
    [found] = [o for o in read(data).main.operands if o.dimensions == (64, 32)]
    np.testing.assert_array_equal(found.value, weights)
    begin = data.index(weights.tobytes())
    if np.frombuffer(data, np.uint8).ctypes.data % 4 == 0 and begin % 4 == 0:
        assert (found.lifetime, found.location) == (OperandLifeTime.CONSTANT_REFERENCE, (begin, weights.nbytes))
        assert not found.value.flags.writeable
    else:
        assert found.lifetime == OperandLifeTime.CONSTANT_COPY


def test_an_unknown_batch_stays_unknown(run):
    """A named first dimension can be anything when the model runs, through convolutions, shapes and dense layers."""
    nodes = [
        NODE("Conv", ["x", "w"], ["c"]),
        NODE("Relu", ["c"], ["r"]),
        NODE("GlobalAveragePool", ["r"], ["g"]),
        NODE("Shape", ["g"], ["s"]),
        NODE("Gather", ["s", "zero"], ["n"]),
        NODE("Unsqueeze", ["n", "axes"], ["n1"]),
        NODE("Concat", ["n1", "rest"], ["shape"], axis=0),
        NODE("Reshape", ["g", "shape"], ["flat"]),
        NODE("Gemm", ["flat", "m"], ["y"]),
    ]
    constants = {"w": real(4, 3, 3, 3), "m": real(4, 2), "zero": np.int64(0)}
    constants |= {"axes": np.int64([0]), "rest": np.int64([-1])}
    data = graph(nodes, {"x": (F, ["batch", 3, 8, 8])}, constants).SerializeToString()
    found = read(data)
    assert operands(found, "inputs")[0].dimensions == (0, 3, 8, 8)
    assert operands(found, "outputs")[0].dimensions == (0, 2)
    x = real(5, 3, 8, 8)
    runtime = pytest.importorskip("onnxruntime")
    wanted = runtime.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    np.testing.assert_allclose(run(found, [x])[0], wanted, rtol=1e-4, atol=1e-5)


def test_a_size_that_is_computed_from_an_unknown_one_is_not_taken_for_it():
    """[n * 4, -1] of [n, 8, 3]: what -1 is cannot be told, and is refused."""
    nodes = [
        NODE("Shape", ["x"], ["s"]),
        NODE("Gather", ["s", "first"], ["n"]),
        NODE("Mul", ["n", "four"], ["m"]),
        NODE("Concat", ["m", "rest"], ["shape"], axis=0),
        NODE("Reshape", ["x", "shape"], ["y"]),
    ]
    constants = {"first": np.int64([0]), "four": np.int64([4]), "rest": np.int64([-1])}
    data = graph(nodes, {"x": (F, ["n", 8, 3])}, constants).SerializeToString()
    with pytest.raises(driver.ImportFailed, match=re.escape("shapes={'x': (1, 8, 3)}")):
        read(data)


def test_an_output_may_be_an_input_or_stand_twice(run):
    """The HAL has none of it; a copy is made."""
    data = graph([NODE("Abs", ["x"], ["y"])], {"x": (F, [2])}, {}, ["x", "y", "y"]).SerializeToString()
    results = run(read(data), [np.float32([-1, 2])])
    assert [r.tolist() for r in results] == [[-1, 2], [1, 2], [1, 2]]


def test_an_image_that_is_turned_by_the_file_is_not_turned_twice():
    """Exporters that have the channels last write a Transpose before and behind; none is left."""
    nodes = [
        NODE("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]),
        NODE("Conv", ["t", "w"], ["c"]),
        NODE("Transpose", ["c"], ["y"], perm=[0, 2, 3, 1]),
    ]
    data = graph(nodes, {"x": (F, [1, 8, 8, 3])}, {"w": real(4, 3, 3, 3)}).SerializeToString()
    assert [o.type for o in read(data).main.operations] == ["CONV_2D"]


def test_the_formula_of_erf(run):
    """Within 1e-6 of the function everywhere, as the guide says."""
    x = np.linspace(-6, 6, 20001, dtype=np.float32)
    data = graph([NODE("Erf", ["x"], ["y"])], {"x": (F, [20001])}).SerializeToString()
    wanted = np.array([math.erf(v) for v in x])
    assert np.abs(run(read(data), [x])[0] - wanted).max() < 1e-6


def test_the_numbers_of_fields_are_those_of_the_schema():
    """Each that is read, beside the descriptors of the onnx package."""
    for name, fields in FIELDS.items():
        descriptor = onnx.onnx_ml_pb2.DESCRIPTOR.message_types_by_name[name.split(".")[0]]
        for inner in name.split(".")[1:]:
            descriptor = descriptor.nested_types_by_name[inner]
        assert fields == {word: descriptor.fields_by_name[word].number for word in fields}


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.int32, np.int64, np.uint8, np.int8, np.bool_])
def test_constants_that_are_stored_as_numbers(kind):
    """Not as raw bytes, but in the field of their type."""
    values = np.array([[0, 1, 2], [3, 100, 7]]).astype(kind)
    raw = helper.make_tensor("c", helper.np_dtype_to_tensor_dtype(np.dtype(kind)), values.shape, values.reshape(-1))
    wire = onnx_file.OnnxFile(memoryview(made("Abs", real(2))), {})
    held = raw.SerializeToString()
    tensor = onnx_file.OnnxFile.tensor(wire, ProtoMessage(ProtoBytes(memoryview(held))))
    np.testing.assert_array_equal(tensor.data.astype(np.int64), values.astype(np.int64))


def test_the_guide_lists_every_operator():
    """docs/operators.md, and no other."""
    text = (Path(__file__).parents[3] / "docs/operators.md").read_text()
    listed = re.search(r"(\d+) operators, and QuantizeLinear.*?:\n(.*?)\.\n", text, re.DOTALL)
    assert re.findall(r"\w+", listed[2]) == sorted(TABLE)
    assert int(listed[1]) == len(TABLE)


def test_an_imported_model_runs_on_a_device(tmp_path):
    """From the file to a result in another process."""
    case: Case = CASES["Conv"]
    (tmp_path / "model.onnx").write_bytes(case.data)
    with (
        driver.connect("reference") as device,
        device.prepare(driver.load(tmp_path / "model.onnx", form="operations")) as prepared,
    ):
        result = prepared.run(*case.feeds.values())[0]
    assert result.shape == (1, 5, 7, 6)


# ---- weights in other files ----------------------------------------------------------------------------------------


def apart(folder, name="weights/all.bin", **more):
    """A model in `folder` whose weights lie in another file."""
    proto = onnx.load_from_string(made("Gemm", real(3, 4), C(np.float32(np.arange(8)).reshape(4, 2))))
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in ({"location": name, "offset": "8", "length": "32"} | more).items():
        tensor.external_data.add(key=key, value=value)
    (folder / "weights").mkdir(exist_ok=True)
    (folder / "weights" / "all.bin").write_bytes(bytes(8) + np.float32(np.arange(8)).tobytes())
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    return folder / "model.onnx"


def test_weights_in_a_file_beside_it(tmp_path, run):
    """They are read from the place that the model names."""
    found = driver.load(apart(tmp_path), form="operations")
    np.testing.assert_allclose(run(found, [np.ones((3, 4), np.float32)])[0], [[12, 16]] * 3)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../weights.bin", "not a file below"),
        ("/etc/hostname", "not a file below"),
        ("weights/../../secret", "not a file below"),
        ("weights/link", "link out of the folder of the model; copy the file itself beside the model"),
        ("linked/hostname", "link out of the folder"),
        ("circle", "cannot be opened"),
        ("pipe", "not a regular file"),
        ("weights", "not a regular file"),
        ("missing.bin", "cannot be opened"),
        ("", "not a file below"),
        ("*/_ORT_MEM_ADDR_/*", "not a file below"),
    ],
)
@pytest.mark.parametrize("form", ["file", "operations"])
def test_weights_elsewhere_are_refused(tmp_path, form, name, reason):
    """Neither above the folder, nor where a link leads out of it, nor what is no file, in whatever form."""
    path = apart(tmp_path, name)
    (tmp_path / "weights" / "link").symlink_to("/etc/hostname")
    (tmp_path / "linked").symlink_to("/etc")
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(driver.ImportFailed, match=reason):
        driver.load(path, form=form)


def layouts():
    """Where hubs and clusters put files, and links to them: link -> what it leads to, and the path that is loaded."""
    yield "a hub's cache", {"s/r/model.onnx": "../../blobs/a", "s/r/w": "../../blobs/b"}, "s/r/model.onnx"
    yield "chains of links", {"s/model.onnx": "../t/m", "t/m": "../blobs/a", "s/w": "../t/w", "t/w": "../blobs/b"}, None
    yield "a config map", {"model.onnx": "..data/a", "w": "..data/b", "..data": "blobs"}, None
    yield (
        "a folder that is a link",
        {"v1/model.onnx": "../blobs/a", "v1/w": "../blobs/b", "now": "v1"},
        "now/model.onnx",
    )
    yield "a link to the model alone", {"s/model.onnx": "../blobs/a", "s/w": ("copy", "b")}, None
    yield "a store that is a link", {"s/model.onnx": "../x/a", "s/w": "../x/b", "x": "blobs"}, None


@pytest.mark.parametrize(("links", "path"), [row[1:] for row in layouts()], ids=[row[0] for row in layouts()])
def test_links_into_the_folder_where_the_model_really_lies(tmp_path, run, links, path):
    """As in caches of hubs and mounted volumes: ONNX Runtime takes the same layouts."""
    (tmp_path / "blobs").mkdir()
    apart(tmp_path, "w").rename(tmp_path / "blobs" / "a")
    (tmp_path / "weights" / "all.bin").rename(tmp_path / "blobs" / "b")
    for link, target in links.items():
        (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(target, str):
            (tmp_path / link).symlink_to(target)
        else:
            (tmp_path / link).write_bytes((tmp_path / "blobs" / target[1]).read_bytes())
    found = driver.load(tmp_path / (path or next(iter(links))), form="operations")
    np.testing.assert_allclose(run(found, [np.ones((3, 4), np.float32)])[0], [[12, 16]] * 3)


def test_only_pages_that_the_model_names_are_copied(tmp_path, run):
    """Of a file with holes of many gigabytes: the pages of each range, once, also where ranges overlap or touch."""
    proto = onnx.load_from_string(
        graph(
            [NODE("Add", ["x", "a"], ["b"]), NODE("Add", ["b", "c"], ["d"]), NODE("Add", ["d", "e"], ["y"])],
            {"x": (F, [4])},
        ).SerializeToString()
    )
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", F, [4]))
    places, rng = {"a": 3, "c": (3 << 30) + 4093, "e": (3 << 30) + 4097}, np.random.default_rng(3)
    file, values = tmp_path / "w", rng.integers(1, 9, 5 + 4).astype(np.float32)
    with open(file, "wb") as opened:
        opened.seek(places["a"])
        opened.write(values[:4].tobytes())
        opened.seek(places["c"])
        opened.write(values[4:].tobytes())
        opened.truncate(64 << 30)
    for name, offset in places.items():
        tensor = TensorProto(name=name, data_type=F, dims=[4], data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value="w")
        tensor.external_data.add(key="offset", value=str(offset))
        proto.graph.initializer.append(tensor)  # without a length
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    x = np.ones(4, np.float32)
    wanted = x + values[:4] + values[4:8] + values[5:]
    assert run(driver.load(tmp_path / "model.onnx", form="operations"), [x])[0].tolist() == wanted.tolist()
    found = file_of(driver.load(tmp_path / "model.onnx", form="file"))
    assert found.external["w"].size == 3 * 4096
    moved = onnx.load_from_string(found.data.tobytes())
    offsets = {t.name: int(t.external_data[1].value) for t in moved.graph.initializer}
    assert offsets == {"a": 3, "c": 4096 + 4093, "e": 4096 + 4097}


@pytest.mark.parametrize("form", ["file", "operations"])
@pytest.mark.parametrize("place", [{"offset": "16"}, {"length": "33"}, {"offset": "-1"}, {"length": "9" * 40}])
def test_weights_outside_of_their_file(tmp_path, form, place):
    """Offset and length are checked."""
    with pytest.raises(
        driver.ImportFailed, match=r"tensor 'x1': \d+ bytes at \d+ lie outside the 40 |tensor 'x1': .* is not an offset"
    ):
        driver.load(apart(tmp_path, **place), form=form)


# ---- what is refused -----------------------------------------------------------------------------------------------


def node(kind, *inputs, domain="", **attributes):
    made = NODE(kind, list(inputs), ["y"], domain=domain, **attributes)
    shape = (F, [2, 3])
    return graph([made], dict.fromkeys(inputs, shape)).SerializeToString()


def gemm(left, right, **attributes):
    """Of an input and a constant."""
    made = NODE("Gemm", ["x", "w"], ["y"], **attributes)
    return graph([made], {"x": (F, left)}, {"w": np.ones(right, np.float32)}).SerializeToString()


def newer_format():
    model = graph([NODE("Abs", ["x"], ["y"])], {"x": (F, [2])})
    model.ir_version = 99
    return model.SerializeToString()


REFUSED = {
    "an operator without a counterpart": (lambda: node("NonZero", "x"), "NonZero", "has no operation for it"),
    "an operator of another domain": (lambda: node("Mine", "x", domain="my"), "my.Mine", "other domains"),
    "a control flow": (lambda: node("Loop", "x"), "Loop", "has no operation for it"),
    "a condition that is no boolean": (lambda: node("If", "x"), "If", "must be one boolean"),
    "too few inputs": (lambda: node("Add", "x"), "Add", "1 inputs; expected 2"),
    "an axis that is none": (lambda: node("Softmax", "x", axis=5), "Softmax", "axis 5"),
    "more than four dimensions": (lambda: made("Add", real(*[2] * 5), real(*[2] * 5)), "Add", "has rank 5"),
    "integer division": (lambda: made("Div", np.int64([4]), np.int64([2])), "Div", "towards minus infinity"),
    "where the largest were": (
        lambda: made("MaxPool", real(1, 1, 4, 4), outputs=2, kernel_shape=[2, 2]),
        "MaxPool",
        "indices of the largest",
    ),
    "cubic interpolation": (
        lambda: made("Resize", real(1, 1, 4, 4), None, C(np.float32([1, 1, 2, 2])), mode="cubic"),
        "Resize",
        "nearest and linear",
    ),
    "a product of matrices that do not fit": (
        lambda: gemm((5, 4), (5, 4)),
        "Gemm",
        r"matrices of \[5, 4\] and \[5, 4\] cannot be multiplied",
    ),
    "a turned matrix that does not fit": (
        lambda: gemm((5, 4), (4, 3), transA=1),
        "Gemm",
        r"matrices of \[4, 5\] and \[4, 3\] cannot be multiplied",
    ),
    "many products": (lambda: made("MatMul", real(300, 2, 3), real(300, 3, 2)), "MatMul", "300 products"),
    "many steps": (
        lambda: made("GRU", real(200, 1, 2), C(real(1, 9, 2)), C(real(1, 9, 3)), hidden_size=3),
        "GRU",
        "200 steps",
    ),
    "weights that are computed": (lambda: made("Conv", real(1, 2, 4, 4), real(3, 2, 2, 2)), "Conv", "be a constant"),
    "a type that the HAL does not have": (lambda: made("Abs", np.float64([1])), None, "is of DOUBLE"),
    "an old opset": (lambda: graph([], {}, opset=6).SerializeToString(), None, "opset 6"),
    "an opset to come": (
        lambda: graph([], {}, opset=99).SerializeToString(),
        None,
        "opset 99 is newer than 28, .*; export",
    ),
    "a format to come": (newer_format, None, "IR version 99 is newer than 14, .*; export the model with IR"),
    "no graph": (lambda: b"", None, "has no graph"),
    "another format": (lambda: b"\x1c\0\0\0TFL3" + bytes(64), None, "damaged"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_operator_index_and_reason(name):
    """What cannot be mapped is said, and where it stands in the file."""
    make, operator, reason = REFUSED[name]
    with pytest.raises(driver.ImportFailed, match=reason) as caught:
        read(make())
    assert caught.value.operator == operator
    assert caught.value.index == (None if operator is None else 0)
    assert operator is None or f"operator 0 ({operator})" in str(caught.value)


def test_an_unknown_dimension_is_named():
    """Where the HAL needs it, the message has the tensor, its dimensions, and how to fix them."""
    nodes = [NODE("MatMul", ["x", "z"], ["y"])]
    data = graph(nodes, {"x": (F, ["rows", 3, 4]), "z": (F, [2, 4, 3])}).SerializeToString()
    with pytest.raises(
        driver.ImportFailed,
        match=re.escape(
            "'x' (FLOAT [0, 3, 4]): its sizes must be known; fix its sizes with, for example, shapes={'x': (1, 3, 4)}"
        ),
    ):
        read(data)


def test_unknown_pixels_are_refused_where_sizes_matter():
    """A picture of any size can be convolved, and not padded to a whole number of windows."""
    nodes = [NODE("Conv", ["x", "w"], ["y"], auto_pad="SAME_UPPER")]
    data = graph(nodes, {"x": (F, [1, 3, "h", "w"])}, {"w": real(4, 3, 3, 3)})
    with pytest.raises(driver.ImportFailed, match=re.escape("shapes={'x': (1, 3, 320, 320)}")):
        read(data.SerializeToString())
    del data.graph.node[0].attribute[:]
    assert operands(read(data.SerializeToString()), "outputs")[0].dimensions == (1, 4, 0, 0)
