"""Builtin operators that move data, and constant folding of shapes: SHAPE, and the operators that pick from it and join
it for a RESHAPE.

A list computed from known dimensions is a constant. A dimension that is unknown until execution, usually the batch,
is None in such a list; a RESHAPE may have one of them, which becomes its -1.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from driver.errors import ImportFailed
from driver.importers.transposes import MOST_DIMENSIONS, steps
from driver.nn import OperandType
from driver.nn.types import Dimensions

from .call import TfliteCall, axis_of
from .file import integers
from .graph import Ref


def reshape(call: TfliteCall) -> None:
    """RESHAPE to the shape from an input, the options or the result."""
    x, result = call.tensor(0), call.result(0)
    source = call.graph.wide[x.index] if x.index in call.graph.wide else call.input(0)
    sizes = target(call)
    if len(result.shape or ()) > MOST_DIMENSIONS:
        call.graph.keep_wide(result.index, source)
        return
    shape = call.input(1) if sizes is None else np.array(sizes or [1])
    call.move("RESHAPE", source, shape, to=call.output())


def transpose(call: TfliteCall) -> None:
    """TRANSPOSE; several of them for more than four dimensions."""
    x = call.tensor(0)
    if x.index not in call.graph.wide:
        _move(call, "TRANSPOSE")
        return
    shape, order = x.shape or (), call.integers(1)
    if sorted(order) != list(range(len(shape))):
        raise ImportFailed(f"permutation {order[:9]} does not fit {len(shape)} dimensions")
    moved = call.graph.wide[x.index]
    for sizes, turned in steps(shape, order):
        before = call.reshape(moved, sizes)
        moved = call.temporary(before, [sizes[i] for i in turned])
        call.move("TRANSPOSE", before, np.array(turned), to=moved)
    call.graph.keep_wide(call.result(0).index, moved)


def squeeze(call: TfliteCall) -> None:
    """SQUEEZE; without axes, all of size 1."""
    axes = integers(call.options, "SqueezeDims") or [i for i, d in enumerate(call.shape(0)) if d == 1]
    if axes:
        call.move("SQUEEZE", call.input(0), np.array(axes), to=call.output())
    else:
        call.reshape(call.input(0), call.shape(0), call.output())


def expand_dims(call: TfliteCall) -> None:
    """EXPAND_DIMS."""
    if call.tensor(0).type == "BOOL":
        call.move("EXPAND_DIMS", call.input(0), call.integer(1), to=call.output())
    else:
        call.emit("EXPAND_DIMS", call.input(0), call.integer(1))


def _move(call: TfliteCall, kind: str) -> None:
    """Emit an operation on the same inputs that the HAL has for floats and 8-bit integers only."""
    call.move(kind, call.input(0), *map(call.input, range(1, len(call))), to=call.output())


def _move_booleans(call: TfliteCall, kind: str) -> None:
    """Emit an operation on the same inputs that the HAL does not have for booleans."""
    if call.tensor(0).type == "BOOL":
        _move(call, kind)
    else:
        call.emit(kind, *map(call.input, range(len(call))))


def slice_(call: TfliteCall) -> None:
    """SLICE."""
    _move_booleans(call, "SLICE")


def tile(call: TfliteCall) -> None:
    """TILE."""
    _move_booleans(call, "TILE")


def pad(call: TfliteCall) -> None:
    """PAD."""
    _move(call, "PAD")


def mirror_pad(call: TfliteCall) -> None:
    """MIRROR_PAD as a GATHER along each dimension that grows."""
    shape, pads, mode = call.shape(0), call.integers(1), call.options.Mode()
    if len(pads) != 2 * len(shape) or mode not in (0, 1):
        raise ImportFailed(f"pads {pads[:8]} and mode {mode} for {call.tensor(0)}")
    value, target, grown = call.input(0), call.output(), list(shape)
    sides = [(axis, pads[2 * axis], pads[2 * axis + 1]) for axis in range(len(shape))]
    for axis, head, tail in [side for side in sides if any(side[1:])]:
        size = shape[axis]
        if not 0 <= min(head, tail) <= max(head, tail) <= size - (mode == 0):
            raise ImportFailed(f"dimension {axis} of {call.tensor(0)} cannot be mirrored by {head} and {tail} elements")
        indices = np.pad(np.arange(size, dtype=np.int32), (head, tail), mode="symmetric" if mode else "reflect")
        call.graph.source.file.bytes.makes.charge(indices.nbytes)
        grown[axis] += head + tail
        before, value = value, call.temporary(target, grown)
        call.emit("GATHER", before, axis, indices, to=[value])
    call.emit("CAST", value, to=[target])


def concatenation(call: TfliteCall) -> None:
    """CONCATENATION."""
    then = call.following_activation()
    axis = axis_of(call.options.Axis(), call.rank(0))
    _join(call, [*map(call.input, range(len(call)))], axis, call.output(0, then))


def _join(call: TfliteCall, inputs: Sequence[Ref], axis: int, target: Ref) -> None:
    """CONCATENATION. The HAL has none of integers and booleans; those are joined as floats."""
    held = call.graph.operand(inputs[0]).type
    if held == OperandType.TENSOR_BOOL8:
        whole = call.float32_like(target)
        call.emit("CONCATENATION", *map(call.numbers, inputs), axis, to=[whole])
        call.emit("NOT_EQUAL", whole, np.zeros(1, np.float32), to=[target])
    elif held == OperandType.TENSOR_INT32:
        halves = [call.halves(x) for x in inputs]
        high, low = call.float32_like(target), call.float32_like(target)
        call.emit("CONCATENATION", *(half[0] for half in halves), axis, to=[high])
        call.emit("CONCATENATION", *(half[1] for half in halves), axis, to=[low])
        call.join_halves(high, low, target)
    else:
        call.emit("CONCATENATION", *inputs, axis, to=[target])


def pack(call: TfliteCall) -> None:
    """CONCATENATION along the axis, then a RESHAPE that makes it two. A new last axis is added to each input first."""
    shape, rank, inputs = call.tensor(0).shape or (), call.rank(0), [*map(call.input, range(len(call)))]
    axis, target = axis_of(call.options.Axis(), rank + 1), call.output()
    if axis == rank:
        inputs = [call.reshape(x, (*shape, 1)) for x in inputs] if rank else inputs
        _join(call, inputs, axis, target)
        return
    joined = call.temporary(target, (*shape[:axis], shape[axis] * len(call), *shape[axis + 1 :]))
    _join(call, inputs, axis, joined)
    call.reshape(joined, call.result(0).shape or (), target)


def unpack(call: TfliteCall) -> None:
    """SPLIT, then a RESHAPE of each piece."""
    shape = call.tensor(0).shape or ()
    axis, count = axis_of(call.options.Axis(), call.rank(0)), len(call.operator.outputs)
    piece = (*shape[:axis], 1, *shape[axis + 1 :])
    pieces = [call.temporary(call.input(0), piece) for _ in range(count)]
    call.emit("SPLIT", call.input(0), axis, count, to=pieces)
    for i, part in enumerate(pieces):
        call.reshape(part, (*shape[:axis], *shape[axis + 1 :]), call.output(i))


def split(call: TfliteCall) -> None:
    """SPLIT."""
    call.emit("SPLIT", call.input(1), call.integer(0), call.options.NumSplits())


def split_v(call: TfliteCall) -> None:
    """Emit a SLICE for each piece."""
    shape, sizes = call.shape(0), call.integers(1)
    axis = axis_of(call.integer(2), len(shape))
    if len(sizes) != len(call.operator.outputs) or sizes.count(-1) > 1:
        raise ImportFailed(f"sizes {sizes[:8]} do not fit {len(call.operator.outputs)} outputs")
    rest = shape[axis] - sum(size for size in sizes if size != -1)
    start, begin, size = 0, [0] * len(shape), [-1] * len(shape)
    for i, length in enumerate(sizes):
        begin[axis], size[axis] = start, rest if length == -1 else length
        start += size[axis]
        call.emit("SLICE", call.input(0), np.array(begin), np.array(size), to=[call.output(i)])


def strided_slice(call: TfliteCall) -> None:
    """STRIDED_SLICE. The HAL takes a range for every dimension; those that the file omits are kept whole."""
    o = call.options
    if o.EllipsisMask() or o.NewAxisMask() or o.Offset():
        raise ImportFailed("the HAL has no ellipsis, no new axes and no ends relative to the beginning")
    rank, masks = call.rank(0), [o.BeginMask(), o.EndMask(), o.ShrinkAxisMask()]
    missing = rank - math.prod(call.tensor(1).shape or ())
    is_constant = all(call.tensor(i).data is not None for i in (1, 2, 3))
    if missing <= 0 and not (is_constant and masks[2]):
        call.move("STRIDED_SLICE", *map(call.input, range(4)), *masks, to=call.output())
        return
    begin, end, strides = (call.integers(i) + [fill] * missing for i, fill in ((1, 0), (2, 0), (3, 1)))
    whole = sum(1 << i for i in range(rank - missing, rank))
    masks[0], masks[1] = masks[0] | whole, masks[1] | whole
    for axis in (i for i in range(min(rank, len(end))) if masks[2] >> i & 1):
        masks[1] = _end_behind(begin, end, masks, axis)
    places = (np.array(begin), np.array(end), np.array(strides))
    call.move("STRIDED_SLICE", call.input(0), *places, *masks, to=call.output())


def _end_behind(begin: list[int], end: list[int], masks: list[int], axis: int) -> int:
    """Set the end of each shrunk axis behind its one element, whatever the file has; returns the new end mask."""
    start = 0 if masks[0] >> axis & 1 else begin[axis]
    end[axis] = min(start + 1, 2**31 - 1)
    return masks[1] | 1 << axis if start == -1 else masks[1] & ~(1 << axis)


def reverse(call: TfliteCall) -> None:
    """REVERSE_V2 as a STRIDED_SLICE with step -1 along the axes."""
    rank = call.rank(0)
    axes = {axis_of(axis, rank) for axis in call.integers(1)}
    strides = [-1 if i in axes else 1 for i in range(rank)]
    places, everything = np.zeros(rank, np.int32), (1 << rank) - 1
    masks = (everything, everything, 0)
    call.move("STRIDED_SLICE", call.input(0), places, places, np.array(strides), *masks, to=call.output())


def pad_v2(call: TfliteCall) -> None:
    """PAD_V2."""
    fill = call.value(2)
    call.emit("PAD_V2", call.input(0), call.input(1), fill)


def gather(call: TfliteCall) -> None:
    """GATHER; a scalar index becomes a list of one."""
    if call.options.BatchDims():
        raise ImportFailed(f"batch_dims {call.options.BatchDims()} is not supported; the HAL has 0")
    axis = axis_of(call.options.Axis(), call.rank(0))
    if call.tensor(1).shape != ():
        call.emit("GATHER", call.input(0), axis, call.input(1))
        return
    shape = call.tensor(0).shape or ()
    row = call.temporary(call.input(0), (*shape[:axis], 1, *shape[axis + 1 :]))
    call.emit("GATHER", call.input(0), axis, call.input(1), to=[row])
    call.reshape(row, call.result(0).shape or (), call.output())


def batch_to_space(call: TfliteCall) -> None:
    """BATCH_TO_SPACE_ND; crops become a SLICE."""
    crops = call.integers(2)
    if not any(crops):
        call.emit("BATCH_TO_SPACE_ND", call.input(0), call.input(1))
        return
    shape = call.result_shape()
    if len(crops) != 4 or len(shape) != 4:
        raise ImportFailed(
            f"crops {crops[:8]} of a result of dimensions {list(shape)}; expected 2 x 2 crops of 4 dimensions"
        )
    target = call.output()
    whole = call.temporary(target, (shape[0], shape[1] + sum(crops[:2]), shape[2] + sum(crops[2:]), shape[3]))
    call.emit("BATCH_TO_SPACE_ND", call.input(0), call.input(1), to=[whole])
    call.emit("SLICE", whole, np.array([0, crops[0], crops[2], 0]), np.array(shape), to=[target])


def blocks(kind: str) -> Callable[[TfliteCall], None]:
    """DEPTH_TO_SPACE or SPACE_TO_DEPTH."""
    return lambda call: call.emit(kind, call.input(0), call.options.BlockSize())


def fill(call: TfliteCall) -> None:
    """FILL."""
    value = call.value(1)
    call.emit("FILL", call.input(0), value)


Sizes = tuple[int | None, ...]
_MOST = 32
"""Limit for such a list; no shape has more dimensions."""
_FOLDED = ("STRIDED_SLICE", "GATHER", "PACK", "CONCATENATION", "MUL")


def shape(call: TfliteCall) -> None:
    """SHAPE."""
    call.rank(0)
    _keep(call, [d or None for d in call.tensor(0).shape or ()])
    call.graph.origins[call.result(0).index] = call.number(0)


def rank_of(call: TfliteCall) -> None:
    """RANK as a constant; the HAL's RANK returns a scalar, which no other operation takes as a tensor."""
    _keep(call, [call.rank(0)])


def expect(call: TfliteCall) -> None:
    """Give the result its dimensions, where the file leaves them open or the caller changed those of inputs, and its
    rule needs them beforehand. All others follow from the operations.
    """
    rule = _EXPECTED.get(call.operator.name)
    if rule is None or not call.operator.outputs:
        return
    result = call.result(0)
    if result.shape is not None and 0 not in result.shape and not call.graph.is_resized:
        return
    inputs = [call.tensor(i).shape if call.given(i) else () for i in range(len(call))]
    shapes = [shape for shape in inputs if shape is not None and 0 not in shape]
    is_enough = len(shapes) == len(inputs) >= _LEAST.get(call.operator.name, 1)
    if is_enough and (found := rule(call, shapes)) is not None:
        call.graph.source.resize(result.index, found)


def _expected_product(call: TfliteCall, shapes: Sequence[Dimensions]) -> Dimensions | None:
    left, right = (list(shape) for shape in shapes[:2])
    if len(left) < 2 or len(right) < 2:
        return None
    rows, units = left[-1 if call.options.AdjX() else -2], right[-2 if call.options.AdjY() else -1]
    return (*_broadcast(tuple(left[:-2]), tuple(right[:-2])), rows, units)


def _broadcast(*shapes: Dimensions) -> Dimensions:
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ImportFailed(f"inputs of {', '.join(str([*shape]) for shape in shapes)} do not broadcast") from None


def _expected_dense(call: TfliteCall, shapes: Sequence[Dimensions]) -> Dimensions | None:
    if len(shapes[1]) != 2 or not shapes[0]:
        return None
    units, size = shapes[1]
    return (*shapes[0][:-1], units) if call.options.KeepNumDims() else (math.prod(shapes[0]) // size, units)


def _expected_pack(call: TfliteCall, shapes: Sequence[Dimensions]) -> Dimensions:
    axis = axis_of(call.options.Axis(), len(shapes[0]) + 1)
    return (*shapes[0][:axis], len(shapes), *shapes[0][axis:])


def _expected_gather(call: TfliteCall, shapes: Sequence[Dimensions]) -> Dimensions:
    axis = axis_of(call.options.Axis(), len(shapes[0]))
    return (*shapes[0][:axis], *shapes[1], *shapes[0][axis + 1 :])


_EXPECTED: dict[str, Callable[[TfliteCall, Sequence[Dimensions]], Dimensions | None]] = {
    "BATCH_MATMUL": _expected_product,
    "BROADCAST_TO": lambda call, _: tuple(call.integers(1)),
    "CAST": lambda _, shapes: shapes[0],
    "FULLY_CONNECTED": _expected_dense,
    "GATHER": _expected_gather,
    "PACK": _expected_pack,
    "SELECT": lambda _, shapes: _broadcast(*shapes),
    "SELECT_V2": lambda _, shapes: _broadcast(*shapes),
}
_LEAST = {"BATCH_MATMUL": 2, "FULLY_CONNECTED": 2, "GATHER": 2}
"""Inputs that a rule looks at, where they are more than one. A damaged file has fewer, and is refused afterwards."""


def fold(call: TfliteCall) -> bool:
    """Compute an operator on such lists at load time. Returns whether it was computed."""
    name, sizes = call.operator.name, call.graph.sizes
    if name not in _FOLDED or not sizes.keys() & set(call.operator.inputs):
        return False
    lists = [_sizes(call, i) for i in range(1 if name in ("STRIDED_SLICE", "GATHER") else len(call))]
    known = [found for found in lists if found is not None]
    if len(known) < len(lists):
        return False
    origins = {call.graph.origins.get(i) for i in call.operator.inputs if i in sizes}
    if name != "MUL" and len(origins) == 1 and None not in origins:
        call.graph.origins[call.result(0).index] = origins.pop() or 0
    if name == "STRIDED_SLICE":
        _keep(call, _sliced(call, known[0]))
    elif name == "GATHER":
        _keep(call, [_element(known[0], i) for i in call.integers(1)[: _MOST + 1]])
    elif name == "MUL":
        _keep(call, _multiplied(known))
    else:
        _keep(call, [d for found in known for d in found])
    return True


def target(call: TfliteCall) -> list[int] | None:
    """Return the shape argument of a RESHAPE, with -1 for the unknown size; None when the model computes it."""
    found = _sizes(call, 1) if call.given(1) else None
    if found is None:
        is_computed = call.given(1) and not call.tensor(1).is_empty
        return None if is_computed else list(integers(call.options, "NewShape") or call.result_shape())
    found, result = _rest(call, found), call.result(0).shape or ()
    if found.count(None) + found.count(-1) > 1 and len(result) == len(found):
        found = tuple(d if d not in (None, -1) else r or None for d, r in zip(found, result, strict=True))
    sizes = [-1 if d is None else d for d in found]
    if sizes.count(-1) > 1:
        raise call.graph.unsized(f"in {sizes[:_MOST]}, more than one size is open")
    return sizes


def _rest(call: TfliteCall, found: Sizes) -> Sizes:
    """Return the size that -1 stands for when the tensor itself has one unknown dimension."""
    whole = call.tensor(0).shape or ()
    is_own = call.graph.origins.get(call.number(1)) == call.number(0) and whole.count(0) == 1
    if not is_own or (found.count(None), found.count(-1)) != (1, 1):
        return found
    given = math.prod(d for d in found if d not in (None, -1))
    left, over = divmod(math.prod(d for d in whole if d), given) if given > 0 else (0, 1)
    if over:
        raise ImportFailed(f"dimensions {list(whole)} cannot become {list(found)}")
    return tuple(left if d == -1 else d for d in found)


def _sizes(call: TfliteCall, position: int) -> Sizes | None:
    """Input `position` as such a list: a constant, or one computed before; else None."""
    number = call.number(position)
    if number in call.graph.sizes:
        return call.graph.sizes[number]
    info = call.tensor(position)
    if (info.data is not None and info.data.size > _MOST) or info.is_empty:
        return None
    return tuple(call.integers(position)) if info.data is not None and info.type in ("INT32", "INT64") else None


def _keep(call: TfliteCall, found: Sequence[int | None]) -> None:
    """Bind the result to the list; it is a constant too when all sizes are known."""
    if len(found) > _MOST or any(d is not None and not -(2**31) <= d < 2**31 for d in found):
        raise ImportFailed(f"a list of {len(found)} sizes, or one that does not fit into 32 bits")
    call.graph.keep_sizes(call.result(0).index, tuple(found))


def _multiplied(factors: Sequence[Sizes]) -> Sizes:
    count = max(map(len, factors))
    if len(factors) != 2 or any(len(found) not in (1, count) for found in factors):
        raise ImportFailed(f"lists of {[len(found) for found in factors[:_MOST]]} sizes cannot be multiplied")
    a, b = (found * count if len(found) < count else found for found in factors)
    return tuple(None if None in (x, y) else (x or 0) * (y or 0) for x, y in zip(a, b, strict=True))


def _element(found: Sizes, place: int) -> int | None:
    if not -len(found) <= place < len(found):
        raise ImportFailed(f"index {place} is out of range for {len(found)} sizes")
    return found[place]


def _sliced(call: TfliteCall, found: Sizes) -> Sizes:
    (begin,), (end,), (stride,) = (call.integers(i)[:1] or [1] for i in (1, 2, 3))
    if call.options.ShrinkAxisMask() & 1:
        return (_element(found, 0 if call.options.BeginMask() & 1 else begin),)
    if not stride or call.options.NewAxisMask() or call.options.EllipsisMask() or call.options.Offset():
        raise ImportFailed(
            "a slice of sizes has a stride of 0, new axes, an ellipsis, or ends relative to the beginning"
        )
    first = None if call.options.BeginMask() & 1 else begin
    return found[first : None if call.options.EndMask() & 1 else end : stride]
