"""What devices that hand models to another library have in common: operations with the shapes of their operands, one
after the other, and the question which of them can be lowered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from driver.devices.lowering.errors import UnsupportedError, require
from driver.nn import OPERATIONS, OperandLifeTime, Subgraph
from driver.nn.calls import match_signature
from driver.nn.operation import Call, Tensor
from driver.nn.plan import REFUSALS, Prepared

if TYPE_CHECKING:
    from driver.nn import Model

Tensors = dict[int, "Tensor | None"]
_PROBES = (5, 8)
"""Stand-ins for unknown dimensions."""

_CONTROL = ("IF", "WHILE")


def at_once() -> None:
    """Nobody else is waiting."""


def prepared(graph: Subgraph, pace: Callable[[], object] = at_once) -> list[Prepared]:
    """What is known of the operations before there are shapes. `graph` is valid."""
    result = []
    for index, operation in enumerate(graph.operations):
        kind = OPERATIONS[operation.type]
        signature, slots = match_signature(kind, [graph.operands[i] for i in operation.inputs])
        result.append(Prepared(index, operation, kind, signature.of, slots, {}))
        pace()
    return result


def constants(graph: Subgraph, pace: Callable[[], object] = at_once) -> Tensors:
    """By operand; None for those that are omitted."""
    found: Tensors = {}
    for index, operand in enumerate(graph.operands):
        if operand.lifetime.is_constant:
            found[index] = Tensor.of(operand)
            pace()
        elif operand.lifetime == OperandLifeTime.NO_VALUE:
            found[index] = None
        elif operand.lifetime == OperandLifeTime.SUBGRAPH:
            found[index] = Tensor.of(operand)
    return found


def place(operation: Prepared, graph: Subgraph, tensors: Tensors) -> Call:
    """The operation with the shapes of its operands; its outputs are added to `tensors`. Raises one of REFUSALS,
    UnsupportedError.

    What control flow gives has the shapes that it declares: its lowering has to look whether that is so.
    """
    outputs = [Tensor.of(graph.operands[i]) for i in operation.operation.outputs]
    if operation.kind.name in _CONTROL:
        require(all(graph.operands[i].is_known for i in operation.operation.outputs), "its shapes are not declared")
        call = Call([tensors.get(i) for i in operation.operation.inputs], outputs)
    else:
        call = Call(operation.inputs(tensors), outputs)
        with np.errstate(all="ignore"):
            operation.place(call, graph.operands)
    tensors.update(zip(operation.operation.outputs, outputs, strict=True))
    return call


Draft = Callable[[Prepared, Call, Subgraph, Tensors], None]
"""Lowers an operation for a look only. Raises UnsupportedError."""

Place = Callable[[Prepared, Subgraph, Tensors], Call]
"""`place`, or what a device has in its stead that places operations with subgraphs, too."""


def supported(model: Model, draft: Draft, place: Place = place) -> list[bool]:
    """For each operation of the main subgraph, whether it can be lowered; for every size of dimensions left open."""
    dimensions = [d for i in model.main.inputs for d in model.main.operands[i].dimensions]
    probes = _PROBES if 0 in dimensions else _PROBES[:1]
    return [
        all(found) for found in zip(*(_supported(model.main, draft, place, probe) for probe in probes), strict=True)
    ]


def _supported(graph: Subgraph, draft: Draft, place: Place, probe: int) -> list[bool]:
    tensors, operations = constants(graph), prepared(graph)
    needed = {i for op in operations for i, slot in zip(op.operation.inputs, op.slots, strict=True) if slot[-1] != "?"}
    for i in graph.inputs:
        tensor = Tensor.of(graph.operands[i])
        is_known = tensor.type.is_scalar or (tensor.shape and (i in needed or 0 not in tensor.shape))
        tensor.shape = tuple(d or probe for d in tensor.shape)
        tensors[i] = tensor if is_known else None  # what may be omitted and is not described is taken to be
    return [_can_lower(operation, graph, tensors, draft, place) for operation in operations]


def _can_lower(operation: Prepared, graph: Subgraph, tensors: Tensors, draft: Draft, place: Place) -> bool:
    try:
        call = place(operation, graph, tensors)
        draft(operation, call, graph, tensors)
    except (UnsupportedError, *REFUSALS):
        for i in operation.operation.outputs:
            declared = Tensor.of(graph.operands[i])
            is_known = declared.shape and 0 not in declared.shape
            tensors.setdefault(i, declared if is_known else None)
        return False
    return True
