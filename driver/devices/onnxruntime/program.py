"""A model lowered and made ready to run for inputs of given shapes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from driver.devices import lowering
from driver.devices.lowering import Tensors, UnsupportedError, require
from driver.devices.onnxruntime.library import Session
from driver.devices.onnxruntime.lower import LOWERINGS, Graph, Node
from driver.devices.onnxruntime.lower.control import placed
from driver.devices.onnxruntime.lower.node import stored_type
from driver.devices.onnxruntime.writer import model as model_bytes
from driver.nn import ExecutionFailed, OperandType
from driver.nn.plan import REFUSALS, Prepared
from driver.nn.types import byte_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from driver.nn import Model, Subgraph
    from driver.nn.operation import Call, Tensor


def supported(model: Model) -> list[bool]:
    """For each operation of the main subgraph, whether it can be lowered; for every size of dimensions left open."""
    return lowering.supported(model, partial(_draft, model.referenced), partial(placed, referenced=model.referenced))


def _draft(referenced: Sequence[Subgraph], operation: Prepared, call: Call, graph: Subgraph, tensors: Tensors) -> None:
    kind = operation.operation.type
    require(kind in LOWERINGS, "ONNX has no such operation")
    lowered = Graph(graph, tensors, referenced, is_draft=True)
    for i in operation.operation.inputs:
        if (tensor := tensors.get(i)) is not None and not tensor.fixed and tensor.type != OperandType.SUBGRAPH:
            lowered.input(i)
    LOWERINGS[kind](Node(lowered, operation.operation, call))
    for i in operation.operation.outputs:
        lowered.output(i)


class Port(NamedTuple):
    """An input or output of the session."""

    number: int  #: among the model's inputs or outputs
    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int


class Program:
    """The session and its ports."""

    def __init__(
        self,
        model: Model,
        operations: Sequence[Prepared],
        tensors: Tensors,
        threads: Callable[[int], int],
        provider: str,
        pace: Callable[[], object],
    ) -> None:
        """`tensors`: constants and inputs, None for omitted ones. Raises ExecutionFailed, LibraryFailed."""
        graph = model.main
        lowered = Graph(graph, tensors, model.referenced)
        given = [(n, i) for n, i in enumerate(graph.inputs) if tensors.get(i) is not None]
        self.inputs = [_port(n, lowered.input(i), stored_type(lowered.tensor(i)), lowered.tensor(i)) for n, i in given]
        for operation in operations:
            _lower(operation, graph, lowered, tensors)
            pace()
        self.outputs = [_port(n, *lowered.output(i), lowered.tensor(i)) for n, i in enumerate(graph.outputs)]
        self.operations = lowered.writer.operations
        inputs = [(port.name, port.type, port.shape) for port in self.inputs]
        written = lowered.writer.graph(inputs, [(port.name, port.type) for port in self.outputs])
        self.threads, self.work, self.loops = threads(lowered.work), lowered.work, lowered.loops
        self.session = Session(model_bytes(written), lowered.writer.weights, self.threads, provider)
        pace()


def _lower(operation: Prepared, graph: Subgraph, lowered: Graph, tensors: Tensors) -> None:
    try:
        call = placed(operation, graph, tensors, lowered.referenced)
        LOWERINGS[operation.operation.type](Node(lowered, operation.operation, call))
    except REFUSALS as error:
        raise operation.failure(error) from error
    except UnsupportedError as error:
        raise ExecutionFailed(operation.index, operation.operation.type, f"onnxruntime: {error}") from error


def _port(number: int, name: str, type_: str, tensor: Tensor) -> Port:
    return Port(number, name, type_, tensor.shape, byte_size(tensor.type, tensor.shape))
