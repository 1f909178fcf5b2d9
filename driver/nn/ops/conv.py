"""CONV_2D and GROUPED_CONV_2D: matrix products over gathered windows."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..operation import Array, Call, OperationType, Signature
from ..types import Dimensions, OperandType
from .real import accumulator, activation_bounds
from .sums import (
    Finish,
    bias_vector,
    channel_check,
    requantisation_gate,
    strips,
    weight_matrix,
)
from .window import (
    Axis,
    explicit,
    image_shape,
    implicit,
    input_image,
    output_image,
    padded_image,
    stored_shape,
    widened,
    windows,
)


@dataclass(frozen=True, slots=True)
class ConvGeometry:
    """What the parameters of a convolution say, in one place for both padding forms and both layouts.

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
    if is_explicit:
        left, right, top, bottom = (call.integer(i) for i in range(3, 7))
        y = explicit(h, kh, stride_h, dilation_h, paddings=(top, bottom))
        x = explicit(w, kw, stride_w, dilation_w, paddings=(left, right))
    else:
        y = implicit(call.integer(3), h, kh, stride_h, dilation_h)
        x = implicit(call.integer(3), w, kw, stride_w, dilation_w)
    fan = call.integer(strides + 2) if has_fan else 1
    if fan < 1 or channels < 1:
        raise ValueError(f"{channels} channels and a depth multiplier or number of groups of {fan} have to be above 0")
    activation_bounds(call.integer(tail))
    return ConvGeometry(y, x, batch, channels, call.integer(tail), fan, nchw)


def output_shape(call: Call, g: ConvGeometry, outputs: int) -> tuple[Dimensions]:
    """The dimensions of the output with `outputs` channels, once the bias has been found to fit."""
    if call.shape(2) != (outputs,):
        raise ValueError(f"bias dimensions {list(call.shape(2))} have to be [{outputs}]")
    return (stored_shape(g.batch, g.y.out, g.x.out, outputs, g.nchw),)


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
    """The forms with explicit paddings, which take so many numbers, and with a scheme, which takes 3 less."""
    tails = ((2, "BOOL"), (2, "2*INT32"))
    return tuple(
        Signature("f0 q0 h2 s3", f"T F B {n}*INT32", tails=tails, ranks=(4,)) for n in (integers, integers - 3)
    )


Gather = Callable[[slice, slice], Array]
"""From images and rows of the output to what is multiplied for them: [groups, pixels, terms of one product]."""


def _pointwise(call: Call, g: ConvGeometry, weights: Array) -> Gather:
    """Every pixel by itself: nothing is copied but to widen it."""
    image = input_image(call, g.nchw)

    def gather(n: slice, rows: slice) -> Array:
        terms = call.compact(widened(call, image[n, rows], weights.dtype))
        return terms.reshape(-1, g.fan, len(weights)).transpose(1, 0, 2)

    return gather


def _gathered(call: Call, g: ConvGeometry, weights: Array) -> Gather:
    """The windows, copied side by side."""
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
        partial(_conv, grouped),
        pack={1: weight_matrix, 2: bias_vector},
        check=partial(channel_check, 0),
        gate=requantisation_gate,
        takes_empty=not grouped,
    )


CONV_2D = _convolution("CONV_2D", 3, False, convolution_signatures(7))
GROUPED_CONV_2D = _convolution(
    "GROUPED_CONV_2D",
    55,
    True,
    tuple(Signature("f2 h2 q2 s3", f"T F B {n}*INT32 BOOL", ranks=(4,)) for n in (8, 5)),
)
