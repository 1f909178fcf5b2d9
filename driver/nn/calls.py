"""The rules for one call of an operation: a signature that its operands fit, and the HAL version that it needs."""

from collections.abc import Sequence

import numpy as np

from .errors import InvalidModel
from .model import Operand
from .operation import OperationType, Signature, slot_types
from .types import OperandLifeTime

_DEFAULTS = {"BOOL": 0, "2*INT32": 1, "INT32": -1}
"""What a trailing input means when it is left out, by its tail: a layout or another flag, dilations, an axis."""

_MOST_TYPES = 32  # that a message repeats


def check_call(kind: OperationType, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Signature:
    """Return the signature of `kind` that a call with these operands fits; `InvalidModel` when there is none."""
    match_signature(kind, inputs)
    fitting = [s for s in kind.signatures if _inputs_fault(s, inputs) is None and _outputs_fit(s, inputs, outputs)]
    if not fitting:
        raise InvalidModel(f"cannot give {_types(outputs)} for inputs of types {_types(inputs)}")
    if kind.check and (reason := kind.check(inputs, outputs)):
        raise InvalidModel(reason)
    return fitting[0]


def _types(operands: Sequence[Operand]) -> str:
    """Name types for people, who read no thousand of them."""
    names = [operand.type.name for operand in operands[:_MOST_TYPES]]
    more = len(operands) - len(names)
    return ", ".join((*names, *([f"and {more} more"] if more else ()))) or "nothing"


def match_signature(kind: OperationType, inputs: Sequence[Operand]) -> tuple[Signature, tuple[str, ...]]:
    """Return the first signature that takes these inputs, and its slots; `InvalidModel` tells why the nearest one does
    not.
    """
    reasons = []
    for signature in kind.signatures:
        reason = _inputs_fault(signature, inputs)
        if reason is None:
            found = signature.slots(len(inputs))
            assert found is not None
            return signature, found[0]
        reasons.append(reason)
    raise InvalidModel(" / ".join(dict.fromkeys(reasons)))


def without_defaults(kind: OperationType, inputs: Sequence[Operand]) -> Sequence[Operand]:
    """Return the inputs less those at the end that are constant and say what an older HAL, which has no such input,
    does.
    """
    signature, _ = match_signature(kind, inputs)
    for _, tail in reversed(signature.tails):
        count = len(inputs) - (2 if tail == "2*INT32" else 1)
        form = signature.slots(count) if tail in _DEFAULTS else None
        if form is None or not all(_is_constantly(o, _DEFAULTS[tail]) for o in inputs[count:]):
            continue
        if _inputs_fault(signature, inputs[:count]) is None:
            inputs = inputs[:count]
    return inputs


def call_version(kind: OperationType, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> int:
    """Return the HAL version 1.x that a valid call of `kind` needs, as x."""
    signature = check_call(kind, inputs, outputs)
    form = signature.slots(len(inputs))
    assert form is not None
    tensors = [o for o in (*inputs, *outputs) if not o.type.is_scalar]
    open_rank = 0 if all(o.dimensions for o in tensors) else 2
    types = (o.type.since for o in (*inputs, *outputs))
    taken = signature.versions()[inputs[signature.of].base_type]
    return max(*types, open_rank, form[1], taken, kind.gate(inputs, outputs) if kind.gate else 0)


def _is_constantly(operand: Operand, value: int) -> bool:
    return operand.lifetime.is_constant and bool((np.asarray(operand.value).view(operand.type.dtype) == value).all())


def _outputs_fit(signature: Signature, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> bool:
    slots = signature.result_slots(len(outputs))
    t = inputs[signature.of].base_type
    return slots is not None and all(o.type in slot_types(slot, t) for o, slot in zip(outputs, slots, strict=True))


def _inputs_fault(signature: Signature, inputs: Sequence[Operand]) -> str | None:
    found = signature.slots(len(inputs))
    if found is None:
        return f"{len(inputs)} inputs are not one of its forms, which have {signature.counts()}"
    of, types = signature.of, signature.versions()
    t = inputs[of].type
    if t not in types:
        return f"input {of} has type {t.name}; it takes {', '.join(sorted(x.name for x in types))}"
    for i, (slot, operand) in enumerate(zip(found[0], inputs, strict=True)):
        fitting = slot_types(slot, t)
        if operand.type not in fitting:
            return f"input {i} has type {operand.type.name} and should have {' or '.join(x.name for x in fitting)}"
        if operand.lifetime == OperandLifeTime.NO_VALUE and not slot.endswith("?"):
            return f"input {i} is omitted but needed"
    rank = len(inputs[of].dimensions)
    if rank and rank not in signature.ranks:
        return f"input {of} has rank {rank}; the rank has to be one of {list(signature.ranks)}"
    return None
