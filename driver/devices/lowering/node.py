"""What every library's lowering has: a graph with its tensors, and one operation of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from driver.devices.lowering.errors import UnsupportedError, require
from driver.nn import ExecutionFailed, OperandType
from driver.nn.plan import REFUSALS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from driver.nn import Operation, Subgraph
    from driver.nn.operation import Call, Tensor
    from driver.nn.plan import Prepared

STORED = {
    OperandType.TENSOR_FLOAT16: "FLOAT16",
    OperandType.TENSOR_INT32: "INT32",
    OperandType.INT32: "INT32",
    OperandType.TENSOR_QUANT8_ASYMM: "UINT8",
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: "INT8",
    OperandType.TENSOR_QUANT8_SYMM: "INT8",
    OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL: "INT8",
    OperandType.TENSOR_BOOL8: "UINT8",
}
"""The types that libraries call alike, of operands as clients see them."""


class LoweringGraph(ABC):
    """A subgraph on its way to a library: its tensors, whose shapes are known; None for those that are omitted."""

    def __init__(self, subgraph: Subgraph, tensors: dict[int, Tensor | None]) -> None:
        self.subgraph, self.tensors = subgraph, tensors

    @abstractmethod
    def expect(self, index: int) -> None:
        """Operand `index` is there from the beginning, as a client sees it."""

    @abstractmethod
    def output(self, index: int) -> tuple[Any, str]:
        """Return the library's tensor that holds an output in the form its client sees, and its type."""

    def tensor(self, index: int) -> Tensor:
        """Operand `index`. Raise UnsupportedError."""
        tensor = self.tensors[index]
        require(tensor is not None, "an operand is omitted")
        assert tensor is not None
        require(0 not in tensor.shape, "an operand is empty")
        return tensor


G = TypeVar("G", bound=LoweringGraph)


class LoweringNode(Generic[G]):
    """One operation: its parameters (`call`), and its operands."""

    def __init__(self, graph: G, operation: Operation, call: Call) -> None:
        self.graph, self.operation, self.call = graph, operation, call

    def input(self, i: int) -> Tensor:
        """Input `i`."""
        return self.graph.tensor(self.operation.inputs[i])

    def output(self, n: int = 0) -> Tensor:
        """Output `n`."""
        return self.graph.tensor(self.operation.outputs[n])

    def real(self, i: int) -> float:
        """Return the value of scalar input `i`, which is finite."""
        value = self.call.real(i)
        require(math.isfinite(value), f"its input {i} is {value}")
        return value

    def is_requantised(self, i: int, n: int = 0) -> bool:
        """Return True if output `n` is quantised, and otherwise than input `i`."""
        source, result = self.input(i), self.output(n)
        is_alike = (source.scale, source.zero_point) == (result.scale, result.zero_point)
        return result.type.is_quantised and not is_alike


N = TypeVar("N", bound="LoweringNode[Any]")


def draft(
    graph: LoweringGraph, node: Callable[[], N], operation: Operation, table: Mapping[str, Callable[[N], None]]
) -> None:
    """Lower one operation in a graph of its own, to find out whether it can be. Raise UnsupportedError."""
    require(operation.type in table, "the library has no such operation")
    for i in operation.inputs:
        if (tensor := graph.tensors.get(i)) is not None and not tensor.fixed and tensor.type != OperandType.SUBGRAPH:
            graph.expect(i)
    table[operation.type](node())
    for i in operation.outputs:
        graph.output(i)


@contextmanager
def naming(operation: Prepared, library: str) -> Iterator[None]:
    """Turn the reasons for which an operation is refused into ExecutionFailed, which names the operation."""
    try:
        yield
    except REFUSALS as error:
        raise operation.failure(error) from error
    except UnsupportedError as error:
        raise ExecutionFailed(operation.index, operation.operation.type, f"{library}: {error}") from error
