import numpy as np
import pytest

from driver.nn import ExecutionFailed, InvalidModel


def mean(x, axes, keep):
    """The mean over `axes`, collected element by element."""
    axes = {a % x.ndim for a in axes}
    cells = {}
    for index in np.ndindex(x.shape):
        key = tuple(0 if i in axes else v for i, v in enumerate(index))
        cells.setdefault(key, []).append(float(x[index]))
    shape = tuple(1 if i in axes else d for i, d in enumerate(x.shape))
    y = np.array([sum(cells[k]) / len(cells[k]) for k in np.ndindex(shape)]).reshape(shape)
    return y if keep else y.reshape([d for i, d in enumerate(shape) if i not in axes] or [1])


AXES = pytest.mark.parametrize("axes", [[0], [1, 2], [-1, 2, -1], [0, 1, 2]])


@AXES
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_mean_of_floats(evaluate, dtype, axes, keep):
    """MEAN averages over axes that may be negative or repeated; reducing everything gives [1]."""
    x = np.random.default_rng(1).standard_normal((2, 3, 4)).astype(dtype)
    y, expected = evaluate("MEAN", x, axes, keep), mean(x, axes, keep)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-6 if dtype == np.float32 else 1e-3, atol=1e-4)


@AXES
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_mean_of_quantised(evaluate, quantised, requantise, dtype, axes):
    """A quantised MEAN keeps the parameters and rounds to nearest."""
    x = quantised(np.arange(24, dtype=dtype).reshape(2, 3, 4), 0.5, 7)
    expected = requantise(mean(x.real, axes, 0), 0.5, 7, dtype)
    np.testing.assert_allclose(evaluate("MEAN", x, axes, 0).astype(int), expected, atol=1)


def test_mean_over_no_axes(evaluate):
    """An empty list of axes reduces nothing."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(evaluate("MEAN", x, np.zeros(0, np.int32), 0), x)


@pytest.mark.parametrize("axes", [[2], [-3]])
def test_mean_refuses_axes_out_of_range(evaluate, axes):
    """An axis that the input does not have fails."""
    with pytest.raises((ExecutionFailed, InvalidModel), match="axis"):
        evaluate("MEAN", np.ones((2, 2), np.float32), axes, 0)
