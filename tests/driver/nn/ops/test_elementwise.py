import math

import numpy as np
import pytest

from driver.nn import (
    ExecutionFailed,
    Interpreter,
    InvalidModel,
    Model,
    ModelBuilder,
    Operand,
    Operation,
    Subgraph,
    validate,
)

CLAMPS = {0: (-math.inf, math.inf), 1: (0, math.inf), 2: (-1, 1), 3: (0, 6)}


def each(function, a, b):
    """`function` of every broadcast pair, by an explicit loop."""
    a, b = np.broadcast_arrays(a, b)
    out = np.empty(a.shape, np.float64)
    for i in np.ndindex(a.shape):
        out[i] = function(float(a[i]), float(b[i]))
    return out


SHAPES = [((2, 3), (2, 3)), ((2, 1, 3), (4, 1)), ((1,), (2, 2)), ((5, 1, 1, 2), (1, 3, 2, 1))]
REAL = {
    "ADD": lambda x, y: x + y,
    "SUB": lambda x, y: x - y,
    "MUL": lambda x, y: x * y,
    "DIV": lambda x, y: x / y,
}


def floats(rng, shape, dtype=np.float32):
    return (rng.integers(1, 64, shape) * rng.choice([-0.25, 0.25], shape)).astype(dtype)


@pytest.mark.integration
@pytest.mark.parametrize("code", CLAMPS)
@pytest.mark.parametrize(("a", "b"), SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", REAL)
def test_add_sub_mul_div_of_floats(evaluate, *, name, dtype, a, b, code):
    """Float arithmetic broadcasts trailing dimensions and clamps to the fused activation."""
    rng = np.random.default_rng(1)
    x, y = floats(rng, a, dtype), floats(rng, b, dtype)
    expected = np.clip(each(REAL[name], x, y), *CLAMPS[code])
    np.testing.assert_allclose(evaluate(name, x, y, code), expected, rtol=1e-6 if dtype == np.float32 else 1e-3)


@pytest.mark.parametrize("code", CLAMPS)
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("name", ["ADD", "SUB", "MUL"])
def test_add_sub_mul_of_quantised(evaluate, quantised, requantise, *, name, dtype, code):
    """Quantised arithmetic is real arithmetic in three independent parameter sets."""
    rng, info = np.random.default_rng(2), np.iinfo(dtype)
    x = quantised(rng.integers(info.min, info.max, (3, 40), dtype, endpoint=True), 0.5, info.min + 100)
    y = quantised(rng.integers(info.min, info.max, (40,), dtype, endpoint=True), 0.125, info.min + 3)
    real = np.clip(each(REAL[name], x.real, y.real), *CLAMPS[code])
    expected = requantise(real, 0.25, info.min + 77, dtype)
    np.testing.assert_array_equal(evaluate(name, x, y, code, scale=0.25, zero_point=info.min + 77), expected)


@pytest.mark.parametrize(
    ("name", "expected"), [("ADD", [9, -5]), ("SUB", [5, -9]), ("MUL", [14, -14]), ("DIV", [3, -4])]
)
def test_add_sub_mul_div_of_integers(evaluate, name, expected):
    """TENSOR_INT32 arithmetic is exact, and DIV rounds toward minus infinity."""
    x, y = np.array([7, -7], np.int32), np.array([2], np.int32)
    assert evaluate(name, x, y, 0).tolist() == expected


def test_add_of_integers_takes_no_activation(evaluate):
    """A fused activation on TENSOR_INT32 fails."""
    with pytest.raises((ExecutionFailed, InvalidModel), match="activation 1"):
        evaluate("ADD", np.zeros(2, np.int32), np.zeros(2, np.int32), 1)


def test_div_by_zero_follows_ieee(evaluate):
    """DIV by zero gives infinities and NaN, and no Python warning."""
    x, y = np.array([1, -1, 0], np.float32), np.zeros(3, np.float32)
    np.testing.assert_array_equal(evaluate("DIV", x, y, 0), [np.inf, -np.inf, np.nan])


def test_mul_output_scale_has_to_exceed_the_product(quantised):
    """A quantised MUL whose output is finer than its products is no valid model."""
    m = ModelBuilder()
    x = m.input("quant8_asymm", (2,), scale=1.0)
    with pytest.raises(InvalidModel, match="product of the input scales"):
        m.operation("MUL", x, x, 0, scale=1.0)


@pytest.mark.parametrize(("name", "low", "high"), [("RELU", 0, math.inf), ("RELU1", -1, 1), ("RELU6", 0, 6)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_relu_relu1_relu6_of_floats(evaluate, dtype, name, low, high):
    """RELU clamps to [0, inf), RELU1 to [-1, 1], RELU6 to [0, 6]."""
    x = np.linspace(-9, 9, 37, dtype=dtype).reshape(1, 37)
    np.testing.assert_array_equal(evaluate(name, x), np.clip(x, low, high).astype(dtype))


@pytest.mark.parametrize(("name", "low", "high"), [("RELU", 0, math.inf), ("RELU1", -1, 1), ("RELU6", 0, 6)])
@pytest.mark.parametrize(("dtype", "zero_point"), [(np.uint8, 100), (np.int8, -30), (np.uint8, 0)])
def test_relu_relu1_relu6_of_quantised(evaluate, quantised, requantise, *, dtype, zero_point, name, low, high):
    """A quantised RELU clamps raw values and keeps the parameters."""
    x = quantised(np.arange(256).astype(np.uint8).view(dtype), 0.125, zero_point)
    expected = requantise(np.clip(x.real, low, high), 0.125, zero_point, dtype)
    np.testing.assert_array_equal(evaluate(name, x), expected)


@pytest.mark.parametrize(("name", "real"), [("LOGISTIC", lambda x: 1 / (1 + math.exp(-x))), ("TANH", math.tanh)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_logistic_tanh_of_floats(evaluate, dtype, name, real):
    """LOGISTIC is 1 / (1 + e^-x), TANH the hyperbolic tangent."""
    x = np.linspace(-8, 8, 33, dtype=dtype)
    expected = [real(float(v)) for v in x]
    np.testing.assert_allclose(evaluate(name, x), expected, rtol=1e-6 if dtype == np.float32 else 2e-3, atol=1e-6)


def test_logistic_saturates_quietly(evaluate):
    """LOGISTIC of huge numbers reaches its limits without an overflow warning."""
    assert evaluate("LOGISTIC", np.array([-1e4, 1e4], np.float32)).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "real", "scale", "zero_points"),
    [("LOGISTIC", lambda x: 1 / (1 + math.exp(-x)), 1 / 256, (0, -128)), ("TANH", math.tanh, 1 / 128, (128, 0))],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_logistic_tanh_of_quantised(evaluate, quantised, requantise, *, dtype, name, real, scale, zero_points):
    """Quantised LOGISTIC and TANH have fixed output parameters."""
    x = quantised(np.arange(256).astype(np.uint8).view(dtype), 0.05, 10)
    zero_point = zero_points[dtype is np.int8]
    expected = requantise(np.array([real(v) for v in x.real]), scale, zero_point, dtype)
    np.testing.assert_array_equal(evaluate(name, x), expected)


def test_logistic_output_parameters_are_not_free():
    """The builder refuses another output scale and names the right one."""
    m = ModelBuilder()
    x = m.input("quant8_asymm", (2,), scale=0.5)
    with pytest.raises(InvalidModel, match=r"scale=0.5 cannot be chosen here, it is 0.00390625"):
        m.operation("LOGISTIC", x, scale=0.5)


def test_div_of_integers_beyond_arithmetic(evaluate):
    """A divisor of 0, and the one quotient that does not fit, neither crash nor warn, nor touch their neighbours."""
    x, y = np.array([7, -(2**31), 0, -7], np.int32), np.array([0, -1, 0, 2], np.int32)
    assert evaluate("DIV", x, y, 0)[3] == -4


@pytest.mark.parametrize("name", ["ADD", "SUB", "MUL", "DIV"])
@pytest.mark.parametrize(
    ("a", "b", "expected"), [((0, 3), (1, 3), (0, 3)), ((1, 3), (0, 1), (0, 3)), ((0,), (2, 1), (2, 0))]
)
def test_add_sub_mul_div_of_no_elements(run_model, name, a, b, expected):
    """A dimension of 0 goes with 0 or 1 and gives 0."""
    m = ModelBuilder()
    m.output(m.operation(name, m.input("float32", a), m.input("float32", b), 0))
    assert run_model(m.build(), np.zeros(a, np.float32), np.zeros(b, np.float32))[0].shape == expected


def test_no_elements_do_not_broadcast_to_some(run_model):
    """A dimension of 0 does not go with 2."""
    m = ModelBuilder()
    m.output(m.operation("ADD", m.input("float32", (0,)), m.input("float32", (2,)), 0))
    with pytest.raises(ExecutionFailed, match="do not broadcast"):
        run_model(m.build(), np.zeros(0, np.float32), np.zeros(2, np.float32))


@pytest.mark.parametrize("name", ["ADD", "SUB", "MUL", "DIV"])
def test_arithmetic_up_to_rank_4(name):
    """Either operand of more than 4 dimensions is refused."""
    for a, b in [((1,) * 5, (1,)), ((1,), (1,) * 5)]:
        m = ModelBuilder()
        with pytest.raises(InvalidModel, match="rank"):
            m.operation(name, m.input("float32", a), m.input("float32", b), 0)


FAR_APART = [(1e-40, 3e38, 1.0), (3e38, 3e38, 3.4e38), (1e-44, 1e-44, 1e-44), (1, 1, 1e-44)]


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        *((name, scales) for name in ("ADD", "SUB") for scales in FAR_APART),
        *(
            ("MUL", scales)
            for scales in [(1e-40, 3e38, 1.0), (1e-44, 1e-44, 1e-44), (1e-44, 1, 3.4e38), (1e19, 1e19, 3e38)]
        ),
    ],
)
def test_add_sub_mul_of_any_scales(evaluate, quantised, requantise, name, scales):
    """Scales from one end of float32 to the other give what real arithmetic gives."""
    a, b, out = (float(np.float32(s)) for s in scales)
    raw = np.array([0, 1, 99, 100, 101, 255], np.uint8)
    x, y = quantised(raw.reshape(-1, 1), a, 100), quantised(raw, b, 99)
    expected = requantise(each(REAL[name], x.real, y.real), out, 10)
    np.testing.assert_array_equal(evaluate(name, x, y, 0, scale=out, zero_point=10), expected)


def two_inputs(name, kind, scales):
    """A model of one binary operation on quantised inputs, put together without the builder's checks."""
    operands = [Operand(kind, (2,), scale, 0, lifetime) for scale, lifetime in zip(scales, (1, 1, 2), strict=True)]
    operands.insert(2, Operand("INT32", (), lifetime=3, value=np.array(0, np.int32)))
    return Model(Subgraph(operands, [Operation(name, [0, 1, 2], [3])], [0, 1], [3]))


@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (3e38, 3e38, 3e38)])
def test_mul_scale_rule_by_sign(scales):
    """An output too fine for its products: unsigned data is refused by validation, signed data when it runs."""
    with pytest.raises(InvalidModel, match="product of the input scales"):
        validate(two_inputs("MUL", "TENSOR_QUANT8_ASYMM", scales))
    signed = two_inputs("MUL", "TENSOR_QUANT8_ASYMM_SIGNED", scales)
    validate(signed)
    with pytest.raises(ExecutionFailed, match="product of the input scales"):
        Interpreter(signed).bind([np.zeros(2, np.int8)] * 2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("RELU", [math.inf, 0, math.nan]),
        ("RELU1", [1, -1, math.nan]),
        ("RELU6", [6, 0, math.nan]),
        ("LOGISTIC", [1, 0, math.nan]),
        ("TANH", [1, -1, math.nan]),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_activations_of_the_extremes(evaluate, dtype, name, expected):
    """Infinities reach the limits and NaN stays, without a warning."""
    x = np.array([math.inf, -math.inf, math.nan], dtype)
    np.testing.assert_array_equal(evaluate(name, x), np.array(expected, dtype))


@pytest.mark.parametrize("name", ["RELU", "RELU1", "RELU6", "LOGISTIC", "TANH"])
@pytest.mark.parametrize("kind", ["float32", "quant8_asymm"])
def test_activations_of_no_elements(run_model, name, kind):
    """A tensor without elements gives one without elements."""
    m = ModelBuilder()
    value = m.input(kind, (2, 0), scale=0.0 if kind == "float32" else 0.5)
    m.output(m.operation(name, value))
    assert run_model(m.build(), np.zeros((2, 0), value.operand.type.dtype))[0].shape == (2, 0)
