"""Constant folding: the shapes that exporters write as operators, and other small constants.

An unknown size is UNKNOWN in such a list; anything computed from it is DERIVED.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from driver.errors import ImportFailed
from driver.formats.file_bytes import Array

from .call import OnnxCall, axis_of
from .file import DTYPES, TYPES
from .graph import DERIVED, INTEGERS, UNKNOWN, Shape, is_open

_MOST = 1 << 14
"""Limit of elements in a folded constant that is larger than what it is computed from."""
_KEEP_TYPE = frozenset(
    ["Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Gather", "Slice", "Concat", "Expand"]
)
"""Operators whose result has the type of their first input."""
_VIEWS = ("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Cast")
"""Folded for larger constants too: they allocate nothing, or no more than the file holds."""
_KNOWN_FROM = dict.fromkeys([*(_KEEP_TYPE - {"Concat"}), "Tile"], 1) | {"ConstantOfShape": 0, "Range": 0, "Trilu": 0}
"""Operators some inputs of which must not depend on unknown sizes, and the first of these inputs."""
Fold = Callable[[OnnxCall, list[Array]], Array]


def fold(call: OnnxCall) -> bool:
    """Compute the operator if all of its inputs are constant. Returns whether it was computed."""
    node = call.node
    if node.kind in ("Shape", "Size"):
        return _shape(call)
    if node.kind not in FOLDS or len(node.outputs) != 1 or not is_constant(call):
        return False
    entries = [call.graph.entry(name) for name in node.inputs if name]
    for entry in entries:
        call.graph.derive(entry)
    arrays = [entry.array for entry in entries if entry.array is not None]
    size = sum(array.nbytes for array in arrays)
    if any(entry.scales for entry in entries):
        return False
    if node.kind not in _VIEWS and size > _MOST:  # bounded by the size of the file
        call.graph.charge(size)
    for entry in entries[_KNOWN_FROM.get(node.kind, len(entries)) :]:
        call.graph.check_known(entry)
    try:
        result = np.asarray(FOLDS[node.kind](call, arrays))
    except ImportFailed:
        raise
    except (ValueError, TypeError, IndexError, OverflowError, MemoryError, ZeroDivisionError) as error:
        raise ImportFailed(f"cannot be computed from these constants: {str(error)[:128]}") from None
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    is_boolean = result.dtype == np.bool_ or (node.kind in _KEEP_TYPE and call.entry(0).type == "BOOL")
    kind = "BOOL" if is_boolean else names[result.dtype]
    if node.kind not in _VIEWS or node.kind == "Cast":
        call.graph.charge(result.nbytes)
    call.define(result.view(np.uint8) if result.dtype == np.bool_ else result, kind)
    return True


def is_constant(call: OnnxCall) -> bool:
    """Return True if the operator has inputs, and all of them are constant."""
    entries = [call.graph.entry(name) for name in call.node.inputs if name]
    return bool(entries) and all(
        entry.array is not None or (entry.source is not None and entry.source.array is not None) for entry in entries
    )


def _shape(call: OnnxCall) -> bool:
    shape = call.shape(0)
    if call.node.kind == "Size":
        call.define(np.array(DERIVED if 0 in shape else math.prod(shape), np.int64), "INT64")
        return True
    kept = shape[slice(call.node.integer("start"), call.node.integer("end", len(shape)))]
    call.define(np.array([d or UNKNOWN for d in kept], np.int64), "INT64")
    return True


def _bounded(count: int, given: int = 0) -> None:
    """Raise `ImportFailed` where a result is large, and larger than what it is computed from."""
    if not 0 <= count <= max(_MOST, given):
        raise ImportFailed(f"{count} elements computed from constants; the limit is {_MOST}")


def _elementwise(compute: Callable[..., Any], inputs: int = 1) -> Fold:
    """Return a numpy function of exactly `inputs` inputs: numpy would take a further one as its output."""

    def apply(call: OnnxCall, arrays: list[Array]) -> Array:
        if len(arrays) != inputs:
            raise ImportFailed(f"{len(arrays)} inputs; expected {inputs}")
        _bounded(math.prod(np.broadcast_shapes(*(a.shape for a in arrays))), max(a.size for a in arrays))
        result = np.asarray(compute(*arrays))
        if result.dtype != np.bool_:
            result = result.astype(np.int64 if any(map(is_open, arrays)) else arrays[0].dtype)
        unknown = [np.isin(a, (UNKNOWN, DERIVED)) & (a.dtype == np.int64) for a in arrays]
        if not any(u.any() for u in unknown):
            return result
        mask = np.broadcast_to(np.any(np.broadcast_arrays(*unknown), axis=0), result.shape)
        if result.dtype == np.int64:
            return np.where(mask, DERIVED, result)
        is_negative = [(a < 0) & ~u for a, u in zip(arrays, unknown, strict=False)]
        if compute is not operator.eq or not np.any(np.broadcast_arrays(*is_negative), axis=0)[mask].all():
            raise call.graph.unsized("it depends on an unknown dimension")
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


def _mod(call: OnnxCall, arrays: list[Array]) -> Array:
    is_truncated = bool(call.node.integer("fmod"))
    if arrays[0].dtype.kind == "f" and not is_truncated:
        raise ImportFailed("a remainder of floats needs fmod=1")
    if arrays[0].dtype.kind != "f" and (arrays[-1] == 0).any():
        raise ImportFailed("a remainder by 0")
    return _elementwise(np.fmod if is_truncated else np.mod, 2)(call, arrays)


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
    names = ("starts", "ends", "axes", "steps")
    given = (call.integers(i) if call.given(i) else node.integers(name) for i, name in enumerate(names, 1))
    starts, ends, axes, steps = (numbers or [] for numbers in given)
    axes, steps = axes or [*range(len(starts))], steps or [1] * len(starts)
    cut = [slice(None)] * data.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        cut[axis_of(axis, data.ndim)] = slice(start, None if end < -(2**62) else end, step)
    return data[tuple(cut)]


def _gather(call: OnnxCall, arrays: list[Array]) -> Array:
    data, axis = arrays[0], axis_of(call.node.integer("axis"), arrays[0].ndim)
    _bounded(arrays[1].size * (data.size // max(data.shape[axis], 1)), data.size)
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
    if is_open(arrays[0]) and kind in INTEGERS:
        return arrays[0]  # in 64 bits: an unknown size does not fit into 32
    call.graph.check_known(call.entry(0))
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
        raise ImportFailed(f"invalid shape {list(shape)[:8]}")
    _bounded(math.prod(shape))
    value = call.node.tensor("value")
    return np.full(shape, np.float32(0) if value is None else value.data.reshape(-1)[0])


def _reduce(compute: Callable[..., Any]) -> Fold:
    def apply(call: OnnxCall, arrays: list[Array]) -> Array:
        axes = _axes(call, arrays)
        if not axes and call.node.integer("noop_with_empty_axes"):
            raise ImportFailed("noop_with_empty_axes is not supported")
        along = tuple(axis_of(a, arrays[0].ndim) for a in axes) if axes else None
        result = np.asarray(compute(arrays[0], axis=along, keepdims=bool(call.node.integer("keepdims", 1))))
        if is_open(arrays[0]):
            result = np.full(result.shape, DERIVED, np.int64)
        return result.astype(arrays[0].dtype)

    return apply


def _where(_: OnnxCall, arrays: list[Array]) -> Array:
    _bounded(math.prod(np.broadcast_shapes(*(a.shape for a in arrays))), max(a.size for a in arrays))
    return np.where(arrays[0] != 0, arrays[1], arrays[2])


def _tile(_: OnnxCall, arrays: list[Array]) -> Array:
    times = [int(v) for v in arrays[1].reshape(-1)]
    if len(times) != arrays[0].ndim or min(times, default=1) < 0:
        raise ImportFailed(f"repeats {times[:8]} for {arrays[0].ndim} dimensions")
    _bounded(arrays[0].size * math.prod(times))
    return np.tile(arrays[0], times)


def _triangle(call: OnnxCall, arrays: list[Array]) -> Array:
    diagonal = int(arrays[1].reshape(-1)[0]) if len(arrays) > 1 else 0
    return (np.triu if call.node.integer("upper", 1) else np.tril)(arrays[0], diagonal)


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
    "Mod": _mod,
    "Mul": _elementwise(operator.mul, 2),
    "Neg": _elementwise(operator.neg),
    "Not": _elementwise(np.logical_not),
    "Or": _elementwise(np.logical_or, 2),
    "Pow": _elementwise(lambda x, y: np.power(x.astype(np.float64), y), 2),
    "Range": _range,
    "Reciprocal": _elementwise(lambda x: 1 / x),
    "ReduceL1": _reduce(lambda x, **more: np.abs(x).sum(**more)),
    "ReduceL2": _reduce(lambda x, **more: np.sqrt(np.square(x).sum(**more))),
    "ReduceMax": _reduce(np.max),
    "ReduceMean": _reduce(np.mean),
    "ReduceMin": _reduce(np.min),
    "ReduceProd": _reduce(np.prod),
    "ReduceSum": _reduce(np.sum),
    "ReduceSumSquare": _reduce(lambda x, **more: np.square(x).sum(**more)),
    "Reshape": _reshape,
    "Sin": _elementwise(np.sin),
    "Slice": _slice,
    "Round": _elementwise(np.rint),
    "Sign": _elementwise(np.sign),
    "Sqrt": _elementwise(np.sqrt),
    "Squeeze": _squeeze,
    "Sub": _elementwise(operator.sub, 2),
    "Tile": _tile,
    "Transpose": lambda call, arrays: arrays[0].transpose(call.node.integers("perm")),
    "Trilu": _triangle,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
