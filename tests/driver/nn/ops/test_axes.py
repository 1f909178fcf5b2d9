import math

import numpy as np
import pytest

from driver.nn import ExecutionFailed, InvalidModel, ModelBuilder

INF, NAN = math.inf, math.nan
REFUSED = (ExecutionFailed, InvalidModel)


def reduced(function, x, axes, keep):
    """`function` of the list of elements that `axes` gather, collected element by element."""
    axes = {a % x.ndim for a in axes}
    cells = {}
    for index in np.ndindex(x.shape):
        key = tuple(0 if i in axes else v for i, v in enumerate(index))
        cells.setdefault(key, []).append(x[index].item())
    shape = tuple(1 if i in axes else d for i, d in enumerate(x.shape))
    y = np.array([function(cells[k]) for k in np.ndindex(shape)]).reshape(shape)
    return y if keep else y.reshape([d for i, d in enumerate(shape) if i not in axes] or [1])


def mean(x, axes, keep):
    """The mean over `axes`."""
    return reduced(lambda cell: sum(cell) / len(cell), x, axes, keep)


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
    with pytest.raises(REFUSED, match="axis"):
        evaluate("MEAN", np.ones((2, 2), np.float32), axes, 0)


FOLDS = {"REDUCE_SUM": sum, "REDUCE_PROD": math.prod, "REDUCE_MAX": max, "REDUCE_MIN": min}
ALL_AXES = pytest.mark.parametrize("axes", [[0], [1, 2], [-1, 2, -1], [0, 1, 2], [-3, 1, -1], []])
KEEP = pytest.mark.parametrize("keep", [False, True])


@ALL_AXES
@KEEP
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", FOLDS)
def test_reduce_sum_reduce_prod_reduce_max_reduce_min_of_floats(evaluate, *, name, dtype, axes, keep):
    """Reductions gather axes that may be negative, repeated or none; reducing everything gives [1]."""
    x = np.random.default_rng(2).uniform(0.5, 1.5, (2, 3, 4)).astype(dtype)
    y = evaluate(name, x, np.array(axes, np.int32), keep)
    expected = reduced(FOLDS[name], x, axes, keep)
    assert y.dtype == dtype
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-6 if dtype == np.float32 else 1e-3)


@ALL_AXES
@KEEP
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("name", ["REDUCE_MAX", "REDUCE_MIN"])
def test_reduce_max_reduce_min_of_quantised(evaluate, quantised, *, name, dtype, axes, keep):
    """Quantised extremes are raw values, and the parameters stay."""
    info = np.iinfo(dtype)
    x = np.random.default_rng(3).integers(info.min, info.max, (2, 3, 4), dtype, endpoint=True)
    y = evaluate(name, quantised(x, 0.5, 7), np.array(axes, np.int32), keep)
    np.testing.assert_array_equal(y, reduced(FOLDS[name], x, axes, keep))


def test_reduce_max_keeps_the_parameters():
    """The builder refuses another output scale."""
    m = ModelBuilder()
    with pytest.raises(InvalidModel, match=r"scale=0.5 cannot be chosen here"):
        m.operation("REDUCE_MAX", m.input("quant8_asymm", (2, 2), scale=1.0), [0], False, scale=0.5)


@ALL_AXES
@KEEP
@pytest.mark.parametrize(("name", "function"), [("REDUCE_ALL", all), ("REDUCE_ANY", any)])
def test_reduce_all_reduce_any(run_model, *, name, function, axes, keep):
    """Every byte but 0 is true, and results are 0 or 1."""
    m = ModelBuilder()
    x = np.random.default_rng(4).choice(np.array([0, 1, 2, 255], np.uint8), (2, 3, 4), p=[0.3, 0.3, 0.2, 0.2])
    m.output(m.operation(name, m.input("bool8", (2, 3, 4)), np.array(axes, np.int32), keep))
    y, expected = run_model(m.build(), x)[0], reduced(function, x, axes, keep)
    assert y.shape == expected.shape
    np.testing.assert_array_equal(y, expected.astype(np.uint8))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("REDUCE_SUM", [INF, NAN, NAN, INF]),
        ("REDUCE_PROD", [INF, -INF, NAN, INF]),
        ("REDUCE_MAX", [INF, INF, NAN, 3e38]),
        ("REDUCE_MIN", [2, -INF, NAN, 3e38]),
    ],
)
def test_reductions_of_the_extremes(evaluate, name, expected):
    """Infinities, NaN and sums beyond float32 follow IEEE arithmetic, without a warning."""
    x = np.array([[INF, 2], [INF, -INF], [NAN, 1], [3e38, 3e38]], np.float32)
    np.testing.assert_array_equal(evaluate(name, x, [1], False), np.array(expected, np.float32))


def test_reduce_sum_is_accurate(evaluate):
    """A long sum loses no more than its last rounding."""
    x = np.full((1 << 16, 1), 0.1, np.float32)
    np.testing.assert_allclose(evaluate("REDUCE_SUM", x, [0], False), [float(x[0, 0]) * 2**16], rtol=1e-7)


@pytest.mark.parametrize("name", FOLDS)
def test_reductions_refuse_axes_out_of_range(evaluate, name):
    """An axis that the input does not have fails."""
    for axis in (2, -3):
        with pytest.raises(REFUSED, match=f"axis {axis} has to be in -2..1"):
            evaluate(name, np.ones((2, 2), np.float32), [axis], False)


@pytest.mark.parametrize("name", ["REDUCE_SUM", "MEAN", "ARGMIN"])
def test_reductions_of_no_elements(run_model, name):
    """None of them takes a tensor without elements."""
    m = ModelBuilder()
    rest = {"REDUCE_SUM": ([0], False), "MEAN": ([0], 0), "ARGMIN": (0,)}[name]
    m.output(m.operation(name, m.input("float32", (0, 2)), *rest))
    with pytest.raises(ExecutionFailed, match="no empty tensor"):
        run_model(m.build(), np.zeros((0, 2), np.float32))


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 1, 2, 2)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.uint8, np.int8])
@pytest.mark.parametrize(("name", "best"), [("ARGMAX", max), ("ARGMIN", min)])
def test_argmax_argmin(evaluate, quantised, *, name, best, dtype, shape):
    """The first of equal extremes wins, the axis goes, and a vector gives [1]."""
    x = np.random.default_rng(5).integers(0, 4, shape).astype(dtype)
    for axis in range(-len(shape), len(shape)):
        y = evaluate(name, quantised(x, 0.5, 3) if np.dtype(dtype).itemsize == 1 else x, axis)
        expected = reduced(lambda cell: cell.index(best(cell)), x, [axis], 0)
        assert y.dtype == np.int32
        assert y.shape == expected.shape
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("axis", [2, -3])
def test_argmax_refuses_an_axis_out_of_range(evaluate, axis):
    """An axis that the input does not have fails."""
    with pytest.raises(REFUSED, match=f"axis {axis} has to be in -2..1"):
        evaluate("ARGMAX", np.ones((2, 2), np.float32), axis)


def test_argmax_argmin_of_the_extremes(evaluate):
    """Infinities are numbers; the first NaN is more extreme than any."""
    x = np.array([[-INF, INF, 1], [0, NAN, NAN]], np.float32)
    assert evaluate("ARGMAX", x, 1).tolist() == [1, 1]
    assert evaluate("ARGMIN", x, 1).tolist() == [0, 1]
