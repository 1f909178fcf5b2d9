import numpy as np
import pytest

from driver.nn import ExecutionFailed, InvalidModel
from driver.nn.operands import constant_operand
from driver.nn.operation import Tensor
from driver.nn.ops.sums import weight_matrix


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


def test_large_weights_are_not_copied(evaluate):
    """A matrix of 4 MB and more is read where it lies, however BLAS would like it; the products are the same."""
    rng = np.random.default_rng(3)
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((2, 1024), (1024, 1024)))
    y = evaluate("FULLY_CONNECTED", x, w, np.zeros(1024, np.float32), 0)
    np.testing.assert_allclose(y, x.astype(np.float64) @ w.T, rtol=1e-4, atol=1e-4)
    assert np.shares_memory(weight_matrix(Tensor.of(constant_operand(w))), w)
    assert not np.shares_memory(weight_matrix(Tensor.of(constant_operand(w[:512]))), w)


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
