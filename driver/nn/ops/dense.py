"""FULLY_CONNECTED: one matrix product. SOFTMAX: its usual companion."""

import math
from collections.abc import Sequence

import numpy as np

from ..model import Operand
from ..operation import Call, OperationType, Signature
from ..types import Dimensions
from .axes import one_axis
from .conv import bias_vector, output_factor, requantisation_gate, weight_matrix
from .elementwise import OVER_256, same_shape
from .real import accumulator, activation_bounds, load, store


def _dense_shape(call: Call) -> tuple[Dimensions]:
    source, weights, bias = call.shape(0), call.shape(1), call.shape(2)
    if len(weights) != 2 or bias != weights[:1]:
        raise ValueError(f"weights {list(weights)} and bias {list(bias)} have to be [units, inputs] and [units]")
    size = math.prod(source)
    if weights[1] < 1 or size % weights[1]:
        raise ValueError(f"input of {size} elements does not divide into rows of {weights[1]}")
    activation_bounds(call.integer(3))
    return ((size // weights[1], weights[0]),)


def _dense(call: Call) -> None:
    weights = call.pack(1, weight_matrix)
    bias = call.pack(2, bias_vector)
    out = call.outputs[0]
    result = accumulator(call, out.data, weights.dtype)
    source = call.compact(load(call, 0, dtype=weights.dtype))
    call.step(np.matmul, source.reshape(-1, weights.shape[0]), weights, result)
    if not out.type.is_quantised:
        call.step(np.add, result, bias, result)
    store(call, result, out.data, call.integer(3), factor=output_factor(call), bias=bias)


def _softmax_shape(call: Call) -> tuple[Dimensions]:
    if not call.real(1) > 0:
        raise ValueError(f"beta {call.real(1)} has to be above 0")
    _softmax_axis(call)
    return same_shape(call)


def _softmax_gate(inputs: Sequence[Operand], _outputs: Sequence[Operand]) -> int:
    return 0 if len(inputs[0].dimensions) in (2, 4) else 2


def _softmax_axis(call: Call) -> int:
    return one_axis(call.integer(2) if call.given(2) else -1, len(call.shape(0)))


def _softmax(call: Call) -> None:
    axis, out = _softmax_axis(call), call.outputs[0]
    dtype = np.float64 if out.type.is_quantised else np.float32
    beta = call.real(1) * (call.tensor(0).scale if out.type.is_quantised else 1.0)
    source, result = load(call, 0, dtype=dtype), accumulator(call, out.data, dtype)
    peak = call.scratch([1 if i == axis else d for i, d in enumerate(out.shape)], dtype)
    call.step(np.maximum.reduce, source, axis=axis, out=peak, keepdims=True)
    call.step(np.subtract, source, peak, result)
    call.step(np.multiply, result, beta, result)
    call.step(np.exp, result, result)
    call.step(np.add.reduce, result, axis=axis, out=peak, keepdims=True)
    call.step(np.divide, result, peak, result)
    store(call, result, out.data, 0, factor=1 / out.scale if out.type.is_quantised else 1.0)


FULLY_CONNECTED = OperationType(
    "FULLY_CONNECTED",
    9,
    (Signature("f0 q0 h2 s3", "T T B INT32", ranks=(2, 3, 4)),),
    _dense_shape,
    _dense,
    pack={1: weight_matrix, 2: bias_vector},
    takes_empty=True,
    gate=requantisation_gate,
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
