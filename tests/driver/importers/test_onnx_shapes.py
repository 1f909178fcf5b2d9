"""Files that leave sizes open, that choose between branches, and that move integers: imported once sizes are given."""

import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import driver
from driver.importers.onnx import reader as importer
from driver.importers.onnx.header import read_header

runtime = pytest.importorskip("onnxruntime", reason="no onnxruntime to compare with")
F, I32, I64, B = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL
NODE = helper.make_node
random = np.random.default_rng(7)


def graph(nodes, inputs, constants=None, outputs=("y",), opset=17, declared=()):
    """The bytes of a model. inputs: name -> (type, shape). declared: (name, type, shape) of values in between."""
    held = [numpy_helper.from_array(np.asarray(a), name) for name, a in (constants or {}).items()]
    infos = [helper.make_tensor_value_info(name, *info) for name, info in inputs.items()]
    results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    between = [helper.make_tensor_value_info(*info) for info in declared]
    made = helper.make_graph(nodes, "g", infos, results, held, value_info=between)
    imports = [helper.make_opsetid("", opset)]
    return helper.make_model(made, opset_imports=imports, ir_version=8).SerializeToString()


def branch(nodes, outputs, constants=None):
    held = [numpy_helper.from_array(np.asarray(a), name) for name, a in (constants or {}).items()]
    return helper.make_graph(nodes, "b", [], [helper.make_empty_tensor_value_info(name) for name in outputs], held)


def own(data, feeds):
    """What onnxruntime gives for the file."""
    proto = onnx.shape_inference.infer_shapes(onnx.load_from_string(data))
    session = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


@pytest.fixture
def agrees(run):
    """Import the file with the shapes of the feeds, and compare every result with onnxruntime's."""

    def agrees(data, **feeds):
        model = importer.read(memoryview(data), shapes={name: feed.shape for name, feed in feeds.items()})
        for result, wanted in zip(run(model, list(feeds.values())), own(data, feeds), strict=True):
            size = np.abs(wanted).max(initial=1.0)
            np.testing.assert_allclose(result, wanted.reshape(result.shape), rtol=1e-5, atol=1e-6 * size)
        return model

    return agrees


def floats(*shape):
    return random.uniform(-2, 2, shape).astype(np.float32)


# ---- sizes -----------------------------------------------------------------------------------------------------------

OPEN = graph(
    [NODE("Resize", ["x", "", "scales"], ["r"]), NODE("Add", ["r", "s"], ["y"])],
    {"x": (F, ["batch", 2, "h", "w"]), "s": (F, ["batch", 1, 1, 1])},
    {"scales": np.float32([1, 1, 2, 2])},
)


def test_sizes_that_are_given_fix_the_other_inputs_too(agrees):
    """`batch` is 1 in `s` because it is in `x`: one shape is enough."""
    agrees(OPEN, x=floats(1, 2, 3, 5), s=floats(1, 1, 1, 1))
    model = importer.read(memoryview(OPEN), shapes={"x": (4, 2, 3, None), "s": (None,) * 4} | {"x": (4, 2, 3, 5)})
    assert [model.main.operands[i].dimensions for i in model.main.inputs] == [(4, 2, 3, 5), (4, 1, 1, 1)]


def test_a_size_may_stay_open(run):
    """None keeps it open, and any size runs."""
    data = graph([NODE("Abs", ["x"], ["y"])], {"x": (F, ["n", "m"])})
    model = importer.read(memoryview(data), shapes={"x": (None, 3)})
    assert model.main.operands[model.main.inputs[0]].dimensions == (0, 3)
    assert run(model, [floats(5, 3)])[0].shape == (5, 3)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (
            {"image": (1, 2, 3, 3)},
            "names 'image', which is not an input; the inputs are 'x' [batch, 2, h, w], 's' [batch",
        ),
        ({"x": (1, 2, 3)}, "shapes['x'] = (1, 2, 3) has 3 dimensions; the input is [batch, 2, h, w]"),
        ({"x": (1, 4, 3, 3)}, "dimension 1 is 2 in the file; the input is [batch, 2, h, w]"),
        ({"x": (1, 2, -3, 3)}, "a size must be in 1.."),
        ({"x": (1, 2, 3, 3), "s": (2, 1, 1, 1)}, "batch is 2 here, and 1 in shapes['x']"),
    ],
)
def test_wrong_sizes_are_answered_with_the_right_ones(shapes, reason):
    """A wrong name, rank, size, and two sizes that contradict each other."""
    with pytest.raises(driver.ImportFailed, match=re.escape(reason)):
        importer.read(memoryview(OPEN), shapes=shapes)


def test_an_open_size_that_is_needed_is_refused_with_the_remedy():
    """The tensor, its dimensions, and shapes= that can be pasted."""
    with pytest.raises(driver.ImportFailed) as caught:
        importer.read(memoryview(OPEN))
    assert "'x' (FLOAT [0, 2, 0, 0])" in caught.value.reason
    assert caught.value.remedy == "fix the sizes with, for example, shapes={'x': (1, 2, 320, 320), 's': (1, 1, 1, 1)}"


def test_the_remedy_gives_one_size_to_one_name():
    """`batch` is 1 wherever it stands, since it stands first in one input; so the remedy can be pasted, and helps."""
    nodes = [NODE("Pad", ["x", "pads"], ["p"], mode="reflect"), NODE("Add", ["p", "state"], ["y"])]
    inputs = {"state": (F, [2, "batch", 1]), "x": (F, ["batch", "samples"])}
    data = graph(nodes, inputs, {"pads": np.int64([0, 1, 0, 1])})
    with pytest.raises(driver.ImportFailed, match="mode 'reflect' of a dimension of unknown size") as caught:
        importer.read(memoryview(data))
    assert caught.value.remedy.endswith("shapes={'state': (2, 1, 1), 'x': (1, 512)}")
    importer.read(memoryview(data), shapes={"state": (2, 1, 1), "x": (1, 512)})


@pytest.mark.parametrize("size", [-1, "?", "None", "-1"])
def test_sizes_without_a_name(run, size):
    """As Paddle and others write an open size; two of them may differ."""
    data = graph([NODE("Abs", ["x"], ["y"])], {"x": (F, [size, 3, size])})
    assert run(importer.read(memoryview(data), shapes={"x": (2, 3, 4)}), [floats(2, 3, 4)])[0].shape == (2, 3, 4)
    declared = read_header(memoryview(data)).inputs[0]
    assert (declared.shape, declared.extra) == ((0, 3, 0), {})


# ---- integers and booleans -------------------------------------------------------------------------------------------


def test_integers_are_reshaped_exactly(agrees):
    """The HAL reshapes floats only; all 32 bits of an integer survive."""
    data = graph([NODE("Reshape", ["x", "to"], ["y"])], {"x": (I32, [2, 6])}, {"to": np.int64([3, -1])})
    numbers = random.integers(-(2**31), 2**31, (2, 6)).astype(np.int32)
    numbers[0, :4] = -(2**31), 2**31 - 1, -1, 2**24 + 1
    agrees(data, x=numbers)


def test_one_row_of_integers(agrees):
    """A Gather of one index, which drops a dimension."""
    data = graph([NODE("Gather", ["x", "at"], ["y"], axis=1)], {"x": (I64, [2, 3, "n"])}, {"at": np.int64(1)})
    agrees(data, x=random.integers(-9, 9, (2, 3, 4)))


def test_booleans_are_reshaped(agrees):
    """As 0 and 1."""
    nodes = [NODE("Greater", ["x", "zero"], ["b"]), NODE("Reshape", ["b", "to"], ["y"])]
    data = graph(nodes, {"x": (F, ["n", 4])}, {"zero": np.float32(0), "to": np.int64([-1])})
    agrees(data, x=floats(3, 4))


def test_integers_and_booleans_are_joined_moved_padded_and_repeated(agrees):
    """What the HAL does with floats only."""
    nodes = [
        NODE("Concat", ["x", "x"], ["c"], axis=1),
        NODE("Transpose", ["c"], ["t"], perm=[1, 0]),
        NODE("Pad", ["t", "pads"], ["p"]),
        NODE("Greater", ["p", "zero"], ["g"]),
        NODE("Concat", ["g", "g"], ["b"], axis=0),
        NODE("Slice", ["b", "start", "end"], ["s"]),
        NODE("Tile", ["s", "times"], ["y"]),
    ]
    constants = {"pads": np.int64([0, 1, 0, 0]), "zero": np.int32(0), "start": np.int64([1]), "end": np.int64([7])}
    data = graph(nodes, {"x": (I32, [2, 2])}, constants | {"times": np.int64([1, 2])}, outputs=("p", "y"))
    agrees(data, x=random.integers(-(2**31), 2**31, (2, 2)).astype(np.int32))


# ---- more than four dimensions ---------------------------------------------------------------------------------------


def test_windows_of_an_image(agrees):
    """Six dimensions, as transformers of images cut their windows: transposed, sliced, scaled, and back."""
    nodes = [
        NODE("Reshape", ["x", "apart"], ["r"]),
        NODE("Transpose", ["r"], ["t"], perm=[0, 1, 3, 2, 4, 5]),
        NODE("Mul", ["t", "factor"], ["m"]),
        NODE("Sigmoid", ["m"], ["e"]),
        NODE("Slice", ["e", "first", "last", "axes", "steps"], ["s"]),
        NODE("Gather", ["s", "some"], ["g"], axis=5),
        NODE("Concat", ["g", "g"], ["c"], axis=3),
        NODE("ReduceMean", ["c"], ["u"], axes=[3, 4], keepdims=1),
        NODE("Sub", ["c", "u"], ["d"]),
        NODE("Softmax", ["d"], ["o"], axis=3),
        NODE("Split", ["o"], ["a", "b"], axis=4),
        NODE("Add", ["a", "b"], ["w"]),
        NODE("Reshape", ["w", "flat"], ["y"]),
    ]
    constants = {
        "apart": np.int64([2, 2, 3, 4, 2, 4]),
        "factor": floats(1, 2, 1, 1, 1, 4),
        "first": np.int64([1, -1]),
        "last": np.int64([4, -(2**62)]),
        "axes": np.int64([2, 1]),
        "steps": np.int64([2, -1]),
        "some": np.int64([3, 0]),
        "flat": np.int64([2, -1]),
    }
    agrees(graph(nodes, {"x": (F, [2, 6, 8, 4])}, constants), x=floats(2, 6, 8, 4))


def test_heads_that_are_repeated(agrees):
    """Expand in five dimensions, as grouped attention has it."""
    nodes = [
        NODE("Unsqueeze", ["x", "two"], ["u"]),
        NODE("Expand", ["u", "to"], ["e"]),
        NODE("Reshape", ["e", "flat"], ["y"]),
    ]
    constants = {"two": np.int64([2]), "to": np.int64([1, 2, 3, 1, 1]), "flat": np.int64([1, 6, 4, 5])}
    agrees(graph(nodes, {"x": (F, [1, 2, 4, 5])}, constants), x=floats(1, 2, 4, 5))


@pytest.mark.parametrize(
    "order", [(2, 0, 3, 1, 4), (4, 3, 2, 1, 0), (1, 0, 3, 2, 4), (0, 1, 4, 3, 2), (4, 0, 1, 2, 3), (3, 1, 0, 4, 2)]
)
@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_five_dimensions_that_are_all_apart(agrees, order, kind):
    """Transposed in several steps: as heads of attention with a batch, and whatever else."""
    nodes = [
        NODE("Reshape", ["x", "wide"], ["w"]),
        NODE("Transpose", ["w"], ["t"], perm=order),
        NODE("Reshape", ["t", "flat"], ["y"]),
    ]
    constants = {"wide": np.int64([0, 3, 4, 5, 6]), "flat": np.int64([-1, 6])}
    x = random.integers(-(2**31), 2**31, (2, 12, 30)).astype(kind)
    agrees(graph(nodes, {"x": (I32 if kind == np.int32 else F, ["n", 12, 30])}, constants), x=x)


def test_an_output_of_five_dimensions_some_of_size_one(agrees):
    """It gets those back."""
    data = graph([NODE("Reshape", ["x", "to"], ["y"])], {"x": (F, [6, 4])}, {"to": np.int64([1, 2, 1, 3, 4])})
    agrees(data, x=floats(6, 4))


def test_bounds_that_are_computed(agrees):
    """Clip between values of the model."""
    nodes = [NODE("ReduceMax", ["x"], ["m"], keepdims=0), NODE("Sub", ["m", "one"], ["l"])]
    nodes += [NODE("Clip", ["x", "l"], ["y"])]
    agrees(graph(nodes, {"x": (F, ["n", 5])}, {"one": np.float32(1)}), x=floats(3, 5))


# ---- If --------------------------------------------------------------------------------------------------------------

THEN = branch([NODE("Mul", ["x", "two"], ["t"])], ["t"], {"two": np.float32(2)})
ELSE = branch([NODE("Abs", ["x"], ["a"]), NODE("Add", ["a", "x"], ["e"])], ["e"])


@pytest.mark.parametrize("rank", [2, 3])
def test_a_condition_that_shapes_decide_is_decided_at_load_time(agrees, rank):
    """The branch that is taken stands in place of the If, as in files that torch exports."""
    nodes = [
        NODE("Shape", ["x"], ["s"]),
        NODE("Size", ["s"], ["rank"]),
        NODE("Equal", ["rank", "three"], ["is"]),
        NODE("If", ["is"], ["i"], then_branch=THEN, else_branch=ELSE),
        NODE("Relu", ["i"], ["y"]),
    ]
    data = graph(nodes, {"x": (F, [2] * rank)}, {"three": np.int64(3)})
    model = agrees(data, x=floats(*[2] * rank))
    wanted = ["MUL", "RELU"] if rank == 3 else ["ABS", "ADD", "RELU"]
    assert [o.type for o in model.main.operations] == wanted


@pytest.mark.parametrize("value", [-1.5, 1.5])
def test_a_condition_that_values_decide_is_an_if_of_the_hal(agrees, value):
    """Both branches are subgraphs; what either reads of the graph around it is an input of both."""
    nodes = [
        NODE("Neg", ["z"], ["w"]),
        NODE("ReduceMax", ["x"], ["m"], keepdims=1),
        NODE("Greater", ["m", "zero"], ["is"]),
        NODE(
            "If",
            ["is"],
            ["y"],
            then_branch=branch([NODE("MatMul", ["w", "weights"], ["t"])], ["t"]),
            else_branch=branch([NODE("Add", ["x", "w"], ["e"])], ["e"]),
        ),
    ]
    constants = {"zero": np.float32(0), "weights": floats(3, 3)}
    data = graph(nodes, {"x": (F, [2, 3]), "z": (F, ["rows", 3])}, constants)
    model = agrees(data, x=np.full((2, 3), value, np.float32), z=floats(2, 3))
    assert "IF" in [o.type for o in model.main.operations]
    assert len(model.referenced) == 2


def test_branches_within_a_branch(agrees):
    """An If in a branch of another one, which reads a value of the main graph."""
    inner = NODE("If", ["is"], ["i"], then_branch=THEN, else_branch=ELSE)
    outer = branch([inner, NODE("Neg", ["i"], ["n"])], ["n"])
    nodes = [
        NODE("ReduceSum", ["x"], ["m"], keepdims=0),
        NODE("Less", ["m", "zero"], ["is"]),
        NODE("If", ["is"], ["y"], then_branch=outer, else_branch=branch([NODE("Abs", ["x"], ["o"])], ["o"])),
    ]
    for sign in (-1, 1):
        agrees(graph(nodes, {"x": (F, [2, 3])}, {"zero": np.float32(0)}), x=np.full((2, 3), sign, np.float32))


def test_branches_of_different_shapes_are_refused():
    """The HAL's IF has one type for its result."""
    other = branch([NODE("Unsqueeze", ["x", "axes"], ["u"])], ["u"], {"axes": np.int64([0])})
    data = graph([NODE("If", ["c"], ["y"], then_branch=THEN, else_branch=other)], {"c": (B, []), "x": (F, [2])})
    with pytest.raises(driver.ImportFailed, match=re.escape("its branches give 'y' as TENSOR_FLOAT32 [2]")):
        importer.read(memoryview(data))


# ---- all obstacles ---------------------------------------------------------------------------------------------------


def found(data, **shapes):
    return importer.convert(memoryview(data), None, shapes)[1]


def test_every_obstacle_is_named_once():
    """Two operators that cannot be imported, and not those that only read what the first ones give."""
    nodes = [
        NODE("NonZero", ["x"], ["places"]),
        NODE("Transpose", ["places"], ["turned"]),
        NODE("GatherND", ["x", "turned"], ["picked"]),
        NODE("Abs", ["picked"], ["size"]),
        NODE("Mystery", ["size"], ["y"]),
        NODE("Reshape", ["x", "size"], ["z"]),
    ]
    data = graph(nodes, {"x": (F, [2, 3])}, outputs=("y", "z"))
    assert [(o.operator, o.number) for o in found(data)] == [("NonZero", 0), ("GatherND", 2), ("Mystery", 4)]
    first = found(data)[0]
    assert first.tensors == ("x", "places")
    assert "'x' (FLOAT [2, 3])" in first.reason
    with pytest.raises(driver.ImportFailed, match=re.escape("operator 0 (NonZero)")) as caught:
        importer.read(memoryview(data))
    assert str(caught.value).endswith("(and 2 more obstacles)")
    assert caught.value.others == 2


def test_the_search_goes_on_with_declared_shapes():
    """The file says what the first one gives; so the second one, which depends on sizes, is found."""
    nodes = [
        NODE("Mystery", ["x"], ["m"]),
        NODE("TopK", ["m", "k"], ["y", "i"], axis=0),
    ]
    data = graph(nodes, {"x": (F, [4, 3])}, {"k": np.int64([2])}, declared=[("m", F, [4, 3])])
    assert [o.operator for o in found(data)] == ["Mystery", "TopK"]
    unsaid = graph(nodes, {"x": (F, [4, 3])}, {"k": np.int64([2])})
    assert [o.operator for o in found(unsaid)] == ["Mystery"]


def test_a_file_without_obstacles_has_none():
    """With the sizes that it needs; without them there is one, which tells them."""
    assert found(OPEN, x=(1, 2, 3, 3)) == []
    [only] = found(OPEN)
    assert (only.operator, only.number) == ("Resize", 0)
    assert "shapes={'x': (1, 2, 320, 320)" in only.remedy


def test_obstacles_of_inputs_and_of_the_whole_file():
    """A type that the HAL does not have, in an input that two operators read; and a file that is none."""
    nodes = [NODE("Abs", ["x"], ["a"]), NODE("Neg", ["x"], ["b"]), NODE("Mystery", ["b"], ["y"])]
    kinds = [(o.operator, o.tensors) for o in found(graph(nodes, {"x": (TensorProto.DOUBLE, [2])}))]
    assert kinds == [(None, ("x",)), ("Mystery", ("b", "y"))]
    with pytest.raises(driver.ImportFailed, match="damaged"):
        found(b"\x1c\0\0\0TFL3" + bytes(64))


def test_obstacles_in_branches():
    """They are named with the If that they lie in."""
    bad = branch([NODE("Mystery", ["x"], ["m"])], ["m"])
    nodes = [NODE("If", ["c"], ["i"], then_branch=bad, else_branch=bad), NODE("Abs", ["i"], ["y"])]
    obstacles = found(graph(nodes, {"c": (B, []), "x": (F, [2])}))
    assert [(o.operator, o.number) for o in obstacles] == [("If", 0)]
    assert "in a branch of it, operator 0 (Mystery)" in obstacles[0].reason


# ---- constants that are computed -------------------------------------------------------------------------------------


def test_weights_that_are_computed_from_constants(agrees):
    """Dequantised per channel and turned; scaled by their norm, as weight_norm of torch does; a product of two."""
    quantised = random.integers(-99, 99, (3, 3, 4, 2)).astype(np.int8)
    nodes = [
        NODE("DequantizeLinear", ["q", "scales", "zeros"], ["d"], axis=2),
        NODE("Transpose", ["d"], ["w"], perm=[2, 3, 0, 1]),
        NODE("Conv", ["x", "w"], ["c"]),
        NODE("ReduceL2", ["v"], ["norm"], axes=[1, 2, 3], keepdims=1),
        NODE("Div", ["v", "norm"], ["direction"]),
        NODE("Mul", ["direction", "g"], ["w2"]),
        NODE("Conv", ["c", "w2", "bias"], ["e"]),
        NODE("GlobalAveragePool", ["e"], ["p"]),
        NODE("Flatten", ["p"], ["f"]),
        NODE("MatMul", ["a", "b"], ["product"]),
        NODE("Sigmoid", ["product"], ["w3"]),
        NODE("Gemm", ["f", "w3"], ["y"]),
    ]
    constants = {
        "q": quantised,
        "scales": floats(4) ** 2 * np.float32(0.01) + np.float32(0.001),
        "zeros": np.zeros(4, np.int8),
        "v": floats(5, 4, 3, 3),
        "g": floats(5, 1, 1, 1),
        "bias": floats(5),
        "a": floats(5, 7),
        "b": floats(7, 6),
    }
    model = agrees(graph(nodes, {"x": (F, ["n", 2, 8, 8])}, constants), x=floats(2, 2, 8, 8))
    assert {o.type for o in model.main.operations} <= {"TRANSPOSE", "CONV_2D", "MEAN", "RESHAPE", "FULLY_CONNECTED"}


def test_large_constants_are_computed_too(agrees):
    """Sums of weights that are larger than shapes are."""
    nodes = [NODE("Add", ["a", "b"], ["w"]), NODE("MatMul", ["x", "w"], ["y"])]
    data = graph(nodes, {"x": (F, [1, 200])}, {"a": floats(200, 150), "b": floats(1, 150)})
    model = agrees(data, x=floats(1, 200))
    assert [o.type for o in model.main.operations] == ["FULLY_CONNECTED"]


X = np.float32([[3, -1, 2], [0, 5, -4]])


@pytest.mark.parametrize(
    ("node", "constants"),
    [
        (NODE("Mod", ["c", "by"], ["k"], fmod=1), {"c": np.int64([-4, 7, -5]), "by": np.int64([3, -3, 2])}),
        (NODE("Mod", ["c", "by"], ["k"]), {"c": np.int64([-4, 7, -5]), "by": np.int64([3, -3, 2])}),
        (NODE("Mod", ["c", "by"], ["k"], fmod=1), {"c": np.float32([-4.5, 7, -5]), "by": np.float32([3, -3, 2])}),
        (NODE("ReduceSum", ["c", "axes"], ["k"]), {"c": X, "axes": np.int64([])}),
        (NODE("ReduceSum", ["c"], ["k"], keepdims=0), {"c": X}),
        (
            NODE("Slice", ["c", "first", "last", "", "steps"], ["k"]),
            {"c": X, "first": np.int64([1, -1]), "last": np.int64([-9, -4]), "steps": np.int64([-1, -2])},
        ),
    ],
)
def test_constants_by_the_rules_of_onnx(agrees, node, constants):
    """The sign of a remainder, all axes where none is named, and steps without axes."""
    nodes = [node, NODE("Cast", ["k"], ["f"], to=F), NODE("Sub", ["x", "f"], ["y"])]
    agrees(graph(nodes, {"x": (F, [1])}, constants, opset=18 if node.op_type == "Slice" else 13), x=floats(1))


# ---- what differs from the HAL ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [1, 0])
def test_of_equal_elements_the_first_is_taken(agrees, largest):
    """By TopK; the HAL takes the last."""
    x = np.float32([[1, 2, 2, 0, 2, 0], [0, 0, 0, 0, 0, 0]])
    agrees(graph([NODE("TopK", ["x", "k"], ["y", "i"], largest=largest)], {"x": (F, [2, 6])}, {"k": np.int64([4])},
                 outputs=("y", "i")), x=x)  # fmt: skip


def test_a_last_window_that_would_begin_in_the_padding(agrees):
    """Does not count, whether padding counts or not."""
    for counts in (0, 1):
        node = NODE("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], strides=[3, 3], pads=[1, 1, 1, 1], ceil_mode=1,
                    count_include_pad=counts)  # fmt: skip
        for size in (2, 3, 4, 5):
            agrees(graph([node], {"x": (F, [1, 3, size, size])}, opset=19), x=floats(1, 3, size, size))


@pytest.mark.parametrize("training", [True, None])
def test_dropout_of_training_is_refused(training):
    """A constant true, or an input that may be true."""
    nodes = [NODE("Dropout", ["x", "", "t"], ["y"])]
    inputs = {"x": (F, [2])} | ({"t": (B, [])} if training is None else {})
    constants = {} if training is None else {"t": np.array(training)}
    with pytest.raises(driver.ImportFailed, match="training_mode 't'"):
        importer.read(memoryview(graph(nodes, inputs, constants)))


def test_an_empty_constant_is_refused():
    """As an output, and by an operator that would compute with it."""
    nodes = [NODE("Shape", ["x"], ["y"], start=1, end=1)]
    with pytest.raises(driver.ImportFailed, match=r"'y' \(INT64 \[0\]\) is empty"):
        importer.read(memoryview(graph(nodes, {"x": (F, [2])})))


# ---- sizes that stay open, in chains of operators --------------------------------------------------------------------

N = {"x": (F, ["n", 4])}
SIZE = [NODE("Shape", ["x"], ["s"]), NODE("Gather", ["s", "zero"], ["n"])]


def test_an_open_size_survives_casts(run):
    """To 32 bits and back, and joined with a constant: it is the -1 of the new shape."""
    nodes = [
        *SIZE,
        NODE("Cast", ["n"], ["n32"], to=I32),
        NODE("Concat", ["n32", "rest"], ["to32"], axis=0),
        NODE("Cast", ["to32"], ["to"], to=I64),
        NODE("Reshape", ["x", "to"], ["y"]),
    ]
    data = graph(nodes, N, {"zero": np.int64([0]), "rest": np.int32([2, 2])})
    model = importer.read(memoryview(data))
    for count in (1, 3):
        assert run(model, [floats(count, 4)])[0].shape == (count, 2, 2)


@pytest.mark.parametrize(
    "chain",
    [
        [NODE("Cast", ["n"], ["c"], to=F), NODE("Mul", ["x", "c"], ["y"])],
        [
            NODE("Range", ["first", "n0", "one"], ["c"]),
            NODE("Cast", ["c"], ["f"], to=F),
            NODE("Add", ["x", "f"], ["y"]),
        ],
        [NODE("Slice", ["table", "zero", "n"], ["c"]), NODE("Add", ["x", "c"], ["y"])],
        [NODE("ConstantOfShape", ["s"], ["c"]), NODE("Add", ["x", "c"], ["y"])],
        [NODE("Expand", ["table", "s"], ["c"]), NODE("Mul", ["x", "c"], ["y"])],
        [NODE("Tile", ["table", "s"], ["c"]), NODE("Mul", ["x", "c"], ["y"])],
        [NODE("Cast", ["n"], ["c"], to=I32), NODE("Sub", ["two", "c"], ["d"]), NODE("Gather", ["x", "d"], ["y"])],
    ],
    ids=lambda chain: chain[0].op_type,
)
def test_nothing_is_computed_from_an_open_size(agrees, chain):
    """What would be a number is refused, with the remedy; with that, it is right."""
    constants = {"zero": np.int64([0]), "one": np.int64(1), "first": np.int64(0), "two": np.int32([2])}
    nodes = [*SIZE, NODE("Squeeze", ["n"], ["n0"]), *chain]
    data = graph(nodes, N, constants | {"table": floats(4, 4) if chain[0].op_type == "Slice" else floats(1, 1)})
    with pytest.raises(driver.ImportFailed, match=r"of unknown size|open|repeats") as caught:
        importer.read(memoryview(data))
    assert caught.value.remedy == "fix its sizes with, for example, shapes={'x': (1, 4)}"
    if chain[0].op_type != "Range":
        agrees(data, x=floats(2, 4))


def test_booleans_gain_dimensions(agrees):
    """Where no size is known it is refused with the remedy."""
    nodes = [NODE("Not", ["x"], ["n"]), NODE("Unsqueeze", ["n", "one"], ["y"])]
    data = graph(nodes, {"x": (B, ["n", "m"])}, {"one": np.int64([1])})
    agrees(data, x=np.array([[True, False], [False, False]]))
    with pytest.raises(driver.ImportFailed, match=r"only when all sizes are known; .*fix its sizes"):
        importer.read(memoryview(data))
