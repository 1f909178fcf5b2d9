"""QUANTIZE and DEQUANTIZE: between real numbers and 8-bit steps."""

import numpy as np

from ..operation import ANY_RANK, Call, OperationType, Signature, Tensor
from .elementwise import quietly, same_shape
from .real import load, look_up, table

BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))
"""Added to a float32 before it is truncated, this rounds half away from zero without lifting 0.49999997 to 1."""


def _quantize(call: Call) -> None:
    """All in float32, as the definition has it; NaN becomes the smallest raw value."""
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


QUANTIZE = OperationType(
    "QUANTIZE",
    72,
    tuple(Signature("f2 h2", "T", outputs=letter, ranks=ANY_RANK) for letter in "qs"),
    same_shape,
    _quantize,
    takes_empty=True,
)
DEQUANTIZE = OperationType(
    "DEQUANTIZE",
    6,
    (Signature("q0 s2 y2 P2", "T", outputs="f"), Signature("q2 s2 y2 P2", "T", outputs="h")),
    same_shape,
    _dequantize,
    takes_empty=True,
)
