"""Gives the operations of a model their shapes, one after the other, and finds out which of them can be lowered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from driver.devices.lowering.errors import UnsupportedError, require
from driver.nn import OperandLifeTime, Subgraph
from driver.nn.calls import match_signature
from driver.nn.operation import Call, Tensor
from driver.nn.plan import REFUSALS, Prepared

if TYPE_CHECKING:
    from driver.nn import Model

Tensors = dict[int, "Tensor | None"]
_PROBES = (5, 8)
"""Sizes that stand in for unknown dimensions."""
_OPEN = "; the model leaves sizes open: give them when it is loaded, as in shapes={'x': (1, 3, 320, 320)}"

_CONTROL = ("IF", "WHILE")


def at_once() -> None:
    """Do not pause."""


def prepared(graph: Subgraph, pace: Callable[[], object] = at_once) -> list[Prepared]:
    """Return the operations of a valid graph, with what is known before there are shapes."""
    from driver.nn import OPERATIONS  # not where a file is only read

    result = []
    for index, operation in enumerate(graph.operations):
        kind = OPERATIONS[operation.type]
        signature, slots = match_signature(kind, [graph.operands[i] for i in operation.inputs])
        result.append(Prepared(index, operation, kind, signature.of, slots=slots, packed={}))
        pace()
    return result


def constants(graph: Subgraph, pace: Callable[[], object] = at_once) -> Tensors:
    """Return the constants, by operand; None for omitted operands."""
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
    """Return the operation with the shapes of its operands; its outputs are added to `tensors`. Raise one of REFUSALS,
    UnsupportedError.

    IF and WHILE get the shapes that the model declares; their lowering has to check them.
    """
    outputs = [Tensor.of(graph.operands[i]) for i in operation.operation.outputs]
    if operation.kind.name in _CONTROL:
        require(
            all(graph.operands[i].is_known for i in operation.operation.outputs),
            "the shapes of its outputs are not declared",
        )
        call = Call([tensors.get(i) for i in operation.operation.inputs], outputs)
    else:
        call = Call(operation.inputs(tensors), outputs)
        with np.errstate(all="ignore"):
            operation.place(call, graph.operands)
    tensors.update(zip(operation.operation.outputs, outputs, strict=True))
    return call


Draft = Callable[[Prepared, Call, Subgraph, Tensors], None]
"""Lowers an operation only to find out whether it can be. Raises UnsupportedError."""

Place = Callable[[Prepared, Subgraph, Tensors], Call]
"""`place`, or a device's own function that also places operations with subgraphs."""


def obstacles(model: Model, draft: Draft, place: Place = place) -> list[str | None]:
    """Return for each operation of the main subgraph why it cannot be lowered, for every size of dimensions left
    open.
    """
    dimensions = [d for i in model.main.inputs for d in model.main.operands[i].dimensions]
    probes = _PROBES if 0 in dimensions else _PROBES[:1]
    rows = [_obstacles(model.main, draft, place, probe) for probe in probes]
    return [next(filter(None, found), None) for found in zip(*rows, strict=True)]


def _obstacles(graph: Subgraph, draft: Draft, place: Place, probe: int) -> list[str | None]:
    tensors, operations = constants(graph), prepared(graph)
    needed = {i for op in operations for i, slot in zip(op.operation.inputs, op.slots, strict=True) if slot[-1] != "?"}
    for i in graph.inputs:
        tensor = Tensor.of(graph.operands[i])
        is_known = tensor.type.is_scalar or (tensor.shape and (i in needed or 0 not in tensor.shape))
        tensor.shape = tuple(d or probe for d in tensor.shape)
        tensors[i] = tensor if is_known else None  # an optional input without dimensions counts as omitted
    is_open = any(0 in graph.operands[i].dimensions for i in graph.inputs)
    return [_obstacle(operation, graph, tensors, draft, place=place, more=_OPEN * is_open) for operation in operations]


def _obstacle(
    operation: Prepared, graph: Subgraph, tensors: Tensors, draft: Draft, place: Place, *, more: str
) -> str | None:
    """more: what to add where the sizes may be the cause."""
    try:
        call = place(operation, graph, tensors)
        draft(operation, call, graph, tensors)
    except (UnsupportedError, *REFUSALS) as error:
        for i in operation.operation.outputs:
            declared = Tensor.of(graph.operands[i])
            is_known = declared.shape and 0 not in declared.shape
            tensors.setdefault(i, declared if is_known else None)
        reason = str(error) or f"the library has no form of it ({type(error).__name__})"
        return reason if isinstance(error, UnsupportedError) else reason + more
    return None
