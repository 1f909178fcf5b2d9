"""Builtin operators that slide a window over an image, and dense layers: filters, biases, paddings."""

import math
from dataclasses import replace
from typing import Any

from driver.errors import ImportFailed
from driver.nn import OperandType

from .call import TfliteCall
from .graph import Ref

_PER_CHANNEL = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL
_VALID = 2


def _scheme(call: TfliteCall) -> int:
    """The HAL's code for the padding scheme."""
    if call.options.Padding() not in (0, 1):
        raise ImportFailed(f"padding {call.options.Padding()} is neither SAME (0) nor VALID (1)")
    return int(call.options.Padding()) + 1


def _strides(call: TfliteCall) -> tuple[int, int]:
    return call.options.StrideW(), call.options.StrideH()


def _dilation(call: TfliteCall) -> tuple[int, ...]:
    """Width and height factor; nothing when there is no dilation."""
    factors = call.options.DilationWFactor(), call.options.DilationHFactor()
    return () if factors == (1, 1) else factors


def _bias(call: TfliteCall, position: int, x: Ref, filters: Ref, channels: int, of: int = 0) -> Ref:
    """The bias; zeros of scale input * filter where the file has none."""
    if call.given(position):
        return call.weights(position, of)
    zeros, data, weights = call.zeros(channels, x), call.graph.operand(x), call.graph.operand(filters)
    return call.graph.constant(zeros, scale=data.scale * weights.scale)


def conv(call: TfliteCall) -> None:
    """CONV_2D, GROUPED_CONV_2D when the filters see only a part of the channels."""
    x, filters = call.input(0), call.weights(1)
    channels, _, _, depth = call.shape(1, 4)
    code, then = call.activation()
    head = (x, filters, _bias(call, 2, x, filters, channels), _scheme(call), *_strides(call))
    dilation, groups = _dilation(call), _depth(call) // depth
    target = [call.output(0, then)]
    if groups <= 1:
        call.emit("CONV_2D", *head, code, *((False, *dilation) if dilation else ()), to=target)
    elif dilation:
        raise ImportFailed("a convolution in groups has no dilation in the HAL")
    else:
        call.emit("GROUPED_CONV_2D", *head, groups, code, False, to=target)


def depthwise(call: TfliteCall) -> None:
    """DEPTHWISE_CONV_2D; how many results a channel has follows from the shapes, as in TFLite's own kernel."""
    x, filters = call.input(0), call.weights(1)
    channels, depth = call.shape(1, 4)[3], _depth(call)
    multiplier = channels // depth if depth else call.options.DepthMultiplier()
    code, then = call.activation()
    dilation = _dilation(call)
    tail = (_scheme(call), *_strides(call), multiplier, code, *((False, *dilation) if dilation else ()))
    bias = _bias(call, 2, x, filters, channels)
    call.emit("DEPTHWISE_CONV_2D", x, filters, bias, *tail, to=[call.output(0, then)])


def transpose_conv(call: TfliteCall) -> None:
    """TRANSPOSE_CONV_2D: the same inputs in another order."""
    x, filters = call.input(2), call.weights(1, 2)
    bias = _bias(call, 3, x, filters, call.shape(1, 4)[0], 2)
    code, then = call.activation()
    tail = (call.input(0), _scheme(call), *_strides(call), code, False)
    call.emit("TRANSPOSE_CONV_2D", x, filters, bias, *tail, to=[call.output(0, then)])


def pool(kind: str) -> Any:
    """AVERAGE_POOL_2D, L2_POOL_2D or MAX_POOL_2D."""

    def convert(call: TfliteCall) -> None:
        code, then = call.activation()
        window = call.options.FilterWidth(), call.options.FilterHeight()
        tail = (_scheme(call), *_strides(call), *window, code)
        call.emit(kind, call.input(0), *tail, to=[call.output(0, then)])

    return convert


def resize(kind: str) -> Any:
    """RESIZE_BILINEAR or RESIZE_NEAREST_NEIGHBOR: width before height, then the flags that are set."""

    def convert(call: TfliteCall) -> None:
        sizes = call.integers(1)
        if len(sizes) != 2:
            raise ImportFailed(f"input 1 holds {len(sizes)} values; it has to be height and width")
        flags = (bool(call.options.AlignCorners()), bool(call.options.HalfPixelCenters()))
        call.emit(kind, call.input(0), sizes[1], sizes[0], False, *(flags if any(flags) else ()))

    return convert


def dense(call: TfliteCall) -> None:
    """FULLY_CONNECTED, whose result has rank 2 in the HAL; with a scale per unit it is a convolution of 1 x 1."""
    if call.options.WeightsFormat():
        raise ImportFailed(f"weights in format {call.options.WeightsFormat()}; only 0 can be read")
    x, weights, (units, size) = call.input(0), call.weights(1), call.shape(1, 2)
    code, then = call.activation()
    bias, target = _bias(call, 2, x, weights, units), call.output(0, then)
    shape = call.result(0).shape or (0, units)
    rows = math.prod(shape[:-1])
    if call.graph.operand(weights).type == _PER_CHANNEL:
        image = call.reshape(x, (rows, 1, 1, size))
        result = call.temporary(target, (rows, 1, 1, units))
        call.emit("CONV_2D", image, _filters(call, weights), bias, _VALID, 1, 1, code, to=[result])
    else:
        if len(call.graph.operand(x).dimensions) not in (0, 2, 3, 4):
            x = call.reshape(x, (rows, size))
        result = target if len(shape) == 2 else call.temporary(target, (rows, units))
        call.emit("FULLY_CONNECTED", x, weights, bias, code, to=[result])
    if result != target:
        call.reshape(result, shape, target)


def _filters(call: TfliteCall, weights: Ref) -> Ref:
    """The weights of a dense layer as filters of 1 x 1."""
    operand = call.graph.operand(weights)
    assert operand.channel_quant is not None
    units, size = operand.dimensions
    if operand.value is None or operand.channel_quant[1] != 0:
        raise ImportFailed("weights with a scale per channel have to be constant, with the units as their channels")
    shape = (units, 1, 1, size)
    return call.graph.add(replace(operand, dimensions=shape, value=operand.value.reshape(shape)))


def _depth(call: TfliteCall) -> int:
    """The channels of the image; 0 where unknown."""
    return (call.tensor(0).shape or (0,))[-1]
