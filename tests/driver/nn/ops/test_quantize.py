import numpy as np
import pytest

from driver.nn import InvalidModel, ModelBuilder

ASYMM = {np.uint8: "quant8_asymm", np.int8: "quant8_asymm_signed"}


@pytest.mark.parametrize("source", [np.float32, np.float16])
@pytest.mark.parametrize("dtype", ASYMM)
def test_quantize(evaluate, requantise, source, dtype):
    """QUANTIZE rounds half away from zero and clamps, to either signedness."""
    x = np.linspace(-80, 80, 321, dtype=source)
    y = evaluate("QUANTIZE", x, dtype=ASYMM[dtype], scale=0.5, zero_point=10)
    np.testing.assert_array_equal(y, requantise(x.astype(np.float64), 0.5, 10, dtype))


def test_quantize_leaves_its_input_alone(evaluate):
    """Rounding happens in memory of the kernel, not in that of the caller."""
    x = np.array([0.3, 0.7], np.float32)
    evaluate("QUANTIZE", x, scale=1.0)
    assert x.tolist() == np.array([0.3, 0.7], np.float32).tolist()


@pytest.mark.parametrize("dtype", ASYMM)
@pytest.mark.parametrize(("target", "kind"), [("float32", np.float32), ("float16", np.float16)])
def test_dequantize(evaluate, quantised, dtype, target, kind):
    """DEQUANTIZE gives (v - zero point) * scale in either float type."""
    x = quantised(np.arange(256).astype(np.uint8).view(dtype), 0.1, 5)
    y = evaluate("DEQUANTIZE", x, dtype=target)
    np.testing.assert_allclose(
        y, (x.real / 0.1 * np.float32(0.1)).astype(kind), rtol=1e-3 if kind == np.float16 else 1e-6
    )


@pytest.mark.parametrize("channel", [0, 1])
def test_dequantize_per_channel(evaluate, quantised, channel):
    """Per-channel data is scaled along its channel dimension."""
    x = quantised(np.arange(-3, 3, dtype=np.int8).reshape(2, 3), 0.0, 0, ([0.5, 2.0, 4.0][: 2 + channel], channel))
    np.testing.assert_array_equal(evaluate("DEQUANTIZE", x), x.real)


@pytest.mark.parametrize("dtype", ASYMM)
def test_quantize_rounds_in_float32(evaluate, dtype):
    """Halves go away from zero, what is just below a half does not, and both hold for large numbers."""
    below = np.nextafter(np.float32([0.5, -0.5, 1.5, 100.5]), np.float32(0))
    x = np.concatenate([np.float32([0.5, -0.5, 1.5, -1.5, 100.5]), below])
    y = evaluate("QUANTIZE", x, dtype=ASYMM[dtype], scale=1.0, zero_point=10)
    assert (y.astype(int) - 10).tolist() == [1, -1, 2, -2, 101, 0, 0, 1, 100]


@pytest.mark.parametrize("source", [np.float32, np.float16])
@pytest.mark.parametrize("scale", [1.0, 1e-40, 3e38])
@pytest.mark.parametrize("dtype", ASYMM)
def test_quantize_of_the_extremes(evaluate, source, dtype, scale):
    """Infinities saturate and NaN becomes the smallest raw value at any scale, without a warning."""
    info, x = np.iinfo(dtype), np.array([np.inf, -np.inf, np.nan, 0], source)
    y = evaluate("QUANTIZE", x, dtype=ASYMM[dtype], scale=scale, zero_point=5)
    assert y.tolist() == [info.max, info.min, info.min, 5]


def test_quantize_of_any_rank_dequantize_of_four(run_model):
    """QUANTIZE takes any rank, DEQUANTIZE up to 4."""
    m, shape = ModelBuilder(), (2, 1, 2, 1, 2)
    m.output(m.operation("QUANTIZE", m.input("float32", shape), scale=1.0))
    assert run_model(m.build(), np.ones(shape, np.float32))[0].shape == shape
    with pytest.raises(InvalidModel, match="rank 5"):
        m.operation("DEQUANTIZE", m.input("quant8_asymm", shape, scale=1.0))


@pytest.mark.parametrize(("name", "dtype"), [("QUANTIZE", np.float32), ("DEQUANTIZE", np.uint8)])
def test_quantize_dequantize_of_no_elements(run_model, name, dtype):
    """A tensor without elements gives one without elements."""
    m = ModelBuilder()
    value = m.input(dtype, (0, 3), scale=0.0 if name == "QUANTIZE" else 1.0)
    m.output(m.operation(name, value, scale=1.0 if name == "QUANTIZE" else None))
    assert run_model(m.build(), np.zeros((0, 3), dtype))[0].shape == (0, 3)


@pytest.mark.parametrize(("target", "kind"), [("float32", np.float32), ("float16", np.float16)])
def test_dequantize_symmetric(run_model, target, kind):
    """TENSOR_QUANT8_SYMM has its zero at 0."""
    m, x = ModelBuilder(), np.arange(-128, 128).astype(np.int8)
    m.output(m.operation("DEQUANTIZE", m.input("TENSOR_QUANT8_SYMM", (256,), scale=0.25), dtype=target))
    y = run_model(m.build(), x)[0]
    assert y.dtype == kind
    assert y.tolist() == (x * 0.25).tolist()


@pytest.mark.parametrize("channel_quant", [None, ([1e38, 1e38], 0)])
def test_dequantize_beyond_float16(evaluate, quantised, channel_quant):
    """What float16 cannot hold becomes an infinity, without a warning."""
    x = quantised(np.array([1, -1], np.int8), 0.0 if channel_quant else 1e38, 0, channel_quant)
    assert evaluate("DEQUANTIZE", x, dtype="float16").tolist() == [np.inf, -np.inf]
