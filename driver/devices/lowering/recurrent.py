"""Recurrent operations in terms of a library's float arithmetic: the cells, and what becomes of their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from driver.nn.ops.lstm import SINGLE as LSTM_PLACES
from driver.nn.ops.lstm import LstmDirection
from driver.nn.ops.lstm import both_ways as lstm_both_ways
from driver.nn.ops.lstm import sequence_way as lstm_sequence_way
from driver.nn.ops.recurrent import CELL, FORGET, INPUT, OUTPUT, batch_size, time_axis
from driver.nn.ops.rnn import SINGLE as RNN_SINGLE
from driver.nn.ops.rnn import RnnDirection
from driver.nn.ops.rnn import both_ways as rnn_both_ways
from driver.nn.ops.rnn import sequence_way as rnn_sequence_way

if TYPE_CHECKING:
    from driver.devices.lowering.node import LoweringNode

T = TypeVar("T")
N = TypeVar("N")
Shape = Sequence[int]
CellStep = Callable[[list[T], list[T]], tuple[list[T], T]]
"""From the states and what enters a step to the new states and the result."""


class Arithmetic(ABC, Generic[T]):
    """Float arithmetic of one node, on a library's tensors T. `shape`: of the result, for libraries that need it."""

    node: LoweringNode[Any]

    @abstractmethod
    def input(self, i: int) -> T:
        """Input `i`."""

    @abstractmethod
    def rows(self, i: int) -> T:
        """Input `i` as the left side of `dense`: with a row for each step of each sequence."""

    @abstractmethod
    def weights(self, i: int) -> T:
        """Input `i`, weights [outputs, inputs], as the right side of `dense`."""

    @abstractmethod
    def constant(self, value: float) -> T:
        """Return a number, to be broadcast."""

    @abstractmethod
    def zeros(self, shape: Shape) -> T:
        """Return zeros."""

    @abstractmethod
    def add(self, a: T, b: T, shape: Shape) -> T:
        """Return a + b."""

    @abstractmethod
    def subtract(self, a: T, b: T, shape: Shape) -> T:
        """Return a - b."""

    @abstractmethod
    def multiply(self, a: T, b: T, shape: Shape) -> T:
        """Return a * b."""

    @abstractmethod
    def dense(self, source: T, weights: T, shape: Shape, bias: T | None = None) -> T:
        """Return the matrix product, and a bias."""

    @abstractmethod
    def activated(self, a: T, code: int, shape: Shape) -> T:
        """Return an activation by its code, as recurrent operations count them."""

    def activated_sum(self, a: T, b: T, code: int, shape: Shape) -> T:
        """Return a + b, activated; a library may have both in one operation."""
        return self.activated(self.add(a, b, shape), code, shape)

    @abstractmethod
    def clipped(self, a: T, limit: float, shape: Shape) -> T:
        """Clip between -limit and limit; a limit of 0 is none."""

    @abstractmethod
    def normalised(self, a: T, shape: Shape) -> T:
        """Return each row less its mean, divided by its standard deviation."""

    @abstractmethod
    def run(
        self, way: RnnDirection | LstmDirection, states: list[T], entering: list[T], step: CellStep[T], sizes: Shape
    ) -> tuple[list[T], T]:
        """`step` over all steps of a sequence: the last states, and all results as one tensor in the order of time.

        `sizes`: the elements of a sequence that enter a step, and those of its result.
        """

    @abstractmethod
    def joined(self, parts: Sequence[T], shape: Shape) -> T:
        """Return the parts behind one another along the last of three axes."""

    @abstractmethod
    def give(self, a: T, n: int) -> None:
        """Make `a` output `n`."""

    def entering(self, pairs: Sequence[tuple[int, int]], bias: T | None, units: int) -> T:
        """Return the sum of the products of inputs with weights, by their numbers, for all steps at once."""
        (source, weights), *rest = pairs
        shape = (_rows(self.node, source), units)
        total = self.dense(self.rows(source), self.weights(weights), shape, bias)
        for source, weights in rest:
            total = self.add(total, self.dense(self.rows(source), self.weights(weights), shape), shape)
        return total


def _rows(node: LoweringNode[Any], source: int) -> int:
    steps, sequences, *_ = (*node.input(source).shape[:-1], 1)
    return steps * sequences


# ---- RNN


def _rnn_pass(sums: Arithmetic[T], way: RnnDirection, code: int) -> tuple[list[T], T]:
    call, own = sums.node.call, way.first
    units, recurrent = way.units(call), sums.weights(own + 1)
    shape = (batch_size(call, way.axis), units)

    def step(states: list[T], entering: list[T]) -> tuple[list[T], T]:
        state = sums.activated_sum(entering[0], sums.dense(states[0], recurrent, shape), code, shape)
        return [state], state

    entering = sums.entering(way.products, sums.input(own + 2), units)
    return sums.run(way, [sums.input(own + 3)], [entering], step, (units, units))


def rnn(sums: Arithmetic[T]) -> None:
    """Do one step."""
    (state,), _ = _rnn_pass(sums, RNN_SINGLE, sums.node.call.integer(5))
    sums.give(state, 0)
    sums.give(state, 1)


def rnn_sequence(sums: Arithmetic[T]) -> None:
    """Forward in time."""
    call = sums.node.call
    states, results = _rnn_pass(sums, rnn_sequence_way(call), call.integer(5))
    _give_forward(sums, results, states)


def rnn_both(sums: Arithmetic[T]) -> None:
    """Forward and backward in time."""
    call = sums.node.call
    passes = [_rnn_pass(sums, way, call.integer(12)) for way in rnn_both_ways(call)]
    _give_both(sums, passes, is_merged=call.flag(14))


def _give_forward(sums: Arithmetic[T], results: T, states: list[T]) -> None:
    """Give the states only where the operation has outputs for them."""
    for n, result in enumerate([results, *states][: len(sums.node.operation.outputs)]):
        sums.give(result, n)


def _give_both(sums: Arithmetic[T], passes: Sequence[tuple[list[T], T]], *, is_merged: bool) -> None:
    """Give the results of both directions, joined or apart; behind them the states, where there are outputs for
    them.
    """
    given = [result for _, result in passes]
    if is_merged:
        given = [sums.joined(given, sums.node.output().shape)]
    states = [state for states, _ in passes for state in states]
    for n, result in enumerate([*given, *states][: len(sums.node.operation.outputs)]):
        sums.give(result, n)


# ---- LSTM


class LstmCell(Generic[T]):
    """One LSTM cell: its form, its weights, and the scalars of the operation.

    All weights are read before the first step: a library may write its steps into a graph of their own.
    """

    def __init__(self, sums: Arithmetic[T], way: LstmDirection, scalars: int) -> None:
        """`scalars`: the number of the first of activation, cell clip and projection clip."""
        call, places = sums.node.call, way.places
        self.sums, self.way, self.form = sums, way, way.form(call)
        self.code = call.integer(scalars)
        self.cell_clip, self.clip = sums.node.real(scalars + 1), sums.node.real(scalars + 2)
        form, gates = self.form, self.form.gates
        self.shape = (form.batch, form.cells)
        self.recurrent = {g: sums.weights(places.recurrent(g)) for g in gates}
        self.biases = {g: sums.input(places.bias(g)) for g in gates}
        self.peephole = {g: sums.input(places.peephole(g)) for g in gates if g != CELL and form.has_peephole}
        self.norm = {g: sums.input(places.norm + g) for g in gates if form.has_norm}
        self.projection = sums.weights(places.projection) if form.has_projection else None
        has_bias = call.given(places.projection + 1)
        self.projection_bias = sums.input(places.projection + 1) if has_bias else None

    def run(self) -> tuple[list[T], T]:
        """Return the last output and cell state, and the outputs of all steps. A cell that normalises adds biases
        later.
        """
        sums, way, form = self.sums, self.way, self.form
        biases = {g: None if self.norm else self.biases[g] for g in form.gates}
        entering = [sums.entering(way.products(g), biases[g], form.cells) for g in form.gates]
        states = [sums.input(way.places.states), sums.input(way.places.states + 1)]
        return sums.run(way, states, entering, self.step, (form.cells, form.units))

    def step(self, states: list[T], entering: list[T]) -> tuple[list[T], T]:
        """Return the new output and cell state."""
        (last, cell), sums, shape = states, self.sums, self.shape
        entered = dict(zip(self.form.gates, entering, strict=True))
        forget = self._opened(FORGET, entered, last, cell)
        if INPUT in entered:
            enter = self._opened(INPUT, entered, last, cell)
        else:
            enter = sums.subtract(sums.constant(1.0), forget, shape)
        new = sums.activated(self._gate(CELL, entered, last, cell), self.code, shape)
        total = sums.add(sums.multiply(forget, cell, shape), sums.multiply(enter, new, shape), shape)
        cell = sums.clipped(total, self.cell_clip, shape)
        gate = self._opened(OUTPUT, entered, last, cell)
        output = self._projected(sums.multiply(gate, sums.activated(cell, self.code, shape), shape))
        return [output, cell], output

    def _opened(self, gate: int, entered: dict[int, T], last: T, cell: T) -> T:
        """Return a gate after its activation."""
        return self.sums.activated(self._gate(gate, entered, last, cell), SIGMOID, self.shape)

    def _gate(self, gate: int, entered: dict[int, T], last: T, cell: T) -> T:
        """Return a gate before its activation, from what enters it, the last output and a cell state."""
        sums, shape = self.sums, self.shape
        total = sums.add(entered[gate], sums.dense(last, self.recurrent[gate], shape), shape)
        if gate in self.peephole:
            total = sums.add(total, sums.multiply(cell, self.peephole[gate], shape), shape)
        if not self.norm:
            return total
        scaled = sums.multiply(sums.normalised(total, shape), self.norm[gate], shape)
        return sums.add(scaled, self.biases[gate], shape)

    def _projected(self, hidden: T) -> T:
        if self.projection is None:
            return hidden
        shape = (self.form.batch, self.form.units)
        return self.sums.clipped(
            self.sums.dense(hidden, self.projection, shape, self.projection_bias), self.clip, shape
        )


SIGMOID = 6
"""Its code among the activations of recurrent operations."""


def lstm(sums: Arithmetic[T]) -> None:
    """Do one step; the scratch output is of no use, and zero."""
    (last, cell), _ = LstmCell(sums, LstmDirection(LSTM_PLACES, time_axis(True)), 20).run()
    for n, result in enumerate((sums.zeros(sums.node.output().shape), last, cell, last)):
        sums.give(result, n)


def lstm_sequence(sums: Arithmetic[T]) -> None:
    """Forward in time."""
    states, results = LstmCell(sums, lstm_sequence_way(sums.node.call), 20).run()
    _give_forward(sums, results, states)


def lstm_both(sums: Arithmetic[T]) -> None:
    """Forward and backward in time."""
    call = sums.node.call
    passes = [LstmCell(sums, way, 48).run() for way in lstm_both_ways(call)]
    _give_both(sums, passes, is_merged=call.flag(51))


_OPERATIONS: dict[str, Callable[[Arithmetic[Any]], None]] = {
    "RNN": rnn,
    "UNIDIRECTIONAL_SEQUENCE_RNN": rnn_sequence,
    "BIDIRECTIONAL_SEQUENCE_RNN": rnn_both,
    "LSTM": lstm,
    "UNIDIRECTIONAL_SEQUENCE_LSTM": lstm_sequence,
    "BIDIRECTIONAL_SEQUENCE_LSTM": lstm_both,
}


def lowerings(arithmetic: Callable[[N], Arithmetic[T]]) -> dict[str, Callable[[N], None]]:
    """Return a function for each recurrent operation, in terms of a library's arithmetic on a node."""
    return {name: partial(_lower, arithmetic, operation) for name, operation in _OPERATIONS.items()}


def _lower(arithmetic: Callable[[N], Arithmetic[T]], operation: Callable[[Arithmetic[T]], None], node: N) -> None:
    operation(arithmetic(node))
