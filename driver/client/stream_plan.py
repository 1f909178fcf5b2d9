"""What a stream of results is asked for by, checked against its model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from driver.nn import combine_dimensions
from driver.nn.errors import did_you_mean
from driver.nn.file_form import PACKED
from driver.nn.tensors import spellings
from driver.protocol.buffers import BufferKind
from driver.protocol.stream_terms import MOST_ELEMENTS, MOST_STEPS, MOST_VALUES, Stop

if TYPE_CHECKING:
    from driver.nn import Model, Operand

CHECKPOINT = 256
"""Steps from one checkpoint to the next, by default."""

Until = str | Mapping[str, int | Sequence[int]] | None
"""What ends a stream: the name of an output that is true, or an output with its last values; None: the count alone."""


class StreamPlan(NamedTuple):
    """How a step follows another one. feedback: (output, input) pairs. told: the outputs that results have.

    checkpoint: steps from one checkpoint to the next, where the stream recovers.
    """

    feedback: tuple[tuple[int, int], ...]
    stop: Stop | None
    most: int
    told: frozenset[int]
    checkpoint: int

    @classmethod
    def of(
        cls,
        model: Model,
        feedback: Mapping[str, str],
        *,
        until: Until,
        most: int,
        also: Sequence[str],
        checkpoint: int = CHECKPOINT,
    ) -> Self:
        """Check it. Raise ValueError, TypeError."""
        pairs = fed_pairs(model, feedback)
        stop = _stop(model, until)
        if isinstance(also, str) or not isinstance(also, Iterable):
            raise TypeError(f"also={also!r:.60}: give a list of names")
        told = set(range(len(model.outputs))) - {output for output, _ in pairs}
        told |= {_named(model, name, "also", is_input=False) for name in also}
        if stop:
            told.add(stop.output)
        count, every = _count("most", most), _count("checkpoint", checkpoint)
        return cls(pairs, stop, count, frozenset(told), checkpoint=every)

    @property
    def states(self) -> tuple[tuple[int, int], ...]:
        """The pairs whose values results do not have: they stay where the model runs."""
        return tuple(pair for pair in self.feedback if pair[0] not in self.told)


def _named(model: Model, name: object, where: str, *, is_input: bool) -> int:
    """Return the index of an input or output. Raise ValueError."""
    side, what = (model.inputs, "input") if is_input else (model.outputs, "output")
    names = [tensor.name for tensor in side]
    known = spellings(names).get(name) if isinstance(name, str) else None
    if known is None:
        hint = did_you_mean(str(name), names)
        raise ValueError(f"{where}: there is no {what} {name!r:.60}; the model has {', '.join(names)}{hint}")
    return names.index(known)


def fed_pairs(model: Model, feedback: Mapping[str, str], argument: str = "feedback") -> tuple[tuple[int, int], ...]:
    """Return (output, input) of each pair of names. `argument`: its name, for errors. Raise ValueError, TypeError."""
    if not isinstance(feedback, Mapping):
        raise TypeError(f"{argument}={feedback!r:.60}: give a dict of outputs and the inputs that they become")
    graph, pairs, given = model.main, list[tuple[int, int]](), dict[int, str]()
    for output, name in feedback.items():
        where = f"{argument}[{output!r:.60}]={name!r:.60}"
        m, n = _named(model, output, where, is_input=False), _named(model, name, where, is_input=True)
        if n in given:
            raise ValueError(f"{where}: that input has {given[n]!r} already; feed each input once")
        if m in {fed for fed, _ in pairs}:
            raise ValueError(f"{where}: that output is fed back already, by its other name; feed it once")
        given[n] = output
        _check_pair(where, graph.operands[graph.outputs[m]], graph.operands[graph.inputs[n]])
        pairs.append((m, n))
    return tuple(pairs)


def _check_pair(where: str, source: Operand, target: Operand) -> None:
    """Raise ValueError unless the input can have each value of the output."""
    its, wanted = BufferKind.of(source), BufferKind.of(target)
    if PACKED in {source.type, target.type}:
        raise ValueError(f"{where}: only tensors of numbers are fed back; feed this one yourself, by run()")
    if its != wanted:
        raise ValueError(f"{where}: the output is {its}, and the input {wanted}; convert it in the model")
    if combine_dimensions(source.dimensions, target.dimensions) is None:
        raise ValueError(
            f"{where}: the output has shape {list(source.dimensions)}, and the input takes {list(target.dimensions)} "
            "(0: any); reshape it in the model"
        )


def _stop(model: Model, until: Until) -> Stop | None:
    if until is None:
        return None
    if isinstance(until, str):
        name, values = until, tuple[int, ...]()
    elif isinstance(until, Mapping) and len(until) == 1:
        ((name, given),) = until.items()
        try:
            values = tuple(map(index, given)) if isinstance(given, Iterable) else (index(given),)
        except TypeError:
            raise TypeError(f"until={until!r:.60}: give an integer, or a list of some") from None
        if not 1 <= len(values) <= MOST_VALUES:
            raise ValueError(f"until={until!r:.60}: {len(values)} values; give 1 to {MOST_VALUES}")
        if wrong := [value for value in values if not -(2**63) <= value < 2**63]:
            raise ValueError(f"until={until!r:.60}: {wrong[0]}; give integers from {-(2**63)} to {2**63 - 1}")
    else:
        raise TypeError(f"until={until!r:.60}: give the name of an output, or a dict of one output and its last values")
    output = _named(model, name, f"until={until!r:.60}", is_input=False)
    if (kind := model.outputs[output].kind) or model.outputs[output].dtype.kind not in "biuf":
        raise ValueError(f"until={until!r:.60}: that output holds {kind or model.outputs[output].dtype}, not numbers")
    operand = model.main.operands[model.main.outputs[output]]
    if operand.type.name.endswith("BFLOAT16"):  # numpy has its bits alone
        raise ValueError(f"until={until!r:.60}: that output is {operand.type.name}; convert it in the model")
    if (count := prod(operand.dimensions)) > MOST_ELEMENTS:
        raise ValueError(f"until={until!r:.60}: that output has {count} elements; at most {MOST_ELEMENTS} end a stream")
    return Stop(output, values)


def _count(name: str, given: Any) -> int:
    try:
        found = index(given)
    except TypeError:
        raise TypeError(f"{name}={given!r:.60}: give a number of steps, from 1 to {MOST_STEPS}") from None
    if not 1 <= found <= MOST_STEPS:
        raise ValueError(f"{name}={found}: give a number of steps, from 1 to {MOST_STEPS}")
    return found
