import numpy as np
import pytest

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
