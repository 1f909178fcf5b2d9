"""Comparisons, choices and what else combines tensors without a fused activation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..operation import ANY_RANK, Array, Call, OperationType, Signature
from ..types import Dimensions, OperandType
from .elementwise import broadcast, combine, quietly, real_values
from .real import load, look_up, requantise_table


def _pair_shape(call: Call) -> tuple[Dimensions]:
    return (broadcast(call.shape(0), call.shape(1)),)


def _truth(call: Call, index: int) -> Array:
    """A TENSOR_BOOL8 input as numpy's booleans: every byte but 0 is true."""
    mask = call.scratch(call.shape(index), np.bool_)
    call.step(np.not_equal, call.array(index), 0, mask)
    return mask


def _compare(function: Callable[..., Any], call: Call) -> None:
    a, b = call.tensor(0), call.tensor(1)
    operand = call.array
    if a.type == OperandType.TENSOR_BOOL8:
        operand = partial(_truth, call)
    elif a.type == OperandType.TENSOR_FLOAT16:
        operand = partial(load, call)
    elif a.type.is_quantised and (a.scale, a.zero_point) != (b.scale, b.zero_point):
        operand = partial(real_values, call)
    call.step(function, operand(0), operand(1), call.outputs[0].data.view(np.bool_))


def _logical(function: Callable[..., Any], call: Call) -> None:
    call.step(function, call.array(0), call.array(1), call.outputs[0].data.view(np.bool_))


def _like_output(call: Call, index: int) -> Array:
    """An input in the parameters of the output, if they are quantised."""
    source, out = call.tensor(index), call.outputs[0]
    if not out.type.is_quantised or (source.scale, source.zero_point) == (out.scale, out.zero_point):
        return source.data
    requantised = call.scratch(source.shape, out.data.dtype)
    look_up(call, source, requantise_table(source, out), requantised)
    return requantised


def _extreme(function: Callable[..., Any], call: Call) -> None:
    out = call.outputs[0]
    if out.type == OperandType.TENSOR_FLOAT16:
        wide = call.scratch(out.shape)
        call.step(function, load(call, 0), load(call, 1), out=wide)
        call.step(np.copyto, out.data, wide, casting="unsafe")
    else:
        call.step(function, _like_output(call, 0), _like_output(call, 1), out=out.data)


def _power(call: Call) -> None:
    combine(call, partial(quietly, np.power))


def _blend(chosen: Array, bits: Array, a: Array, b: Array, result: Array) -> None:
    """Write `a` where `chosen`, else `b`; `bits` are integers as wide as the numbers, `result` may be `a`.

    Masked bits take a tenth of the time of numpy's choices, which branch at every element.
    """
    a, b, result = (array.view(bits.dtype) for array in (a, b, result))
    np.negative(chosen.view(np.int8), bits)
    np.bitwise_xor(a, b, result)
    np.bitwise_and(result, bits, result)
    np.bitwise_xor(result, b, result)


def _leaky(negative: Array, bits: Array, x: Array, alpha: Array, result: Array) -> None:
    """Write alpha * x where x is negative, else x."""
    np.less(x, 0, negative)
    np.multiply(x, alpha, result)
    _blend(negative, bits, result, x, result)


def _prelu(call: Call) -> None:
    shape, width = call.shape(0), np.int64 if call.outputs[0].type.is_quantised else np.int32
    combine(call, partial(_leaky, call.scratch(shape, np.bool_), call.scratch(shape, width)))


def _select_shape(call: Call) -> tuple[Dimensions]:
    shapes = [call.shape(i) for i in range(3)]
    if len(set(shapes)) > 1:
        raise ValueError(f"dimensions {', '.join(str(list(s)) for s in shapes)} have to be the same")
    return (shapes[0],)


def _select(call: Call) -> None:
    out = call.outputs[0].data
    chosen, if_true, if_false = _truth(call, 0), _like_output(call, 1), _like_output(call, 2)
    call.step(_blend, chosen, call.scratch(out.shape, f"i{out.itemsize}"), if_true, if_false, out)


def _pair(name: str, code: int, types: str, build: Callable[[Call], None], output: str = "T") -> OperationType:
    return OperationType(name, code, (Signature(types, "T T", output, ranks=ANY_RANK),), _pair_shape, build)


def _comparison(name: str, code: int, function: Callable[..., Any]) -> OperationType:
    return _pair(name, code, "b2 f2 h2 i2 q2 s3", partial(_compare, function), "b")


EQUAL = _comparison("EQUAL", 48, np.equal)
GREATER = _comparison("GREATER", 53, np.greater)
GREATER_EQUAL = _comparison("GREATER_EQUAL", 54, np.greater_equal)
LESS = _comparison("LESS", 58, np.less)
LESS_EQUAL = _comparison("LESS_EQUAL", 59, np.less_equal)
LOGICAL_AND = _pair("LOGICAL_AND", 61, "b2", partial(_logical, np.logical_and))
LOGICAL_OR = _pair("LOGICAL_OR", 63, "b2", partial(_logical, np.logical_or))
MAXIMUM = _pair("MAXIMUM", 65, "f2 h2 i2 q2 s3", partial(_extreme, np.maximum))
MINIMUM = _pair("MINIMUM", 66, "f2 h2 i2 q2 s3", partial(_extreme, np.minimum))
NOT_EQUAL = _comparison("NOT_EQUAL", 68, np.not_equal)
POW = _pair("POW", 70, "f2 h2", _power)
PRELU = _pair("PRELU", 71, "f2 h2 q2 s3", _prelu)
SELECT = OperationType(
    "SELECT", 84, (Signature("f2 h2 i2 q2 s2", "b T T", of=1, ranks=ANY_RANK),), _select_shape, _select
)
