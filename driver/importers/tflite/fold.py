"""Constant folding: operators on integers and booleans that are known at load time, most of them parts of shapes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from driver.errors import ImportFailed
from driver.formats.file_bytes import Array

from .call import TfliteCall, axis_of
from .file import integers

_MOST = 1 << 12
"""Limit of elements in a folded constant."""
_HIGHEST_RANK = 8
_RESULTS = {"INT32": np.int32, "INT64": np.int64, "BOOL": np.uint8, "FLOAT32": np.float32}
Fold = Callable[[TfliteCall, list[Array]], Any]


def compute(call: TfliteCall) -> bool:
    """Compute the operator if all of its inputs are known integers or booleans. Returns whether it was computed."""
    if call.operator.name not in FOLDS or len(call.operator.outputs) != 1 or call.result(0).type not in _RESULTS:
        return False
    arrays = [_known(call, i) for i in range(len(call)) if call.given(i)]
    found = [array for array in arrays if array is not None]
    if not found or len(found) < len(arrays):
        return False
    try:
        result = np.asarray(FOLDS[call.operator.name](call, found))
    except (ValueError, TypeError, IndexError, OverflowError, ZeroDivisionError) as error:
        raise ImportFailed(f"cannot be computed from these constants: {str(error)[:128]}") from None
    if result.size > _MOST or result.ndim > _HIGHEST_RANK:
        raise ImportFailed(f"{result.size} elements computed from constants; the limit is {_MOST}")
    info = call.result(0)
    if info.type == "INT32" and result.size and not -(2**31) <= result.min() <= result.max() < 2**31:
        raise ImportFailed(f"{info} does not fit into 32 bits")
    data = np.ascontiguousarray(result).astype(_RESULTS[info.type]).reshape(result.shape)
    call.graph.same(info.index, replace(info, data=data, shape=data.shape, offset=-1, is_empty=False))
    return True


def _known(call: TfliteCall, position: int) -> Array | None:
    """Return the values of an input as 64-bit integers; None where they are not known."""
    sizes = call.graph.sizes.get(call.number(position))
    if sizes is not None:
        return None if None in sizes else np.array(sizes, np.int64)
    info = call.tensor(position)
    if info.data is None or info.type not in ("INT32", "INT64", "BOOL") or info.data.size > _MOST:
        return None
    return info.data.astype(np.int64)


def _elementwise(function: Callable[..., Any], inputs: int = 2) -> Fold:
    def apply(_: TfliteCall, arrays: list[Array]) -> Any:
        if len(arrays) != inputs:
            raise ImportFailed(f"{len(arrays)} inputs; expected {inputs}")
        if math.prod(np.broadcast_shapes(*(a.shape for a in arrays))) > _MOST:
            raise ImportFailed(f"more than {_MOST} elements computed from constants")
        return function(*arrays)

    return apply


def _floor_div(x: Array, y: Array) -> Array:
    if (y == 0).any():
        raise ImportFailed("integer division by 0")
    return np.asarray(x // y)


def _div(x: Array, y: Array) -> Array:
    """Divide towards zero, as TFLite's own kernel."""
    return np.asarray(np.sign(x) * np.sign(y) * _floor_div(np.abs(x), np.abs(y)))


def _floor_mod(x: Array, y: Array) -> Array:
    return np.asarray(x - _floor_div(x, y) * y)


def _reduce(function: Callable[..., Any]) -> Fold:
    def apply(call: TfliteCall, arrays: list[Array]) -> Any:
        axes = tuple(axis_of(int(a), arrays[0].ndim) for a in arrays[1].reshape(-1))
        return function(arrays[0], axis=axes, keepdims=bool(call.options.KeepDims()))

    return apply


def _range(_: TfliteCall, arrays: list[Array]) -> Array:
    start, limit, step = (int(a.reshape(-1)[0]) for a in arrays)
    if not step or (limit - start) / step > _MOST:
        raise ImportFailed(f"a range from {start} to {limit} by {step}; the limit is {_MOST} elements")
    return np.arange(start, limit, step)


def _filled(_: TfliteCall, arrays: list[Array]) -> Array:
    sizes = [int(d) for d in arrays[0].reshape(-1)]
    if len(sizes) > _HIGHEST_RANK or min(sizes, default=0) < 0 or math.prod(sizes) > _MOST:
        raise ImportFailed(f"dimensions {sizes[:_HIGHEST_RANK]} of a constant; the limit is {_MOST} elements")
    return np.full(sizes, arrays[1].reshape(-1)[0])


def _squeezed(call: TfliteCall, arrays: list[Array]) -> Array:
    axes = integers(call.options, "SqueezeDims")
    return np.squeeze(arrays[0], tuple(axis_of(a, arrays[0].ndim) for a in axes) if axes else None)


def _reshaped(call: TfliteCall, arrays: list[Array]) -> Array:
    sizes: Sequence[int] = arrays[1].reshape(-1).tolist() if len(arrays) > 1 else integers(call.options, "NewShape")
    return arrays[0].reshape(sizes[: _HIGHEST_RANK + 1])


def _sliced(_: TfliteCall, arrays: list[Array]) -> Array:
    data, (begin, size) = arrays[0], (a.reshape(-1).tolist() for a in arrays[1:3])
    cut = [slice(b, None if s == -1 else b + s) for b, s in zip(begin, size, strict=True)]
    return np.asarray(data[tuple(cut)])


def _sliced_by_steps(call: TfliteCall, arrays: list[Array]) -> Array:
    o, data = call.options, arrays[0]
    if o.EllipsisMask() or o.NewAxisMask() or o.Offset():
        raise ImportFailed("it has an ellipsis, new axes, or ends relative to the beginning")
    cut: list[Any] = []
    for i, (begin, end, step) in enumerate(zip(*(a.reshape(-1).tolist() for a in arrays[1:4]), strict=True)):
        if o.ShrinkAxisMask() >> i & 1:
            cut.append(0 if o.BeginMask() >> i & 1 else begin)
        else:
            first, last = (None if m >> i & 1 else v for m, v in ((o.BeginMask(), begin), (o.EndMask(), end)))
            cut.append(slice(first, last, step))
    return np.asarray(data[tuple(cut)])


def _gathered(call: TfliteCall, arrays: list[Array]) -> Array:
    if call.options.BatchDims():
        raise ImportFailed(f"batch_dims {call.options.BatchDims()} is not supported; the HAL has 0")
    axis = axis_of(call.options.Axis(), arrays[0].ndim)
    if arrays[1].size * arrays[0].size > _MOST:
        raise ImportFailed(f"more than {_MOST} elements computed from constants")
    return np.take(arrays[0], arrays[1], axis)


FOLDS: dict[str, Fold] = {
    "ABS": _elementwise(np.abs, 1),
    "ADD": _elementwise(np.add),
    "CAST": _elementwise(lambda x: x, 1),
    "CONCATENATION": lambda call, arrays: np.concatenate(arrays, axis_of(call.options.Axis(), arrays[0].ndim)),
    "DIV": _elementwise(_div),
    "EQUAL": _elementwise(np.equal),
    "EXPAND_DIMS": lambda call, arrays: np.expand_dims(arrays[0], call.integer(1)),
    "FILL": _filled,
    "FLOOR_DIV": _elementwise(_floor_div),
    "FLOOR_MOD": _elementwise(_floor_mod),
    "GATHER": _gathered,
    "GREATER": _elementwise(np.greater),
    "GREATER_EQUAL": _elementwise(np.greater_equal),
    "LESS": _elementwise(np.less),
    "LESS_EQUAL": _elementwise(np.less_equal),
    "LOGICAL_AND": _elementwise(np.logical_and),
    "LOGICAL_NOT": _elementwise(np.logical_not, 1),
    "LOGICAL_OR": _elementwise(np.logical_or),
    "MAXIMUM": _elementwise(np.maximum),
    "MINIMUM": _elementwise(np.minimum),
    "MUL": _elementwise(np.multiply),
    "NEG": _elementwise(np.negative, 1),
    "NOT_EQUAL": _elementwise(np.not_equal),
    "PACK": lambda call, arrays: np.stack(arrays, axis_of(call.options.Axis(), arrays[0].ndim + 1)),
    "RANGE": _range,
    "REDUCE_MAX": _reduce(np.max),
    "REDUCE_MIN": _reduce(np.min),
    "REDUCE_PROD": _reduce(np.prod),
    "RESHAPE": _reshaped,
    "SELECT": _elementwise(lambda c, x, y: np.where(c != 0, x, y), 3),
    "SELECT_V2": _elementwise(lambda c, x, y: np.where(c != 0, x, y), 3),
    "SLICE": _sliced,
    "SQUEEZE": _squeezed,
    "STRIDED_SLICE": _sliced_by_steps,
    "SUB": _elementwise(np.subtract),
    "SUM": _reduce(np.sum),
    "TRANSPOSE": lambda _, arrays: arrays[0].transpose(arrays[1].reshape(-1)),
}
