"""Memory for executions: where arguments lie, what is put there, and what is found there afterwards."""

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
"""What outputs, and the gaps between arguments, hold before an execution."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an execution.

    outputs: the bytes of each output's memory, copied.
    """

    status: ErrorStatus
    message: str
    shapes: tuple[OutputShape, ...]
    timing: tuple[int | None, ...]
    outputs: tuple[Array, ...] = ()


class Bench:
    """One pool that holds all arguments, each on 64 bytes and with a gap behind it. It is kept, and grows when needed.

    A device learns about it once, however many models it is used with.
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
        """Executes a case with so many bytes for each output: on the plain path, or however `run` does it."""
        request = self._request(prepared, case, sizes)
        run = run or (lambda request: prepared.execute(request, timeout=patience))
        return answer(run, request)

    def _request(self, prepared: RemotePreparedModel, case: Case, sizes: Sequence[int]) -> Request:
        lengths = [0 if feed is None else feed.nbytes for feed in case.feeds] + [*sizes]
        *offsets, end = _offsets(lengths)
        if end > self._memory.nbytes:
            prepared.device.free_memory(self._memory)
            self._memory = Memory.create(2 * end)
        self._memory.asarray(np.uint8, end)[:] = JUNK
        return request(case, [Place(self._memory, offset) for offset in offsets], sizes)


def answer(run: Execute, request: Request) -> Answer:
    """Executes a request, and copies what its outputs hold then."""
    found = refusal(run, request)
    outputs = tuple(request.pools[a.pool].asarray(np.uint8, a.length, a.offset).copy() for a in request.outputs)
    return replace(found, outputs=outputs)


def refusal(run: Execute, request: Request) -> Answer:
    """Executes a request whose outputs may be anywhere, and does not look there."""
    result = run(request)
    return Answer(result.status, result.message, tuple(result.output_shapes), tuple(result.timing))


@dataclass(frozen=True, slots=True)
class Place:
    """Where an argument lies."""

    pool: Memory
    offset: int


def request(case: Case, places: Sequence[Place], sizes: Sequence[int]) -> Request:
    """A request with its arguments at those places, inputs first; `sizes` are those of the outputs, in bytes."""
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


def _input(operand: Operand, feed: Array | None, place: Place, pools: list[Memory]) -> RequestArgument:
    if feed is None:
        return RequestArgument(has_no_value=True)
    place.pool.asarray(np.uint8, feed.nbytes, place.offset)[:] = feed.reshape(-1).view(np.uint8)
    dimensions = () if feed.shape == operand.dimensions else feed.shape
    return RequestArgument(pool=pools.index(place.pool), offset=place.offset, length=feed.nbytes, dimensions=dimensions)


def _offsets(lengths: Sequence[int]) -> list[int]:
    """Where each argument begins, and where the last gap ends."""
    places = [_GAP]
    for length in lengths:
        places.append(places[-1] + -(-length // _ALIGN) * _ALIGN + _GAP)
    return places


def output_sizes(case: Case) -> list[int]:
    """Bytes that each output needs, at least one; plenty where nobody says."""
    sizes = []
    for operand, expected in zip(case.outputs, case.expected, strict=True):
        if expected is not None and expected.size:
            sizes.append(expected.nbytes)
        elif 0 in operand.dimensions:
            sizes.append(1 if expected is not None else _UNKNOWN_SIZE)
        else:
            sizes.append(operand.type.element_size * int(np.prod(operand.dimensions)))
    return sizes
