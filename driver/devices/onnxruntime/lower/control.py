"""IF and WHILE: graphs within the graph, which see the tensors around them. All shapes have to be known beforehand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from driver.devices.lowering.errors import require
from driver.devices.lowering.placing import Tensors, constants, place, prepared
from driver.devices.onnxruntime.lower.node import OrtForm, OrtGraph, OrtNode, stored_type
from driver.nn.operation import Call, Tensor
from driver.nn.types import combine_dimensions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from driver.nn import Operation, Subgraph
    from driver.nn.plan import Prepared
    from driver.nn.types import Dimensions

MOST_LEVELS = 8
"""The deepest nesting of subgraphs. A condition is written twice, before its loop and in it, so each level may double
the graph.
"""
Inputs = list[tuple["Tensor | None", dict[OrtForm, str]]]
"""What a subgraph is given: tensors, and the forms in which they are there."""


MOST_OPERATIONS = 4096
"""The most operations of a subgraph and its own subgraphs, each counted as often as it is used: ONNX repeats it."""


def placed(
    operation: Prepared, graph: Subgraph, tensors: Tensors, referenced: Sequence[Subgraph], level: int = 0
) -> Call:
    """Place an operation as `lowering.place` does, also one that runs subgraphs."""
    kind = operation.operation.type
    if kind not in TABLE:
        return place(operation, graph, tensors)
    numbers, first = _references(operation.operation, graph)
    if not level:
        sizes: dict[int, int] = {}
        require(sum(_size(referenced, n, sizes, 1) for n in numbers) <= MOST_OPERATIONS, "its subgraphs are too large")
    values = [tensors.get(i) for i in operation.operation.inputs[first:]]
    if kind == "WHILE":
        values = _carried(values, len(referenced[numbers[1]].outputs))
    results = [_results(referenced, number, values, level + 1) for number in numbers]
    shapes = _agreed(*(results if kind == "IF" else (results[1], values)))
    outputs = [Tensor.of(graph.operands[i]) for i in operation.operation.outputs]
    for output, shape in zip(outputs, shapes, strict=False):
        output.shape = combine_dimensions(output.shape, shape) or ()
        require(output.shape == shape, "its output has other dimensions than it declares")
    tensors.update(zip(operation.operation.outputs, outputs, strict=True))
    return Call([], outputs)


def _size(referenced: Sequence[Subgraph], number: int, known: dict[int, int], level: int) -> int:
    """Return the operations that a subgraph becomes, about; `known`: of those that were counted before."""
    require(level <= MOST_LEVELS, f"its subgraphs are more than {MOST_LEVELS} deep")
    if number not in known:
        graph = referenced[number]
        inner = [n for o in graph.operations if o.type in TABLE for n in _references(o, graph)[0]]
        known[number] = len(graph.operations) + 2 * sum(_size(referenced, n, known, level + 1) for n in inner)
    return known[number]


def _agreed(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> list[Dimensions]:
    """Return the shapes of results that are one or the other."""
    pairs = list(zip(a, b, strict=False))
    require(all(x is not None and y is not None for x, y in pairs), "an output may be omitted")
    shapes = [(x.shape, y.shape) for x, y in pairs if x is not None and y is not None]
    require(all(x == y for x, y in shapes), "the shape of its output depends on data")
    return [shape for shape, _ in shapes]


def _references(operation: Operation, graph: Subgraph) -> tuple[list[int], int]:
    """Return the numbers of the two subgraphs, and the number of the first input for them."""
    first = 1 if operation.type == "IF" else 0
    return [graph.operands[i].value for i in operation.inputs[first : first + 2]], first + 2


def _carried(values: Sequence[Tensor | None], count: int) -> list[Tensor | None]:
    """Return the state of a loop, which is not constant even if its first value is; and what the loop does not
    change.
    """
    state = [None if value is None else replace(value, array=None, fixed=False) for value in values[:count]]
    return [*state, *values[count:]]


def _inside(graph: Subgraph, values: Sequence[Tensor | None]) -> Tensors:
    """Return the tensors of a subgraph that are known before its operations: constants and what it is given."""
    tensors = constants(graph)
    for i, value in zip(graph.inputs, values, strict=True):
        tensors[i] = value
    return tensors


def _results(
    referenced: Sequence[Subgraph], number: int, values: Sequence[Tensor | None], level: int
) -> list[Tensor | None]:
    """Return what a subgraph gives, with its shapes."""
    require(level <= MOST_LEVELS, f"its subgraphs are more than {MOST_LEVELS} deep")
    graph = referenced[number]
    tensors = _inside(graph, values)
    for operation in prepared(graph):
        placed(operation, graph, tensors, referenced, level=level)
    return [tensors[i] for i in graph.outputs]


def _run(around: OrtGraph, number: int, inputs: Inputs, *, apart: bool) -> OrtGraph:
    """Return a subgraph with its operations, for inputs in their forms; `apart`: as a graph within the one around."""
    from driver.devices.onnxruntime.lower.table import LOWERINGS

    graph = around.referenced[number]
    inner = around.within(graph, _inside(graph, [tensor for tensor, _ in inputs]), apart=apart)
    for i, (_, forms) in zip(graph.inputs, inputs, strict=True):
        for form, name in forms.items():
            inner.put(i, form, name)
    for operation in prepared(graph):
        kind = operation.operation.type
        require(kind in LOWERINGS, f"ONNX has no {kind}")
        call = placed(operation, graph, inner.tensors, around.referenced)
        LOWERINGS[kind](OrtNode(inner, operation.operation, call))
    around.work += inner.work
    return inner


def _results_of(inner: OrtGraph, number: int) -> list[str]:
    """Return the outputs of a subgraph, as they are stored."""
    outputs = inner.referenced[number].outputs
    return [inner.read(i, OrtForm(stored_type(inner.tensor(i)))) for i in outputs]


def _typed(inner: OrtGraph, number: int, names: Sequence[str]) -> list[tuple[str, str]]:
    outputs = inner.referenced[number].outputs
    return [(inner.writer.own(name), stored_type(inner.tensor(i))) for i, name in zip(outputs, names, strict=True)]


def branch(node: OrtNode) -> None:
    """IF."""
    numbers, first = _references(node.operation, node.graph.subgraph)
    inputs = [(node.graph.tensors.get(i), node.graph.forms(i)) for i in node.operation.inputs[first:]]
    condition = node.graph.read(node.operation.inputs[0], OrtForm("BOOL"))
    bodies = []
    for number in numbers:
        inner = _run(node.graph, number, inputs, apart=True)
        bodies.append(inner.writer.graph([], _typed(inner, number, _results_of(inner, number))))
    count = len(node.operation.outputs)
    results = node.graph.writer.node("If", [condition], count, then_branch=bodies[0], else_branch=bodies[1])
    for n, result in enumerate(results):
        node.put(result, n)


def loop(node: OrtNode) -> None:
    """WHILE: the condition is computed before the loop, and after each iteration."""
    graph = node.graph
    (condition, body), first = _references(node.operation, graph.subgraph)
    state, rest = len(graph.referenced[body].outputs), node.operation.inputs[first:]
    given = [(graph.tensors.get(i), graph.forms(i)) for i in rest]
    carried = [graph.tensor(i) for i in rest[:state]]
    start = [graph.read(i, OrtForm(stored_type(graph.tensor(i)))) for i in rest[:state]]
    before = _condition(graph, condition, _state(carried, start) + given[state:])
    names = [graph.writer.names.new() for _ in range(state + 2)]
    inner = _run(graph, body, _state(carried, names[2:]) + given[state:], apart=True)
    after = [inner.writer.own(name) for name in _results_of(inner, body)]
    goes_on = _condition(inner, condition, _state(carried, after) + given[state:])
    types = [stored_type(tensor) for tensor in carried]
    inputs = [(names[0], "INT64", ()), (names[1], "BOOL", (1,))]
    inputs += [(name, type_, tensor.shape) for name, type_, tensor in zip(names[2:], types, carried, strict=True)]
    outputs = [(inner.writer.own(goes_on), "BOOL"), *zip(after, types, strict=True)]
    written = inner.writer.graph(inputs, outputs)
    results = graph.writer.node("Loop", ["", before, *start], state, body=written)
    graph.count_loop()
    for n in range(len(node.operation.outputs)):
        node.put(results[n], n)


def _state(carried: Sequence[Tensor], names: Sequence[str]) -> Inputs:
    """Return the state of a loop in those tensors."""
    loose = [replace(tensor, array=None, fixed=False) for tensor in carried]
    return [(tensor, {OrtForm(stored_type(tensor)): name}) for tensor, name in zip(loose, names, strict=True)]


def _condition(around: OrtGraph, number: int, inputs: Inputs) -> str:
    """Return the value of a condition, computed in the graph around it."""
    inner = _run(around, number, inputs, apart=False)
    (index,) = around.referenced[number].outputs
    return inner.read(index, OrtForm("BOOL"))


TABLE: dict[str, Callable[[OrtNode], None]] = {"IF": branch, "WHILE": loop}
