"""Pooling: first down the columns, then along the rows. Padded positions do not count."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from ..operation import Array, Call, OperationType, Signature, same_as_input
from ..types import Dimensions
from .real import accumulator, activation_bounds, clamp, load, round_to, store
from .sums import EXACT, LARGEST
from .window import NHWC_FROM_NCHW, Axis, explicit, image_shape, implicit, input_image, output_image, stored_shape

EXPLICIT_INPUTS = 10


def window_axes(call: Call) -> tuple[Axis, Axis, int, bool]:
    """The vertical and the horizontal window, the fused activation and the layout."""
    at = 5 if len(call.inputs) >= EXPLICIT_INPUTS else 2
    nchw = call.flag(at + 5)
    _, h, w, _ = image_shape(call.shape(0), nchw)
    stride_w, stride_h, filter_w, filter_h, activation = (call.integer(i) for i in range(at, at + 5))
    if at == 5:
        left, right, top, bottom = (call.integer(i) for i in range(1, 5))
        y = explicit(h, filter_h, stride_h, 1, paddings=(top, bottom))
        x = explicit(w, filter_w, stride_w, 1, paddings=(left, right))
    else:
        scheme = call.integer(1)
        y, x = implicit(scheme, h, filter_h, stride_h, 1), implicit(scheme, w, filter_w, stride_w, 1)
    return y, x, activation, nchw


def _shape(call: Call) -> tuple[Dimensions]:
    y, x, activation, nchw = window_axes(call)
    activation_bounds(activation)
    n, _, _, c = image_shape(call.shape(0), nchw)
    return (stored_shape(n, y.out, x.out, c, nchw),)


def _gather(call: Call, image: Array, result: Array, y: Axis, x: Axis, *, function: Any, start: float) -> None:
    """Combine all pixels of each window of `image` into `result` by the associative `function`."""
    n, _, w, c = image.shape
    columns = call.scratch((n, y.out, w, c), image.dtype)
    down = [(columns[:, outputs], image[:, inputs]) for _, outputs, inputs in y.taps()]
    _combine(call, columns, down, function=function, start=start)
    across = [(result[:, :, outputs], columns[:, :, inputs]) for _, outputs, inputs in x.taps()]
    _combine(call, result, across, function=function, start=start)


def _combine(call: Call, target: Array, taps: Sequence[tuple[Array, Array]], *, function: Any, start: float) -> None:
    """Combine into `target` pairs of a part of it and what belongs there; those that fill it whole go first."""
    whole = [source for part, source in taps if part.size == target.size]
    if len(whole) > 1:
        call.step(function, whole[0], whole[1], out=target)
    elif whole:
        call.step(np.copyto, target, whole[0])
    else:
        call.step(target.fill, start)
    rest = [(target, source) for source in whole[2:]] + [tap for tap in taps if tap[0].size < target.size]
    for part, source in rest:
        call.step(function, part, source, out=part)


def _mean(squares: bool, call: Call) -> None:
    """Average the pixels of each window, or take the root of the average of their squares."""
    y, x, activation, nchw = window_axes(call)
    view = output_image(call, nchw)
    out = call.outputs[0]
    dtype = np.float64 if out.type.is_quantised and y.filter * x.filter * LARGEST >= EXACT else np.float32
    result = accumulator(call, view, dtype)
    image = load(call, 0, NHWC_FROM_NCHW if nchw else None, dtype)
    if squares:
        image, real = call.scratch(image.shape, dtype), image
        call.step(np.square, real, image)
    _gather(call, image, result, y, x, function=np.add, start=0.0)
    _divide(call, result, y.counts(), x.counts())
    if squares:
        call.step(np.sqrt, result, result)
    if out.type.is_quantised:
        round_to(call, result, view, out.zero_point, activation_bounds(activation, out))
    else:
        store(call, result, view, activation)


def _divide(call: Call, sums: Array, rows: Array, columns: Array) -> None:
    """Divide by the pixels that each window has: one number for each of `rows` times one for each of `columns`.

    In one division, which is exact enough to round, over as many rows at once as have the same number.
    """
    counts = np.repeat(columns.astype(sums.dtype), sums.shape[3]).reshape(len(columns), -1)
    edges = [0, *(np.flatnonzero(np.diff(rows)) + 1), len(rows)]
    for top, bottom in pairwise(edges):
        part = sums[:, top:bottom]
        divisor = counts * rows[top]
        call.step(np.divide, part, divisor if np.ptp(columns) else divisor.flat[0], part)


def _max(call: Call) -> None:
    """The largest pixel of each window; quantised ones compare as they are stored."""
    y, x, activation, nchw = window_axes(call)
    image, out = input_image(call, nchw), call.outputs[0]
    view = output_image(call, nchw)
    lowest = np.iinfo(image.dtype).min if out.type.is_quantised else -np.inf
    _gather(call, image, view, y, x, function=np.maximum, start=lowest)
    low, high = activation_bounds(activation, out)
    clamp(call, view, (low, high) if out.type.dtype.kind == "f" else (int(low or 0), int(high or 0)))


def _pooling(name: str, code: int, types: str, build: Callable[[Call], None]) -> OperationType:
    signatures = tuple(
        Signature(types, f"T {n}*INT32", tails=((2, "BOOL"),), ranks=(4,)) for n in (EXPLICIT_INPUTS - 1, 6)
    )
    return OperationType(name, code, signatures, _shape, build, quantisation=same_as_input, takes_empty=True)


AVERAGE_POOL_2D = _pooling("AVERAGE_POOL_2D", 1, "f0 q0 h2 s3", partial(_mean, False))
L2_POOL_2D = _pooling("L2_POOL_2D", 12, "f0 h2", partial(_mean, True))
MAX_POOL_2D = _pooling("MAX_POOL_2D", 17, "f0 q0 h2 s3", _max)
