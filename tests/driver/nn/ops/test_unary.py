import math

import numpy as np
import pytest

from driver.nn import (
    ExecutionFailed,
    InvalidModel,
    Model,
    ModelBuilder,
    Operand,
    Operation,
    Subgraph,
    required_version,
    validate,
)

INF, NAN = math.inf, math.nan
SHAPES = [(42,), (2, 3, 1, 7), (2, 1, 3, 1, 7)]
FLOATS = pytest.mark.parametrize("dtype", [np.float32, np.float16])


def guarded(function, **instead):
    """`function` of one Python float with IEEE results where Python raises; `instead`: exception name to result."""

    def one(x):
        try:
            return function(x)
        except (ValueError, OverflowError, ZeroDivisionError) as error:
            return instead.get(type(error).__name__, NAN)

    return one


def log(x):
    return -INF if x == 0 else math.log(x)


def rsqrt(x):
    return math.copysign(INF, x) if x == 0 else 1 / math.sqrt(x)


def floor(x):
    return x if not math.isfinite(x) else float(math.floor(x))


REAL = {
    "ABS": abs,
    "EXP": guarded(math.exp, OverflowError=INF),
    "FLOOR": floor,
    "LOG": guarded(log),
    "NEG": lambda x: -x,
    "RSQRT": guarded(rsqrt),
    "SIN": guarded(math.sin),
    "SQRT": guarded(math.sqrt),
}


def check_floats(name, y, expected, dtype):
    """Equal within the accuracy of `dtype`, NaN and infinities included."""
    with np.errstate(over="ignore"):
        expected = np.array(expected).astype(dtype)
    assert y.dtype == dtype, name
    np.testing.assert_allclose(y.reshape(-1), expected, rtol=2e-6 if dtype == np.float32 else 2e-3, atol=1e-6)


@FLOATS
@pytest.mark.parametrize(("name", "shape"), [(n, s) for n in REAL for s in SHAPES if n != "FLOOR" or len(s) <= 4])
def test_abs_exp_floor_log_neg_rsqrt_sin_sqrt_of_floats(evaluate, name, shape, dtype):
    """Each function of floats is the one it is named after, at every rank that it takes."""
    x = np.concatenate([np.linspace(-9, 9, 37), [0.25, 4, 1e-3, 60, -60]]).astype(dtype)
    y = evaluate(name, x.reshape(shape))
    assert y.shape == shape
    check_floats(name, y, [REAL[name](float(v)) for v in x], dtype)


@FLOATS
@pytest.mark.parametrize("name", REAL)
def test_abs_exp_floor_log_neg_rsqrt_sin_sqrt_off_their_domains(evaluate, name, dtype):
    """Infinities, NaN, zeros and what overflows follow IEEE arithmetic, without a warning."""
    x = np.array(
        [INF, -INF, NAN, 0.0, -0.0, -1.0, 200.0, np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal], dtype
    )
    special = {"SIN": {INF: NAN, -INF: NAN}, "EXP": {INF: INF, -INF: 0.0}}.get(name, {})
    expected = [special.get(float(v), REAL[name](float(v))) for v in x]
    check_floats(name, evaluate(name, x), expected, dtype)


@pytest.mark.parametrize("name", REAL)
def test_signalling_nan_is_quiet(evaluate, name):
    """A NaN that signals is one more NaN: no warning, no failure."""
    assert np.isnan(evaluate(name, np.array([0x7F800001], np.uint32).view(np.float32)))
    assert np.isnan(evaluate(name, np.array([0x7C01], np.uint16).view(np.float16)))


@pytest.mark.parametrize(
    ("name", "dtype", "version"),
    [
        ("ABS", "float32", 2),
        ("ABS", "int32", 3),
        ("NEG", "int32", 2),
        ("FLOOR", "float32", 0),
        ("FLOOR", "float16", 2),
        ("HARD_SWISH", "float32", 3),
        ("EXP", "float16", 2),
        ("CAST", "float16", 2),
        ("CAST", "bool8", 3),
    ],
)
def test_unary_versions(name, dtype, version):
    """A call needs the HAL version that first takes the type."""
    m = ModelBuilder()
    m.output(m.operation(name, m.input(dtype, (2,))))
    assert required_version(m.build()) == version


@pytest.mark.parametrize(("name", "expected"), [("ABS", [5, 0, 7, 2**31 - 1]), ("NEG", [5, 0, -7, 2**31 - 1])])
def test_abs_neg_of_integers(evaluate, name, expected):
    """ABS and NEG of TENSOR_INT32 are exact, and the smallest integer does no harm."""
    x = np.array([-5, 0, 7, -(2**31) + 1, -(2**31)], np.int32)
    assert evaluate(name, x).tolist()[:4] == expected


@pytest.mark.parametrize("name", ["EXP", "FLOOR", "LOG", "RSQRT", "SIN", "SQRT"])
def test_floats_only(evaluate, name):
    """What is not defined for integers refuses them."""
    with pytest.raises(InvalidModel, match="TENSOR_INT32"):
        evaluate(name, np.ones(2, np.int32))


def elu(x, alpha):
    grown = alpha * (math.exp(x) - 1) if x < 80 else alpha * INF if alpha else 0.0
    return max(0.0, x) + min(0.0, grown)


@FLOATS
@pytest.mark.parametrize("alpha", [1.0, 0.25, 0.0, -0.5])
def test_elu(evaluate, dtype, alpha):
    """ELU is max(0, x) + min(0, alpha * (e^x - 1)), for every alpha."""
    x = np.linspace(-8, 4, 25).astype(dtype)
    check_floats("ELU", evaluate("ELU", x, dtype(alpha)), [elu(float(v), alpha) for v in x], dtype)


@pytest.mark.parametrize("alpha", [2.0, 0.0])
def test_elu_of_the_extremes(evaluate, alpha):
    """Infinity stays, minus infinity becomes -alpha, NaN is NaN; nothing warns."""
    y = evaluate("ELU", np.array([INF, -INF, NAN, 1e38], np.float32), np.float32(alpha))
    np.testing.assert_array_equal(y, np.array([INF, -alpha, NAN, 1e38], np.float32))


def test_elu_alpha_is_of_the_tensors_width(evaluate):
    """Alpha is FLOAT16 for TENSOR_FLOAT16: another width is no valid model."""
    with pytest.raises(InvalidModel, match="FLOAT16"):
        evaluate("ELU", np.ones(2, np.float16), np.float32(1))


def hard_swish(x):
    return x * min(max(x + 3, 0), 6) / 6


@FLOATS
def test_hard_swish_of_floats(evaluate, dtype):
    """HARD_SWISH is x * clip(x + 3, 0, 6) / 6."""
    x = np.linspace(-6, 6, 49).astype(dtype)
    check_floats("HARD_SWISH", evaluate("HARD_SWISH", x), [hard_swish(float(v)) for v in x], dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("scale", [0.04, 1e30, 1e-40])
def test_hard_swish_of_quantised(evaluate, quantised, requantise, dtype, scale):
    """Quantised HARD_SWISH goes from any parameters to any others."""
    x = quantised(np.arange(256).astype(np.uint8).view(dtype), float(np.float32(scale)), 20)
    expected = requantise(np.array([hard_swish(v) for v in x.real]), 0.03125, 5, dtype)
    np.testing.assert_array_equal(evaluate("HARD_SWISH", x, scale=0.03125, zero_point=5), expected)


def test_hard_swish_takes_no_elements(run_model):
    """A tensor without elements gives one without elements; functions that do not take it fail."""
    for name in ("HARD_SWISH", "EXP"):
        m = ModelBuilder()
        m.output(m.operation(name, m.input("float32", (0, 3))))
        if name == "HARD_SWISH":
            assert run_model(m.build(), np.zeros((0, 3), np.float32))[0].shape == (0, 3)
        else:
            with pytest.raises(ExecutionFailed, match="no empty tensor"):
                run_model(m.build(), np.zeros((0, 3), np.float32))


def test_logical_not(run_model):
    """Every byte but 0 is true, and results are 0 or 1."""
    m = ModelBuilder()
    m.output(m.operation("LOGICAL_NOT", m.input("bool8", (2, 2))))
    assert run_model(m.build(), np.array([[0, 1], [2, 255]], np.uint8))[0].tolist() == [[1, 0], [0, 0]]


STORED = {"float32": np.float32, "float16": np.float16, "int32": np.int32, "quant8_asymm": np.uint8}


@pytest.mark.parametrize("target", STORED)
@pytest.mark.parametrize("source", STORED)
def test_cast(evaluate, quantised, source, target):
    """CAST converts raw values: to integers toward zero, to 8 bits saturating; scales do not matter."""
    numbers = [0, 1, 2, 7, 100, 255] if source == "quant8_asymm" else [0, 1, -1, 7, 255, 256, -300, 30000, -30000]
    if source.startswith("float"):
        numbers += [0.5, -0.5, 1.75, -1.75, 254.9, 255.5, -0.9]
    x = np.array(numbers, STORED[source])
    expected = [float(v) for v in x]
    if not target.startswith("float"):
        low, high = (0, 255) if target == "quant8_asymm" else (-(2**31), 2**31 - 1)
        expected = [int(min(max(v, low), high)) for v in expected]
    asked = {"scale": 0.25, "zero_point": 9} if target == "quant8_asymm" else {}
    y = evaluate("CAST", quantised(x, 0.5, 3) if source == "quant8_asymm" else x, dtype=target, **asked)
    assert y.dtype == STORED[target]
    np.testing.assert_array_equal(y, np.array(expected).astype(STORED[target]))


@FLOATS
def test_cast_of_what_no_integer_is(evaluate, dtype):
    """Infinities saturate and NaN becomes the smallest integer, without a warning."""
    x = np.array([INF, -INF, NAN], dtype)
    assert evaluate("CAST", x, dtype="int32").tolist() == [2**31 - 1, -(2**31), -(2**31)]
    assert evaluate("CAST", x, dtype="quant8_asymm", scale=1.0).tolist() == [255, 0, 0]


def test_cast_beyond_float16(evaluate):
    """What float16 cannot hold becomes an infinity, without a warning."""
    assert evaluate("CAST", np.array([70000, -70000], np.int32), dtype="float16").tolist() == [INF, -INF]
    assert evaluate("CAST", np.array([1e30, NAN], np.float32), dtype="float16")[0] == INF


@pytest.mark.parametrize(
    ("name", "dtype", "scale"),
    [
        ("TENSOR_BOOL8", np.uint8, 0),
        ("TENSOR_QUANT16_ASYMM", np.uint16, 0.5),
        ("TENSOR_QUANT16_SYMM", np.int16, 0.5),
        ("TENSOR_QUANT8_ASYMM_SIGNED", np.int8, 0.5),
        ("TENSOR_QUANT8_SYMM", np.int8, 0.5),
    ],
)
def test_cast_of_other_types_is_a_copy(run_model, name, dtype, scale):
    """All other types can only be cast to themselves."""
    m, x = ModelBuilder(), np.arange(7).astype(dtype)
    value = m.input(name, (7,), scale=scale)
    m.output(m.operation("CAST", value, **({"scale": 2.0} if scale else {})))
    assert run_model(m.build(), x)[0].tobytes() == x.tobytes()
    with pytest.raises(InvalidModel, match="no result of inputs"):
        m.operation("CAST", value, dtype="float32")


@pytest.mark.parametrize(("declared", "fits"), [((2, 3), True), ((0, 3), True), ((3, 2), False), ((6,), False)])
def test_cast_keeps_the_dimensions(declared, fits):
    """Known dimensions that differ are refused by validation; unknown ones are not."""
    graph = Subgraph(
        [Operand("TENSOR_FLOAT32", (2, 3), lifetime=1), Operand("TENSOR_INT32", declared, lifetime=2)],
        [Operation("CAST", [0], [1])],
        [0],
        [1],
    )
    if fits:
        validate(Model(graph))
    else:
        with pytest.raises(InvalidModel, match=r"dimensions \[2, 3\] cannot become"):
            validate(Model(graph))
