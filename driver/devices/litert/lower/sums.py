"""Float arithmetic on tensors, for operations that TFLite has in parts only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.devices.litert.lower.node import Node
    from driver.nn.types import Dimensions

FUSED, NONE = (0, 1, 3), 0
"""Activations that TFLite's arithmetic has built in; and none."""

_FUNCTIONS = {4: "TANH", 6: "LOGISTIC"}


class Sums:
    """Float arithmetic on tensors of one node. Every method gives a new tensor, of the dimensions that it is told."""

    def __init__(self, node: Node) -> None:
        self.node, self.input = node, node.read

    def emit(self, name: str, sources: Sequence[int], shape: Sequence[int], options: str = "", **fields: Any) -> int:
        """One TFLite operation."""
        result = self.node.graph.writer.tensor("FLOAT32", shape)
        self.node.emit(name, sources, [result], options, **fields)
        return result

    def constant(self, value: float) -> int:
        """A number, to be broadcast."""
        return self.node.graph.writer.constant("FLOAT32", np.array([value], np.float32))

    def add(self, a: int, b: int, shape: Sequence[int], code: int = NONE) -> int:
        """a + b, and an activation that TFLite fuses."""
        return self.emit("ADD", [a, b], shape, "Add", fusedActivationFunction=code)

    def subtract(self, a: int, b: int, shape: Sequence[int]) -> int:
        """a - b."""
        return self.emit("SUB", [a, b], shape, "Sub", fusedActivationFunction=NONE)

    def multiply(self, a: int, b: int, shape: Sequence[int]) -> int:
        """a * b."""
        return self.emit("MUL", [a, b], shape, "Mul", fusedActivationFunction=NONE)

    def dense(self, source: int, weights: int, shape: Sequence[int], bias: int = -1) -> int:
        """The product with weights [outputs, inputs], and a bias."""
        fields = {"fusedActivationFunction": NONE}
        return self.emit("FULLY_CONNECTED", [source, weights, bias], shape, "FullyConnected", **fields)

    def activated(self, a: int, code: int, shape: Sequence[int]) -> int:
        """An activation by its code, as recurrent operations count them."""
        if code in _FUNCTIONS:
            return self.emit(_FUNCTIONS[code], [a], shape)
        return self.add(a, self.constant(0.0), shape, code) if code else a

    def clipped(self, a: int, limit: float, shape: Sequence[int]) -> int:
        """Between -limit and limit; a limit of 0 is none."""
        for name, bound in (("MAXIMUM", -limit), ("MINIMUM", limit)) if limit else ():
            a = self.emit(name, [a, self.constant(bound)], shape, "MaximumMinimum")
        return a

    def reshaped(self, a: int, shape: Sequence[int]) -> int:
        """The same elements."""
        result = self.node.graph.writer.tensor("FLOAT32", shape)
        self.node.reshape(a, result, shape)
        return result

    def matrix(self, i: int) -> int:
        """Input `i` with a row for each step of each sequence."""
        *rows, width = self.node.input(i).shape
        return self.reshaped(self.input(i), (int(np.prod(rows)), width))

    def steps(self, rows: int, shape: Dimensions, axis: int) -> list[int]:
        """The steps, along `axis`, of a matrix that stands for a tensor of that shape."""
        whole = self.reshaped(rows, shape)
        axis %= len(shape)
        rest = [d for i, d in enumerate(shape) if i != axis]
        parts = [self.node.graph.writer.tensor("FLOAT32", rest) for _ in range(shape[axis])]
        self.node.emit("UNPACK", [whole], parts, "Unpack", num=len(parts), axis=axis)
        return parts

    def give(self, a: int, n: int) -> None:
        """Make that tensor output `n`."""
        self.node.reshape(a, self.node.write(n), self.node.output(n).shape)

    def packed(self, parts: Sequence[int], shape: Dimensions, axis: int) -> int:
        """Steps as one tensor."""
        axis %= len(shape)
        return self.emit("PACK", parts, shape, "Pack", valuesCount=len(parts), axis=axis)
