"""Operations that rearrange whole axes (TRANSPOSE, CONCATENATION, SPLIT, TILE, CHANNEL_SHUFFLE), and those about
dimensions, which leave the elements in order (RESHAPE, SQUEEZE, EXPAND_DIMS, RANK, FILL).

Axes are only ever split, never merged, so that every reshaped array is a view, whatever the strides. Where elements
stay in order, the *output* is viewed in the shape of the input: outputs are contiguous, so that such a view exists.
"""

import math
from collections.abc import Sequence

import numpy as np

from ..model import Operand
from ..operation import ANY_RANK, LETTERS, Array, Call, OperationType, Signature, same_as_input
from ..types import Dimensions
from .axes import all_axes, one_axis
from .real import look_up, requantise_table


def _permutation(call: Call) -> list[int]:
    rank = len(call.shape(0))
    order = call.values(1) if call.given(1) else list(range(rank))[::-1]
    if sorted(order) != list(range(rank)):
        raise ValueError(f"permutation {order[:9]} has to name each of {rank} axes once")
    return order


def _transpose_shape(call: Call) -> tuple[Dimensions]:
    return (tuple(call.shape(0)[i] for i in _permutation(call)),)


def _transpose(call: Call) -> None:
    call.step(np.copyto, call.outputs[0].data, call.array(0).transpose(_permutation(call)))


def part(array: Array, axis: int, start: int, size: int) -> Array:
    """Return the view of `size` entries of one axis."""
    return array[(slice(None),) * axis + (slice(start, start + size),)]


def _concatenation_shape(call: Call) -> tuple[Dimensions]:
    tensors, axis = range(len(call.inputs) - 1), call.integer(len(call.inputs) - 1)
    first = call.shape(0)
    if not 0 <= axis < len(first):
        raise ValueError(f"axis {axis} has to be in 0..{len(first) - 1}")
    for i in tensors:
        shape = call.shape(i)
        if len(shape) != len(first) or any(
            a != b for k, (a, b) in enumerate(zip(shape, first, strict=True)) if k != axis
        ):
            raise ValueError(f"input {i} of dimensions {list(shape)} differs from {list(first)} off axis {axis}")
    return ((*first[:axis], sum(call.shape(i)[axis] for i in tensors), *first[axis + 1 :]),)


def _concatenation(call: Call) -> None:
    out, axis, position = call.outputs[0], call.integer(len(call.inputs) - 1), 0
    for i in range(len(call.inputs) - 1):
        source = call.tensor(i)
        target = part(out.data, axis, position, source.shape[axis])
        position += source.shape[axis]
        if (source.scale, source.zero_point) == (out.scale, out.zero_point):
            call.step(np.copyto, target, source.data)
        elif target.size:
            look_up(call, source, requantise_table(source, out), target)


def _concatenation_gate(inputs: Sequence[Operand], outputs: Sequence[Operand]) -> int:
    """Return the HAL version: before 1.2 concatenation did not requantise."""
    out = outputs[0]
    return 2 if any((o.scale, o.zero_point) != (out.scale, out.zero_point) for o in inputs[:-1]) else 0


def _split_shape(call: Call) -> tuple[Dimensions, ...]:
    shape, count, outputs = call.shape(0), call.integer(2), len(call.outputs)
    axis = one_axis(call.integer(1), len(shape))
    if count != outputs:
        raise ValueError(f"the number of pieces {count} has to be that of the outputs, {outputs}")
    if shape[axis] % count:
        raise ValueError(f"axis {axis} of {list(shape)} does not split into {count} equal pieces")
    return ((*shape[:axis], shape[axis] // count, *shape[axis + 1 :]),) * count


def _split(call: Call) -> None:
    source, axis = call.array(0), one_axis(call.integer(1), len(call.shape(0)))
    size = call.outputs[0].shape[axis]
    for i, out in enumerate(call.outputs):
        call.step(np.copyto, out.data, part(source, axis, i * size, size))


def _tiled_shape(call: Call) -> tuple[Dimensions]:
    shape, multiples = call.shape(0), call.values(1)
    if len(multiples) != len(shape) or min(multiples) < 1:
        raise ValueError(f"multiples {multiples[:9]} have to be {len(shape)} numbers above 0")
    return (tuple(d * m for d, m in zip(shape, multiples, strict=True)),)


def _tile(call: Call) -> None:
    source, multiples = call.array(0), call.values(1)
    split = [n for pair in zip(multiples, source.shape, strict=True) for n in pair]
    once = [n for size in source.shape for n in (1, size)]
    call.step(np.copyto, call.outputs[0].data.reshape(split), source.reshape(once))


def _shuffled_shape(call: Call) -> tuple[Dimensions]:
    shape, groups = call.shape(0), call.integer(1)
    axis = one_axis(call.integer(2), len(shape))
    if groups < 1 or shape[axis] % groups:
        raise ValueError(f"{groups} groups do not divide axis {axis} of {list(shape)}")
    return (shape,)


def _shuffle(call: Call) -> None:
    shape, groups = call.shape(0), call.integer(1)
    axis = one_axis(call.integer(2), len(shape))
    before, after, each = shape[:axis], shape[axis + 1 :], shape[axis] // groups
    shuffled = call.outputs[0].data.reshape(*before, each, groups, *after).swapaxes(axis, axis + 1)
    call.step(np.copyto, shuffled, call.array(0).reshape(*before, groups, each, *after))


MAX_RANK = 4


def _copy(call: Call) -> None:
    source = call.array(0)
    call.step(np.copyto, call.outputs[0].data.reshape(source.shape), source)


def _reshape_shape(call: Call) -> tuple[Dimensions]:
    size, target = math.prod(call.shape(0)), call.values(1)
    if not 1 <= len(target) <= MAX_RANK or target.count(-1) > 1 or any(d < -1 for d in target):
        raise ValueError(f"target {target[:9]} has to have 1..{MAX_RANK} dimensions, at most one of them -1")
    known = math.prod(d for d in target if d != -1)
    if -1 in target:
        if known == 0 or size % known:
            raise ValueError(f"{size} elements do not divide into {target}")
        target = [size // known if d == -1 else d for d in target]
    elif known != size:
        raise ValueError(f"{size} elements do not fit into {target}")
    return (tuple(target),)


def _squeeze_shape(call: Call) -> tuple[Dimensions]:
    shape = call.shape(0)
    listed = call.values(1) if call.given(1) else [i for i, d in enumerate(shape) if d == 1]
    axes = all_axes(listed, len(shape))
    if any(shape[i] != 1 for i in axes):
        raise ValueError(f"axes {list(axes)} of {list(shape)} have to be of size 1")
    return (tuple(d for i, d in enumerate(shape) if i not in axes) or (1,),)


def one_list(inputs: Sequence[Operand], _outputs: Sequence[Operand]) -> str | None:
    """Return what is wrong with an input 1 that may be omitted: even then it is declared as a list."""
    dimensions = inputs[1].dimensions
    return f"input 1 is declared {list(dimensions)}; it has to be 1-D" if len(dimensions) > 1 else None


def _expanded_shape(call: Call) -> tuple[Dimensions]:
    shape = call.shape(0)
    axis = one_axis(call.integer(1), len(shape) + 1)
    return ((*shape[:axis], 1, *shape[axis:]),)


def _scalar_shape(_call: Call) -> tuple[Dimensions]:
    return ((),)


def _rank(call: Call) -> None:
    call.step(np.copyto, call.outputs[0].data, len(call.shape(0)))


def _filled_shape(call: Call) -> tuple[Dimensions]:
    target = call.values(0)
    if len(target) not in ANY_RANK or min(target) < 0:
        raise ValueError(f"target {target[:9]} has to have 1..{ANY_RANK[-1]} dimensions of at least 0")
    return (tuple(target),)


def _fill(call: Call) -> None:
    call.step(np.copyto, call.outputs[0].data, call.matrix(1))


OPERATIONS = (
    OperationType(
        "TRANSPOSE",
        37,
        (Signature("f1 q1 h2 s3", "T TENSOR_INT32?"),),
        _transpose_shape,
        build=_transpose,
        quantisation=same_as_input,
        takes_empty=True,
        check=one_list,
    ),
    OperationType(
        "CONCATENATION",
        2,
        (Signature("f0 q0 h2 s3", "T... INT32"),),
        _concatenation_shape,
        build=_concatenation,
        takes_empty=True,
        gate=_concatenation_gate,
    ),
    OperationType(
        "SPLIT",
        87,
        (Signature("f2 h2 i2 q2 s3", "T INT32 INT32", "T...", ranks=ANY_RANK),),
        _split_shape,
        build=_split,
        quantisation=same_as_input,
    ),
    OperationType(
        "TILE",
        89,
        (Signature("f2 h2 i2 q2 s3", "T TENSOR_INT32", ranks=ANY_RANK),),
        _tiled_shape,
        build=_tile,
        quantisation=same_as_input,
    ),
    OperationType(
        "CHANNEL_SHUFFLE",
        46,
        (Signature("f2 h2 q2 s3", "T INT32 INT32"),),
        _shuffled_shape,
        build=_shuffle,
        quantisation=same_as_input,
    ),
    OperationType(
        "RESHAPE",
        22,
        (Signature("f0 q0 h2 s3", "T TENSOR_INT32"),),
        _reshape_shape,
        build=_copy,
        quantisation=same_as_input,
    ),
    OperationType(
        "SQUEEZE",
        34,
        (Signature("f1 q1 h2 s3", "T TENSOR_INT32?"),),
        _squeeze_shape,
        build=_copy,
        quantisation=same_as_input,
        check=one_list,
    ),
    OperationType(
        "EXPAND_DIMS",
        50,
        (Signature("f2 h2 i2 q2 s3", "T INT32", ranks=ANY_RANK),),
        _expanded_shape,
        build=_copy,
        quantisation=same_as_input,
    ),
    OperationType(
        "RANK",
        101,
        (Signature(" ".join(f"{t}3" for t in LETTERS if t != "g"), "T", "INT32", ranks=ANY_RANK),),
        _scalar_shape,
        build=_rank,
    ),
    OperationType(
        "FILL",
        100,
        tuple(
            Signature("i3", f"TENSOR_INT32 {scalar}", result, ranks=ANY_RANK)
            for scalar, result in (("FLOAT32", "f"), ("FLOAT16", "h"), ("INT32", "i"))
        ),
        _filled_shape,
        build=_fill,
    ),
)
