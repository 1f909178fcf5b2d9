"""Operators on matrices: dense layers, products of activations, softmax, normalisations, reductions."""

import math
from typing import Any

import numpy as np

from driver.errors import ImportFailed
from driver.formats.file_bytes import Array
from driver.nn.builder import Value

from .call import Convert, OnnxCall, axis_of, bias, broadcast, filters
from .elements import require_floats
from .graph import Shape, ValueEntry
from .shapes import IMAGE_AXES, collapsed, give_shaped, picked, spread

_MOST_PRODUCTS = 256
"""Limit of matrix products that one batched MatMul is split into."""


# ---- dense layers --------------------------------------------------------------------------------------------------


def gemm(call: OnnxCall) -> None:
    """FULLY_CONNECTED: alpha * A * B + beta * C, with constant B."""
    node, (rows, size) = call.node, call.shape(0, 2)
    x = call.value(0)
    if node.integer("transA"):
        x, rows, size = call.emit("TRANSPOSE", x, np.array([1, 0], np.int32)), size, rows
    entry, by_unit = call.weights(1), node.integer("transB")
    if entry.array is None or entry.array.ndim != 2:
        raise ImportFailed(f"weights {entry}; expected 2 dimensions")
    array = entry.array if by_unit else entry.array.T
    if size not in (0, array.shape[1]):
        raise ImportFailed(f"matrices of {[rows, size]} and {[*array.T.shape]} cannot be multiplied")
    alpha, beta = node.real("alpha", 1.0), node.real("beta", 1.0)
    if alpha != 1.0:
        if call.target is not None:
            raise ImportFailed(f"alpha {alpha} is not supported for a quantised product")
        array = array * array.dtype.type(alpha)
    result = _dense(
        call, x, entry, array, rows=(rows,), by_unit=entry.axis == (0 if by_unit else 1), position=2, factor=beta
    )
    call.give(result, shape=(rows, array.shape[0]))


def _dense(
    call: OnnxCall,
    x: Value,
    entry: ValueEntry,
    array: Array,
    rows: Shape,
    by_unit: bool,
    position: int,
    factor: float = 1.0,
) -> Value:
    """x times the transposed `array`, of rank 2; a convolution of 1 x 1 where each unit has its own scale."""
    units, size = array.shape
    if x.operand.type.is_quantised and len(entry.scales) > 1:
        if not by_unit:
            raise ImportFailed(f"weights {entry} have per-channel scales along the dimension that is summed")
        weights = filters(call, entry, array.reshape(units, 1, 1, size), 0, x=x)
        image = call.graph.reshape(x, (math.prod(rows), 1, 1, size))
        offset = bias(call, position, image, weights, units=units, factor=factor)
        result = call.emit("CONV_2D", image, weights, offset, 0, 0, 0, 0, 1, 1, call.code)
        return call.graph.reshape(result, (math.prod(rows), units))
    weights = filters(call, entry, array, 0, x=x)
    offset = bias(call, position, x, weights, units=units, factor=factor)
    return call.graph.cast(call.emit("FULLY_CONNECTED", x, weights, offset, call.code))


def matmul(call: OnnxCall) -> None:
    """FULLY_CONNECTED with constant weights; a batch of matrices is split, one FULLY_CONNECTED each."""
    entry = call.entry(1)
    call.graph.derive(entry)
    if entry.array is not None and entry.array.ndim == 2 and len(call.shape(0)) > 1:
        _layer(call, entry)
    else:
        require_floats(call)
        if call.target is not None:
            raise ImportFailed("neither matrix of a quantised product is constant")
        _products(call)


def _layer(call: OnnxCall, entry: ValueEntry) -> None:
    shape, array = call.shape(0), entry.array
    assert array is not None
    x, units = call.value(0), array.shape[1]
    if shape[-1] != array.shape[0]:
        raise ImportFailed(f"matrices of {list(shape)} and {list(array.shape)} cannot be multiplied")
    if len(shape) != 2:
        x = call.graph.reshape(x, (math.prod(shape[:-1]), shape[-1]))
    result = _dense(call, x, entry, array.T, rows=(math.prod(shape[:-1]),), by_unit=entry.axis == 1, position=2)
    if len(shape) != 2:
        result = call.graph.reshape(result, (*shape[:-1], units))
    call.give(result, shape=(*shape[:-1], units))


def _products(call: OnnxCall) -> None:
    left, right = call.known(0), call.known(1)
    if len(left) < 2 or len(right) < 2 or left[-1] != right[-2]:
        raise ImportFailed(f"matrices of {list(left)} and {list(right)} cannot be multiplied")
    head = broadcast(left[:-2], right[:-2]) if left[:-2] or right[:-2] else ()
    count, (rows, size), units = math.prod(head), left[-2:], right[-1]
    if not 0 < count <= _MOST_PRODUCTS:
        raise ImportFailed(f"{count} products of matrices; the limit is {_MOST_PRODUCTS}")
    x = spread(call, call.value(0), left, (*head, rows, size))
    order = [*range(len(right) - 2), len(right) - 1, len(right) - 2]
    turned = call.graph.transpose(call.value(1), order)
    y = spread(call, turned, (*right[:-2], units, size), (*head, units, size))
    zeros = call.graph.builder.constant(np.zeros(units, x.operand.type.dtype))
    pieces = [
        call.emit("FULLY_CONNECTED", a, b, zeros, 0)
        for a, b in zip(
            _matrices(call, x, count, rows, size=size), _matrices(call, y, count, units, size=size), strict=True
        )
    ]
    result = pieces[0] if count == 1 else call.emit("CONCATENATION", *pieces, 0)
    call.give(call.graph.reshape(result, (*head, rows, units)), shape=(*head, rows, units))


def _matrices(call: OnnxCall, value: Value, count: int, rows: int, size: int) -> list[Value]:
    """Return the matrices of a batch."""
    flat = call.graph.reshape(value, (count * rows, size))
    if count == 1:
        return [flat]
    return list(call.emit("SPLIT", flat, 0, count, outputs=count))


# ---- softmax and normalisation -------------------------------------------------------------------------------------


def softmax(kind: str) -> Convert:
    """SOFTMAX or LOG_SOFTMAX; before opset 13, over all dimensions from the axis on."""

    def convert(call: OnnxCall) -> None:
        shape, old = call.shape(0), call.opset < 13
        axis = call.axis(1 if old else -1, len(shape))
        if old and axis != len(shape) - 1 and math.prod(shape[axis:]) != shape[axis]:
            flat = call.graph.reshape(call.value(0), (math.prod(shape[:axis]), math.prod(shape[axis:])))
            result = call.emit(kind, flat, 1.0, *((1,) if kind == "LOG_SOFTMAX" else ()))
            call.give(call.graph.reshape(result, shape), shape=shape)
            return
        if len(shape) > 4:
            flat = collapsed(call, 0, axis)
            give_shaped(call, call.emit(kind, flat, 1.0, 1), shape)
            return
        value, is_image = call.input_in_its_layout()
        place = IMAGE_AXES[len(shape)][axis] if is_image else axis
        is_last = place == len(value.operand.dimensions) - 1 and kind == "SOFTMAX"
        call.give(call.emit(kind, value, 1.0, *(() if is_last else (place,))), shape=shape, is_image=is_image)

    return convert


def batch_norm(call: OnnxCall) -> None:
    """MUL and ADD with factors computed from the four constants."""
    if call.node.integer("training_mode"):
        raise ImportFailed("training_mode is set; export the model for inference")
    scale, offset, mean, variance = (np.asarray(call.weights(i).array, np.float64) for i in range(1, 5))
    channels = (*call.shape(0), 0, 0)[1]
    if len({a.shape for a in (scale, offset, mean, variance)}) > 1 or scale.shape != (channels,):
        raise ImportFailed(f"scale, bias, mean and variance must have one value for each of {channels} channels")
    factor = scale / np.sqrt(variance + call.node.real("epsilon", 1e-5))
    _scaled(call, factor, offset - mean * factor)


def _scaled(call: OnnxCall, factor: Array, offset: Array, value: Value | None = None) -> None:
    """Bind the result to the image scaled and shifted per channel."""
    shape = call.shape(0)
    is_image = len(shape) in (3, 4)
    value = value or (call.image(0) if is_image else call.value(0))
    dtype = value.operand.type.dtype
    value = call.emit("MUL", value, factor.astype(dtype), 0)
    call.give(call.emit("ADD", value, offset.astype(dtype), call.code), shape=shape, is_image=is_image)


def instance_norm(call: OnnxCall) -> None:
    """INSTANCE_NORMALIZATION, then scales and shifts each channel."""
    factor, offset = (np.asarray(call.weights(i).array) for i in (1, 2))
    epsilon = call.node.real("epsilon", 1e-5)
    value = call.emit("INSTANCE_NORMALIZATION", call.image(0), 1.0, 0.0, epsilon, False)
    if factor.ndim != 1 or factor.shape != offset.shape:
        raise ImportFailed("scale and bias must have one value for each channel")
    _scaled(call, factor, offset, value)


def group_norm(call: OnnxCall) -> None:
    """Normalise each group as a row of its own; then scale and shift each channel."""
    shape, groups = call.shape(0, 4), call.node.integer("num_groups")
    channels, pixels = shape[1], math.prod(shape[2:])
    if groups < 1 or not pixels or not channels or channels % groups:
        raise call.graph.unsized(f"{groups} groups of {channels} channels")
    factor, offset = (np.asarray(call.weights(i).array) for i in (1, 2))
    call.graph.charge(8 * channels)
    if factor.shape == (groups,):  # before opset 21
        factor, offset = np.repeat(factor, channels // groups), np.repeat(offset, channels // groups)
    rows = call.graph.reshape(call.value(0), (shape[0], groups, channels // groups * pixels))
    normal, _, _ = _normalised(call, rows, [2])
    value = call.graph.transpose(call.graph.reshape(normal, shape), (0, 2, 3, 1))
    _scaled(call, factor, offset, value)


def layer_norm(call: OnnxCall) -> None:
    """Normalise over the last dimensions; then scale and shift each element."""
    shape = call.shape(0)
    axes = list(range(call.axis(-1, len(shape)), len(shape)))
    value, mean, factor = _normalised(call, call.value(0), axes)
    value = call.emit("MUL", value, call.value(1), 0)
    value = call.emit("ADD", value, call.value(2), 0) if call.given(2) else value
    call.give(value, shape=shape)
    for at, further in ((1, mean), (2, factor)):
        call.give(further, at=at)


def _normalised(call: OnnxCall, value: Value, axes: list[int]) -> tuple[Any, Any, Any]:
    """`value` normalised to mean 0 and variance 1 along `axes`; its mean; and 1 / its standard deviation."""
    require_floats(call)
    along = np.array(axes, np.int32)
    mean = call.emit("MEAN", value, along, 1)
    apart = call.emit("SUB", value, mean, 0)
    variance = call.emit("MEAN", call.emit("MUL", apart, apart, 0), along, 1)
    epsilon = call.scalar(call.node.real("epsilon", 1e-5))
    factor = call.emit("RSQRT", call.emit("ADD", variance, epsilon, 0))
    return call.emit("MUL", apart, factor, 0), mean, factor


# ---- reductions ----------------------------------------------------------------------------------------------------


def reduce(kind: str, before: str | None = None, after: str | None = None) -> Convert:
    """MEAN or a REDUCE_…; `before`: SQUARE or ABS of each element, `after`: SQRT or LOG of the result."""

    def convert(call: OnnxCall) -> None:
        shape, axes = call.shape(0), call.attribute_or_input("axes", 1)
        if not axes and call.node.integer("noop_with_empty_axes"):
            raise ImportFailed("noop_with_empty_axes is not supported")
        named = sorted({axis_of(a, len(shape)) for a in axes or range(len(shape))})
        keep = bool(call.node.integer("keepdims", 1))
        result = tuple(1 if i in named else d for i, d in enumerate(shape) if keep or i not in named)
        if len(shape) > 4 and named == list(range(named[0], named[-1] + 1)):
            value = _mapped(call, before, collapsed(call, 0, named[0], len(named)))
            value = call.emit(kind, value, np.array([1], np.int32), 0 if kind == "MEAN" else False)
            give_shaped(call, call.emit(after, value) if after else value, result)
            return
        if len(shape) > 4:
            raise ImportFailed(f"input 0, {call.entry(0)}: along apart dimensions, the HAL takes at most 4")
        value, is_image = call.input_in_its_layout()
        if is_image and not keep and named != list(range(2, len(shape))):
            value, is_image = call.value(0), False
        place = IMAGE_AXES[len(shape)] if is_image else tuple(range(len(shape)))
        along = np.array(
            [place[a] for a in named] + ([1] if is_image and not keep and len(shape) == 3 else []), np.int32
        )
        value = _mapped(call, before, value)
        if named:
            value = call.emit(kind, value, along, int(keep) if kind == "MEAN" else keep)
        value = call.emit(after, value) if after else value
        call.give(value, shape=result, is_image=is_image and keep)

    return convert


def _mapped(call: OnnxCall, kind: str | None, value: Value) -> Any:
    """SQUARE or ABS of each element; the value itself without."""
    return value if kind is None else call.emit("MUL", value, value, 0) if kind == "SQUARE" else call.emit(kind, value)


def arg(kind: str) -> Convert:
    """ARGMAX or ARGMIN."""

    def convert(call: OnnxCall) -> None:
        if call.node.integer("select_last_index"):
            raise ImportFailed("select_last_index is not supported: of equal elements, the HAL takes the first")
        shape = call.shape(0)
        axis, keep = call.axis(0, len(shape)), call.node.integer("keepdims", 1)
        result = call.emit(kind, call.value(0), axis)
        if keep:
            result = call.graph.reshape(result, (*shape[:axis], 1, *shape[axis + 1 :]))
        call.give(result, shape=tuple(1 if i == axis else d for i, d in enumerate(shape) if keep or i != axis))

    return convert


def top_k(call: OnnxCall) -> None:
    """TOPK_V2 along the last dimension; for the smallest, the input is negated.

    Of equal elements the HAL takes the last first, and ONNX the first: so their order is turned before, and the indices
    after.
    """
    shape = call.shape(0)
    axis = call.axis(-1, len(shape))
    count = call.integers(1)[0] if call.given(1) and call.number(1) > 0 else call.node.integer("k")
    if axis != len(shape) - 1:
        raise ImportFailed(f"axis {axis} of {len(shape)} dimensions; the HAL sorts along the last one only")
    is_largest, value = call.node.integer("largest", 1), call.value(0)
    value, size = value if is_largest else call.emit("NEG", value), call.known(0)[axis]
    call.graph.charge(4 * size)
    turned = picked(call, value, axis, np.arange(size, dtype=np.int32)[::-1])
    values, indices = call.emit("TOPK_V2", turned, count)
    call.give(values if is_largest else call.emit("NEG", values))
    call.give(call.emit("SUB", np.array([size - 1], np.int32), indices, 0), at=1)
