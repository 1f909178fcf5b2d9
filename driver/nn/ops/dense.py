"""FULLY_CONNECTED: one matrix product."""

import math

import numpy as np

from ..operation import Call, OperationType, Signature
from ..types import Dimensions
from .real import accumulator, activation_bounds, load
from .sums import Finish, bias_vector, requantisation_gate, weight_matrix


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
    finish, out = Finish.of(call, call.integer(3)), call.outputs[0]
    result = accumulator(call, out.data, weights.dtype)
    source = call.compact(load(call, 0, dtype=weights.dtype))
    call.step(np.matmul, source.reshape(-1, weights.shape[0]), weights, result)
    finish(call, result, out.data)


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
