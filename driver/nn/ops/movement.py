"""Operations that only move elements: RESHAPE, SQUEEZE, TRANSPOSE, CONCATENATION, PAD, STRIDED_SLICE.

Copies always view the *output* in the shape of the input: outputs are contiguous, so that such a view always exists.
"""

import math
from collections.abc import Sequence

import numpy as np

from ..model import Operand
from ..operation import Call, OperationType, Signature, same_as_input
from ..types import Dimensions
from .axes import all_axes
from .real import look_up, requantise_table

MAX_RANK = 4


def _copy(call: Call) -> None:
    source = call.array(0)
    call.step(np.copyto, call.outputs[0].data.reshape(source.shape), source)


def _reshape_shape(call: Call) -> tuple[Dimensions]:
    size, target = math.prod(call.shape(0)), call.values(1)
    if not 1 <= len(target) <= MAX_RANK or target.count(-1) > 1 or any(d < -1 for d in target):
        raise ValueError(f"target {target} has to have 1..{MAX_RANK} dimensions, at most one of them -1")
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


def _permutation(call: Call) -> list[int]:
    rank = len(call.shape(0))
    order = call.values(1) if call.given(1) else list(range(rank))[::-1]
    if sorted(order) != list(range(rank)):
        raise ValueError(f"permutation {order} has to name each of {rank} axes once")
    return order


def _transpose_shape(call: Call) -> tuple[Dimensions]:
    return (tuple(call.shape(0)[i] for i in _permutation(call)),)


def _transpose(call: Call) -> None:
    call.step(np.copyto, call.outputs[0].data, call.array(0).transpose(_permutation(call)))


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
        part = out.data[(slice(None),) * axis + (slice(position, position + source.shape[axis]),)]
        position += source.shape[axis]
        if (source.scale, source.zero_point) == (out.scale, out.zero_point):
            call.step(np.copyto, part, source.data)
        elif part.size:
            look_up(call, source, requantise_table(source, out), part)


def _concatenation_gate(inputs: Sequence[Operand], outputs: Sequence[Operand]) -> int:
    """Before HAL 1.2 concatenation did not requantise."""
    out = outputs[0]
    return 2 if any((o.scale, o.zero_point) != (out.scale, out.zero_point) for o in inputs[:-1]) else 0


def _padding_gate(inputs: Sequence[Operand], _outputs: Sequence[Operand]) -> int:
    """Before HAL 1.2 quantised data could only be padded when its zero was stored as 0."""
    return 2 if inputs[0].zero_point else 0


def _paddings(call: Call) -> list[tuple[int, int]]:
    pads, rank = call.matrix(1), len(call.shape(0))
    if pads.shape != (rank, 2) or (pads < 0).any():
        raise ValueError(f"paddings {pads.tolist()} have to be [{rank}, 2] numbers of at least 0")
    return [(int(before), int(after)) for before, after in pads]


def _pad_shape(call: Call) -> tuple[Dimensions]:
    return (tuple(a + d + b for d, (a, b) in zip(call.shape(0), _paddings(call), strict=True)),)


def _pad(call: Call) -> None:
    source, out = call.tensor(0), call.outputs[0]
    inner = tuple(slice(a, a + d) for d, (a, _) in zip(source.shape, _paddings(call), strict=True))
    call.step(np.copyto, out.data, np.array(out.zero_point, out.data.dtype))
    call.step(np.copyto, out.data[inner], source.data)


def _clamped_index(v: int, size: int, stride: int) -> int:
    """A begin or end: negative ones count from the end, those out of range mean the border."""
    if stride > 0:
        return size if v >= size else max(v, -size) % size
    return -1 if v < -size else min(v, size - 1) % size


def _ranges(call: Call) -> list[range]:
    """The indices that STRIDED_SLICE takes of every axis."""
    shape = call.shape(0)
    begins, ends, strides = (call.values(i) for i in (1, 2, 3))
    if not len(begins) == len(ends) == len(strides) == len(shape):
        raise ValueError(f"begins {begins}, ends {ends} and strides {strides} have to have {len(shape)} elements")
    begin_mask, end_mask = call.integer(4), call.integer(5)
    result = []
    for axis, (size, begin, end, stride) in enumerate(zip(shape, begins, ends, strides, strict=True)):
        if stride == 0:
            raise ValueError(f"stride of axis {axis} is 0")
        first, last = (0, size) if stride > 0 else (size - 1, -1)
        start = first if begin_mask >> axis & 1 else _clamped_index(begin, size, stride)
        stop = last if end_mask >> axis & 1 else _clamped_index(end, size, stride)
        result.append(range(start, stop, stride))
    return result


def _slice_shape(call: Call) -> tuple[Dimensions]:
    ranges, shrink = _ranges(call), call.integer(6)
    for axis, indices in enumerate(ranges):
        if shrink >> axis & 1 and (len(indices) != 1 or indices.step < 0):
            raise ValueError(f"axis {axis} shrinks but takes {len(indices)} elements with stride {indices.step}")
    return (tuple(len(r) for axis, r in enumerate(ranges) if not shrink >> axis & 1) or (1,),)


def _slice(call: Call) -> None:
    taken = call.array(0)[tuple(slice(r.start, r.stop if r.stop >= 0 else None, r.step) for r in _ranges(call))]
    call.step(np.copyto, call.outputs[0].data.reshape(taken.shape), taken)


RESHAPE = OperationType(
    "RESHAPE", 22, (Signature("f0 q0 h2 s3", "T TENSOR_INT32"),), _reshape_shape, _copy, quantisation=same_as_input
)
SQUEEZE = OperationType(
    "SQUEEZE", 34, (Signature("f1 q1 h2 s3", "T TENSOR_INT32?"),), _squeeze_shape, _copy, quantisation=same_as_input
)
TRANSPOSE = OperationType(
    "TRANSPOSE",
    37,
    (Signature("f1 q1 h2 s3", "T TENSOR_INT32?"),),
    _transpose_shape,
    _transpose,
    quantisation=same_as_input,
    takes_empty=True,
)
CONCATENATION = OperationType(
    "CONCATENATION",
    2,
    (Signature("f0 q0 h2 s3", "T... INT32"),),
    _concatenation_shape,
    _concatenation,
    takes_empty=True,
    gate=_concatenation_gate,
)
PAD = OperationType(
    "PAD", 32, (Signature("f1 q1 h2 s3", "T TENSOR_INT32"),), _pad_shape, _pad, same_as_input, gate=_padding_gate
)
STRIDED_SLICE = OperationType(
    "STRIDED_SLICE",
    35,
    (Signature("f1 q1 h2 s3", "T 3*TENSOR_INT32 3*INT32"),),
    _slice_shape,
    _slice,
    quantisation=same_as_input,
)
