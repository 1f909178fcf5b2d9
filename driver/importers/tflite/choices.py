"""Builtin operators that select, with their inputs repeated to one shape first: SELECT does not broadcast."""

import math
from typing import Any

import numpy as np

from driver.errors import ImportFailed
from driver.nn import OperandType
from driver.nn.types import Dimensions

from .call import TfliteCall, axis_of
from .graph import Ref


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
    if source == "BOOL" and result not in ("BOOL", "INT64"):
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
        return call.graph.constant(np.ascontiguousarray(values), operand.type, operand.scale, operand.zero_point)
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
    """A constant filled with one number."""
    call.graph.source.file.bytes.makes.charge(math.prod(shape) * dtype.itemsize)
    return np.full(shape, value, dtype)
