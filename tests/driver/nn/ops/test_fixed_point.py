import math

import numpy as np
import pytest

from driver.nn.ops.fixed_point import (
    INT16,
    high_product,
    inverse_root,
    logistic,
    quantised_multiplier,
    saturate,
    scaled,
    shift_right,
    tanh,
)

EVERY = np.arange(-(2**15), 2**15)


def nearest(numerator, denominator):
    """Rounded division of integers, ties away from zero."""
    size = (2 * abs(numerator) + denominator) // (2 * denominator)
    return size if numerator >= 0 else -size


@pytest.mark.parametrize("bits", [0, 1, 4, 15])
def test_a_shift_rounds_ties_away_from_zero(bits):
    """Shifting right is rounded division by a power of two."""
    assert shift_right(EVERY, bits).tolist() == [nearest(int(v), 2**bits) for v in EVERY]


@pytest.mark.parametrize("bits", [15, 31])
def test_a_high_product_rounds_and_saturates(bits):
    """It is a * b / 2^bits; only the two smallest numbers have a product that does not fit."""
    limit = 2**bits
    values = np.random.default_rng(1).integers(-limit, limit, 200)
    pairs = [*zip(values[:100], values[100:], strict=True), (-limit, limit - 1), (-limit, -limit), (3, limit // 2)]
    for a, b in pairs:
        exact = int(a) * int(b)
        rounded = int(math.copysign((abs(exact) + limit // 2 - (exact < 0)) // limit, exact))
        assert high_product(np.array(a), int(b), bits) == min(rounded, limit - 1)


@pytest.mark.parametrize("real", [0.0, 1e-9, 0.3, 0.5, 1.0, 1.5, 1000.0])
def test_a_multiplier_multiplies(real):
    """Scaling by a quantised multiplier is multiplication, to one unit."""
    x = np.random.default_rng(2).integers(-(2**20), 2**20, 100)
    expected = np.clip(x * real, -(2**31), 2**31 - 1)
    np.testing.assert_allclose(scaled(x, quantised_multiplier(real)), expected, atol=1, rtol=1e-8)


def test_what_a_multiplier_makes_too_large_keeps_its_sign():
    """Numbers saturate at 32 bits where hardware may turn them around."""
    assert scaled(np.array([2**30, -(2**40)]), quantised_multiplier(8.0)).tolist() == [2**30, -(2**30)]


@pytest.mark.parametrize("real", [-1.0, math.nan, math.inf, 2.0**31])
def test_a_multiplier_is_refused(real):
    """Negative, undefined and huge numbers are no multipliers."""
    with pytest.raises(ValueError, match="multiplier"):
        quantised_multiplier(real)


def test_an_inverse_root_is_one():
    """The multiplier of 1 / sqrt(x) is right to two millionths, for all of 32 bits."""
    x = np.concatenate([np.arange(2, 100), 2 ** np.arange(1, 31), [2**31 - 1]])
    q, e = inverse_root(x)
    np.testing.assert_allclose(q / 2.0**31 * 2.0**e, 1 / np.sqrt(x), rtol=2e-6)
    assert [int(v) for pair in zip(*inverse_root(np.array([-5, 0, 1])), strict=True) for v in pair] == [
        2**31 - 1,
        0,
    ] * 3


def test_the_logistic_is_close():
    """The approximation of the logistic stays within 7 units; its middle is exact."""
    expected = 2**15 / (1 + np.exp(-EVERY / 2**12))
    assert np.abs(logistic(EVERY) - np.minimum(expected, 2**15 - 1)).max() <= 7
    assert logistic(np.array([0])) == [2**14]


@pytest.mark.parametrize("integer_bits", range(7))
def test_the_hyperbolic_tangent_is_close(integer_bits):
    """The approximation of tanh is odd and close, wherever the point stands."""
    found = tanh(EVERY, integer_bits)
    expected = np.tanh(EVERY / 2.0 ** (15 - integer_bits)) * 2**15
    assert np.abs(found - expected.clip(-(2**15), 2**15 - 1)).max() <= 14
    assert (found[1:] == -found[:0:-1]).all()


def test_saturation():
    """Numbers are clamped to the type."""
    assert saturate(np.array([-(2**40), 5, 2**40]), INT16).tolist() == [-(2**15), 5, 2**15 - 1]
