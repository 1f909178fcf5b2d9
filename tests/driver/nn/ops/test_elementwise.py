import math

import numpy as np
import pytest

from driver.nn import ExecutionFailed, InvalidModel, ModelBuilder

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
