"""SVDF: a layer over time whose matrix is a sum of `rank` products of a filter over features and one over time."""

from collections.abc import Sequence

import numpy as np

from ..operation import Array, Call, OperationType, Signature
from ..types import Dimensions
from .real import accumulator, load
from .recurrent import activation, give, matrix_size, ordered, sized, weights
from .sums import weight_matrix


def _shape(call: Call) -> Sequence[Dimensions]:
    (batch, width), (filters, memory) = matrix_size(call, 0), matrix_size(call, 2)
    rank = call.integer(5)
    if rank < 1 or filters % rank:
        raise ValueError(f"rank {rank} has to divide the {filters} filters")
    activation(call.integer(6))
    units = filters // rank
    sized(call, {1: (filters, width), 3: (units,), 4: (batch, filters * memory)})
    return call.shape(4), (batch, units)


def _keep(window: Array, state: Array) -> None:
    """Write what the next step will find: everything but the oldest, and room for the newest."""
    state[..., :-1] = window[..., 1:]
    state[..., -1] = 0


def _build(call: Call) -> None:
    state, out = (tensor.data for tensor in call.outputs)
    times = load(call, 2)
    features, result = weights(call, 1), accumulator(call, out)
    window = call.scratch((len(state), *times.shape))
    newest = call.scratch(window.shape[:2])
    call.step(np.copyto, window.reshape(call.shape(4)), call.array(4))
    call.step(np.matmul, ordered(call, 0), features, newest)
    call.step(np.copyto, window[..., -1], newest)
    call.step(_keep, window, state.reshape(window.shape))
    call.step(np.multiply, window, times, window)
    call.step(np.add.reduce, window.reshape(*result.shape, -1), -1, None, result)
    if call.given(3):
        call.step(np.add, result, load(call, 3), result)
    call.step(activation(call.integer(6)), result, result)
    give(call, out, result)


SVDF = OperationType(
    "SVDF",
    27,
    (Signature("f0 h2", "3*T T? T 2*INT32", "T T", ranks=(2,)),),
    _shape,
    _build,
    pack={1: weight_matrix},
)
