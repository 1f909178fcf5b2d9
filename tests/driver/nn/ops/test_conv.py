import itertools

import numpy as np
import pytest

from driver.nn import ExecutionFailed, Interpreter, InvalidModel, ModelBuilder

CLAMPS = {0: (-np.inf, np.inf), 1: (0, np.inf), 2: (-1, 1), 3: (0, 6)}
SAME, VALID = 1, 2


def extents(size, k, stride, dilation, scheme):
    """Output extent and padding before the image, straight from the definition of the schemes."""
    reach = (k - 1) * dilation + 1
    if scheme == VALID:
        return (size - reach) // stride + 1, 0
    out = -(-size // stride)
    return out, max(0, (out - 1) * stride + reach - size) // 2


def convolve(x, w, bias, *, strides, dilations, scheme=None, pads=(0, 0, 0, 0), depthwise=0):
    """The definition of both convolutions, one product at a time. pads: left, right, top, bottom."""
    (n, h, wd, c), (_, kh, kw, _) = x.shape, w.shape
    if scheme is None:
        (left, right, top, bottom), (dy, dx) = pads, dilations
        oh = (h + top + bottom - (kh - 1) * dy - 1) // strides[0] + 1
        ow = (wd + left + right - (kw - 1) * dx - 1) // strides[1] + 1
    else:
        oh, top = extents(h, kh, strides[0], dilations[0], scheme)
        ow, left = extents(wd, kw, strides[1], dilations[1], scheme)
    outputs = w.shape[3] if depthwise else w.shape[0]
    y = np.zeros((n, oh, ow, outputs))
    for b, i, j, o, p, q in itertools.product(*map(range, (n, oh, ow, outputs, kh, kw))):
        row, column = i * strides[0] - top + p * dilations[0], j * strides[1] - left + q * dilations[1]
        if 0 <= row < h and 0 <= column < wd:
            if depthwise:
                y[b, i, j, o] += x[b, row, column, o // depthwise] * w[0, p, q, o]
            else:
                y[b, i, j, o] += sum(x[b, row, column, k] * w[o, p, q, k] for k in range(c))
    return y + bias


def tail(strides, dilations, code, nchw, multiplier=None):
    """The parameters behind the padding, in the order of the HAL."""
    fan = () if multiplier is None else (multiplier,)
    return (strides[1], strides[0], *fan, code, nchw, dilations[1], dilations[0])


CASES = [
    pytest.param((1, 5, 6), (3, 2), (1, 1), (1, 1), SAME, id="same"),
    pytest.param((2, 7, 6), (3, 3), (2, 3), (1, 1), SAME, id="strided"),
    pytest.param((1, 7, 8), (3, 2), (1, 2), (2, 3), SAME, id="dilated"),
    pytest.param((2, 6, 7), (2, 3), (1, 1), (2, 1), VALID, id="valid"),
    pytest.param((3, 4, 3), (1, 1), (1, 1), (1, 1), SAME, id="pointwise"),
    pytest.param((1, 5, 5), (1, 1), (2, 2), (1, 1), VALID, id="pointwise strided"),
]


@pytest.mark.parametrize("nchw", [False, True])
@pytest.mark.parametrize(("image", "kernel", "strides", "dilations", "scheme"), CASES)
@pytest.mark.parametrize("code", CLAMPS)
def test_conv_2d_of_floats(evaluate, *, image, kernel, strides, dilations, scheme, nchw, code):
    """CONV_2D agrees with its definition, in both layouts and with every activation."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((*image, 3)).astype(np.float32)
    w, bias = rng.standard_normal((4, *kernel, 3)).astype(np.float32), rng.standard_normal(4).astype(np.float32)
    expected = np.clip(convolve(x, w, bias, strides=strides, dilations=dilations, scheme=scheme), *CLAMPS[code])
    source = x.transpose(0, 3, 1, 2).copy() if nchw else x
    y = evaluate("CONV_2D", source, w, bias, scheme, *tail(strides, dilations, code, nchw))
    np.testing.assert_allclose(y.transpose(0, 2, 3, 1) if nchw else y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nchw", [False, True])
@pytest.mark.parametrize("multiplier", [1, 2])
@pytest.mark.parametrize(("image", "kernel", "strides", "dilations", "scheme"), CASES)
def test_depthwise_conv_2d_of_floats(evaluate, *, image, kernel, strides, dilations, scheme, multiplier, nchw):
    """DEPTHWISE_CONV_2D agrees with its definition, also when each channel makes several."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((*image, 3)).astype(np.float32)
    w = rng.standard_normal((1, *kernel, 3 * multiplier)).astype(np.float32)
    bias = rng.standard_normal(3 * multiplier).astype(np.float32)
    expected = convolve(x, w, bias, strides=strides, dilations=dilations, scheme=scheme, depthwise=multiplier)
    source = x.transpose(0, 3, 1, 2).copy() if nchw else x
    y = evaluate("DEPTHWISE_CONV_2D", source, w, bias, scheme, *tail(strides, dilations, 1, nchw, multiplier))
    y = y.transpose(0, 2, 3, 1) if nchw else y
    np.testing.assert_allclose(y, np.maximum(expected, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["CONV_2D", "DEPTHWISE_CONV_2D"])
def test_conv_2d_and_depthwise_conv_2d_pad_explicitly(evaluate, name):
    """Explicit paddings are left, right, top, bottom, and differ on all four sides."""
    rng, depthwise, pads = np.random.default_rng(5), name.startswith("D"), (1, 2, 0, 1)
    x, bias = rng.standard_normal((2, 4, 5, 2)).astype(np.float32), np.zeros(2, np.float32)
    w = rng.standard_normal((1, 3, 3, 2) if depthwise else (2, 3, 3, 2)).astype(np.float32)
    expected = convolve(x, w, bias, strides=(2, 1), dilations=(1, 1), pads=pads, depthwise=int(depthwise))
    fan = (1,) if depthwise else ()
    np.testing.assert_allclose(evaluate(name, x, w, bias, *pads, 1, 2, *fan, 0), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["CONV_2D", "DEPTHWISE_CONV_2D"])
def test_conv_2d_and_depthwise_conv_2d_of_half_floats(evaluate, name):
    """float16 convolutions compute in float32 and round once."""
    rng, depthwise = np.random.default_rng(6), name.startswith("D")
    x, bias = rng.standard_normal((1, 4, 4, 2)).astype(np.float16), np.ones(2, np.float16)
    w = rng.standard_normal((1, 3, 3, 2) if depthwise else (2, 3, 3, 2)).astype(np.float16)
    real = [v.astype(np.float64) for v in (x, w, bias)]
    expected = convolve(*real, strides=(1, 1), dilations=(1, 1), scheme=SAME, depthwise=int(depthwise))
    y = evaluate(name, x, w, bias, SAME, 1, 1, *((1,) if depthwise else ()), 0)
    np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("nchw", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("channels", [3, 40])
@pytest.mark.parametrize("name", ["CONV_2D", "DEPTHWISE_CONV_2D"])
def test_conv_2d_and_depthwise_conv_2d_of_quantised(evaluate, quantised, requantise, *, name, channels, dtype, nchw):
    """Quantised convolutions are exact, whether float32 can hold the sums (3 channels) or not (40)."""
    rng, depthwise, info = np.random.default_rng(7), name.startswith("D"), np.iinfo(dtype)
    x = quantised(rng.integers(info.min, info.max, (1, 4, 4, channels), dtype, endpoint=True), 0.5, info.min + 9)
    shape = (1, 3, 3, channels) if depthwise else (2, 3, 3, channels)
    w = quantised(rng.integers(info.min, info.max, shape, dtype, endpoint=True), 0.25, info.min + 200)
    outputs = channels if depthwise else 2
    bias = quantised(rng.integers(-(10**6), 10**6, outputs).astype(np.int32), 0.125)
    real = convolve(x.real, w.real, bias.real, strides=(1, 1), dilations=(1, 1), scheme=SAME, depthwise=int(depthwise))
    expected = requantise(real, 1024.0, info.min + 128, dtype)
    source = quantised(x.array.transpose(0, 3, 1, 2).copy(), x.scale, x.zero_point) if nchw else x
    fan = (1,) if depthwise else ()
    y = evaluate(name, source, w, bias, SAME, 1, 1, *fan, 0, nchw, scale=1024.0, zero_point=info.min + 128)
    np.testing.assert_array_equal(y.transpose(0, 2, 3, 1) if nchw else y, expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("name", ["CONV_2D", "DEPTHWISE_CONV_2D"])
def test_conv_2d_and_depthwise_conv_2d_per_channel(evaluate, quantised, requantise, name, dtype):
    """A per-channel filter scales each output channel by itself, and the bias with it."""
    rng, depthwise, info = np.random.default_rng(8), name.startswith("D"), np.iinfo(dtype)
    x = quantised(rng.integers(info.min, info.max, (1, 3, 3, 2), dtype, endpoint=True), 0.5, info.min + 9)
    shape, scales = (1, 2, 2, 2) if depthwise else (2, 2, 2, 2), (0.25, 2.0)
    w = quantised(rng.integers(-127, 127, shape, np.int8), 0.0, 0, (scales, 3 if depthwise else 0))
    bias = np.array([100, -100], np.int32)
    real_bias = bias * 0.5 * np.array(scales)
    real = convolve(x.real, w.real, real_bias, strides=(1, 1), dilations=(1, 1), scheme=VALID, depthwise=int(depthwise))
    expected = np.clip(requantise(real, 64.0, info.min + 100, dtype), info.min + 100, info.max)
    fan = (1,) if depthwise else ()
    y = evaluate(name, x, w, bias, VALID, 1, 1, *fan, 1, scale=64.0, zero_point=info.min + 100)
    np.testing.assert_array_equal(y, expected)


def test_conv_2d_works_in_strips(run_model, monkeypatch):
    """Cutting the work into strips, of images or of rows, changes nothing."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((5, 9, 9, 3)).astype(np.float32)
    w, bias = rng.standard_normal((4, 3, 3, 3)).astype(np.float32), np.ones(4, np.float32)
    taps = rng.standard_normal((1, 3, 3, 4)).astype(np.float32)
    m = ModelBuilder()
    y = m.operation("CONV_2D", m.input("float32", x.shape), w, bias, SAME, 1, 1, 3)
    m.output(m.operation("DEPTHWISE_CONV_2D", y, taps, bias, SAME, 2, 2, 1, 3))
    model = m.build()
    whole = run_model(model, x)[0].copy()
    for size in (1, 4000, 20000):
        monkeypatch.setattr("driver.nn.ops.sums.STRIP_BYTES", size)
        monkeypatch.setattr("driver.nn.ops.conv.RUN", size // 100)
        np.testing.assert_allclose(run_model(model, x)[0], whole, rtol=1e-5, atol=1e-5)


def test_conv_2d_pointwise_copies_nothing():
    """A 1x1 convolution of contiguous float32 data is one product, one sum and one clamp, straight into the output."""
    m = ModelBuilder()
    x = m.input("float32", (1, 4, 4, 8))
    m.output(m.operation("CONV_2D", x, np.ones((2, 1, 1, 8), np.float32), np.zeros(2, np.float32), SAME, 1, 1, 1))
    out = np.zeros(4 * 4 * 2 * 4, np.uint8)
    run = Interpreter(m.build()).bind([np.ones((1, 4, 4, 8), np.float32)], [out]).run
    assert [step.func for step in run.args[0]] == [np.matmul, np.add, np.maximum]
    assert all(np.shares_memory(step.args[0] if k else step.args[2], out) for k, step in enumerate(run.args[0]))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((SAME, 0, 1, 0), "stride 0"),
        ((3, 1, 1, 0), "padding scheme 3"),
        ((SAME, 1, 1, 4), "activation 4"),
        ((0, 3, 0, 0, 1, 1, 0), "paddings 0 and 3"),
        ((0, -1, 0, 0, 1, 1, 0), "paddings 0 and -1"),
        ((SAME, 1, 1, 0, False, 0, 1), "dilation 0"),
        ((VALID, 1, 1, 0, False, 5, 1), "does not fit"),
    ],
)
def test_conv_2d_refuses_bad_parameters(evaluate, arguments, reason):
    """Parameters that make no sense fail, with the parameter in the message."""
    w = np.ones((1, 3, 3, 1), np.float32)
    with pytest.raises((ExecutionFailed, InvalidModel), match=reason):
        evaluate("CONV_2D", np.ones((1, 5, 5, 1), np.float32), w, np.zeros(1, np.float32), *arguments)


@pytest.mark.parametrize(
    ("name", "filter_", "bias", "reason"),
    [
        ("CONV_2D", (2, 3, 3, 3), 2, "channels of the input"),
        ("CONV_2D", (2, 3, 3, 2), 3, r"bias dimensions \[3\]"),
        ("CONV_2D", (2, 3, 3), 2, "rank 4"),
        ("DEPTHWISE_CONV_2D", (2, 3, 3, 2), 2, r"filter dimensions \[2, 3, 3, 2\]"),
        ("DEPTHWISE_CONV_2D", (1, 3, 3, 3), 3, r"filter dimensions \[1, 3, 3, 3\]"),
    ],
)
def test_conv_2d_and_depthwise_conv_2d_refuse_bad_shapes(evaluate, name, filter_, bias, reason):
    """Filters and biases that do not fit the input fail."""
    fan = (1,) if name.startswith("D") else ()
    x, w, b = np.ones((1, 5, 5, 2), np.float32), np.ones(filter_, np.float32), np.ones(bias, np.float32)
    with pytest.raises((ExecutionFailed, InvalidModel), match=reason):
        evaluate(name, x, w, b, SAME, 1, 1, *fan, 0)


def test_conv_2d_bias_scale_has_to_match(evaluate, quantised):
    """A bias scale other than input scale * filter scale fails."""
    x, w = (quantised(np.ones((1, 1, 1, 1), np.uint8), 0.5) for _ in range(2))
    with pytest.raises((ExecutionFailed, InvalidModel), match=r"bias scale 0\.5"):
        evaluate("CONV_2D", x, w, quantised(np.ones(1, np.int32), 0.5), SAME, 1, 1, 0, scale=1.0)


def test_conv_2d_per_channel_bias_has_no_scale(evaluate, quantised):
    """Beside a per-channel filter a bias scale fails: each channel has its own."""
    x = quantised(np.ones((1, 1, 1, 1), np.uint8), 0.5)
    w, bias = quantised(np.ones((1, 1, 1, 1), np.int8), 0.0, 0, ((0.5,), 0)), quantised(np.ones(1, np.int32), 0.25)
    with pytest.raises((ExecutionFailed, InvalidModel), match=r"bias scale 0\.25"):
        evaluate("CONV_2D", x, w, bias, SAME, 1, 1, 0, scale=1.0)


@pytest.mark.parametrize("code", CLAMPS)
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_conv_2d_rounds_half_away_from_zero(evaluate, quantised, requantise, dtype, code):
    """Sums that lie between two steps go to the one farther from zero, on both sides of it."""
    info = np.iinfo(dtype)
    x = quantised(np.arange(info.min, info.max + 1).astype(dtype).reshape(1, 16, 16, 1), 0.5, info.min + 128)
    w, bias = quantised(np.full((1, 1, 1, 1), info.min + 1, dtype), 1.0, info.min), quantised(np.ones(1, np.int32), 0.5)
    real = np.clip(x.real + 0.5, *CLAMPS[code])
    y = evaluate("CONV_2D", x, w, bias, SAME, 1, 1, code, scale=1.0, zero_point=info.min + 100)
    np.testing.assert_array_equal(y, requantise(real, 1.0, info.min + 100, dtype))


@pytest.mark.parametrize(("count", "name"), [(9, "CONV_2D"), (12, "CONV_2D"), (10, "D"), (13, "D")])
def test_conv_2d_and_depthwise_conv_2d_dilate_in_pairs(evaluate, count, name):
    """One dilation alone is no form of the operation."""
    depthwise = name == "D"
    pads = (SAME,) if count < 11 else (0, 0, 0, 0)
    x, w = np.ones((1, 3, 3, 1), np.float32), np.ones((1, 1, 1, 1), np.float32)
    arguments = (x, w, np.ones(1, np.float32), *pads, 1, 1, *((1,) if depthwise else ()), 0, False, 1)
    assert len(arguments) == count
    with pytest.raises(InvalidModel, match=f"{count} inputs"):
        evaluate("DEPTHWISE_CONV_2D" if depthwise else "CONV_2D", *arguments)


def grouped(x, w, bias, groups, **more):
    """Every group of channels by itself."""
    width, outputs = w.shape[3], len(w) // groups
    parts = (
        convolve(x[..., g * width : (g + 1) * width], w[g * outputs : (g + 1) * outputs], 0, dilations=(1, 1), **more)
        for g in range(groups)
    )
    return np.concatenate(list(parts), axis=3) + bias


@pytest.mark.parametrize("nchw", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("kernel", "strides", "pads"), [((3, 2), (2, 1), SAME), ((1, 1), (1, 1), (0, 0, 0, 0))])
def test_grouped_conv_2d_of_floats(evaluate, *, kernel, strides, pads, dtype, groups, nchw):
    """GROUPED_CONV_2D keeps groups of channels apart, with windows and without, padded by scheme and by numbers."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((2, 4, 5, 6)).astype(dtype)
    w, bias = rng.standard_normal((6, *kernel, 6 // groups)).astype(dtype), rng.standard_normal(6).astype(dtype)
    padding = {"scheme": SAME} if pads == SAME else {"pads": pads}
    real = [v.astype(np.float64) for v in (x, w, bias)]
    expected = np.clip(grouped(*real, groups, strides=strides, **padding), 0, 6)
    source = x.transpose(0, 3, 1, 2).copy() if nchw else x
    pads = (SAME,) if pads == SAME else pads
    y = evaluate("GROUPED_CONV_2D", source, w, bias, *pads, strides[1], strides[0], groups, 3, nchw)
    limit = 1e-5 if dtype == np.float32 else 1e-2
    np.testing.assert_allclose(y.transpose(0, 2, 3, 1) if nchw else y, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_grouped_conv_2d_of_quantised(evaluate, quantised, requantise, dtype, per_channel):
    """Quantised groups are exact, also with a scale for each output channel."""
    rng, info = np.random.default_rng(12), np.iinfo(dtype)
    x = quantised(rng.integers(info.min, info.max, (1, 4, 4, 4), dtype, endpoint=True), 0.5, info.min + 7)
    if per_channel:
        scales = (0.25, 0.5, 1.0, 2.0)
        w = quantised(rng.integers(-127, 127, (4, 2, 2, 2), np.int8), 0.0, 0, (scales, 0))
        bias = quantised(np.array([100, -100, 7, 0], np.int32))
        real_bias = bias.array * 0.5 * np.array(scales)
    else:
        w = quantised(rng.integers(info.min, info.max, (4, 2, 2, 2), dtype, endpoint=True), 0.25, info.min + 99)
        bias = quantised(np.array([100, -100, 7, 0], np.int32), 0.125)
        real_bias = bias.real
    real = grouped(x.real, w.real, real_bias, 2, strides=(1, 1), scheme=VALID)
    y = evaluate("GROUPED_CONV_2D", x, w, bias, VALID, 1, 1, 2, 0, False, scale=16.0, zero_point=info.min + 90)
    np.testing.assert_array_equal(y, requantise(real, 16.0, info.min + 90, dtype))


@pytest.mark.parametrize(
    ("filter_", "groups", "reason"),
    [((4, 1, 1, 2), 3, "4 channels"), ((3, 1, 1, 2), 2, "3 output channels"), ((4, 1, 1, 2), 0, "groups of 0")],
)
def test_grouped_conv_2d_refuses(evaluate, filter_, groups, reason):
    """Groups that do not divide the channels on both sides fail."""
    x, w, bias = np.ones((1, 2, 2, 4), np.float32), np.ones(filter_, np.float32), np.ones(filter_[0], np.float32)
    with pytest.raises((ExecutionFailed, InvalidModel), match=reason):
        evaluate("GROUPED_CONV_2D", x, w, bias, SAME, 1, 1, groups, 0, False)


def test_conv_2d_of_no_images(run_model):
    """A batch of 0 gives a batch of 0."""
    m = ModelBuilder()
    x = m.input("float32", (0, 4, 4, 1))
    y = m.operation("CONV_2D", x, np.ones((2, 3, 3, 1), np.float32), np.zeros(2, np.float32), SAME, 2, 2, 0)
    m.output(y)
    assert y.operand.dimensions == (0, 2, 2, 2)
    assert run_model(m.build(), np.ones((0, 4, 4, 1), np.float32))[0].shape == (0, 2, 2, 2)
