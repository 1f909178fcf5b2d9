"""The rules a model has to keep before anything is prepared from it.

Nothing here allocates in proportion to what a model claims, and nothing recurses along its references.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np

from .errors import InvalidModel, did_you_mean
from .model import Model, Operand, Operation, Subgraph
from .operation import OperationType, Signature, slot_types
from .ops import OPERATIONS
from .types import ZERO_POINTS, OperandLifeTime, OperandType, byte_size

_L, _T = OperandLifeTime, OperandType
NAME_LENGTH = 64
"""Characters of a name that a message repeats."""
SMALLEST_SCALE = float(np.finfo(np.float32).smallest_subnormal)
LARGEST_SCALE = float(np.finfo(np.float32).max)


def validate(model: Model) -> None:
    """Check `model` against the rules of HAL 1.3; `InvalidModel` names the operand or operation, and the rule."""
    for number, graph in enumerate((model.main, *model.referenced)):
        where = f"referenced subgraph {number - 1}, " if number else ""
        try:
            _check_subgraph(graph, len(model.referenced))
        except InvalidModel as error:
            raise InvalidModel(f"{where}{error}") from None
    _check_references(model)


def required_version(model: Model) -> int:
    """The oldest HAL version 1.x, as x, that a valid `model` can be put to."""
    graphs = (model.main, *model.referenced)
    calls = (
        check_call(OPERATIONS[op.type], [g.operands[i] for i in op.inputs], [g.operands[i] for i in op.outputs])
        for g in graphs
        for op in g.operations
    )
    types = (operand.type.since for g in graphs for operand in g.operands)
    return max(chain(calls, types, [1 if model.relaxed else 0]))


def _check_subgraph(graph: Subgraph, referenced: int) -> None:
    if not graph.operands or not graph.operations:
        raise InvalidModel("a subgraph needs at least one operand and one operation")
    for index, operand in enumerate(graph.operands):
        if reason := operand_fault(operand, referenced):
            raise InvalidModel(f"operand {index} ({operand.type.name}): {reason}")
    for index, operation in enumerate(graph.operations):
        _check_operation(graph, index, operation)
    _check_list(graph, graph.inputs, _L.SUBGRAPH_INPUT, "input")
    _check_list(graph, graph.outputs, _L.SUBGRAPH_OUTPUT, "output")
    _check_order(graph)
    _check_consumers(graph)


def operand_fault(operand: Operand, referenced: int) -> str | None:
    """What is wrong with an operand by itself, or None."""
    return (
        _dimensions_fault(operand)
        or _quantisation_fault(operand)
        or _channel_fault(operand)
        or _value_fault(operand, referenced)
    )


def _dimensions_fault(operand: Operand) -> str | None:
    if operand.type in (_T.OEM, _T.TENSOR_OEM_BYTE):
        return "OEM operands are not supported"
    if operand.type.is_scalar and operand.dimensions:
        return f"a scalar has no dimensions, not {list(operand.dimensions)}"
    if any(not 0 <= d < 2**32 for d in operand.dimensions):
        return f"dimensions {list(operand.dimensions)} have to be in 0..2^32-1"
    if operand.lifetime.is_constant and not operand.type.is_scalar and not operand.dimensions:
        return "a constant tensor needs a rank of at least 1"
    return None


def _quantisation_fault(operand: Operand) -> str | None:
    scale, zero_point = operand.scale, operand.zero_point
    if operand.type in ZERO_POINTS:
        first, last = ZERO_POINTS[operand.type]
        if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
            return f"scale {scale} has to be above 0 and a finite float32"
        if not first <= zero_point <= last:
            return f"zero point {zero_point} has to be in {first}..{last}"
        return None
    if operand.type == _T.TENSOR_INT32:
        if not 0 <= scale <= LARGEST_SCALE:
            return f"scale {scale} has to be at least 0 and a finite float32"
    elif scale != 0:
        return f"scale {scale} has to be 0"
    return f"zero point {zero_point} has to be 0" if zero_point else None


def _channel_fault(operand: Operand) -> str | None:
    if operand.type != _T.TENSOR_QUANT8_SYMM_PER_CHANNEL:
        return "only TENSOR_QUANT8_SYMM_PER_CHANNEL has channel_quant" if operand.channel_quant is not None else None
    if operand.channel_quant is None:
        return "channel_quant is missing"
    scales, channel = operand.channel_quant
    if not 0 <= channel < len(operand.dimensions):
        return f"channel dimension {channel} has to be below the rank {len(operand.dimensions)}"
    if operand.dimensions[channel] == 0 or operand.dimensions[channel] != len(scales):
        return f"{len(scales)} scales for {operand.dimensions[channel]} channels"
    fine = all(SMALLEST_SCALE <= s <= LARGEST_SCALE for s in scales)
    return None if fine else "every channel scale has to be above 0 and a finite float32"


def _value_fault(operand: Operand, referenced: int) -> str | None:
    lifetime, value = operand.lifetime, operand.value
    if (operand.type == _T.SUBGRAPH) != (lifetime == _L.SUBGRAPH):
        return f"lifetime {lifetime.name} does not belong to type {operand.type.name}"
    if lifetime == _L.SUBGRAPH:
        known = isinstance(value, int) and 0 <= value < referenced
        return None if known else f"subgraph {value!r} is not one of the {referenced} referenced subgraphs"
    if not lifetime.is_constant:
        return f"an operand of lifetime {lifetime.name} has no value" if value is not None else None
    return _constant_fault(operand)


def _constant_fault(operand: Operand) -> str | None:
    value, dtype = operand.value, operand.type.dtype
    if not isinstance(value, np.ndarray | np.generic):
        return f"the value of a constant has to be an ndarray, not {type(value).__name__}"
    if value.dtype not in (dtype, np.dtype(np.uint8)) and not (value.dtype == np.bool_ and dtype.itemsize == 1):
        return f"the value has dtype {value.dtype}; convert it to {dtype}"
    size = byte_size(operand.type, operand.dimensions)
    return None if value.nbytes == size else f"the value has {value.nbytes} bytes, the dimensions need {size}"


def _check_operation(graph: Subgraph, index: int, operation: Operation) -> None:
    label = f"operation {index} ({operation.type[:NAME_LENGTH]})"
    for i in chain(operation.inputs, operation.outputs):
        if not 0 <= i < len(graph.operands):
            raise InvalidModel(f"{label}: operand {i} does not exist, there are {len(graph.operands)}")
    kind = OPERATIONS.get(operation.type)
    if kind is None:
        raise InvalidModel(f"{label}: no such operation here{did_you_mean(operation.type, OPERATIONS)}")
    inputs = [graph.operands[i] for i in operation.inputs]
    outputs = [graph.operands[i] for i in operation.outputs]
    try:
        check_call(kind, inputs, outputs)
    except InvalidModel as error:
        raise InvalidModel(f"{label}: {error}") from None
    for i, operand in zip(operation.outputs, outputs, strict=True):
        if not operand.lifetime.is_written:
            raise InvalidModel(f"{label}: writes operand {i}, whose lifetime is {operand.lifetime.name}")


def check_call(kind: OperationType, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> int:
    """The HAL version 1.x that a call of `kind` with these operands needs; `InvalidModel` when no signature fits it."""
    match_signature(kind, inputs)
    fitting = [s for s in kind.signatures if _inputs_fault(s, inputs) is None and _outputs_fit(s, inputs, outputs)]
    if not fitting:
        given = ", ".join(o.type.name for o in outputs) or "nothing"
        raise InvalidModel(f"cannot give {given} for inputs of types {', '.join(o.type.name for o in inputs)}")
    if reason := kind.check(inputs, outputs):
        raise InvalidModel(reason)
    tensors = [o for o in (*inputs, *outputs) if not o.type.is_scalar]
    ranks = [2 for o in tensors if not o.dimensions]
    return max(*(o.type.since for o in tensors), *ranks, kind.gate(inputs, outputs), _form_version(fitting[0], inputs))


def _form_version(signature: Signature, inputs: Sequence[Operand]) -> int:
    form = signature.slots(len(inputs))
    assert form is not None
    return max(form[1], signature.versions()[inputs[signature.of].type])


def _outputs_fit(signature: Signature, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> bool:
    slots = signature.result_slots(len(outputs))
    t = inputs[signature.of].type
    return slots is not None and all(o.type in slot_types(slot, t) for o, slot in zip(outputs, slots, strict=True))


def match_signature(kind: OperationType, inputs: Sequence[Operand]) -> tuple[Signature, tuple[str, ...]]:
    """The first signature that takes these inputs, and its slots; `InvalidModel` tells why the nearest one does not."""
    reasons = []
    for signature in kind.signatures:
        reason = _inputs_fault(signature, inputs)
        if reason is None:
            found = signature.slots(len(inputs))
            assert found is not None
            return signature, found[0]
        reasons.append(reason)
    raise InvalidModel(" / ".join(dict.fromkeys(reasons)))


def _inputs_fault(signature: Signature, inputs: Sequence[Operand]) -> str | None:
    found = signature.slots(len(inputs))
    if found is None:
        return f"{len(inputs)} inputs are not one of its forms"
    of, types = signature.of, signature.versions()
    t = inputs[of].type
    if t not in types:
        return f"input {of} has type {t.name}; it takes {', '.join(sorted(x.name for x in types))}"
    for i, (slot, operand) in enumerate(zip(found[0], inputs, strict=True)):
        fitting = slot_types(slot, t)
        if operand.type not in fitting:
            return f"input {i} has type {operand.type.name} and should have {' or '.join(x.name for x in fitting)}"
    rank = len(inputs[of].dimensions)
    if rank and rank not in signature.ranks:
        return f"input {of} has rank {rank}; the rank has to be one of {list(signature.ranks)}"
    return None


def _check_list(graph: Subgraph, listed: Sequence[int], lifetime: OperandLifeTime, word: str) -> None:
    """`listed` names exactly the operands of one lifetime, each once."""
    if len(set(listed)) != len(listed):
        twice = next(i for i, count in Counter(listed).items() if count > 1)
        raise InvalidModel(f"operand {twice} is listed twice among the {word}s")
    for i in listed:
        if not 0 <= i < len(graph.operands):
            raise InvalidModel(f"{word} operand {i} does not exist, there are {len(graph.operands)}")
        if graph.operands[i].lifetime != lifetime:
            raise InvalidModel(
                f"{word} operand {i} has lifetime {graph.operands[i].lifetime.name}, not {lifetime.name}"
            )
    missing = {i for i, o in enumerate(graph.operands) if o.lifetime == lifetime}.difference(listed)
    if missing:
        raise InvalidModel(f"operand {min(missing)} has lifetime {lifetime.name} but is not listed as {word}")


def _check_order(graph: Subgraph) -> None:
    """Every operand is written once, and before it is read."""
    written: set[int] = set()
    for index, operation in enumerate(graph.operations):
        label = f"operation {index} ({operation.type})"
        for i in operation.inputs:
            if graph.operands[i].lifetime.is_written and i not in written:
                raise InvalidModel(
                    f"{label}: reads operand {i} before it is written; put operations in executable order"
                )
        for i in operation.outputs:
            if i in written:
                raise InvalidModel(f"{label}: operand {i} is written a second time")
            written.add(i)
    for i, operand in enumerate(graph.operands):
        if operand.lifetime.is_written and i not in written:
            raise InvalidModel(
                f"operand {i} ({operand.type.name}): lifetime {operand.lifetime.name}, but never written"
            )


def _check_consumers(graph: Subgraph) -> None:
    readers = [0] * len(graph.operands)
    for i in chain.from_iterable(operation.inputs for operation in graph.operations):
        readers[i] += 1
    for i, (operand, count) in enumerate(zip(graph.operands, readers, strict=True)):
        if operand.number_of_consumers not in (None, count):
            raise InvalidModel(
                f"operand {i} ({operand.type.name}): number_of_consumers is {operand.number_of_consumers}, not {count}"
            )


def _check_references(model: Model) -> None:
    """No subgraph refers to itself, directly or through others: remove those that refer to none, until none is left."""
    refers = [{o.value for o in g.operands if o.lifetime == _L.SUBGRAPH} for g in model.referenced]
    referrers: list[list[int]] = [[] for _ in refers]
    for i, others in enumerate(refers):
        for other in others:
            referrers[other].append(i)
    pending = [len(others) for others in refers]
    free = [i for i, count in enumerate(pending) if count == 0]
    for leaf in free:  # grows while it is walked
        for i in referrers[leaf]:
            pending[i] -= 1
            if pending[i] == 0:
                free.append(i)
    if len(free) < len(refers):
        culprit = next(i for i, count in enumerate(pending) if count)
        raise InvalidModel(f"referenced subgraph {culprit} refers to itself, directly or through others")
