"""Executes a model: on the same inputs again and again, or on one frame or block after the other."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

from driver.client.names import copies

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from numpy.typing import NDArray

    from driver.cli.inputs import Feed
    from driver.cli.states import States
    from driver.client.stream_plan import Until
    from driver.runtime.compiled import CompiledModel

    Arrays = Sequence[NDArray[Any]]
    Call = Callable[[Arrays], Arrays]

_DEPTH = 4  # results that a stream may be ahead of this command


class Stages(NamedTuple):
    """The time that the requests spent in each stage."""

    device: str
    us: dict[str, Any]


class StagedCall(NamedTuple):
    """A way to execute: `call` takes the inputs and returns the outputs; `stages` of the calls so far."""

    call: Call
    stages: Callable[[], list[Stages]]


@contextmanager
def execution(compiled: CompiledModel, arrays: Arrays, deadline: float | None, *, plain: bool) -> Iterator[StagedCall]:
    """Through a burst, or on the plain path. `arrays`: inputs of the shapes to begin with."""
    if plain:
        yield StagedCall(lambda its: compiled.run(*its, timeout=deadline), list)
        return
    is_open = any(tensor.shape is None or None in tensor.shape for tensor in compiled.model.inputs)
    with compiled.burst(input_shapes=[array.shape for array in arrays] if is_open else None) as burst:

        def stages() -> list[Stages]:
            stats = burst.stats()
            steps = stats.get("steps", [{"device": "", **stats}])
            return [Stages(step["device"], step["stages"]) for step in steps if "stages" in step]

        yield StagedCall(lambda its: burst.run(*its, timeout=deadline).outputs, stages)


class TimedStep(NamedTuple):
    """One execution."""

    number: int
    second: float  #: at which its frame or block begins, or the result of a stream came
    us: float
    outputs: Arrays


def steps(call: Call, feeds: Sequence[Feed], states: States) -> Iterator[TimedStep]:
    """Execute once for each frame or block; without one, without end. States go from each execution to the next."""
    arrays, second = [feed.array for feed in feeds], 0.0
    later = {n: feed.later.values for n, feed in enumerate(feeds) if feed.later}
    for number in count():
        begin = time.perf_counter()
        outputs = call(arrays)
        yield TimedStep(number, second, 1e6 * (time.perf_counter() - begin), outputs)
        for n, values in later.items():
            following = next(values, None)
            if following is None:
                return
            second, arrays[n] = following
        for o, i in states.items():
            arrays[i] = np.array(outputs[o]).reshape(arrays[i].shape)


def streamed(
    compiled: CompiledModel, feeds: Sequence[Feed], states: States, *, until: Until, most: int, deadline: float | None
) -> Generator[TimedStep, None, None]:
    """Have the device repeat the execution on its states, and yield the results. Raise UsageError for a wrong `until`.

    `deadline`: seconds that all of it may take.
    """
    model, begun = compiled.model, time.perf_counter()
    feedback = {model.outputs[o].name: model.inputs[i].name for o, i in states.items()}
    end = None if deadline is None else time.monotonic() + deadline
    with compiled.burst(depth=_DEPTH) as burst, ExitStack() as stack:
        given = [feed.array for feed in feeds]
        try:
            stream = burst.stream_results(given, feedback=feedback, until=until, most=most, deadline=end)
        except (TypeError, ValueError) as error:
            raise click.UsageError(f"--stream: {error}") from error
        since = begun
        for number, result in enumerate(stack.enter_context(stream)):
            now = time.perf_counter()
            yield TimedStep(number, now - begun, 1e6 * (now - since), copies(result.outputs))
            since = time.perf_counter()


def until_of(text: str | None) -> Until:
    """Return what ends a stream, of a value of --until: OUTPUT, or OUTPUT=VALUE,VALUE. Raise UsageError."""
    name, equals, values = (text or "").rpartition("=")
    if not equals:
        return text
    try:
        return {name: [int(value) for value in values.split(",")]}
    except ValueError:
        raise click.UsageError(f"--until {text}: pass OUTPUT, or OUTPUT=VALUE,VALUE with whole numbers") from None
