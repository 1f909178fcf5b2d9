"""Integer arithmetic as fixed-point hardware does it, on whole arrays in int64.

Q3.12 means 3 integer bits, 12 fraction bits and a sign; constants are given as Q0.31.
"""

import math
from functools import cache
from typing import Any

import numpy as np

from ..operation import Array

INT8, INT16, INT32 = (np.iinfo(t) for t in (np.int8, np.int16, np.int32))


def saturate(x: Array, info: "np.iinfo[Any]" = INT16) -> Array:
    """`x` clamped to an integer type, still as int64."""
    clamped: Array = np.asarray(x, np.int64).clip(info.min, info.max)
    return clamped


def high_product(a: Array, b: Array | int, bits: int = 31) -> Array:
    """Return a * b / 2^bits rounded to the nearest, saturating at 2^bits - 1; a and b have `bits` bits and a sign."""
    product = np.multiply(a, b, dtype=np.int64)
    half = 1 << (bits - 1)
    product += np.where(product >= 0, half, 1 - half)
    product += (product >> 63) & ((1 << bits) - 1)  # a shift rounds down; this makes it truncate
    rounded: Array = np.minimum(product >> bits, (1 << bits) - 1)
    return rounded


def shift_right(x: Array, bits: Array | int) -> Array:
    """x / 2^bits rounded to the nearest, ties away from zero."""
    mask = (np.int64(1) << np.asarray(bits, np.int64)) - 1
    rounded: Array = (x >> bits) + ((x & mask) > (mask >> 1) + (x < 0))
    return rounded


def quantised_multiplier(real: float) -> tuple[int, int]:
    """(q, e) with real = q / 2^31 * 2^e and 2^30 <= q < 2^31; zero for what is too small."""
    if not 0 <= real < math.inf:
        raise ValueError(f"multiplier {real} has to be at least 0 and finite")
    fraction, exponent = math.frexp(real)
    q = math.floor(fraction * 2**31 + 0.5)
    if q == 2**31:
        q, exponent = q // 2, exponent + 1
    if exponent > 31:
        raise ValueError(f"multiplier {real} has to be below 2^31")
    return (0, 0) if exponent < -31 else (q, exponent)


def scaled(x: Array, multiplier: tuple[Array | int, Array | int]) -> Array:
    """x times a quantised multiplier; what does not fit into 32 bits saturates on the way."""
    q, exponent = multiplier
    wide = saturate(x, INT32) << np.maximum(exponent, 0)
    return shift_right(high_product(saturate(wide, INT32), q), np.maximum(np.negative(exponent), 0))


def inverse_root(x: Array) -> tuple[Array, Array]:
    """Return the multiplier of 1 / sqrt(x) for integers 0..2^31-1; 1 for what is below 2."""
    v = np.maximum(x, 2).astype(np.int64)
    shift = np.full(v.shape, 11)
    while (large := v >= 1 << 29).any():
        v, shift = np.where(large, v // 4, v), shift + large
    length = np.frexp(v.astype(np.float64))[1]
    pairs = (31 - length) // 2 - 1
    v, shift = v << 2 * pairs, shift - pairs
    half = shift_right(v >> 1, 1)
    root = np.full(v.shape, 1 << 28)
    for _ in range(5):
        cube = saturate(high_product(high_product(root, root), root) << 6, INT32)
        root = saturate((high_product(root, 3 << 27) - high_product(half, cube)) << 3, INT32)
    root = high_product(root, 1518500250)
    q = np.where(shift < 0, root << np.maximum(-shift, 0), root)
    is_small = x <= 1
    return np.where(is_small, INT32.max, q), np.where(is_small, 0, -np.maximum(shift, 0))


def _constant(q31: int) -> int:
    return int(shift_right(np.array(q31), 16))


def _product(a: Array, b: Array | int) -> Array:
    return high_product(a, b, 15)


_EXPONENTIALS = (1672461947, 1302514674, 790015084, 290630308, 39332535, 720401, 242)
"""e^-(2^k) for k = -2..4."""


def _small_exponential(a: Array) -> Array:
    """e^a in Q0.15 for -1/4 <= a < 0, by its Taylor series at -1/8."""
    x = a + (1 << 12)
    x2 = _product(x, x)
    x3, x4 = _product(x2, x), _product(x2, x2)
    tail = shift_right(_product(shift_right(x4, 2) + x3, _constant(715827883)) + x2, 1)
    factor = _constant(1895147668)
    return saturate(factor + _product(x + tail, factor))


def _exponential(a: Array, integer_bits: int) -> Array:
    """e^a in Q0.15 for a <= 0 with `integer_bits`: a factor for every power of 2 in what is beyond -1/4."""
    fraction_bits = 15 - integer_bits
    quarter = 1 << (fraction_bits - 2)
    small = (a & (quarter - 1)) - quarter
    result = _small_exponential(saturate(small << integer_bits))
    beyond = small - a
    for k, factor in enumerate(_EXPONENTIALS, -2):
        if k < integer_bits:
            has_bit = beyond & (1 << (fraction_bits + k)) != 0
            result = np.where(has_bit, _product(result, _constant(factor)), result)
    if integer_bits > 5:
        result = np.where(a < -(1 << (fraction_bits + 5)), 0, result)
    return np.where(a == 0, INT16.max, result)


def _inverse(a: Array) -> Array:
    """1 / (1 + a) in Q2.13 for a of Q0.15 in 0..1, by Newton's method."""
    half = (a + INT16.max + 1) >> 1
    x = _constant(1515870810) + _product(half, _constant(-1010580540))
    for _ in range(3):
        x = x + saturate(_product(x, (1 << 13) - _product(half, x)) << 2)
    return x


def _every_int16() -> Array:
    """Return all values of 16 bits, each where an array finds it when it is the index."""
    return np.arange(1 << 16).astype(np.int16).astype(np.int64)


@cache
def _logistic_table() -> Array:
    x = _every_int16()
    upper = saturate(_inverse(_exponential(-abs(x), 3)) << 1)
    return np.where(x == 0, 1 << 14, np.where(x > 0, upper, INT16.max - upper))


@cache
def _tanh_table(integer_bits: int) -> Array:
    x = _every_int16()
    size = saturate((_inverse(_exponential(-abs(x), integer_bits + 1)) - (1 << 13)) << 2)
    return np.sign(x) * size


def logistic(x: Array) -> Array:
    """1 / (1 + e^-x) in Q0.15 for x in Q3.12."""
    return _logistic_table().take(x)


def tanh(x: Array, integer_bits: int = 3) -> Array:
    """tanh in Q0.15 for x of 16 bits, `integer_bits` (0..6) of them before the point."""
    return _tanh_table(integer_bits).take(x)
