"""HEATMAP_MAX_KEYPOINT: where each heatmap is highest, refined by the parabola through the eight neighbours."""

from collections.abc import Sequence

import numpy as np

from ..operation import Array, Call, OperationType, Signature, Tensor, declared
from ..types import Dimensions, OperandType
from .boxes import eighths, expect_eighths, expect_ordered, expect_shape, reals, write
from .window import image_shape

_FARTHEST = 1.5
"""Cells by which a refined maximum may lie apart."""


def _shape(call: Call) -> Sequence[Dimensions]:
    boxes, height, width, keypoints = image_shape(call.shape(0), call.flag(2))
    if height != width or height < 2:
        raise ValueError(f"heatmaps of {height} x {width} have to be square and 2 at least on each side")
    expect_shape(call, 1, boxes, 4)
    expect_eighths(call, 1)
    return [(boxes, keypoints), (boxes, keypoints, 2)]


def _mirrored(centres: Array, size: int) -> Array:
    """Each centre with its neighbours on one axis, mirrored at the borders: [..., 3]."""
    around = np.abs(centres[..., None] + np.arange(-1, 2))
    return np.asarray(size - 1 - np.abs(size - 1 - around))


def _refine(patch: Array, tolerance: float) -> tuple[Array, Array]:
    """The maximum (x, y) [..., 2] in cells from the middle of `patch` [..., 3, 3], and the height there [...]."""
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


def _find(maps: Array, heat: Tensor, boxes: Tensor, outputs: Sequence[Tensor]) -> None:
    """`maps`: the stored values of `heat` as [boxes, keypoints, size, size]."""
    count, keypoints, size, _ = maps.shape
    corners = reals(boxes.data, boxes)
    expect_ordered(corners)
    peaks = maps.reshape(count, keypoints, -1).argmax(axis=-1)
    rows, columns = np.divmod(peaks, size)
    of = np.arange(count)[:, None, None, None], np.arange(keypoints)[:, None, None]
    patch = maps[(*of, _mirrored(rows, size)[..., :, None], _mirrored(columns, size)[..., None, :])]
    delta, score = _refine(reals(patch, heat), 1e-3 if heat.type == OperandType.TENSOR_FLOAT16 else 1e-5)
    low, high = corners[:, None, :2], corners[:, None, 2:]
    cells = np.stack((columns, rows), axis=-1).astype(np.float32) + delta + np.float32(0.5)
    write(outputs[0], score)
    write(outputs[1], cells / np.float32(size) * (high - low) + low)


def _build(call: Call) -> None:
    heat = call.tensor(0)
    maps = heat.data if call.flag(2) else heat.data.transpose(0, 3, 1, 2)
    call.step(_find, maps, heat, call.tensor(1), call.outputs)


HEATMAP_MAX_KEYPOINT = OperationType(
    "HEATMAP_MAX_KEYPOINT",
    56,
    (
        Signature("f2 h2", "T T BOOL", "T T", ranks=(4,)),
        Signature("q2 s3", "T W BOOL", "T W", ranks=(4,)),
    ),
    _shape,
    _build,
    quantisation=(declared, eighths),
)
