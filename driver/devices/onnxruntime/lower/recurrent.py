"""Recurrent operations: ONNX's Scan runs a cell over the steps of a sequence; its states are tensors as in the HAL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from driver.devices.lowering.recurrent import Arithmetic, lowerings
from driver.nn.ops.lstm import TINY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from driver.devices.lowering.recurrent import CellStep
    from driver.devices.onnxruntime.lower.node import OrtNode
    from driver.nn.ops.lstm import LstmDirection
    from driver.nn.ops.rnn import RnnDirection

TRANSPOSED = (1, 0)
"""Weights [outputs, inputs] as the right side of a product."""

_FUNCTIONS = {1: "Relu", 4: "Tanh", 6: "Sigmoid"}


class OnnxSums(Arithmetic[str]):
    """Float arithmetic on tensors of one node. ONNX finds the shapes itself."""

    def __init__(self, node: OrtNode) -> None:
        self.node: OrtNode = node
        self._emit = node.emit

    def input(self, i: int) -> str:
        return self.node.read(i)

    def rows(self, i: int) -> str:
        return self.node.read(i)

    def weights(self, i: int) -> str:
        return self.node.read(i, order=TRANSPOSED)

    def constant(self, value: float) -> str:
        return self.node.scalar(value)

    def zeros(self, shape: Sequence[int]) -> str:
        return self.node.graph.constant(np.zeros(shape, np.float32))

    def add(self, a: str, b: str, shape: Sequence[int] = ()) -> str:
        return self._emit("Add", a, b)

    def subtract(self, a: str, b: str, shape: Sequence[int] = ()) -> str:
        return self._emit("Sub", a, b)

    def multiply(self, a: str, b: str, shape: Sequence[int] = ()) -> str:
        return self._emit("Mul", a, b)

    def dense(self, source: str, weights: str, shape: Sequence[int], bias: str | None = None) -> str:
        product = self._emit("MatMul", source, weights)
        return product if bias is None else self.add(product, bias)

    def activated(self, a: str, code: int, shape: Sequence[int] = ()) -> str:
        return self._emit(_FUNCTIONS[code], a) if code in _FUNCTIONS else self.node.activated(a, code)

    def clipped(self, a: str, limit: float, shape: Sequence[int] = ()) -> str:
        return self._emit("Clip", a, self.node.scalar(-limit), self.node.scalar(limit)) if limit else a

    def normalised(self, a: str, shape: Sequence[int] = ()) -> str:
        last = self.node.integers([1])
        apart = self.subtract(a, self._emit("ReduceMean", a, last, keepdims=1))
        spread = self._emit("ReduceMean", self.multiply(apart, apart), last, keepdims=1)
        return self._emit("Div", apart, self._emit("Sqrt", self.add(spread, self.node.scalar(TINY))))

    def run(
        self,
        way: RnnDirection | LstmDirection,
        states: list[str],
        entering: list[str],
        step: CellStep[str],
        sizes: Sequence[int],
    ) -> tuple[list[str], str]:
        if len(self.node.input(0).shape) == 2:  # a matrix is a single step
            return step(states, entering)
        graph = self.node.graph
        with graph.body() as inner:
            inputs = [inner.names.new() for _ in (*states, *entering)]
            after, result = step(inputs[: len(states)], inputs[len(states) :])
            outputs = [inner.own(name) for name in (*after, result)]
            body = inner.graph([(name, "FLOAT", None) for name in inputs], [(name, "FLOAT") for name in outputs])
        axis, count, backward = way.axis % 3, len(entering), int(way.backward)
        *last, results = graph.writer.node(
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

    def joined(self, parts: Sequence[str], shape: Sequence[int]) -> str:
        return self._emit("Concat", *parts, axis=2)

    def give(self, a: str, n: int) -> None:
        self.node.give(a, n)


def svdf(node: OrtNode) -> None:
    """Lower SVDF: the window over time moves on by one, and is then weighed."""
    sums, call, (filters, memory) = OnnxSums(node), node.call, node.input(2).shape
    batch, units = node.input(0).shape[0], filters // call.integer(5)
    newest = node.reshaped(node.emit("MatMul", node.read(0), sums.weights(1)), (batch, filters, 1))
    state = node.reshaped(node.read(4), (batch, filters, memory))
    ends = [node.integers(values) for values in ([0], [memory - 1], [2])]
    window = node.emit("Concat", node.emit("Slice", state, *ends), newest, axis=2)
    weighed = node.reshaped(node.emit("Mul", window, node.read(2)), (batch, units, -1))
    result = node.emit("ReduceSum", weighed, node.integers([2]), keepdims=0)
    if call.given(3):
        result = node.emit("Add", result, node.read(3))
    kept = node.emit("Slice", window, *(node.integers(values) for values in ([1], [memory], [2])))
    zeros = sums.zeros((batch, filters, 1))
    node.give(node.reshaped(node.emit("Concat", kept, zeros, axis=2), node.output(0).shape), 0)
    node.give(sums.activated(result, call.integer(6)), 1)


TABLE: dict[str, Callable[[OrtNode], None]] = {**lowerings(OnnxSums), "SVDF": svdf}
