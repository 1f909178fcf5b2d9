"""SOFTMAX, LOG_SOFTMAX and the normalisations: every value in proportion to those beside it."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import DTypeLike

from ..model import Operand
from ..operation import ANY_RANK, Array, Call, OperationType, Signature
from ..types import Dimensions
from .axes import one_axis
from .elementwise import OVER_128, OVER_256, same_shape
from .real import accumulator, load, store
from .window import NHWC_FROM_NCHW, image_shape, output_image

LEAST_NORM = 1e-6


def _axis(call: Call, index: int) -> int:
    """The axis that optional input `index` names, else the last."""
    return one_axis(call.integer(index) if call.given(index) else -1, len(call.shape(0)))


def _column(call: Call, axis: int, dtype: DTypeLike = np.float32) -> Array:
    """Scratch with the dimensions of output 0, but 1 along `axis`."""
    return call.scratch([1 if i == axis else d for i, d in enumerate(call.outputs[0].shape)], dtype)


def _softmax_shape(call: Call) -> tuple[Dimensions]:
    if not call.real(1) > 0:
        raise ValueError(f"beta {call.real(1)} has to be above 0")
    _axis(call, 2)
    return same_shape(call)


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


def _log_softmax_shape(call: Call) -> tuple[Dimensions]:
    _axis(call, 2)
    return same_shape(call)


def _log_softmax(call: Call) -> None:
    axis, out = _axis(call, 2), call.outputs[0]
    result, total = _exponents(call, axis, np.float32, call.real(1))
    powers = call.scratch(result.shape)
    call.step(np.exp, result, powers)
    call.step(np.add.reduce, powers, axis=axis, out=total, keepdims=True)
    call.step(np.log, total, total)
    call.step(np.subtract, result, total, result)
    store(call, result, out.data, 0)


def _l2_shape(call: Call) -> tuple[Dimensions]:
    _axis(call, 1)
    return same_shape(call)


def _rank_gate(axis: int, inputs: Sequence[Operand], _outputs: Sequence[Operand]) -> int:
    """Before HAL 1.2 the axis was the last of 4."""
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
    _axis(call, 5)
    return same_shape(call)


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


INSTANCE_NORMALIZATION = OperationType(
    "INSTANCE_NORMALIZATION", 57, (Signature("f2 h2", "T 3*S BOOL", ranks=(4,)),), _instance_shape, _instance
)
L2_NORMALIZATION = OperationType(
    "L2_NORMALIZATION",
    11,
    (Signature("f0 h2 q2 s3", "T", tails=((2, "INT32"),)),),
    _l2_shape,
    _l2,
    quantisation=OVER_128,
    gate=partial(_rank_gate, 1),
)
LOCAL_RESPONSE_NORMALIZATION = OperationType(
    "LOCAL_RESPONSE_NORMALIZATION",
    13,
    (Signature("f0 h2", "T INT32 3*S", tails=((2, "INT32"),)),),
    _response_shape,
    _response,
    gate=partial(_rank_gate, 5),
)
LOG_SOFTMAX = OperationType(
    "LOG_SOFTMAX", 64, (Signature("f2 h2", "T S INT32", ranks=ANY_RANK),), _log_softmax_shape, _log_softmax
)
SOFTMAX = OperationType(
    "SOFTMAX",
    25,
    (Signature("f0 q0 h2 s3", "T S", tails=((2, "INT32"),)),),
    _softmax_shape,
    _softmax,
    quantisation=OVER_256,
    takes_empty=True,
    gate=_softmax_gate,
)
