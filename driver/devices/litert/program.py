"""A model lowered and compiled for inputs of given shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from driver.devices import lowering
from driver.devices.litert.lower import LOWERINGS, Graph, Node
from driver.devices.litert.lower.node import stored_type
from driver.devices.lowering import Tensors, UnsupportedError, place, require
from driver.nn import ExecutionFailed
from driver.nn.plan import REFUSALS, Prepared
from driver.nn.types import byte_size
from fmq._core import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from driver.devices.litert.library import Compiled
    from driver.devices.litert.weights import Image
    from driver.nn import Model, Subgraph
    from driver.nn.operation import Call, Tensor


def supported(model: Model) -> list[bool]:
    """For each operation of the main subgraph, whether it can be lowered; for every size of dimensions left open."""
    return lowering.supported(model, _draft)


def _draft(operation: Prepared, call: Call, graph: Subgraph, tensors: Tensors) -> None:
    kind = operation.operation.type
    require(kind in LOWERINGS, "TFLite has no such operation")
    lowered = Graph(graph, tensors, is_draft=True)
    for i in operation.operation.inputs:
        if (tensor := tensors.get(i)) is not None and not tensor.fixed:
            lowered.input(i)
    LOWERINGS[kind](Node(lowered, operation.operation, call))
    for i in operation.operation.outputs:
        lowered.output(i)


class Port(NamedTuple):
    """An input or output of the compiled model."""

    number: int  #: among the model's inputs or outputs
    type: str
    shape: tuple[int, ...]
    nbytes: int
    copied: bool = False  #: it is looked at in private memory


class Program:
    """The compiled model, its ports, and the turn that executions of it wait for."""

    def __init__(
        self,
        model: Model,
        operations: Sequence[Prepared],
        tensors: Tensors,
        threads: Callable[[int], int],
        compiled: Callable[[Image, int], Compiled],
        pace: Callable[[], object],
    ) -> None:
        """`tensors`: constants and inputs, None for omitted ones. Raises ExecutionFailed, LibraryFailed."""
        graph = model.main
        lowered = Graph(graph, tensors)
        given = [(n, i) for n, i in enumerate(graph.inputs) if tensors.get(i) is not None]
        inputs = [lowered.input(i) for _, i in given]
        for operation in operations:
            _lower(operation, graph, lowered, tensors)
            pace()
        outputs = [lowered.output(i) for i in graph.outputs]
        self.shapes = [lowered.tensor(i).shape for i in graph.outputs]
        self.inputs = [_port(n, lowered.tensor(i), copied=i in lowered.copied) for n, i in given]
        self.outputs = [
            _port(n, lowered.tensor(i), type_)
            for n, (i, (_, type_)) in enumerate(zip(graph.outputs, outputs, strict=True))
        ]
        self.operations = lowered.writer.names
        self.threads = threads(lowered.work)
        image = lowered.writer.finish(inputs, [tensor for tensor, _ in outputs], pace)
        self.copied_weights = image.bytes.nbytes
        self.compiled = compiled(image, self.threads)
        self.turn = ffi.new("burst_turn *")
        lib.burst_turn_init(self.turn)


def _lower(operation: Prepared, graph: Subgraph, lowered: Graph, tensors: Tensors) -> None:
    try:
        call = place(operation, graph, tensors)
        LOWERINGS[operation.operation.type](Node(lowered, operation.operation, call))
    except REFUSALS as error:
        raise operation.failure(error) from error
    except UnsupportedError as error:
        raise ExecutionFailed(operation.index, operation.operation.type, f"litert: {error}") from error


def _port(number: int, tensor: Tensor, type_: str | None = None, *, copied: bool = False) -> Port:
    return Port(number, type_ or stored_type(tensor), tensor.shape, byte_size(tensor.type, tensor.shape), copied)
