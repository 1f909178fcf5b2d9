"""Boxes (x1, y1, x2, y2): their stored form, checks on them, and AXIS_ALIGNED_BBOX_TRANSFORM.

Coordinates are float32, the precision in which the HAL's own results round and compare.
"""

from collections.abc import Sequence

import numpy as np

from ..operation import Array, Call, OperationType, Signature, Tensor
from ..types import Dimensions
from .real import quantise

EIGHTH = 0.125
"""Scale of quantised boxes, whose zero point is 0."""


def eighths(_source: Tensor, result: Tensor) -> tuple[float, int]:
    """The quantisation rule of boxes."""
    return (EIGHTH if result.type.is_quantised else 0.0), 0


def expect_eighths(call: Call, *indices: int) -> None:
    """Refuse quantised boxes of any other scale or zero point."""
    for index in indices:
        tensor = call.tensor(index)
        if tensor.type.is_quantised and (tensor.scale, tensor.zero_point) != (EIGHTH, 0):
            raise ValueError(
                f"input {index} has scale {tensor.scale} and zero point {tensor.zero_point}; boxes have {EIGHTH} and 0"
            )


def expect_shape(call: Call, index: int, *shape: int) -> None:
    """Refuse input `index` unless its dimensions are `shape`."""
    if call.shape(index) != shape:
        raise ValueError(f"input {index} has dimensions {list(call.shape(index))} and should have {list(shape)}")


def expect_rank(call: Call, index: int, rank: int) -> Dimensions:
    """The dimensions of input `index`, refused unless there are `rank`."""
    if len(call.shape(index)) != rank:
        raise ValueError(f"input {index} has dimensions {list(call.shape(index))}; it has to be {rank}-D")
    return call.shape(index)


def private(tensor: Tensor) -> Array:
    """A private copy of the data, which no other process can change."""
    return np.array(tensor.data)


def reals(raw: Array, tensor: Tensor) -> Array:
    """float32 numbers that the stored values `raw` of `tensor` stand for, as a new array."""
    numbers = raw.astype(np.float32)
    if tensor.type.is_quantised:
        numbers -= tensor.zero_point
        numbers *= np.float32(tensor.scale)
    return numbers


def stored(numbers: Array, tensor: Tensor) -> Array:
    """`numbers` as `tensor` stores them."""
    values = np.nan_to_num(quantise(numbers, tensor)) if tensor.type.is_quantised else numbers
    return values.astype(tensor.type.dtype)


def write(tensor: Tensor, numbers: Array) -> None:
    """Store `numbers` as the data of `tensor`."""
    np.copyto(tensor.data, stored(numbers, tensor))


def expect_ordered(boxes: Array) -> None:
    """Refuse boxes [..., 4] of negative size, and those that are no numbers."""
    if not (boxes[..., :2] <= boxes[..., 2:]).all():
        raise ValueError("a box ends before it begins; boxes are x1 <= x2 and y1 <= y2")


def expect_batches(batch: Array, count: int) -> None:
    """Refuse batch indices beyond the batches that there are."""
    if batch.size and not (batch.min() >= 0 and batch.max() < count):
        raise ValueError(f"batch indices {batch.min()}..{batch.max()} have to be in 0..{count - 1}")


def transform(boxes: Array, deltas: Array, sizes: Array) -> Array:
    """Move and scale boxes, and clip them to their images.

    boxes: [n, 4]. deltas: [n, classes, 4] as (dx, dy, dw, dh) in parts of the box. sizes: (height, width) of the image,
    [n, 2] or [1, 2]. Returns [n, classes, 4].
    """
    expect_ordered(boxes)
    low, high = boxes[:, None, :2], boxes[:, None, 2:]
    centre = (low + high) / 2 + deltas[..., :2] * (high - low)
    half = np.exp(deltas[..., 2:]) * (high - low) / 2
    limits = sizes[:, None, ::-1]
    corners = (np.minimum(np.maximum(corner, 0), limits) for corner in (centre - half, centre + half))
    return np.concatenate(list(corners), axis=-1)


def _shape(call: Call) -> Sequence[Dimensions]:
    (n, _), (_, columns), (batches, _) = (expect_rank(call, index, 2) for index in (0, 1, 3))
    expect_eighths(call, 0, 3)
    if columns < 4 or columns % 4:
        raise ValueError(f"input 1 has {columns} columns and should have 4 for each of at least one class")
    if batches < 1:
        raise ValueError("input 3 has no image")
    for index, shape in enumerate([(n, 4), (n, columns), (n,), (batches, 2)]):
        expect_shape(call, index, *shape)
    return [(n, columns)]


def _transform(rois: Tensor, deltas: Tensor, batch: Tensor, images: Tensor, out: Tensor) -> None:
    of, sizes = private(batch), reals(images.data, images)
    expect_batches(of, len(sizes))
    moves = reals(deltas.data, deltas).reshape(len(of), -1, 4)
    write(out, transform(reals(rois.data, rois), moves, sizes[of]).reshape(out.shape))


def _build(call: Call) -> None:
    call.step(_transform, *(call.tensor(i) for i in range(4)), call.outputs[0])


AXIS_ALIGNED_BBOX_TRANSFORM = OperationType(
    "AXIS_ALIGNED_BBOX_TRANSFORM",
    41,
    (
        Signature("f2 h2", "T T i T", ranks=(2,)),
        Signature("W2", "T q i T", ranks=(2,)),
        Signature("W3", "T s i T", ranks=(2,)),
    ),
    _shape,
    _build,
    quantisation=eighths,
    takes_empty=True,
)
