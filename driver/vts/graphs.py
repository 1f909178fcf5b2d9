"""operations/random_graph: random models on which a device must agree with the reference.

A model that shows a difference is reduced to the smallest that does.

    found = smallest_difference(run)   # run(graph) -> outputs of the device
    print(found)

Needs the extra `vts`, for hypothesis.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst import StatusError
from burst_engine.names import install_command
from driver.nn import OPERATIONS, Interpreter, Model, Operand, OperandLifeTime, OperandType, Operation, Subgraph
from driver.vts.kit import Failed, Test, check, skip

from .makers import IMAGE_MAKERS, MAKERS
from .sketch import Array, Sketch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from driver.vts.sketch import Array
    from driver.vts.target import Target

_L, _T = OperandLifeTime, OperandType
LARGEST_VALUE = 1e4
"""Larger floats are not compared; nor are infinities and NaN."""
FEW = 10
"""Smaller outputs have no meaningful mean."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Limits for single values, and for bias and mean square error over all elements of an output."""

    bias: float
    mse: float
    absolute: float
    relative: float = 0.0


_INT32 = Tolerance(np.inf, np.inf, 1)
_EXACT = Tolerance(0, 0, 0)
_TOLERANCES: dict[str, tuple[Tolerance, Tolerance, Tolerance]] = {
    "strict": (Tolerance(1e-7, 1e-10, 1e-6, 1e-6), Tolerance(1e-4, 1e-8, 1e-3, 1e-3), Tolerance(0.1, 0.1, 1)),
    "medium": (Tolerance(1e-6, 1e-8, 1e-5, 1e-5), Tolerance(1e-3, 1e-5, 1e-2, 1e-2), Tolerance(1.2, 1.2, 2)),
    "relaxed": (Tolerance(3e-5, 1e-6, 1e-3, 1e-3), Tolerance(5e-3, 1e-3, 1, 1), Tolerance(1.5, 1.5, 10)),
    "conv": (Tolerance(4e-4, 1e-5, 2e-2, 2e-2), Tolerance(5e-2, 1e-2, 1, 1), Tolerance(1.5, 1.5, 10)),
}
"""By level: for float32, for float16, and for quantised steps."""


class RandomGraph(NamedTuple):
    """A valid model, an array for each input, and the tolerance level that its operations need."""

    model: Model
    feeds: tuple[Array, ...]
    level: str

    def __repr__(self) -> str:
        graph = self.model.main
        lines = [f"{i}: {_described(operand)}" for i, operand in enumerate(graph.operands)]
        lines += [
            f"{o.type}({', '.join(map(str, o.inputs))}) -> {', '.join(map(str, o.outputs))}" for o in graph.operations
        ]
        return "\n".join(lines)


def _described(operand: Operand) -> str:
    quant = f" scale {operand.scale} zero point {operand.zero_point}" if operand.type.is_quantised else ""
    value = f" = {np.asarray(operand.value).tolist()}" if operand.lifetime.is_constant else ""
    return f"{operand.lifetime.name} {operand.type.name} {list(operand.dimensions)}{quant}{value}"


def graphs(operations: Collection[str] | None = None, *, largest: int = 8) -> Any:
    """Return a hypothesis strategy of `Graph`s of 1 to `largest` operations.

    operations: names to draw from; None for all that have a maker. Some graphs have unknown dimensions.
    """
    from hypothesis import strategies as st

    makers = {name: maker for name, maker in (MAKERS | IMAGE_MAKERS).items() if name in OPERATIONS}
    names = [name for name in makers if operations is None or name in operations]
    if not names:
        raise ValueError(f"operations={operations!r}: none of them has a maker")

    def step(draw: Callable[[Any], Any], sketch: Sketch, number: int) -> bool:
        """Draw one more operation, or none: a separate strategy, so that hypothesis can remove it as a whole."""
        sketch.draw = draw
        goes_on = sketch.integer(0, 4) > 0 or number == 0
        if goes_on:
            name = sketch.choice(names)
            makers[name](sketch, name)
        return goes_on

    def graph(draw: Callable[[Any], Any]) -> RandomGraph:
        sketch = Sketch(draw)
        for n in range(largest):
            if not draw(st.composite(step)(sketch, n)):
                break
        sketch.draw = draw
        return RandomGraph(_opened(sketch.model(), sketch), tuple(sketch.feeds), sketch.level)

    return st.composite(graph)()


def _opened(model: Model, sketch: Sketch) -> Model:
    """Make some dimensions, or the rank, of non-constant tensors unknown."""
    if not sketch.flag():
        return model
    operands = []
    for operand in model.main.operands:
        rank = len(operand.dimensions)
        fixed = operand.lifetime.is_constant or operand.channel_quant is not None
        hidden = 0 if fixed or not rank else sketch.integer(0, 1 << rank)
        dimensions = tuple(0 if hidden >> k & 1 else d for k, d in enumerate(operand.dimensions))
        operands.append(replace(operand, dimensions=() if hidden >> rank else dimensions))
    return replace(model, main=replace(model.main, operands=tuple(operands)))


def reference(graph: RandomGraph) -> list[Array]:
    """Return the outputs of the interpreter."""
    bound = Interpreter(graph.model).bind(graph.feeds)
    bound.run()
    return [tensor.data for tensor in bound.results]


def compare(actual: Array, expected: Array, kind: OperandType, level: str) -> str | None:
    """Describe how an output differs by more than the level allows; None when it does not."""
    if actual.shape != expected.shape:
        return f"dimensions {list(actual.shape)} instead of {list(expected.shape)}"
    tolerance = _tolerance(kind, level)
    a, e = (np.asarray(x, np.float64) if kind != _T.TENSOR_BOOL8 else (x != 0) * 1.0 for x in (actual, expected))
    counted = np.isfinite(e) & (np.abs(e) <= LARGEST_VALUE) if kind.dtype.kind == "f" else np.full(e.shape, True)
    a, e = a[counted], e[counted]
    if not e.size:
        return None
    with np.errstate(invalid="ignore"):
        off = ~(np.abs(a - e) <= tolerance.absolute + tolerance.relative * np.abs(e))
    if off.any():
        worst = int(np.argmax(np.where(off, np.abs(a - e), -1)))
        return f"{off.sum()} of {e.size} elements are wrong, such as {a[worst]} instead of {e[worst]}"
    if e.size < FEW:
        return None
    difference = (a - e) / (np.maximum(1, np.abs(e)) if kind.dtype.kind == "f" else 1)
    bias, mse = abs(float(difference.mean())), float(np.square(difference).mean())
    if bias > tolerance.bias or mse > tolerance.mse:
        return f"bias {bias:.3g} and mean square error {mse:.3g} of {e.size} elements"
    return None


def _tolerance(kind: OperandType, level: str) -> Tolerance:
    single, half, quantised = _TOLERANCES[level]
    if kind in {_T.TENSOR_BOOL8, _T.BOOL}:
        return _EXACT
    if kind.is_quantised:
        return quantised
    return {4: single, 2: half}[kind.dtype.itemsize] if kind.dtype.kind == "f" else _INT32


def disagreement(run: Callable[[RandomGraph], Sequence[Array]], graph: RandomGraph) -> str | None:
    """Describe how the outputs of `run` differ from the reference's; None when they agree."""
    operands, outputs = graph.model.main.operands, graph.model.main.outputs
    given = run(graph)
    if len(given) != len(outputs):
        return f"{len(given)} outputs instead of {len(outputs)}"
    for n, (index, actual, expected) in enumerate(zip(outputs, given, reference(graph), strict=True)):
        if said := compare(actual, expected, operands[index].base_type, graph.level):
            return f"output {n}: {said}"
    return None


def without(graph: RandomGraph, number: int) -> RandomGraph | None:
    """Return the graph without one operation, whose results are fed instead; None when no operation is left."""
    main = graph.model.main
    rest = (*main.operations[:number], *main.operations[number + 1 :])
    if not rest:
        return None
    read, written = {i for o in rest for i in o.inputs}, {i for o in rest for i in o.outputs}
    fed = dict(zip(main.inputs, graph.feeds, strict=True)) | _computed(graph, main.operations[number].outputs)
    inputs = [i for i in fed if i in read]
    outputs = [i for i in sorted(written) if i not in read or i in main.outputs]
    lifetimes = dict.fromkeys(inputs, _L.SUBGRAPH_INPUT) | dict.fromkeys(outputs, _L.SUBGRAPH_OUTPUT)
    kept = sorted(read | written)
    new = {old: place for place, old in enumerate(kept)}
    operands = [replace(main.operands[i], lifetime=lifetimes.get(i, main.operands[i].lifetime)) for i in kept]
    operations = [Operation(o.type, [new[i] for i in o.inputs], [new[i] for i in o.outputs]) for o in rest]
    smaller = Subgraph(operands, operations, [new[i] for i in inputs], [new[i] for i in outputs])
    return graph._replace(model=replace(graph.model, main=smaller), feeds=tuple(fed[i] for i in inputs))


def _computed(graph: RandomGraph, indices: Sequence[int]) -> dict[int, Array]:
    """Return what the reference computes for these operands."""
    main = graph.model.main
    operands = [
        replace(operand, lifetime=_L.SUBGRAPH_OUTPUT) if i in indices else operand
        for i, operand in enumerate(main.operands)
    ]
    outputs = (*main.outputs, *(i for i in indices if i not in main.outputs))
    shown = replace(main, operands=tuple(operands), outputs=outputs)
    values = dict(zip(outputs, reference(graph._replace(model=replace(graph.model, main=shown))), strict=True))
    return {i: values[i] for i in indices}


def smallest_difference(
    run: Callable[[RandomGraph], Sequence[Array]],
    *,
    operations: Collection[str] | None = None,
    examples: int = 200,
    seed: int = 0,
) -> tuple[RandomGraph, str] | None:
    """Find the smallest graph on which a device differs from the reference, and how; None when all agree.

    run: returns the device's outputs in the model's order. examples: how many graphs to try.

    Operations that do not matter are removed from a graph that shows a difference; then the remaining ones are drawn
    again in smaller and smaller sizes.
    """
    from hypothesis import Phase

    found = _found(run, graphs(operations), examples, seed, phases=(Phase.generate,))
    if found is None:
        return None
    kinds = [o.type for o in found.model.main.operations]
    again = graphs(kinds, largest=len(kinds))
    smaller = _found(run, again, examples, seed, phases=(Phase.generate, Phase.shrink)) or found
    if len(smaller.model.main.operations) <= len(kinds):
        found = smaller
    return found, disagreement(run, found) or "no difference when it ran again"


def _found(
    run: Callable[[RandomGraph], Sequence[Array]], strategy: Any, examples: int, seed: int, phases: tuple[Any, ...]
) -> RandomGraph | None:
    """Return a graph with a difference that needs all of its operations."""
    import random

    import hypothesis

    settings = hypothesis.settings(
        max_examples=examples,
        phases=phases,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    try:
        found: RandomGraph = hypothesis.find(
            strategy,
            lambda graph: disagreement(run, graph) is not None,
            settings=settings,
            random=random.Random(seed),  # noqa: S311 (to be repeatable is the point)
        )
    except hypothesis.errors.NoSuchExample:
        return None
    while smaller := next(filter(None, (_still_wrong(run, found, n) for n in _operations(found))), None):
        found = smaller
    return found


def _operations(graph: RandomGraph) -> range:
    return range(len(graph.model.main.operations))


def _still_wrong(run: Callable[[RandomGraph], Sequence[Array]], graph: RandomGraph, number: int) -> RandomGraph | None:
    smaller = without(graph, number)
    return smaller if smaller is not None and disagreement(run, smaller) is not None else None


def tests(mixed: int, each: int) -> Iterator[Test]:
    """mixed: how many graphs of all operations together; alone: how many of each one alone."""
    yield Test("operations/random_graph/mixed", partial(agree, None, mixed))
    for name in sorted((MAKERS | IMAGE_MAKERS).keys() & OPERATIONS.keys()) if each else ():
        yield Test(f"operations/random_graph/{name.lower()}", partial(agree, [name], each))


def agree(operations: Sequence[str] | None, examples: int, target: Target) -> None:
    """The device agrees with the reference within the HAL's tolerances for random graphs."""
    if find_spec("hypothesis") is None:
        skip(f"random graphs need hypothesis: {install_command('vts')}")
    found = smallest_difference(partial(_run, target), operations=operations, examples=examples)
    check(found is None, f"{found[1]}, in this graph:\n{found[0]!r}" if found else "")


def _run(target: Target, graph: RandomGraph) -> Sequence[Array]:
    """Return the outputs of the device; the reference's own where the device does not support an operation."""
    try:
        if not all(target.supported(graph.model)):
            return reference(graph)
        with target.prepared(graph.model) as model:
            return model.run(*graph.feeds, timeout=target.patience)
    except StatusError as error:
        raise Failed(f"the device answered {error.status.name}: {error}, to this graph:\n{graph!r}") from error
