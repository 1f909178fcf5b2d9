"""Requests joined along the open first dimension, and their results taken apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from burst import GeneralFailure
from driver.client.names import copies
from driver.client.workspace import fitted_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.nn import Model
    from driver.replicas.waiting import WaitingRequest


def joinable(model: Model, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], int, object]:
    """Return the arrays as the model takes them, their rows, and a key that is equal for requests that can run
    together.

    Raise ValueError naming the input.
    """
    fitted = fitted_inputs(model, arrays)
    for tensor, value in zip(model.inputs, fitted, strict=True):
        if value is not None and not isinstance(value, np.ndarray):
            raise ValueError(
                f"input {tensor.name!r} is {tensor.kind}, which has no rows: serve this model with batch=1"
            )
    rows = {array.shape[0] for array in fitted if array is not None and array.ndim}
    if len(rows) != 1:
        shapes = ", ".join("-" if a is None else str(a.shape) for a in fitted)
        raise ValueError(f"inputs of shapes {shapes}: with batch, all have the same size along the first dimension")
    key = tuple(None if array is None else array.shape[1:] for array in fitted)
    return fitted, rows.pop(), key


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
