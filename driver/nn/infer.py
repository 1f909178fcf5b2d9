"""Output dimensions of an operation before the model runs, as far as they are known."""

from collections.abc import Sequence

from .model import Operand
from .operation import Call, OperationType, Tensor, UnknownValueError, steers
from .types import Dimensions, OperandLifeTime

_PROBES = (1009, 2017)
"""Stand-ins for an unknown dimension. Whatever differs between the two results depends on it."""


def output_dimensions(
    kind: OperationType, slots: Sequence[str], inputs: Sequence[Operand], outputs: Sequence[Operand]
) -> list[Dimensions]:
    """Dimensions of every output: 0 where unknown, empty where not even the rank is.

    Raises `ValueError` when the operation cannot serve what is known of its inputs.
    """
    nothing: list[Dimensions] = [()] * len(outputs)
    if any(not o.dimensions and not o.type.is_scalar and o.lifetime != OperandLifeTime.NO_VALUE for o in inputs):
        return nothing
    is_known = all(0 not in o.dimensions for o in inputs)
    try:
        first = _with_probe(kind, slots, inputs, outputs, _PROBES[0])
        second = first if is_known else _with_probe(kind, slots, inputs, outputs, _PROBES[1])
    except UnknownValueError:
        return nothing
    except ValueError:
        if is_known:
            raise
        return nothing
    return [tuple(x if x == y else 0 for x, y in zip(a, b, strict=True)) for a, b in zip(first, second, strict=True)]


def _with_probe(
    kind: OperationType, slots: Sequence[str], inputs: Sequence[Operand], outputs: Sequence[Operand], probe: int
) -> Sequence[Dimensions]:
    tensors: list[Tensor | None] = []
    for slot, operand in zip(slots, inputs, strict=True):
        if operand.lifetime == OperandLifeTime.NO_VALUE:
            tensors.append(None)
            continue
        tensor = Tensor.of(operand)
        tensor.shape = tuple(d or probe for d in tensor.shape)
        if steers(slot) and tensor.array is not None:
            tensor.keep_values()
        tensors.append(tensor)
    return kind.shape(Call(tensors, [Tensor.of(o) for o in outputs]))
