"""Axes as operations name them, and the reductions over them."""

import math
from collections.abc import Sequence

import numpy as np

from ..operation import Call, OperationType, Signature, same_as_input
from ..types import Dimensions
from .real import accumulator, load, store


def one_axis(axis: int, rank: int) -> int:
    """`axis` counted from the front; negative axes count from the end."""
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} has to be in {-rank}..{rank - 1}")
    return axis % rank


def all_axes(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """The distinct `axes`, ascending and counted from the front."""
    return tuple(sorted({one_axis(axis, rank) for axis in axes}))


def _reduced_shape(call: Call) -> tuple[Dimensions]:
    shape = call.shape(0)
    axes, keep = all_axes(call.values(1), len(shape)), call.integer(2) > 0
    left = tuple(1 if i in axes else d for i, d in enumerate(shape) if keep or i not in axes)
    return (left or (1,),)


def _mean(call: Call) -> None:
    out, shape = call.outputs[0], call.shape(0)
    axes = all_axes(call.values(1), len(shape))
    source = load(call, 0)
    total = call.scratch([1 if i in axes else d for i, d in enumerate(shape)], np.float64)
    result = accumulator(call, out.data)
    call.step(np.add.reduce, source, axis=axes, dtype=np.float64, out=total, keepdims=True)
    call.step(np.divide, total, math.prod(shape[i] for i in axes), result.reshape(total.shape), casting="unsafe")
    store(call, result, out.data, 0)


MEAN = OperationType(
    "MEAN",
    31,
    (Signature("f1 q1 h2 s3", "T TENSOR_INT32 INT32"),),
    _reduced_shape,
    _mean,
    quantisation=same_as_input,
)
