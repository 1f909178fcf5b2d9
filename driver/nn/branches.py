"""The rules between IF and WHILE and the subgraphs they refer to."""

from collections.abc import Callable, Sequence

import numpy as np

from .errors import InvalidModel
from .model import Model, Operand, Operation, Subgraph
from .types import OperandType, combine_dimensions


def check_branches(model: Model, graph: Subgraph, operation: Operation) -> None:
    """The subgraphs of a control flow operation fit its operands; nothing to check for any other operation."""
    check = _CHECKS.get(operation.type)
    if check is not None:
        inputs = [graph.operands[i] for i in operation.inputs]
        outputs = [graph.operands[i] for i in operation.outputs]
        if len(inputs) < 3 or not outputs:
            raise InvalidModel(f"{len(inputs)} inputs and {len(outputs)} outputs; it has at least 3 and 1")
        check(model, inputs, outputs)


def _check_if(model: Model, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> None:
    _check_condition("the condition (input 0)", inputs[0])
    for word, reference in (("then", inputs[1]), ("else", inputs[2])):
        where = f"the {word} branch"
        graph = model.referenced[reference.value]
        _check_pairs(where, "input", inputs[3:], _operands(graph, graph.inputs))
        _check_pairs(where, "output", outputs, _operands(graph, graph.outputs))


def _check_while(model: Model, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> None:
    condition, body = (model.referenced[reference.value] for reference in inputs[:2])
    carried = inputs[2:]
    _check_pairs("the condition", "input", carried, _operands(condition, condition.inputs))
    if len(condition.outputs) != 1:
        raise InvalidModel(f"the condition has {len(condition.outputs)} outputs; it has to have 1")
    _check_condition("the output of the condition", condition.operands[condition.outputs[0]])
    arguments, results = _operands(body, body.inputs), _operands(body, body.outputs)
    _check_pairs("the body", "input", carried, arguments)
    if not len(outputs) <= len(results) <= len(arguments):
        raise InvalidModel(
            f"the body has {len(results)} outputs; from {len(outputs)}, the outputs here, to {len(arguments)}, its "
            "inputs, are possible"
        )
    _check_pairs("the body", "output", arguments[: len(results)], results)
    _check_pairs("the body", "output", outputs, results[: len(outputs)])


_CHECKS: dict[str, Callable[[Model, Sequence[Operand], Sequence[Operand]], None]] = {
    "IF": _check_if,
    "WHILE": _check_while,
}


def _operands(graph: Subgraph, indices: Sequence[int]) -> list[Operand]:
    return [graph.operands[i] for i in indices]


def _check_condition(where: str, operand: Operand) -> None:
    if operand.type != OperandType.TENSOR_BOOL8 or operand.dimensions != (1,):
        raise InvalidModel(f"{where} is {operand.type.name} {list(operand.dimensions)}; it has to be TENSOR_BOOL8 [1]")


def _check_pairs(where: str, word: str, outer: Sequence[Operand], inner: Sequence[Operand]) -> None:
    if len(outer) != len(inner):
        raise InvalidModel(f"{where} has {len(inner)} {word}s; it has to have {len(outer)}")
    for n, (a, b) in enumerate(zip(outer, inner, strict=True)):
        if reason := _difference(a, b):
            raise InvalidModel(f"{word} {n} of {where} has {reason}")


def _difference(outer: Operand, inner: Operand) -> str | None:
    """Why two operands cannot be one value, or None. Dimensions count only where both are known."""
    pairs = {
        "type": (outer.type.name, inner.type.name),
        "scale": (np.float32(outer.scale), np.float32(inner.scale)),
        "zero point": (outer.zero_point, inner.zero_point),
        "channel quantisation": (outer.channel_quant, inner.channel_quant),
    }
    for word, (a, b) in pairs.items():
        if a != b:
            return f"{word} {b}, where {a} is needed"
    if combine_dimensions(outer.dimensions, inner.dimensions) is None:
        return f"dimensions {list(inner.dimensions)}, where {list(outer.dimensions)} are needed"
    return None
