"""HEATMAP_MAX_KEYPOINT against a definition of one keypoint at a time."""

import contextlib
import itertools
import math

import numpy as np
import pytest

from driver.nn import ExecutionFailed, Interpreter, InvalidModel, ModelBuilder

LAYOUTS = pytest.mark.parametrize("nchw", [False, True])
BOXES = np.random.default_rng(8).integers(0, 200, (5, 4)).cumsum(axis=1) / 8


def laid_out(image, nchw):
    return image.transpose(0, 3, 1, 2).copy() if nchw else image


def refined(patch, tolerance):
    """Offset and height of the maximum near the middle of a 3 x 3 patch."""
    (upleft, up, upright), (left, middle, right), (downleft, down, downright) = patch
    b = -(right - left) / 2, -(down - up) / 2
    a = left - 2 * middle + right, up - 2 * middle + down, (downright - downleft - upright + upleft) / 4
    det = a[0] * a[1] - a[2] ** 2
    if abs(det) < tolerance + tolerance * a[0] * a[1]:
        return 0.0, 0.0, middle
    x, y = (a[1] * b[0] - a[2] * b[1]) / det, (a[0] * b[1] - a[2] * b[0]) / det
    if max(abs(x), abs(y)) > 1.5:
        x, y = (1.5 / max(abs(x), abs(y)) * d for d in (x, y))
    return x, y, middle - b[0] * x - b[1] * y + (a[0] * x * x + 2 * a[2] * x * y + a[1] * y * y) / 2


def keypoints(heat, boxes, tolerance):
    """Scores [boxes, keypoints] and points [boxes, keypoints, 2] of `heat` [boxes, size, size, keypoints]."""
    count, size, _, kinds = heat.shape
    scores, points = np.empty((count, kinds)), np.empty((count, kinds, 2))
    for n, k in itertools.product(range(count), range(kinds)):
        plane = heat[n, :, :, k]
        r, c = divmod(int(plane.argmax()), size)
        rows, columns = ([{-1: 1, size: size - 2}.get(i, i) for i in range(m - 1, m + 2)] for m in (r, c))
        x, y, scores[n, k] = refined([[plane[i, j] for j in columns] for i in rows], tolerance)
        x1, y1, x2, y2 = boxes[n]
        points[n, k] = (c + x + 0.5) / size * (x2 - x1) + x1, (r + y + 0.5) / size * (y2 - y1) + y1
    return scores, points


def heatmaps(size):
    """Noise, a plain, a ridge, and maxima at the corners."""
    heat = np.random.default_rng(size).integers(0, 64, (5, size, size, 3)) / 64
    heat[1] = 0.5
    heat[2, 0] = np.arange(size)[:, None] / 8
    heat[3, -1, -1] = heat[4, 0, -1] = 2
    return heat


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@LAYOUTS
@pytest.mark.parametrize("size", [2, 3, 7])
def test_heatmap_max_keypoint_of_floats(evaluate, *, dtype, nchw, size):
    """The first maximum is refined by a parabola, mirrored at the border, and placed in its box."""
    heat, boxes = heatmaps(size), BOXES
    found = evaluate("HEATMAP_MAX_KEYPOINT", laid_out(heat, nchw).astype(dtype), boxes.astype(dtype), nchw)
    expected = keypoints(heat, boxes, 1e-5 if dtype == np.float32 else 1e-3)
    for y, x in zip(found, expected, strict=True):
        assert y.dtype == dtype
        np.testing.assert_allclose(y, x, rtol=1e-4 if dtype == np.float32 else 2e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@LAYOUTS
def test_heatmap_max_keypoint_of_quantised(evaluate, quantised, requantise, *, dtype, nchw):
    """Scores have the parameters that the output asks for, keypoints are eighths."""
    heat, boxes = heatmaps(7), BOXES
    zero_point = 0 if dtype == np.uint8 else -128
    x = quantised((laid_out(heat, nchw) * 64 + zero_point).astype(dtype), 1 / 64, zero_point)
    places = quantised((boxes * 8).astype(np.uint16), 0.125)
    found = evaluate("HEATMAP_MAX_KEYPOINT", x, places, nchw, scale=1 / 32, zero_point=3)
    scores, points = keypoints(heat, boxes, 1e-5)
    np.testing.assert_allclose(found[0].astype(int), requantise(scores, 1 / 32, 3, dtype), atol=1)
    np.testing.assert_allclose(found[1] / 8, points, atol=1 / 16 + 1e-4)


@pytest.mark.parametrize(
    ("heat", "boxes", "reason"),
    [
        (np.ones((1, 4, 5, 2)), [[0, 0, 1, 1]], "square"),
        (np.ones((1, 1, 1, 2)), [[0, 0, 1, 1]], "square"),
        (np.ones((1, 4, 4, 2)), [[0, 0, 1, 1]] * 2, "should have"),
        (np.ones((1, 4, 4, 2)), [[1, 0, 0, 1]], "ends before it begins"),
        (np.ones((1, 4, 4, 2)), [[0, 0, math.nan, 1]], "ends before it begins"),
    ],
)
def test_heatmap_max_keypoint_refuses(evaluate, heat, boxes, reason):
    """Heatmaps that are not square, boxes of negative size and dimensions that do not fit fail."""
    with pytest.raises((ExecutionFailed, InvalidModel), match=reason):
        evaluate("HEATMAP_MAX_KEYPOINT", heat.astype(np.float32), np.array(boxes, np.float32), False)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_heatmap_max_keypoint_of_any_number(evaluate, value):
    """Whatever floats come in, results or a refusal come out, without a warning."""
    heat, boxes = heatmaps(4).astype(np.float32), BOXES.astype(np.float32)
    heat[::2, 1, 2] = value
    assert evaluate("HEATMAP_MAX_KEYPOINT", heat, boxes, False)[1].shape == (5, 3, 2)
    boxes[3, 2] = value
    with contextlib.nullcontext() if value > 0 else pytest.raises(ExecutionFailed, match="ends before it begins"):
        assert evaluate("HEATMAP_MAX_KEYPOINT", heat, boxes, False)[1].shape == (5, 3, 2)


def test_heatmap_max_keypoint_stays_static():
    """Boxes that only a run will show do not make a model dynamic."""
    m = ModelBuilder()
    m.output(*m.operation("HEATMAP_MAX_KEYPOINT", m.input("float32", (5, 4, 4, 3)), m.input("float32", (5, 4)), False))
    assert Interpreter(m.build()).is_static
