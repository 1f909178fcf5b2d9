"""QUANTIZE and DEQUANTIZE: between real numbers and 8-bit steps."""

import numpy as np

from ..operation import Call, OperationType, Signature, Tensor
from .elementwise import same_shape
from .real import load, look_up, store, table


def _quantize(call: Call) -> None:
    out = call.outputs[0]
    source = load(call, 0)
    # A copy, because rounding works in place and the input belongs to the caller.
    result = call.scratch(out.shape)
    call.step(np.divide, source, np.float32(out.scale), result)
    store(call, result, out.data, 0)


def _channel_scales(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    assert tensor.channel_quant is not None
    scales, channel = tensor.channel_quant
    return np.array(scales, np.float32).reshape([-1 if i == channel else 1 for i in range(len(tensor.shape))])


def _dequantize(call: Call) -> None:
    source, out = call.tensor(0), call.outputs[0]
    if source.channel_quant is None:
        look_up(call, source, table(source).astype(out.type.dtype), out.data)
    else:
        call.step(np.multiply, source.data, _channel_scales(source), out.data, casting="unsafe")


QUANTIZE = OperationType(
    "QUANTIZE",
    72,
    tuple(
        Signature("f2 h2", "T", outputs=f"TENSOR_QUANT8_ASYMM{suffix}", ranks=tuple(range(1, 33)))
        for suffix in ("", "_SIGNED")
    ),
    same_shape,
    _quantize,
    takes_empty=True,
)
DEQUANTIZE = OperationType(
    "DEQUANTIZE",
    6,
    (
        Signature("q0 s2 y2 P2", "T", outputs="TENSOR_FLOAT32"),
        Signature("q2 s2 y2 P2", "T", outputs="TENSOR_FLOAT16"),
    ),
    same_shape,
    _dequantize,
    takes_empty=True,
)
