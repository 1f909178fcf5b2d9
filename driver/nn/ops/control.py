"""IF and WHILE: operations that run subgraphs.

What a subgraph gives may depend on values, its shapes included; so both are `is_dynamic`, and computed where the others
only look at shapes.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..blocks import Look
from ..errors import ExecutionFailed, LoopTimeout
from ..operation import ANY_RANK, Array, Call, OperationType, Signature, copy_results
from ..types import Dimensions

Values = list[Array | None]


def _values(call: Call, first: int) -> Values:
    """Return the data of the inputs from `first` on; None where omitted."""
    return [None if tensor is None else tensor.data for tensor in call.inputs[first:]]


def _give(call: Call, results: Sequence[Array]) -> Sequence[Dimensions]:
    call.results = results
    return [result.shape for result in results]


def _named(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function returns; a failure inside of a subgraph says in which."""
    try:
        return function(*arguments)
    except ExecutionFailed as error:
        raise ValueError(f"in its {what}: {error}") from error


def _if(call: Call) -> Sequence[Dimensions]:
    branch = 1 if call.matrix(0).reshape(-1)[0] else 2
    bound = _named("branch", call.graph(branch).bind, _values(call, 3), None, None, call.loop_timeout, call.look)
    _named("branch", bound.run)
    return _give(call, [tensor.data for tensor in bound.results])


class _Loop:
    """The two subgraphs of a WHILE and the values that go round.

    Where no shape depends on values, the state lies in two places that take turns, and each direction is bound once.
    """

    def __init__(self, call: Call) -> None:
        self._condition, self._body, self._timeout = call.graph(0), call.graph(1), call.loop_timeout
        self.look = partial(_look_in_time, call.look, time.monotonic() + call.loop_timeout, call.loop_timeout)
        self._is_static = self._condition.is_static and self._body.is_static
        self._bound: dict[tuple[Any, int], Any] = {}
        state = len(self._body.model.main.outputs)
        given = _values(call, 2)
        self.values: Values = [np.array(value) if value is not None else None for value in given[:state]] + given[
            state:
        ]
        self._places: list[Values] = [self.values[:state]]
        self._turn = 0

    def goes_on(self) -> bool:
        """Return True if the condition holds."""
        (found,) = _named("condition", self._run, self._condition, None)
        return bool(found.reshape(-1)[0])

    def step(self) -> None:
        """Do one iteration."""
        results = _named("body", self._run, self._body, self._target())
        if len(self._places) == 1:
            self._places.append(results)
            self._is_static = self._is_static and _fit(self._places[0], results)
        self.values[: len(results)] = results
        self._turn = 1 - self._turn

    def _target(self) -> list[Array] | None:
        """Return where the body writes to: its own memory at first, then the place that was read before."""
        if not self._is_static or len(self._places) == 1:
            return None
        return [value.reshape(-1).view(np.uint8) for value in self._places[1 - self._turn] if value is not None]

    def _run(self, graph: Any, outputs: list[Array] | None) -> list[Array]:
        bound = self._bound.get((graph, self._turn)) if self._is_static else None
        if bound is None:
            bound = graph.bind(self.values, outputs, loop_timeout=self._timeout, look=self.look)
            self._bound[graph, self._turn] = bound
        bound.run()
        return [tensor.data for tensor in bound.results]


def _look_in_time(look: Look, end: float, timeout: float) -> None:
    """Look, as the operations of a loop do. Raise LoopTimeout when the loop has taken too long."""
    look()
    if time.monotonic() > end:
        raise LoopTimeout(f"a WHILE took longer than its loop timeout of {timeout} s")


def _fit(one: Values, other: Sequence[Array]) -> bool:
    return all(a is not None and a.shape == b.shape for a, b in zip(one, other, strict=True))


def _while(call: Call) -> Sequence[Dimensions]:
    loop = _Loop(call)
    while loop.goes_on():
        loop.look()
        loop.step()
    results = loop.values[: len(call.outputs)]
    if any(result is None for result in results):
        raise ValueError("an output would be a value that was omitted")
    return _give(call, [result for result in results if result is not None])


OPERATIONS = (
    OperationType(
        "IF",
        96,
        (Signature("b3", "TENSOR_BOOL8 g g ANY...", outputs="ANY...", ranks=(1,)),),
        _if,
        build=copy_results,
        takes_empty=True,
        is_dynamic=True,
    ),
    OperationType(
        "WHILE",
        97,
        (Signature("g3", "g g ANY...", outputs="ANY...", ranks=ANY_RANK),),
        _while,
        build=copy_results,
        takes_empty=True,
        is_dynamic=True,
    ),
)
