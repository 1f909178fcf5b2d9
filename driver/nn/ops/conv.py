"""CONV_2D as matrix products over gathered windows, DEPTHWISE_CONV_2D as multiply-adds over shifted images."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..model import Operand
from ..operation import Array, Call, OperationType, Signature, Tensor
from ..types import Dimensions, OperandType
from .real import accumulator, activation_bounds, load, store
from .window import (
    NHWC_FROM_NCHW,
    Axis,
    explicit,
    image_shape,
    implicit,
    output_image,
    padded,
    stored_shape,
    windows,
)

STRIP_BYTES = 1 << 19
"""Work is cut into strips of about this size, so that what one step writes is still in cache for the next."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the parameters of a convolution say, in one place for both padding forms and both layouts."""

    y: Axis
    x: Axis
    batch: int
    channels: int
    activation: int
    multiplier: int
    nchw: bool

    @property
    def axes(self) -> tuple[int, ...] | None:
        """The permutation that turns input 0 into [batch, height, width, channels]."""
        return NHWC_FROM_NCHW if self.nchw else None


def _geometry(call: Call, depthwise: bool) -> Geometry:
    is_explicit = len(call.inputs) >= 10 + depthwise and call.tensor(7 + depthwise).type == OperandType.INT32
    strides = 7 if is_explicit else 4
    tail = strides + 2 + depthwise  # activation, [layout, [dilations]]
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
    multiplier = call.integer(strides + 2) if depthwise else 1
    return Geometry(y, x, batch, channels, call.integer(tail), multiplier, nchw)


def _shape(depthwise: bool, call: Call) -> tuple[Dimensions]:
    g = _geometry(call, depthwise)
    filter_ = call.shape(1)
    if depthwise:
        if filter_[0] != 1 or g.multiplier < 1 or filter_[3] != g.channels * g.multiplier:
            wanted = [1, *filter_[1:3], g.channels * g.multiplier]
            raise ValueError(f"filter dimensions {list(filter_)} have to be {wanted}: channels * multiplier")
    elif filter_[3] != g.channels:
        raise ValueError(f"filter dimensions {list(filter_)} have to end in the {g.channels} channels of the input")
    outputs = filter_[3] if depthwise else filter_[0]
    if call.shape(2) != (outputs,):
        raise ValueError(f"bias dimensions {list(call.shape(2))} have to be [{outputs}]")
    activation_bounds(g.activation)
    return (stored_shape(g.batch, g.y.out, g.x.out, outputs, g.nchw),)


def exact_dtype(tensor: Tensor, terms: int) -> type[np.floating[Any]]:
    """The float type that sums `terms` products exactly: 8-bit products need 16 bits, float32 holds 24."""
    return np.float64 if tensor.type.dtype.itemsize == 1 and terms * 255 * 255 >= 2**24 else np.float32


def widen(tensor: Tensor, dtype: type[np.floating[Any]]) -> Array:
    """Weights as floats, without their zero point."""
    if not tensor.zero_point:
        return tensor.data.astype(dtype, copy=False)
    weights: Array = np.subtract(tensor.data, tensor.zero_point, dtype=dtype)
    return weights


def weight_matrix(tensor: Tensor) -> Array:
    """A filter [outputs, ...] as a matrix [terms of one product, outputs], in the order BLAS likes."""
    terms = math.prod(tensor.shape[1:])
    matrix: Array = widen(tensor, exact_dtype(tensor, terms)).reshape(tensor.shape[0], terms)
    return np.ascontiguousarray(matrix.T)


def _taps(tensor: Tensor) -> Array:
    """A depthwise filter as floats [height, width, outputs]."""
    taps: Array = widen(tensor, exact_dtype(tensor, tensor.shape[1] * tensor.shape[2]))[0]
    return taps


def bias_vector(tensor: Tensor) -> Array:
    """A bias as floats; float64 for quantised convolutions, whose biases use all 32 bits."""
    return tensor.data.astype(np.float64 if tensor.type == OperandType.TENSOR_INT32 else np.float32)


def output_factor(call: Call) -> float | Array:
    """What turns one unit of an integer accumulator into steps of the output; per output channel when the filter is."""
    source, weights, bias, out = call.tensor(0), call.tensor(1), call.tensor(2), call.outputs[0]
    if not out.type.is_quantised:
        return 1.0
    if weights.channel_quant is not None:
        return np.array(weights.channel_quant[0], np.float64) * source.scale / out.scale
    product = source.scale * weights.scale
    if abs(product - bias.scale) > 1e-6 * min(product, bias.scale):
        raise ValueError(f"bias scale {bias.scale} has to be input scale * filter scale = {product}")
    return product / out.scale


def _strips(batch: int, rows: int, row_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Cut images of `rows` rows into slices of about STRIP_BYTES: several images, or several rows of one."""
    images = max(1, STRIP_BYTES // max(1, rows * row_bytes))
    height = rows if images > 1 else min(rows, max(1, STRIP_BYTES // max(1, row_bytes)))
    for n in range(0, batch, images):
        for top in range(0, rows, height):
            yield slice(n, n + images), slice(top, min(rows, top + height))


def _conv(call: Call) -> None:
    g = _geometry(call, depthwise=False)
    weights = call.pack(1, weight_matrix)
    bias = call.pack(2, bias_vector)
    view = output_image(call, g.nchw)
    result = accumulator(call, view, weights.dtype)
    image = load(call, 0, g.axes, weights.dtype)
    quantised = call.outputs[0].type.is_quantised
    factor = output_factor(call)
    pointwise = g.y.is_trivial and g.x.is_trivial
    source = call.compact(image) if pointwise else windows(padded(call, image, g.y, g.x), g.y, g.x)
    for n, rows in _strips(g.batch, g.y.out, g.x.out * weights.itemsize * max(weights.shape)):
        part = result[n, rows]
        terms = call.compact(source[n, rows]).reshape(-1, len(weights))
        call.step(np.matmul, terms, weights, part.reshape(-1, part.shape[-1]))
        if not quantised:
            call.step(np.add, part, bias, part)
        store(call, part, part if result is view else view[n, rows], g.activation, factor=factor, bias=bias)


def _depthwise(call: Call) -> None:
    g = _geometry(call, depthwise=True)
    taps = call.pack(1, _taps)
    bias = call.pack(2, bias_vector)
    view = output_image(call, g.nchw)
    result = accumulator(call, view, taps.dtype)
    image = load(call, 0, g.axes, taps.dtype)
    quantised = call.outputs[0].type.is_quantised
    factor = output_factor(call)
    for n, rows in _strips(g.batch, g.y.out, g.x.out * taps.shape[2] * taps.itemsize):
        part = result[n, rows]
        call.step(np.copyto, part, 0.0 if quantised else bias)
        _shifted_sums(call, g, image[n], taps, part, top=rows.start)
        store(call, part, part if result is view else view[n, rows], g.activation, factor=factor, bias=bias)


def _shifted_sums(call: Call, g: Geometry, image: Array, taps: Array, part: Array, *, top: int) -> None:
    """Add to `part`, rows `top`... of the result, the products of every tap with the image shifted under it."""
    n, height, width, _ = part.shape
    fan = (g.channels, g.multiplier)
    grouped = part.reshape(n, height, width, *fan)
    weights = taps.reshape(*taps.shape[:2], *fan)
    for a, out_y, in_y in g.y.taps():
        first, last = max(out_y.start, top), min(out_y.stop, top + height)
        if first >= last:
            continue
        start = in_y.start + (first - out_y.start) * g.y.stride
        rows = image[:, start : start + (last - first - 1) * g.y.stride + 1 : g.y.stride]
        for b, out_x, in_x in g.x.taps():
            target = grouped[:, first - top : last - top, out_x]
            product = call.shared("product", part.shape, part.dtype).reshape(-1)[: target.size].reshape(target.shape)
            call.step(np.multiply, rows[:, :, in_x, :, None], weights[a, b], product)
            call.step(np.add, target, product, target)


def _channel_check(channel: int, inputs: Sequence[Operand], _outputs: Sequence[Operand]) -> str | None:
    quant = inputs[1].channel_quant
    if quant is not None and quant[1] != channel:
        return f"the filter counts channels along dimension {quant[1]}; it has to be {channel}"
    return None


def requantisation_gate(inputs: Sequence[Operand], outputs: Sequence[Operand]) -> int:
    """Before HAL 1.2 a quantised output had to be coarser than the products it sums."""
    source, weights, out = inputs[0], inputs[1], outputs[0]
    return 2 if out.type.is_quantised and out.scale <= source.scale * weights.scale else 0


def _convolution(name: str, code: int, integers: int, channel: int, depthwise: bool, **more: Any) -> OperationType:
    tails = ((2, "BOOL"), (2, "2*INT32"))
    signatures = tuple(
        Signature("f0 q0 h2 s3", f"T F B {n}*INT32", tails=tails, ranks=(4,)) for n in (integers, integers - 3)
    )
    check: Callable[..., str | None] = partial(_channel_check, channel)
    return OperationType(
        name,
        code,
        signatures,
        partial(_shape, depthwise),
        check=check,
        gate=requantisation_gate,
        takes_empty=True,
        **more,
    )


CONV_2D = _convolution("CONV_2D", 3, 7, 0, depthwise=False, build=_conv, pack={1: weight_matrix, 2: bias_vector})
DEPTHWISE_CONV_2D = _convolution(
    "DEPTHWISE_CONV_2D", 4, 8, 3, depthwise=True, build=_depthwise, pack={1: _taps, 2: bias_vector}
)
