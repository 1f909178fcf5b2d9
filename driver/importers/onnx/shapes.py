"""Operators that move data, and shape inference at load time.

A value of more than four dimensions is stored without those of size 1; it can be reshaped, transposed and split.
"""

import math
from collections.abc import Sequence

import numpy as np

from driver.errors import ImportFailed
from driver.nn.builder import Value

from .call import OnnxCall, axis_of, broadcast
from .graph import DERIVED, UNKNOWN, Shape

_MOST_RANK = 4
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
    """Dimensions of the operand for a value of `shape` in ONNX."""
    if len(shape) <= _MOST_RANK:
        return shape or (1,)
    fewer = tuple(d for d in shape if d != 1) or (1,)
    if len(fewer) > _MOST_RANK:
        raise ImportFailed(
            f"dimensions {list(shape)}: {call.graph.shape_hint()}, and the HAL takes at most 4 dimensions"
        )
    return fewer


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
    is_same = len(call.graph.symbols) <= 1 and DERIVED not in wanted
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
        call.give(call.emit("SQUEEZE", call.value(0), np.array(dropped, np.int32)), shape=rest)
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
        value = call.emit("EXPAND_DIMS", value, axis)
    call.give(value, shape=result)


def identity(call: OnnxCall) -> None:
    """Identity, Dropout and Cast to the same type: another name for the value."""
    entry = call.entry(0)
    if call.target is not None:
        value, is_image = call.input_in_its_layout()
        call.give(value, shape=entry.shape, is_image=is_image)
    else:
        call.graph.alias(call.node.outputs[0], entry)


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
    elif len(shape) <= _MOST_RANK:
        call.give(call.emit("TRANSPOSE", call.value(0), np.array(order, np.int32)), shape=result)
    else:
        _transpose_many(call, shape, order)


def _transpose_many(call: OnnxCall, shape: Shape, order: Sequence[int]) -> None:
    """For more than four dimensions: drops those of size 1, and joins neighbours that stay neighbours."""
    runs: list[list[int]] = []
    for axis in (i for i in order if shape[i] != 1):
        if runs and axis > runs[-1][-1] and all(shape[i] == 1 for i in range(runs[-1][-1] + 1, axis)):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    by_place = sorted(runs)
    sizes = tuple(math.prod(shape[i] for i in run) for run in by_place)
    if len(sizes) > _MOST_RANK:
        raise ImportFailed(f"transposes {len(sizes)} dimensions; the HAL takes at most 4")
    value = call.graph.reshape(call.graph.plain_squeezed(call.entry(0)), sizes)
    turned = np.array([by_place.index(run) for run in runs], np.int32)
    value = call.emit("TRANSPOSE", value, turned) if runs else value
    give_shaped(call, value, tuple(shape[i] for i in order))


# ---- split and join ------------------------------------------------------------------------------------------------


def concat(call: OnnxCall) -> None:
    """CONCATENATION."""
    values, is_image = call.inputs_in_one_layout()
    rank = len(call.shape(0))
    axis = places(rank, is_image=is_image)[call.axis(0, rank)]
    call.give(call.emit("CONCATENATION", *values, axis), is_image=is_image, rank=rank)


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
    value, is_image = (
        (call.graph.plain_squeezed(call.entry(0)), False) if len(shape) > _MOST_RANK else call.input_in_its_layout()
    )
    place = _place(shape, axis, is_image=is_image)
    if len(set(sizes)) == 1:
        pieces = call.emit("SPLIT", value, place, count, outputs=count)
        pieces = pieces if isinstance(pieces, tuple) else (pieces,)
    else:
        pieces = tuple(_piece(call, value, place, sum(sizes[:i]), size) for i, size in enumerate(sizes))
    for at, (part, size) in enumerate(zip(pieces, sizes, strict=True)):
        result = (*shape[:axis], size, *shape[axis + 1 :])
        if len(shape) > _MOST_RANK:
            give_shaped(call, part, result, at)
        else:
            call.give(part, shape=result, is_image=is_image, at=at)


def _place(shape: Shape, axis: int, *, is_image: bool) -> int:
    """Position of a dimension in the operand."""
    if len(shape) <= _MOST_RANK:
        return places(len(shape), is_image=is_image)[axis]
    if shape[axis] == 1:
        raise ImportFailed(f"dimension {axis} of {list(shape)} has size 1, and the HAL takes at most 4 dimensions")
    return sum(d != 1 for d in shape[:axis])


def _piece(call: OnnxCall, value: Value, place: int, start: int, size: int) -> Value:
    rank = len(value.operand.dimensions)
    begin, sizes = np.zeros(rank, np.int32), np.full(rank, -1, np.int32)
    begin[place], sizes[place] = start, size
    return call.graph.cast(call.emit("SLICE", value, begin, sizes))


def slice_(call: OnnxCall) -> None:
    """SLICE; STRIDED_SLICE with steps."""
    shape = call.shape(0)
    starts, ends = call.attribute_or_input("starts", 1) or [], call.attribute_or_input("ends", 2) or []
    axes = call.attribute_or_input("axes", 3) or list(range(len(starts)))
    steps = call.attribute_or_input("steps", 4) or [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise ImportFailed("starts, ends, axes and steps differ in length")
    value, is_image = call.input_in_its_layout()
    rank = len(value.operand.dimensions)
    begin, stop, step = np.zeros(rank, np.int32), np.full(rank, _LAST, np.int64), np.ones(rank, np.int32)
    for axis, start, end, stride in zip(axes, starts, ends, steps, strict=True):
        place = places(len(shape), is_image=is_image)[axis_of(axis, len(shape))]
        size = shape[axis_of(axis, len(shape))]
        begin[place], stop[place], step[place] = _range(call, size, start, end, stride)
    if (step == 1).all():
        sizes = np.where(stop == _LAST, -1, stop - begin).astype(np.int32)
        result = call.emit("SLICE", value, begin, sizes)
    else:
        masks = sum(1 << i for i in range(rank) if stop[i] in (_LAST, -1))
        ends_ = np.where((stop == _LAST) | (stop == -1), 0, stop).astype(np.int32)
        result = call.emit("STRIDED_SLICE", value, begin, ends_, step, 0, masks, 0)
    call.give(result, is_image=is_image, rank=len(shape))


def _range(call: OnnxCall, size: int, start: int, end: int, step: int) -> tuple[int, int, int]:
    """First element, end (-1: before the first element), and step."""
    if not size:
        if start < 0 or end < _LAST or step != 1 or start > _LAST:
            raise ImportFailed(f"{start}:{end}:{step} of a dimension of unknown size; {call.graph.shape_hint()}")
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
        array = np.asarray(indices.array, np.int64)
        if array.size == 1 and len(shape) > _MOST_RANK:
            _pick(call, shape, axis, int(array.reshape(-1)[0]))
            return
        array = np.where(array < 0, array + shape[axis], array)
        if not array.size or array.min() < 0 or array.max() > _LAST:
            raise ImportFailed(f"indices {indices} are out of range for {shape[axis]} elements")
        rows: object = np.atleast_1d(array).astype(np.int32)
    else:
        rows = call.value(1)
    result = (*shape[:axis], *indices.shape, *shape[axis + 1 :])
    found = call.graph.cast(call.emit("GATHER", call.value(0), axis, rows))
    if indices.shape:
        call.give(found, shape=result)
    else:
        give_shaped(call, found, result)


def _pick(call: OnnxCall, shape: Shape, axis: int, index: int) -> None:
    """One element along a dimension of a value with more than four dimensions."""
    if shape[axis] == 0 or not -shape[axis] <= index < shape[axis]:
        raise ImportFailed(f"index {index} is out of range for {shape[axis]} elements")
    value = call.graph.plain_squeezed(call.entry(0))
    if shape[axis] != 1:
        value = _piece(call, value, _place(shape, axis, is_image=False), index % shape[axis], 1)
    kept = (1,) * len(call.entry(1).shape)
    give_shaped(call, value, (*shape[:axis], *kept, *shape[axis + 1 :]))


# ---- repeat and pad -------------------------------------------------------------------------------------------------


def spread(call: OnnxCall, value: Value, shape: Shape, wanted: Shape) -> Value:
    """Repeat `value` from `shape` to the dimensions `wanted`."""
    if shape == wanted:
        return value
    padded = (1,) * (len(wanted) - len(shape)) + shape
    if any(w == 0 and p == 1 for p, w in zip(padded, wanted, strict=True)):
        raise ImportFailed(f"it repeats {list(shape)} to {list(wanted)}; {call.graph.shape_hint()}")
    value = call.graph.reshape(value, padded) if len(padded) != len(shape) else value
    times = [w if p == 1 else 1 for p, w in zip(padded, wanted, strict=True)]
    if all(t == 1 for t in times):
        return value
    return call.graph.cast(call.emit("TILE", value, np.array(times, np.int32)))


def expand(call: OnnxCall) -> None:
    """TILE along the dimensions of size 1."""
    shape = call.shape(0)
    asked = tuple(0 if d in (UNKNOWN, DERIVED) else d for d in call.integers(1))
    wanted = broadcast(shape, asked)
    if any(not 0 <= d < 2**31 for d in asked) or len(wanted) > _MOST_RANK:
        raise ImportFailed(f"invalid shape {list(asked)[:8]}")
    call.give(spread(call, call.value(0), shape, wanted), shape=wanted)


def tile(call: OnnxCall) -> None:
    """TILE."""
    repeats = call.integers(1)
    if any(not 0 < r < 2**31 for r in repeats):
        raise ImportFailed(f"repeats {repeats[:8]} must be positive")
    call.give(call.emit("TILE", call.value(0), np.array(repeats, np.int32)))


def pad(call: OnnxCall) -> None:
    """PAD or PAD_V2; reflect, edge and wrap become a GATHER along each dimension."""
    shape, pads = call.shape(0), call.attribute_or_input("pads", 1) or []
    axes = call.integers(3) if call.given(3) else list(range(len(shape)))
    if len(pads) != 2 * len(axes) or any(not 0 <= p < 2**31 for p in pads):
        raise ImportFailed(f"pads {pads[:8]} for {len(axes)} dimensions must be 0 or more for each side")
    value, is_image = call.input_in_its_layout()
    where, table = places(len(shape), is_image=is_image), np.zeros((len(value.operand.dimensions), 2), np.int32)
    for i, axis in enumerate(axes):
        table[where[axis_of(axis, len(shape))]] = pads[i], pads[len(axes) + i]
    mode = call.node.text("mode", "constant")
    if mode == "constant":
        fill = call.number(2) if call.given(2) else call.node.real("value")
        result = call.emit("PAD", value, table) if fill == 0 else call.emit("PAD_V2", value, table, fill)
    else:
        result = _mirrored(call, value, table.tolist(), mode)
    call.give(result, is_image=is_image, rank=len(shape))


def _mirrored(call: OnnxCall, value: Value, table: list[list[int]], mode: str) -> Value:
    modes = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}
    for place, (head, tail) in enumerate(table):
        size = value.operand.dimensions[place]
        if not head and not tail:
            continue
        if mode not in modes or not size or max(head, tail) > 1 << 16 or (mode == "reflect" and size < 2):
            raise ImportFailed(f"mode {mode!r} is not supported for {size} elements")
        call.graph.charge(4 * size)
        indices = np.pad(np.arange(size, dtype=np.int32), (head, tail), mode=modes[mode])  # type: ignore[call-overload]
        value = call.graph.cast(call.emit("GATHER", value, place, indices))
    return value
