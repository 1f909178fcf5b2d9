"""TRANSPOSE_CONV_2D: one matrix product, whose results are added to the output tap by tap."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from ..operation import Array, Call, OperationType, Signature, Tensor
from ..types import Dimensions
from .real import activation_bounds
from .sums import Finish, bias_vector, channel_check, requantisation_gate, strips, widen
from .window import SAME, VALID, Axis, image_shape, input_image, output_image, stored_shape, transposed, widened

EXPLICIT_INPUTS = 11


def _is_explicit(call: Call) -> bool:
    return len(call.inputs) == EXPLICIT_INPUTS


def _axis(size: int, filter_: int, stride: int, *, pads: Sequence[int]) -> Axis:
    """With explicit paddings; the one after the image may be negative, so that a stride can reach every extent."""
    head, tail = pads
    if stride < 1 or filter_ < 1 or size < 1:
        raise ValueError(f"stride {stride}, filter {filter_} and input extent {size} have to be above 0")
    if head < 0:
        raise ValueError(f"padding {head} before the image has to be at least 0")
    extent = size * stride + filter_ - stride - head - tail
    if extent < 1:
        raise ValueError(f"paddings {head} and {tail} leave an output extent of {extent}; it has to be above 0")
    return transposed(extent, filter_, stride, size, head=head)


def _axis_to(extent: int, size: int, filter_: int, stride: int, *, scheme: int) -> Axis:
    """With the output extent and a padding scheme."""
    if scheme not in (SAME, VALID):
        raise ValueError(f"padding scheme {scheme} does not exist; use 1 (SAME) or 2 (VALID)")
    if extent < 1:
        raise ValueError(f"output extent {extent} has to be above 0")
    excess = (-(-extent // max(1, stride)) - 1) * stride + filter_ - extent
    head = max(0, excess) // 2 if scheme == SAME else 0
    tail = size * stride + filter_ - stride - head - extent
    return _axis(size, filter_, stride, pads=(head, tail))


def geometry(call: Call) -> tuple[Axis, Axis, int, bool]:
    """The vertical and the horizontal axis, the fused activation and the layout."""
    at = 7 if _is_explicit(call) else 5
    stride_w, stride_h, activation = (call.integer(i) for i in range(at, at + 3))
    nchw = call.flag(at + 3)
    activation_bounds(activation)
    _, h, w, channels = image_shape(call.shape(0), nchw)
    outputs, kh, kw, inputs = image_shape(call.shape(1), nchw=False)
    if inputs != channels or call.shape(2) != (outputs,):
        raise ValueError(
            f"filter dimensions {list(call.shape(1))} and bias dimensions {list(call.shape(2))} have to be "
            f"[outputs, height, width, {channels}] and [outputs]"
        )
    if _is_explicit(call):
        left, right, top, bottom = (call.integer(i) for i in range(3, 7))
        y = _axis(h, kh, stride_h, pads=(top, bottom))
        return y, _axis(w, kw, stride_w, pads=(left, right)), activation, nchw
    target = call.values(3)
    if len(target) != 4:
        raise ValueError(f"output shape {target} has to have 4 elements")
    _, height, width, _ = image_shape(tuple(target), nchw)
    scheme = call.integer(4)
    y = _axis_to(height, h, kh, stride_h, scheme=scheme)
    return y, _axis_to(width, w, kw, stride_w, scheme=scheme), activation, nchw


def _shape(call: Call) -> tuple[Dimensions]:
    y, x, _, nchw = geometry(call)
    batch, *_ = call.shape(0)
    return (stored_shape(batch, y.size, x.size, call.shape(1)[0], nchw),)


def _spread(tensor: Tensor) -> Array:
    """A filter [outputs, height, width, inputs] as [inputs, height * width * outputs]."""
    weights = widen(tensor, (1, 2, 3)).transpose(3, 1, 2, 0)
    return np.ascontiguousarray(weights.reshape(len(weights), -1))


def _transpose_conv(call: Call) -> None:
    y, x, activation, nchw = geometry(call)
    weights = call.pack(1, _spread)
    finish, view, image = Finish.of(call, activation), output_image(call, nchw), input_image(call, nchw)
    batch, outputs = len(image), view.shape[3]
    sums = call.scratch(view.shape, weights.dtype)
    call.step(sums.fill, 0)
    for n, rows in strips(batch, y.out, x.out * weights.shape[1] * weights.itemsize):
        pixels = call.compact(widened(call, image[n, rows], weights.dtype))
        products = call.shared("products", (*pixels.shape[:3], weights.shape[1]), weights.dtype)
        call.step(np.matmul, pixels.reshape(-1, len(weights)), weights, products.reshape(-1, weights.shape[1]))
        taps = products.reshape(*pixels.shape[:3], y.filter, x.filter, outputs)
        _scatter(call, taps, sums[n], y, x, first=rows.start)
    for n, rows in strips(batch, y.size, x.size * outputs * weights.itemsize):
        finish(call, sums[n, rows], view[n, rows])


def _scatter(call: Call, products: Array, sums: Array, y: Axis, x: Axis, *, first: int) -> None:
    """Add what the input rows from `first` on contribute, [batch, rows, columns, filter height, filter width, c]."""
    rows = products.shape[1]
    for a, out_y, in_y in y.taps():
        top, bottom = max(out_y.start, first), min(out_y.stop, first + rows)
        if top >= bottom:
            continue
        start = in_y.start + (top - out_y.start) * y.stride
        lines = sums[:, start : start + (bottom - top - 1) * y.stride + 1 : y.stride]
        for b, out_x, in_x in x.taps():
            target = lines[:, :, in_x]
            call.step(np.add, target, products[:, top - first : bottom - first, out_x, a, b], target)


TRANSPOSE_CONV_2D = OperationType(
    "TRANSPOSE_CONV_2D",
    91,
    (
        Signature("f2 h2 q2 s3", "T F B 7*INT32 BOOL", ranks=(4,)),
        Signature("f2 h2 q2 s3", "T F B TENSOR_INT32 4*INT32 BOOL", ranks=(4,)),
    ),
    _shape,
    _transpose_conv,
    pack={1: _spread, 2: bias_vector},
    check=partial(channel_check, 0),
    gate=requantisation_gate,
    takes_empty=True,
)
