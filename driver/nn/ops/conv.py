"""Convolutions, whose parameters are read in one place.

CONV_2D and GROUPED_CONV_2D are matrix products over gathered windows. DEPTHWISE_CONV_2D takes every channel by itself,
as one sum of products over windows that are views. TRANSPOSE_CONV_2D is one matrix product, whose results are added to
the output tap by tap.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..blocks import WINDOWS, Look, copied, look_nowhere
from ..operation import Array, Call, OperationType, Signature, Tensor
from ..types import Dimensions, OperandType
from .real import accumulator, activation_bounds
from .sums import Finish, bias_vector, channel_check, requantisation_gate, strips, weight_matrix, widen
from .window import (
    SAME,
    VALID,
    Axis,
    both_axes,
    image_shape,
    input_image,
    output_image,
    padded_image,
    stored_shape,
    transposed,
    widened,
    windows,
)


@dataclass(frozen=True, slots=True)
class ConvGeometry:
    """The parameters of a convolution, in one place for both padding forms and both layouts.

    fan: the multiplier of a depthwise convolution, the groups of a grouped one, else 1.
    """

    y: Axis
    x: Axis
    batch: int
    channels: int
    activation: int
    fan: int
    nchw: bool


def geometry(call: Call, has_fan: bool) -> ConvGeometry:
    """Read and check the parameters; `has_fan`: a number stands between the strides and the activation."""
    is_explicit = len(call.inputs) >= 10 + has_fan and call.tensor(7 + has_fan).type == OperandType.INT32
    strides = 7 if is_explicit else 4
    tail = strides + 2 + has_fan  # activation, [layout, [dilations]]
    nchw = call.flag(tail + 1)
    batch, h, w, channels = image_shape(call.shape(0), nchw)
    _, kh, kw, _ = image_shape(call.shape(1), nchw=False)
    stride_w, stride_h = call.integer(strides), call.integer(strides + 1)
    dilation_w, dilation_h = (call.integer(tail + 2), call.integer(tail + 3)) if len(call.inputs) > tail + 2 else (1, 1)
    y, x = both_axes(call, 3, is_explicit, (h, kh, stride_h, dilation_h), x=(w, kw, stride_w, dilation_w))
    fan = call.integer(strides + 2) if has_fan else 1
    if fan < 1 or channels < 1:
        raise ValueError(f"{channels} channels and a depth multiplier or number of groups of {fan} have to be above 0")
    activation_bounds(call.integer(tail))
    return ConvGeometry(y, x, batch, channels, activation=call.integer(tail), fan=fan, nchw=nchw)


def output_shape(call: Call, g: ConvGeometry, outputs: int) -> tuple[Dimensions]:
    """Return the dimensions of the output with `outputs` channels, once the bias has been found to fit."""
    if call.shape(2) != (outputs,):
        raise ValueError(f"bias dimensions {list(call.shape(2))} have to be [{outputs}]")
    return (stored_shape(g.batch, g.y.out, g.x.out, outputs, nchw=g.nchw),)


def _shape(grouped: bool, call: Call) -> tuple[Dimensions]:
    g, filter_ = geometry(call, grouped), call.shape(1)
    if filter_[3] * g.fan != g.channels:
        raise ValueError(
            f"filter dimensions {list(filter_)} have to end in the {g.channels} channels of the input"
            + f" divided by {g.fan} groups" * grouped
        )
    if filter_[0] % g.fan:
        raise ValueError(f"{filter_[0]} output channels do not divide into {g.fan} groups")
    return output_shape(call, g, filter_[0])


def _conv(grouped: bool, call: Call) -> None:
    g = geometry(call, grouped)
    weights = call.pack(1, weight_matrix)
    finish, view = Finish.of(call, g.activation), output_image(call, g.nchw)
    result = accumulator(call, view, weights.dtype)
    gather = _pointwise(call, g, weights) if g.y.is_trivial and g.x.is_trivial else _gathered(call, g, weights)
    groups = weights.reshape(len(weights), g.fan, -1).transpose(1, 0, 2)
    for n, rows in strips(g.batch, g.y.out, g.x.out * weights.itemsize * max(g.fan * len(weights), weights.shape[1])):
        part = result[n, rows]
        sums = part.reshape(-1, *groups.shape[::2]).transpose(1, 0, 2)
        terms = gather(n, rows)
        if g.fan == 1:
            call.step(np.matmul, terms[0], weights, sums[0])
        else:
            call.step(np.matmul, terms, groups, sums)
        finish(call, part, part if result is view else view[n, rows])


def convolution_signatures(integers: int) -> tuple[Signature, ...]:
    """Return the forms with explicit paddings, which take so many numbers, and with a scheme, which takes 3 less."""
    tails = ((2, "BOOL"), (2, "2*INT32"))
    return tuple(
        Signature("f0 q0 h2 s3", f"T F B {n}*INT32", tails=tails, ranks=(4,)) for n in (integers, integers - 3)
    )


Gather = Callable[[slice, slice], Array]
"""From images and rows of the output to what is multiplied for them: [groups, pixels, terms of one product]."""


def _pointwise(call: Call, g: ConvGeometry, weights: Array) -> Gather:
    """Gather every pixel by itself: nothing is copied but to widen it."""
    image = input_image(call, g.nchw)

    def gather(n: slice, rows: slice) -> Array:
        terms = call.compact(widened(call, image[n, rows], weights.dtype))
        return terms.reshape(-1, g.fan, len(weights)).transpose(1, 0, 2)

    return gather


def _gathered(call: Call, g: ConvGeometry, weights: Array) -> Gather:
    """Return the windows, copied side by side."""
    source = windows(padded_image(call, g.nchw, g.y, g.x, dtype=weights.dtype), g.y, g.x)
    n, h, w, kh, kw, c = source.shape
    source = source.reshape(n, h, w, kh, kw, g.fan, c // g.fan) if g.fan > 1 else source[..., None, :]
    grouped = source.transpose(5, 0, 1, 2, 3, 4, 6)

    def gather(n: slice, rows: slice) -> Array:
        return call.compact(grouped[:, n, rows]).reshape(g.fan, -1, len(weights))

    return gather


def _convolution(name: str, code: int, grouped: bool, signatures: tuple[Signature, ...]) -> OperationType:
    return OperationType(
        name,
        code,
        signatures,
        partial(_shape, grouped),
        build=partial(_conv, grouped),
        pack={1: weight_matrix, 2: bias_vector},
        check=partial(channel_check, 0),
        gate=requantisation_gate,
        takes_empty=not grouped,
    )


RUN = 4096
"""Elements that one inner loop may take: a filter is repeated over the pixels of a row up to so many."""


def _depthwise_shape(call: Call) -> tuple[Dimensions]:
    g, filter_ = geometry(call, has_fan=True), call.shape(1)
    wanted = (1, *filter_[1:3], g.channels * g.fan)
    if filter_ != wanted:
        raise ValueError(f"filter dimensions {list(filter_)} have to be {list(wanted)}: channels * multiplier")
    return output_shape(call, g, wanted[3])


def _taps(tensor: Tensor, look: Look = look_nowhere) -> Array:
    """Return a depthwise filter as floats [height, width, 1, outputs]."""
    return widen(tensor, (0, 1, 2), look).transpose(1, 2, 0, 3)


def _depthwise(call: Call) -> None:
    g = geometry(call, has_fan=True)
    taps = call.pack(1, _taps)
    finish, view = Finish.of(call, g.activation), output_image(call, g.nchw)
    result = accumulator(call, view, taps.dtype)
    source = windows(padded_image(call, g.nchw, g.y, g.x, dtype=taps.dtype, fan=g.fan), g.y, g.x)
    source = source.transpose(0, 1, 3, 4, 2, 5)
    width = min(g.x.out, max(1, RUN // taps.shape[3]))
    repeated = _repeated(call, taps, width)
    for n, rows in strips(g.batch, g.y.out, g.x.out * taps.shape[3] * taps.itemsize):
        part = result[n, rows]
        for first in range(0, g.x.out, width):
            columns = slice(first, min(g.x.out, first + width))
            weights = repeated[:, :, : columns.stop - first]
            operands = _merged(source[n, rows, :, :, columns], weights, part[:, :, columns])
            call.step(np.einsum, WINDOWS, *operands[:2], out=operands[2])
        finish(call, part, part if result is view else view[n, rows])


def _merged(source: Array, *others: Array) -> tuple[Array, ...]:
    """Merge the last two axes, pixels and channels, of all, where that takes no copy of `source`."""
    if source.strides[-2] != source.shape[-1] * source.strides[-1]:
        return source, *others
    return tuple(array.reshape(*array.shape[:-2], 1, -1) for array in (source, *others))


def _repeated(call: Call, taps: Array, width: int) -> Array:
    """Return the filter once for each of `width` neighbouring pixels, so that it is as long as what it is multiplied
    with.
    """
    shape = (*taps.shape[:2], width, taps.shape[3])
    if call.tensor(1).fixed:
        return np.broadcast_to(taps, shape).copy()
    repeated = call.scratch(shape, taps.dtype)
    call.step(np.copyto, repeated, taps)
    return repeated


def _axis(size: int, filter_: int, stride: int, *, pads: Sequence[int]) -> Axis:
    """Return an axis with explicit paddings; that behind it may be negative, so that a stride reaches every extent."""
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
    """Return an axis with the output extent and a padding scheme."""
    if scheme not in (SAME, VALID):
        raise ValueError(f"padding scheme {scheme} does not exist; use 1 (SAME) or 2 (VALID)")
    if extent < 1:
        raise ValueError(f"output extent {extent} has to be above 0")
    excess = (-(-extent // max(1, stride)) - 1) * stride + filter_ - extent
    head = max(0, excess) // 2 if scheme == SAME else 0
    tail = size * stride + filter_ - stride - head - extent
    return _axis(size, filter_, stride, pads=(head, tail))


def transposed_geometry(call: Call) -> tuple[Axis, Axis, int, bool]:
    """Return the vertical and the horizontal axis, the fused activation and the layout."""
    is_explicit = len(call.inputs) == 11
    at = 7 if is_explicit else 5
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
    if is_explicit:
        left, right, top, bottom = (call.integer(i) for i in range(3, 7))
        y, x = _axis(h, kh, stride_h, pads=(top, bottom)), _axis(w, kw, stride_w, pads=(left, right))
        return y, x, activation, nchw
    target = call.values(3)
    if len(target) != 4:
        raise ValueError(f"output shape {target} has to have 4 elements")
    _, height, width, _ = image_shape(tuple(target), nchw)
    scheme = call.integer(4)
    y = _axis_to(height, h, kh, stride_h, scheme=scheme)
    return y, _axis_to(width, w, kw, stride_w, scheme=scheme), activation, nchw


def _transposed_shape(call: Call) -> tuple[Dimensions]:
    y, x, _, nchw = transposed_geometry(call)
    batch, *_ = call.shape(0)
    return (stored_shape(batch, y.size, x.size, call.shape(1)[0], nchw=nchw),)


def _spread(tensor: Tensor, look: Look = look_nowhere) -> Array:
    """Return a filter [outputs, height, width, inputs] as [inputs, height * width * outputs]."""
    weights = copied(look, widen(tensor, (1, 2, 3), look).transpose(3, 1, 2, 0))
    return weights.reshape(len(weights), -1)


def _transpose_conv(call: Call) -> None:
    y, x, activation, nchw = transposed_geometry(call)
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
        _scatter(call, taps, sums[n], y, x=x, first=rows.start)
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


OPERATIONS = (
    _convolution("CONV_2D", 3, False, convolution_signatures(7)),
    _convolution(
        "GROUPED_CONV_2D",
        55,
        True,
        tuple(Signature("f2 h2 q2 s3", f"T F B {n}*INT32 BOOL", ranks=(4,)) for n in (8, 5)),
    ),
    OperationType(
        "DEPTHWISE_CONV_2D",
        4,
        convolution_signatures(8),
        _depthwise_shape,
        build=_depthwise,
        pack={1: _taps, 2: bias_vector},
        check=partial(channel_check, 3),
        gate=requantisation_gate,
        takes_empty=True,
    ),
    OperationType(
        "TRANSPOSE_CONV_2D",
        91,
        (
            Signature("f2 h2 q2 s3", "T F B 7*INT32 BOOL", ranks=(4,)),
            Signature("f2 h2 q2 s3", "T F B TENSOR_INT32 4*INT32 BOOL", ranks=(4,)),
        ),
        _transposed_shape,
        build=_transpose_conv,
        pack={1: _spread, 2: bias_vector},
        check=partial(channel_check, 0),
        gate=requantisation_gate,
        takes_empty=True,
    ),
)
