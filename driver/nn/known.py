"""The part of a model that a device can be asked about: the operations of which it knows all extensions, and which its
version of the HAL has.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import chain

from .extension import ExtensionType, extension_of
from .model import Model, Operand, Operation, Subgraph
from .older import HalVersion, form_for_version, too_new
from .types import OperandLifeTime


def explained(
    model: Model,
    extensions: Collection[str],
    explain: Callable[[Model], Sequence[str | None]],
    version: HalVersion = "1.3",
) -> list[str | None]:
    """Say why each operation of the main subgraph of a valid model is not supported; None: it is.

    `explain`: is asked once, about a model of the operations that use none but these extensions, and that this
    `version` of the HAL has.
    """
    inside = _names_inside(model)
    unknown = [
        [name for name in _names(model.main, operation, inside) if name not in extensions]
        for operation in model.main.operations
    ]
    newer = too_new(model, version)
    if not any(unknown) and not any(newer):
        return list(explain(form_for_version(model, version)))
    found: list[str | None] = [
        f"the device does not know the extension {names[0]}" if names else reason
        for names, reason in zip(unknown, newer, strict=True)
    ]
    kept = [n for n, reason in enumerate(found) if reason is None]
    if kept:
        reasons = explain(form_for_version(_part(model, kept), version))
        wrong = None if len(reasons) == len(kept) else f"the device gives {len(reasons)} answers for {len(kept)}"
        for n, reason in zip(kept, reasons, strict=False):
            found[n] = wrong or reason
    return found


def _names(graph: Subgraph, operation: Operation, inside: Sequence[Sequence[str]]) -> list[str]:
    """Return the extensions that an operation uses, and those that its subgraphs use; `inside`: of each
    referenced one.
    """
    operands = [graph.operands[i] for i in chain(operation.inputs, operation.outputs)]
    names = [o.type.extension for o in operands if isinstance(o.type, ExtensionType)]
    if (name := extension_of(operation.type)) is not None:
        names.append(name)
    names += chain.from_iterable(inside[n] for n in _subgraphs(operands))
    return list(dict.fromkeys(names))


def _subgraphs(operands: Sequence[Operand]) -> list[int]:
    return [o.value for o in operands if o.lifetime == OperandLifeTime.SUBGRAPH]


def _names_inside(model: Model) -> list[Sequence[str]]:
    """Return the extensions that each referenced subgraph uses. Each is looked at once, after those that it
    refers to.
    """
    found: list[Sequence[str]] = [()] * len(model.referenced)
    refers = {
        n: {o.value for o in g.operands if o.lifetime == OperandLifeTime.SUBGRAPH}
        for n, g in enumerate(model.referenced)
    }
    for n in TopologicalSorter(refers).static_order():
        graph = model.referenced[n]
        names = chain.from_iterable(_names(graph, operation, found) for operation in graph.operations)
        found[n] = list(dict.fromkeys(names))
    return found


def _part(model: Model, kept: Sequence[int]) -> Model:
    """Return a valid model of these operations alone. What others compute for them is an input."""
    graph = model.main
    operations = [graph.operations[n] for n in kept]
    used = sorted({i for operation in operations for i in chain(operation.inputs, operation.outputs)})
    numbers = {old: new for new, old in enumerate(used)}
    written = {i for operation in operations for i in operation.outputs}
    operands = [_alone(graph.operands[i], is_written=i in written) for i in used]
    inputs = [n for n, operand in enumerate(operands) if operand.lifetime == OperandLifeTime.SUBGRAPH_INPUT]
    outputs = [n for n, operand in enumerate(operands) if operand.lifetime == OperandLifeTime.SUBGRAPH_OUTPUT]
    renumbered = [
        Operation(each.type, [numbers[i] for i in each.inputs], [numbers[i] for i in each.outputs])
        for each in operations
    ]
    return Model(Subgraph(operands, renumbered, inputs, outputs), model.referenced, model.relaxed, model.extensions)


def _alone(operand: Operand, *, is_written: bool) -> Operand:
    """Return an operand as it is in a part of its graph. Its readers may be fewer there."""
    lifetime = operand.lifetime
    if lifetime.is_written and not is_written:
        lifetime = OperandLifeTime.SUBGRAPH_INPUT
    return replace(operand, lifetime=lifetime, number_of_consumers=None)
