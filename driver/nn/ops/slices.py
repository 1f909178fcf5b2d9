"""Operations that cut a part out of a tensor or surround it (SLICE, STRIDED_SLICE, PAD, PAD_V2), and those that move
blocks of pixels to channels or to the batch, and back (DEPTH_TO_SPACE, SPACE_TO_DEPTH, BATCH_TO_SPACE_ND,
SPACE_TO_BATCH_ND).

Axes of images are only ever split, so that every array of a block operation is a view, whatever the layout.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from ..model import Operand
from ..operation import ANY_RANK, Array, Call, OperationType, Signature, same_as_input
from ..types import Dimensions, OperandType
from .window import image_shape, input_image, output_image, stored_shape


def padding_gate(inputs: Sequence[Operand], _outputs: Sequence[Operand]) -> int:
    """Return the HAL version: before 1.2 quantised data could only be padded when its zero was stored as 0."""
    return 2 if inputs[0].zero_point else 0


def paddings(call: Call, index: int, rank: int) -> list[tuple[int, int]]:
    """Return the steering input `index`: how much to add before and after each of `rank` axes."""
    pads = call.matrix(index)
    if pads.shape != (rank, 2) or (pads < 0).any():
        raise ValueError(f"paddings {pads.reshape(-1)[:9].tolist()} have to be [{rank}, 2] numbers of at least 0")
    return [(int(before), int(after)) for before, after in pads]


def zero_of(call: Call) -> Array:
    """Real 0 as output 0 stores it."""
    out = call.outputs[0]
    return np.array(out.zero_point, out.type.dtype)


def middle(target: Array, pads: Sequence[tuple[int, int]]) -> Array:
    """Return the view of `target` that its paddings surround."""
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
    """Return a begin or end: negative ones count from the end, those out of range mean the border."""
    if stride > 0:
        return size if v >= size else max(v, -size) % size
    return -1 if v < -size else min(v, size - 1) % size


def _ranges(call: Call) -> list[range]:
    """Return the indices that STRIDED_SLICE takes of every axis."""
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


CHANNELS_INSIDE = (0, 1, 3, 2, 4, 5)
"""[n, height, y in block, width, x in block, c] with the block beside the channels."""

BLOCKS_OUTSIDE = (2, 4, 0, 1, 3, 5)
"""The same with the block beside the batch."""


def _blocks(image: Array, height: int, width: int) -> Array:
    """Return an NHWC image as [n, rows of blocks, y in block, columns of blocks, x in block, c]."""
    n, h, w, c = image.shape
    return image.reshape(n, h // height, height, w // width, width, c)


def _block_sizes(call: Call) -> tuple[int, int]:
    """Return the height and the width of a block: input 1 is a number for both, or a list of two."""
    if call.tensor(1).type == OperandType.INT32:
        size = call.integer(1)
        if size < 1:
            raise ValueError(f"block size {size} has to be above 0")
        return size, size
    sizes = call.values(1)
    if len(sizes) != 2 or min(sizes) < 1:
        raise ValueError(f"block sizes {sizes[:9]} have to be 2 numbers above 0")
    return sizes[0], sizes[1]


def _make_blocks(order: Sequence[int], call: Call) -> None:
    """Copy what the input has beside the channels or the batch to the blocks of the output."""
    nchw = call.flag(2)
    target = _blocks(output_image(call, nchw), *_block_sizes(call)).transpose(order)
    call.step(np.copyto, target, input_image(call, nchw).reshape(target.shape))


def _take_blocks(order: Sequence[int], call: Call, image: Array, nchw: bool) -> None:
    """Copy the blocks of `image` beside the channels or the batch of the output."""
    source = _blocks(image, *_block_sizes(call)).transpose(order)
    call.step(np.copyto, output_image(call, nchw).reshape(source.shape), source)


def _depth_to_space_shape(call: Call) -> tuple[Dimensions]:
    (size, _), nchw = _block_sizes(call), call.flag(2)
    n, h, w, c = image_shape(call.shape(0), nchw)
    if c % size**2:
        raise ValueError(f"{c} channels do not make blocks of {size} by {size}")
    return (stored_shape(n, h * size, w * size, c // size**2, nchw=nchw),)


def _space_to_depth_shape(call: Call) -> tuple[Dimensions]:
    (size, _), nchw = _block_sizes(call), call.flag(2)
    n, h, w, c = image_shape(call.shape(0), nchw)
    if h % size or w % size:
        raise ValueError(f"an image of {h} by {w} does not divide into blocks of {size}")
    return (stored_shape(n, h // size, w // size, c * size**2, nchw=nchw),)


def _space_to_depth(call: Call) -> None:
    nchw = call.flag(2)
    _take_blocks(CHANNELS_INSIDE, call, input_image(call, nchw), nchw)


def _batch_to_space_shape(call: Call) -> tuple[Dimensions]:
    (height, width), nchw = _block_sizes(call), call.flag(2)
    n, h, w, c = image_shape(call.shape(0), nchw)
    if n % (height * width):
        raise ValueError(f"a batch of {n} does not make blocks of {height} by {width}")
    return (stored_shape(n // (height * width), h * height, w * width, c, nchw=nchw),)


def _space_to_batch_shape(call: Call) -> tuple[Dimensions]:
    (height, width), nchw = _block_sizes(call), call.flag(3)
    n, h, w, c = image_shape(call.shape(0), nchw)
    (top, bottom), (left, right) = paddings(call, 2, 2)
    h, w = h + top + bottom, w + left + right
    if h % height or w % width:
        raise ValueError(f"a padded image of {h} by {w} does not divide into blocks of {height} by {width}")
    return (stored_shape(n * height * width, h // height, w // width, c, nchw=nchw),)


def _space_to_batch(call: Call) -> None:
    nchw = call.flag(3)
    image, pads = input_image(call, nchw), [(0, 0), *paddings(call, 2, 2), (0, 0)]
    shape = tuple(before + size + after for size, (before, after) in zip(image.shape, pads, strict=True))
    if shape != image.shape:
        padded = call.scratch(shape, image.dtype)
        call.step(np.copyto, padded, zero_of(call))
        call.step(np.copyto, middle(padded, pads), image)
        image = padded
    _take_blocks(BLOCKS_OUTSIDE, call, image, nchw)


LAYOUT = ((2, "BOOL"),)


OPERATIONS = (
    OperationType(
        "SLICE",
        86,
        (Signature("f2 h2 i2 q2 s3", "T 2*TENSOR_INT32", ranks=ANY_RANK),),
        _sliced_shape,
        build=_slice,
        quantisation=same_as_input,
        takes_empty=True,
    ),
    OperationType(
        "STRIDED_SLICE",
        35,
        (Signature("f1 q1 h2 s3", "T 3*TENSOR_INT32 3*INT32"),),
        _strided_shape,
        build=_strided_slice,
        quantisation=same_as_input,
    ),
    OperationType(
        "PAD",
        32,
        (Signature("f1 q1 h2 s3", "T TENSOR_INT32"),),
        _pad_shape,
        build=_pad,
        quantisation=same_as_input,
        gate=padding_gate,
    ),
    OperationType(
        "PAD_V2",
        69,
        (Signature("f2 h2 q2 s3", "T TENSOR_INT32 V"),),
        _pad_v2_shape,
        build=_pad,
        quantisation=same_as_input,
    ),
    OperationType(
        "DEPTH_TO_SPACE",
        5,
        (Signature("f0 q0 h2 s3", "T INT32", tails=LAYOUT, ranks=(4,)),),
        _depth_to_space_shape,
        build=partial(_make_blocks, CHANNELS_INSIDE),
        quantisation=same_as_input,
    ),
    OperationType(
        "SPACE_TO_DEPTH",
        26,
        (Signature("f0 q0 h2 s3", "T INT32", tails=LAYOUT, ranks=(4,)),),
        _space_to_depth_shape,
        build=_space_to_depth,
        quantisation=same_as_input,
    ),
    OperationType(
        "BATCH_TO_SPACE_ND",
        29,
        (Signature("f1 q1 h2 s3", "T TENSOR_INT32", tails=LAYOUT, ranks=(4,)),),
        _batch_to_space_shape,
        build=partial(_make_blocks, BLOCKS_OUTSIDE),
        quantisation=same_as_input,
    ),
    OperationType(
        "SPACE_TO_BATCH_ND",
        33,
        (Signature("f1 q1 h2 s3", "T 2*TENSOR_INT32", tails=LAYOUT, ranks=(4,)),),
        _space_to_batch_shape,
        build=_space_to_batch,
        quantisation=same_as_input,
        gate=padding_gate,
    ),
)
