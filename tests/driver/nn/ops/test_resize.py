import itertools
import math

import numpy as np
import pytest

from driver.nn import ExecutionFailed, InvalidModel


def position(i, size, out, align, half_pixel):
    """The two source positions of output i and the weight of the second."""
    scale = (size - 1) / (out - 1) if align and out > 1 else size / out
    x = (i + 0.5) * scale - 0.5 if half_pixel else i * scale
    low = min(max(math.floor(x), 0), size - 1)
    high = min(max(math.ceil(x) if half_pixel else low + 1, 0), size - 1)
    return low, high, x - low


def bilinear(x, h, w, align, half_pixel):
    """Four neighbours for each output pixel, one at a time."""
    y = np.empty((x.shape[0], h, w, x.shape[3]))
    for i, j in itertools.product(range(h), range(w)):
        top, bottom, v = position(i, x.shape[1], h, align, half_pixel)
        left, right, u = position(j, x.shape[2], w, align, half_pixel)
        upper = x[:, top, left] * (1 - u) + x[:, top, right] * u
        lower = x[:, bottom, left] * (1 - u) + x[:, bottom, right] * u
        y[:, i, j] = upper * (1 - v) + lower * v
    return y


FLAGS = pytest.mark.parametrize(("align", "half_pixel"), [(False, False), (True, False), (False, True)])
SIZES = pytest.mark.parametrize(("h", "w"), [(6, 9), (2, 3), (1, 1), (3, 5)])


@FLAGS
@SIZES
@pytest.mark.parametrize("nchw", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_resize_bilinear_of_floats(evaluate, *, dtype, h, w, align, half_pixel, nchw):
    """RESIZE_BILINEAR to a size, width first, with every convention for corners and centres."""
    x = np.random.default_rng(1).standard_normal((2, 3, 5, 2)).astype(dtype)
    expected = bilinear(x.astype(np.float64), h, w, align, half_pixel)
    y = evaluate("RESIZE_BILINEAR", x.transpose(0, 3, 1, 2).copy() if nchw else x, w, h, nchw, align, half_pixel)
    limit = 1e-5 if dtype == np.float32 else 3e-3
    np.testing.assert_allclose(y.transpose(0, 2, 3, 1) if nchw else y, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_resize_bilinear_by_factors(evaluate, dtype):
    """Floating point sizes are factors, and the result is rounded down."""
    x = np.random.default_rng(2).standard_normal((1, 3, 4, 1)).astype(dtype)
    y = evaluate("RESIZE_BILINEAR", x, dtype(1.9), dtype(1.4), False)
    np.testing.assert_allclose(y, bilinear(x.astype(np.float64), 4, 7, False, False), rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_resize_bilinear_of_quantised(evaluate, quantised, requantise, dtype):
    """Quantised interpolation keeps the parameters, within one step."""
    x = quantised(np.random.default_rng(3).integers(0, 127, (1, 3, 3, 2), dtype), 0.5, 3)
    expected = requantise(bilinear(x.real, 5, 4, False, False), 0.5, 3, dtype)
    np.testing.assert_allclose(evaluate("RESIZE_BILINEAR", x, 4, 5).astype(int), expected, atol=1)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [((0, 2), "extent 0"), ((0.1, 1.0), "extent 0"), ((2, 2, False, True, True), "exclude each other")],
)
def test_resize_bilinear_refuses(evaluate, arguments, reason):
    """Empty results and contradicting conventions fail."""
    with pytest.raises((ExecutionFailed, InvalidModel), match=reason):
        evaluate("RESIZE_BILINEAR", np.ones((1, 3, 3, 1), np.float32), *arguments)


def nearest(x, h, w, align, half_pixel):
    """The source pixel of each output pixel, one at a time."""

    def index(i, size, out):
        scale = (size - 1) / (out - 1) if align and out > 1 else size / out
        v = (i + 0.5 * half_pixel) * scale
        return min(math.floor(v + 0.5) if align else math.floor(v), size - 1)

    rows, columns = ([index(i, size, out) for i in range(out)] for size, out in ((x.shape[1], h), (x.shape[2], w)))
    return x[:, rows][:, :, columns]


@FLAGS
@SIZES
@pytest.mark.parametrize("nchw", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8, np.int8])
def test_resize_nearest_neighbor(evaluate, quantised, *, dtype, h, w, align, half_pixel, nchw):
    """RESIZE_NEAREST_NEIGHBOR copies values as they are stored, with every convention for corners and centres."""
    x = np.random.default_rng(5).integers(0, 100, (2, 3, 5, 2)).astype(dtype)
    source = x.transpose(0, 3, 1, 2).copy() if nchw else x
    if np.dtype(dtype).itemsize == 1:
        source = quantised(source, 0.5, 3)
    y = evaluate("RESIZE_NEAREST_NEIGHBOR", source, w, h, nchw, align, half_pixel)
    np.testing.assert_array_equal(y.transpose(0, 2, 3, 1) if nchw else y, nearest(x, h, w, align, half_pixel))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_resize_nearest_neighbor_by_factors(evaluate, dtype):
    """Floating point sizes are factors, width first."""
    x = np.random.default_rng(6).standard_normal((1, 3, 4, 1)).astype(dtype)
    y = evaluate("RESIZE_NEAREST_NEIGHBOR", x, dtype(1.9), dtype(0.7), False)
    np.testing.assert_array_equal(y, nearest(x, 2, 7, False, False))


def test_resize_nearest_neighbor_refuses(evaluate):
    """Empty results and a missing layout fail."""
    x = np.ones((1, 3, 3, 1), np.float32)
    with pytest.raises((ExecutionFailed, InvalidModel), match="extent 0"):
        evaluate("RESIZE_NEAREST_NEIGHBOR", x, 0, 2, False)
    with pytest.raises(InvalidModel, match="3 inputs"):
        evaluate("RESIZE_NEAREST_NEIGHBOR", x, 2, 2)
