"""The mutations of VTS: every way to break a valid model or request. A device must refuse each with INVALID_ARGUMENT.

Each mutation breaks one rule of the HAL and no other, as far as that is possible: consumer counts are recomputed
unless they are the mutation, and an operand of another type gets dimensions, quantisation and a value that are valid
for that type.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from burst import Request
from driver.nn import Model, Operand, OperandLifeTime, OperandType, Operation, Subgraph
from driver.nn.operation import LETTERS
from driver.nn.types import ZERO_POINTS, byte_size

_Item = TypeVar("_Item")
_L, _T = OperandLifeTime, OperandType
_BASE_TYPES = tuple(t for t in OperandType if t < OperandType.OEM)
_LARGEST_VALUE = 1 << 20
"""Limit for a constant that a mutation makes; larger operands are left out."""
_TYPE_CODES = {"MIN-1": -1, "FUNDAMENTAL_MAX+1": 16, "OEM_MIN-1": 9999, "OEM_MAX+1": 10002}
_OPERATION_CODES = {"FUNDAMENTAL_MAX+1": 102, "OEM_MIN-1": 9999, "OEM_MAX+1": 10001}


@dataclass(frozen=True, slots=True)
class Mutation:
    """One broken model.

    name: such as "operand-type/3/OEM_MAX+1": the kind of mutation, the operand or operation, and the change;
        preceded by "subgraph-N/" in a referenced subgraph.
    make: returns the model, or raises `InvalidModel` where the record itself rejects the mutation, so that there is
        nothing to send.
    """

    name: str
    make: Callable[[], Model]


Change = tuple[str, Callable[[], Subgraph]]
"""Name of a mutation within its subgraph, and a function that makes the mutated subgraph."""


def model_mutations(model: Model) -> Iterator[Mutation]:
    """Yield all mutations of VTS's ValidateModel that apply to the valid `model`, subgraph by subgraph."""
    for number, graph in enumerate((model.main, *model.referenced)):
        prefix = f"subgraph-{number - 1}/" if number else ""
        counted = tuple(replace(o, number_of_consumers=None) for o in graph.operands)
        for kind in _KINDS:
            for name, change in kind(replace(graph, operands=counted)):
                yield Mutation(prefix + name, partial(_with_graph, model, number, change))


def request_mutations(request: Request) -> Iterator[tuple[str, Request]]:
    """Yield all mutations of VTS's ValidateRequest: the request without each of its inputs, and without each output."""
    for n in range(len(request.inputs)):
        yield f"remove-input/{n}", request._replace(inputs=_without(request.inputs, n))
    for n in range(len(request.outputs)):
        yield f"remove-output/{n}", request._replace(outputs=_without(request.outputs, n))


def _with_graph(model: Model, number: int, change: Callable[[], Subgraph]) -> Model:
    graphs = [model.main, *model.referenced]
    graphs[number] = change()
    return replace(model, main=graphs[0], referenced=tuple(graphs[1:]))


def _without(items: Sequence[_Item], n: int) -> tuple[_Item, ...]:
    return (*items[:n], *items[n + 1 :])


def _with(items: Sequence[_Item], n: int, item: _Item) -> tuple[_Item, ...]:
    return (*items[:n], item, *items[n + 1 :])


def _operand(graph: Subgraph, index: int, **changes: Any) -> Subgraph:
    """Return `graph` with one operand changed."""
    return replace(graph, operands=_with(graph.operands, index, replace(graph.operands[index], **changes)))


def _operation(graph: Subgraph, index: int, **changes: Any) -> Subgraph:
    """Return `graph` with one operation changed."""
    return replace(graph, operations=_with(graph.operations, index, replace(graph.operations[index], **changes)))


def _appended(graph: Subgraph, *operands: Operand) -> Subgraph:
    return replace(graph, operands=(*graph.operands, *operands))


def _execution_order(graph: Subgraph) -> Iterator[Change]:
    """Move a reader of a computed operand to the front, or a writer of an operand to the end."""
    read = {i for operation in graph.operations for i in operation.inputs}
    for n, operation in enumerate(graph.operations):
        others = _without(graph.operations, n)
        if any(graph.operands[i].lifetime.is_written for i in operation.inputs):
            yield f"execution-order/{n}/first", partial(replace, graph, operations=(operation, *others))
        if read.intersection(operation.outputs):
            yield f"execution-order/{n}/last", partial(replace, graph, operations=(*others, operation))


def _operand_type(graph: Subgraph) -> Iterator[Change]:
    for i in range(len(graph.operands)):
        for word, code in _TYPE_CODES.items():
            yield f"operand-type/{i}/{word}", partial(_operand, graph, i, type=code)


def _operand_rank(graph: Subgraph) -> Iterator[Change]:
    """Give scalars dimensions. (Tensors may have none since HAL 1.2.)"""
    for i, operand in enumerate(graph.operands):
        if operand.type.is_scalar:
            yield f"operand-rank/{i}/1", partial(_operand, graph, i, dimensions=(1,))


def _operand_scale(graph: Subgraph) -> Iterator[Change]:
    for i, operand in enumerate(graph.operands):
        wrong = 0.0 if operand.type.is_quantised else -1.0 if operand.type == _T.TENSOR_INT32 else 1.0
        yield f"operand-scale/{i}/{wrong}", partial(_operand, graph, i, scale=wrong)


def _operand_zero_point(graph: Subgraph) -> Iterator[Change]:
    for i, operand in enumerate(graph.operands):
        for wrong in _wrong_zero_points(operand.base_type):
            yield f"operand-zero-point/{i}/{wrong}", partial(_operand, graph, i, zero_point=wrong)


def _wrong_zero_points(kind: OperandType) -> list[int]:
    if not kind.is_quantised:
        return [1]
    info, allowed = np.iinfo(kind.dtype), ZERO_POINTS[kind]
    beyond = [int(info.min) - 1, int(info.max) + 1]
    return [beyond[0], -1, 1, beyond[1]] if allowed == (0, 0) else beyond


def _operand_lifetime(graph: Subgraph) -> Iterator[Change]:
    """Give operands another lifetime, and list them as inputs and outputs accordingly."""
    for i, operand in enumerate(graph.operands):
        for lifetime in _wrong_lifetimes(operand):
            yield f"operand-lifetime/{i}/{lifetime.name}", partial(_relisted, graph, i, lifetime)


def _wrong_lifetimes(operand: Operand) -> list[OperandLifeTime]:
    if operand.lifetime.is_written:
        return [_L.SUBGRAPH_INPUT, *([_L.CONSTANT_COPY] if _can_be_constant(operand) else [])]
    given = operand.lifetime.is_constant or operand.lifetime == _L.SUBGRAPH_INPUT
    return [_L.TEMPORARY_VARIABLE, _L.SUBGRAPH_OUTPUT] if given else []


def _can_be_constant(operand: Operand) -> bool:
    is_known = operand.type.is_scalar or (bool(operand.dimensions) and 0 not in operand.dimensions)
    return is_known and byte_size(operand.type, operand.dimensions) <= _LARGEST_VALUE


def _with_lifetime(operand: Operand, lifetime: OperandLifeTime) -> Operand:
    value = np.zeros(operand.dimensions, operand.type.dtype) if lifetime.is_constant else None
    return replace(operand, lifetime=lifetime, value=value)


def _relisted(graph: Subgraph, index: int, lifetime: OperandLifeTime) -> Subgraph:
    inputs = [i for i in graph.inputs if i != index] + [index] * (lifetime == _L.SUBGRAPH_INPUT)
    outputs = [i for i in graph.outputs if i != index] + [index] * (lifetime == _L.SUBGRAPH_OUTPUT)
    operands = _with(graph.operands, index, _with_lifetime(graph.operands[index], lifetime))
    return replace(graph, operands=operands, inputs=tuple(inputs), outputs=tuple(outputs))


_UNLISTED = {
    _L.SUBGRAPH_INPUT: _L.CONSTANT_COPY,
    _L.CONSTANT_COPY: _L.SUBGRAPH_INPUT,
    _L.CONSTANT_REFERENCE: _L.SUBGRAPH_INPUT,
    _L.SUBGRAPH_OUTPUT: _L.TEMPORARY_VARIABLE,
    _L.TEMPORARY_VARIABLE: _L.SUBGRAPH_OUTPUT,
}


def _input_output_listing(graph: Subgraph) -> Iterator[Change]:
    """Make the lists of inputs and outputs contradict a lifetime."""
    for i, operand in enumerate(graph.operands):
        lifetime = _UNLISTED.get(operand.lifetime)
        if lifetime is not None and (not lifetime.is_constant or _can_be_constant(operand)):
            changed = _with(graph.operands, i, _with_lifetime(operand, lifetime))
            yield f"listing/{i}/{lifetime.name}", partial(replace, graph, operands=changed)


def _number_of_consumers(graph: Subgraph) -> Iterator[Change]:
    for i in range(len(graph.operands)):
        count = sum(operation.inputs.count(i) for operation in graph.operations)
        for wrong in (count + 1, count - 1) if count else (1,):
            yield f"number-of-consumers/{i}/{wrong}", partial(_operand, graph, i, number_of_consumers=wrong)


def _second_writer(graph: Subgraph) -> Iterator[Change]:
    for n, operation in enumerate(graph.operations):
        for position in range(len(operation.outputs)):
            yield f"second-writer/{n}/output-{position}", partial(_written_twice, graph, operation, position)


def _written_twice(graph: Subgraph, operation: Operation, position: int) -> Subgraph:
    """Add a copy of the operation that writes one output again, and its others elsewhere."""
    outputs = []
    for k, i in enumerate(operation.outputs):
        outputs.append(i if k == position else len(graph.operands))
        graph = graph if k == position else _appended(graph, _fresh(graph.operands[i]))
    return replace(graph, operations=(*graph.operations, replace(operation, outputs=tuple(outputs))))


def _fresh(operand: Operand) -> Operand:
    return replace(operand, lifetime=_L.TEMPORARY_VARIABLE)


def _operation_operand_type(graph: Subgraph) -> Iterator[Change]:
    """Give an operand of an operation each other type, valid in itself."""
    for n, operation in enumerate(graph.operations):
        for i in dict.fromkeys((*operation.inputs, *operation.outputs)):
            for kind in _BASE_TYPES:
                operand = graph.operands[i]
                if kind != operand.type and not may_have_type(graph, operation, i, kind) and _fits(operand, kind):
                    yield f"operation-operand-type/{n}/operand-{i}/{kind.name}", partial(_retyped, graph, i, kind)


def _fits(operand: Operand, kind: OperandType) -> bool:
    return not operand.lifetime.is_constant or byte_size(kind, operand.dimensions) <= _LARGEST_VALUE


def _retyped(graph: Subgraph, index: int, kind: OperandType) -> Subgraph:
    operand = graph.operands[index]
    dimensions = () if kind.is_scalar else operand.dimensions or (1,)
    channels = None
    if kind == _T.TENSOR_QUANT8_SYMM_PER_CHANNEL:
        dimensions = (dimensions[0] or 1, *dimensions[1:])
        channels = ((1.0,) * dimensions[0], 0)
    first, last = ZERO_POINTS.get(kind, (0, 0))
    return _operand(
        graph,
        index,
        type=kind,
        dimensions=dimensions,
        scale=(operand.scale or 1.0) if kind.is_quantised else 0.0,
        zero_point=min(max(operand.zero_point, first), last),
        channel_quant=channels,
        value=np.zeros(dimensions, kind.dtype) if operand.lifetime.is_constant else operand.value,
    )


def _operation_type(graph: Subgraph) -> Iterator[Change]:
    for n in range(len(graph.operations)):
        for word, code in _OPERATION_CODES.items():
            yield f"operation-type/{n}/{word}", partial(_operation, graph, n, type=str(code))


def _operand_index(graph: Subgraph) -> Iterator[Change]:
    """Name an input or output that does not exist."""
    beyond = len(graph.operands)
    for n, operation in enumerate(graph.operations):
        for k in range(len(operation.inputs)):
            changed = _with(operation.inputs, k, beyond)
            yield f"operation-input-index/{n}/input-{k}", partial(_operation, graph, n, inputs=changed)
        for k in range(len(operation.outputs)):
            changed = _with(operation.outputs, k, beyond)
            yield f"operation-output-index/{n}/output-{k}", partial(_operation, graph, n, outputs=changed)


def _remove_write(graph: Subgraph) -> Iterator[Change]:
    """Make an operation write elsewhere, so that no operation writes an operand that others read."""
    for n, operation in enumerate(graph.operations):
        for k, i in enumerate(operation.outputs):
            outputs = _with(operation.outputs, k, len(graph.operands))
            changed = _appended(graph, _fresh(graph.operands[i]))
            yield f"remove-write/{n}/output-{k}", partial(_operation, changed, n, outputs=outputs)


def _remove_operand(graph: Subgraph) -> Iterator[Change]:
    for i in range(len(graph.operands)):
        users = [o for o in graph.operations if i in (*o.inputs, *o.outputs)]
        if not all(may_lose(operation, i) for operation in users):
            yield f"remove-operand/{i}", partial(_operand_removed, graph, i)


def _operand_removed(graph: Subgraph, index: int) -> Subgraph:
    """Remove an operand from every list; later indices move down by one."""

    def kept(indices: Sequence[int]) -> tuple[int, ...]:
        return tuple(i - (i > index) for i in indices if i != index)

    operations = [replace(o, inputs=kept(o.inputs), outputs=kept(o.outputs)) for o in graph.operations]
    return Subgraph(_without(graph.operands, index), operations, kept(graph.inputs), kept(graph.outputs))


def _remove_operation(graph: Subgraph) -> Iterator[Change]:
    for n in range(len(graph.operations)):
        yield f"remove-operation/{n}", partial(replace, graph, operations=_without(graph.operations, n))


def _remove_operation_operand(graph: Subgraph) -> Iterator[Change]:
    for n, operation in enumerate(graph.operations):
        for k in range(len(operation.inputs)):
            if not may_lose_input(operation, k):
                inputs = _without(operation.inputs, k)
                yield f"remove-operation-input/{n}/input-{k}", partial(_operation, graph, n, inputs=inputs)
        for k in range(len(operation.outputs)):
            outputs = _without(operation.outputs, k)
            yield f"remove-operation-output/{n}/output-{k}", partial(_operation, graph, n, outputs=outputs)


def _add_operation_operand(graph: Subgraph) -> Iterator[Change]:
    """Append an INT32 input or output."""
    new = len(graph.operands)
    for n, operation in enumerate(graph.operations):
        if not may_gain_input(operation):
            more = _appended(graph, Operand(_T.INT32, lifetime=_L.SUBGRAPH_INPUT))
            more = replace(more, inputs=(*graph.inputs, new))
            yield f"add-operation-input/{n}", partial(_operation, more, n, inputs=(*operation.inputs, new))
        more = _appended(graph, Operand(_T.INT32, lifetime=_L.SUBGRAPH_OUTPUT))
        more = replace(more, outputs=(*graph.outputs, new))
        yield f"add-operation-output/{n}", partial(_operation, more, n, outputs=(*operation.outputs, new))


_KINDS: tuple[Callable[[Subgraph], Iterator[Change]], ...] = (
    _execution_order,
    _operand_type,
    _operand_rank,
    _operand_scale,
    _operand_zero_point,
    _operand_lifetime,
    _input_output_listing,
    _number_of_consumers,
    _second_writer,
    _operation_operand_type,
    _operation_type,
    _operand_index,
    _remove_write,
    _remove_operand,
    _remove_operation,
    _remove_operation_operand,
    _add_operation_operand,
)


# ---- mutations that may be legal: the exceptions of VTS, for operations with several forms ---------------------------

_SEQUENCES = frozenset(
    {
        "BIDIRECTIONAL_SEQUENCE_LSTM",
        "BIDIRECTIONAL_SEQUENCE_RNN",
        "UNIDIRECTIONAL_SEQUENCE_LSTM",
        "UNIDIRECTIONAL_SEQUENCE_RNN",
    }
)
_FLOATS, _BYTES = frozenset(LETTERS[c] for c in "fh"), frozenset(LETTERS[c] for c in "qs")
_FILTERS = _BYTES | {LETTERS["P"]}
_ANY = frozenset(OperandType)

_INPUT_TYPES: dict[str, tuple[int, frozenset[OperandType]]] = {
    "ARGMAX": (0, _ANY),
    "ARGMIN": (0, _ANY),
    "AXIS_ALIGNED_BBOX_TRANSFORM": (1, _BYTES),
    "CAST": (0, _ANY),
    "CONV_2D": (1, _FILTERS),
    "DEPTHWISE_CONV_2D": (1, _FILTERS),
    "DEQUANTIZE": (0, frozenset(LETTERS[c] for c in "qsyP")),
    "GROUPED_CONV_2D": (1, _FILTERS),
    "LSH_PROJECTION": (1, _ANY),
    "QUANTIZE": (0, _FLOATS),
    "RANDOM_MULTINOMIAL": (0, _FLOATS),
    "RANK": (0, _ANY),
    "TRANSPOSE_CONV_2D": (1, _FILTERS),
}
"""The input whose type may change alone, and the types that it may have."""

_OUTPUT_TYPES = {"CAST": _ANY, "DEQUANTIZE": _FLOATS, "QUANTIZE": _BYTES}

_OTHER_FORMS = {"CONV_2D": (10, 7), "DEPTHWISE_CONV_2D": (11, 8)}
"""By number of inputs: the one whose type tells implicit padding (BOOL, the layout) from explicit (INT32)."""

_TAILS: dict[str, dict[int, tuple[int, ...]]] = {
    "AVERAGE_POOL_2D": {8: (7,), 11: (10,)},
    "BATCH_TO_SPACE_ND": {3: (2,)},
    "CONV_2D": {8: (7,), 11: (10,)},
    "DEPTHWISE_CONV_2D": {9: (8,), 12: (11,)},
    "DEPTH_TO_SPACE": {3: (2,)},
    "L2_NORMALIZATION": {2: (1,)},
    "L2_POOL_2D": {8: (7,), 11: (10,)},
    "LOCAL_RESPONSE_NORMALIZATION": {6: (5,)},
    "MAX_POOL_2D": {8: (7,), 11: (10,)},
    "RESIZE_BILINEAR": {4: (3,), 5: (3, 4), 6: (3, 4, 5)},
    "RESIZE_NEAREST_NEIGHBOR": {5: (3, 4), 6: (3, 4, 5)},
    "SOFTMAX": {3: (2,)},
    "SPACE_TO_BATCH_ND": {4: (3,)},
    "SPACE_TO_DEPTH": {3: (2,)},
}
"""By operation and number of inputs: the inputs whose removal leaves a shorter valid form."""

_GROWING = {
    "L2_NORMALIZATION": 2,
    "LOCAL_RESPONSE_NORMALIZATION": 6,
    "RESIZE_BILINEAR": 6,
    "RESIZE_NEAREST_NEIGHBOR": 6,
    "SOFTMAX": 3,
}
"""Operations with optional INT32 or BOOL inputs at the end, and their full number of inputs."""


def may_have_type(graph: Subgraph, operation: Operation, index: int, kind: OperandType) -> bool:
    """Return True if operand `index` of a call may also have type `kind`, all else being equal."""
    position, types = _INPUT_TYPES.get(operation.type, (0, frozenset()))
    if operation.inputs.count(index) > 1:  # all inputs that must share a type change
        return True
    count, telling = _OTHER_FORMS.get(operation.type, (0, 0))
    if len(operation.inputs) == count and operation.inputs[telling] == index:
        return kind in {OperandType.BOOL, OperandType.INT32}
    if position < len(operation.inputs) and operation.inputs[position] == index:
        return {kind, graph.operands[index].type} <= types
    return index in operation.outputs and kind in _OUTPUT_TYPES.get(operation.type, frozenset())


def may_lose_input(operation: Operation, position: int) -> bool:
    """Return True if a call without this input is another form of the operation."""
    if operation.type == "CONCATENATION":
        return len(operation.inputs) > 2 and position < len(operation.inputs) - 1
    return position in _TAILS.get(operation.type, {}).get(len(operation.inputs), ())


def may_lose(operation: Operation, index: int) -> bool:
    """Return True if a call may be legal without operand `index`, wherever it is listed."""
    if index in operation.outputs:
        return operation.type in {"SPLIT", "WHILE"} or operation.type in _SEQUENCES
    positions = [n for n, i in enumerate(operation.inputs) if i == index]
    return len(positions) > 1 or all(may_lose_input(operation, n) for n in positions)


def may_gain_input(operation: Operation) -> bool:
    """Return True if the operation may take a further INT32."""
    return len(operation.inputs) < _GROWING.get(operation.type, 0)
