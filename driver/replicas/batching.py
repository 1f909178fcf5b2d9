"""Requests joined along the open first dimension, and their results taken apart; and whether that pays."""

from __future__ import annotations

from collections import deque
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import GeneralFailure
from driver.client.names import copies
from driver.client.surface import blank_inputs
from driver.client.workspace import fitted_inputs
from fmq import clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.client.completion import Completion
    from driver.client.layout import Shapes
    from driver.client.surface import AnyBurst
    from driver.nn import Model
    from driver.replicas.waiting import WaitingRequest

_ROUNDS, _BLOCK_NS, _MOST_NS = 7, 20_000_000, 1_000_000_000


def joinable(model: Model, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], int, object]:
    """Return the arrays as the model takes them, their rows, and a key that is equal for requests that can run
    together. One without rows, or whose inputs have different ones, runs alone.

    Raise ValueError naming the input.
    """
    fitted = fitted_inputs(model, arrays)
    shapes = [getattr(value, "shape", ()) for value in fitted if value is not None]
    rows = {shape[0] if shape else 0 for shape in shapes}
    if len(rows) != 1 or not (count := rows.pop()):
        return fitted, 1, object()
    return fitted, count, tuple(None if value is None else value.shape[1:] for value in fitted)


def joined(requests: Sequence[WaitingRequest]) -> tuple[Any, ...]:
    """Return their inputs, one after the other."""
    if len(requests) == 1:
        return requests[0].arrays
    return tuple(
        None if each[0] is None else np.concatenate(each)
        for each in zip(*(request.arrays for request in requests), strict=True)
    )


def apart(outputs: tuple[Any, ...], requests: Sequence[WaitingRequest]) -> list[tuple[Any, ...]]:
    """Return the outputs of each request: copies, with the same names. Raise GeneralFailure."""
    total = sum(request.rows for request in requests)
    for n, output in enumerate(outputs):
        if len(requests) > 1 and _rows(output) != total:
            shape = f"shape {output.shape}" if isinstance(output, np.ndarray) else f"no {total} maps"
            raise GeneralFailure(
                f"output {n} has {shape} for {total} rows of input, so it cannot be told which belong to "
                "which request; serve this model with batch=1"
            )
    if len(requests) == 1:
        return [copies(outputs)]
    found, begin = [], 0
    for request in requests:
        found.append(copies(type(outputs)(output[begin : begin + request.rows] for output in outputs)))
        begin += request.rows
    return found


def _rows(output: Any) -> int | None:
    """Return the rows of a tensor, or of a sequence that has a map for each row; None where there are none."""
    if isinstance(output, np.ndarray):
        return output.shape[0] if output.ndim else None
    return len(output) if isinstance(output, list) and all(isinstance(row, dict) for row in output) else None


def batch_gain(bursts: Sequence[AnyBurst], alone: Shapes, together: Shapes, depth: int) -> float:
    """Return how many times as many rows a second these bursts run of requests that are joined, on zeros.

    `alone` and `together`: shapes of the inputs of one request, and of as many as may be joined.
    """
    sets = [*blank_inputs(bursts[0].model, [alone, together])]
    found, begin = list[float](), clock.now()
    while len(found) < _ROUNDS and (not found or clock.now() - begin < _MOST_NS):
        one_by_one, joined = (_requests_a_second(bursts, arrays, depth) for arrays in sets)
        found.append(joined / one_by_one)
    return _rows_of(together) / _rows_of(alone) * median(found)


def _requests_a_second(bursts: Sequence[AnyBurst], arrays: tuple[Any, ...], depth: int) -> float:
    """Return the rate at which all bursts together run such requests, with `depth` in flight in each."""
    begin, sent, room = clock.now(), 0, depth * len(bursts)
    in_flight: deque[Completion] = deque()
    for sent, burst in enumerate(cycle(bursts)):
        if sent >= room and clock.now() - begin > _BLOCK_NS:
            break
        if len(in_flight) == room:
            in_flight.popleft().result().raise_for_status()
        in_flight.append(burst.submit(*arrays))
    for completion in in_flight:
        completion.result().raise_for_status()
    return sent * 1e9 / (clock.now() - begin)


def _rows_of(shapes: Shapes) -> int:
    return next((shape[0] for shape in shapes if shape), 1)
