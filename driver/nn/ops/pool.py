"""AVERAGE_POOL_2D and MAX_POOL_2D: first down the columns, then along the rows. Padded positions do not count."""

from functools import partial
from typing import Any

import numpy as np

from ..operation import Array, Call, OperationType, Signature, same_as_input
from ..types import Dimensions
from .real import accumulator, activation_bounds, load, store
from .window import NHWC_FROM_NCHW, Axis, explicit, image_shape, implicit, output_image, stored_shape

EXPLICIT_INPUTS = 10


def _axes(call: Call) -> tuple[Axis, Axis, int, bool]:
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
    y, x, activation, nchw = _axes(call)
    activation_bounds(activation)
    n, _, _, c = image_shape(call.shape(0), nchw)
    return (stored_shape(n, y.out, x.out, c, nchw),)


def _gather(call: Call, image: Array, result: Array, y: Axis, x: Axis, *, function: Any, start: float) -> None:
    """Combine all pixels of each window of `image` into `result` by the associative `function`."""
    n, _, w, c = image.shape
    columns = call.scratch((n, y.out, w, c), image.dtype)
    call.step(columns.fill, start)
    for _, outputs, inputs in y.taps():
        call.step(function, columns[:, outputs], image[:, inputs], out=columns[:, outputs])
    call.step(result.fill, start)
    for _, outputs, inputs in x.taps():
        call.step(function, result[:, :, outputs], columns[:, :, inputs], out=result[:, :, outputs])


def _pool(function: Any, start: float, call: Call) -> None:
    y, x, activation, nchw = _axes(call)
    view = output_image(call, nchw)
    result = accumulator(call, view)
    image = load(call, 0, NHWC_FROM_NCHW if nchw else None)
    _gather(call, image, result, y, x, function=function, start=start)
    if function is np.add:
        counts = np.outer(y.counts(), x.counts())[:, :, None]
        call.step(np.divide, result, counts, result)
    store(call, result, view, activation)


def _pooling(name: str, code: int, function: Any, start: float) -> OperationType:
    signatures = tuple(
        Signature("f0 q0 h2 s3", f"T {n}*INT32", tails=((2, "BOOL"),), ranks=(4,)) for n in (EXPLICIT_INPUTS - 1, 6)
    )
    build = partial(_pool, function, start)
    return OperationType(name, code, signatures, _shape, build, quantisation=same_as_input, takes_empty=True)


AVERAGE_POOL_2D = _pooling("AVERAGE_POOL_2D", 1, np.add, 0.0)
MAX_POOL_2D = _pooling("MAX_POOL_2D", 17, np.maximum, -np.inf)
