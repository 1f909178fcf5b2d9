"""Cuts a model into steps: runs of operations that one device executes, each a model of its own.

Pure: a model, what each device supports and what each operation costs there come in, steps go out. Which device an
operation gets is decided for each by itself (`choose`); then the operations are put into an order that obeys their
dependencies and changes devices as seldom as can be (`partition`). IF and WHILE stay whole, with their subgraphs; one
whose graphs run apart is a step of its own.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from driver.errors import NotPlaced
from driver.nn import OPERATIONS, Model, OperandLifeTime, Operation, Subgraph

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from driver.nn import Operand

CONTROL = ("IF", "WHILE")
_BEAM = 64  # orders that are followed up at the same time; two devices need two


class Step(NamedTuple):
    """A group of operations that one device executes together."""

    device: int  #: as in `chosen`
    operations: tuple[int, ...]  #: of the whole model's main subgraph, in executable order
    model: Model  #: they alone
    inputs: tuple[int, ...]  #: operands of the whole model, in the order of the step's inputs
    outputs: tuple[int, ...]


def choose(
    model: Model,
    obstacles: Mapping[str, Sequence[str | None]],
    costs: Sequence[Sequence[float]],
    cpu: int | None,
    interpreter: int | None = None,
) -> list[int]:
    """Return the device of each operation: the cheapest that supports it, at the same cost the earliest, but the CPU
    first.

    `obstacles`: by device, why it does not support each operation; None: it does. `costs`: a row per device, a column
    per operation. `cpu`: which device is the CPU in this process, if any; IF and WHILE with operands of unknown size go
    there, or to the `interpreter`, which has their graphs run apart. Raise NotPlaced with the reasons.
    """
    chosen = []
    for index, operation in enumerate(model.main.operations):
        able = [d for d, row in enumerate(obstacles.values()) if row[index] is None]
        if cpu in able and operation.type in CONTROL and not _sizes_are_known(model.main, operation):
            able = [d for d in able if d in {cpu, interpreter}]
        if not able:
            reasons = "; ".join(f"{name}: {row[index]}" for name, row in obstacles.items())
            hint = "" if cpu is not None or operation.type not in OPERATIONS else "; add 'cpu' to them"
            raise NotPlaced(f"none of the devices supports operation {index} ({operation.type}): {reasons}{hint}")
        chosen.append(min(able, key=lambda d: (costs[d][index], d != cpu, d)))
    return chosen


def _sizes_are_known(graph: Subgraph, operation: Operation) -> bool:
    operands = [graph.operands[i] for i in (*operation.inputs, *operation.outputs)]
    return all(operand.is_known for operand in operands if operand.lifetime != OperandLifeTime.NO_VALUE)


def partition(model: Model, chosen: Sequence[int], interpreter: int | None = None) -> list[Step]:
    """Return the steps of a valid model, in executable order; `chosen` has the device of each operation.

    With one device there is one step, and its model is the model itself. `interpreter`: the number that is no device:
    each of its operations, an IF or a WHILE, is a step.
    """
    graph = model.main
    if len(set(chosen)) == 1 and (chosen[0] != interpreter or len(chosen) == 1):
        return [Step(chosen[0], tuple(range(len(chosen))), model, graph.inputs, outputs=graph.outputs)]
    groups = _order(graph, chosen)
    if interpreter is not None:
        groups = [
            (device, part)
            for device, group in groups
            for part in ([(n,) for n in group] if device == interpreter else [group])
        ]
    return [_step(model, device, group, _ends(graph, group)) for device, group in groups]


def is_open(steps: Sequence[Step]) -> bool:
    """Return True if a step gives something whose size only its execution tells."""
    return not all(step.model.main.operands[i].is_known for step in steps for i in step.model.main.outputs)


def _order(graph: Subgraph, chosen: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Return groups of operations, each on one device.

    A group takes all that its device can do by then: to leave something for later never saves a group. So what has
    been done says all about an order so far, and a search by the number of groups finds the fewest; with very many
    devices, only the most promising orders are followed.
    """
    needs = _needs(graph)
    everything = (1 << len(chosen)) - 1
    beam: dict[int, list[tuple[int, tuple[int, ...]]]] = {0: []}
    while everything not in beam:
        found: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for done, groups in beam.items():
            for device in sorted({d for n, d in enumerate(chosen) if not done >> n & 1 and not needs[n] & ~done}):
                group = _drain(done, device, chosen, needs)
                found.setdefault(done | sum(1 << n for n in group), [*groups, (device, group)])
        beam = dict(sorted(found.items(), key=lambda item: -item[0].bit_count())[:_BEAM])
    return beam[everything]


def _needs(graph: Subgraph) -> list[int]:
    """Return the operations that each needs results of, as bits."""
    writer = {i: n for n, operation in enumerate(graph.operations) for i in operation.outputs}
    return [sum({1 << writer[i] for i in operation.inputs if i in writer}) for operation in graph.operations]


def _drain(done: int, device: int, chosen: Sequence[int], needs: Sequence[int]) -> tuple[int, ...]:
    """Return all operations of a device that can be executed now, one after the other."""
    group = []
    for n, (its, need) in enumerate(zip(chosen, needs, strict=True)):  # operations stand in executable order
        if its == device and not done >> n & 1 and not need & ~done:
            group.append(n)
            done |= 1 << n
    return tuple(group)


def _ends(graph: Subgraph, group: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the operands that go in and out of a group: those of the model first, then what other groups make or
    need.
    """
    members, operations = set(group), graph.operations
    written = {i for n in group for i in operations[n].outputs}
    read = {i for n in group for i in operations[n].inputs} - written
    elsewhere = {i for n, operation in enumerate(operations) if n not in members for i in operation.inputs}
    made = sorted(i for i in read if graph.operands[i].lifetime.is_written)
    inputs = [i for i in graph.inputs if i in read]
    inputs += [i for i in made if i not in graph.outputs] + [i for i in made if i in graph.outputs]
    outputs = [i for i in graph.outputs if i in written]
    outputs += sorted((written & elsewhere).difference(graph.outputs))
    return inputs, outputs or [min(written)]  # an output that no operation reads is computed, too


def _step(model: Model, device: int, group: tuple[int, ...], ends: tuple[list[int], list[int]]) -> Step:
    graph, (inputs, outputs) = model.main, ends
    operations = [graph.operations[n] for n in group]
    used = sorted({*chain.from_iterable((*o.inputs, *o.outputs) for o in operations)})
    numbers = {i: n for n, i in enumerate(used)}
    main = Subgraph(
        [_operand(graph.operands[i], is_input=i in inputs, is_output=i in outputs) for i in used],
        [Operation(o.type, _renumbered(o.inputs, numbers), _renumbered(o.outputs, numbers)) for o in operations],
        _renumbered(inputs, numbers),
        _renumbered(outputs, numbers),
    )
    refers = any(operand.lifetime == OperandLifeTime.SUBGRAPH for operand in main.operands)
    part = Model(main, model.referenced if refers else (), relaxed=model.relaxed, name=model.name)
    return Step(device, group, part, tuple(inputs), outputs=tuple(outputs))


def _renumbered(indices: Iterable[int], numbers: dict[int, int]) -> list[int]:
    return [numbers[i] for i in indices]


def _operand(operand: Operand, *, is_input: bool, is_output: bool) -> Operand:
    """Return an operand as it appears in a step."""
    lifetime = operand.lifetime
    if is_input:
        lifetime = OperandLifeTime.SUBGRAPH_INPUT
    elif is_output:
        lifetime = OperandLifeTime.SUBGRAPH_OUTPUT
    return replace(operand, lifetime=lifetime, number_of_consumers=None)
