"""Axes as operations name them, and the reductions over them."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ..operation import ANY_RANK, Array, Call, OperationType, Signature, same_as_input
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


def _kept_shape(call: Call) -> tuple[tuple[int, ...], Dimensions]:
    """The axes of a reduction, and the dimensions of its result with these axes kept."""
    shape = call.shape(0)
    axes = all_axes(call.values(1), len(shape))
    return axes, tuple(1 if i in axes else d for i, d in enumerate(shape))


def _reduced_shape(call: Call) -> tuple[Dimensions]:
    axes, kept = _kept_shape(call)
    if call.integer(2) > 0:
        return (kept,)
    return (tuple(d for i, d in enumerate(kept) if i not in axes) or (1,),)


def _accumulated(call: Call, function: np.ufunc) -> Array:
    """The reduction of input 0 by `function` in float64, with the reduced axes kept."""
    axes, kept = _kept_shape(call)
    total = call.scratch(kept, np.float64)
    call.step(function.reduce, load(call, 0), axis=axes, dtype=np.float64, out=total, keepdims=True)
    return total


def _mean(call: Call) -> None:
    out, shape = call.outputs[0], call.shape(0)
    total, result = _accumulated(call, np.add), accumulator(call, out.data)
    count = math.prod(shape) // math.prod(total.shape)
    call.step(np.divide, total, count, result.reshape(total.shape), casting="unsafe")
    store(call, result, out.data, 0)


def _fold(function: np.ufunc, call: Call) -> None:
    total = _accumulated(call, function)
    call.step(np.copyto, call.outputs[0].data.reshape(total.shape), total, casting="unsafe")


def _pick(function: np.ufunc, call: Call) -> None:
    """Reduce the stored numbers, of which one is the result."""
    axes, kept = _kept_shape(call)
    call.step(function.reduce, call.array(0), axis=axes, out=call.outputs[0].data.reshape(kept), keepdims=True)


def _agree(function: np.ufunc, call: Call) -> None:
    axes, kept = _kept_shape(call)
    out = call.outputs[0].data.view(np.bool_).reshape(kept)
    call.step(function.reduce, call.array(0), axis=axes, dtype=np.bool_, out=out, keepdims=True)


def _arg_shape(call: Call) -> tuple[Dimensions]:
    shape = call.shape(0)
    axis = one_axis(call.integer(1), len(shape))
    return ((*shape[:axis], *shape[axis + 1 :]) or (1,),)


def _arg(method: str, call: Call) -> None:
    """Positions of extremes along the axis: the first of equal ones; NaN is more extreme than any number."""
    source, out = call.array(0), call.outputs[0].data
    axis = one_axis(call.integer(1), source.ndim)
    found = call.scratch(source.shape[:axis] + source.shape[axis + 1 :], np.intp)
    call.step(getattr(source, method), axis, found)
    call.step(np.copyto, out.reshape(found.shape), found, casting="unsafe")


def _argument(name: str, code: int, method: str) -> OperationType:
    signature = Signature("f2 h2 i2 q2 s2", "T INT32", "i", ranks=ANY_RANK)
    return OperationType(name, code, (signature,), _arg_shape, partial(_arg, method))


def _reduction(name: str, code: int, types: str, build: Callable[[Call], None], keep: str = "BOOL") -> OperationType:
    signature = Signature(types, f"T TENSOR_INT32 {keep}")
    return OperationType(name, code, (signature,), _reduced_shape, build, quantisation=same_as_input)


ARGMAX = _argument("ARGMAX", 39, "argmax")
ARGMIN = _argument("ARGMIN", 40, "argmin")
MEAN = _reduction("MEAN", 31, "f1 q1 h2 s3", _mean, keep="INT32")
REDUCE_ALL = _reduction("REDUCE_ALL", 75, "b2", partial(_agree, np.logical_and))
REDUCE_ANY = _reduction("REDUCE_ANY", 76, "b2", partial(_agree, np.logical_or))
REDUCE_MAX = _reduction("REDUCE_MAX", 77, "f2 h2 q2 s3", partial(_pick, np.maximum))
REDUCE_MIN = _reduction("REDUCE_MIN", 78, "f2 h2 q2 s3", partial(_pick, np.minimum))
REDUCE_PROD = _reduction("REDUCE_PROD", 79, "f2 h2", partial(_fold, np.multiply))
REDUCE_SUM = _reduction("REDUCE_SUM", 80, "f2 h2", partial(_fold, np.add))
