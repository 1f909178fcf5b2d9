import math

import numpy as np
import pytest

from driver.nn import ExecutionFailed, InvalidModel


def dense(x, w, bias):
    """x . W^T + bias, one product at a time."""
    rows = x.reshape(-1, w.shape[1])
    return np.array([[sum(float(a) * float(b) for a, b in zip(r, u, strict=True)) for u in w] for r in rows]) + bias


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(2, 6), (2, 3, 2), (1, 2, 2, 3)])
def test_fully_connected_of_floats(evaluate, shape, dtype):
    """FULLY_CONNECTED flattens its input to rows of the weights' width; the result has rank 2."""
    rng = np.random.default_rng(1)
    x, w, b = (rng.standard_normal(s).astype(dtype) for s in (shape, (4, 6), (4,)))
    limit = 1e-5 if dtype == np.float32 else 5e-3
    y = evaluate("FULLY_CONNECTED", x, w, b, 1)
    np.testing.assert_allclose(y, np.maximum(dense(x, w, b), 0), rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("width", [5, 300])
def test_fully_connected_of_quantised(evaluate, quantised, requantise, width, dtype):
    """Quantised products are exact, whether float32 can hold their sums or not."""
    rng, info = np.random.default_rng(2), np.iinfo(dtype)
    x = quantised(rng.integers(info.min, info.max, (3, width), dtype, endpoint=True), 0.5, info.min)
    w = quantised(rng.integers(info.min, info.max, (2, width), dtype, endpoint=True), 0.5, info.min)
    bias = quantised(np.array([-1, 7], np.int32), 0.25)
    expected = requantise(dense(x.real, w.real, bias.real), 4096.0, info.min + 3, dtype)
    y = evaluate("FULLY_CONNECTED", x, w, bias, 0, scale=4096.0, zero_point=info.min + 3)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    ("x", "w", "bias", "reason"),
    [((2, 5), (4, 3), (4,), "does not divide"), ((2, 3), (4, 3), (3,), "bias"), ((2, 3), (4, 3, 1), (4,), "weights")],
)
def test_fully_connected_refuses_bad_shapes(evaluate, x, w, bias, reason):
    """Shapes that do not fit together fail."""
    with pytest.raises((ExecutionFailed, InvalidModel), match=reason):
        evaluate("FULLY_CONNECTED", *(np.ones(s, np.float32) for s in (x, w, bias)), 0)


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
