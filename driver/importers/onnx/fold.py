"""Constant folding: the shapes that exporters write as operators, and other small constants.

An unknown size is UNKNOWN in such a list; anything computed from it is DERIVED.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from driver.errors import ImportFailed
from driver.importers.file_bytes import Array

from .call import OnnxCall, axis_of
from .file import DTYPES, TYPES
from .graph import DERIVED, UNKNOWN, Shape

_MOST = 1 << 14
"""Limit of elements in a folded constant."""
_KEEP_TYPE = frozenset(
    ["Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Gather", "Slice", "Concat", "Expand"]
)
"""Operators whose result has the type of their first input."""
_VIEWS = ("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Cast")
"""Folded for larger constants too: they allocate nothing, or no more than the file holds."""
Fold = Callable[[OnnxCall, list[Array]], Array]


def fold(call: OnnxCall) -> bool:
    """Compute the operator if all of its inputs are constant. Returns whether it was computed."""
    node = call.node
    if node.kind in ("Shape", "Size"):
        return _shape(call)
    entries = [call.graph.entry(name) if name else None for name in node.inputs]
    if node.kind not in FOLDS or len(node.outputs) != 1 or any(e is not None and e.array is None for e in entries):
        return False
    arrays = [e.array for e in entries if e is not None and e.array is not None]
    if not arrays or (node.kind not in _VIEWS and sum(a.size for a in arrays) > _MOST):
        return False
    if any(e is not None and e.scales for e in entries):
        return False
    try:
        result = np.asarray(FOLDS[node.kind](call, arrays))
    except (ValueError, TypeError, IndexError, OverflowError, MemoryError, ZeroDivisionError) as error:
        raise ImportFailed(f"cannot be computed from these constants: {str(error)[:128]}") from None
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    is_boolean = result.dtype == np.bool_ or (node.kind in _KEEP_TYPE and call.entry(0).type == "BOOL")
    kind = "BOOL" if is_boolean else names[result.dtype]
    if node.kind not in _VIEWS or node.kind == "Cast":
        call.graph.charge(result.nbytes)
    call.define(result.view(np.uint8) if result.dtype == np.bool_ else result, kind)
    return True


def _shape(call: OnnxCall) -> bool:
    shape = call.shape(0)
    if call.node.kind == "Size":
        call.define(np.array(DERIVED if 0 in shape else math.prod(shape), np.int64), "INT64")
        return True
    kept = shape[slice(call.node.integer("start"), call.node.integer("end", len(shape)))]
    call.define(np.array([d or UNKNOWN for d in kept], np.int64), "INT64")
    return True


def _bounded(count: int) -> None:
    if not 0 <= count <= _MOST:
        raise ImportFailed(f"{count} elements computed from constants; the limit is {_MOST}")


def _elementwise(compute: Callable[..., Any], inputs: int = 1) -> Fold:
    """A numpy function of exactly `inputs` inputs: numpy would take a further one as its output."""

    def apply(call: OnnxCall, arrays: list[Array]) -> Array:
        if len(arrays) != inputs:
            raise ImportFailed(f"{len(arrays)} inputs; expected {inputs}")
        _bounded(math.prod(np.broadcast_shapes(*(a.shape for a in arrays))))
        result = np.asarray(compute(*arrays))
        if result.dtype != np.bool_:
            result = result.astype(arrays[0].dtype)
        unknown = [np.isin(a, (UNKNOWN, DERIVED)) for a in arrays if a.dtype == np.int64]
        if not any(u.any() for u in unknown):
            return result
        mask = np.broadcast_to(np.any(np.broadcast_arrays(*unknown), axis=0), result.shape)
        if result.dtype == np.int64:
            return np.where(mask, DERIVED, result)
        is_negative = [(a < 0) & ~u for a, u in zip(arrays, unknown, strict=False)]
        if compute is not operator.eq or not np.any(np.broadcast_arrays(*is_negative), axis=0)[mask].all():
            raise ImportFailed(f"it depends on an unknown dimension; {call.graph.shape_hint()}")
        return result  # a size is never negative

    return apply


def _each(compute: Callable[..., Any]) -> Fold:
    """Fold any number of inputs with a binary function."""
    step = _elementwise(compute, 2)

    def apply(call: OnnxCall, arrays: list[Array]) -> Array:
        total = arrays[0]
        for array in arrays[1:]:
            total = step(call, [total, array])
        return total

    return apply


def _div(x: Array, y: Array) -> Array:
    if x.dtype.kind == "f":
        return np.asarray(x / y)
    if (y == 0).any():
        raise ImportFailed("integer division by 0")
    return np.asarray(np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y)))


def _mod(x: Array, y: Array) -> Array:
    if x.dtype.kind == "f" or (y == 0).any():
        raise ImportFailed("remainder of floats, or by 0")
    return np.asarray(np.mod(x, y))


def _axes(call: OnnxCall, arrays: Sequence[Array]) -> list[int] | None:
    return [int(v) for v in arrays[1].reshape(-1)] if len(arrays) > 1 else call.node.integers("axes")


def _squeeze(call: OnnxCall, arrays: list[Array]) -> Array:
    axes = _axes(call, arrays)
    return np.squeeze(arrays[0], None if axes is None else tuple(axis_of(a, arrays[0].ndim) for a in axes))


def _unsqueeze(call: OnnxCall, arrays: list[Array]) -> Array:
    axes = _axes(call, arrays) or []
    if arrays[0].ndim + len(axes) > 8:
        raise ImportFailed(f"{arrays[0].ndim + len(axes)} dimensions")
    return np.expand_dims(arrays[0], tuple(axes))


def _slice(call: OnnxCall, arrays: list[Array]) -> Array:
    data, node = arrays[0], call.node
    if len(arrays) > 2:
        starts, ends, *more = ([int(v) for v in a.reshape(-1)] for a in arrays[1:])
    else:
        starts, ends, more = node.integers("starts") or [], node.integers("ends") or [], []
    axes = more[0] if more else node.integers("axes") or list(range(len(starts)))
    steps = more[1] if len(more) > 1 else [1] * len(starts)
    cut = [slice(None)] * data.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        cut[axis_of(axis, data.ndim)] = slice(start, None if end < -(2**62) else end, step)
    return data[tuple(cut)]


def _gather(call: OnnxCall, arrays: list[Array]) -> Array:
    data, axis = arrays[0], axis_of(call.node.integer("axis"), arrays[0].ndim)
    _bounded(arrays[1].size * (data.size // max(data.shape[axis], 1)))
    return np.take(data, arrays[1].astype(np.int64), axis)


def _reshape(call: OnnxCall, arrays: list[Array]) -> Array:
    sizes = [int(v) for v in arrays[1].reshape(-1)] if len(arrays) > 1 else call.node.integers("shape") or []
    if len(sizes) > 8:
        raise ImportFailed(f"{len(sizes)} dimensions")
    return arrays[0].reshape([arrays[0].shape[i] if d == 0 else d for i, d in enumerate(sizes)])


def _flatten(call: OnnxCall, arrays: list[Array]) -> Array:
    axis = call.node.integer("axis", 1)
    return arrays[0].reshape(math.prod(arrays[0].shape[:axis]), -1)


def _cast(call: OnnxCall, arrays: list[Array]) -> Array:
    kind = TYPES.get(call.node.integer("to"))
    if kind is None:
        raise ImportFailed(f"cannot cast to ONNX type {call.node.integer('to')}")
    return arrays[0] != 0 if kind == "BOOL" else arrays[0].astype(DTYPES[kind])


def _expand(call: OnnxCall, arrays: list[Array]) -> Array:
    wanted = tuple(int(v) for v in arrays[1].reshape(-1))
    if len(wanted) > 8 or min(wanted, default=1) < 0:
        raise ImportFailed(f"invalid shape {wanted[:8]}")
    shape = np.broadcast_shapes(arrays[0].shape, wanted)
    _bounded(math.prod(shape))
    return np.ascontiguousarray(np.broadcast_to(arrays[0], shape))


def _range(call: OnnxCall, arrays: list[Array]) -> Array:
    start, limit, step = (a.reshape(-1)[0].item() for a in arrays)
    if not step:
        raise ImportFailed("the step is 0")
    _bounded(max(math.ceil((limit - start) / step), 0))
    return np.asarray(np.arange(start, limit, step), arrays[0].dtype)


def _filled(call: OnnxCall, arrays: list[Array]) -> Array:
    shape: Shape = tuple(int(v) for v in arrays[0].reshape(-1))
    if len(shape) > 8 or min(shape, default=0) < 0:
        raise ImportFailed(f"invalid shape {list(shape)[:8]}: {call.graph.shape_hint()}")
    _bounded(math.prod(shape))
    value = call.node.tensor("value")
    return np.full(shape, np.float32(0) if value is None else value.data.reshape(-1)[0])


def _reduce(compute: Callable[..., Any]) -> Fold:
    def apply(call: OnnxCall, arrays: list[Array]) -> Array:
        axes = _axes(call, arrays)
        along = None if axes is None else tuple(axis_of(a, arrays[0].ndim) for a in axes)
        result = np.asarray(compute(arrays[0], axis=along, keepdims=bool(call.node.integer("keepdims", 1))))
        if arrays[0].dtype == np.int64 and np.isin(arrays[0], (UNKNOWN, DERIVED)).any():
            result = np.full(result.shape, DERIVED, np.int64)
        return result.astype(arrays[0].dtype)

    return apply


def _where(_: OnnxCall, arrays: list[Array]) -> Array:
    _bounded(math.prod(np.broadcast_shapes(*(a.shape for a in arrays))))
    return np.where(arrays[0] != 0, arrays[1], arrays[2])


FOLDS: dict[str, Fold] = {
    "Abs": _elementwise(np.abs),
    "Add": _elementwise(operator.add, 2),
    "And": _elementwise(np.logical_and, 2),
    "Cast": _cast,
    "Ceil": _elementwise(np.ceil),
    "Concat": lambda call, arrays: np.concatenate(arrays, axis_of(call.node.integer("axis"), arrays[0].ndim)),
    "ConstantOfShape": _filled,
    "Cos": _elementwise(np.cos),
    "Div": _elementwise(_div, 2),
    "Equal": _elementwise(operator.eq, 2),
    "Exp": _elementwise(np.exp),
    "Expand": _expand,
    "Flatten": _flatten,
    "Floor": _elementwise(np.floor),
    "Gather": _gather,
    "Greater": _elementwise(operator.gt, 2),
    "GreaterOrEqual": _elementwise(operator.ge, 2),
    "Identity": lambda call, arrays: arrays[0],
    "Less": _elementwise(operator.lt, 2),
    "LessOrEqual": _elementwise(operator.le, 2),
    "Log": _elementwise(np.log),
    "Max": _each(np.maximum),
    "Min": _each(np.minimum),
    "Mod": _elementwise(_mod, 2),
    "Mul": _elementwise(operator.mul, 2),
    "Neg": _elementwise(operator.neg),
    "Not": _elementwise(np.logical_not),
    "Or": _elementwise(np.logical_or, 2),
    "Pow": _elementwise(lambda x, y: np.power(x.astype(np.float64), y), 2),
    "Range": _range,
    "Reciprocal": _elementwise(lambda x: 1 / x),
    "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min),
    "ReduceProd": _reduce(np.prod),
    "ReduceSum": _reduce(np.sum),
    "Reshape": _reshape,
    "Sin": _elementwise(np.sin),
    "Slice": _slice,
    "Sqrt": _elementwise(np.sqrt),
    "Squeeze": _squeeze,
    "Sub": _elementwise(operator.sub, 2),
    "Transpose": lambda call, arrays: arrays[0].transpose(call.node.integers("perm")),
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
