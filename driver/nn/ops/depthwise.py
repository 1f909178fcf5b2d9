"""DEPTHWISE_CONV_2D: every channel by itself, as one sum of products over windows that are views."""

from functools import partial

import numpy as np

from ..operation import Array, Call, OperationType, Tensor
from ..types import Dimensions
from .conv import convolution_signatures, geometry, output_shape
from .real import accumulator
from .sums import Finish, bias_vector, channel_check, requantisation_gate, strips, widen
from .window import output_image, padded_image, windows

RUN = 4096
"""Elements that one inner loop may take: a filter is repeated over the pixels of a row up to so many."""


def _shape(call: Call) -> tuple[Dimensions]:
    g, filter_ = geometry(call, has_fan=True), call.shape(1)
    wanted = (1, *filter_[1:3], g.channels * g.fan)
    if filter_ != wanted:
        raise ValueError(f"filter dimensions {list(filter_)} have to be {list(wanted)}: channels * multiplier")
    return output_shape(call, g, wanted[3])


def _taps(tensor: Tensor) -> Array:
    """A depthwise filter as floats [height, width, 1, outputs]."""
    return widen(tensor, (0, 1, 2)).transpose(1, 2, 0, 3)


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
            call.step(np.einsum, "niabjc,abjc->nijc", *operands[:2], out=operands[2])
        finish(call, part, part if result is view else view[n, rows])


def _merged(source: Array, *others: Array) -> tuple[Array, ...]:
    """All with their last two axes, pixels and channels, as one long axis, where that takes no copy of `source`."""
    if source.strides[-2] != source.shape[-1] * source.strides[-1]:
        return source, *others
    return tuple(array.reshape(*array.shape[:-2], 1, -1) for array in (source, *others))


def _repeated(call: Call, taps: Array, width: int) -> Array:
    """The filter once for each of `width` neighbouring pixels, so that it is as long as what it is multiplied with."""
    shape = (*taps.shape[:2], width, taps.shape[3])
    if call.tensor(1).fixed:
        return np.broadcast_to(taps, shape).copy()
    repeated = call.scratch(shape, taps.dtype)
    call.step(np.copyto, repeated, taps)
    return repeated


DEPTHWISE_CONV_2D = OperationType(
    "DEPTHWISE_CONV_2D",
    4,
    convolution_signatures(8),
    _shape,
    _depthwise,
    pack={1: _taps, 2: bias_vector},
    check=partial(channel_check, 3),
    gate=requantisation_gate,
    takes_empty=True,
)
