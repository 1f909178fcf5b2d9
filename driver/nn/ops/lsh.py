"""LSH_PROJECTION: bits that are equal for tensors that resemble each other.

Each bit is the sign of a weighted sum over the rows of the input. What is summed is the FarmHash fingerprint of a
message: the four bytes of the bit's seed, then the bytes of the row. Messages are never put together: all seeds and
all rows are hashed at once, as arrays [seeds, rows] or, where the seed has no part in it, [rows].
"""

import math
from dataclasses import dataclass

import numpy as np

from ..blocks import Look, each, look_nowhere
from ..operation import MAX_STEPS, Array, Call, OperationType, Signature
from ..types import Dimensions

SPARSE_DEPRECATED, DENSE, SPARSE = 1, 2, 3
MAX_BITS = 32
BLOCK = 64
"""Bytes of a long message that are hashed together."""

STRIP = 1 << 15
"""Messages hashed at a time, so that they stay in the cache."""

K0, K1, K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
SEED = 81
WORD = (1 << 64) - 1

Pair = tuple[Array, Array]


@dataclass(frozen=True, slots=True)
class Messages:
    """seeds: uint64 [seeds, 1], the float's bits. rows: uint8 [rows, at least 8]. length: bytes of a message.

    look: called after every block of the messages.
    """

    seeds: Array
    rows: Array
    length: int
    look: Look = look_nowhere

    def word(self, offset: int) -> Array:
        """Return the eight bytes from `offset` on; what lies behind the end of a short row is zeros."""
        start = max(0, offset - 4)
        row: Array = np.ascontiguousarray(self.rows[:, start : start + 8]).view("<u8").reshape(-1)
        return row if offset >= 4 else self.seeds >> (8 * offset) | row << (32 - 8 * offset)

    def words(self, offset: int, count: int) -> list[Array]:
        """`count` words in a row."""
        return [self.word(offset + 8 * i) for i in range(count)]


def _rotate(x: Array, bits: int) -> Array:
    return x >> bits | x << (64 - bits)


def _fold(x: Array) -> Array:
    folded: Array = x ^ x >> 47
    return folded


def _mix(u: Array, v: Array, factor: Array | int) -> Array:
    a = _fold((u ^ v) * factor)
    return _fold((v ^ a) * factor) * factor


def fingerprints(messages: Messages) -> Array:
    """FarmHash's Fingerprint64 of messages of five bytes or more, uint64 [seeds, rows]."""
    length = messages.length
    if length > 64:
        return _over_64(messages)
    factor = (K2 + 2 * length) & WORD
    if length > 32:
        return _to_64(messages, factor)
    if length > 16:
        return _mix(*_to_32(messages, factor)[:2], factor)
    if length >= 8:
        a, b = messages.word(0) + K2, messages.word(length - 8)
        return _mix(_rotate(b, 37) * factor + a, (_rotate(a, 25) + b) * factor, factor)
    return _mix(length + (messages.seeds << 3), messages.word(length - 4) & 0xFFFFFFFF, factor)


def _to_32(messages: Messages, factor: int) -> tuple[Array, Array, Array]:
    """Return two words to mix for the first and the last 16 bytes of 17..64, and the first again."""
    length, longer = messages.length, messages.length > 32
    a, b = messages.word(0) * (K2 if longer else K1), messages.word(8)
    c, d = messages.word(length - 8) * factor, messages.word(length - 16) * K2
    return _rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + K2, 18) + c, a


def _to_64(messages: Messages, factor: int) -> Array:
    length = messages.length
    y, z, a = _to_32(messages, factor)
    z = _mix(y, z, factor)
    e, f = messages.word(16) * factor, messages.word(24)
    g, h = (y + messages.word(length - 32)) * factor, (z + messages.word(length - 24)) * factor
    return _mix(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, factor)


def _half_block(words: list[Array], a: Array, b: Array) -> Pair:
    """Mix four words into two."""
    first, second, third, fourth = words
    a = a + first
    b = _rotate(b + a + fourth, 21)
    total = a + second + third
    return total + fourth, b + _rotate(total, 44) + a


def _block(
    words: list[Array], x: Array, y: Array, z: Array, *, v: Pair, w: Pair, factor: Array | int, weight: int
) -> tuple[Array, Array, Array, Pair, Pair]:
    """Mix the eight words of a block into the state."""
    x = _rotate(x + y + v[0] + words[1], 37) * factor
    y = _rotate(y + v[1] + words[6], 42) * factor
    x = x ^ w[1] * weight
    y = y + v[0] * weight + words[5]
    z = _rotate(z + w[0], 33) * factor
    v = _half_block(words[:4], v[1] * factor, x + w[0])
    w = _half_block(words[4:], z + w[1], y + words[2])
    return z, y, x, v, w


def _over_64(messages: Messages) -> Array:
    length = messages.length
    zero = np.zeros(1, np.uint64)
    y, v, w = zero + ((SEED * K1 + 113) & WORD), (zero, zero), (zero, zero)
    z, x = _fold(y * K2 + 113) * K2, messages.word(0) + ((SEED * K2) & WORD)
    for offset in range(0, length - 1 - (length - 1) % BLOCK, BLOCK):
        messages.look()
        x, y, z, v, w = _block(messages.words(offset, 8), x, y, z, v=v, w=w, factor=K1, weight=1)
    factor = ((z & 0xFF) << 1) + K1
    low = w[0] + (length - 1) % BLOCK
    v = (v[0] + low, v[1])
    w = (low + v[0], w[1])
    x, y, z, v, w = _block(messages.words(length - BLOCK, 8), x, y, z, v=v, w=w, factor=factor, weight=9)
    return _mix(_mix(v[0], w[0], factor) + _fold(y) * K0 + z, _mix(v[1], w[1], factor) + x, factor)


def _projected_shape(call: Call) -> tuple[Dimensions]:
    (hashes, bits), (count, *row), kind = call.shape(0), call.shape(1), call.integer(3)
    if bits > MAX_BITS:
        raise ValueError(f"{bits} bits in a hash are more than {MAX_BITS}")
    if kind not in (SPARSE_DEPRECATED, DENSE, SPARSE):
        raise ValueError(f"type {kind} does not exist; use 1 or 3 (sparse) or 2 (dense)")
    if call.given(2) != (kind == DENSE):
        raise ValueError(f"type {kind} goes {'with' if kind == DENSE else 'without'} weights")
    if call.given(2) and call.shape(2) != (count,):
        raise ValueError(f"weights of dimensions {list(call.shape(2))} have to be [{count}], one for each row")
    if math.prod(row) * call.tensor(1).type.element_size > MAX_STEPS * BLOCK:
        raise ValueError(f"rows of dimensions {row} are longer than {MAX_STEPS * BLOCK} bytes")
    return ((hashes * bits,) if kind == DENSE else (hashes,),)


def _scores(look: Look, seeds: Array, rows: Array, length: int, weights: Array) -> Array:
    """Return for every seed the weighted sum of the fingerprints, read as signed numbers."""
    scores = np.zeros(len(seeds))
    for first in range(0, len(rows), STRIP):
        strip = rows[first : first + STRIP]
        width = STRIP // len(strip)
        for start in range(0, len(seeds), width):
            part = slice(start, start + width)
            look()
            found = fingerprints(Messages(seeds[part, np.newaxis], strip, length, look))
            scores[part] += found.view(np.int64) @ weights[first : first + STRIP]
    return scores


def _project_bits(look: Look, hashes: Array, source: Array, weights: Array | None, kind: int, result: Array) -> None:
    seeds = hashes.astype(np.float32).view(np.uint32).astype(np.uint64).reshape(-1)
    rows = np.ascontiguousarray(source).reshape(len(source), -1).view(np.uint8)
    length = 4 + rows.shape[1]
    if rows.shape[1] < 8:
        short, rows = rows, np.zeros((len(rows), 8), np.uint8)
        each(look, np.copyto, rows[:, : short.shape[1]], short)
    weighed: Array = np.empty(len(rows))
    each(look, np.copyto, weighed, 1.0 if weights is None else weights)
    bits = _scores(look, seeds, rows, length, weights=weighed) > 0
    if kind == DENSE:
        np.copyto(result, bits)
        return
    count, width = hashes.shape
    values = bits.reshape(count, width) @ (1 << np.arange(width, dtype=np.int64)[::-1])
    if kind == SPARSE:
        values += np.arange(count) << width
    np.copyto(result, values, casting="unsafe")


def _project(call: Call) -> None:
    weights = call.array(2) if call.given(2) else None
    call.step(_project_bits, call.look, call.array(0), call.array(1), weights, call.integer(3), call.outputs[0].data)


OPERATIONS = (
    OperationType(
        "LSH_PROJECTION",
        15,
        tuple(Signature("f0 h2", f"T {data} T? INT32", "i", ranks=(2,)) for data in "fhiq"),
        _projected_shape,
        build=_project,
    ),
)
