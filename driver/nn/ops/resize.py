"""RESIZE_BILINEAR and RESIZE_NEAREST_NEIGHBOR: rows first, then columns, gathered from a table of positions."""

import math
from collections.abc import Sequence

import numpy as np

from ..model import Operand
from ..operation import Array, Call, OperationType, Signature, same_as_input
from ..types import Dimensions, OperandType
from .real import accumulator, activation_bounds, load, round_to, store
from .sums import strips
from .window import NHWC_FROM_NCHW, image_shape, input_image, output_image, stored_shape


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


def _size_gate(inputs: Sequence[Operand], _outputs: Sequence[Operand]) -> int:
    """Before HAL 1.2 sizes were no factors."""
    return 0 if inputs[1].type == OperandType.INT32 else 2


def _scale(size: int, out: int, align: bool) -> np.float32:
    """Source positions per output position."""
    return np.float32((size - 1) / (out - 1) if align and out > 1 else size / out)


def neighbours(size: int, out: int, align: bool, half_pixel: bool) -> tuple[Array, Array, Array]:
    """For every output position the two source positions it lies between, and the weight of the second."""
    centre = np.float32(0.5 if half_pixel else 0.0)
    position = (np.arange(out, dtype=np.float32) + centre) * _scale(size, out, align) - centre
    low = np.maximum(np.floor(position), 0).astype(np.intp)
    high = np.ceil(position).astype(np.intp) if half_pixel else low + 1
    low = np.minimum(low, size - 1)
    return low, np.clip(high, 0, size - 1), (position - low).astype(np.float32)


def _bilinear(call: Call) -> None:
    nchw, align, half_pixel = call.flag(3), call.flag(4), call.flag(5)
    view, out = output_image(call, nchw), call.outputs[0]
    image = load(call, 0, NHWC_FROM_NCHW if nchw else None)
    result = accumulator(call, view)
    (batch, h, w, c), (height, width) = image.shape, view.shape[1:3]
    down, across = neighbours(h, height, align, half_pixel), neighbours(w, width, align, half_pixel)
    weights = np.repeat(across[2], c).reshape(width, c)
    for n, rows in strips(batch, height, max(w, width) * c * image.itemsize):
        part = result[n, rows]
        lines = call.shared("lines", (len(part), part.shape[1], w, c), np.float32)
        low, high, weight = (array[rows] for array in down)
        _interpolate(call, image[n], 1, (low, high, weight[:, None, None]), lines)
        _interpolate(call, lines, 2, (*across[:2], weights), part)
        if out.type.is_quantised:
            round_to(call, part, view[n, rows], out.zero_point, activation_bounds(0, out))
        else:
            store(call, part, part if result is view else view[n, rows], 0)


def _interpolate(call: Call, source: Array, axis: int, neighbours: tuple[Array, Array, Array], result: Array) -> None:
    low, high, weight = neighbours
    upper = call.shared("upper", result.shape, np.float32)
    call.step(np.take, source, low, axis=axis, out=result, mode="clip")
    call.step(np.take, source, high, axis=axis, out=upper, mode="clip")
    call.step(np.subtract, upper, result, upper)
    call.step(np.multiply, upper, weight, upper)
    call.step(np.add, result, upper, result)


def nearest_indices(size: int, out: int, align: bool, half_pixel: bool) -> Array:
    """For every output position the source position that it copies."""
    centre = np.float32(0.5 if half_pixel else 0.0)
    position = (np.arange(out, dtype=np.float32) + centre) * _scale(size, out, align)
    nearest = np.floor(position + np.float32(0.5) if align else position)
    indices: Array = np.clip(nearest, 0, size - 1).astype(np.intp)
    return indices


def _nearest(call: Call) -> None:
    nchw, align, half_pixel = call.flag(3), call.flag(4), call.flag(5)
    view, image = output_image(call, nchw), input_image(call, nchw)
    n, h, w, c = image.shape
    rows = call.scratch((n, view.shape[1], w, c), image.dtype)
    call.step(np.take, image, nearest_indices(h, view.shape[1], align, half_pixel), axis=1, out=rows, mode="clip")
    call.step(np.take, rows, nearest_indices(w, view.shape[2], align, half_pixel), axis=2, out=view, mode="clip")


def _signatures(types: str, layout: str, tails: tuple[tuple[int, str], ...]) -> tuple[Signature, ...]:
    """With the output extents, and with factors."""
    return tuple(Signature(types, f"T {sizes} {layout}", tails=tails, ranks=(4,)) for sizes in ("2*INT32", "2*S"))


_FLAGS = ((3, "BOOL"), (3, "BOOL"))
RESIZE_BILINEAR = OperationType(
    "RESIZE_BILINEAR",
    23,
    _signatures("f0 h2 q2 s3", "", ((2, "BOOL"), *_FLAGS)),
    _shape,
    _bilinear,
    quantisation=same_as_input,
    takes_empty=True,
    gate=_size_gate,
)
RESIZE_NEAREST_NEIGHBOR = OperationType(
    "RESIZE_NEAREST_NEIGHBOR",
    94,
    _signatures("f2 h2 q2 s3", "BOOL", _FLAGS),
    _shape,
    _nearest,
    quantisation=same_as_input,
    takes_empty=True,
)
