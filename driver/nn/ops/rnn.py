"""RNN, UNIDIRECTIONAL_SEQUENCE_RNN, BIDIRECTIONAL_SEQUENCE_RNN: h' = act(x . W^T + h . R^T + b), step by step.

And SVDF: a layer over time whose matrix is a sum of `rank` products of a filter over features and one over time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..blocks import ELEMENTS, Look, each, product
from ..operation import Array, Call, OperationType, Signature
from ..types import Dimensions
from .real import accumulator, load
from .recurrent import (
    Activation,
    Products,
    activation,
    add_products,
    batch_size,
    both_outputs,
    flat,
    give,
    halves,
    linked,
    matrix_size,
    ordered,
    ranked,
    sized,
    time_axis,
    weights,
    with_states,
)
from .sums import weight_matrix

_AUX, _FORWARD_AUX, _BACKWARD_AUX = 9, 10, 11
"""Inputs of BIDIRECTIONAL_SEQUENCE_RNN."""


@dataclass(frozen=True)
class RnnDirection:
    """One pass over a sequence, by the numbers of its inputs: recurrent weights, bias and state follow the weights.

    products: what enters every step.
    axis: of time. backward: whether time runs backward.
    """

    products: Products
    axis: int
    backward: bool = False

    @property
    def first(self) -> int:
        """The number of the input weights."""
        return self.products[0][1]

    def units(self, call: Call) -> int:
        """Return the width of the result, after a look at the dimensions of all inputs."""
        own, batch = self.first, batch_size(call, self.axis)
        units, _ = matrix_size(call, own)
        sized(call, {own + 1: (units, units), own + 2: (units,), own + 3: (batch, units)})
        sized(call, {w: (units, call.shape(x)[-1]) for x, w in self.products})
        return units


def _run(look: Look, steps: Array, first: Array, recurrent: Array, act: Activation, scratch: Array) -> None:
    """Turn what enters each of `steps` [time, batch, units] into its result, in place."""
    state = first
    often = max(1, ELEMENTS // max(1, scratch.size, recurrent.size))
    for number, step in enumerate(steps):
        if number % often == 0:
            look()
        product(look, state, recurrent, scratch)
        each(look, np.add, step, scratch, step)
        each(look, act, step, step)
        state = step


def _pass(call: Call, sources: Mapping[int, Array], way: RnnDirection, act: Activation, view: Array) -> Array:
    """Append one pass over a sequence that writes to `view` [.., .., units], and return its final state."""
    own, result = way.first, accumulator(call, view)
    entering = flat(result)
    add_products(call, [(flat(sources[x]), weights(call, w)) for x, w in way.products], entering)
    call.step(np.add, entering, load(call, own + 2), entering)
    steps = np.moveaxis(result, way.axis, 0)[:: -1 if way.backward else 1]
    call.step(_run, call.look, steps, load(call, own + 3), weights(call, own + 1), act, call.scratch(steps.shape[1:]))
    give(call, view, result)
    final: Array = steps[-1]
    return final


SINGLE = RnnDirection(((0, 1),), time_axis(True))


def _single_shape(call: Call) -> Sequence[Dimensions]:
    activation(call.integer(5))
    ranked(call, 2)
    return ((call.shape(0)[0], SINGLE.units(call)),) * 2


def _single(call: Call) -> None:
    sources = {0: ordered(call, 0)}
    state = _pass(call, sources, SINGLE, activation(call.integer(5)), view=call.outputs[1].data[None])
    give(call, call.outputs[0].data, state)


def sequence_way(call: Call) -> RnnDirection:
    """Return the pass of UNIDIRECTIONAL_SEQUENCE_RNN."""
    major = call.integer(6)
    if major not in (0, 1):
        raise ValueError(f"time-major is {major}; use 0 (batch first) or 1 (time first)")
    return RnnDirection(((0, 1),), time_axis(major == 1))


def _sequence_shape(call: Call) -> Sequence[Dimensions]:
    activation(call.integer(5))
    ranked(call, 3)
    units = sequence_way(call).units(call)
    return ((*call.shape(0)[:2], units), call.shape(4))[: len(call.outputs)]


def _sequence(call: Call) -> None:
    sources, act = {0: ordered(call, 0)}, activation(call.integer(5))
    state = _pass(call, sources, sequence_way(call), act, view=call.outputs[0].data)
    if len(call.outputs) > 1:
        give(call, call.outputs[1].data, state)


def both_ways(call: Call) -> tuple[RnnDirection, RnnDirection]:
    """Return the two passes of BIDIRECTIONAL_SEQUENCE_RNN."""
    is_crossed, source = linked(call, _AUX, (_FORWARD_AUX, _BACKWARD_AUX))
    forward, backward = ((_AUX, _FORWARD_AUX),) * is_crossed, ((_AUX, _BACKWARD_AUX),) * is_crossed
    axis = time_axis(call.flag(13))
    return RnnDirection(((0, 1), *forward), axis), RnnDirection(((source, 5), *backward), axis, backward=True)


def _both_shape(call: Call) -> Sequence[Dimensions]:
    activation(call.integer(12))
    ranked(call, 3)
    forward, backward = (way.units(call) for way in both_ways(call))
    return (*both_outputs(call, call.flag(14), forward, backward), call.shape(4), call.shape(8))[: len(call.outputs)]


def _both(call: Call) -> None:
    act, is_merged = activation(call.integer(12)), call.flag(14)
    ways = both_ways(call)
    sources = {i: ordered(call, i) for i in {source for way in ways for source, _ in way.products}}
    views = halves(call, is_merged, call.shape(4)[-1])
    for n, (way, view) in enumerate(zip(ways, views, strict=True)):
        state = _pass(call, sources, way, act, view=view)
        if len(call.outputs) > 2:
            give(call, call.outputs[n - 2].data, state)


_CELL = "4*T"
"""Input weights, recurrent weights, bias, state."""


def _svdf_shape(call: Call) -> Sequence[Dimensions]:
    (batch, width), (filters, memory) = matrix_size(call, 0), matrix_size(call, 2)
    rank = call.integer(5)
    if rank < 1 or filters % rank:
        raise ValueError(f"rank {rank} has to divide the {filters} filters")
    activation(call.integer(6))
    units = filters // rank
    sized(call, {1: (filters, width), 3: (units,), 4: (batch, filters * memory)})
    return call.shape(4), (batch, units)


def _keep(call: Call, window: Array, state: Array) -> None:
    """Write what the next step will find: everything but the oldest, and room for the newest."""
    call.step(np.copyto, state[..., :-1], window[..., 1:], casting="unsafe")
    call.step(np.copyto, state[..., -1], 0)


def _svdf(call: Call) -> None:
    state, out = (tensor.data for tensor in call.outputs)
    times = load(call, 2)
    features, result = weights(call, 1), accumulator(call, out)
    window = call.scratch((len(state), *times.shape))
    newest = call.scratch(window.shape[:2])
    call.step(np.copyto, window.reshape(call.shape(4)), call.array(4))
    call.step(np.matmul, ordered(call, 0), features, newest)
    call.step(np.copyto, window[..., -1], newest)
    _keep(call, window, state.reshape(window.shape))
    call.step(np.multiply, window, times, window)
    call.step(np.add.reduce, window.reshape(*result.shape, -1), -1, None, result)
    if call.given(3):
        call.step(np.add, result, load(call, 3), result)
    call.step(activation(call.integer(6)), result, result)
    give(call, out, result)


OPERATIONS = (
    OperationType(
        "RNN",
        24,
        (Signature("f0 h2", f"T {_CELL} INT32", "T T", ranks=(2,)),),
        _single_shape,
        build=_single,
        pack=dict.fromkeys((1, 2), weight_matrix),
    ),
    OperationType(
        "UNIDIRECTIONAL_SEQUENCE_RNN",
        93,
        with_states(f"T {_CELL} 2*INT32", (("T", "T T"),)),
        _sequence_shape,
        build=_sequence,
        pack=dict.fromkeys((1, 2), weight_matrix),
    ),
    OperationType(
        "BIDIRECTIONAL_SEQUENCE_RNN",
        43,
        with_states(f"T {_CELL} {_CELL} 3*T? INT32 2*BOOL", (("T", "T T T"), ("T T", "T T T T"))),
        _both_shape,
        build=_both,
        pack=dict.fromkeys((1, 2, 5, 6, 10, 11), weight_matrix),
    ),
    OperationType(
        "SVDF",
        27,
        (Signature("f0 h2", "3*T T? T 2*INT32", "T T", ranks=(2,)),),
        _svdf_shape,
        build=_svdf,
        pack={1: weight_matrix},
    ),
)
