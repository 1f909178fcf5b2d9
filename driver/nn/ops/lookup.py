"""Entries taken by numbers or keys that are data: GATHER, EMBEDDING_LOOKUP, HASHTABLE_LOOKUP.

Numbers are copied to private memory and checked there: where they lie another process may be writing.
"""

import numpy as np

from ..operation import ANY_RANK, Array, Call, OperationType, Signature, Tensor, same_as_input
from ..types import Dimensions
from .axes import one_axis


def _check_indices(indices: Array, chosen: Array, size: int) -> None:
    """Copy `indices` to `chosen`; `ValueError` unless all are in 0..size - 1."""
    np.copyto(chosen, indices)
    low, high = int(chosen.min()), int(chosen.max())
    if low < 0 or high >= size:
        raise ValueError(f"index {low if low < 0 else high} has to be in 0..{size - 1}")


def _take(call: Call, values: Array, axis: int, indices: Tensor) -> None:
    """Write the entries of `axis` that `indices` names to output 0."""
    chosen = np.empty(indices.shape, np.intp) if indices.fixed else call.scratch(indices.shape, np.intp)
    if indices.fixed:
        _check_indices(indices.data, chosen, values.shape[axis])
    else:
        call.step(_check_indices, indices.data, chosen, values.shape[axis])
    call.step(np.take, values, chosen, axis, call.outputs[0].data, "clip")


def _gathered_shape(call: Call) -> tuple[Dimensions]:
    shape = call.shape(0)
    axis = one_axis(call.integer(1), len(shape))
    return ((*shape[:axis], *call.shape(2), *shape[axis + 1 :]),)


def _gather(call: Call) -> None:
    values = call.array(0)
    _take(call, values, one_axis(call.integer(1), values.ndim), call.tensor(2))


def _one_dimension(call: Call, index: int) -> int:
    """The length of input `index`, a list."""
    shape = call.shape(index)
    if len(shape) != 1:
        raise ValueError(f"input {index} has dimensions {list(shape)}; it has to be 1-D")
    return shape[0]


def _embedded_shape(call: Call) -> tuple[Dimensions]:
    shape = call.shape(1)
    if len(shape) < 2:
        raise ValueError(f"values of dimensions {list(shape)} have to be of rank 2 or more")
    return ((_one_dimension(call, 0), *shape[1:]),)


def _embed(call: Call) -> None:
    _take(call, call.array(1), 0, call.tensor(0))


def _found_shape(call: Call) -> tuple[Dimensions, Dimensions]:
    lookups, keys, shape = _one_dimension(call, 0), _one_dimension(call, 1), call.shape(2)
    if keys != shape[0]:
        raise ValueError(f"{keys} keys for values of dimensions {list(shape)}; there has to be one for each row")
    return (lookups, *shape[1:]), (lookups,)


def _find_rows(lookups: Array, keys: Array, values: Array, rows: Array, hits: Array) -> None:
    """Write the row of every lookup that is among the ascending `keys`, zero bytes for the others."""
    wanted, known = np.array(lookups), np.array(keys)
    at = np.searchsorted(known, wanted)
    missing = known.take(at, mode="clip") != wanted
    np.take(values, at, 0, rows, "clip")
    rows[missing] = 0
    np.copyto(hits, ~missing, casting="unsafe")


def _find(call: Call) -> None:
    rows, hits = (out.data for out in call.outputs)
    call.step(_find_rows, call.array(0), call.array(1), call.array(2), rows, hits)


def _hits(_source: Tensor, _result: Tensor) -> tuple[float, int]:
    """Hits are 0 and 1 as they are."""
    return 1.0, 0


GATHER = OperationType(
    "GATHER",
    51,
    (Signature("f2 h2 i2 q2 s3", "T INT32 i", ranks=ANY_RANK),),
    _gathered_shape,
    _gather,
    quantisation=same_as_input,
)
EMBEDDING_LOOKUP = OperationType(
    "EMBEDDING_LOOKUP",
    7,
    (Signature("f0 i2 q2 h3 s3", "i T", ranks=ANY_RANK[1:], of=1),),
    _embedded_shape,
    _embed,
    quantisation=same_as_input,
)
HASHTABLE_LOOKUP = OperationType(
    "HASHTABLE_LOOKUP",
    10,
    (Signature("f0 i0 q0", "i i T", "T q", ranks=ANY_RANK, of=2),),
    _found_shape,
    _find,
    quantisation=(same_as_input, _hits),
)
