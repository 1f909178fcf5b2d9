"""LSTM, GRU and RNN. The HAL has LSTM and RNN; a GRU is unrolled into its steps.

Each direction is a pass of its own; a backward pass reverses its input and its result. Sequences are
[time, batch, size], and results are [time, direction, batch, units].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from driver.errors import ImportFailed
from driver.formats.file_bytes import Array
from driver.nn.builder import Value

from .call import OnnxCall
from .graph import Shape

_MOST_STEPS = 128
"""Limit of unrolled GRU steps: the graph grows with them."""
_TANH, _SIGMOID, _RELU = 4, 6, 1
_CODES = {"Tanh": _TANH, "Relu": _RELU}
_DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


@dataclass(frozen=True, slots=True)
class Pass:
    """One direction: the sequence in its order, its weights, and its initial states."""

    call: OnnxCall
    number: int
    x: Value
    shape: Shape
    units: int
    functions: list[str]

    def gates(self, position: int, count: int) -> list[Array]:
        """Return the weights of each gate."""
        array = self.call.weights(position).array
        assert array is not None
        size = self.shape[2] if position == 1 else self.units
        if array.ndim != 3 or array.shape[1:] != (count * self.units, size) or len(array) <= self.number:
            raise ImportFailed(
                f"weights of dimensions {list(array.shape)} do not fit {count} gates of {self.units} units"
            )
        return [np.ascontiguousarray(gate) for gate in np.split(array[self.number], count)]

    def biases(self, count: int) -> tuple[list[Array], list[Array]]:
        """Return the biases of each gate: for the input, and for the state."""
        if not self.call.given(3):
            zeros = [np.zeros(self.units, np.float32)] * count
            return zeros, zeros
        array = self.call.weights(3).array
        assert array is not None
        if array.ndim != 2 or array.shape[1] != 2 * count * self.units or len(array) <= self.number:
            raise ImportFailed(
                f"biases of dimensions {list(array.shape)} do not fit {count} gates of {self.units} units"
            )
        parts = np.split(array[self.number], 2 * count)
        return parts[:count], parts[count:]

    def state(self, position: int) -> Value:
        """Return the initial state."""
        call, shape = self.call, (self.shape[1], self.units)
        if not call.given(position):
            call.graph.charge(4 * shape[0] * shape[1])
            return call.graph.builder.constant(np.zeros(shape, np.float32))
        directions, array = call.shape(position, 3)[0], call.entry(position).array
        if array is not None:
            if array.shape[1:] != shape or self.number >= directions:
                raise ImportFailed(f"an initial state has dimensions {list(array.shape)}; expected {list(shape)}")
            return call.graph.builder.constant(np.array(array[self.number]))
        value = call.value(position)
        if directions > 1:
            begin = np.array([self.number, 0, 0], np.int32)
            value = call.graph.cast(call.emit("SLICE", value, begin, np.array([1, -1, -1], np.int32)))
        return call.graph.reshape(value, shape)


Step = Callable[[Pass], tuple[Value, list[Value]]]


def _recurrent(step: Step) -> Callable[[OnnxCall], None]:
    """Convert all directions and join their results."""

    def convert(call: OnnxCall) -> None:
        directions = _directions(call)
        units = call.node.integer("hidden_size")
        shape = call.known(0)
        if len(shape) != 3 or not 0 < units <= 1 << 16:
            raise ImportFailed(f"{units} units for an input of dimensions {list(shape)}; expected 3 dimensions")
        names = call.node.texts("activations") or _DEFAULTS[call.node.kind] * len(directions)
        each, results, states = len(names) // len(directions), [], []
        for number, is_backward in enumerate(directions):
            x = _reversed(call, call.value(0)) if is_backward else call.value(0)
            functions = names[number * each : (number + 1) * each]
            y, ends = step(Pass(call, number, x, shape, units=units, functions=functions))
            results.append(_reversed(call, y) if is_backward else y)
            states.append(ends)
        whole = [call.graph.reshape(y, (shape[0], 1, shape[1], units)) for y in results]
        call.give(whole[0] if len(whole) == 1 else call.emit("CONCATENATION", *whole, 1))
        for at in range(1, len(call.node.outputs)):
            ends = [call.graph.reshape(end[at - 1], (1, shape[1], units)) for end in states]
            call.give(ends[0] if len(ends) == 1 else call.emit("CONCATENATION", *ends, 0), at=at)

    return convert


def _directions(call: OnnxCall) -> list[bool]:
    """Return for each direction if it is backward."""
    node = call.node
    found = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}.get(
        node.text("direction", "forward")
    )
    if found is None:
        raise ImportFailed(f"direction {node.text('direction')!r} is unknown")
    if call.given(4):
        lengths = call.entry(4).array
        if lengths is None or (lengths != call.known(0)[0]).any():
            raise ImportFailed("sequences of different lengths (sequence_lens) have no counterpart in the HAL")
    if node.integer("layout") or node.has("clip") or node.integer("input_forget"):
        raise ImportFailed("layout 1, clip and input_forget are not supported")
    return found


def _reversed(call: OnnxCall, value: Value) -> Value:
    places = [np.array(v, np.int32) for v in ([-1, 0, 0], [0, 0, 0], [-1, 1, 1])]
    return call.graph.cast(call.emit("STRIDED_SLICE", value, *places, 6, 7, 0))


def _lstm(way: Pass) -> tuple[Value, list[Value]]:
    """UNIDIRECTIONAL_SEQUENCE_LSTM; ONNX orders the gates input, output, forget, cell."""
    call, units = way.call, way.units
    if way.functions != _DEFAULTS["LSTM"]:
        raise ImportFailed(f"activations {way.functions[:4]}; the HAL has Sigmoid, Tanh, Tanh")
    order = (0, 2, 3, 1)
    entering, recurrent = ([way.gates(i, 4)[g] for g in order] for i in (1, 2))
    of_input, of_state = way.biases(4)
    biases = [np.asarray(of_input[g] + of_state[g]) for g in order]
    peepholes: Sequence[Any] = (None, None, None)
    if call.given(7):
        array = np.asarray(call.weights(7).array)
        if array.ndim != 2 or array.shape[1] != 3 * units or len(array) <= way.number:
            raise ImportFailed(f"peepholes have the wrong dimensions {list(array.shape)}")
        seen = np.split(array[way.number], 3)
        peepholes = [np.ascontiguousarray(seen[g]) for g in (0, 2, 1)]
    tail = (way.state(5), way.state(6), _TANH, 0.0, 0.0, True, None, None, None, None)
    weights = (*entering, *recurrent, *peepholes, *biases, None, None)
    y, hidden, cell = call.emit("UNIDIRECTIONAL_SEQUENCE_LSTM", way.x, *weights, *tail, outputs=3)
    return y, [hidden, cell]


def _rnn(way: Pass) -> tuple[Value, list[Value]]:
    """UNIDIRECTIONAL_SEQUENCE_RNN."""
    code = _CODES.get(way.functions[0] if way.functions else "")
    if code is None:
        raise ImportFailed(f"activations {way.functions[:4]}; supported are {', '.join(_CODES)}")
    of_input, of_state = way.biases(1)
    weights = (way.gates(1, 1)[0], way.gates(2, 1)[0], np.asarray(of_input[0] + of_state[0]))
    y, last = way.call.emit("UNIDIRECTIONAL_SEQUENCE_RNN", way.x, *weights, way.state(5), code, 1, outputs=2)
    return y, [last]


def _gru(way: Pass) -> tuple[Value, list[Value]]:
    """Unrolled; the input product is computed for all steps at once. The gates are update, reset and new."""
    call, (steps, batch, size), units = way.call, way.shape, way.units
    if steps > _MOST_STEPS:
        raise ImportFailed(f"{steps} steps; the limit is {_MOST_STEPS}")
    if way.functions != _DEFAULTS["GRU"]:
        raise ImportFailed(f"activations {way.functions[:4]}; supported are Sigmoid, Tanh")
    of_input, of_state = way.biases(3)
    is_late = call.node.integer("linear_before_reset")
    late = np.zeros(units, np.float32) if is_late else of_state[2]
    constant = call.graph.builder.constant
    entering = constant(np.concatenate(way.gates(1, 3)))
    offset = constant(np.concatenate([of_input[0] + of_state[0], of_input[1] + of_state[1], of_input[2] + late]))
    flat = call.graph.reshape(way.x, (steps * batch, size))
    sums = call.emit("FULLY_CONNECTED", flat, entering, offset, 0)
    parts = call.emit("SPLIT", sums, 0, steps, outputs=steps) if steps > 1 else (sums,)
    gates, new = way.gates(2, 3)[:2], way.gates(2, 3)[2]
    both, zeros = constant(np.concatenate(gates)), constant(np.zeros(2 * units, np.float32))
    last = (constant(new), constant(np.asarray(of_state[2] if is_late else np.zeros(units, np.float32))))
    state, outputs = way.state(5), []
    for part in parts:
        state = _gru_step(call, part, state, (both, zeros), new=last, units=units)
        outputs.append(call.graph.reshape(state, (1, batch, units)))
    return (outputs[0] if steps == 1 else call.emit("CONCATENATION", *outputs, 0)), [state]


def _gru_step(
    call: OnnxCall, part: Value, state: Value, gates: tuple[Value, Value], new: tuple[Value, Value], units: int
) -> Value:
    """(1 - z) * n + z * h = n + z * (h - n)."""

    def columns(start: int, size: int) -> Any:
        return call.emit("SLICE", part, np.array([0, start], np.int32), np.array([-1, size], np.int32))

    opened = call.emit("ADD", columns(0, 2 * units), _of_state(call, state, *gates), 0)
    update, reset = call.emit("SPLIT", call.emit("LOGISTIC", opened), 1, 2, outputs=2)
    if call.node.integer("linear_before_reset"):
        inner = call.emit("MUL", reset, _of_state(call, state, *new), 0)
    else:
        inner = call.emit("FULLY_CONNECTED", call.emit("MUL", reset, state, 0), *new, 0)
    fresh = call.emit("TANH", call.emit("ADD", columns(2 * units, units), inner, 0))
    rest = call.emit("MUL", update, call.emit("SUB", state, fresh, 0), 0)
    return call.graph.cast(call.emit("ADD", fresh, rest, 0))


def _of_state(call: OnnxCall, state: Value, weights: Value, bias: Value) -> Any:
    """Return a product with the state; folded when the state is constant, as most initial states are."""
    values = [value.operand.value for value in (state, weights, bias)]
    if values[0] is None:
        return call.emit("FULLY_CONNECTED", state, weights, bias, 0)
    return call.graph.builder.constant(np.asarray(values[0] @ values[1].T + values[2], np.float32))


lstm, gru, rnn = map(_recurrent, (_lstm, _gru, _rnn))
