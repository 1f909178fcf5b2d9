"""IF and WHILE: the subgraphs that they refer to become subgraphs of the flatbuffer.

Their inputs and outputs have the form that clients see, so that each subgraph fits every other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from driver.devices.litert.cuts import products
from driver.devices.litert.lower.node import LiteRtForm, LiteRtGraph, LiteRtNode, Lowering, Nested, stored_type
from driver.devices.lowering.errors import UnsupportedError, require
from driver.devices.lowering.placing import constants, place, prepared
from driver.nn.operation import Tensor
from driver.nn.plan import REFUSALS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from driver.nn import Model, Subgraph
    from driver.nn.types import Dimensions

MOST_NESTED = 256
"""The most subgraphs that are lowered for one model: one for each way in which they are used."""

MOST_DEEP = 16
"""The deepest nesting of subgraphs: TFLite runs each inside the other."""

_CONDITION, _BODY, _BRANCH = "condition", "body", "branch"


def if_(node: LiteRtNode) -> None:
    """Lower one of two branches, as a byte says."""
    count = len(node.operation.inputs)
    _check_steered(node, (0, *range(3, count)))
    require(
        not node.graph.is_output(node.operation.inputs[0]), "its condition lies in memory that the client may write"
    )
    shapes = _shapes(node, 3)
    branches = [_nested(node, i, shapes, _BRANCH) for i in (1, 2)]
    wanted = tuple(node.output(n).shape for n in range(len(node.operation.outputs)))
    require(
        all(branch.shapes == wanted for branch in branches),
        "the outputs of its branches have other shapes than its own",
    )
    sources = [node.read(0, "BOOL"), *(_read(node, i) for i in range(3, count))]
    results = [node.write(n, stored_type(node.output(n))) for n in range(len(wanted))]
    then, otherwise = (branch.number for branch in branches)
    node.emit("IF", sources, results, "If", thenSubgraphIndex=then, elseSubgraphIndex=otherwise)
    node.graph.loops += max(branch.loops for branch in branches)


def while_(node: LiteRtNode) -> None:
    """TFLite returns all loop variables; those beyond the outputs are not read."""
    count, given = len(node.operation.inputs), len(node.operation.outputs)
    _check_steered(node, range(2, count))
    shapes = _shapes(node, 2)
    require(
        tuple(node.output(n).shape for n in range(given)) == shapes[:given],
        "the shapes of its outputs differ from those of its inputs",
    )
    condition, body = _nested(node, 0, shapes, _CONDITION), _nested(node, 1, shapes, _BODY)
    require(condition.shapes == ((1,),), "its condition is not one byte")
    require(body.shapes == shapes, "its body changes the shape of a loop variable")
    sources = [_read(node, i) for i in range(2, count)]
    results = [node.write(n, stored_type(node.output(n))) for n in range(given)]
    results += [_like(node, i) for i in range(2 + given, count)]
    numbers = {"condSubgraphIndex": condition.number, "bodySubgraphIndex": body.number}
    node.emit("WHILE", sources, results, "While", **numbers)
    node.graph.loops += 1


def _check_steered(node: LiteRtNode, inputs: Sequence[int]) -> None:
    tensors = [node.input(i) for i in inputs]
    require(not all(tensor.fixed for tensor in tensors), "all its inputs are constants, and TFLite folds it away")


def _shapes(node: LiteRtNode, first: int) -> tuple[Dimensions, ...]:
    return tuple(node.input(i).shape for i in range(first, len(node.operation.inputs)))


def _read(node: LiteRtNode, i: int) -> int:
    return node.read(i, stored_type(node.input(i)))


def _like(node: LiteRtNode, i: int) -> int:
    return node.graph.like(node.operation.inputs[i], LiteRtForm(stored_type(node.input(i))))


def _nested(node: LiteRtNode, i: int, shapes: tuple[Dimensions, ...], use: str) -> Nested:
    """Return the subgraph that input `i` refers to, lowered for such a use. Raise UnsupportedError."""
    graph, lowering = node.graph, node.graph.lowering
    number = graph.subgraph.operands[node.operation.inputs[i]].value
    key = number, shapes, use
    if key not in lowering.nested:
        require(len(lowering.nested) < MOST_NESTED, f"its model has more than {MOST_NESTED} subgraphs")
        lowering.nested[key] = None  # until it was lowered
        lowering.nested[key] = _lowered(lowering, *key, graph.depth + 1)
    found = lowering.nested[key]
    require(found is not None, "a subgraph of it cannot be lowered")
    assert found is not None
    return found


def _lowered(lowering: Lowering, number: int, shapes: tuple[Dimensions, ...], use: str, depth: int) -> Nested:
    """Lower a subgraph for inputs of these shapes. Raise UnsupportedError."""
    require(depth <= MOST_DEEP, f"its subgraphs are more than {MOST_DEEP} deep")
    subgraph = lowering.model.referenced[number]
    tensors = constants(subgraph)
    for i, shape in zip(subgraph.inputs, shapes, strict=True):
        tensors[i] = replace(Tensor.of(subgraph.operands[i]), shape=shape)
    graph = LiteRtGraph(subgraph, tensors, lowering, depth=depth)
    graph.writer.inputs = [graph.input(i) for i in subgraph.inputs]
    for operation in prepared(subgraph):
        kind = operation.operation.type
        require(kind in lowering.table, f"TFLite has no {kind}")
        try:
            call = place(operation, subgraph, tensors)
            lowering.products += products(operation.operation, call)
            lowering.table[kind](LiteRtNode(graph, operation.operation, call))
        except REFUSALS as error:
            raise UnsupportedError(str(error)) from error
    return _ended(graph, use)


def _ended(graph: LiteRtGraph, use: str) -> Nested:
    """Give the subgraph the outputs that TFLite expects of it."""
    section, outputs = graph.writer, graph.subgraph.outputs
    section.outputs = [graph.read(i, _form(graph, i, use)) for i in outputs]
    shapes = tuple(graph.tensor(i).shape for i in outputs)
    if use == _BODY:  # also the loop variables that it does not change
        section.outputs += section.inputs[len(outputs) :]
        shapes += tuple(graph.tensor(i).shape for i in graph.subgraph.inputs[len(outputs) :])
    return Nested(section.number, graph.loops, shapes)


def _form(graph: LiteRtGraph, index: int, use: str) -> LiteRtForm:
    return LiteRtForm("BOOL" if use == _CONDITION else stored_type(graph.tensor(index)))


def looping(model: Model) -> set[int]:
    """Return the operations of the main subgraph that run a WHILE, themselves or in a branch."""
    found: set[int] = set()
    while more := {n for n, graph in enumerate(model.referenced) if _loops(graph, found)} - found:
        found |= more
    return _loops(model.main, found)


def _loops(graph: Subgraph, known: set[int]) -> set[int]:
    """Return its operations that run a WHILE; `known`: subgraphs that do."""
    return {
        n
        for n, operation in enumerate(graph.operations)
        if operation.type == "WHILE"
        or (operation.type == "IF" and {graph.operands[i].value for i in operation.inputs[1:3]} & known)
    }


TABLE: dict[str, Callable[[LiteRtNode], None]] = {"IF": if_, "WHILE": while_}
