"""Windows that slide over images: paddings, strides, dilations, and which pixels each tap of a filter meets.

And pooling: first down the columns, then along the rows. Padded positions do not count.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import DTypeLike

from ..operation import Array, Call, OperationType, Signature, same_as_input
from ..types import Dimensions
from .real import accumulator, activation_bounds, clamp, load, round_to, store
from .sums import EXACT, LARGEST

SAME, VALID = 1, 2
NHWC_FROM_NCHW = (0, 2, 3, 1)

Extents = tuple[int, int, int, int]
"""Of one axis: input extent, filter extent, stride, dilation."""


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
        """Yield, for each filter tap that meets the image, the tap, the outputs and the inputs that it connects."""
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
        """Return how many taps fall on the image for every output."""
        counts = np.zeros(self.out, np.float32)
        for _, outputs, _ in self.taps():
            counts[outputs] += 1
        return counts

    def checked(self) -> "Axis":
        """Return this axis; raise `ValueError` if its numbers make no sense."""
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


def implicit(scheme: int, size: int, filter_: int, stride: int, dilation: int) -> Axis:
    """Return an axis padded by a scheme; SAME puts the odd element after the image."""
    if scheme not in (SAME, VALID):
        raise ValueError(f"padding scheme {scheme} does not exist; use 1 (SAME) or 2 (VALID)")
    total = 0
    if scheme == SAME and stride > 0:
        total = max(0, (-(-size // stride) - 1) * stride + (filter_ - 1) * dilation + 1 - size)
    return Axis(size, filter_, stride, dilation, head=total // 2, tail=total - total // 2).checked()


def both_axes(call: Call, first: int, is_explicit: bool, y: Extents, x: Extents) -> tuple[Axis, Axis]:
    """Return the vertical and the horizontal window: input `first` is a scheme, or the first of four explicit
    paddings.
    """
    if is_explicit:
        left, right, top, bottom = (call.integer(i) for i in range(first, first + 4))
        return Axis(*y, top, bottom).checked(), Axis(*x, left, right).checked()
    scheme = call.integer(first)
    return implicit(scheme, *y), implicit(scheme, *x)


def transposed(size: int, filter_: int, stride: int, out: int, *, head: int) -> Axis:
    """Return an axis of which every *input* of the `out` spreads its filter over a result of extent `size`."""
    return Axis(size, filter_, stride, 1, head=head, tail=(out - 1) * stride + filter_ - size - head)


def image_shape(shape: Dimensions, nchw: bool) -> Dimensions:
    """Return the dimensions of an image tensor as [batch, height, width, channels]."""
    if len(shape) != 4:
        raise ValueError(f"dimensions {list(shape)} have to be of rank 4")
    return (shape[0], shape[2], shape[3], shape[1]) if nchw else shape


def stored_shape(n: int, h: int, w: int, c: int, nchw: bool) -> Dimensions:
    """Return the inverse of `image_shape`."""
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
    """Return a view [batch, out height, out width, filter height, filter width, channels] of a padded image."""
    sn, sh, sw, sc = image.strides
    shape = (image.shape[0], y.out, x.out, y.filter, x.filter, image.shape[3])
    strides = (sn, sh * y.stride, sw * x.stride, sh * y.dilation, sw * x.dilation, sc)
    return as_strided(image, shape, strides, writeable=False)


EXPLICIT_INPUTS = 10


def window_axes(call: Call) -> tuple[Axis, Axis, int, bool]:
    """Return the vertical and the horizontal window, the fused activation and the layout."""
    at = 5 if len(call.inputs) >= EXPLICIT_INPUTS else 2
    nchw = call.flag(at + 5)
    _, h, w, _ = image_shape(call.shape(0), nchw)
    stride_w, stride_h, filter_w, filter_h, activation = (call.integer(i) for i in range(at, at + 5))
    extents = (h, filter_h, stride_h, 1), (w, filter_w, stride_w, 1)
    return *both_axes(call, 1, at == 5, *extents), activation, nchw


def _pooled_shape(call: Call) -> tuple[Dimensions]:
    y, x, activation, nchw = window_axes(call)
    activation_bounds(activation)
    n, _, _, c = image_shape(call.shape(0), nchw)
    return (stored_shape(n, y.out, x.out, c, nchw=nchw),)


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
    _gather(call, image, result, y, x=x, function=np.add, start=0.0)
    _divide(call, result, y.counts(), x.counts())
    if squares:
        call.step(np.sqrt, result, result)
    if out.type.is_quantised:
        round_to(call, result, view, out.zero_point, bounds=activation_bounds(activation, out))
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
    """Write the largest pixel of each window; quantised ones compare as they are stored."""
    y, x, activation, nchw = window_axes(call)
    image, out = input_image(call, nchw), call.outputs[0]
    view = output_image(call, nchw)
    lowest = np.iinfo(image.dtype).min if out.type.is_quantised else -np.inf
    _gather(call, image, view, y, x=x, function=np.maximum, start=lowest)
    low, high = activation_bounds(activation, out)
    clamp(call, view, (low, high) if out.type.dtype.kind == "f" else (int(low or 0), int(high or 0)))


def _pooling(name: str, code: int, types: str, build: Callable[[Call], None]) -> OperationType:
    signatures = tuple(
        Signature(types, f"T {n}*INT32", tails=((2, "BOOL"),), ranks=(4,)) for n in (EXPLICIT_INPUTS - 1, 6)
    )
    return OperationType(
        name, code, signatures, _pooled_shape, build=build, quantisation=same_as_input, takes_empty=True
    )


OPERATIONS = (
    _pooling("AVERAGE_POOL_2D", 1, "f0 q0 h2 s3", partial(_mean, False)),
    _pooling("L2_POOL_2D", 12, "f0 h2", partial(_mean, True)),
    _pooling("MAX_POOL_2D", 17, "f0 q0 h2 s3", _max),
)
