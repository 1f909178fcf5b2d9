"""Windows that slide over images: paddings, strides, dilations, and which pixels each tap of a filter meets."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import DTypeLike

from ..operation import Array, Call
from ..types import Dimensions

SAME, VALID = 1, 2
NHWC_FROM_NCHW = (0, 2, 3, 1)


@dataclass(frozen=True, slots=True)
class Axis:
    """A window on one spatial axis: input extent, filter extent, stride, dilation, paddings before and after."""

    size: int
    filter: int
    stride: int
    dilation: int
    head: int
    tail: int

    @property
    def out(self) -> int:
        """The output extent."""
        return (self.size + self.head + self.tail - self.reach) // self.stride + 1

    @property
    def reach(self) -> int:
        """The extent of the dilated filter."""
        return (self.filter - 1) * self.dilation + 1

    @property
    def is_trivial(self) -> bool:
        """True when output i depends on input i alone."""
        return self.filter == self.stride == 1 and self.head == self.tail == 0

    def taps(self) -> Iterator[tuple[int, slice, slice]]:
        """For each filter tap that meets the image: the tap, the outputs and the inputs that it connects."""
        # A filter may be far larger than the image: only taps that can meet it are looked at.
        nearest = max(0, -((self.out - 1) * self.stride - self.head) // self.dilation)
        farthest = min(self.filter - 1, (self.size - 1 + self.head) // self.dilation)
        for tap in range(nearest, farthest + 1):
            offset = tap * self.dilation - self.head
            first = max(0, -(offset // self.stride))
            last = min(self.out - 1, (self.size - 1 - offset) // self.stride)
            if first <= last:
                start = first * self.stride + offset
                stop = last * self.stride + offset + 1
                yield tap, slice(first, last + 1), slice(start, stop, self.stride)

    def counts(self) -> Array:
        """How many taps fall on the image for every output."""
        counts = np.zeros(self.out, np.float32)
        for _, outputs, _ in self.taps():
            counts[outputs] += 1
        return counts

    def checked(self) -> "Axis":
        """This axis; `ValueError` when its numbers make no sense."""
        if self.stride < 1 or self.dilation < 1 or self.filter < 1:
            raise ValueError(
                f"stride {self.stride}, dilation {self.dilation} and filter {self.filter} have to be above 0"
            )
        if not (0 <= self.head < self.reach and 0 <= self.tail < self.reach):
            raise ValueError(f"paddings {self.head} and {self.tail} have to be in 0..{self.reach - 1}")
        if self.size < 1 or self.out < 1 or self.size + self.head + self.tail < self.reach:
            raise ValueError(
                f"a filter of {self.reach} does not fit into {self.size} padded by {self.head} and {self.tail}"
            )
        return self


def explicit(size: int, filter_: int, stride: int, dilation: int, *, paddings: tuple[int, int]) -> Axis:
    """An axis with given paddings."""
    return Axis(size, filter_, stride, dilation, *paddings).checked()


def implicit(scheme: int, size: int, filter_: int, stride: int, dilation: int) -> Axis:
    """An axis padded by a scheme; SAME puts the odd element after the image."""
    if scheme not in (SAME, VALID):
        raise ValueError(f"padding scheme {scheme} does not exist; use 1 (SAME) or 2 (VALID)")
    total = 0
    if scheme == SAME and stride > 0:
        total = max(0, (-(-size // stride) - 1) * stride + (filter_ - 1) * dilation + 1 - size)
    return Axis(size, filter_, stride, dilation, total // 2, total - total // 2).checked()


def transposed(size: int, filter_: int, stride: int, out: int, *, head: int) -> Axis:
    """An axis of which every *input* of the `out` spreads its filter over a result of extent `size`."""
    return Axis(size, filter_, stride, 1, head, (out - 1) * stride + filter_ - size - head)


def image_shape(shape: Dimensions, nchw: bool) -> Dimensions:
    """Dimensions of an image tensor as [batch, height, width, channels]."""
    if len(shape) != 4:
        raise ValueError(f"dimensions {list(shape)} have to be of rank 4")
    return (shape[0], shape[2], shape[3], shape[1]) if nchw else shape


def stored_shape(n: int, h: int, w: int, c: int, nchw: bool) -> Dimensions:
    """The inverse of `image_shape`."""
    return (n, c, h, w) if nchw else (n, h, w, c)


def output_image(call: Call, nchw: bool) -> Array:
    """Output 0 as [batch, height, width, channels], whatever its layout."""
    data = call.outputs[0].data
    return data.transpose(NHWC_FROM_NCHW) if nchw else data


def input_image(call: Call, nchw: bool) -> Array:
    """Input 0 as [batch, height, width, channels], as stored."""
    data = call.array(0)
    return data.transpose(NHWC_FROM_NCHW) if nchw else data


def widened(call: Call, part: Array, dtype: DTypeLike) -> Array:
    """`part` of input 0 as floats without its zero point: itself, or scratch that holds it until the next part."""
    if part.dtype == dtype:
        return part
    wide = call.shared("widened", part.shape, dtype)
    _widen(call, part, wide)
    return wide


def _widen(call: Call, part: Array, wide: Array) -> None:
    zero_point = call.tensor(0).zero_point
    if zero_point:
        call.step(np.subtract, part, float(zero_point), out=wide, dtype=wide.dtype, casting="unsafe")
    else:
        call.step(np.copyto, wide, part, casting="unsafe")


def padded_image(call: Call, nchw: bool, y: Axis, x: Axis, *, dtype: DTypeLike, fan: int = 1) -> Array:
    """Input 0 as floats [batch, padded height, padded width, channels * fan], without its zero point, padded by zeros.

    Every channel stands there `fan` times. Nothing is copied when nothing has to be.
    """
    image = input_image(call, nchw)
    if image.dtype == dtype and fan == 1 and not (y.head or y.tail or x.head or x.tail):
        return image
    n, h, w, c = image.shape
    result = call.scratch((n, h + y.head + y.tail, w + x.head + x.tail, c, fan), dtype, zeros=True)
    inner = result[:, y.head : y.head + h, x.head : x.head + w]
    if fan == 1:
        _widen(call, image, inner[..., 0])
    else:
        _widen(call, np.broadcast_to(image[..., None], inner.shape), inner)
    return result.reshape(*result.shape[:3], c * fan)


def windows(image: Array, y: Axis, x: Axis) -> Array:
    """A view [batch, out height, out width, filter height, filter width, channels] of a padded image."""
    sn, sh, sw, sc = image.strides
    shape = (image.shape[0], y.out, x.out, y.filter, x.filter, image.shape[3])
    strides = (sn, sh * y.stride, sw * x.stride, sh * y.dilation, sw * x.dilation, sc)
    return as_strided(image, shape, strides, writeable=False)
