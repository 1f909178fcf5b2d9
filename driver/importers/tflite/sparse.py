"""Sparse constants, made dense.

A sparse tensor is a tree: one level for each of its dimensions, and one for each dimension of its blocks. A dense level
has all of its entries below each entry of the level above it. A sparse level lists them: entry i of the level above has
the indices from segment i to segment i + 1. The values belong to the entries of the last level.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from driver.errors import ImportFailed
from driver.formats.file_bytes import Array


@dataclass(frozen=True, slots=True)
class Level:
    """dimension: which one it is; those of blocks follow those of the tensor. segments: None when it is dense."""

    dimension: int
    size: int
    segments: Array | None = None
    indices: Array | None = None


def dense(levels: Sequence[Level], blocks: Sequence[int], values: Array, shape: tuple[int, ...]) -> Array:
    """Return the array of `shape` that has `values` at the places of the levels, and zeros elsewhere.

    blocks: the dimension of the tensor that each dimension of a block divides. Raise `ImportFailed` when damaged.
    """
    rank, most = len(shape), math.prod(shape) + values.size
    order = [level.dimension for level in levels]
    if sorted(order) != list(range(rank + len(blocks))) or any(not 0 <= d < rank for d in blocks):
        raise ImportFailed(f"damaged: a sparse tensor of {rank} dimensions has levels {order[:16]}")
    places, sizes, count = [np.zeros(1, np.int64)] * len(order), [0] * len(order), 1
    for number, level in enumerate(levels):
        above, indices = _entries(level, count, most)
        places = [place[above] if i in order[:number] else place for i, place in enumerate(places)]
        places[level.dimension], sizes[level.dimension], count = indices, level.size, len(indices)
    if count != values.size:
        raise ImportFailed(f"damaged: a sparse tensor has {values.size} values for {count} places")
    for block, dimension in enumerate(blocks):
        places[dimension] = places[dimension] * sizes[rank + block] + places[rank + block]
    places = places[:rank]
    if any(((place < 0) | (place >= size)).any() for place, size in zip(places, shape, strict=True)):
        raise ImportFailed(f"damaged: a value of a sparse tensor lies outside of {list(shape)}")
    result = np.zeros(shape, values.dtype)
    result[tuple(places)] = values
    return result


def _entries(level: Level, count: int, most: int) -> tuple[Array, Array]:
    """Return the entries of a level: the entry above each, and its index. count: entries of the level above."""
    if level.segments is None or level.indices is None:
        if level.size < 1 or count * level.size > most:
            raise ImportFailed(f"damaged: a sparse tensor of {most} elements has {count} x {level.size} entries")
        return np.repeat(np.arange(count), level.size), np.tile(np.arange(level.size, dtype=np.int64), count)
    lengths, indices = np.diff(level.segments), level.indices
    whole = level.segments.size == count + 1 and not level.segments[0] and level.segments[-1] == indices.size
    if not whole or (lengths < 0).any() or indices.size > most:
        raise ImportFailed(f"damaged: the segments of a sparse tensor do not fit its {indices.size} indices")
    return np.repeat(np.arange(count), lengths), indices
