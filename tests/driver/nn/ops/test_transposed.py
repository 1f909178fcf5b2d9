import itertools

import numpy as np
import pytest

from driver.nn import ExecutionFailed, InvalidModel, ModelBuilder

SAME, VALID = 1, 2
EXPLICIT = {
    "apart": ((2, 2), (0, 0, 0, 0)),
    "overlapping": ((1, 2), (1, 0, 1, 2)),
    "beyond": ((3, 2), (0, -1, 1, -2)),
}


def spread(x, w, bias, strides, pads):
    """Every input pixel adds its filter to the window where it stands. pads: left, right, top, bottom."""
    (n, h, wd, _), (outputs, kh, kw, _), (left, right, top, bottom) = x.shape, w.shape, pads
    oh, ow = (h - 1) * strides[0] + kh - top - bottom, (wd - 1) * strides[1] + kw - left - right
    y = np.zeros((n, oh, ow, outputs)) + bias
    for b, i, j, p, q in itertools.product(*map(range, (n, h, wd, kh, kw))):
        row, column = i * strides[0] + p - top, j * strides[1] + q - left
        if 0 <= row < oh and 0 <= column < ow:
            y[b, row, column] += w[:, p, q] @ x[b, i, j]
    return y


def data(dtype, seed=1, kernel=(3, 2)):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(s).astype(dtype) for s in ((2, 3, 4, 3), (5, *kernel, 3), (5,)))


@pytest.mark.parametrize("nchw", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("case", EXPLICIT)
def test_transpose_conv_2d_of_floats(evaluate, case, dtype, nchw):
    """TRANSPOSE_CONV_2D with explicit paddings, which may be negative behind the image."""
    (x, w, bias), (strides, pads) = data(dtype), EXPLICIT[case]
    expected = np.maximum(spread(*(v.astype(np.float64) for v in (x, w, bias)), strides, pads), 0)
    source = x.transpose(0, 3, 1, 2).copy() if nchw else x
    y = evaluate("TRANSPOSE_CONV_2D", source, w, bias, *pads, strides[1], strides[0], 1, nchw)
    limit = 1e-5 if dtype == np.float32 else 1e-2
    np.testing.assert_allclose(y.transpose(0, 2, 3, 1) if nchw else y, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("nchw", [False, True])
@pytest.mark.parametrize(
    ("scheme", "size", "pads"),
    [(SAME, (5, 8), (0, 0, 1, 1)), (SAME, (6, 7), (0, 1, 0, 1)), (VALID, (7, 8), (0, 0, 0, 0))],
)
def test_transpose_conv_2d_to_a_shape(evaluate, scheme, size, pads, nchw):
    """With a scheme the output shape is an input, of which only height and width are looked at."""
    x, w, bias = data(np.float32)
    expected = spread(x, w, bias, (2, 2), pads)
    assert expected.shape[1:3] == size
    source = x.transpose(0, 3, 1, 2).copy() if nchw else x
    shape = np.array([9, 9, *size] if nchw else [9, *size, 9], np.int32)
    y = evaluate("TRANSPOSE_CONV_2D", source, w, bias, shape, scheme, 2, 2, 0, nchw)
    np.testing.assert_allclose(y.transpose(0, 2, 3, 1) if nchw else y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("channels", [3, 300])
def test_transpose_conv_2d_of_quantised(evaluate, quantised, requantise, channels, dtype):
    """Quantised sums are exact, whether float32 can hold them or not."""
    rng, info = np.random.default_rng(2), np.iinfo(dtype)
    raw = rng.integers(info.max - 99, info.max, (1, 2, 2, channels), dtype, endpoint=True)
    x = quantised(raw, 0.5, info.min + 9)
    raw = rng.integers(info.max - 99, info.max, (2, 3, 3, channels), dtype, endpoint=True)
    w = quantised(raw, 0.25, info.min + 20)
    bias = quantised(rng.integers(-(10**6), 10**6, 2).astype(np.int32), 0.125)
    expected = spread(x.real, w.real, bias.real, (1, 1), (1, 0, 1, 0))
    scale = float(np.float32(abs(expected).max() / 255))
    y = evaluate("TRANSPOSE_CONV_2D", x, w, bias, 1, 0, 1, 0, 1, 1, 0, False, scale=scale, zero_point=info.min)
    np.testing.assert_array_equal(y, requantise(expected, scale, info.min, dtype))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_transpose_conv_2d_per_channel(evaluate, quantised, requantise, dtype):
    """A per-channel filter scales each output channel by itself, and the bias with it."""
    rng, info, scales = np.random.default_rng(3), np.iinfo(dtype), (0.25, 2.0)
    x = quantised(rng.integers(info.min, info.max, (1, 3, 3, 2), dtype, endpoint=True), 0.5, info.min + 9)
    w = quantised(rng.integers(-127, 127, (2, 2, 2, 2), np.int8), 0.0, 0, (scales, 0))
    bias = np.array([100, -100], np.int32)
    real = spread(x.real, w.real, bias * 0.5 * np.array(scales), (2, 2), (0, 0, 0, 0))
    pads, more = (0, 0, 0, 0), {"scale": 64.0, "zero_point": info.min + 100}
    y = evaluate("TRANSPOSE_CONV_2D", x, w, bias, *pads, 2, 2, 0, False, **more)
    np.testing.assert_array_equal(y, requantise(real, 64.0, info.min + 100, dtype))


def test_transpose_conv_2d_works_in_strips(evaluate, monkeypatch):
    """Cutting the work into strips changes nothing, where windows overlap across strips too."""
    x, w, bias = data(np.float32)
    monkeypatch.setattr("driver.nn.ops.sums.STRIP_BYTES", 1)
    y = evaluate("TRANSPOSE_CONV_2D", x, w, bias, 0, 0, 0, 0, 1, 1, 0, False)
    np.testing.assert_allclose(y, spread(x, w, bias, (1, 1), (0, 0, 0, 0)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((0, 0, 0, 0, 0, 1, 0, False), "stride 0"),
        ((0, 0, 0, 0, 1, 1, 5, False), "activation 5"),
        ((-1, 0, 0, 0, 1, 1, 0, False), "padding -1"),
        ((2, 2, 0, 0, 1, 1, 0, False), "output extent of 0"),
        ((0, 0, 0, -(2**30), 1, 1, 0, False), "larger than 4 GiB"),
        ((np.array([1, 4, 4], np.int32), SAME, 1, 1, 0, False), "4 elements"),
        ((np.array([1, 0, 4, 1], np.int32), SAME, 1, 1, 0, False), "extent 0"),
        ((np.array([1, 4, 4, 1], np.int32), 0, 1, 1, 0, False), "scheme 0"),
    ],
)
def test_transpose_conv_2d_refuses(evaluate, arguments, reason):
    """Parameters that make no sense fail, with the parameter in the message."""
    x, w = np.ones((1, 2, 2, 1), np.float32), np.ones((1, 3, 3, 1), np.float32)
    with pytest.raises((ExecutionFailed, InvalidModel), match=reason):
        evaluate("TRANSPOSE_CONV_2D", x, w, np.ones(1, np.float32), *arguments)


def test_transpose_conv_2d_of_no_images(run_model):
    """A batch of 0 gives a batch of 0."""
    m = ModelBuilder()
    x, w, bias = m.input("float32", (0, 2, 2, 1)), np.ones((4, 3, 3, 1), np.float32), np.zeros(4, np.float32)
    m.output(m.operation("TRANSPOSE_CONV_2D", x, w, bias, 0, 0, 0, 0, 2, 2, 0, False))
    assert run_model(m.build(), np.ones((0, 2, 2, 1), np.float32))[0].shape == (0, 5, 5, 4)
