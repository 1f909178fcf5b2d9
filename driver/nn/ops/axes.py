"""Axes as operations name them, the reductions over them, and what puts values in proportion along them: SOFTMAX,
LOG_SOFTMAX and the normalisations.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import DTypeLike

from ..model import Operand
from ..operation import ANY_RANK, Array, Call, OperationType, Signature, same_as_input
from ..types import Dimensions
from .elementwise import OVER_128, OVER_256, same_shape
from .real import accumulator, load, store
from .window import NHWC_FROM_NCHW, image_shape, output_image


def one_axis(axis: int, rank: int) -> int:
    """`axis` counted from the front; negative axes count from the end."""
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} has to be in {-rank}..{rank - 1}")
    return axis % rank


def all_axes(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the distinct `axes`, ascending and counted from the front."""
    return tuple(sorted({one_axis(axis, rank) for axis in axes}))


def _kept_shape(call: Call) -> tuple[tuple[int, ...], Dimensions]:
    """Return the axes of a reduction, and the dimensions of its result with these axes kept."""
    shape = call.shape(0)
    axes = all_axes(call.values(1), len(shape))
    return axes, tuple(1 if i in axes else d for i, d in enumerate(shape))


def _reduced_shape(call: Call) -> tuple[Dimensions]:
    axes, kept = _kept_shape(call)
    if call.integer(2) > 0:
        return (kept,)
    return (tuple(d for i, d in enumerate(kept) if i not in axes) or (1,),)


def _accumulated(call: Call, function: np.ufunc) -> Array:
    """Return the reduction of input 0 by `function` in float64, with the reduced axes kept."""
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
    """Return the positions of extremes along the axis: the first of equal ones; NaN is more extreme than any number."""
    source, out = call.array(0), call.outputs[0].data
    axis = one_axis(call.integer(1), source.ndim)
    found = call.scratch(source.shape[:axis] + source.shape[axis + 1 :], np.intp)
    call.step(getattr(source, method), axis, found)
    call.step(np.copyto, out.reshape(found.shape), found, casting="unsafe")


def _argument(name: str, code: int, method: str) -> OperationType:
    signature = Signature("f2 h2 i2 q2 s2", "T INT32", "i", ranks=ANY_RANK)
    return OperationType(name, code, (signature,), _arg_shape, build=partial(_arg, method))


def _reduction(name: str, code: int, types: str, build: Callable[[Call], None], keep: str = "BOOL") -> OperationType:
    signature = Signature(types, f"T TENSOR_INT32 {keep}")
    return OperationType(name, code, (signature,), _reduced_shape, build=build, quantisation=same_as_input)


LEAST_NORM = 1e-6


def _axis(call: Call, index: int) -> int:
    """Return the axis that optional input `index` names, else the last."""
    return one_axis(call.integer(index) if call.given(index) else -1, len(call.shape(0)))


def _column(call: Call, axis: int, dtype: DTypeLike = np.float32) -> Array:
    """Scratch with the dimensions of output 0, but 1 along `axis`."""
    return call.scratch([1 if i == axis else d for i, d in enumerate(call.outputs[0].shape)], dtype)


def _along_axis_shape(index: int, call: Call) -> tuple[Dimensions]:
    """Return the dimensions of input 0, once the axis that input `index` names has been found to exist."""
    _axis(call, index)
    return same_shape(call)


def _softmax_shape(call: Call) -> tuple[Dimensions]:
    if not call.real(1) > 0:
        raise ValueError(f"beta {call.real(1)} has to be above 0")
    return _along_axis_shape(2, call)


def _softmax_gate(inputs: Sequence[Operand], _outputs: Sequence[Operand]) -> int:
    return 0 if len(inputs[0].dimensions) in (2, 4) else 2


def _exponents(call: Call, axis: int, dtype: DTypeLike, beta: float) -> tuple[Array, Array]:
    """beta * (x - the largest x along `axis`), in what becomes the result, and a column of scratch."""
    result, column = accumulator(call, call.outputs[0].data, dtype), _column(call, axis, dtype)
    source = load(call, 0, dtype=dtype)
    call.step(np.maximum.reduce, source, axis=axis, out=column, keepdims=True)
    call.step(np.subtract, source, column, result)
    if beta != 1:
        call.step(np.multiply, result, beta, result)
    return result, column


def _softmax(call: Call) -> None:
    axis, out = _axis(call, 2), call.outputs[0]
    dtype = np.float64 if out.type.is_quantised else np.float32
    beta = call.real(1) * (call.tensor(0).scale if out.type.is_quantised else 1.0)
    result, total = _exponents(call, axis, dtype, beta)
    call.step(np.exp, result, result)
    call.step(np.add.reduce, result, axis=axis, out=total, keepdims=True)
    call.step(np.divide, result, total, result)
    store(call, result, out.data, 0, factor=1 / out.scale if out.type.is_quantised else 1.0)


def _log_softmax(call: Call) -> None:
    axis, out = _axis(call, 2), call.outputs[0]
    result, total = _exponents(call, axis, np.float32, call.real(1))
    powers = call.scratch(result.shape)
    call.step(np.exp, result, powers)
    call.step(np.add.reduce, powers, axis=axis, out=total, keepdims=True)
    call.step(np.log, total, total)
    call.step(np.subtract, result, total, result)
    store(call, result, out.data, 0)


def _rank_gate(axis: int, inputs: Sequence[Operand], _outputs: Sequence[Operand]) -> int:
    """Return the HAL version: before 1.2 the axis was the last of 4."""
    return 0 if len(inputs[0].dimensions) == 4 and len(inputs) <= axis else 2


def _l2(call: Call) -> None:
    axis, out = _axis(call, 1), call.outputs[0]
    dtype = np.float64 if out.type.is_quantised else np.float32
    source, norm, result = load(call, 0, dtype=dtype), _column(call, axis, dtype), accumulator(call, out.data, dtype)
    call.step(np.square, source, result)
    call.step(np.add.reduce, result, axis=axis, out=norm, keepdims=True)
    call.step(np.sqrt, norm, norm)
    call.step(np.maximum, norm, LEAST_NORM, out=norm)
    call.step(np.divide, source, norm, result)
    store(call, result, out.data, 0, factor=1 / out.scale if out.type.is_quantised else 1.0)


def _response_shape(call: Call) -> tuple[Dimensions]:
    if call.integer(1) < 0:
        raise ValueError(f"radius {call.integer(1)} has to be at least 0")
    return _along_axis_shape(5, call)


def _response(call: Call) -> None:
    axis, out = _axis(call, 5), call.outputs[0]
    bias, alpha, beta = (call.real(i) for i in (2, 3, 4))
    source = np.moveaxis(load(call, 0), axis, -1)
    result = accumulator(call, out.data)
    sums = np.moveaxis(result, axis, -1)
    size = source.shape[-1]
    radius = min(call.integer(1), size - 1)
    squares = call.scratch((*source.shape[:-1], size + 2 * radius), zeros=True)
    call.step(np.square, source, squares[..., radius : radius + size])
    _window_sums(call, squares, sums, 2 * radius + 1)
    call.step(np.multiply, sums, alpha, sums)
    call.step(np.add, sums, bias, sums)
    call.step(np.power, sums, -beta, sums)
    call.step(np.multiply, sums, source, sums)
    store(call, result, out.data, 0)


def _window_sums(call: Call, terms: Array, sums: Array, length: int) -> None:
    """Sum every `length` neighbours on the last axis, in windows of 1, 2, 4... that make up `length`."""
    size, covered, width = sums.shape[-1], 0, 1
    call.step(sums.fill, 0)
    while True:
        if length & width:
            call.step(np.add, sums, terms[..., covered : covered + size], sums)
            covered += width
        if covered == length:
            return
        doubled = call.scratch((*terms.shape[:-1], terms.shape[-1] - width))
        call.step(np.add, terms[..., :-width], terms[..., width:], doubled)
        terms, width = doubled, 2 * width


def _instance_shape(call: Call) -> tuple[Dimensions]:
    image_shape(call.shape(0), call.flag(4))
    return same_shape(call)


def _instance(call: Call) -> None:
    nchw, (gamma, beta, epsilon) = call.flag(4), (call.real(i) for i in (1, 2, 3))
    view = output_image(call, nchw)
    image = load(call, 0, NHWC_FROM_NCHW if nchw else None)
    result = call.scratch(image.shape)
    n, h, w, c = image.shape
    mean, squares = call.scratch((n, 1, 1, c), np.float64), call.scratch(image.shape)
    call.step(np.add.reduce, image, axis=(1, 2), dtype=np.float64, out=mean, keepdims=True)
    call.step(np.divide, mean, h * w, mean)
    call.step(np.subtract, image, mean, result, casting="unsafe")
    call.step(np.square, result, squares)
    call.step(np.add.reduce, squares, axis=(1, 2), dtype=np.float64, out=mean, keepdims=True)
    call.step(np.divide, mean, h * w, mean)
    call.step(np.add, mean, epsilon, mean)
    call.step(np.sqrt, mean, mean)
    call.step(np.divide, gamma, mean, mean)
    call.step(np.multiply, result, mean, result, casting="unsafe")
    call.step(np.add, result, beta, result)
    call.step(np.copyto, view, result, casting="unsafe")


OPERATIONS = (
    _argument("ARGMAX", 39, "argmax"),
    _argument("ARGMIN", 40, "argmin"),
    _reduction("MEAN", 31, "f1 q1 h2 s3", _mean, keep="INT32"),
    _reduction("REDUCE_ALL", 75, "b2", partial(_agree, np.logical_and)),
    _reduction("REDUCE_ANY", 76, "b2", partial(_agree, np.logical_or)),
    _reduction("REDUCE_MAX", 77, "f2 h2 q2 s3", partial(_pick, np.maximum)),
    _reduction("REDUCE_MIN", 78, "f2 h2 q2 s3", partial(_pick, np.minimum)),
    _reduction("REDUCE_PROD", 79, "f2 h2", partial(_fold, np.multiply)),
    _reduction("REDUCE_SUM", 80, "f2 h2", partial(_fold, np.add)),
    OperationType(
        "INSTANCE_NORMALIZATION", 57, (Signature("f2 h2", "T 3*S BOOL", ranks=(4,)),), _instance_shape, build=_instance
    ),
    OperationType(
        "L2_NORMALIZATION",
        11,
        (Signature("f0 h2 q2 s3", "T", tails=((2, "INT32"),)),),
        partial(_along_axis_shape, 1),
        build=_l2,
        quantisation=OVER_128,
        gate=partial(_rank_gate, 1),
    ),
    OperationType(
        "LOCAL_RESPONSE_NORMALIZATION",
        13,
        (Signature("f0 h2", "T INT32 3*S", tails=((2, "INT32"),)),),
        _response_shape,
        build=_response,
        gate=partial(_rank_gate, 5),
    ),
    OperationType(
        "LOG_SOFTMAX",
        64,
        (Signature("f2 h2", "T S INT32", ranks=ANY_RANK),),
        partial(_along_axis_shape, 2),
        build=_log_softmax,
    ),
    OperationType(
        "SOFTMAX",
        25,
        (Signature("f0 q0 h2 s3", "T S", tails=((2, "INT32"),)),),
        _softmax_shape,
        build=_softmax,
        quantisation=OVER_256,
        takes_empty=True,
        gate=_softmax_gate,
    ),
)
