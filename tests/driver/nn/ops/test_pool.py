import itertools

import numpy as np
import pytest

from driver.nn import ExecutionFailed, InvalidModel

SAME, VALID = 1, 2


def pool(x, function, filters, strides, pads):
    """`function` of the pixels of each window that lie on the image. pads: left, right, top, bottom."""
    n, h, w, c = x.shape
    left, right, top, bottom = pads
    oh = (h + top + bottom - filters[0]) // strides[0] + 1
    ow = (w + left + right - filters[1]) // strides[1] + 1
    y = np.empty((n, oh, ow, c))
    for b, i, j, k in itertools.product(*map(range, y.shape)):
        rows = range(max(0, i * strides[0] - top), min(h, i * strides[0] - top + filters[0]))
        columns = range(max(0, j * strides[1] - left), min(w, j * strides[1] - left + filters[1]))
        y[b, i, j, k] = function([x[b, r, q, k] for r in rows for q in columns])
    return y


def mean(values):
    return sum(values) / len(values)


def root_mean_square(values):
    return mean([v * v for v in values]) ** 0.5


POOLS = pytest.mark.parametrize(("name", "function"), [("AVERAGE_POOL_2D", mean), ("MAX_POOL_2D", max)])
ALL = pytest.mark.parametrize(
    ("name", "function"), [("AVERAGE_POOL_2D", mean), ("L2_POOL_2D", root_mean_square), ("MAX_POOL_2D", max)]
)
CASES = [
    pytest.param((3, 2), (1, 1), (0, 0, 0, 0), id="no padding"),
    pytest.param((3, 3), (2, 2), (1, 1, 1, 1), id="strided"),
    pytest.param((2, 4), (3, 1), (3, 0, 1, 0), id="lopsided"),
    pytest.param((5, 6), (1, 1), (0, 0, 0, 0), id="global"),
]


@ALL
@pytest.mark.parametrize("nchw", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("filters", "strides", "pads"), CASES)
def test_average_pool_2d_l2_pool_2d_max_pool_2d_of_floats(
    evaluate, *, name, function, filters, strides, pads, dtype, nchw
):
    """Pooling looks only at pixels of the image, in both layouts, with different paddings on all sides."""
    x = np.random.default_rng(1).standard_normal((2, 5, 6, 3)).astype(dtype)
    expected = pool(x.astype(np.float64), function, filters, strides, pads)
    source = x.transpose(0, 3, 1, 2).copy() if nchw else x
    y = evaluate(name, source, *pads, strides[1], strides[0], filters[1], filters[0], 0, nchw)
    limit = 1e-5 if dtype == np.float32 else 2e-3
    np.testing.assert_allclose(y.transpose(0, 2, 3, 1) if nchw else y, expected, rtol=limit, atol=limit)


@POOLS
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_average_pool_2d_max_pool_2d_of_quantised(evaluate, quantised, requantise, *, name, function, dtype):
    """Quantised pooling keeps the parameters, rounds averages to nearest and clamps to the activation."""
    info = np.iinfo(dtype)
    raw = np.random.default_rng(2).integers(info.min, info.max, (1, 4, 4, 2), dtype)
    x = quantised(raw, 0.25, info.min + 128)
    real = np.maximum(pool(x.real, function, (2, 2), (1, 1), (0, 1, 0, 1)), 0)
    expected = requantise(real, 0.25, info.min + 128, dtype)
    np.testing.assert_array_equal(evaluate(name, x, SAME, 1, 1, 2, 2, 1), expected)


@ALL
@pytest.mark.parametrize(("scheme", "pads"), [(SAME, (0, 1, 0, 1)), (VALID, (0, 0, 0, 0))])
def test_average_pool_2d_l2_pool_2d_max_pool_2d_schemes(evaluate, name, function, scheme, pads):
    """SAME puts the odd padding behind the image, VALID pads nothing."""
    x = np.random.default_rng(3).standard_normal((1, 4, 4, 1)).astype(np.float32)
    expected = np.clip(pool(x, function, (2, 2), (1, 1), pads), 0, 6)
    np.testing.assert_allclose(evaluate(name, x, scheme, 1, 1, 2, 2, 3), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_max_pool_2d_clamps_what_is_stored(evaluate, quantised, dtype):
    """MAX_POOL_2D of quantised values clamps them to the activation in their own steps."""
    info = np.iinfo(dtype)
    x = quantised(np.arange(info.min, info.max + 1).astype(dtype).reshape(1, 1, 256, 1), 1.0, info.min + 10)
    y = evaluate("MAX_POOL_2D", x, VALID, 1, 1, 1, 1, 3)
    np.testing.assert_array_equal(y, x.array.clip(info.min + 10, info.min + 16))


def test_average_pool_2d_of_many_quantised(evaluate, quantised):
    """A sum that float32 could not hold is averaged exactly all the same."""
    x = np.full((1, 300, 300, 1), 255, np.uint8)
    x[0, 0, ::2] = 0
    y = evaluate("AVERAGE_POOL_2D", quantised(x, 1.0), VALID, 1, 1, 300, 300, 0)
    assert y.item() == int(x.mean() + 0.5)


def test_max_pool_2d_of_a_filter_far_larger_than_the_image(evaluate):
    """An absurdly large filter costs no more than the image has pixels."""
    x = np.arange(6, dtype=np.float32).reshape(1, 2, 3, 1)
    y = evaluate("MAX_POOL_2D", x, SAME, 1, 1, 1 << 30, 1 << 30, 0)
    assert (y == 5).all()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((SAME, 0, 1, 2, 2, 0), "stride 0"),
        ((SAME, 1, 1, 0, 2, 0), "filter 0"),
        ((0, 1, 1, 2, 2, 0), "padding scheme 0"),
        ((SAME, 1, 1, 2, 2, 9), "activation 9"),
        ((2, 0, 0, 0, 1, 1, 2, 2, 0), "paddings 2 and 0"),
        ((VALID, 1, 1, 9, 9, 0), "does not fit"),
    ],
)
def test_average_pool_2d_refuses_bad_parameters(evaluate, arguments, reason):
    """Parameters that make no sense fail, with the parameter in the message."""
    with pytest.raises((ExecutionFailed, InvalidModel), match=reason):
        evaluate("AVERAGE_POOL_2D", np.ones((1, 4, 4, 1), np.float32), *arguments)
