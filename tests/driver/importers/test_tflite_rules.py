"""What an imported model keeps of its file, and what is refused."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from header_files import labelled_tflite
from tflite_writer import Writer

import driver
from burst_engine.names import install_command
from driver.importers.tflite.table import TABLE
from driver.nn import OPERATIONS, OperandLifeTime, OperandType


def operands(model, which):
    return [model.main.operands[i] for i in getattr(model.main, which)]


def convolution(bias=True, **more):
    """A file with one convolution and weights of some size."""
    w = Writer()
    inputs = [w.input((1, 8, 8, 3), **more), w.random((16, 3, 3, 3)), w.random((16,))]
    y = w.operator(
        "CONV_2D", inputs[: 2 + bias], (1, 8, 8, 16), StrideW=1, StrideH=1, DilationWFactor=1, DilationHFactor=1
    )
    return w, y


# ---- what is kept --------------------------------------------------------------------------------------------------


def test_inputs_and_outputs_have_their_names(load):
    """The tensor's name, and a temporary has its own too."""
    w = Writer()
    x = w.input((2,), name="left")
    y = w.operator("ABS", [x], (2,))
    model = load(w.file([w.operator("NEG", [y], (2,))]))
    assert [o.extra for o in operands(model, "inputs")] == [{"name": "left"}]
    assert [o.extra for o in model.main.operands] == [{"name": "left"}, {"name": "t1"}, {"name": "t2"}]


def test_a_signature_names_better(load):
    """The names of the signature come first, those of the tensors stand beside them."""
    w = Writer()
    x = w.input((2,), name="serving_default_x:0")
    y = w.operator("ABS", [x], (2,))
    model = load(w.file([y], ({"x": x}, {"magnitude": y})))
    assert operands(model, "inputs")[0].extra == {"name": "x", "tensor": "serving_default_x:0"}
    assert operands(model, "outputs")[0].extra == {"name": "magnitude", "tensor": "t1"}


def test_constants_are_views_of_the_file(load):
    """Weights lie where the file has them, cannot be written, and tell where they are."""
    w, y = convolution()
    data = w.file([y])
    constants = [o for o in load(data).main.operands if o.lifetime == OperandLifeTime.CONSTANT_REFERENCE]
    assert [o.dimensions for o in constants] == [(16, 3, 3, 3), (16,)]
    for operand in constants:
        offset, length = operand.location
        assert operand.value.tobytes() == data[offset : offset + length]
        assert not operand.value.flags.writeable
        assert not operand.value.flags.owndata


def test_an_unknown_dimension_stays_unknown(load, run):
    """-1 in the signature of a shape: any batch can be run."""
    w = Writer()
    x = w.input((1, 4), signature=[-1, 4])
    model = load(w.file([w.operator("ABS", [x], (1, 4), signature=[-1, 4])]))
    assert operands(model, "inputs")[0].dimensions == (0, 4)
    feed = np.float32([[-1, 2, -3, 4]] * 5)
    np.testing.assert_array_equal(run(model, [feed])[0], np.abs(feed))


def test_an_output_may_be_an_input_or_a_constant_or_stand_twice(load, run):
    """The HAL has none of it; a copy is made."""
    w = Writer()
    x, c = w.input((2,)), w.constant(np.float32([5, 6]))
    y = w.operator("ADD", [x, c], (2,))
    results = run(load(w.file([x, c, y, y])), w.feeds)
    for result, wanted in zip(results, (w.feeds[0], [5, 6], w.feeds[0] + [5, 6], w.feeds[0] + [5, 6]), strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-6)


def test_small_weights_of_a_float_layer(load, run):
    """int8 weights, with a scale for each unit, multiply floats as what they stand for."""
    w = Writer()
    x, raw = w.input((2, 4)), np.int8([[1, -2, 3, 4], [5, 6, -7, 8]])
    weights = w.constant(raw, scale=[0.5, 0.25], channel=0)
    model = load(w.file([w.operator("FULLY_CONNECTED", [x, weights], (2, 2))]))
    np.testing.assert_allclose(run(model, w.feeds)[0], w.feeds[0] @ (raw * [[0.5], [0.25]]).T, rtol=1e-5)


def test_the_missing_bias_has_the_scale_of_the_products(load):
    """Zeros of scale input * filter."""
    w = Writer()
    x, f = w.input((1, 4, 4, 2), "int8", scale=0.5), w.random((3, 1, 1, 2), "int8", scale=0.25)
    fields = {"StrideW": 1, "StrideH": 1, "DilationWFactor": 1, "DilationHFactor": 1}
    y = w.operator("CONV_2D", [x, f], (1, 4, 4, 3), "int8", scale=1.0, **fields)
    model = load(w.file([y]))
    bias = model.main.operands[model.main.operations[0].inputs[2]]
    assert (bias.type, bias.scale, bias.value.tolist()) == (OperandType.TENSOR_INT32, 0.125, [0, 0, 0])


@pytest.mark.skipif("SVDF" not in OPERATIONS, reason="no SVDF here")
def test_variables_become_states(load, run):
    """Inputs and outputs behind the others; a state handed from run to run does what the variable does in LiteRT."""
    litert = pytest.importorskip("ai_edge_litert.interpreter", reason="no ai-edge-litert to compare with")
    w = Writer()
    weights = w.random((4, 3)), w.random((4, 5)), w.random((2,))
    memory = w.variable((2, 20))
    y = w.operator("SVDF", [w.input((2, 3)), *weights, memory], (2, 2), Rank=2)
    data = w.file([y])
    model, other = load(data), litert.Interpreter(model_content=data)
    assert [o.extra.get("state") for o in operands(model, "inputs")] == [None, 0]
    assert [o.extra.get("state") for o in operands(model, "outputs")] == [None, 0]
    other.allocate_tensors()
    state = np.zeros((2, 20), np.float32)
    for turn in range(4):
        feed = w.feeds[0] * (turn + 1)
        result, state = run(model, [feed, state])
        other.set_tensor(other.get_input_details()[0]["index"], feed)
        other.invoke()
        wanted = other.get_tensor(other.get_output_details()[0]["index"])
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)


def test_an_imported_model_runs_on_a_device(load):
    """From the file to a result in another process."""
    w, y = convolution()
    model = load(w.file([y]))
    with driver.connect("reference") as device, device.prepare(model) as prepared:
        result = prepared.run(w.feeds[0])[0]
    assert result.shape == (1, 8, 8, 16)
    assert np.isfinite(result).all()


# ---- what is refused -----------------------------------------------------------------------------------------------


def one(operator, *inputs, result=(2, 3), **fields):
    """A file with one operator on inputs given as (shape, dtype)."""
    w = Writer()
    tensors = [w.input(*i) for i in inputs or [((2, 3), "float32")]]
    outputs = w.operator(operator, tensors, result, **fields)
    return w.file(outputs if isinstance(outputs, list) else [outputs])


def without_inputs(operator):
    """A file with one operator that has none."""
    w = Writer()
    w.input((2, 3), "float32")
    return w.file([w.operator(operator, [], (2, 3))])


def lstm_of_vectors():
    w = Writer()
    x, vector = w.input((2, 3)), w.random((4,))
    states = [w.variable((2, 4)), w.variable((2, 4))]
    gates = [vector] * 8 + [-1] * 3 + [vector] * 4
    return w.file([w.operator("LSTM", [x, *gates, -1, -1, *states], (2, 4), FusedActivationFunction=4)])


def dense_of(rows, units):
    w = Writer()
    x = w.tensor((rows, 8, 4), "int8", scale=0.5)
    w.inputs.append(x)
    weights = w.random((units, 4), "int8", scale=[0.5] * units)
    fields = {"scale": 1.0, "KeepNumDims": True}
    return w.file([w.operator("FULLY_CONNECTED", [x, weights], (rows, 8, units), "int8", **fields)])


F, I, B = ((2, 3), "float32"), ((2, 3), "int32"), ((2, 3), "bool")
Q8 = {"scale": 0.5, "zero_point": 0}
REFUSED = {
    "an operator without a counterpart": (
        lambda: one("CUMSUM", F, ((1,), "int32")),
        "CUMSUM",
        "has no operation for it",
    ),
    "a custom operator": (lambda: one("CUSTOM:Mine"), "CUSTOM 'Mine'", "has no operation for it"),
    "options of another operator": (lambda: one("ADD", F, F, options="Pool2DOptions"), "ADD", "takes AddOptions"),
    "16-bit activations": (lambda: one("ABS", ((2, 3), "int16")), None, "no tensors of this type"),
    "more than four dimensions": (
        lambda: one("ADD", ((1,) * 5, "float32"), ((1,) * 5, "float32"), result=(1,) * 5),
        "ADD",
        "rank",
    ),
    "integer division": (lambda: one("DIV", I, I, dtype="int32"), "DIV", "towards minus infinity"),
    "types that the HAL does not take": (lambda: one("EXP", I, dtype="int32"), "EXP", "TENSOR_INT32"),
    "a choice that cannot be broadcast": (
        lambda: one("SELECT_V2", B, F, ((2,), "float32")),
        "SELECT_V2",
        "cannot become",
    ),
    "a choice whose open result cannot be told": (
        lambda: one("SELECT_V2", ((2, 3), "bool"), F, ((2,), "float32"), result=(0, 3)),
        "SELECT_V2",
        "do not broadcast",
    ),
    "the remainder of floats": (lambda: one("FLOOR_MOD", F, F), "FLOOR_MOD", "no remainder of floats"),
    "batches that do not go together": (
        lambda: one("BATCH_MATMUL", ((2, 3, 4), "float32"), ((3, 4, 5), "float32"), result=(2, 3, 5)),
        "BATCH_MATMUL",
        "do not broadcast",
    ),
    "more pairs of matrices than can be unrolled": (
        lambda: one("BATCH_MATMUL", *[((513, 1, 1), "float32")] * 2, result=(513, 1, 1)),
        "BATCH_MATMUL",
        "513 pairs of matrices",
    ),
    "a factor that is a vector": (
        lambda: one("BATCH_MATMUL", ((4,), "float32"), ((4, 5), "float32"), result=(5,)),
        "BATCH_MATMUL",
        "two or more",
    ),
    "the exact GELU": (lambda: one("GELU", F), "GELU", "no error function"),
    "an axis that is computed": (lambda: one("ARG_MAX", F, ((1,), "int32"), result=(2,)), "ARG_MAX", "be a constant"),
    "an axis that is none": (lambda: one("UNPACK", F, Axis=5, Num=1), "UNPACK", "axis 5"),
    "batches of a GATHER": (lambda: one("GATHER", F, I, BatchDims=1), "GATHER", "batch_dims 1"),
    "new axes": (
        lambda: one("STRIDED_SLICE", F, *[((2,), "int32")] * 3, NewAxisMask=1),
        "STRIDED_SLICE",
        "new axes",
    ),
    "an activation without a counterpart": (lambda: one("ADD", F, F, FusedActivationFunction=5), "ADD", "activation 5"),
    "TANH fused into quantised arithmetic": (
        lambda: one("ADD", F, F, dtype="int8", **Q8, FusedActivationFunction=4),
        "ADD",
        "TANH",
    ),
    "a padding that is none": (lambda: one("MAX_POOL_2D", Padding=7), "MAX_POOL_2D", "padding 7"),
    "too few inputs": (lambda: one("ADD", F), "ADD", "input 1 is missing"),
    "no input": (lambda: without_inputs("PAD"), "PAD", "input 0 is missing"),
    "a slope that is no number": (
        lambda: one("LEAKY_RELU", I, dtype="int32", Alpha=np.nan),
        "LEAKY_RELU",
        "no such PRELU",
    ),
    "weights that are no matrix": (lstm_of_vectors, "LSTM", "expected 2"),
    "a result larger than the HAL counts": (lambda: dense_of(2**26, units=16), "FULLY_CONNECTED", "larger than 4 GiB"),
    "the main subgraph inside itself": (lambda: one("IF", B, ThenSubgraphIndex=0), "IF", "main subgraph"),
    "a subgraph that does not exist": (lambda: one("IF", B, ThenSubgraphIndex=3), "IF", "subgraph 3 does not exist"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_operator_index_and_reason(load, name):
    """What cannot be mapped is said, and where it stands in the file."""
    make, operator, reason = REFUSED[name]
    with pytest.raises(driver.ImportFailed, match=reason) as caught:
        load(make())
    assert caught.value.operator == operator
    assert caught.value.index == (None if operator is None else 0)
    assert operator is None or f"operator 0 ({operator})" in str(caught.value)


def test_the_index_is_that_of_the_file(load):
    """The second operator is number 1, however many operations the first has become."""
    w = Writer()
    y = w.operator("CEIL", [w.input((2,))], (2,))
    with pytest.raises(driver.ImportFailed, match=re.escape("operator 1 (CUMSUM)")):
        load(w.file([w.operator("CUMSUM", [y], (2,))]))


def test_more_dimensions_than_the_hal_has(load):
    """Between two RESHAPE nothing but a TRANSPOSE."""
    w = Writer()
    x = w.operator("RESHAPE", [w.input((4, 8)), w.constant(np.int32([2] * 5))], (2,) * 5)
    y = w.operator("ABS", [x], (2,) * 5)
    with pytest.raises(driver.ImportFailed, match="has 5 dimensions") as caught:
        load(w.file([w.operator("RESHAPE", [y, w.constant(np.int32([32]))], (32,))]))
    assert (caught.value.operator, caught.value.index) == ("ABS", 1)


def test_a_batch_that_is_unknown_in_a_computed_shape(load, run):
    """It is the -1 of the RESHAPE; anything else cannot have it."""
    w = Writer()
    x = w.input((1, 4, 2), signature=[-1, 4, 2])
    sizes = w.operator("SHAPE", [x], (3,), "int32", OutType=2)
    places = [w.constant(np.int32([v])) for v in (0, 1, 1)]
    batch = w.operator("STRIDED_SLICE", [sizes, *places], (), "int32", ShrinkAxisMask=1)
    shape = w.operator("PACK", [batch, w.constant(np.int32(8))], (2,), "int32", ValuesCount=2)
    result = w.operator("RESHAPE", [x, shape], (1, 8), signature=[-1, 8])
    feed = np.arange(24, dtype=np.float32).reshape(3, 4, 2)
    np.testing.assert_array_equal(run(load(w.file([result])), [feed])[0], feed.reshape(3, 8))
    with pytest.raises(driver.ImportFailed, match="dimensions that are not known"):
        load(w.file([w.operator("CAST", [batch], ())]))


def test_the_rest_beside_an_unknown_batch(load, run):
    """x.reshape(len(x), -1): what is left for -1 is known, as the unknown dimension is that of x itself."""
    w = Writer()
    x = w.input((1, 4, 2), signature=[-1, 4, 2])
    sizes = w.operator("SHAPE", [x], (3,), "int32", OutType=2)
    places = [w.constant(np.int32([v])) for v in (0, 1, 1)]
    batch = w.operator("STRIDED_SLICE", [sizes, *places], (), "int32", ShrinkAxisMask=1)
    shape = w.operator("PACK", [batch, w.constant(np.int32(-1))], (2,), "int32", ValuesCount=2)
    feed = np.arange(24, dtype=np.float32).reshape(3, 4, 2)
    result = w.operator("RESHAPE", [x, shape], (1, 1), signature=[-1, -1])
    np.testing.assert_array_equal(run(load(w.file([result])), [feed])[0], feed.reshape(3, 8))
    other = w.operator(
        "RESHAPE", [w.operator("ABS", [x], (1, 4, 2), signature=[-1, 4, 2]), shape], (1, 1), signature=[-1, -1]
    )
    with pytest.raises(driver.ImportFailed, match="more than one size is open"):
        load(w.file([other]))


def test_lists_of_sizes_do_not_grow(load):
    """Joined to itself over and over, one would be larger than any memory."""
    w = Writer()
    sizes = w.operator("SHAPE", [w.input((2, 3))], (2,), "int32", OutType=2)
    for n in range(2, 40):
        sizes = w.operator("CONCATENATION", [sizes, sizes], (min(2**n, 99),), "int32")
    with pytest.raises(driver.ImportFailed, match="a list of 64 sizes"):
        load(w.file([sizes]))


def test_a_variable_inside_control_flow(load):
    """A state cannot leave a branch."""
    w = Writer()
    flag = w.input((), "bool")
    g = w.graph()
    inputs = [g.random((2, 3)), g.random((4, 3)), g.random((4, 5)), g.random((2,)), g.variable((2, 20))]
    g.outputs = [g.operator("SVDF", inputs, (2, 2), Rank=2)]
    y = w.operator("IF", [flag], (2, 2), ThenSubgraphIndex=1, ElseSubgraphIndex=1)
    with pytest.raises(driver.ImportFailed, match=r"inside of control flow|SVDF does not exist"):
        load(w.file([y]))


def test_subgraphs_that_refer_to_each_other(load):
    """A cycle is found without following it."""
    w = Writer()
    for other in (2, 1):
        g = w.graph()
        flag = g.input((), "bool")
        g.outputs = [g.operator("IF", [flag, flag], (1,), "bool", ThenSubgraphIndex=other, ElseSubgraphIndex=other)]
    flag = w.input((), "bool")
    y = w.operator("IF", [flag, flag], (1,), "bool", ThenSubgraphIndex=1, ElseSubgraphIndex=2)
    with pytest.raises(driver.ImportFailed, match="refers to itself"):
        load(w.file([y]))


@pytest.mark.parametrize("suffix", [".pb", "", ".tflit"])
def test_a_suffix_that_is_not_known(tmp_path, suffix):
    """The error lists those that are."""
    with pytest.raises(driver.ImportFailed, match=r"supported are .*\.tflite"):
        driver.load(tmp_path / f"model{suffix}")


def test_the_package_that_reads_files_is_an_extra(tmp_path, monkeypatch):
    """Without it the error says what to install."""
    path = tmp_path / "model.tflite"
    path.write_bytes(labelled_tflite())
    for name in [name for name in sys.modules if name.startswith("driver.importers.tflite")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tflite", None)
    with pytest.raises(driver.ImportFailed, match=re.escape(f"; {install_command('tflite')}")):
        driver.load(path, form="operations")


def test_the_page_lists_every_operator():
    """docs/operators.md names the operators of the table, and how many they are."""
    page = (Path(__file__).parents[3] / "docs" / "operators.md").read_text()
    (count, listed) = re.search(r"(\d+) builtin\s+operators:\n([A-Z0-9_,\s]+)\.", page).groups()
    assert int(count) == len(TABLE)
    assert re.split(r",\s+", listed.strip()) == sorted(TABLE)


def test_a_slope_that_float16_cannot_hold(load):
    """It is infinite, and nobody is warned of it."""
    model = load(one("LEAKY_RELU", ((2, 3), "float16"), dtype="float16", Alpha=1e30))
    assert np.isinf(model.main.operands[model.main.operations[0].inputs[1]].value).all()
