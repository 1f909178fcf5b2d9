"""Transposing any number of dimensions with transpositions of four at most, which is what the HAL has."""

import math
from collections.abc import Iterator, Sequence

MOST_DIMENSIONS = 4
Step = tuple[list[int], list[int]]


def steps(shape: Sequence[int], order: Sequence[int]) -> list[Step]:
    """Return the transpositions that together bring the dimensions of `shape` into `order`: the dimensions of each, and
    its order.

    Dimensions of size 1 are left out, and neighbours that stay neighbours are joined. Where more than four are left,
    two blocks of neighbours change places at a time.
    """
    groups = _neighbours([i for i in order if shape[i] != 1], [i for i, size in enumerate(shape) if size != 1])
    before = sorted(groups)
    sizes = [math.prod(shape[i] for i in group) for group in before]
    after = [before.index(group) for group in groups]
    if len(sizes) <= MOST_DIMENSIONS:
        return [(sizes, after)] if len(sizes) > 1 else []
    return [*_exchanges(sizes, after)]


def _neighbours(order: Sequence[int], axes: Sequence[int]) -> list[list[int]]:
    """`order` in runs that are consecutive in `axes`, too."""
    runs: list[list[int]] = []
    for axis in order:
        if runs and axes.index(axis) == axes.index(runs[-1][-1]) + 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return runs


def _exchanges(sizes: Sequence[int], order: Sequence[int]) -> Iterator[Step]:
    """Bring one run after the other to its place, before everything that is not in its place yet."""
    now = [*range(len(order))]
    for place, wanted in enumerate(order):
        at = now.index(wanted)
        if at == place:
            continue
        end = at + 1
        while end < len(now) and now[end] == order[place + end - at]:
            end += 1
        blocks = now[:place], now[place:at], now[at:end], now[end:]
        yield [math.prod(sizes[i] for i in block) for block in blocks], [0, 2, 1, 3]
        now = [*blocks[0], *blocks[2], *blocks[1], *blocks[3]]
