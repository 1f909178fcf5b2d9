"""Functions of one tensor, element by element, CAST, and QUANTIZE and DEQUANTIZE between reals and 8-bit steps."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..blocks import by_element
from ..model import Operand
from ..operation import ANY_RANK, Array, Call, OperationType, Signature, Tensor
from .elementwise import quietly, same_shape, smooth
from .real import load, look_up, table


def _exact(function: Callable[..., Any], call: Call) -> None:
    """Output 0 = function(input 0) on the stored numbers, for functions whose results every type can hold."""
    call.step(function, call.array(0), call.outputs[0].data)


def _not(call: Call) -> None:
    call.step(np.logical_not, call.array(0), call.outputs[0].data.view(np.bool_))


@by_element
def _rsqrt(x: Array, result: Array) -> None:
    np.sqrt(x, result)
    np.reciprocal(result, result)


@by_element
def _hard_swish(x: Array, result: Array) -> None:
    """Write x * clip(x + 3, 0, 6) / 6."""
    np.add(x, 3.0, result)
    np.maximum(result, 0.0, out=result)
    np.minimum(result, 6.0, out=result)
    np.multiply(result, x, result)
    np.multiply(result, 1 / 6, result)


@by_element
def _elu(alpha: float, positive: Array, x: Array, result: Array) -> None:
    """Write max(0, x) + min(0, alpha * (e^x - 1)); 0 * infinity on the right counts as 0, as it has no share."""
    np.expm1(x, result)
    np.multiply(result, alpha, result)
    np.fmin(result, 0.0, result)
    np.maximum(x, 0.0, out=positive)
    np.add(result, positive, result)


def _build_elu(call: Call) -> None:
    smooth(partial(_elu, call.real(1), call.scratch(call.shape(0))), call)


def _cast_check(inputs: Sequence[Operand], outputs: Sequence[Operand]) -> str | None:
    source, result = inputs[0].dimensions, outputs[0].dimensions
    is_known = source and result and 0 not in (*source, *result)
    return f"dimensions {list(source)} cannot become {list(result)}" if is_known and source != result else None


def _cast(call: Call) -> None:
    """Cast: integers saturate, and then lose their fraction; NaN becomes the smallest of them."""
    source, out = call.tensor(0), call.outputs[0]
    if out.data.dtype.kind == "f" or np.can_cast(source.data.dtype, out.data.dtype):
        call.step(np.copyto, out.data, source.data, casting="unsafe")
        return
    info, wide = np.iinfo(out.data.dtype), call.scratch(out.shape, np.float64)
    call.step(np.fmax, source.data, float(info.min), wide, dtype=np.float64)
    call.step(np.fmin, wide, float(info.max), wide)
    call.step(np.copyto, out.data, wide, casting="unsafe")


def _unary(name: str, code: int, types: str, build: Callable[[Call], None], **more: Any) -> OperationType:
    return OperationType(name, code, (Signature(types, "T", ranks=ANY_RANK),), same_shape, build=build, **more)


def _of_floats(name: str, code: int, function: Callable[[Array, Array], Any]) -> OperationType:
    return _unary(name, code, "f2 h2", partial(smooth, partial(quietly, function)))


BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))
"""Added to a float32 before it is truncated, this rounds half away from zero without lifting 0.49999997 to 1."""


def _quantize(call: Call) -> None:
    """Quantise in float32, as the definition has it; NaN becomes the smallest raw value."""
    out, info = call.outputs[0], np.iinfo(call.outputs[0].data.dtype)
    steps, half = call.scratch(out.shape), call.scratch(out.shape)
    call.step(np.divide, load(call, 0), np.float32(out.scale), steps)
    call.step(np.copysign, BELOW_HALF, steps, half)
    call.step(np.add, steps, half, steps)
    call.step(np.trunc, steps, steps)
    call.step(np.add, steps, np.float32(out.zero_point), steps)
    call.step(np.fmax, steps, np.float32(info.min), steps)
    call.step(np.fmin, steps, np.float32(info.max), steps)
    call.step(np.copyto, out.data, steps, casting="unsafe")


def _channel_scales(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    assert tensor.channel_quant is not None
    scales, channel = tensor.channel_quant
    return np.array(scales, np.float32).reshape([-1 if i == channel else 1 for i in range(len(tensor.shape))])


def _dequantize(call: Call) -> None:
    source, out = call.tensor(0), call.outputs[0]
    if source.channel_quant is None:
        look_up(call, source, table(source).astype(out.type.dtype), out.data)
    else:
        call.step(quietly, np.multiply, source.data, _channel_scales(source), out.data, casting="unsafe")


OPERATIONS = (
    _unary("ABS", 38, "f2 h2 i3", partial(_exact, np.absolute)),
    OperationType(
        "CAST",
        45,
        (
            *(Signature("f2 h2 i2 q2", "T", outputs=letter, ranks=ANY_RANK) for letter in "fhiq"),
            Signature("b3 W3 w3 s3 y3", "T", ranks=ANY_RANK),
        ),
        same_shape,
        build=_cast,
        check=_cast_check,
    ),
    OperationType("ELU", 98, (Signature("f3 h3", "T S", ranks=ANY_RANK),), same_shape, build=_build_elu),
    _of_floats("EXP", 49, np.exp),
    OperationType(
        "FLOOR", 8, (Signature("f0 h2", "T"),), same_shape, build=partial(smooth, partial(quietly, np.floor))
    ),
    _unary("HARD_SWISH", 99, "f3 h3 q3 s3", partial(smooth, _hard_swish), takes_empty=True),
    _of_floats("LOG", 60, np.log),
    _unary("LOGICAL_NOT", 62, "b2", _not),
    _unary("NEG", 67, "f2 h2 i2", partial(_exact, np.negative)),
    _of_floats("RSQRT", 83, _rsqrt),
    _of_floats("SIN", 85, np.sin),
    _of_floats("SQRT", 88, np.sqrt),
    OperationType(
        "QUANTIZE",
        72,
        tuple(Signature("f2 h2", "T", outputs=letter, ranks=ANY_RANK) for letter in "qs"),
        same_shape,
        build=_quantize,
        takes_empty=True,
    ),
    OperationType(
        "DEQUANTIZE",
        6,
        (Signature("q0 s2 y2 P2", "T", outputs="f"), Signature("q2 s2 y2 P2", "T", outputs="h")),
        same_shape,
        build=_dequantize,
        takes_empty=True,
    ),
)
