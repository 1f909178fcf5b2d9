"""Boxes (x1, y1, x2, y2): their stored form, checks on them, AXIS_ALIGNED_BBOX_TRANSFORM and HEATMAP_MAX_KEYPOINT.

Coordinates are float32, the precision in which the HAL's own results round and compare. A keypoint is where a heatmap
is highest, refined by the parabola through the eight neighbours.
"""

from collections.abc import Sequence

import numpy as np

from ..blocks import Look, copied, extreme, pieces
from ..operation import Array, Call, OperationType, Signature, Tensor, declared
from ..types import Dimensions, OperandType
from .real import quantise
from .window import image_shape

BLOCK = 1 << 13
"""Numbers of boxes that are computed between two looks: for each there are dozens of calls of numpy."""

EIGHTH = 0.125
"""Scale of quantised boxes, whose zero point is 0."""


def eighths(_source: Tensor, result: Tensor) -> tuple[float, int]:
    """Return the scale and zero point that boxes have."""
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
    """Return the dimensions of input `index`, refused unless there are `rank`."""
    if len(call.shape(index)) != rank:
        raise ValueError(f"input {index} has dimensions {list(call.shape(index))}; it has to be {rank}-D")
    return call.shape(index)


def private(tensor: Tensor) -> Array:
    """Return a private copy of the data, which no other process can change."""
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


def _transform(look: Look, rois: Tensor, deltas: Tensor, batch: Tensor, images: Tensor, out: Tensor) -> None:
    sizes = reals(images.data, images)
    moves, moved = (array.reshape(len(rois.data), -1, 4) for array in (deltas.data, out.data))
    for rows, classes, _ in pieces(moves.shape, BLOCK):
        look()
        of = np.array(batch.data[rows])
        expect_batches(of, len(sizes))
        boxes = transform(reals(rois.data[rows], rois), reals(moves[rows, classes], deltas), sizes[of])
        np.copyto(moved[rows, classes], stored(boxes, out))


def _build(call: Call) -> None:
    call.step(_transform, call.look, *(call.tensor(i) for i in range(4)), call.outputs[0])


_FARTHEST = 1.5
"""Cells by which a refined maximum may lie apart."""


def _keypoints_shape(call: Call) -> Sequence[Dimensions]:
    boxes, height, width, keypoints = image_shape(call.shape(0), call.flag(2))
    if height != width or height < 2:
        raise ValueError(f"heatmaps of {height} x {width} have to be square and 2 at least on each side")
    expect_shape(call, 1, boxes, 4)
    expect_eighths(call, 1)
    return [(boxes, keypoints), (boxes, keypoints, 2)]


def _mirrored(centres: Array, size: int) -> Array:
    """Return each centre with its neighbours on one axis, mirrored at the borders: [..., 3]."""
    around = np.abs(centres[..., None] + np.arange(-1, 2))
    return np.asarray(size - 1 - np.abs(size - 1 - around))


def _refine(patch: Array, tolerance: float) -> tuple[Array, Array]:
    """Return the maximum (x, y) [..., 2] in cells from the middle of `patch` [..., 3, 3], and the height there
    [...].
    """
    up, middle, down = patch[..., 0, 1], patch[..., 1, 1], patch[..., 2, 1]
    left, right = patch[..., 1, 0], patch[..., 1, 2]
    b0, b1 = -(right - left) / 2, -(down - up) / 2
    a00, a11 = left - 2 * middle + right, up - 2 * middle + down
    a01 = (patch[..., 2, 2] - patch[..., 2, 0] - patch[..., 0, 2] + patch[..., 0, 0]) / 4
    det = a00 * a11 - a01 * a01
    is_flat = np.abs(det) < tolerance + tolerance * (a00 * a11)
    delta = np.stack((a11 * b0 - a01 * b1, a00 * b1 - a01 * b0), axis=-1) / det[..., None]
    delta[is_flat] = 0
    farthest = np.abs(delta).max(axis=-1, keepdims=True)
    delta = np.where(farthest > _FARTHEST, delta * (_FARTHEST / farthest), delta)
    x, y = delta[..., 0], delta[..., 1]
    return delta, middle - (b0 * x + b1 * y) + (a00 * x * x + 2 * a01 * x * y + a11 * y * y) / 2


def _find(look: Look, maps: Array, heat: Tensor, boxes: Tensor, outputs: Sequence[Tensor]) -> None:
    """Find the keypoints. `maps`: the stored values of `heat` as [boxes, keypoints, size, size]."""
    peaks = np.empty((*maps.shape[:2], 1), np.intp)
    ordered = maps if maps.flags.c_contiguous else copied(look, maps)
    extreme(look, "argmax", ordered.reshape(*maps.shape[:2], -1), 2, found=peaks)
    for few, keypoints in pieces(maps.shape[:2], BLOCK):
        look()
        found = _refined(maps[few, keypoints], peaks[few, keypoints, 0], heat, reals(boxes.data[few], boxes))
        for out, values in zip(outputs, found, strict=True):
            np.copyto(out.data[few, keypoints], stored(values, out))


def _refined(maps: Array, peaks: Array, heat: Tensor, corners: Array) -> tuple[Array, Array]:
    """Return the scores and keypoints, from where each heatmap is highest and the corners of its box."""
    expect_ordered(corners)
    count, keypoints, size, _ = maps.shape
    rows, columns = np.divmod(peaks, size)
    of = np.arange(count)[:, None, None, None], np.arange(keypoints)[:, None, None]
    patch = maps[(*of, _mirrored(rows, size)[..., :, None], _mirrored(columns, size)[..., None, :])]
    delta, score = _refine(reals(patch, heat), 1e-3 if heat.type == OperandType.TENSOR_FLOAT16 else 1e-5)
    low, high = corners[:, None, :2], corners[:, None, 2:]
    cells = np.stack((columns, rows), axis=-1).astype(np.float32) + delta + np.float32(0.5)
    return score, cells / np.float32(size) * (high - low) + low


def _keypoints(call: Call) -> None:
    heat = call.tensor(0)
    maps = heat.data if call.flag(2) else heat.data.transpose(0, 3, 1, 2)
    call.step(_find, call.look, maps, heat, call.tensor(1), call.outputs)


OPERATIONS = (
    OperationType(
        "AXIS_ALIGNED_BBOX_TRANSFORM",
        41,
        (
            Signature("f2 h2", "T T i T", ranks=(2,)),
            Signature("W2", "T q i T", ranks=(2,)),
            Signature("W3", "T s i T", ranks=(2,)),
        ),
        _shape,
        build=_build,
        quantisation=eighths,
        takes_empty=True,
    ),
    OperationType(
        "HEATMAP_MAX_KEYPOINT",
        56,
        (
            Signature("f2 h2", "T T BOOL", "T T", ranks=(4,)),
            Signature("q2 s3", "T W BOOL", "T W", ranks=(4,)),
        ),
        _keypoints_shape,
        build=_keypoints,
        quantisation=(declared, eighths),
    ),
)
