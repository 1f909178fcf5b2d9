"""Entries that are picked: by numbers or keys (GATHER, EMBEDDING_LOOKUP, HASHTABLE_LOOKUP), the largest (TOPK_V2),
or at random (RANDOM_MULTINOMIAL).

Numbers are copied to private memory and checked there: where they lie another process may be writing.
"""

import numpy as np

from ..blocks import ELEMENTS, Look, copied, each, pieces, take
from ..operation import ANY_RANK, Array, Call, OperationType, Signature, Tensor, declared, same_as_input
from ..types import Dimensions
from .axes import one_axis
from .boxes import expect_rank


def _check_indices(look: Look, indices: Array, chosen: Array, size: int) -> None:
    """Copy `indices` to `chosen`; `ValueError` unless all are in 0..size - 1."""
    for piece in pieces(indices.shape, ELEMENTS):
        some = chosen[piece]
        np.copyto(some, indices[piece])
        low, high = int(some.min()), int(some.max())
        if low < 0 or high >= size:
            raise ValueError(f"index {low if low < 0 else high} has to be in 0..{size - 1}")
        look()


def _take(call: Call, values: Array, axis: int, indices: Tensor) -> None:
    """Write the entries of `axis` that `indices` names to output 0."""
    chosen = np.empty(indices.shape, np.intp) if indices.fixed else call.scratch(indices.shape, np.intp)
    if indices.fixed:
        _check_indices(call.look, indices.data, chosen, values.shape[axis])
    else:
        call.step(_check_indices, call.look, indices.data, chosen, values.shape[axis])
    call.step(np.take, values, chosen, axis, call.outputs[0].data, "clip")


def _gathered_shape(call: Call) -> tuple[Dimensions]:
    shape = call.shape(0)
    axis = one_axis(call.integer(1), len(shape))
    return ((*shape[:axis], *call.shape(2), *shape[axis + 1 :]),)


def _gather(call: Call) -> None:
    values = call.array(0)
    _take(call, values, one_axis(call.integer(1), values.ndim), call.tensor(2))


def _embedded_shape(call: Call) -> tuple[Dimensions]:
    shape = call.shape(1)
    if len(shape) < 2:
        raise ValueError(f"values of dimensions {list(shape)} have to be of rank 2 or more")
    return ((*expect_rank(call, 0, 1), *shape[1:]),)


def _embed(call: Call) -> None:
    _take(call, call.array(1), 0, call.tensor(0))


def _found_shape(call: Call) -> tuple[Dimensions, Dimensions]:
    (lookups,), (keys,), shape = expect_rank(call, 0, 1), expect_rank(call, 1, 1), call.shape(2)
    if keys != shape[0]:
        raise ValueError(f"{keys} keys for values of dimensions {list(shape)}; there has to be one for each row")
    return (lookups, *shape[1:]), (lookups,)


def _find_rows(look: Look, lookups: Array, keys: Array, values: Array, rows: Array, hits: Array) -> None:
    """Write the row of every lookup that is among the ascending `keys`, zero bytes for the others."""
    known = copied(look, keys)
    for (some,) in pieces(lookups.shape, STRIP):
        look()
        wanted = np.array(lookups[some])
        at = np.searchsorted(known, wanted)
        missing = known.take(at, mode="clip") != wanted
        take(look, values, at, 0, out=rows[some])
        if missing.any():
            each(look, _clear, np.expand_dims(missing, tuple(range(1, rows.ndim))), rows[some])
        np.copyto(hits[some], ~missing, casting="unsafe")


def _clear(where: Array, rows: Array) -> None:
    np.copyto(rows, 0, where=where)


def _find(call: Call) -> None:
    rows, hits = (out.data for out in call.outputs)
    call.step(_find_rows, call.look, call.array(0), call.array(1), call.array(2), rows, hits)


def _hits(_source: Tensor, _result: Tensor) -> tuple[float, int]:
    """Return the hits as they are, 0 and 1."""
    return 1.0, 0


LOW_HALF = 0xFFFFFFFF
STRIP = 1 << 11
"""What is searched for at a time."""

DRAWN = 1 << 16
"""Samples drawn at a time."""

SORTED = 1 << 20
"""Elements that are partitioned or added up at a time, at most."""

IN_ORDER = 1 << 16
"""Elements that are sorted, or gathered in their order, at a time."""


def _best_shape(call: Call) -> tuple[Dimensions, Dimensions]:
    *outer, size = call.shape(0)
    k = call.integer(1)
    if k > SORTED // 2:
        raise ValueError(f"k {k} is more than {SORTED // 2}")
    if not 0 < k <= size:
        raise ValueError(f"k {k} has to be in 1..{size}, the last dimension of {list(call.shape(0))}")
    return (*outer, k), (*outer, k)


def _sortable(values: Array) -> Array:
    """Return the integers in the order of `values`: floats by their bits, with those below 0 turned around."""
    if values.dtype.kind != "f":
        return values
    bits = np.add(values, 0.0, dtype=np.float32).view(np.int32)  # -0.0 becomes 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _take_best(look: Look, source: Array, values: Array, indices: Array) -> None:
    """Write the largest of each row of `source`, and where they were; of equals the later one comes first."""
    size, k = source.shape[-1], values.shape[-1]
    width = max(ELEMENTS, 2 * k)
    for (rows,) in pieces(source.shape[:1], max(1, width // size)):
        best = np.empty((len(source[rows]), 0), np.int64)
        for start in range(0, size, width - k):
            look()
            best = _largest(source[rows], start, min(size, start + width - k), best, k=k)
        _sort(look, best)
        for piece in pieces(best.shape, IN_ORDER):
            look()
            found = best[:, ::-1][piece] & LOW_HALF
            np.copyto(values[rows][piece], np.take_along_axis(source[rows][piece[0]], found, 1))
            np.copyto(indices[rows][piece], found, casting="unsafe")


def _sort(look: Look, keys: Array) -> None:
    """Sort the keys of each row in place, many of them in halves."""
    look()
    if keys.shape[1] <= IN_ORDER:
        keys.sort(axis=1)
        return
    half = keys.shape[1] // 2
    keys.partition(half, axis=1)
    _sort(look, keys[:, :half])
    _sort(look, keys[:, half:])


def _largest(rows: Array, start: int, stop: int, among: Array, k: int) -> Array:
    """Return the keys of the `k` largest of each row, in any order: of some columns, and of `among` those before. A key
    is the value, and below that the column.
    """
    keys = np.empty((len(rows), stop - start), np.int64)
    np.copyto(keys, _sortable(rows[:, start:stop]))
    np.left_shift(keys, 32, keys)
    np.bitwise_or(keys, np.arange(start, stop), keys)
    if among.size:
        keys = np.concatenate((among, keys), axis=1)
    if k < keys.shape[1]:
        keys.partition(keys.shape[1] - k, axis=-1)
    return keys[:, -k:]


def _best(call: Call) -> None:
    *_, size = call.shape(0)
    call.step(
        _take_best,
        call.look,
        call.array(0).reshape(-1, size),
        *(out.data.reshape(-1, out.shape[-1]) for out in call.outputs),
    )


def _drawn_shape(call: Call) -> tuple[Dimensions]:
    shape, samples = call.shape(0), call.integer(1)
    if len(shape) != 2:
        raise ValueError(f"logits of dimensions {list(shape)} have to be [batch, classes]")
    if shape[1] > SORTED:
        raise ValueError(f"{shape[1]} classes are more than {SORTED}")
    if samples < 1:
        raise ValueError(f"the number of samples {samples} has to be above 0")
    if call.shape(2) != (2,):
        raise ValueError(f"seeds of dimensions {list(call.shape(2))} have to be [2]")
    return ((shape[0], samples),)


def _cumulated(look: Look, logits: Array) -> Array:
    """Return for every row the sums of unnormalised probabilities up to each class; infinities and NaN count as 0."""
    sums: Array = np.empty(logits.shape)
    for (rows,) in pieces(sums.shape[:1], max(1, SORTED // logits.shape[1])):
        look()
        real = logits[rows].astype(np.float64)
        real[~np.isfinite(real)] = -np.inf
        look()
        highest = real.max(axis=1, keepdims=True)
        if (highest == -np.inf).any():
            row = (rows.start or 0) + int(np.argmin(highest))
            raise ValueError(f"row {row} of the logits has no finite one; there is no class to draw")
        each(look, np.subtract, real, highest, real)
        each(look, np.exp, real, real)
        np.cumsum(real, axis=1, out=sums[rows])
    return sums


def _draw_classes(look: Look, logits: Array, seeds: Array, result: Array) -> None:
    """Fill each row of `result` with classes, each the first whose cumulated probability exceeds a random number."""
    key = np.array(seeds).view(np.uint32).astype(np.uint64)
    random = np.random.Generator(np.random.Philox(key=key if key.any() else None))
    sums = _cumulated(look, logits)
    batch, classes = sums.shape
    rows = np.arange(batch)[:, np.newaxis]
    ordered = np.empty(sums.shape, np.complex128)
    each(look, _number, rows, sums, ordered)
    width = max(1, DRAWN // batch)
    for start in range(0, result.shape[1], width):
        part = result[:, start : start + width]
        for piece in pieces(part.shape, STRIP):
            look()
            some = piece[0]
            targets = rows[some] + 1j * (random.random(part[piece].shape) * sums[some, -1:])
            found = np.searchsorted(ordered.reshape(-1), targets, side="right")
            np.copyto(part[piece], found - rows[some] * classes, casting="unsafe")


def _number(rows: Array, sums: Array, ordered: Array) -> None:
    """Complex numbers sort by row first, so that one search serves all rows."""
    np.copyto(ordered, rows + 1j * sums)


def _draw(call: Call) -> None:
    call.step(_draw_classes, call.look, call.array(0), call.array(2), call.outputs[0].data)


OPERATIONS = (
    OperationType(
        "GATHER",
        51,
        (Signature("f2 h2 i2 q2 s3", "T INT32 i", ranks=ANY_RANK),),
        _gathered_shape,
        build=_gather,
        quantisation=same_as_input,
    ),
    OperationType(
        "EMBEDDING_LOOKUP",
        7,
        (Signature("f0 i2 q2 h3 s3", "i T", ranks=ANY_RANK[1:], of=1),),
        _embedded_shape,
        build=_embed,
        quantisation=same_as_input,
    ),
    OperationType(
        "HASHTABLE_LOOKUP",
        10,
        (Signature("f0 i0 q0", "i i T", "T q", ranks=ANY_RANK, of=2),),
        _found_shape,
        build=_find,
        quantisation=(same_as_input, _hits),
    ),
    OperationType(
        "TOPK_V2",
        90,
        (Signature("f2 h2 i2 q2 s3", "T INT32", "T i", ranks=ANY_RANK),),
        _best_shape,
        build=_best,
        quantisation=(same_as_input, declared),
    ),
    OperationType(
        "RANDOM_MULTINOMIAL",
        74,
        (Signature("f2 h2", "T INT32 i", "i", ranks=(2,)),),
        _drawn_shape,
        build=_draw,
    ),
)
