import math
import operator
from fractions import Fraction

import numpy as np
import pytest

from driver.nn import ExecutionFailed, InvalidModel, ModelBuilder

INF, NAN = math.inf, math.nan
REFUSED = (ExecutionFailed, InvalidModel)
COMPARISONS = {
    "EQUAL": operator.eq,
    "GREATER": operator.gt,
    "GREATER_EQUAL": operator.ge,
    "LESS": operator.lt,
    "LESS_EQUAL": operator.le,
    "NOT_EQUAL": operator.ne,
}
BROADCASTS = [((2, 3), (2, 3)), ((2, 1, 3), (4, 1)), ((1, 2, 1, 2, 1, 2), (2, 1, 2, 1, 1))]


def each(function, a, b, dtype=object):
    """`function` of every broadcast pair, by an explicit loop."""
    a, b = np.broadcast_arrays(a, b)
    out = np.empty(a.shape, dtype)
    for i in np.ndindex(a.shape):
        out[i] = function(a[i], b[i])
    return out


def run_pair(run_model, name, kind, a, b):
    """One run on two arrays of bytes as they are."""
    m = ModelBuilder()
    m.output(m.operation(name, m.input(kind, a.shape), m.input(kind, b.shape)))
    return run_model(m.build(), a, b)[0]


@pytest.mark.parametrize(("a", "b"), BROADCASTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
@pytest.mark.parametrize("name", COMPARISONS)
def test_equal_greater_less_not_equal_and_so_on(evaluate, *, name, dtype, a, b):
    """The six comparisons broadcast at any rank and give 0 or 1."""
    rng = np.random.default_rng(1)
    x, y = rng.integers(-2, 3, a).astype(dtype), rng.integers(-2, 3, b).astype(dtype)
    z = evaluate(name, x, y)
    assert z.dtype == np.bool_
    np.testing.assert_array_equal(z, each(COMPARISONS[name], x, y, np.uint8))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", COMPARISONS)
def test_equal_less_equal_greater_equal_of_the_extremes(evaluate, name, dtype):
    """NaN compares as IEEE has it, infinities as numbers; large integers are not rounded."""
    x = np.array([INF, -INF, NAN, 0.0, -0.0], dtype).reshape(-1, 1)
    np.testing.assert_array_equal(evaluate(name, x, x.reshape(1, -1)), each(COMPARISONS[name], x, x.T, np.uint8))
    i = np.array([2**31 - 1, 2**31 - 2, -(2**31)], np.int32).reshape(-1, 1)
    np.testing.assert_array_equal(evaluate(name, i, i.reshape(1, -1)), each(COMPARISONS[name], i, i.T, np.uint8))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_of_quantised(evaluate, quantised, name, dtype):
    """Quantised operands compare as the real numbers they stand for, exactly."""
    raw = np.arange(256).astype(np.uint8).view(dtype)
    for a, b in [((0.5, 10), (0.25, 3)), ((0.5, 10), (0.5, 10)), ((1e30, 0), (1e-30, 7))]:
        x, y = quantised(raw.reshape(-1, 1), *a), quantised(raw[::7], *b)
        real = [[Fraction(float(np.float32(q.scale))) * (int(v) - q.zero_point) for v in q.array.flat] for q in (x, y)]
        expected = [[COMPARISONS[name](u, v) for v in real[1]] for u in real[0]]
        np.testing.assert_array_equal(evaluate(name, x, y), np.array(expected, np.uint8))


TRUTHS = {name: lambda u, v, f=f: f(u != 0, v != 0) for name, f in COMPARISONS.items()}
TRUTHS |= {"LOGICAL_AND": lambda u, v: u != 0 and v != 0, "LOGICAL_OR": lambda u, v: u != 0 or v != 0}


@pytest.mark.parametrize("name", TRUTHS)
def test_logical_and_logical_or_and_comparisons_of_booleans(run_model, name):
    """Every byte but 0 is true, and results are 0 or 1."""
    bytes_ = np.array([0, 1, 2, 128, 255], np.uint8)
    z = run_pair(run_model, name, "bool8", bytes_.reshape(5, 1), bytes_)
    np.testing.assert_array_equal(z, each(TRUTHS[name], bytes_.reshape(5, 1), bytes_, np.uint8))


def test_logical_and_takes_booleans_only(evaluate):
    """Numbers are no truth values."""
    with pytest.raises(InvalidModel, match="TENSOR_BOOL8"):
        evaluate("LOGICAL_AND", np.ones(2, np.int32), np.ones(2, np.int32))


EXTREMES = {"MAXIMUM": max, "MINIMUM": min}


@pytest.mark.parametrize(("a", "b"), BROADCASTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
@pytest.mark.parametrize("name", EXTREMES)
def test_maximum_minimum_of_numbers(evaluate, *, name, dtype, a, b):
    """MAXIMUM and MINIMUM choose the greater and the smaller of every pair."""
    rng = np.random.default_rng(2)
    x, y = rng.integers(-99, 99, a).astype(dtype), rng.integers(-99, 99, b).astype(dtype)
    z = evaluate(name, x, y)
    assert z.dtype == dtype
    np.testing.assert_array_equal(z, each(EXTREMES[name], x, y, dtype))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("parameters", [(0.25, 30), (0.5, 10)])
def test_maximum_minimum_of_quantised(evaluate, quantised, requantise, *, name, dtype, parameters):
    """Quantised operands take the output's parameters first and are compared then."""
    raw = np.arange(256).astype(np.uint8).view(dtype)
    x, y = quantised(raw.reshape(-1, 1), 0.5, 10), quantised(raw[::5], 0.125, 3)
    a, b = (requantise(q.real, *parameters, dtype) for q in (x, y))
    z = evaluate(name, x, y, scale=parameters[0], zero_point=parameters[1])
    np.testing.assert_array_equal(z, each(EXTREMES[name], a, b, dtype))


@pytest.mark.parametrize(("name", "expected"), [("LESS", [1, 0]), ("MAXIMUM", [2, 3]), ("SELECT", [1, 2])])
def test_scales_of_integers_mean_nothing(run_model, name, expected):
    """TENSOR_INT32 may carry a scale, and its numbers stay what they are."""
    m = ModelBuilder()
    x, y = (m.input("int32", (2,), scale=scale) for scale in (4.0, 0.5))
    chosen = [np.array([True, False])] if name == "SELECT" else []
    m.output(m.operation(name, *chosen, x, y))
    assert run_model(m.build(), np.array([1, 3], np.int32), np.array([2, 2], np.int32))[0].tolist() == expected


def power(x, y):
    """x^y as IEEE has it."""
    try:
        return math.pow(x, y)
    except ValueError:
        return INF if x == 0 else NAN
    except OverflowError:
        return -INF if x < 0 and y % 2 == 1 else INF


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_pow(evaluate, dtype):
    """POW follows IEEE: fractional powers of negative numbers are NaN, and nothing warns."""
    x = np.array([0.0, 0.5, 1, -1, 2, -2, 9, 200, NAN, INF], dtype).reshape(-1, 1)
    y = np.array([0, 1, 2, 3, 0.5, -0.5, -2, 40, NAN, INF], dtype)
    with np.errstate(over="ignore"):
        expected = each(lambda u, v: power(float(u), float(v)), x, y, np.float64).astype(dtype)
    np.testing.assert_allclose(evaluate("POW", x, y), expected, rtol=1e-5 if dtype == np.float32 else 1e-3)


@pytest.mark.parametrize(("a", "b"), [*BROADCASTS, ((2, 3, 4), (1, 1, 4)), ((1, 4), (3, 1))])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_prelu_of_floats(evaluate, dtype, a, b):
    """PRELU multiplies what is negative by an alpha that broadcasts."""
    rng = np.random.default_rng(3)
    x, alpha = rng.integers(-64, 64, a) / 16, rng.integers(-8, 8, b) / 8
    expected = each(lambda u, v: u if u >= 0 else u * v, x, alpha, np.float64)
    np.testing.assert_allclose(evaluate("PRELU", x.astype(dtype), alpha.astype(dtype)), expected, rtol=1e-3)


def test_prelu_of_the_extremes(evaluate):
    """An infinite or undefined alpha does not touch what is not negative."""
    x, alpha = np.array([-0.0, 1, INF, -INF, NAN, -1], np.float32), np.array([[INF], [NAN], [0]], np.float32)
    expected = [[0, 1, INF, -INF, NAN, -INF], [0, 1, INF, NAN, NAN, NAN], [0, 1, INF, NAN, NAN, 0]]
    np.testing.assert_array_equal(evaluate("PRELU", x, alpha), np.array(expected, np.float32))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_prelu_of_quantised(evaluate, quantised, requantise, dtype):
    """A quantised PRELU is real arithmetic in three independent parameter sets."""
    raw = np.arange(256).astype(np.uint8).view(dtype)
    x, alpha = quantised(raw.reshape(-1, 1), 0.25, 50), quantised(raw[::37], 0.0625, 20)
    real = each(lambda u, v: u if u >= 0 else u * v, x.real, alpha.real, np.float64)
    z = evaluate("PRELU", x, alpha, scale=0.5, zero_point=40)
    np.testing.assert_array_equal(z, requantise(real, 0.5, 40, dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
@pytest.mark.parametrize("shape", [(6,), (1, 2, 1, 3, 1)])
def test_select_of_numbers(run_model, dtype, shape):
    """SELECT takes the first value where the condition is not 0, else the second."""
    m = ModelBuilder()
    chosen = np.array([0, 1, 2, 255, 0, 1], np.uint8).reshape(shape)
    a, b = (np.arange(k, k + 6).astype(dtype).reshape(shape) for k in (0, 10))
    m.output(m.operation("SELECT", m.input("bool8", shape), m.input(dtype, shape), m.constant(b)))
    assert run_model(m.build(), chosen, a)[0].reshape(-1).tolist() == [10, 1, 2, 3, 14, 5]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("parameters", [(0.25, 30), (0.5, 10)])
def test_select_of_quantised(evaluate, quantised, requantise, dtype, parameters):
    """Each side of a quantised SELECT takes the output's parameters."""
    raw = np.arange(256).astype(np.uint8).view(dtype)
    x, y, chosen = quantised(raw, 0.5, 10), quantised(raw, 0.125, 3), raw % 3 == 0
    a, b = (requantise(q.real, *parameters, dtype) for q in (x, y))
    z = evaluate("SELECT", chosen, x, y, scale=parameters[0], zero_point=parameters[1])
    assert z.tolist() == [int(a[i] if chosen[i] else b[i]) for i in range(256)]


def test_select_does_not_broadcast(evaluate):
    """All three inputs have the same dimensions."""
    for a, b in [((2, 1), (2, 3)), ((2, 3), (1, 3)), ((3,), (2, 3))]:
        with pytest.raises(REFUSED, match="have to be the same"):
            evaluate("SELECT", np.ones((2, 3), np.bool_), np.ones(a, np.float32), np.ones(b, np.float32))


@pytest.mark.parametrize("name", ["LESS", "MAXIMUM", "POW", "PRELU"])
def test_shapes_that_do_not_broadcast(evaluate, name):
    """Dimensions that neither agree nor are 1 fail."""
    with pytest.raises(REFUSED, match=r"\[2, 3\] and \[2\] do not broadcast"):
        evaluate(name, np.ones((2, 3), np.float32), np.ones(2, np.float32))


@pytest.mark.parametrize("name", ["EQUAL", "LOGICAL_OR", "MINIMUM", "SELECT"])
def test_no_elements(run_model, name):
    """None of these operations takes a tensor without elements."""
    m = ModelBuilder()
    kinds = {"LOGICAL_OR": ["bool8"] * 2, "SELECT": ["bool8", "int32", "int32"]}.get(name, ["float32"] * 2)
    values = [m.input(kind, (0,)) for kind in kinds]
    m.output(m.operation(name, *values))
    feeds = [np.zeros(0, v.operand.type.dtype) for v in values]
    with pytest.raises(ExecutionFailed, match="no empty tensor"):
        run_model(m.build(), *feeds)
