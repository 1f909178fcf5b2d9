"""Float arithmetic on tensors, for operations that TFLite lacks or has in parts only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from driver.devices.lowering.errors import require
from driver.devices.lowering.recurrent import Arithmetic, CellStep
from driver.nn.ops.lstm import TINY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.devices.litert.lower.node import LiteRtNode
    from driver.nn.ops.lstm import LstmDirection
    from driver.nn.ops.rnn import RnnDirection
    from driver.nn.types import Dimensions

FUSED, NONE = (0, 1, 3), 0
"""Activations that TFLite's arithmetic has built in; and none."""

MOST_STEPS = 128
"""Longer sequences would make graphs that take longer to compile than to run."""

_FUNCTIONS = {4: "TANH", 6: "LOGISTIC"}


class Sums(Arithmetic[int]):
    """Float arithmetic on tensors of one node. Sequences are unrolled: TFLite keeps their states to itself."""

    def __init__(self, node: LiteRtNode) -> None:
        self.node: LiteRtNode = node

    def input(self, i: int) -> int:
        return self.node.read(i)

    def emit(self, name: str, sources: Sequence[int], shape: Sequence[int], options: str = "", **fields: Any) -> int:
        """Emit one TFLite operation."""
        result = self.node.graph.writer.tensor("FLOAT32", shape)
        self.node.emit(name, sources, [result], options, **fields)
        return result

    def constant(self, value: float) -> int:
        return self.node.graph.writer.constant("FLOAT32", np.array([value], np.float32))

    def zeros(self, shape: Sequence[int]) -> int:
        return self.node.graph.writer.constant("FLOAT32", np.zeros(shape, np.float32))

    def add(self, a: int, b: int, shape: Sequence[int], code: int = NONE) -> int:
        """Add a + b, and an activation that TFLite fuses."""
        return self.emit("ADD", [a, b], shape, "Add", fusedActivationFunction=code)

    def subtract(self, a: int, b: int, shape: Sequence[int]) -> int:
        return self.emit("SUB", [a, b], shape, "Sub", fusedActivationFunction=NONE)

    def multiply(self, a: int, b: int, shape: Sequence[int]) -> int:
        return self.emit("MUL", [a, b], shape, "Mul", fusedActivationFunction=NONE)

    def dense(self, source: int, weights: int, shape: Sequence[int], bias: int | None = None) -> int:
        sources, fields = [source, weights, -1 if bias is None else bias], {"fusedActivationFunction": NONE}
        return self.emit("FULLY_CONNECTED", sources, shape, "FullyConnected", **fields)

    def activated(self, a: int, code: int, shape: Sequence[int]) -> int:
        if code in _FUNCTIONS:
            return self.emit(_FUNCTIONS[code], [a], shape)
        return self.add(a, self.constant(0.0), shape, code) if code else a

    def activated_sum(self, a: int, b: int, code: int, shape: Sequence[int]) -> int:
        return self.add(a, b, shape, code) if code in FUSED else self.activated(self.add(a, b, shape), code, shape)

    def clipped(self, a: int, limit: float, shape: Sequence[int]) -> int:
        for name, bound in (("MAXIMUM", -limit), ("MINIMUM", limit)) if limit else ():
            a = self.emit(name, [a, self.constant(bound)], shape, "MaximumMinimum")
        return a

    def reshaped(self, a: int, shape: Sequence[int]) -> int:
        """Return the elements in that shape."""
        result = self.node.graph.writer.tensor("FLOAT32", shape)
        self.node.reshape(a, result, shape)
        return result

    def normalised(self, a: int, shape: Sequence[int]) -> int:
        column, last = (shape[0], 1), [1]
        mean = self.emit("MEAN", [a, self.node.integers(last)], column, "Reducer", keepDims=True)
        apart = self.subtract(a, mean, shape)
        squares = self.multiply(apart, apart, shape)
        spread = self.emit("MEAN", [squares, self.node.integers(last)], column, "Reducer", keepDims=True)
        factor = self.emit("RSQRT", [self.add(spread, self.constant(TINY), column)], column)
        return self.multiply(apart, factor, shape)

    def weights(self, i: int) -> int:
        return self.input(i)

    def rows(self, i: int) -> int:
        *rows, width = self.node.input(i).shape
        return self.reshaped(self.input(i), (int(np.prod(rows)), width))

    def run(
        self,
        way: RnnDirection | LstmDirection,
        states: list[int],
        entering: list[int],
        step: CellStep[int],
        sizes: Sequence[int],
    ) -> tuple[list[int], int]:
        shape, axis = self.node.input(0).shape, way.axis
        head = shape[:-1] if len(shape) > 2 else (1, shape[0])
        length = head[axis + 1]
        require(length <= MOST_STEPS, f"its {length} steps are too many to unroll")
        taken = [self.steps(rows, (*head, sizes[0]), axis) for rows in entering]
        results = [0] * length
        for i in range(length)[:: -1 if way.backward else 1]:
            states, results[i] = step(states, [parts[i] for parts in taken])
        return states, self.packed(results, (*head, sizes[1]), axis)

    def joined(self, parts: Sequence[int], shape: Sequence[int]) -> int:
        fields = {"axis": 2, "fusedActivationFunction": NONE}
        return self.emit("CONCATENATION", parts, shape, "Concatenation", **fields)

    def steps(self, rows: int, shape: Dimensions, axis: int) -> list[int]:
        """Return the steps, along `axis`, of a matrix that stands for a tensor of that shape."""
        whole = self.reshaped(rows, shape)
        axis %= len(shape)
        rest = [d for i, d in enumerate(shape) if i != axis]
        parts = [self.node.graph.writer.tensor("FLOAT32", rest) for _ in range(shape[axis])]
        self.node.emit("UNPACK", [whole], parts, "Unpack", num=len(parts), axis=axis)
        return parts

    def give(self, a: int, n: int) -> None:
        self.node.reshape(a, self.node.write(n), self.node.output(n).shape)

    def packed(self, parts: Sequence[int], shape: Dimensions, axis: int) -> int:
        """Return the parts as one tensor."""
        axis %= len(shape)
        return self.emit("PACK", parts, shape, "Pack", valuesCount=len(parts), axis=axis)
