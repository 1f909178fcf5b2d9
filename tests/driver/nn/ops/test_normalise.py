import math

import numpy as np
import pytest

from driver.nn import ExecutionFailed, InvalidModel


def softmax(x, beta, axis):
    """The definition along one axis."""

    def one(row):
        e = [math.exp(beta * (v - max(row))) for v in row]
        return [v / sum(e) for v in e]

    return np.apply_along_axis(one, axis, x.astype(np.float64))


@pytest.mark.parametrize("axis", [0, 1, -1, -3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_softmax_of_floats(evaluate, dtype, axis):
    """SOFTMAX works along any axis, negative ones counting from the end."""
    x = np.random.default_rng(3).standard_normal((2, 3, 4)).astype(dtype) * 10
    limit = 1e-6 if dtype == np.float32 else 1e-3
    np.testing.assert_allclose(evaluate("SOFTMAX", x, dtype(0.5), axis), softmax(x, 0.5, axis), rtol=limit, atol=limit)


def test_softmax_of_huge_numbers(evaluate):
    """The maximum is subtracted first, so that nothing overflows."""
    assert evaluate("SOFTMAX", np.array([[3e38, 3e38]], np.float32), 1.0).tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(("dtype", "zero_point"), [(np.uint8, 0), (np.int8, -128)])
def test_softmax_of_quantised(evaluate, quantised, requantise, dtype, zero_point):
    """Quantised SOFTMAX has 1/256 steps and saturates at probability 1."""
    x = quantised(np.array([[0, 1, 50, 3], [100, 0, 0, 0]], dtype), 0.5, 20)
    expected = requantise(softmax(x.real, 1.0, -1), 1 / 256, zero_point, dtype)
    np.testing.assert_array_equal(evaluate("SOFTMAX", x, 1.0), expected)


@pytest.mark.parametrize(("beta", "axis", "reason"), [(0.0, 0, "beta"), (-1.0, 0, "beta"), (1.0, 2, "axis 2")])
def test_softmax_refuses_bad_parameters(evaluate, beta, axis, reason):
    """Beta has to be positive and the axis to exist."""
    with pytest.raises((ExecutionFailed, InvalidModel), match=reason):
        evaluate("SOFTMAX", np.ones((2, 2), np.float32), beta, axis)


def log_softmax(x, beta, axis):
    """The logarithm of the definition of SOFTMAX along one axis."""

    def one(row):
        shifted = [beta * (v - max(row)) for v in row]
        return [v - math.log(sum(map(math.exp, shifted))) for v in shifted]

    return np.apply_along_axis(one, axis, x.astype(np.float64))


@pytest.mark.parametrize(("shape", "axis"), [((5,), 0), ((2, 3, 4), -2), ((1, 2, 1, 3, 2), 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_log_softmax_of_floats(evaluate, dtype, shape, axis):
    """LOG_SOFTMAX works along any axis of any rank, and stays finite where SOFTMAX would be 0."""
    x = np.random.default_rng(4).standard_normal(shape).astype(dtype) * 100
    limit = 1e-5 if dtype == np.float32 else 2e-3
    y = evaluate("LOG_SOFTMAX", x, dtype(1.5), axis)
    np.testing.assert_allclose(y, log_softmax(x, 1.5, axis), rtol=limit, atol=limit)


def l2(x, axis):
    """Every vector divided by its length."""
    return np.apply_along_axis(
        lambda row: row / max(math.sqrt(sum(v * v for v in row)), 1e-6), axis, x.astype(np.float64)
    )


@pytest.mark.parametrize(("shape", "axis"), [((4,), ()), ((2, 3, 4), (1,)), ((2, 1, 2, 3), (-4,)), ((2, 2, 2, 3), ())])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_l2_normalization_of_floats(evaluate, dtype, shape, axis):
    """L2_NORMALIZATION gives unit vectors along any axis, the last when none is named."""
    x = np.random.default_rng(5).standard_normal(shape).astype(dtype)
    limit = 1e-5 if dtype == np.float32 else 1e-3
    y = evaluate("L2_NORMALIZATION", x, *axis)
    np.testing.assert_allclose(y, l2(x, axis[0] if axis else -1), rtol=limit, atol=limit)


@pytest.mark.parametrize(("dtype", "zero_point"), [(np.uint8, 128), (np.int8, 0)])
def test_l2_normalization_of_quantised(evaluate, quantised, requantise, dtype, zero_point):
    """Quantised vectors come in 1/128 steps, and a vector of zeros stays one."""
    info = np.iinfo(dtype)
    raw = np.random.default_rng(6).integers(info.min, info.max, (3, 5), dtype, endpoint=True)
    raw[1] = zero_point
    x = quantised(raw, 0.1, zero_point)
    np.testing.assert_array_equal(
        evaluate("L2_NORMALIZATION", x), requantise(l2(x.real, 1), 1 / 128, zero_point, dtype)
    )


def response(x, radius, bias, alpha, beta):
    """The definition along the last axis, one number at a time."""
    y = np.empty(x.shape)
    for i in np.ndindex(*x.shape):
        row, k = x[i[:-1]], i[-1]
        squares = sum(float(v) ** 2 for v in row[max(0, k - radius) : k + radius + 1])
        y[i] = row[k] * (bias + alpha * squares) ** -beta
    return y


@pytest.mark.parametrize("radius", [0, 1, 2, 3, 20, 2**31 - 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("axis", [(), (0,), (-2,)])
def test_local_response_normalization(evaluate, axis, dtype, radius):
    """LOCAL_RESPONSE_NORMALIZATION sums squares of neighbours on one axis, as far as there are any."""
    x = np.random.default_rng(7).standard_normal((8, 7, 6)).astype(dtype)
    along = axis[0] if axis else -1
    moved = np.moveaxis(x.astype(np.float64), along, -1)
    expected = np.moveaxis(response(moved, radius, 2.0, 0.5, 0.75), -1, along)
    y = evaluate("LOCAL_RESPONSE_NORMALIZATION", x, radius, dtype(2.0), dtype(0.5), dtype(0.75), *axis)
    limit = 1e-5 if dtype == np.float32 else 2e-3
    np.testing.assert_allclose(y, expected, rtol=limit, atol=limit)


def test_local_response_normalization_keeps_small_numbers_beside_large_ones(evaluate):
    """A window of small numbers is not drowned by a large one outside it."""
    x = np.array([[1e8, 1e-3, 1e-3]], np.float32)
    y = evaluate("LOCAL_RESPONSE_NORMALIZATION", x, 0, 0.0, 1.0, 0.5)
    np.testing.assert_allclose(y, 1, rtol=1e-5)


@pytest.mark.parametrize("nchw", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_instance_normalization(evaluate, dtype, nchw):
    """INSTANCE_NORMALIZATION takes mean and population variance of every channel of every image."""
    x = (np.random.default_rng(8).standard_normal((2, 4, 3, 5)) * 3 + 100).astype(dtype)
    real = x.astype(np.float64)
    mean = real.mean((1, 2), keepdims=True)
    expected = (real - mean) * 2.0 / np.sqrt(((real - mean) ** 2).mean((1, 2), keepdims=True) + 0.125) - 1
    source = x.transpose(0, 3, 1, 2).copy() if nchw else x
    y = evaluate("INSTANCE_NORMALIZATION", source, dtype(2.0), dtype(-1.0), dtype(0.125), nchw)
    limit = 1e-4 if dtype == np.float32 else 5e-3
    np.testing.assert_allclose(y.transpose(0, 2, 3, 1) if nchw else y, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("LOG_SOFTMAX", (1.0, 2), "axis 2"),
        ("L2_NORMALIZATION", (-3,), "axis -3"),
        ("LOCAL_RESPONSE_NORMALIZATION", (-1, 1.0, 1.0, 1.0), "radius -1"),
        ("LOCAL_RESPONSE_NORMALIZATION", (1, 1.0, 1.0, 1.0, 2), "axis 2"),
        ("INSTANCE_NORMALIZATION", (1.0, 1.0, 1.0, False), "rank"),
    ],
)
def test_normalisations_refuse(evaluate, name, arguments, reason):
    """Axes and radii that do not exist fail."""
    with pytest.raises((ExecutionFailed, InvalidModel), match=reason):
        evaluate(name, np.ones((2, 2), np.float32), *arguments)
