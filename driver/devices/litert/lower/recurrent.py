"""Recurrent operations, unrolled: TFLite keeps their states to itself, and the HAL has them as inputs and outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from driver.devices.litert.lower.sums import FUSED, NONE, Sums
from driver.devices.lowering import require
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
    from collections.abc import Callable, Sequence

    from driver.devices.litert.lower.node import Node


MOST_STEPS = 128
"""Longer sequences would make graphs that take longer to compile than to run."""


def _lengths(node: Node, axis: int) -> tuple[int, int]:
    """The steps and the sequences of input 0."""
    shape = node.input(0).shape
    steps = shape[axis] if len(shape) == -min(axis, -3) else 1
    require(steps <= MOST_STEPS, f"its {steps} steps are too many to unroll")
    return steps, shape[-5 - axis]


def _entering(sums: Sums, pairs: Sequence[tuple[int, int]], bias: int, units: int) -> int:
    """The sum of the products of inputs with weights, by their numbers, for all steps at once."""
    rows = int(np.prod(sums.node.input(pairs[0][0]).shape[:-1]))
    total = -1
    for source, weights in pairs:
        product = sums.dense(sums.matrix(source), sums.input(weights), (rows, units), bias if total < 0 else -1)
        total = product if total < 0 else sums.add(total, product, (rows, units))
    return total


# ---- RNN


def _rnn_pass(sums: Sums, way: RnnDirection, code: int) -> tuple[int, int]:
    """The results of all steps as one tensor, in the order of time; and the last state."""
    node, own = sums.node, way.first
    units, (length, batch) = node.input(own).shape[0], _lengths(node, way.axis)
    head = node.input(0).shape[:-1] if len(node.input(0).shape) > 2 else (1, batch)
    entering = _entering(sums, way.products, sums.input(own + 2), units)
    order = range(length)[:: -1 if way.backward else 1]
    parts, state = sums.steps(entering, (*head, units), way.axis), sums.input(own + 3)
    for i in order:
        product = sums.dense(state, sums.input(own + 1), (batch, units))
        total = sums.add(parts[i], product, (batch, units), code if code in FUSED else NONE)
        parts[i] = state = total if code in FUSED else sums.activated(total, code, (batch, units))
    return sums.packed(parts, (*head, units), way.axis), state


def rnn(node: Node) -> None:
    """One step."""
    sums = Sums(node)
    _, state = _rnn_pass(sums, RNN_SINGLE, node.call.integer(5))
    sums.give(state, 0)
    sums.give(state, 1)


def rnn_sequence(node: Node) -> None:
    """Forward in time."""
    sums = Sums(node)
    results, state = _rnn_pass(sums, rnn_sequence_way(node.call), node.call.integer(5))
    sums.give(results, 0)
    if len(node.operation.outputs) > 1:
        sums.give(state, 1)


def rnn_both(node: Node) -> None:
    """Forward and backward in time."""
    sums = Sums(node)
    passes = [_rnn_pass(sums, way, node.call.integer(12)) for way in rnn_both_ways(node.call)]
    _give_both(sums, [results for results, _ in passes], node.call.flag(14))
    if len(node.operation.outputs) > 2:
        for n, (_, state) in enumerate(passes):
            sums.give(state, len(node.operation.outputs) - 2 + n)


def _give_both(sums: Sums, results: Sequence[int], is_merged: bool) -> None:
    if is_merged:
        fields = {"axis": 2, "fusedActivationFunction": NONE}
        sums.node.emit("CONCATENATION", results, [sums.node.write(0)], "Concatenation", **fields)
        return
    for n, result in enumerate(results):
        sums.give(result, n)


# ---- SVDF


def svdf(node: Node) -> None:
    """The window over time moves on by one, and is then weighed."""
    sums, call = Sums(node), node.call
    (batch, _), (filters, memory) = node.input(0).shape, node.input(2).shape
    units = filters // call.integer(5)
    newest = sums.reshaped(sums.dense(sums.input(0), sums.input(1), (batch, filters)), (batch, filters, 1))
    state = sums.reshaped(sums.input(4), (batch, filters, memory))
    zeros = node.graph.writer.constant("FLOAT32", np.zeros((batch, filters, 1), np.float32))

    def joined(parts: Sequence[int]) -> int:
        fields = {"axis": 2, "fusedActivationFunction": NONE}
        return sums.emit("CONCATENATION", parts, (batch, filters, memory), "Concatenation", **fields)

    def part(of: int, start: int) -> list[int]:
        if memory == 1:
            return []
        begin, size = node.integers((0, 0, start)), node.integers((batch, filters, memory - 1))
        return [sums.emit("SLICE", [of, begin, size], (batch, filters, memory - 1), "Slice")]

    window = joined([*part(state, 0), newest])
    weighed = sums.multiply(window, sums.input(2), (batch, filters, memory))
    grouped = sums.reshaped(weighed, (batch, units, filters // units * memory))
    result = sums.emit("SUM", [grouped, node.integers([2])], (batch, units), "Reducer", keepDims=False)
    if call.given(3):
        result = sums.add(result, sums.input(3), (batch, units))
    sums.give(joined([*part(window, 1), zeros]), 0)
    sums.give(sums.activated(result, call.integer(6), (batch, units)), 1)


# ---- LSTM


class _Cell:
    """One LSTM cell: its form, its weights by the numbers of the inputs, and the scalars of the operation."""

    def __init__(self, sums: Sums, way: LstmDirection, scalars: int) -> None:
        """`scalars`: the number of the first of activation, cell clip and projection clip."""
        call = sums.node.call
        self.sums, self.way, self.places = sums, way, way.places
        self.form: Form = way.form(call)
        self.code, self.cell_clip, self.clip = (
            call.integer(scalars),
            sums.node.real(scalars + 1),
            sums.node.real(scalars + 2),
        )
        self.shape = (self.form.batch, self.form.cells)

    def entering(self, gate: int) -> int:
        """What enters a gate, for all steps; a cell that normalises adds its biases later."""
        bias = -1 if self.form.has_norm else self.sums.input(self.places.bias(gate))
        return _entering(self.sums, self.way.products(gate), bias, self.form.cells)

    def gate(self, gate: int, entering: int, last: int, cell: int) -> int:
        """A gate before its activation, from what enters it, the last output and a cell state."""
        sums, places = self.sums, self.places
        total = sums.add(entering, sums.dense(last, sums.input(places.recurrent(gate)), self.shape), self.shape)
        if self.form.has_peephole and gate != CELL:
            seen = sums.multiply(cell, sums.input(places.peephole(gate)), self.shape)
            total = sums.add(total, seen, self.shape)
        return self._normalised(gate, total) if self.form.has_norm else total

    def _normalised(self, gate: int, total: int) -> int:
        sums, column = self.sums, (self.form.batch, 1)
        last = [1]
        mean = sums.emit("MEAN", [total, sums.node.integers(last)], column, "Reducer", keepDims=True)
        apart = sums.subtract(total, mean, self.shape)
        squares = sums.multiply(apart, apart, self.shape)
        spread = sums.emit("MEAN", [squares, sums.node.integers(last)], column, "Reducer", keepDims=True)
        factor = sums.emit("RSQRT", [sums.add(spread, sums.constant(TINY), column)], column)
        scaled = sums.multiply(
            sums.multiply(apart, factor, self.shape), sums.input(self.places.norm + gate), self.shape
        )
        return sums.add(scaled, sums.input(self.places.bias(gate)), self.shape)

    def step(self, entering: dict[int, int], last: int, cell: int) -> tuple[int, int]:
        """The output and the cell state of a step."""
        sums, shape = self.sums, self.shape
        opened = {g: self.gate(g, entering[g], last, cell) for g in self.form.gates if g != OUTPUT}
        forget = sums.emit("LOGISTIC", [opened[FORGET]], shape)
        if INPUT in opened:
            enter = sums.emit("LOGISTIC", [opened[INPUT]], shape)
        else:
            enter = sums.subtract(sums.constant(1.0), forget, shape)
        new = sums.multiply(enter, sums.activated(opened[CELL], self.code, shape), shape)
        cell = sums.clipped(sums.add(sums.multiply(forget, cell, shape), new, shape), self.cell_clip, shape)
        gate = sums.emit("LOGISTIC", [self.gate(OUTPUT, entering[OUTPUT], last, cell)], shape)
        hidden = sums.multiply(gate, sums.activated(cell, self.code, shape), shape)
        return self._projected(hidden), cell

    def _projected(self, hidden: int) -> int:
        sums, (batch, units), number = self.sums, (self.form.batch, self.form.units), self.places.projection
        if not self.form.has_projection:
            return hidden
        bias = sums.input(number + 1) if sums.node.call.given(number + 1) else -1
        return sums.clipped(sums.dense(hidden, sums.input(number), (batch, units), bias), self.clip, (batch, units))


def _lstm_pass(cell: _Cell) -> tuple[int, int, int]:
    """The outputs of all steps as one tensor, in the order of time; and the last output and cell state."""
    sums, way, form = cell.sums, cell.way, cell.form
    length, batch = _lengths(sums.node, way.axis)
    shape = sums.node.input(0).shape
    head = shape[:-1] if len(shape) > 2 else (1, batch)
    gates = {g: sums.steps(cell.entering(g), (*head, form.cells), way.axis) for g in form.gates}
    last, state = sums.input(way.places.states), sums.input(way.places.states + 1)
    outputs = [0] * length
    for i in range(length)[:: -1 if way.backward else 1]:
        last, state = cell.step({g: steps[i] for g, steps in gates.items()}, last, state)
        outputs[i] = last
    return sums.packed(outputs, (*head, form.units), way.axis), last, state


def lstm(node: Node) -> None:
    """One step; the scratch output is of no use, and zero."""
    sums = Sums(node)
    _, last, state = _lstm_pass(_Cell(sums, LstmDirection(LSTM_PLACES, time_axis(True)), 20))
    scratch = node.graph.writer.constant("FLOAT32", np.zeros(node.output(0).shape, np.float32))
    for n, tensor in enumerate((scratch, last, state, last)):
        sums.give(tensor, n)


def lstm_sequence(node: Node) -> None:
    """Forward in time."""
    sums = Sums(node)
    found = _lstm_pass(_Cell(sums, lstm_sequence_way(node.call), 20))
    for n, tensor in enumerate(found[: len(node.operation.outputs)]):
        sums.give(tensor, n)


def lstm_both(node: Node) -> None:
    """Forward and backward in time."""
    sums = Sums(node)
    passes = [_lstm_pass(_Cell(sums, way, 48)) for way in lstm_both_ways(node.call)]
    _give_both(sums, [results for results, *_ in passes], node.call.flag(51))
    if len(node.operation.outputs) > 2:
        states = [state for _, *states in passes for state in states]
        for n, state in enumerate(states):
            sums.give(state, len(node.operation.outputs) - 4 + n)


TABLE: dict[str, Callable[[Node], None]] = {
    "RNN": rnn,
    "UNIDIRECTIONAL_SEQUENCE_RNN": rnn_sequence,
    "BIDIRECTIONAL_SEQUENCE_RNN": rnn_both,
    "SVDF": svdf,
    "LSTM": lstm,
    "UNIDIRECTIONAL_SEQUENCE_LSTM": lstm_sequence,
    "BIDIRECTIONAL_SEQUENCE_LSTM": lstm_both,
}
