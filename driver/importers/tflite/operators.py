"""Builtin operators that need more than a few lines: windows, dense layers, products, selections, recurrent ones."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from driver.errors import ImportFailed
from driver.nn import OperandType
from driver.nn.types import Dimensions

from .call import TfliteCall, axis_of
from .graph import Ref, dequantised

_PER_CHANNEL = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL
_VALID = 2


def _scheme(call: TfliteCall) -> int:
    """Return the HAL's code for the padding scheme."""
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
    """Return the bias; zeros of scale input * filter where the file has none."""
    if call.given(position):
        return call.weights(position, of)
    zeros, data, weights = call.zeros(channels, x), call.graph.operand(x), call.graph.operand(filters)
    return call.graph.constant(zeros, scale=data.scale * weights.scale)


def conv(call: TfliteCall) -> None:
    """CONV_2D, GROUPED_CONV_2D when the filters see only a part of the channels."""
    x, filters = call.input(0), call.weights(1)
    channels, _, _, depth = call.shape(1, 4)
    code, then = call.activation()
    head = (x, filters, _bias(call, 2, x, filters, channels=channels), _scheme(call), *_strides(call))
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
    bias = _bias(call, 2, x, filters, channels=channels)
    call.emit("DEPTHWISE_CONV_2D", x, filters, bias, *tail, to=[call.output(0, then)])


def transpose_conv(call: TfliteCall) -> None:
    """TRANSPOSE_CONV_2D: the same inputs in another order."""
    x, filters = call.input(2), call.weights(1, 2)
    bias = _bias(call, 3, x, filters, channels=call.shape(1, 4)[0], of=2)
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
    bias, target = _bias(call, 2, x, weights, channels=units), call.output(0, then)
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
    """Return the weights of a dense layer as filters of 1 x 1."""
    operand = call.graph.operand(weights)
    assert operand.channel_quant is not None
    units, size = operand.dimensions
    if operand.value is None or operand.channel_quant[1] != 0:
        raise ImportFailed("weights with a scale per channel have to be constant, with the units as their channels")
    shape = (units, 1, 1, size)
    return call.graph.add(replace(operand, dimensions=shape, value=operand.value.reshape(shape)))


def _depth(call: TfliteCall) -> int:
    """Return the channels of the image; 0 where unknown."""
    return (call.tensor(0).shape or (0,))[-1]


# ---- BATCH_MATMUL as one FULLY_CONNECTED, whose weights need not be constant, per pair of matrices -------------------

MOST_PAIRS = 512
"""Limit of matrix pairs in one operator: 12 heads of 42 sequences."""
_PAIR_BYTES = 256
"""Bytes charged per pair, so that only a large file can have many."""


class Factor:
    """One side of a product: matrices [rows, size], where size is the number of terms in each sum."""

    def __init__(self, call: TfliteCall, position: int, *, turned: bool) -> None:
        """Note where the matrices are. `turned`: the file stores them as [size, rows]."""
        self.call = call
        *self.batch, rows, size = _matrix_shape(call, position)
        self.count = math.prod(self.batch)
        self.rows, self.size = (size, rows) if turned else (rows, size)
        constant = _constant(call, position, turned=turned)
        self.whole = call.weights(position) if constant is None else constant
        if constant is None and turned:
            before = call.reshape(self.whole, (self.count, rows, size))
            self.whole = call.temporary(before, (self.count, size, rows))
            call.emit("TRANSPOSE", before, np.array((0, 2, 1)), to=[self.whole])

    def joined(self) -> Ref:
        """Return all matrices stacked vertically."""
        shape = self.count * self.rows, self.size
        dimensions = self.call.graph.operand(self.whole).dimensions
        return self.whole if dimensions == shape else self.call.reshape(self.whole, shape)

    def parts(self) -> list[Ref]:
        """Return the matrices one by one."""
        whole = self.joined()
        if self.count == 1:
            return [whole]
        pieces = [self.call.temporary(whole, (self.rows, self.size)) for _ in range(self.count)]
        self.call.emit("SPLIT", whole, 0, self.count, to=pieces)
        return pieces


def batch_matmul(call: TfliteCall) -> None:
    """Add one FULLY_CONNECTED when the second side is one matrix; else one for each pair, and a CONCATENATION."""
    shape = call.result_shape()
    pairs = _pairs(_matrix_shape(call, 0)[:-2], _matrix_shape(call, 1)[:-2])
    left = Factor(call, 0, turned=call.options.AdjX())
    right = Factor(call, 1, turned=not call.options.AdjY())
    target, bias = call.output(), _zero_bias(call, left, right)
    lefts, rights = [left.joined()] if right.count == 1 else left.parts(), right.parts()
    call.graph.source.file.bytes.makes.charge(_PAIR_BYTES * len(pairs))
    rows = math.prod(shape[:-1]) // len(pairs)
    products = [call.temporary(target, (rows, right.rows)) for _ in pairs]
    for (i, k), product in zip(pairs, products, strict=True):
        call.emit("FULLY_CONNECTED", lefts[i], rights[k], bias, 0, to=[product])
    joined = products[0]
    if len(products) > 1:
        joined = call.temporary(target, (rows * len(pairs), right.rows))
        call.emit("CONCATENATION", *products, 0, to=[joined])
    call.reshape(joined, shape, target)


def _matrix_shape(call: TfliteCall, position: int) -> tuple[int, ...]:
    shape = call.shape(position)
    if len(shape) < 2:
        raise ImportFailed(f"input {position} has dimensions {list(shape)}; expected two or more")
    return shape


def _constant(call: TfliteCall, position: int, *, turned: bool) -> Ref | None:
    """Return a constant side, transposed at load time; None when it is computed or needs no transposition."""
    info = call.tensor(position)
    if info.data is None or not turned:
        return None
    call.graph.source.file.bytes.makes.charge(4 * info.data.size)
    if call.tensor(0).type == "FLOAT32":
        return call.graph.constant(np.ascontiguousarray(dequantised(info).swapaxes(-1, -2)))
    operand = call.graph.operand(call.input(position))
    values = np.ascontiguousarray(info.data.swapaxes(-1, -2))
    return call.graph.constant(values, operand.base_type, operand.scale, operand.zero_point)


def _pairs(left: tuple[int, ...], right: tuple[int, ...]) -> list[tuple[int, int]]:
    """Index pairs of matrices to multiply, in result order; one pair when the second side is a single matrix."""
    try:
        shape = np.broadcast_shapes(left, right)
    except ValueError:
        raise ImportFailed(f"batches of {list(left)} and {list(right)} matrices do not broadcast") from None
    if math.prod(right) == 1:
        return [(0, 0)]
    if math.prod(shape) > MOST_PAIRS:
        raise ImportFailed(f"{math.prod(shape)} pairs of matrices; the limit is {MOST_PAIRS}")
    numbers = [np.broadcast_to(np.arange(math.prod(d)).reshape(d), shape).reshape(-1) for d in (left, right)]
    return list(zip(*(n.tolist() for n in numbers), strict=True))


def _zero_bias(call: TfliteCall, left: Factor, right: Factor) -> Ref:
    """Return a zero bias for each product."""
    scale = math.prod(call.graph.operand(side.whole).scale for side in (left, right))
    return call.graph.constant(call.zeros(right.rows, left.whole), scale=scale)


# ---- operators that select, with their inputs repeated to one shape first: SELECT does not broadcast -----------------


def select(call: TfliteCall) -> None:
    """SELECT, SELECT_V2: between tensors of one shape."""
    shapes = [call.tensor(i).shape for i in range(3)]
    if len(set(shapes)) == 1 or any(shape is None or 0 in shape for shape in shapes):
        call.emit("SELECT", *map(call.input, range(3)))
        return
    shape = call.result_shape()
    call.emit("SELECT", *(_spread(call, i, shape) for i in range(3)))


def broadcast_to(call: TfliteCall) -> None:
    """BROADCAST_TO: the repeated input is the result."""
    _spread(call, 0, call.result_shape(), call.output())


def cast(call: TfliteCall) -> None:
    """CAST. The HAL's takes no booleans: from booleans it is a SELECT of 1 and 0, to booleans a comparison with 0."""
    source, result = call.tensor(0).type, call.result(0).type
    if source == "BOOL" and result != "BOOL":
        target, shape = call.output(), call.result_shape() or (1,)
        dtype = call.graph.operand(target).type.dtype
        call.emit("SELECT", call.input(0), *(_full(call, value, shape, dtype) for value in (1, 0)), to=[target])
    elif result == "BOOL" and source != "BOOL":
        call.emit("NOT_EQUAL", call.input(0), np.zeros(1, call.graph.operand(call.input(0)).type.dtype))
    else:
        call.emit("CAST", call.input(0))


def one_hot(call: TfliteCall) -> None:
    """ONE_HOT: EQUAL of the index and the position along a new axis, then SELECT."""
    if call.result(0).type not in ("FLOAT32", "FLOAT16", "INT32"):
        raise ImportFailed(f"it gives {call.result(0)}; the HAL selects floats or 32-bit integers")
    shape, depth = call.shape(0), call.integer(1)
    axis = axis_of(call.options.Axis(), len(shape) + 1)
    result, values = call.result_shape(), [call.values(i) for i in (2, 3)]
    if result != (*shape[:axis], depth, *shape[axis:]) or any(v.size != 1 for v in values):
        raise ImportFailed(
            f"the result's dimensions {list(result)} do not follow from {list(shape)} and {depth} values in axis {axis}"
        )
    target, indices = call.output(), call.input(0)
    dtype = call.graph.operand(target).type.dtype
    apart = _with_axis(call, indices, axis) if shape else indices
    call.graph.source.file.bytes.makes.charge(4 * depth)
    places = np.arange(depth, dtype=np.int32).reshape([depth if i == axis else 1 for i in range(len(result))])
    is_there = call.graph.like(target, type=OperandType.TENSOR_BOOL8, scale=0.0, zero_point=0)
    call.emit("EQUAL", apart, places, to=[is_there])
    call.emit("SELECT", is_there, *(_full(call, v.reshape(-1)[0], result, dtype) for v in values), to=[target])


def _spread(call: TfliteCall, position: int, shape: Dimensions, target: Ref | None = None) -> Ref:
    """Repeat an input to `shape`. target: the operand to write to."""
    x, own, shape = call.input(position), call.shape(position) or (1,), shape or (1,)
    try:
        fits = np.broadcast_shapes(own, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ImportFailed(f"input {position} has dimensions {list(own)}, which cannot become {list(shape)}")
    operand = call.graph.operand(x)
    if target is None and own == shape:
        return x
    if target is None and operand.value is not None:
        call.graph.source.file.bytes.makes.charge(math.prod(shape) * operand.type.element_size)
        values = np.broadcast_to(operand.value, shape)
        return call.graph.constant(np.ascontiguousarray(values), operand.base_type, operand.scale, operand.zero_point)
    result = call.temporary(x, shape) if target is None else target
    if operand.type == OperandType.TENSOR_BOOL8:
        call.emit("LOGICAL_OR", x, _full(call, False, shape, np.dtype(bool)), to=[result])
        return result
    for _ in range(len(shape) - len(own)):
        x = _with_axis(call, x, 0)
    own = (*[1] * (len(shape) - len(own)), *own)
    call.emit("TILE", x, np.array([d // n for d, n in zip(shape, own, strict=True)], np.int32), to=[result])
    return result


def _with_axis(call: TfliteCall, x: Ref, axis: int) -> Ref:
    """Add an axis of size 1 (EXPAND_DIMS: the HAL cannot RESHAPE INT32)."""
    shape = call.graph.operand(x).dimensions
    result = call.temporary(x, (*shape[:axis], 1, *shape[axis:]))
    call.emit("EXPAND_DIMS", x, axis, to=[result])
    return result


def _full(call: TfliteCall, value: Any, shape: Dimensions, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a constant filled with one number."""
    call.graph.source.file.bytes.makes.charge(math.prod(shape) * dtype.itemsize)
    return np.full(shape, value, dtype)


# ---- recurrent: a variable of the file becomes an input (state) and an output (next state) ---------------------------

_Weights = list[Ref | None]


def _weights(call: TfliteCall, positions: Sequence[int]) -> _Weights:
    return [call.optional_weights(i) for i in positions]


def _layer_norm(call: TfliteCall) -> _Weights:
    """Return the four weights of layer normalisation; none when absent."""
    found = _weights(call, range(20, 24))
    return found if any(found) else []


def one_state(kind: str, *options: str, result_first: bool = False) -> Any:
    """RNN, UNIDIRECTIONAL_SEQUENCE_RNN or SVDF: three weights, one state, and these options of the file.

    result_first: the HAL returns the result before the state.
    """

    def convert(call: TfliteCall) -> None:
        state, after = call.graph.state(call.number(4))
        tail = [int(getattr(call.options, option)()) for option in options]
        inputs = (call.input(0), *_weights(call, range(1, 4)), state, *tail)
        call.emit(kind, *inputs, to=[call.output(), after] if result_first else [after, call.output()])

    return convert


def bidirectional_rnn(call: TfliteCall) -> None:
    """BIDIRECTIONAL_SEQUENCE_RNN."""
    (forward, forward_after), (backward, backward_after) = (call.graph.state(call.number(i)) for i in (4, 8))
    first, second = _weights(call, range(1, 4)), _weights(call, range(5, 8))
    further = [call.optional(9), *_weights(call, (10, 11))]
    options = call.options
    tail = (options.FusedActivationFunction(), bool(options.TimeMajor()), bool(options.MergeOutputs()))
    inputs = (call.input(0), *first, forward, *second, backward, *further, *tail)
    outputs = [call.output(i) for i in range(1 if options.MergeOutputs() else 2)]
    call.emit("BIDIRECTIONAL_SEQUENCE_RNN", *inputs, to=[*outputs, forward_after, backward_after])


def lstm(call: TfliteCall) -> None:
    """LSTM, with the scratch buffer that the HAL requires."""
    if call.options.KernelType():
        raise ImportFailed("the BASIC kernel stores its gates in one matrix; convert the model with the FULL kernel")
    (state, after), (cell, cell_after) = (call.graph.state(call.number(i)) for i in (18, 19))
    inputs = (call.input(0), *_weights(call, range(1, 18)), state, cell, *_clips(call), *_layer_norm(call))
    gates = 4 if call.given(1) else 3
    scratch = call.temporary(call.input(0), (call.shape(0, 2)[0], gates * call.shape(2, 2)[0]))
    call.emit("LSTM", *inputs, to=[scratch, after, cell_after, call.output()])


def sequence_lstm(call: TfliteCall) -> None:
    """UNIDIRECTIONAL_SEQUENCE_LSTM."""
    if call.options.DiagonalRecurrentTensors():
        raise ImportFailed("diagonal recurrent weights have no counterpart in the HAL")
    (state, after), (cell, cell_after) = (call.graph.state(call.number(i)) for i in (18, 19))
    norm = _layer_norm(call) or [None] * 4
    tail = (*_clips(call), bool(call.options.TimeMajor()), *norm)
    inputs = (call.input(0), *_weights(call, range(1, 18)), state, cell, *tail)
    call.emit("UNIDIRECTIONAL_SEQUENCE_LSTM", *inputs, to=[call.output(), after, cell_after])


def bidirectional_lstm(call: TfliteCall) -> None:
    """BIDIRECTIONAL_SEQUENCE_LSTM, which has no layer normalisation in TFLite."""
    states = [call.graph.state(call.number(i)) for i in range(35, 39)]
    further = [call.optional(39), *_weights(call, range(40, 48))]
    flags = (bool(call.options.MergeOutputs()), bool(call.options.TimeMajor()))
    inputs = (call.input(0), *_weights(call, range(1, 35)), *(before for before, _ in states), *further)
    outputs = [call.output(i) for i in range(1 if call.options.MergeOutputs() else 2)]
    after = [ref for _, ref in states]
    call.emit("BIDIRECTIONAL_SEQUENCE_LSTM", *inputs, *_clips(call), *flags, *[None] * 8, to=[*outputs, *after])


def _clips(call: TfliteCall) -> tuple[int, float, float]:
    """Return the activation and the two clips."""
    return call.options.FusedActivationFunction(), call.options.CellClip(), call.options.ProjClip()
