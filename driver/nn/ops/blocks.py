"""Blocks of pixels moved to channels or to the batch, and back: DEPTH_TO_SPACE, SPACE_TO_DEPTH, BATCH_TO_SPACE_ND,
SPACE_TO_BATCH_ND.

Axes of images are only ever split, so that every array here is a view, whatever the layout.
"""

import numpy as np

from ..operation import Array, Call, OperationType, Signature, same_as_input
from ..types import Dimensions
from .slices import middle, padding_gate, paddings, zero_of
from .window import NHWC_FROM_NCHW, image_shape, output_image, stored_shape

CHANNELS_INSIDE = (0, 1, 3, 2, 4, 5)
"""[n, height, y in block, width, x in block, c] with the block beside the channels."""

BLOCKS_OUTSIDE = (2, 4, 0, 1, 3, 5)
"""The same with the block beside the batch."""


def _image(call: Call, nchw: bool) -> Array:
    return call.array(0).transpose(NHWC_FROM_NCHW) if nchw else call.array(0)


def _blocks(image: Array, height: int, width: int) -> Array:
    """An NHWC image as [n, rows of blocks, y in block, columns of blocks, x in block, c]."""
    n, h, w, c = image.shape
    return image.reshape(n, h // height, height, w // width, width, c)


def _block_size(call: Call) -> int:
    size = call.integer(1)
    if size < 1:
        raise ValueError(f"block size {size} has to be above 0")
    return size


def _block_sizes(call: Call) -> tuple[int, int]:
    sizes = call.values(1)
    if len(sizes) != 2 or min(sizes) < 1:
        raise ValueError(f"block sizes {sizes[:9]} have to be 2 numbers above 0")
    return sizes[0], sizes[1]


def _depth_to_space_shape(call: Call) -> tuple[Dimensions]:
    size, nchw = _block_size(call), call.flag(2)
    n, h, w, c = image_shape(call.shape(0), nchw)
    if c % size**2:
        raise ValueError(f"{c} channels do not make blocks of {size} by {size}")
    return (stored_shape(n, h * size, w * size, c // size**2, nchw),)


def _depth_to_space(call: Call) -> None:
    size, nchw = _block_size(call), call.flag(2)
    image = _image(call, nchw)
    n, h, w, c = image.shape
    target = _blocks(output_image(call, nchw), size, size).transpose(CHANNELS_INSIDE)
    call.step(np.copyto, target, image.reshape(n, h, w, size, size, c // size**2))


def _space_to_depth_shape(call: Call) -> tuple[Dimensions]:
    size, nchw = _block_size(call), call.flag(2)
    n, h, w, c = image_shape(call.shape(0), nchw)
    if h % size or w % size:
        raise ValueError(f"an image of {h} by {w} does not divide into blocks of {size}")
    return (stored_shape(n, h // size, w // size, c * size**2, nchw),)


def _space_to_depth(call: Call) -> None:
    size, nchw = _block_size(call), call.flag(2)
    image = _image(call, nchw)
    n, h, w, c = image.shape
    target = output_image(call, nchw).reshape(n, h // size, w // size, size, size, c)
    call.step(np.copyto, target, _blocks(image, size, size).transpose(CHANNELS_INSIDE))


def _batch_to_space_shape(call: Call) -> tuple[Dimensions]:
    (height, width), nchw = _block_sizes(call), call.flag(2)
    n, h, w, c = image_shape(call.shape(0), nchw)
    if n % (height * width):
        raise ValueError(f"a batch of {n} does not make blocks of {height} by {width}")
    return (stored_shape(n // (height * width), h * height, w * width, c, nchw),)


def _batch_to_space(call: Call) -> None:
    (height, width), nchw = _block_sizes(call), call.flag(2)
    image = _image(call, nchw)
    n, h, w, c = image.shape
    target = _blocks(output_image(call, nchw), height, width).transpose(BLOCKS_OUTSIDE)
    call.step(np.copyto, target, image.reshape(height, width, n // (height * width), h, w, c))


def _space_to_batch_shape(call: Call) -> tuple[Dimensions]:
    (height, width), nchw = _block_sizes(call), call.flag(3)
    n, h, w, c = image_shape(call.shape(0), nchw)
    (top, bottom), (left, right) = paddings(call, 2, 2)
    h, w = h + top + bottom, w + left + right
    if h % height or w % width:
        raise ValueError(f"a padded image of {h} by {w} does not divide into blocks of {height} by {width}")
    return (stored_shape(n * height * width, h // height, w // width, c, nchw),)


def _space_to_batch(call: Call) -> None:
    (height, width), nchw = _block_sizes(call), call.flag(3)
    image, pads = _image(call, nchw), [(0, 0), *paddings(call, 2, 2), (0, 0)]
    shape = [before + size + after for size, (before, after) in zip(image.shape, pads, strict=True)]
    if tuple(shape) != image.shape:
        padded = call.scratch(shape, image.dtype)
        call.step(np.copyto, padded, zero_of(call))
        call.step(np.copyto, middle(padded, pads), image)
        image = padded
    n, h, w, c = shape
    target = output_image(call, nchw).reshape(height, width, n, h // height, w // width, c)
    call.step(np.copyto, target, _blocks(image, height, width).transpose(BLOCKS_OUTSIDE))


LAYOUT = ((2, "BOOL"),)

DEPTH_TO_SPACE = OperationType(
    "DEPTH_TO_SPACE",
    5,
    (Signature("f0 q0 h2 s3", "T INT32", tails=LAYOUT, ranks=(4,)),),
    _depth_to_space_shape,
    _depth_to_space,
    quantisation=same_as_input,
)
SPACE_TO_DEPTH = OperationType(
    "SPACE_TO_DEPTH",
    26,
    (Signature("f0 q0 h2 s3", "T INT32", tails=LAYOUT, ranks=(4,)),),
    _space_to_depth_shape,
    _space_to_depth,
    quantisation=same_as_input,
)
BATCH_TO_SPACE_ND = OperationType(
    "BATCH_TO_SPACE_ND",
    29,
    (Signature("f1 q1 h2 s3", "T TENSOR_INT32", tails=LAYOUT, ranks=(4,)),),
    _batch_to_space_shape,
    _batch_to_space,
    quantisation=same_as_input,
)
SPACE_TO_BATCH_ND = OperationType(
    "SPACE_TO_BATCH_ND",
    33,
    (Signature("f1 q1 h2 s3", "T 2*TENSOR_INT32", tails=LAYOUT, ranks=(4,)),),
    _space_to_batch_shape,
    _space_to_batch,
    quantisation=same_as_input,
    gate=padding_gate,
)
