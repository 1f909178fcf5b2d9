"""Memory for executions: places the arguments, fills them, and reads them back afterwards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import ErrorStatus, Memory, OutputShape, Request, RequestArgument, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from driver.client.prepared_model import RemotePreparedModel
    from driver.nn import Operand
    from driver.vts.cases import Case

    Array = NDArray[Any]
    Execute = Callable[[Request], Result]

_ALIGN = 64
_GAP = 64
_FIRST_SIZE = 1 << 20
_UNKNOWN_SIZE = 1 << 16
JUNK = 0xA5
"""The byte that fills outputs, and the gaps between arguments, before an execution."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one execution.

    outputs: a copy of the bytes of each output's memory.
    """

    status: ErrorStatus
    message: str
    shapes: tuple[OutputShape, ...]
    timing: tuple[int | None, ...]
    outputs: tuple[Array, ...] = ()


class Bench:
    """One pool for all arguments, each aligned to 64 bytes and followed by a gap. It is reused, and grows on demand.

    A device learns about it once, for any number of models.
    """

    def __init__(self) -> None:
        self._memory = Memory.create(_FIRST_SIZE)

    def execute(
        self,
        prepared: RemotePreparedModel,
        case: Case,
        sizes: Sequence[int],
        patience: float,
        run: Execute | None = None,
    ) -> Answer:
        """Execute a case. sizes: bytes for each output. run: how to execute; the plain path by default."""
        request = self.request(prepared, case, sizes)
        run = run or (lambda request: prepared.execute(request, timeout=patience))
        return answer(run, request)

    def request(self, prepared: RemotePreparedModel, case: Case, sizes: Sequence[int]) -> Request:
        """Return a request with the case's inputs, and junk in its outputs."""
        lengths = [0 if feed is None else feed.nbytes for feed in case.feeds] + [*sizes]
        *offsets, end = _offsets(lengths)
        if end > self._memory.nbytes:
            prepared.device.free_memory(self._memory)
            self._memory = Memory.create(2 * end)
        self._memory.asarray(np.uint8, end)[:] = JUNK
        return request(case, [ArgumentPlace(self._memory, offset) for offset in offsets], sizes)


def answer(run: Execute, request: Request) -> Answer:
    """Execute a request and copy its outputs."""
    found = refusal(run, request)
    outputs = tuple(request.pools[a.pool].asarray(np.uint8, a.length, a.offset).copy() for a in request.outputs)
    return replace(found, outputs=outputs)


def refusal(run: Execute, request: Request) -> Answer:
    """Execute a request without reading its outputs, which may lie anywhere."""
    result = run(request)
    return Answer(result.status, result.message, tuple(result.output_shapes), tuple(result.timing))


@dataclass(frozen=True, slots=True)
class ArgumentPlace:
    """Position of an argument: a pool and an offset."""

    pool: Memory
    offset: int


def request(case: Case, places: Sequence[ArgumentPlace], sizes: Sequence[int]) -> Request:
    """Return a request with its arguments at `places`, inputs first. sizes: bytes of each output."""
    pools = list(dict.fromkeys(place.pool for place in places))
    inputs, outputs = places[: len(case.feeds)], places[len(case.feeds) :]
    operands = [case.model.main.operands[i] for i in case.model.main.inputs]
    arguments = [
        _input(operand, feed, place, pools) for operand, feed, place in zip(operands, case.feeds, inputs, strict=True)
    ]
    results = [
        RequestArgument(pool=pools.index(place.pool), offset=place.offset, length=size)
        for place, size in zip(outputs, sizes, strict=True)
    ]
    return Request(tuple(arguments), tuple(results), tuple(pools))


def _input(operand: Operand, feed: Array | None, place: ArgumentPlace, pools: list[Memory]) -> RequestArgument:
    if feed is None:
        return RequestArgument(has_no_value=True)
    place.pool.asarray(np.uint8, feed.nbytes, place.offset)[:] = feed.reshape(-1).view(np.uint8)
    dimensions = () if feed.shape == operand.dimensions else feed.shape
    return RequestArgument(pool=pools.index(place.pool), offset=place.offset, length=feed.nbytes, dimensions=dimensions)


def _offsets(lengths: Sequence[int]) -> list[int]:
    """Return the offset of each argument, and the end of the last gap."""
    places = [_GAP]
    for length in lengths:
        places.append(places[-1] + -(-length // _ALIGN) * _ALIGN + _GAP)
    return places


def output_sizes(case: Case) -> list[int]:
    """Return bytes for each output: what it needs, at least one; a generous size where the case does not say."""
    sizes = []
    for operand, expected in zip(case.outputs, case.expected, strict=True):
        if expected is not None and expected.size:
            sizes.append(expected.nbytes)
        elif 0 in operand.dimensions:
            sizes.append(1 if expected is not None else _UNKNOWN_SIZE)
        else:
            sizes.append(operand.type.element_size * int(np.prod(operand.dimensions)))
    return sizes
