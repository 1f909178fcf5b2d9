import numpy as np
import pytest

from driver.nn import InvalidModel, ModelBuilder, OperandLifeTime, OperandType

T = OperandType


def test_the_first_example_of_the_manual(run_model):
    """Input, constant, operation, output, build: five lines make a model."""
    m = ModelBuilder()
    x = m.input("float32", (1, 4))
    y = m.constant(np.full((1, 4), 2, np.float32))
    z = m.operation("ADD", x, y, 0)
    m.output(z)
    model = m.build()
    assert run_model(model, np.ones((1, 4), np.float32))[0].tolist() == [[3, 3, 3, 3]]
    assert [o.lifetime.name for o in model.main.operands] == [
        "SUBGRAPH_INPUT",
        "CONSTANT_COPY",
        "CONSTANT_COPY",
        "SUBGRAPH_OUTPUT",
    ]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("float32", T.TENSOR_FLOAT32),
        ("float16", T.TENSOR_FLOAT16),
        ("int32", T.TENSOR_INT32),
        ("bool8", T.TENSOR_BOOL8),
        ("TENSOR_FLOAT32", T.TENSOR_FLOAT32),
        ("INT32", T.INT32),
        (np.float16, T.TENSOR_FLOAT16),
        (np.dtype(np.int32), T.TENSOR_INT32),
        (T.TENSOR_BOOL8, T.TENSOR_BOOL8),
    ],
)
def test_names_of_types(dtype, kind):
    """Short names, HAL names, numpy dtypes and the enumeration itself name a type."""
    dimensions = () if kind.is_scalar else (2,)
    assert ModelBuilder().input(dtype, dimensions).operand.type == kind


@pytest.mark.parametrize(("dtype", "kind"), [("quant8_asymm", 5), ("quant8_asymm_signed", 14)])
def test_quantised_inputs(dtype, kind):
    """A quantised input carries scale and zero point."""
    operand = ModelBuilder().input(dtype, (2,), scale=0.5, zero_point=3).operand
    assert (operand.type, operand.scale, operand.zero_point) == (kind, 0.5, 3)


@pytest.mark.parametrize(
    ("value", "kind", "dimensions"),
    [
        (3, T.INT32, ()),
        (1.5, T.FLOAT32, ()),
        (True, T.BOOL, ()),
        ([1, 2], T.TENSOR_INT32, (2,)),
        ([1.0, 2.0], T.TENSOR_FLOAT32, (2,)),
        (np.array([1, 2]), T.TENSOR_INT32, (2,)),
        (np.float16(1), T.FLOAT16, ()),
        (np.zeros((2, 1), np.float16), T.TENSOR_FLOAT16, (2, 1)),
        (np.zeros(2, bool), T.TENSOR_BOOL8, (2,)),
    ],
)
def test_constants_from_python(value, kind, dimensions):
    """Numbers become scalars, lists and arrays tensors; integers get the HAL's 32 bits."""
    operand = ModelBuilder().constant(value).operand
    assert (operand.type, operand.dimensions) == (kind, dimensions)
    assert operand.value.dtype.itemsize == kind.element_size


def test_float_arguments_follow_the_tensor():
    """A Python float beside a float16 tensor is a FLOAT16 scalar."""
    m = ModelBuilder()
    m.output(m.operation("SOFTMAX", m.input("float16", (2, 2)), 1.0))
    assert m.build().main.operands[1].type == T.FLOAT16


def test_an_omitted_argument_has_no_value():
    """None declares an operand of lifetime NO_VALUE, of the type its slot asks for."""
    m = ModelBuilder()
    m.output(m.operation("SQUEEZE", m.input("float32", (1, 2)), None))
    operand = m.build().main.operands[1]
    assert (operand.type, operand.lifetime) == (T.TENSOR_INT32, OperandLifeTime.NO_VALUE)


def test_dimensions_are_inferred_as_far_as_they_are_known():
    """Unknown dimensions stay 0; a shape that depends on unknown values stays unknown."""
    m = ModelBuilder()
    x = m.input("float32", (0, 8, 8, 3))
    y = m.operation("CONV_2D", x, np.zeros((5, 3, 3, 3), np.float32), np.zeros(5, np.float32), 1, 2, 2, 0)
    assert y.operand.dimensions == (0, 4, 4, 5)
    assert m.operation("RESHAPE", y, m.input("int32", (2,))).operand.dimensions == ()
    assert m.operation("RESHAPE", y, m.input("int32", (2,)), dimensions=(0, 80)).operand.dimensions == (0, 80)


def test_result_parameters():
    """Operations that keep or fix the quantisation need no scale=; the others say that they do."""
    m = ModelBuilder()
    x = m.input("quant8_asymm", (2, 2), scale=0.5, zero_point=7)
    relu, softmax = m.operation("RELU", x).operand, m.operation("SOFTMAX", x, 1.0).operand
    assert (relu.scale, relu.zero_point, softmax.scale, softmax.zero_point) == (0.5, 7, 1 / 256, 0)
    with pytest.raises(InvalidModel, match="pass scale= above 0"):
        m.operation("ADD", x, x, 0)


def test_result_types():
    """dtype= chooses among the types an operation can give."""
    m = ModelBuilder()
    x = m.input("float32", (2,))
    assert m.operation("QUANTIZE", x, scale=0.5).operand.type == T.TENSOR_QUANT8_ASYMM
    assert m.operation("QUANTIZE", x, scale=0.5, dtype="quant8_asymm_signed").operand.type == 14
    with pytest.raises(InvalidModel, match="dtype=TENSOR_INT32 is no result"):
        m.operation("QUANTIZE", x, scale=0.5, dtype="int32")


def test_names_are_kept():
    """The name of an input travels with the model."""
    m = ModelBuilder()
    assert m.input("float32", (1,), name="frame").operand.extra == {"name": "frame"}


X = (2, 2)
MISTAKES = [
    pytest.param(lambda m, x: m.input("float33", X), "dtype 'float33'.*did you mean 'float32'", id="dtype"),
    pytest.param(lambda m, x: m.input("quant8_asymm", X), "scale 0.0 has to be above 0", id="scale"),
    pytest.param(lambda m, x: m.input("float32", X, scale=1.0), "scale 1.0 has to be 0", id="needless scale"),
    pytest.param(lambda m, x: m.input("float32", (-1,)), r"dimensions \[-1\]", id="dimension"),
    pytest.param(lambda m, x: m.input("INT32", (1,)), "a scalar has no dimensions", id="scalar"),
    pytest.param(lambda m, x: m.constant(np.zeros(2)), r"array of float64.*\.astype", id="float64"),
    pytest.param(lambda m, x: m.constant(2**40), "does not fit into 32 bits", id="large integer"),
    pytest.param(lambda m, x: m.constant("text"), "neither a value of this builder", id="text"),
    pytest.param(lambda m, x: m.constant([[1], [1, 2]]), "neither a value of this builder", id="ragged"),
    pytest.param(lambda m, x: m.constant(np.zeros(2, np.uint8)), r"constant\(array, scale=", id="raw bytes"),
    pytest.param(lambda m, x: m.operation("ADDD", x, x, 0), "'ADDD'; did you mean 'ADD'", id="name"),
    pytest.param(lambda m, x: m.operation("ADD", x, x), "ADD: 2 inputs", id="count"),
    pytest.param(lambda m, x: m.operation("ADD", x, 1.0, 0), "ADD: input 1 has type FLOAT32", id="type"),
    pytest.param(lambda m, x: m.operation("ADD", x, None, 0), "ADD, input 1: cannot be omitted", id="omitted"),
    pytest.param(lambda m, x: m.operation("ADD", x, [1.0, 2, 3], 0), "ADD: .*do not broadcast", id="shape"),
    pytest.param(lambda m, x: m.operation("ADD", x, x, 7), "fused activation 7", id="activation"),
    pytest.param(
        lambda m, x: m.operation("ADD", ModelBuilder().input("float32", X), x, 0), "this builder", id="foreign"
    ),
    pytest.param(lambda m, x: m.operation("ADD", x, x, 0, scale=1.0), "do not apply", id="output scale"),
    pytest.param(lambda m, x: m.output(x), "only the result of an operation", id="input as output"),
    pytest.param(lambda m, x: m.output(3), "not a value of this builder", id="number as output"),
    pytest.param(lambda m, x: m.build(), "no output", id="no output"),
]


@pytest.mark.parametrize(("mistake", "reason"), MISTAKES)
def test_mistakes_are_named_and_change_nothing(mistake, reason):
    """A mistake names the argument and the remedy, and the builder stays as it was."""
    m = ModelBuilder()
    x = m.input("float32", X)
    with pytest.raises(InvalidModel, match=reason):
        mistake(m, x)
    y = m.operation("ADD", x, x, 0)
    m.output(y)
    assert len(m.build().main.operands) == 3


def test_an_output_is_listed_once():
    """The same value twice as an output is refused."""
    m = ModelBuilder()
    y = m.operation("RELU", m.input("float32", X))
    m.output(y)
    with pytest.raises(InvalidModel, match="SUBGRAPH_OUTPUT"):
        m.output(y)


def test_relaxed_models():
    """ModelBuilder(relaxed=True) allows the precision of float16."""
    m = ModelBuilder(relaxed=True)
    m.output(m.operation("RELU", m.input("float32", X)))
    assert m.build().relaxed
