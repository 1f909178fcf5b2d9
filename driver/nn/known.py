"""The part of a model that a device can be asked about: the operations of which it knows all extensions."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain

from .extension import ExtensionType, extension_of
from .model import Model, Operand, Operation, Subgraph
from .types import OperandLifeTime


def explained(
    model: Model, extensions: Collection[str], explain: Callable[[Model], Sequence[str | None]]
) -> list[str | None]:
    """For each operation of the main subgraph of a valid model why it is not supported; None: it is.

    `explain`: is asked once, about a model of the operations that use none but these extensions.
    """
    unknown = [_unknown(model, operation, extensions) for operation in model.main.operations]
    if not any(unknown):
        return list(explain(model))
    kept = [n for n, names in enumerate(unknown) if not names]
    found: list[str | None] = [
        f"the device does not know the extension {names[0]}" if names else None for names in unknown
    ]
    if kept:
        reasons = explain(_part(model, kept))
        wrong = None if len(reasons) == len(kept) else f"the device gives {len(reasons)} answers for {len(kept)}"
        for n, reason in zip(kept, reasons, strict=False):
            found[n] = wrong or reason
    return found


def _unknown(model: Model, operation: Operation, extensions: Collection[str]) -> list[str]:
    """The extensions that an operation uses, and those that its subgraphs use, as far as they are not known."""
    graphs = [(model.main, operation)]
    names: list[str] = []
    seen: set[int] = set()
    while graphs:
        graph, one = graphs.pop()
        operands = [graph.operands[i] for i in chain(one.inputs, one.outputs)]
        names += [o.type.extension for o in operands if isinstance(o.type, ExtensionType)]
        if (name := extension_of(one.type)) is not None:
            names.append(name)
        pending = [o.value for o in operands if o.lifetime == OperandLifeTime.SUBGRAPH and o.value not in seen]
        seen.update(pending)
        for number in pending:
            graphs += [(model.referenced[number], each) for each in model.referenced[number].operations]
    return [name for name in dict.fromkeys(names) if name not in extensions]


def _part(model: Model, kept: Sequence[int]) -> Model:
    """A valid model of these operations alone. What others compute for them is an input."""
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
    """The operand in a part of its graph. Its readers may be fewer there."""
    lifetime = operand.lifetime
    if lifetime.is_written and not is_written:
        lifetime = OperandLifeTime.SUBGRAPH_INPUT
    return replace(operand, lifetime=lifetime, number_of_consumers=None)
