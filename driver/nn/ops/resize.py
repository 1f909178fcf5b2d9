"""RESIZE_BILINEAR: rows first, then columns, each an interpolation between two gathered copies."""

import math

import numpy as np

from ..operation import Array, Call, OperationType, Signature, same_as_input
from ..types import Dimensions, OperandType
from .real import accumulator, load, store
from .window import NHWC_FROM_NCHW, image_shape, output_image, stored_shape


def _extent(call: Call, index: int, size: int) -> int:
    """The output extent that input `index` asks for: itself when it is an integer, else a factor."""
    if call.tensor(index).type == OperandType.INT32:
        extent = call.integer(index)
    else:
        factor = call.real(index)
        extent = math.floor(np.float32(size) * np.float32(factor)) if math.isfinite(factor) else 0
    if extent < 1:
        raise ValueError(f"output extent {extent} has to be above 0")
    return extent


def _shape(call: Call) -> tuple[Dimensions]:
    nchw = call.flag(3)
    if call.flag(4) and call.flag(5):
        raise ValueError("align corners and half pixel centres exclude each other")
    n, h, w, c = image_shape(call.shape(0), nchw)
    if h < 1 or w < 1:
        raise ValueError(f"an image of {h} x {w} pixels cannot be resized")
    return (stored_shape(n, _extent(call, 2, h), _extent(call, 1, w), c, nchw),)


def _neighbours(size: int, out: int, align: bool, half_pixel: bool) -> tuple[Array, Array, Array]:
    """For every output position the two source positions it lies between, and the weight of the second."""
    scale = np.float32((size - 1) / (out - 1) if align and out > 1 else size / out)
    centre = np.float32(0.5 if half_pixel else 0.0)
    position = (np.arange(out, dtype=np.float32) + centre) * scale - centre
    low = np.maximum(np.floor(position), 0).astype(np.intp)
    high = np.ceil(position).astype(np.intp) if half_pixel else low + 1
    low = np.minimum(low, size - 1)
    return low, np.clip(high, 0, size - 1), (position - low).astype(np.float32)


def _interpolate(call: Call, source: Array, axis: int, neighbours: tuple[Array, Array, Array], result: Array) -> None:
    low, high, weight = neighbours
    upper = call.scratch(result.shape)
    call.step(np.take, source, low, axis=axis, out=result, mode="clip")
    call.step(np.take, source, high, axis=axis, out=upper, mode="clip")
    call.step(np.subtract, upper, result, upper)
    call.step(np.multiply, upper, weight.reshape([-1 if i == axis else 1 for i in range(4)]), upper)
    call.step(np.add, result, upper, result)


def _bilinear(call: Call) -> None:
    nchw, align, half_pixel = call.flag(3), call.flag(4), call.flag(5)
    view = output_image(call, nchw)
    image = load(call, 0, NHWC_FROM_NCHW if nchw else None)
    n, h, w, c = image.shape
    rows = call.scratch((n, view.shape[1], w, c))
    result = accumulator(call, view)
    _interpolate(call, image, 1, _neighbours(h, view.shape[1], align, half_pixel), rows)
    _interpolate(call, rows, 2, _neighbours(w, view.shape[2], align, half_pixel), result)
    store(call, result, view, 0)


RESIZE_BILINEAR = OperationType(
    "RESIZE_BILINEAR",
    23,
    tuple(
        Signature(f"f{since} h2 q2 s3", f"T {sizes}", tails=((2, "BOOL"), (3, "BOOL"), (3, "BOOL")), ranks=(4,))
        for since, sizes in ((0, "INT32 INT32"), (2, "S S"))
    ),
    _shape,
    _bilinear,
    quantisation=same_as_input,
    takes_empty=True,
)
