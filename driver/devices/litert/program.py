"""A model lowered and compiled for inputs of given shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from driver.devices.litert.library import Compiled
from driver.devices.litert.lower import LOWERINGS, Graph, Node, UnsupportedError
from driver.devices.litert.lower.node import require, stored_type
from driver.nn import OPERATIONS, ExecutionFailed, OperandLifeTime
from driver.nn.calls import match_signature
from driver.nn.operation import Call, Tensor
from driver.nn.plan import REFUSALS, Prepared
from driver.nn.types import byte_size
from fmq._core import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from driver.nn import Model, Subgraph

Tensors = dict[int, "Tensor | None"]
_PROBES = (5, 8)
"""Stand-ins for unknown dimensions."""


def _at_once() -> None:
    """Nobody else is waiting."""


def prepared(graph: Subgraph, pace: Callable[[], object] = _at_once) -> list[Prepared]:
    """What is known of the operations before there are shapes. `graph` is valid."""
    result = []
    for index, operation in enumerate(graph.operations):
        kind = OPERATIONS[operation.type]
        signature, slots = match_signature(kind, [graph.operands[i] for i in operation.inputs])
        result.append(Prepared(index, operation, kind, signature.of, slots, {}))
        pace()
    return result


def constants(graph: Subgraph, pace: Callable[[], object] = _at_once) -> Tensors:
    """By operand; None for those that are omitted."""
    found: Tensors = {}
    for index, operand in enumerate(graph.operands):
        if operand.lifetime.is_constant:
            found[index] = Tensor.of(operand)
            pace()
        elif operand.lifetime == OperandLifeTime.NO_VALUE:
            found[index] = None
    return found


def place(operation: Prepared, graph: Subgraph, tensors: Tensors) -> Call:
    """The operation with the shapes of its operands; its outputs are added to `tensors`. Raises one of REFUSALS."""
    outputs = [Tensor.of(graph.operands[i]) for i in operation.operation.outputs]
    call = Call(operation.inputs(tensors), outputs)
    with np.errstate(all="ignore"):
        operation.place(call, graph.operands)
    tensors.update(zip(operation.operation.outputs, outputs, strict=True))
    return call


def supported(model: Model) -> list[bool]:
    """For each operation of the main subgraph, whether it can be lowered; for every size of dimensions left open."""
    dimensions = [d for i in model.main.inputs for d in model.main.operands[i].dimensions]
    probes = _PROBES if 0 in dimensions else _PROBES[:1]
    return [all(found) for found in zip(*(_supported(model.main, probe) for probe in probes), strict=True)]


def _supported(graph: Subgraph, probe: int) -> list[bool]:
    tensors, operations = constants(graph), prepared(graph)
    needed = {i for op in operations for i, slot in zip(op.operation.inputs, op.slots, strict=True) if slot[-1] != "?"}
    for i in graph.inputs:
        tensor = Tensor.of(graph.operands[i])
        is_known = tensor.type.is_scalar or (tensor.shape and (i in needed or 0 not in tensor.shape))
        tensor.shape = tuple(d or probe for d in tensor.shape)
        tensors[i] = tensor if is_known else None  # what may be omitted and is not described is taken to be
    return [_can_lower(operation, graph, tensors) for operation in operations]


def _can_lower(operation: Prepared, graph: Subgraph, tensors: Tensors) -> bool:
    kind, written = operation.operation.type, operation.operation.outputs
    try:
        require(kind in LOWERINGS, "TFLite has no such operation")
        call = place(operation, graph, tensors)
        lowered = Graph(graph, tensors, is_draft=True)
        for i in operation.operation.inputs:
            if (tensor := tensors.get(i)) is not None and not tensor.fixed:
                lowered.input(i)
        LOWERINGS[kind](Node(lowered, operation.operation, call))
        for i in written:
            lowered.output(i)
    except (UnsupportedError, *REFUSALS):
        for i in written:
            declared = Tensor.of(graph.operands[i])
            is_known = declared.shape and 0 not in declared.shape
            tensors.setdefault(i, declared if is_known else None)
        return False
    return True


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
        self.compiled = Compiled(image, self.threads)
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
