"""AXIS_ALIGNED_BBOX_TRANSFORM, ROI_ALIGN and ROI_POOLING against definitions of one number at a time."""

import contextlib
import itertools
import math

import numpy as np
import pytest

from driver.nn import ExecutionFailed, Interpreter, InvalidModel, ModelBuilder

REFUSAL = (ExecutionFailed, InvalidModel)
FLOATS = pytest.mark.parametrize("dtype", [np.float32, np.float16])
BYTES = pytest.mark.parametrize("dtype", [np.uint8, np.int8])
LAYOUTS = pytest.mark.parametrize("nchw", [False, True])


def limit(dtype):
    """How far a result of `dtype` may be off."""
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == np.float32 else {"rtol": 5e-3, "atol": 5e-3}


ROIS = np.array([[1, 2, 5, 4], [0, 0, 0, 7], [3.5, 1, 9, 8.25]])
SIZES = np.array([[8, 10], [6, 12]])
OF = np.array([1, 0, 1], np.int32)
DELTAS = np.array([[1, -2, 2, 0, 9, 1, 1, -9], [0, 1, -1, 1, 9, 2, 1, 0], [-1, 0, 1, 1, 0, 9, -3, 2]]) / 8


def transformed(rois, deltas, of, sizes):
    """Boxes [n, classes * 4], one coordinate at a time."""
    result = np.empty(deltas.shape)
    for n, c, axis in itertools.product(range(len(rois)), range(deltas.shape[1] // 4), range(2)):
        low, high = rois[n][axis], rois[n][axis + 2]
        shift, growth = deltas[n][c * 4 + axis], deltas[n][c * 4 + axis + 2]
        centre, half = (low + high) / 2 + shift * (high - low), (high - low) * math.exp(growth) / 2
        for side, sign in ((axis, -1), (axis + 2, 1)):
            result[n, c * 4 + side] = min(max(centre + sign * half, 0), sizes[of[n]][1 - axis])
    return result


@FLOATS
def test_axis_aligned_bbox_transform_of_floats(evaluate, dtype):
    """Boxes are moved and scaled around their centres, for every class, and clipped to the image of their batch."""
    y = evaluate("AXIS_ALIGNED_BBOX_TRANSFORM", ROIS.astype(dtype), DELTAS.astype(dtype), OF, SIZES.astype(dtype))
    assert y.dtype == dtype
    np.testing.assert_allclose(y, transformed(ROIS, DELTAS, OF, SIZES), **limit(dtype))


@BYTES
def test_axis_aligned_bbox_transform_of_quantised(evaluate, quantised, dtype):
    """Boxes and sizes are eighths; deltas are of either 8-bit type."""
    deltas = quantised((DELTAS * 8 + 20).astype(dtype), 0.125, 20)
    rois, sizes = (quantised((x * 8).astype(np.uint16), 0.125) for x in (ROIS, SIZES))
    y = evaluate("AXIS_ALIGNED_BBOX_TRANSFORM", rois, deltas, OF, sizes)
    assert y.dtype == np.uint16
    np.testing.assert_allclose(y / 8, transformed(ROIS, DELTAS, OF, SIZES), atol=1 / 16 + 1e-5)


def floats(*arrays):
    return [np.asarray(a, np.int32 if np.asarray(a).dtype == np.int32 else np.float32) for a in arrays]


@pytest.mark.parametrize(
    ("position", "value", "reason"),
    [
        (0, [[5, 2, 1, 4]] * 3, "ends before it begins"),
        (0, [[1, 4, 5, 2]] * 3, "ends before it begins"),
        (0, [[math.nan] * 4] * 3, "ends before it begins"),
        (0, ROIS[:2], "should have"),
        (1, DELTAS[:, :6], "columns"),
        (1, DELTAS[:, 0], "2-D"),
        (2, np.array([0, 2, 0], np.int32), "batch indices 0..2"),
        (2, np.array([0, -1, 0], np.int32), "batch indices -1..0"),
        (3, SIZES[:, :1], "should have"),
    ],
)
def test_axis_aligned_bbox_transform_refuses(evaluate, position, value, reason):
    """Boxes of negative size, batches that are not there and dimensions that do not fit fail."""
    arguments = [ROIS, DELTAS, OF, SIZES]
    arguments[position] = value
    with pytest.raises(REFUSAL, match=reason):
        evaluate("AXIS_ALIGNED_BBOX_TRANSFORM", *floats(*arguments))


def test_axis_aligned_bbox_transform_refuses_other_scales(evaluate, quantised):
    """Quantised boxes are eighths and nothing else."""
    rois, sizes = (quantised(x.astype(np.uint16), 0.25) for x in (ROIS, SIZES))
    with pytest.raises(REFUSAL, match=r"scale 0\.25"):
        evaluate("AXIS_ALIGNED_BBOX_TRANSFORM", rois, quantised(DELTAS.astype(np.uint8), 1.0), OF, sizes)


def neighbours(x, size):
    """The two pixels around x on one axis, with their weights."""
    low = math.floor(x)
    return [(size - 1, 1.0)] if low >= size - 1 else [(low, 1 - (x - low)), (low + 1, x - low)]


def positions(start, stop, out, samples):
    """For each bin, where it samples."""
    step = max(stop - start, 1) / out
    count = samples or math.ceil(step)
    return [[start + step * i + step / count * (u + 0.5) for u in range(count)] for i in range(out)]


def aligned(image, rois, of, extents, ratios, samples):
    """ROI_ALIGN as [n, height, width, channels]."""
    result = np.zeros((len(rois), *extents, image.shape[3]))
    for n, (x1, y1, x2, y2) in enumerate(rois):
        rows = positions(y1 / ratios[0], y2 / ratios[0], extents[0], samples[0])
        columns = positions(x1 / ratios[1], x2 / ratios[1], extents[1], samples[1])
        for i, j in itertools.product(*map(range, extents)):
            points = list(itertools.product(rows[i], columns[j]))
            for y, x in points:
                for (r, v), (c, u) in itertools.product(neighbours(y, image.shape[1]), neighbours(x, image.shape[2])):
                    result[n, i, j] += image[of[n], r, c] * v * u / len(points)
    return result


REGIONS = np.array([[2, 3, 21, 14], [0, 0, 24, 16], [24, 16, 24, 16], [7, 1, 8, 2], [20, 0, 24, 15]])
REGION_OF = np.array([1, 0, 0, 1, 0], np.int32)
RATIOS = (2.0, 4.0)


def features(dtype, *, high=4):
    return np.random.default_rng(5).uniform(-high, high, (2, 8, 6, 3)).astype(dtype)


def laid_out(image, nchw):
    return image.transpose(0, 3, 1, 2).copy() if nchw else image


def channels_last(image, nchw):
    return image.transpose(0, 2, 3, 1) if nchw else image


@FLOATS
@LAYOUTS
@pytest.mark.parametrize(
    ("extents", "samples"), [((3, 2), (0, 0)), ((2, 3), (2, 1)), ((1, 5), (3, 0)), ((70, 1), (2, 0)), ((1, 40), (0, 0))]
)
def test_roi_align_of_floats(evaluate, *, dtype, nchw, extents, samples):
    """Bins average bilinear samples, of a given number or as many as there are pixels, up to the last pixel."""
    image, ratios = features(dtype), [dtype(r) for r in RATIOS]
    inputs = laid_out(image, nchw), REGIONS.astype(dtype), REGION_OF
    y = evaluate("ROI_ALIGN", *inputs, *extents, *ratios, *samples, nchw)
    assert y.dtype == dtype
    expected = aligned(image.astype(np.float64), REGIONS, REGION_OF, extents, RATIOS, samples)
    np.testing.assert_allclose(channels_last(y, nchw), expected, **limit(dtype))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_roi_align_keeps_infinities_apart(evaluate, value):
    """A pixel that is no finite number reaches the bins that sample it, and no other."""
    image, regions = features(np.float32), np.array([[1.3, 0.7, 21.9, 15.1]], np.float32)
    image[1, 3, 2, 1] = value
    y = evaluate("ROI_ALIGN", image, regions, REGION_OF[:1], 4, 3, *RATIOS, 0, 2, False)
    np.testing.assert_allclose(y, aligned(image, regions, REGION_OF, (4, 3), RATIOS, (0, 2)), **limit(np.float32))
    assert 0 < np.isfinite(y).sum() < y.size - 1


@BYTES
@LAYOUTS
def test_roi_align_of_quantised(evaluate, quantised, requantise, *, dtype, nchw):
    """Averages are requantised to the parameters of the output."""
    image = quantised(np.random.default_rng(6).integers(0, 100, (2, 8, 6, 3), dtype), 0.5, 20)
    expected = requantise(aligned(image.real, REGIONS, REGION_OF, (3, 2), RATIOS, (0, 2)), 0.25, -0, dtype)
    x = quantised(laid_out(image.array, nchw), 0.5, 20)
    rois = quantised((REGIONS * 8).astype(np.uint16), 0.125)
    y = evaluate("ROI_ALIGN", x, rois, REGION_OF, 3, 2, *RATIOS, 0, 2, nchw, scale=0.25)
    np.testing.assert_allclose(channels_last(y, nchw).astype(int), expected, atol=1)


def test_roi_align_refuses_scales_beyond_its_multiplier(evaluate, quantised):
    """A features' scale 255 times that of the output fails, as it does in the HAL; a finer sampling makes it fit."""
    x, rois = quantised(np.zeros((1, 4, 4, 1), np.uint8), 255.0), quantised(np.full((1, 4), 8, np.uint16), 0.125)
    arguments = "ROI_ALIGN", x, rois, np.zeros(1, np.int32), 1, 1, 1.0, 1.0
    with pytest.raises(ExecutionFailed, match="scale"):
        evaluate(*arguments, 1, 1, False, scale=1.0)
    assert evaluate(*arguments, 1, 2, False, scale=1.0) == 0


def pooled(image, rois, of, extents, ratios):
    """ROI_POOLING as [n, height, width, channels]."""

    def bins(start, stop, out, size):
        start, stop = (math.floor(x + 0.5) for x in (start, stop))
        step = max(stop - start + 1, 1) / out
        for i in range(out):
            yield range(min(math.floor(start + step * i), size), min(math.ceil(start + step * (i + 1)), size))

    result = np.zeros((len(rois), *extents, image.shape[3]))
    for n, (x1, y1, x2, y2) in enumerate(rois):
        rows = list(bins(y1 / ratios[0], y2 / ratios[0], extents[0], image.shape[1]))
        columns = list(bins(x1 / ratios[1], x2 / ratios[1], extents[1], image.shape[2]))
        for i, j in itertools.product(*map(range, extents)):
            pixels = [image[of[n], r, c] for r, c in itertools.product(rows[i], columns[j])]
            result[n, i, j] = np.max(pixels, axis=0) if pixels else 0
    return result


@FLOATS
@LAYOUTS
@pytest.mark.parametrize("extents", [(3, 2), (2, 3), (1, 5), (20, 1), (4, 4)])
def test_roi_pooling_of_floats(evaluate, *, dtype, nchw, extents):
    """Corners are rounded to pixels, bins overlap where they do not divide them, and one beyond the image is 0."""
    image, ratios = features(dtype) - dtype(5), [dtype(r) for r in RATIOS]
    inputs = laid_out(image, nchw), REGIONS.astype(dtype), REGION_OF
    y = evaluate("ROI_POOLING", *inputs, *extents, *ratios, nchw)
    expected = pooled(image, REGIONS, REGION_OF, extents, RATIOS)
    np.testing.assert_array_equal(channels_last(y, nchw), expected.astype(dtype))


@BYTES
@LAYOUTS
def test_roi_pooling_of_quantised(evaluate, quantised, *, dtype, nchw):
    """Maxima keep the parameters; an empty bin holds the zero point."""
    image = quantised(np.random.default_rng(6).integers(0, 50, (2, 8, 6, 3), dtype), 0.5, 90)
    expected = pooled(image.real, REGIONS, REGION_OF, (3, 2), RATIOS) / 0.5 + 90
    x = quantised(laid_out(image.array, nchw), 0.5, 90)
    rois = quantised((REGIONS * 8).astype(np.uint16), 0.125)
    y = evaluate("ROI_POOLING", x, rois, REGION_OF, 3, 2, *RATIOS, nchw)
    np.testing.assert_array_equal(channels_last(y, nchw), expected.astype(dtype))


REGION = [[1.0, 1.0, 3.0, 3.0]]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({1: [[3, 1, 1, 3]]}, "does not lie"),
        ({1: [[-1, 1, 1, 3]]}, "does not lie"),
        ({1: [[1, 1, 3, 5]]}, "does not lie"),
        ({1: [[1, 1, math.inf, 3]]}, "does not lie"),
        ({1: [[math.nan, 1, 3, 3]]}, "does not lie"),
        ({1: [[1e38, 1, 3e38, 3]]}, "does not lie"),
        ({1: [[1, 2, 3]]}, "should have"),
        ({2: np.array([1], np.int32)}, "batch indices 1..1"),
        ({2: np.array([-1], np.int32)}, "batch indices -1..-1"),
        ({2: np.array([0, 0], np.int32)}, "should have"),
        ({3: 0}, "output extents 0"),
        ({4: -(2**31)}, "output extents"),
        ({5: 0.0}, "ratios"),
        ({6: -1.0}, "ratios"),
        ({6: math.nan}, "ratios"),
        ({3: 2**31 - 1, 4: 2**31 - 1}, "larger than 4 GiB"),
    ],
)
@pytest.mark.parametrize(("operation", "more"), [("ROI_ALIGN", (0, 0, False)), ("ROI_POOLING", (False,))])
def test_roi_align_and_roi_pooling_refuse(evaluate, operation, more, changes, reason):
    """Regions outside the features, batches that are not there and sizes below 1 fail."""
    arguments = [np.ones((1, 4, 4, 1), np.float32), REGION, np.zeros(1, np.int32), 2, 2, 1.0, 1.0, *more]
    arguments = [changes.get(i, argument) for i, argument in enumerate(arguments)]
    arguments[1] = np.asarray(arguments[1], np.float32)
    with pytest.raises(REFUSAL, match=reason):
        evaluate(operation, *arguments)


@pytest.mark.parametrize(
    ("operation", "more"), [("ROI_POOLING", (1, 1, 1.0, 1.0, False)), ("ROI_ALIGN", (1, 1, 1.0, 1.0, 0, 0, False))]
)
@pytest.mark.parametrize(("scale", "zero_point"), [(0.25, 0), (0.125, 1)])
def test_roi_align_and_roi_pooling_refuse_other_scales(evaluate, quantised, *, operation, more, scale, zero_point):
    """Quantised regions are eighths and nothing else."""
    x, rois = quantised(np.ones((1, 4, 4, 1), np.uint8), 1.0), quantised(np.ones((1, 4), np.uint16), scale, zero_point)
    asked = {"scale": 1.0} if operation == "ROI_ALIGN" else {}
    with pytest.raises(REFUSAL, match=f"scale {scale} and zero point {zero_point}"):
        evaluate(operation, x, rois, np.zeros(1, np.int32), *more, **asked)


@pytest.mark.parametrize("samples", [(-1, 1), (0, -5), (2**31 - 1, 0)])
def test_roi_align_refuses_samples(evaluate, samples):
    """A number of samples below 0, or of hours to compute, fails."""
    region = np.array(REGION, np.float32), np.zeros(1, np.int32)
    with pytest.raises(REFUSAL, match="samples"):
        evaluate("ROI_ALIGN", np.ones((1, 4, 4, 1), np.float32), *region, 2, 2, 1.0, 1.0, *samples, False)


def model(operation, *arguments):
    """A model whose first inputs are fed, and what to feed."""
    m = ModelBuilder()
    inputs = [a for a in arguments if isinstance(a, np.ndarray)]
    handles = [m.input(a.dtype, [0] * a.ndim) for a in inputs]
    m.output(m.operation(operation, *handles, *arguments[len(inputs) :]))
    return m.build(), inputs


NO_REGION = np.zeros((0, 4), np.float32), np.zeros(0, np.int32)


@pytest.mark.parametrize(("nchw", "shape"), [(False, (0, 2, 3, 6)), (True, (0, 8, 2, 3))])
def test_roi_align_of_no_region(run_model, nchw, shape):
    """No region gives no image, with the other dimensions as ever."""
    image = np.ones((1, 8, 8, 6), np.float32)
    graph, feeds = model("ROI_ALIGN", image, *NO_REGION, 2, 3, 1.0, 1.0, 0, 0, nchw)
    assert run_model(graph, *feeds)[0].shape == shape


@pytest.mark.parametrize(
    ("operation", "more"), [("ROI_POOLING", (1, 1, 1.0, 1.0, False)), ("ROI_ALIGN", (1, 1, 1.0, 1.0, 0, 0, False))]
)
def test_roi_align_and_roi_pooling_refuse_emptiness(run_model, operation, more):
    """ROI_POOLING takes no empty tensor, ROI_ALIGN no empty image."""
    image = np.ones((1, 8, 8 if operation == "ROI_POOLING" else 0, 1), np.float32)
    graph, feeds = model(operation, image, *NO_REGION, *more)
    with pytest.raises(ExecutionFailed, match=r"empty|none"):
        run_model(graph, *feeds)


def test_axis_aligned_bbox_transform_of_no_box(run_model):
    """No box gives no box, of as many classes."""
    deltas, sizes = np.zeros((0, 12), np.float32), np.ones((1, 2), np.float32)
    graph, feeds = model("AXIS_ALIGNED_BBOX_TRANSFORM", NO_REGION[0], deltas, NO_REGION[1], sizes)
    assert run_model(graph, *feeds)[0].shape == (0, 12)


@pytest.mark.parametrize(
    ("operation", "more"), [("ROI_POOLING", (2, 2, 1.0, 1.0, False)), ("ROI_ALIGN", (2, 2, 1.0, 1.0, 0, 0, False))]
)
def test_roi_align_and_roi_pooling_stay_static(operation, more):
    """Regions that only a run will show are data: steps are built once, and read the regions anew in every run."""
    image, rois = np.arange(32, dtype=np.float32).reshape(2, 4, 4, 1), np.array([[0, 0, 1, 1]], np.float32)
    of = np.zeros(1, np.int32)
    graph, feeds = model(operation, image, rois, of, *more)
    interpreter = Interpreter(graph)
    assert interpreter.is_static
    bound = interpreter.bind(feeds)
    bound.run()
    first = bound.results[0].array.copy()
    rois += 1
    of += 1
    bound.run()
    assert (bound.results[0].array > first).all()
    of += 1
    with pytest.raises(ExecutionFailed, match=r"batch indices 2\.\.2"):
        bound.run()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_axis_aligned_bbox_transform_of_any_number(evaluate, value):
    """Whatever the numbers are, boxes or a refusal come out, without a warning."""
    for position in (0, 1, 3):
        arguments = floats(ROIS, DELTAS, OF, SIZES)
        arguments[position][-1, -1] = value
        refused = pytest.raises(REFUSAL, match="ends before it begins")
        with refused if position == 0 and not value > 0 else contextlib.nullcontext():
            assert evaluate("AXIS_ALIGNED_BBOX_TRANSFORM", *arguments).shape == DELTAS.shape
