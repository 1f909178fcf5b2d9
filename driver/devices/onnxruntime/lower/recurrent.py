"""Recurrent operations: ONNX's Scan runs a cell over the steps of a sequence; its states are tensors as in the HAL."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from driver.nn.ops.cell import CELL, FORGET, INPUT, OUTPUT, Form
from driver.nn.ops.lstm import SINGLE as LSTM_PLACES
from driver.nn.ops.lstm import TINY
from driver.nn.ops.lstm import Direction as LstmDirection
from driver.nn.ops.lstm import both_ways as lstm_both_ways
from driver.nn.ops.lstm import sequence_way as lstm_sequence_way
from driver.nn.ops.recurrent import time_axis
from driver.nn.ops.rnn import SINGLE as RNN_SINGLE
from driver.nn.ops.rnn import Direction as RnnDirection
from driver.nn.ops.rnn import both_ways as rnn_both_ways
from driver.nn.ops.rnn import sequence_way as rnn_sequence_way

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.devices.onnxruntime.lower.node import Node

TRANSPOSED = (1, 0)
"""Weights [outputs, inputs] as the right side of a product."""

_FUNCTIONS = {1: "Relu", 4: "Tanh", 6: "Sigmoid"}

States = list[str]
Step = Callable[[States, States], tuple[States, str]]
"""From states and what enters a step to the new states and the result."""


def _weights(node: Node, i: int) -> str:
    return node.read(i, order=TRANSPOSED)


def _activated(node: Node, name: str, code: int) -> str:
    """An activation by its code, as recurrent operations count them."""
    return node.emit(_FUNCTIONS[code], name) if code in _FUNCTIONS else node.activated(name, code)


def _clipped(node: Node, name: str, limit: float) -> str:
    """Between -limit and limit; a limit of 0 is none."""
    return node.emit("Clip", name, node.scalar(-limit), node.scalar(limit)) if limit else name


def _entering(node: Node, pairs: Sequence[tuple[int, int]], bias: str | None) -> str:
    """The sum of the products of inputs with weights, by their numbers, for all steps at once."""
    products = [node.emit("MatMul", node.read(source), _weights(node, weights)) for source, weights in pairs]
    total = products[0] if bias is None else node.emit("Add", products[0], bias)
    for product in products[1:]:
        total = node.emit("Add", total, product)
    return total


def _run(
    node: Node, way: RnnDirection | LstmDirection, states: States, entering: States, step: Step
) -> tuple[States, str]:
    """The last states, and the results of all steps in the order of time. A matrix is a single step."""
    if len(node.input(0).shape) == 2:
        return step(states, entering)
    with node.graph.body() as inner:
        inputs = [inner.names.new() for _ in (*states, *entering)]
        after, result = step(inputs[: len(states)], inputs[len(states) :])
        outputs = [inner.own(name) for name in (*after, result)]
        body = inner.graph([(name, "FLOAT", None) for name in inputs], [(name, "FLOAT") for name in outputs])
    axis, count, backward = way.axis % 3, len(entering), int(way.backward)
    *last, results = node.graph.writer.node(
        "Scan",
        [*states, *entering],
        len(outputs),
        body=body,
        num_scan_inputs=count,
        scan_input_axes=[axis] * count,
        scan_input_directions=[backward] * count,
        scan_output_axes=[axis],
        scan_output_directions=[backward],
    )
    return last, results


def _give_both(node: Node, results: Sequence[str], is_merged: bool) -> None:
    if is_merged:
        node.give(node.emit("Concat", *results, axis=2))
        return
    for n, result in enumerate(results):
        node.give(result, n)


# ---- RNN


def _rnn_pass(node: Node, way: RnnDirection, code: int) -> tuple[States, str]:
    own = way.first
    recurrent = _weights(node, own + 1)

    def step(states: States, entering: States) -> tuple[States, str]:
        total = node.emit("Add", entering[0], node.emit("MatMul", states[0], recurrent))
        state = _activated(node, total, code)
        return [state], state

    entering = _entering(node, way.products, node.read(own + 2))
    return _run(node, way, [node.read(own + 3)], [entering], step)


def rnn(node: Node) -> None:
    """One step."""
    (state,), _ = _rnn_pass(node, RNN_SINGLE, node.call.integer(5))
    node.give(state, 0)
    node.give(state, 1)


def rnn_sequence(node: Node) -> None:
    """Forward in time."""
    states, results = _rnn_pass(node, rnn_sequence_way(node.call), node.call.integer(5))
    node.give(results, 0)
    if len(node.operation.outputs) > 1:
        node.give(states[0], 1)


def rnn_both(node: Node) -> None:
    """Forward and backward in time."""
    passes = [_rnn_pass(node, way, node.call.integer(12)) for way in rnn_both_ways(node.call)]
    _give_both(node, [results for _, results in passes], node.call.flag(14))
    if len(node.operation.outputs) > 2:
        for n, (states, _) in enumerate(passes):
            node.give(states[0], len(node.operation.outputs) - 2 + n)


# ---- SVDF


def svdf(node: Node) -> None:
    """The window over time moves on by one, and is then weighed."""
    call, (filters, memory) = node.call, node.input(2).shape
    batch, units = node.input(0).shape[0], filters // call.integer(5)
    newest = node.reshaped(node.emit("MatMul", node.read(0), _weights(node, 1)), (batch, filters, 1))
    state = node.reshaped(node.read(4), (batch, filters, memory))
    ends = [node.integers(values) for values in ([0], [memory - 1], [2])]
    window = node.emit("Concat", node.emit("Slice", state, *ends), newest, axis=2)
    weighed = node.reshaped(node.emit("Mul", window, node.read(2)), (batch, units, -1))
    result = node.emit("ReduceSum", weighed, node.integers([2]), keepdims=0)
    if call.given(3):
        result = node.emit("Add", result, node.read(3))
    kept = node.emit("Slice", window, *(node.integers(values) for values in ([1], [memory], [2])))
    zeros = node.graph.constant(np.zeros((batch, filters, 1), np.float32))
    node.give(node.reshaped(node.emit("Concat", kept, zeros, axis=2), node.output(0).shape), 0)
    node.give(_activated(node, result, call.integer(6)), 1)


# ---- LSTM


class _Cell:
    """One LSTM cell: its form, its weights as tensors of the graph around its steps, the scalars of the operation."""

    def __init__(self, node: Node, way: LstmDirection, scalars: int) -> None:
        """`scalars`: the number of the first of activation, cell clip and projection clip."""
        self.node, self.way, places = node, way, way.places
        self.form: Form = way.form(node.call)
        self.code = node.call.integer(scalars)
        self.cell_clip, self.clip = node.real(scalars + 1), node.real(scalars + 2)
        gates, form = self.form.gates, self.form
        self.recurrent = {g: _weights(node, places.recurrent(g)) for g in gates}
        self.biases = {g: node.read(places.bias(g)) for g in gates}
        seeing = [g for g in gates if g != CELL and form.has_peephole]
        self.peephole = {g: node.read(places.peephole(g)) for g in seeing}
        self.norm = {g: node.read(places.norm + g) for g in gates if form.has_norm}
        self.projection = _weights(node, places.projection) if form.has_projection else None
        has_bias = node.call.given(places.projection + 1)
        self.projection_bias = node.read(places.projection + 1) if has_bias else None

    def run(self) -> tuple[States, str]:
        """The last output and cell state, and the outputs of all steps. What normalises adds its biases later."""
        node, way = self.node, self.way
        entering = [_entering(node, way.products(g), None if self.norm else self.biases[g]) for g in self.form.gates]
        states = [node.read(way.places.states), node.read(way.places.states + 1)]
        return _run(node, way, states, entering, self.step)

    def step(self, states: States, entering: States) -> tuple[States, str]:
        """The new output and cell state."""
        (last, cell), emit = states, self.node.emit
        sums = dict(zip(self.form.gates, entering, strict=True))
        forget = emit("Sigmoid", self.gate(FORGET, sums[FORGET], last, cell))
        if INPUT in sums:
            enter = emit("Sigmoid", self.gate(INPUT, sums[INPUT], last, cell))
        else:
            enter = emit("Sub", self.node.scalar(1.0), forget)
        new = _activated(self.node, self.gate(CELL, sums[CELL], last, cell), self.code)
        total = emit("Add", emit("Mul", forget, cell), emit("Mul", enter, new))
        cell = _clipped(self.node, total, self.cell_clip)
        gate = emit("Sigmoid", self.gate(OUTPUT, sums[OUTPUT], last, cell))
        output = self._projected(emit("Mul", gate, _activated(self.node, cell, self.code)))
        return [output, cell], output

    def gate(self, gate: int, entering: str, last: str, cell: str) -> str:
        """A gate before its activation, from what enters it, the last output and a cell state."""
        emit = self.node.emit
        total = emit("Add", entering, emit("MatMul", last, self.recurrent[gate]))
        if gate in self.peephole:
            total = emit("Add", total, emit("Mul", cell, self.peephole[gate]))
        return self._normalised(gate, total) if self.norm else total

    def _normalised(self, gate: int, total: str) -> str:
        emit, last = self.node.emit, self.node.integers([1])
        apart = emit("Sub", total, emit("ReduceMean", total, last, keepdims=1))
        spread = emit("ReduceMean", emit("Mul", apart, apart), last, keepdims=1)
        root = emit("Sqrt", emit("Add", spread, self.node.scalar(TINY)))
        return emit("Add", emit("Mul", emit("Div", apart, root), self.norm[gate]), self.biases[gate])

    def _projected(self, hidden: str) -> str:
        if self.projection is None:
            return hidden
        result = self.node.emit("MatMul", hidden, self.projection)
        if self.projection_bias is not None:
            result = self.node.emit("Add", result, self.projection_bias)
        return _clipped(self.node, result, self.clip)


def lstm(node: Node) -> None:
    """One step; the scratch output is of no use, and zero."""
    (last, cell), _ = _Cell(node, LstmDirection(LSTM_PLACES, time_axis(True)), 20).run()
    scratch = node.graph.constant(np.zeros(node.output(0).shape, np.float32))
    for n, name in enumerate((scratch, last, cell, last)):
        node.give(name, n)


def lstm_sequence(node: Node) -> None:
    """Forward in time."""
    states, results = _Cell(node, lstm_sequence_way(node.call), 20).run()
    for n, name in enumerate([results, *states][: len(node.operation.outputs)]):
        node.give(name, n)


def lstm_both(node: Node) -> None:
    """Forward and backward in time."""
    passes = [_Cell(node, way, 48).run() for way in lstm_both_ways(node.call)]
    _give_both(node, [results for _, results in passes], node.call.flag(51))
    if len(node.operation.outputs) > 2:
        for n, state in enumerate(state for states, _ in passes for state in states):
            node.give(state, len(node.operation.outputs) - 4 + n)


TABLE: dict[str, Callable[[Node], None]] = {
    "RNN": rnn,
    "UNIDIRECTIONAL_SEQUENCE_RNN": rnn_sequence,
    "BIDIRECTIONAL_SEQUENCE_RNN": rnn_both,
    "SVDF": svdf,
    "LSTM": lstm,
    "UNIDIRECTIONAL_SEQUENCE_LSTM": lstm_sequence,
    "BIDIRECTIONAL_SEQUENCE_LSTM": lstm_both,
}
