"""The rules a model has to keep before anything is prepared from it.

Here are the rules between operands, operations and subgraphs, with those of control flow; those of one operand are in
`operands`, those of one call in `calls`. Nothing here allocates in proportion to what a model claims, and nothing
recurses along its references.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from itertools import chain

import numpy as np

from .calls import call_version, check_call, without_defaults
from .errors import InvalidModel, did_you_mean
from .extension import extension_of
from .model import Model, Operand, Operation, Subgraph, check_model
from .operands import operand_fault
from .operation import OperationType
from .types import LAST_BASE_CODE, OperandLifeTime, OperandType, combine_dimensions

_L = OperandLifeTime
NAME_LENGTH = 64
"""Characters of a name that a message repeats."""


def validate(model: Model) -> None:
    """Check `model` against the rules of HAL 1.3; `InvalidModel` names the operand or operation, and the rule."""
    check_model(model)
    for number, graph in enumerate((model.main, *model.referenced)):
        with located(number):
            rules = GraphRules(len(graph.operands), len(graph.operations), len(model.referenced), is_main=not number)
            for operand in graph.operands:
                rules.operand(operand)
            rules.lists(graph.inputs, graph.outputs)
            for operation in graph.operations:
                rules.operation(operation)
            rules.end()
    validate_references(model)


def validate_references(model: Model, pace: Callable[[], object] = lambda: None) -> None:
    """Check the rules between subgraphs, of a model whose subgraphs keep `GraphRules`. `pace`: is called often."""
    for number, graph in enumerate((model.main, *model.referenced)):
        with located(number):
            _check_control_flow(model, graph, pace)
    _check_references(model)


@contextmanager
def located(number: int) -> Iterator[None]:
    """Say of what is wrong within that it is in that subgraph: 0 is the main one, n the referenced one n - 1."""
    try:
        yield
    except InvalidModel as error:
        if not number:
            raise
        raise InvalidModel(f"referenced subgraph {number - 1}, {error}") from None


class GraphRules:
    """The rules of one subgraph, checked as its parts arrive: all operands, then the lists, all operations, the end.

    Every method raises InvalidModel for the first rule that is broken.
    """

    def __init__(self, n_operands: int, n_operations: int, referenced: int, *, is_main: bool) -> None:
        """`referenced`: the number of subgraphs beside the main one."""
        if is_main and not (n_operands and n_operations):
            raise InvalidModel("a model needs at least one operand and one operation")
        self._referenced = referenced
        self._operands: list[Operand] = []
        self._waiting: list[bool] = []  # of each operand: whether an operation has to write it, and none has yet
        self._readers: list[int] = []
        self._operations = 0

    def operand(self, operand: Operand) -> None:
        """Check the next operand."""
        if reason := operand_fault(operand, self._referenced):
            raise InvalidModel(f"operand {len(self._operands)} ({operand.type.name}): {reason}")
        self._operands.append(operand)
        self._waiting.append(operand.lifetime.is_written)
        self._readers.append(0)

    def lists(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Check the lists of the subgraph's own inputs and outputs."""
        self._lists = (inputs, _L.SUBGRAPH_INPUT, "input"), (outputs, _L.SUBGRAPH_OUTPUT, "output")
        for listed, lifetime, word in self._lists:
            _check_list(self._operands, listed, lifetime, word)

    def operation(self, operation: Operation) -> None:
        """Check the next operation."""
        index, self._operations = self._operations, self._operations + 1
        _check_operation(self._operands, index, operation)
        for i in operation.inputs:
            self._readers[i] += 1
            if self._waiting[i]:
                raise InvalidModel(
                    f"{_label(index, operation)}: reads operand {i} before it is written; put operations in executable "
                    "order"
                )
        for i in operation.outputs:
            if not self._waiting[i]:
                raise InvalidModel(f"{_label(index, operation)}: operand {i} is written a second time")
            self._waiting[i] = False

    def end(self) -> None:
        """There are no more."""
        for listed, lifetime, word in self._lists:
            missing = {i for i, o in enumerate(self._operands) if o.lifetime == lifetime}.difference(listed)
            if missing:
                raise InvalidModel(f"operand {min(missing)} has lifetime {lifetime.name} but is not listed as {word}")
        for i, (operand, is_waiting, count) in enumerate(
            zip(self._operands, self._waiting, self._readers, strict=True)
        ):
            if is_waiting:
                raise InvalidModel(
                    f"operand {i} ({operand.type.name}): lifetime {operand.lifetime.name}, but never written"
                )
            if operand.number_of_consumers not in (None, count):
                raise InvalidModel(
                    f"operand {i} ({operand.type.name}): number_of_consumers is {operand.number_of_consumers}, "
                    f"not {count}"
                )


def required_version(model: Model) -> int:
    """Return the oldest HAL version 1.x, as x, that a valid `model` can be put to.

    Trailing inputs that the HAL introduced later count only where they say something other than their default: a
    client of an older device leaves them out. Constants that nothing reads do not count.
    """
    graphs = (model.main, *model.referenced)
    listed = (g.operands[i].type.since for g in graphs for i in (*g.inputs, *g.outputs))
    calls = (operation_version(g, op) for g in graphs for op in g.operations)
    return max(chain(calls, listed, [1 if model.relaxed else 0, 3 if model.referenced else 0]))


def needed_inputs(graph: Subgraph, operation: Operation) -> int:
    """Return how many inputs it has without those at the end that say what an older HAL does."""
    if extension_of(operation.type) is not None:
        return len(operation.inputs)
    return len(without_defaults(_operations()[operation.type], [graph.operands[i] for i in operation.inputs]))


def operation_version(graph: Subgraph, operation: Operation) -> int:
    """Return the oldest HAL version 1.x, as x, that has this operation of a valid graph."""
    if extension_of(operation.type) is not None:
        return 2
    kind = _operations()[operation.type]
    inputs = without_defaults(kind, [graph.operands[i] for i in operation.inputs])
    return call_version(kind, inputs, [graph.operands[i] for i in operation.outputs])


def _check_control_flow(model: Model, graph: Subgraph, pace: Callable[[], object]) -> None:
    """Check control flow, once the operands and the lists of all subgraphs are known to be sound."""
    for index, operation in enumerate(graph.operations):
        pace()
        try:
            check_branches(model, graph, operation)
        except InvalidModel as error:
            raise InvalidModel(f"{_label(index, operation)}: {error}") from None


def _label(index: int, operation: Operation) -> str:
    return f"operation {index} ({operation.type[:NAME_LENGTH]})"


def _check_operation(operands: Sequence[Operand], index: int, operation: Operation) -> None:
    for i in chain(operation.inputs, operation.outputs):
        if not 0 <= i < len(operands):
            raise InvalidModel(f"{_label(index, operation)}: operand {i} does not exist, there are {len(operands)}")
    outputs = [operands[i] for i in operation.outputs]
    if extension_of(operation.type) is None:  # what an extension's operation takes, its devices know
        try:
            check_call(_kind(operation.type), [operands[i] for i in operation.inputs], outputs)
        except InvalidModel as error:
            raise InvalidModel(f"{_label(index, operation)}: {error}") from None
    for i, operand in zip(operation.outputs, outputs, strict=True):
        if not operand.lifetime.is_written:
            raise InvalidModel(
                f"{_label(index, operation)}: writes operand {i}, whose lifetime is {operand.lifetime.name}"
            )


def _operations() -> Mapping[str, OperationType]:
    """Return the table of all operations: made for the first model of operations, and for no model file."""
    from .ops import OPERATIONS

    return OPERATIONS


def _kind(name: str) -> OperationType:
    operations = _operations()
    if name in operations:
        return operations[name]
    if name.isdecimal() and len(name) <= NAME_LENGTH and int(name) > LAST_BASE_CODE:
        raise InvalidModel("the code of an extension's operation; give its full name, as operation_of does")
    raise InvalidModel(f"no such operation here{did_you_mean(name[:NAME_LENGTH], operations)}")


def _check_list(operands: Sequence[Operand], listed: Sequence[int], lifetime: OperandLifeTime, word: str) -> None:
    """Check that `listed` names operands of one lifetime, each once."""
    if len(set(listed)) != len(listed):
        twice = next(i for i, count in Counter(listed).items() if count > 1)
        raise InvalidModel(f"operand {twice} is listed twice among the {word}s")
    for i in listed:
        if not 0 <= i < len(operands):
            raise InvalidModel(f"{word} operand {i} does not exist, there are {len(operands)}")
        if operands[i].lifetime != lifetime:
            raise InvalidModel(f"{word} operand {i} has lifetime {operands[i].lifetime.name}, not {lifetime.name}")


def _check_references(model: Model) -> None:
    """Check that no subgraph refers to itself, directly or through others."""
    refers = {n: {o.value for o in g.operands if o.lifetime == _L.SUBGRAPH} for n, g in enumerate(model.referenced)}
    try:
        TopologicalSorter(refers).prepare()
    except CycleError as error:
        culprit = min(error.args[1])
        raise InvalidModel(f"referenced subgraph {culprit} refers to itself, directly or through others") from None


def check_branches(model: Model, graph: Subgraph, operation: Operation) -> None:
    """Check that the subgraphs of a control flow operation fit its operands; other operations have none."""
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
        _check_pairs(where, "input", inputs[3:], graph, listed=graph.inputs)
        _check_pairs(where, "output", outputs, graph, listed=graph.outputs)


def _check_while(model: Model, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> None:
    condition, body = (model.referenced[reference.value] for reference in inputs[:2])
    carried = inputs[2:]
    _check_pairs("the condition", "input", carried, condition, listed=condition.inputs)
    if len(condition.outputs) != 1:
        raise InvalidModel(f"the condition has {len(condition.outputs)} outputs; it has to have 1")
    _check_condition("the output of the condition", condition.operands[condition.outputs[0]])
    _check_pairs("the body", "input", carried, body, listed=body.inputs)
    count = len(body.outputs)
    if not len(outputs) <= count <= len(body.inputs):
        raise InvalidModel(
            f"the body has {count} outputs; from {len(outputs)}, the outputs here, to {len(body.inputs)}, its "
            "inputs, are possible"
        )
    arguments = [body.operands[i] for i in body.inputs[:count]]
    _check_pairs("the body", "output", arguments, body, listed=body.outputs)
    _check_pairs("the body", "output", outputs, body, listed=body.outputs[: len(outputs)])


_CHECKS: dict[str, Callable[[Model, Sequence[Operand], Sequence[Operand]], None]] = {
    "IF": _check_if,
    "WHILE": _check_while,
}


def _check_condition(where: str, operand: Operand) -> None:
    if operand.type != OperandType.TENSOR_BOOL8 or operand.dimensions != (1,):
        raise InvalidModel(f"{where} is {operand.type.name} {list(operand.dimensions)}; it has to be TENSOR_BOOL8 [1]")


def _check_pairs(where: str, word: str, outer: Sequence[Operand], graph: Subgraph, listed: Sequence[int]) -> None:
    """Check the pairs, their numbers first: a model may refer many times to a subgraph with many inputs."""
    if len(outer) != len(listed):
        raise InvalidModel(f"{where} has {len(listed)} {word}s; it has to have {len(outer)}")
    for n, (operand, i) in enumerate(zip(outer, listed, strict=True)):
        if reason := _difference(operand, graph.operands[i]):
            raise InvalidModel(f"{word} {n} of {where} has {reason}")


def _difference(outer: Operand, inner: Operand) -> str | None:
    """Say why two operands cannot be one value, or None. Dimensions count only where both are known."""
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
