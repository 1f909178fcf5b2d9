"""Operators that move data, and shape inference at load time.

A value of more than four dimensions is stored in fewer, its elements in the same order: without dimensions of size 1,
or with some joined. An operator along one of its axes joins those before the axis, and those behind it.
"""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from driver.errors import ImportFailed
from driver.formats.file_bytes import Array
from driver.importers.transposes import MOST_DIMENSIONS, steps
from driver.nn import OperandType
from driver.nn.builder import Value

from .call import OnnxCall, axis_of, broadcast, fewer_dimensions
from .graph import DERIVED, UNKNOWN, Shape

_LAST = 2**31 - 1
IMAGE_AXES: dict[int, Shape] = {3: (0, 3, 2), 4: (0, 3, 1, 2)}
"""Position of each ONNX dimension in a channels-last image."""


def places(rank: int, *, is_image: bool) -> Shape:
    """Position of each dimension in the operand."""
    return IMAGE_AXES[rank] if is_image else tuple(range(rank))


def give_shaped(call: OnnxCall, value: Value, shape: Shape, at: int = 0) -> None:
    """Bind the result to `value` in another shape."""
    call.give(call.graph.reshape(value, stored(call, shape)), shape=shape, at=at)


def stored(call: OnnxCall, shape: Shape) -> Shape:
    """Return the dimensions of the operand for a value of `shape` in ONNX: without those of size 1, and the first ones
    joined, where there are more than four.
    """
    if len(shape) <= MOST_DIMENSIONS:
        return shape or (1,)
    fewer = tuple(d for d in shape if d != 1) or (1,)
    if len(fewer) <= MOST_DIMENSIONS:
        return fewer
    first, last = fewer[: 1 - MOST_DIMENSIONS], fewer[1 - MOST_DIMENSIONS :]
    if 0 in first:
        raise call.graph.unsized(f"its result has dimensions {list(shape)}; the HAL takes at most {MOST_DIMENSIONS}")
    return (math.prod(first), *last)


def collapsed(call: OnnxCall, position: int, axis: int, count: int = 1) -> Value:
    """Input `position` as three dimensions: those before `axis`, the `count` from it on, and those behind."""
    shape = call.known(position)
    parts = (shape[:axis], shape[axis : axis + count], shape[axis + count :])
    return call.graph.reshape(call.graph.plain_squeezed(call.entry(position)), map(math.prod, parts))


# ---- reshape -------------------------------------------------------------------------------------------------------


def reshape(call: OnnxCall) -> None:
    """RESHAPE; all but one dimension of the new shape must be known."""
    wanted = call.integers(1) if call.given(1) else call.node.integers("shape") or []
    source = call.shape(0)
    sizes = [
        source[i]
        if d == 0 and i < len(source) and not call.node.integer("allowzero")
        else 0
        if d in (UNKNOWN, DERIVED)
        else d
        for i, d in enumerate(wanted)
    ]
    if sizes.count(-1) > 1 or any(not -1 <= d < 2**31 for d in sizes):
        raise ImportFailed(f"invalid shape {wanted[:8]}")
    is_same = len(call.graph.shared.symbols) <= 1 and DERIVED not in wanted
    give_shaped(call, call.graph.plain_squeezed(call.entry(0)), _resolved(source, sizes, is_same=is_same))


def _resolved(source: Shape, sizes: list[int], *, is_same: bool) -> Shape:
    """`sizes` with -1 resolved from the other sizes; unknown (0) where that is impossible.

    is_same: an unknown size in `source` and one in `sizes` are the same size.
    """
    if -1 not in sizes:
        return tuple(sizes)
    others = math.prod(d for d in sizes if d > 0)
    whole = math.prod(d for d in source if d)
    is_clear = source.count(0) == sizes.count(0) <= is_same and whole % others == 0
    return tuple((whole // others if is_clear else 0) if d == -1 else d for d in sizes)


def flatten(call: OnnxCall) -> None:
    """RESHAPE to two dimensions."""
    shape = call.shape(0)
    axis = call.node.integer("axis", 1)
    axis = len(shape) if axis == len(shape) else axis_of(axis, len(shape))
    give_shaped(call, call.graph.plain_squeezed(call.entry(0)), (math.prod(shape[:axis]), math.prod(shape[axis:])))


def squeeze(call: OnnxCall) -> None:
    """RESHAPE, or SQUEEZE where more than one dimension is unknown."""
    shape, axes = call.shape(0), call.attribute_or_input("axes", 1)
    dropped = [i for i, d in enumerate(shape) if d == 1] if axes is None else [axis_of(a, len(shape)) for a in axes]
    rest = tuple(d for i, d in enumerate(shape) if i not in dropped)
    if rest.count(0) > 1 and dropped:
        along = np.array(dropped, np.int32)
        value = call.graph.moved(call.value(0), lambda v: call.graph.cast(call.emit("SQUEEZE", v, along)))
        call.give(value, shape=rest)
    else:
        give_shaped(call, call.graph.plain_squeezed(call.entry(0)), rest)


def unsqueeze(call: OnnxCall) -> None:
    """RESHAPE, or EXPAND_DIMS where more than one dimension is unknown."""
    shape, axes = call.shape(0), call.attribute_or_input("axes", 1) or []
    rank = len(shape) + len(axes)
    wanted = sorted(axis_of(a, rank) for a in axes)
    rest = iter(shape)
    if len(set(wanted)) != len(axes):
        raise ImportFailed(f"axes {axes[:8]} name a dimension twice")
    result = tuple(1 if i in wanted else next(rest) for i in range(rank))
    if shape.count(0) <= 1:
        give_shaped(call, call.graph.plain_squeezed(call.entry(0)), result)
        return
    value = call.value(0)
    for axis in wanted:
        value = call.graph.moved(value, partial(_with_axis, call, axis), integers=True)
    call.give(value, shape=result)


def _with_axis(call: OnnxCall, axis: int, value: Value) -> Value:
    return call.graph.cast(call.emit("EXPAND_DIMS", value, axis))


def identity(call: OnnxCall) -> None:
    """Identity, and Cast to the same type: another name for the value."""
    entry = call.entry(0)
    if call.target is not None:
        value, is_image = call.input_in_its_layout()
        call.give(value, shape=entry.shape, is_image=is_image)
    else:
        call.graph.alias(call.node.outputs[0], entry)


def dropout(call: OnnxCall) -> None:
    """Dropout, which does nothing outside of training."""
    if call.given(2) and (call.entry(2).array is None or call.constant(2).any()):
        raise ImportFailed(f"training_mode {call.entry(2)} must be a constant false: the HAL has no training")
    identity(call)


# ---- transpose ------------------------------------------------------------------------------------------------------


def transpose(call: OnnxCall) -> None:
    """TRANSPOSE; omitted where the value already exists in that layout."""
    entry, shape = call.entry(0), call.shape(0)
    order = call.node.integers("perm") or list(range(len(shape)))[::-1]
    if sorted(order) != list(range(len(shape))):
        raise ImportFailed(f"perm {order[:8]} does not fit {len(shape)} dimensions")
    result = tuple(shape[i] for i in order)
    if order == [0, 2, 3, 1] and call.graph.is_image(entry):
        call.give(call.graph.image(entry), shape=result)
    elif order == [0, 3, 1, 2] and not call.graph.is_image(entry):
        call.give(call.graph.plain(entry), shape=result, is_image=True)
    elif len(shape) <= MOST_DIMENSIONS:
        call.give(call.graph.transpose(call.value(0), order), shape=result)
    else:
        _transpose_many(call, shape, order)


def _transpose_many(call: OnnxCall, shape: Shape, order: Sequence[int]) -> None:
    """More than four dimensions."""
    value = call.graph.plain_squeezed(call.entry(0))
    for sizes, turned in steps(shape, order):
        value = call.graph.transpose(call.graph.reshape(value, sizes), turned)
    give_shaped(call, value, tuple(shape[i] for i in order))


# ---- split and join ------------------------------------------------------------------------------------------------


def concat(call: OnnxCall) -> None:
    """CONCATENATION."""
    rank = len(call.shape(0))
    axis = call.axis(0, rank)
    if rank > MOST_DIMENSIONS:
        parts = [collapsed(call, i, axis) for i in range(len(call))]
        size = sum(call.shape(i, rank)[axis] for i in range(len(call)))
        whole = call.graph.joined(parts, 1)
        give_shaped(call, whole, (*call.shape(0)[:axis], size, *call.shape(0)[axis + 1 :]))
        return
    values, is_image = call.inputs_in_one_layout()
    place = places(rank, is_image=is_image)[axis]
    if values[0].operand.type in (OperandType.TENSOR_INT32, OperandType.TENSOR_BOOL8):
        call.give(call.graph.joined(values, place), is_image=is_image, rank=rank)
    else:
        call.give(call.emit("CONCATENATION", *values, place), is_image=is_image, rank=rank)


def split(call: OnnxCall) -> None:
    """SPLIT into equal pieces, or a SLICE for each."""
    shape, count = call.shape(0), len(call.node.outputs)
    axis, sizes = call.axis(0, len(shape)), call.attribute_or_input("split", 1)
    length = shape[axis]
    if sizes is None and count:
        piece = -(-length // count)
        sizes = [piece] * (count - 1) + [length - piece * (count - 1)]
    if not sizes or not length or len(sizes) != count or sum(sizes) != length or min(sizes) < 1:
        raise ImportFailed(f"sizes {(sizes or [])[:8]} do not split {length} elements into {count} results")
    is_wide = len(shape) > MOST_DIMENSIONS
    value, is_image = (collapsed(call, 0, axis), False) if is_wide else call.input_in_its_layout()
    place = 1 if is_wide else places(len(shape), is_image=is_image)[axis]
    if len(set(sizes)) == 1:
        pieces = call.emit("SPLIT", value, place, count, outputs=count)
        pieces = pieces if isinstance(pieces, tuple) else (pieces,)
    else:
        pieces = tuple(_piece(call, value, place, sum(sizes[:i]), size=size) for i, size in enumerate(sizes))
    for at, (part, size) in enumerate(zip(pieces, sizes, strict=True)):
        result = (*shape[:axis], size, *shape[axis + 1 :])
        if is_wide:
            give_shaped(call, part, result, at)
        else:
            call.give(part, shape=result, is_image=is_image, at=at)


def _piece(call: OnnxCall, value: Value, place: int, start: int, size: int) -> Value:
    rank = len(value.operand.dimensions)
    begin, sizes = np.zeros(rank, np.int32), np.full(rank, -1, np.int32)
    begin[place], sizes[place] = start, size
    return call.graph.moved(value, lambda v: call.graph.cast(call.emit("SLICE", v, begin, sizes)), integers=True)


def slice_(call: OnnxCall) -> None:
    """SLICE; STRIDED_SLICE with steps."""
    shape = call.shape(0)
    starts, ends = call.attribute_or_input("starts", 1) or [], call.attribute_or_input("ends", 2) or []
    axes = call.attribute_or_input("axes", 3) or list(range(len(starts)))
    steps = call.attribute_or_input("steps", 4) or [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise ImportFailed("starts, ends, axes and steps differ in length")
    if len(shape) > MOST_DIMENSIONS:
        _slice_many(call, axes, starts, ends, steps=steps)
        return
    value, is_image = call.input_in_its_layout()
    rank = len(value.operand.dimensions)
    begin, stop, step = np.zeros(rank, np.int32), np.full(rank, _LAST, np.int64), np.ones(rank, np.int32)
    for axis, start, end, stride in zip(axes, starts, ends, steps, strict=True):
        place = places(len(shape), is_image=is_image)[axis_of(axis, len(shape))]
        size = shape[axis_of(axis, len(shape))]
        begin[place], stop[place], step[place] = _range(call, size, start, end, step=stride)
    if (step == 1).all():
        sizes = np.where(stop == _LAST, -1, stop - begin).astype(np.int32)
        result = call.graph.moved(value, lambda v: call.graph.cast(call.emit("SLICE", v, begin, sizes)), integers=True)
    else:
        masks = sum(1 << i for i in range(rank) if stop[i] in (_LAST, -1))
        ends_ = np.where((stop == _LAST) | (stop == -1), 0, stop).astype(np.int32)
        result = call.graph.moved(
            value, lambda v: call.graph.cast(call.emit("STRIDED_SLICE", v, begin, ends_, step, 0, masks, 0))
        )
    call.give(result, is_image=is_image, rank=len(shape))


def _slice_many(call: OnnxCall, axes: list[int], starts: list[int], ends: list[int], steps: list[int]) -> None:
    """Slice more than four dimensions one after the other: a GATHER with the others joined before and behind it."""
    shape, value = list(call.known(0)), call.graph.plain_squeezed(call.entry(0))
    for axis, start, end, stride in zip((axis_of(a, len(shape)) for a in axes), starts, ends, steps, strict=True):
        first, stop, step = _range(call, shape[axis], start, end, step=stride)
        indices = np.arange(shape[axis], dtype=np.int32)[
            first : None if stop == _LAST or (step < 0 and stop < 0) else stop : step
        ]
        flat = call.graph.reshape(value, (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])))
        is_piece = step == 1
        value = _piece(call, flat, 1, first, size=len(indices)) if is_piece else picked(call, flat, 1, indices)
        shape[axis] = len(indices)
    give_shaped(call, value, tuple(shape))


def _range(call: OnnxCall, size: int, start: int, end: int, step: int) -> tuple[int, int, int]:
    """First element, end (-1: before the first element), and step."""
    if not size:
        if start < 0 or end < _LAST or step != 1 or start > _LAST:
            raise call.graph.unsized(f"{start}:{end}:{step} of a dimension of unknown size")
        return start, _LAST, 1
    if not 0 < abs(step) <= _LAST:
        raise ImportFailed(f"step {step} is out of range")
    found = range(size)[slice(start, end if end > -(2**62) else None, step)]
    if not found:
        raise ImportFailed(f"{start}:{end}:{step} of {size} elements is empty, which the HAL does not support")
    stop = found[-1] + (1 if step > 0 else -1)
    return found.start, stop if step != 1 or stop < size else _LAST, step


def gather(call: OnnxCall) -> None:
    """GATHER; constant indices are made non-negative, and a scalar index becomes a list of one."""
    shape, indices = call.shape(0), call.entry(1)
    axis = call.axis(0, len(shape))
    if indices.array is not None:
        call.graph.check_known(indices)
        array = np.asarray(indices.array, np.int64)
        if not shape[axis] and (array < 0).any():
            raise call.graph.unsized(f"indices {indices} count from the end of a dimension of unknown size")
        array = np.where(array < 0, array + shape[axis], array)
        if not array.size or array.min() < 0 or array.max() > _LAST:
            raise ImportFailed(f"indices {indices} are out of range for {shape[axis]} elements")
        rows: object = np.atleast_1d(array).astype(np.int32)
    else:
        rows = call.value(1)
    result = (*shape[:axis], *indices.shape, *shape[axis + 1 :])
    if len(shape) > MOST_DIMENSIONS:
        give_shaped(call, picked(call, collapsed(call, 0, axis), 1, rows), result)
        return
    found = picked(call, call.value(0), axis, rows)
    if indices.shape and len(result) <= MOST_DIMENSIONS:
        call.give(found, shape=result)
    else:
        give_shaped(call, found, result)


def picked(call: OnnxCall, value: Value, axis: int, rows: object) -> Value:
    """Add a GATHER."""
    return call.graph.moved(value, lambda v: call.graph.cast(call.emit("GATHER", v, axis, rows)), integers=True)


# ---- repeat and pad -------------------------------------------------------------------------------------------------


def spread(call: OnnxCall, value: Value, shape: Shape, wanted: Shape) -> Value:
    """Repeat `value` from `shape` to the dimensions `wanted`."""
    if shape == wanted:
        return value
    padded = (1,) * (len(wanted) - len(shape)) + shape
    if any(p != w and 0 in (p, w) for p, w in zip(padded, wanted, strict=True)):  # an open size may be 1
        raise call.graph.unsized(f"it repeats {list(shape)} to {list(wanted)}")
    if len(wanted) > MOST_DIMENSIONS:
        before, after = fewer_dimensions(call.graph, [padded, wanted])
        return spread(call, call.graph.reshape(value, before), tuple(before), tuple(after))
    value = call.graph.reshape(value, padded) if len(padded) != len(shape) else value
    times = [w if p == 1 else 1 for p, w in zip(padded, wanted, strict=True)]
    if all(t == 1 for t in times):
        return value
    return _repeated(call, value, times)


def _repeated(call: OnnxCall, value: Value, times: Sequence[int]) -> Value:
    factors = np.array(times, np.int32)
    return call.graph.moved(value, lambda v: call.graph.cast(call.emit("TILE", v, factors)), integers=True)


def expand(call: OnnxCall) -> None:
    """TILE along the dimensions of size 1."""
    shape = call.shape(0)
    asked = tuple(0 if d in (UNKNOWN, DERIVED) else d for d in call.integers(1))
    wanted = broadcast(shape, asked)
    if any(not 0 <= d < 2**31 for d in asked):
        raise ImportFailed(f"invalid shape {list(asked)[:8]}")
    value = call.graph.plain_squeezed(call.entry(0)) if len(wanted) > MOST_DIMENSIONS else call.value(0)
    call.give(spread(call, value, shape, wanted), shape=wanted)


def tile(call: OnnxCall) -> None:
    """TILE."""
    repeats = call.integers(1)
    if any(not 0 < r < 2**31 for r in repeats):
        raise ImportFailed(f"repeats {repeats[:8]} must be positive")
    call.give(_repeated(call, call.value(0), repeats))


def pad(call: OnnxCall) -> None:
    """PAD or PAD_V2; reflect, edge and wrap become a GATHER along each dimension."""
    shape, pads = call.shape(0), call.attribute_or_input("pads", 1) or []
    axes = call.integers(3) if call.given(3) else list(range(len(shape)))
    if len(pads) != 2 * len(axes) or any(not 0 <= p < 2**31 for p in pads):
        raise ImportFailed(f"pads {pads[:8]} for {len(axes)} dimensions must be 0 or more for each side")
    if len(shape) > MOST_DIMENSIONS:
        raise ImportFailed(f"input 0, {call.entry(0)}: the HAL pads at most {MOST_DIMENSIONS} dimensions")
    value, is_image = call.input_in_its_layout()
    where, table = places(len(shape), is_image=is_image), np.zeros((len(value.operand.dimensions), 2), np.int32)
    for i, axis in enumerate(axes):
        table[where[axis_of(axis, len(shape))]] = pads[i], pads[len(axes) + i]
    mode = call.node.text("mode", "constant")
    if mode == "constant":
        fill = call.number(2) if call.given(2) else call.node.real("value")
        result = _filled(call, value, table, fill)
    else:
        result = _mirrored(call, value, table.tolist(), mode)
    call.give(result, is_image=is_image, rank=len(shape))


def _filled(call: OnnxCall, value: Value, table: Array, fill: float) -> Value:
    """PAD; PAD_V2 where the new elements are not 0. Integers and booleans are padded as floats."""
    if fill == 0:
        return call.graph.moved(value, lambda v: call.graph.cast(call.emit("PAD", v, table)))
    return call.graph.cast(call.emit("PAD_V2", value, table, fill))


def _mirrored(call: OnnxCall, value: Value, table: list[list[int]], mode: str) -> Value:
    modes = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}
    for place, (head, tail) in enumerate(table):
        size = value.operand.dimensions[place]
        if not head and not tail:
            continue
        if not size:
            raise call.graph.unsized(f"mode {mode!r} of a dimension of unknown size")
        if mode not in modes or max(head, tail) > 1 << 16 or (mode == "reflect" and size < 2):
            raise ImportFailed(f"mode {mode!r} is not supported for {size} elements")
        call.graph.charge(4 * size)
        indices = np.pad(np.arange(size, dtype=np.int32), (head, tail), mode=modes[mode])  # type: ignore[call-overload]
        value = picked(call, value, place, indices)
    return value
