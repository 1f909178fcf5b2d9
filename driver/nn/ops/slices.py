"""Operations that cut a part out of a tensor or surround it: SLICE, STRIDED_SLICE, PAD, PAD_V2."""

from collections.abc import Sequence

import numpy as np

from ..model import Operand
from ..operation import ANY_RANK, Array, Call, OperationType, Signature, same_as_input
from ..types import Dimensions


def padding_gate(inputs: Sequence[Operand], _outputs: Sequence[Operand]) -> int:
    """Before HAL 1.2 quantised data could only be padded when its zero was stored as 0."""
    return 2 if inputs[0].zero_point else 0


def paddings(call: Call, index: int, rank: int) -> list[tuple[int, int]]:
    """The steering input `index`: how much to add before and after each of `rank` axes."""
    pads = call.matrix(index)
    if pads.shape != (rank, 2) or (pads < 0).any():
        raise ValueError(f"paddings {pads.reshape(-1)[:9].tolist()} have to be [{rank}, 2] numbers of at least 0")
    return [(int(before), int(after)) for before, after in pads]


def zero_of(call: Call) -> Array:
    """Real 0 as output 0 stores it."""
    out = call.outputs[0]
    return np.array(out.zero_point, out.type.dtype)


def middle(target: Array, pads: Sequence[tuple[int, int]]) -> Array:
    """The view of `target` that its paddings surround."""
    return target[tuple(slice(a, size - b) for size, (a, b) in zip(target.shape, pads, strict=True))]


def _pad_shape(call: Call) -> tuple[Dimensions]:
    shape = call.shape(0)
    return (tuple(a + d + b for d, (a, b) in zip(shape, paddings(call, 1, len(shape)), strict=True)),)


def _pad_v2_shape(call: Call) -> tuple[Dimensions]:
    kind, fill = call.tensor(0).type, call.matrix(2)
    if kind.is_quantised and not (info := np.iinfo(kind.dtype)).min <= fill <= info.max:
        raise ValueError(f"the fill value {int(fill)} is stored as it is and has to be in {info.min}..{info.max}")
    return _pad_shape(call)


def _pad(call: Call) -> None:
    out, source = call.outputs[0].data, call.array(0)
    fill = call.matrix(2).astype(out.dtype) if call.given(2) else zero_of(call)
    if out.shape != source.shape:
        call.step(np.copyto, out, fill)
    call.step(np.copyto, middle(out, paddings(call, 1, source.ndim)), source)


def _sliced_shape(call: Call) -> tuple[Dimensions]:
    shape, begins, sizes = call.shape(0), call.values(1), call.values(2)
    if not len(begins) == len(sizes) == len(shape):
        raise ValueError(f"begins {begins[:9]} and sizes {sizes[:9]} have to have {len(shape)} elements")
    sizes = [d - begin if size == -1 else size for d, begin, size in zip(shape, begins, sizes, strict=True)]
    if any(not 0 <= begin <= begin + size <= d for d, begin, size in zip(shape, begins, sizes, strict=True)):
        raise ValueError(f"begins {begins} and sizes {sizes} reach out of {list(shape)}")
    return (tuple(sizes),)


def _slice(call: Call) -> None:
    out = call.outputs[0]
    taken = tuple(slice(begin, begin + size) for begin, size in zip(call.values(1), out.shape, strict=True))
    call.step(np.copyto, out.data, call.array(0)[taken])


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
        raise ValueError(
            f"begins {begins[:9]}, ends {ends[:9]} and strides {strides[:9]} have to have {len(shape)} elements"
        )
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


def _strided_shape(call: Call) -> tuple[Dimensions]:
    ranges, shrink = _ranges(call), call.integer(6)
    for axis, indices in enumerate(ranges):
        if shrink >> axis & 1 and (len(indices) != 1 or indices.step < 0):
            raise ValueError(f"axis {axis} shrinks but takes {len(indices)} elements with stride {indices.step}")
    return (tuple(len(r) for axis, r in enumerate(ranges) if not shrink >> axis & 1) or (1,),)


def _strided_slice(call: Call) -> None:
    taken = call.array(0)[tuple(slice(r.start, r.stop if r.stop >= 0 else None, r.step) for r in _ranges(call))]
    call.step(np.copyto, call.outputs[0].data.reshape(taken.shape), taken)


SLICE = OperationType(
    "SLICE",
    86,
    (Signature("f2 h2 i2 q2 s3", "T 2*TENSOR_INT32", ranks=ANY_RANK),),
    _sliced_shape,
    _slice,
    quantisation=same_as_input,
    takes_empty=True,
)
STRIDED_SLICE = OperationType(
    "STRIDED_SLICE",
    35,
    (Signature("f1 q1 h2 s3", "T 3*TENSOR_INT32 3*INT32"),),
    _strided_shape,
    _strided_slice,
    quantisation=same_as_input,
)
PAD = OperationType(
    "PAD", 32, (Signature("f1 q1 h2 s3", "T TENSOR_INT32"),), _pad_shape, _pad, same_as_input, gate=padding_gate
)
PAD_V2 = OperationType(
    "PAD_V2", 69, (Signature("f2 h2 q2 s3", "T TENSOR_INT32 V"),), _pad_v2_shape, _pad, same_as_input
)
