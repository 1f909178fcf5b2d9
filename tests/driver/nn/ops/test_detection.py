"""GENERATE_PROPOSALS and DETECTION_POSTPROCESSING against definitions of one box at a time."""

import contextlib
import itertools
import math

import numpy as np
import pytest
from boxes import overlap

from driver.nn import ExecutionFailed, Interpreter, InvalidModel, ModelBuilder

REFUSAL = (ExecutionFailed, InvalidModel)
FLOATS = pytest.mark.parametrize("dtype", [np.float32, np.float16])
BYTES = pytest.mark.parametrize("dtype", [np.uint8, np.int8])
LAYOUTS = pytest.mark.parametrize("nchw", [False, True])


def hard_nms(boxes, scores, members, most, threshold):
    """The members that no better one overlaps, best first."""
    left, taken = sorted(members, key=lambda i: -scores[i]), []
    while left and len(taken) != most:
        best = left.pop(0)
        taken.append(best)
        left = [i for i in left if overlap(boxes[best], boxes[i]) < threshold]
    return taken


def proposed(scores, deltas, anchors, sizes, strides, before, after, iou, smallest):
    """GENERATE_PROPOSALS: (score, box, batch) of every proposal."""
    emitted = []
    for b, (height, width) in enumerate(sizes):
        boxes, flat = [], scores[b].ravel()
        for y, x, a in itertools.product(*map(range, scores.shape[1:])):
            corners = [anchors[a, i] + (x * strides[1], y * strides[0])[i % 2] for i in range(4)]
            moves, box = deltas[b, y, x, a * 4 : a * 4 + 4], [0.0] * 4
            for i in range(2):
                size = corners[i + 2] - corners[i]
                centre = (corners[i] + corners[i + 2]) / 2 + moves[i] * size
                half = size * math.exp(moves[i + 2]) / 2
                box[i], box[i + 2] = (min(max(c, 0), (width, height)[i]) for c in (centre - half, centre + half))
            boxes.append(box)
        best = sorted(range(len(flat)), key=lambda i: -flat[i])[: before if before > 0 else None]
        best = [
            i
            for i in best
            if all(boxes[i][k + 2] - boxes[i][k] > smallest for k in range(2))
            and (boxes[i][0] + boxes[i][2]) / 2 < width
            and (boxes[i][1] + boxes[i][3]) / 2 < height
        ]
        emitted += [(flat[i], boxes[i], b) for i in hard_nms(boxes, flat, best, after, iou)]
    return [np.array(column) for column in zip(*emitted, strict=True)]


ANCHORS = np.array([[-4.0, -4, 4, 4], [-2, -6, 2, 6], [-7, -3, 7, 3]])
IMAGES = np.array([[40.0, 50], [30, 20]])


def predicted(seed=3):
    rng = np.random.default_rng(seed)
    scores = rng.permutation(2 * 4 * 5 * 3).reshape(2, 4, 5, 3)
    return scores, rng.integers(-24, 24, (2, 4, 5, 12))


def laid_out(image, nchw):
    return image.transpose(0, 3, 1, 2).copy() if nchw else image


COUNTS = pytest.mark.parametrize(("before", "after"), [(0, -1), (25, 6), (-1, 10), (1000, 1000)])


@FLOATS
@LAYOUTS
@COUNTS
def test_generate_proposals_of_floats(evaluate, *, dtype, nchw, before, after):
    """Anchors of every cell are moved, the best kept, small ones dropped, and of those that overlap the best stays."""
    scores, deltas = predicted()
    inputs = [x.astype(dtype) for x in (laid_out(scores / 128, nchw), laid_out(deltas / 32, nchw), ANCHORS, IMAGES)]
    strides, reals = (dtype(8), dtype(10)), (dtype(0.3), dtype(3.1))
    found = evaluate("GENERATE_PROPOSALS", *inputs, *strides, before, after, *reals, nchw)
    expected = proposed(scores / 128, deltas / 32, ANCHORS, IMAGES, (8, 10), before, after, 0.3, 3.1)
    for y, x in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            y, x, **({"rtol": 1e-5, "atol": 1e-5} if dtype == np.float32 else {"rtol": 1e-3, "atol": 1e-2})
        )


@BYTES
@LAYOUTS
def test_generate_proposals_of_quantised(evaluate, quantised, *, dtype, nchw):
    """Anchors are signed eighths, images and proposals unsigned ones, scores keep their parameters."""
    scores, deltas = predicted()
    zero_point = 0 if dtype == np.uint8 else -100
    inputs = (
        quantised(laid_out(scores + zero_point, nchw).astype(dtype), 1 / 128, zero_point),
        quantised(laid_out(deltas + 30, nchw).astype(dtype), 1 / 32, 30),
        quantised((ANCHORS * 8).astype(np.int16), 0.125),
        quantised((IMAGES * 8).astype(np.uint16), 0.125),
    )
    found = evaluate("GENERATE_PROPOSALS", *inputs, 8.0, 10.0, 40, 12, 0.3, 3.1, nchw)
    expected = proposed(scores / 128, deltas / 32, ANCHORS, IMAGES, (8, 10), 40, 12, 0.3, 3.1)
    np.testing.assert_array_equal(found[0].astype(int) - zero_point, expected[0] * 128)
    np.testing.assert_allclose(found[1] / 8, expected[1], atol=1 / 16 + 1e-5)
    np.testing.assert_array_equal(found[2], expected[2])


def proposal_arguments(changes=()):
    scores, deltas = predicted()
    inputs = [np.asarray(x, np.float32) for x in (scores / 128, deltas / 32, ANCHORS, IMAGES)]
    return [dict(changes).get(i, a) for i, a in enumerate([*inputs, 8.0, 10.0, 40, 12, 0.3, 3.1, False])]


@pytest.mark.parametrize("changes", [{7: 0}, {9: 1e9}, {9: math.nan}, {0: np.full((2, 4, 5, 3), np.nan, np.float32)}])
def test_generate_proposals_leaves_nothing(evaluate, changes):
    """None wanted, none large enough or none with a score: the first dimension of every output is 0."""
    found = evaluate("GENERATE_PROPOSALS", *proposal_arguments(changes))
    assert [y.shape for y in found] == [(0,), (0, 4), (0,)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({1: np.zeros((2, 4, 5, 8), np.float32)}, "should have"),
        ({2: np.zeros((2, 4), np.float32)}, "should have"),
        ({3: np.ones((1, 2), np.float32)}, "should have"),
        ({2: -ANCHORS.astype(np.float32)}, "ends before it begins"),
        ({4: math.nan}, "ends before it begins"),
    ],
)
def test_generate_proposals_refuses(evaluate, changes, reason):
    """Anchors of negative size, strides that are no number and dimensions that do not fit fail."""
    with pytest.raises(REFUSAL, match=reason):
        evaluate("GENERATE_PROPOSALS", *proposal_arguments(changes))


@BYTES
def test_generate_proposals_checks_scales_of_the_unsigned_form_only(evaluate, quantised, dtype):
    """Anchors and sizes that are no eighths fail with uint8 scores; the HAL lets them pass with int8 scores."""
    inputs = (
        quantised(np.full((1, 1, 1, 1), 5, dtype), 1.0),
        quantised(np.zeros((1, 1, 1, 4), dtype), 1.0),
        quantised(np.array([[0, 0, 8, 12]], np.int16), 0.5),
        quantised(np.array([[10, 10]], np.uint16), 1.0),
    )
    arguments = ("GENERATE_PROPOSALS", *inputs, 1.0, 1.0, -1, -1, 0.5, 0.0, False)
    if dtype == np.uint8:
        with pytest.raises(REFUSAL, match=r"scale 0\.5"):
            evaluate(*arguments)
    else:
        np.testing.assert_array_equal(evaluate(*arguments)[1] / 8, [[0, 0, 4, 6]])


def decoded(deltas, anchors, scales):
    """Boxes (y1, x1, y2, x2)."""
    result = np.empty((len(anchors), 4))
    for n, i in itertools.product(range(len(anchors)), range(2)):
        centre = anchors[n, i] + anchors[n, i + 2] * deltas[n, i] / scales[i]
        half = anchors[n, i + 2] * math.exp(deltas[n, i + 2] / scales[i + 2]) / 2
        result[n, i], result[n, i + 2] = centre - half, centre + half
    return result


def detected(scores, boxes, regular, most, per_box, per_class, low, iou):
    """DETECTION_POSTPROCESSING of one image: (anchor, class), best first."""
    classes = range(1, scores.shape[1])
    if regular:
        found = []
        for c in classes:
            members = [n for n in range(len(boxes)) if scores[n, c] > low]
            found += [(n, c) for n in hard_nms(boxes, scores[:, c], members, per_class, iou)]
        return sorted(found, key=lambda f: -scores[f])[:most]
    best = scores[:, 1:].max(axis=1)
    members = [n for n in range(len(boxes)) if best[n] > low]
    taken = hard_nms(boxes, best, members, most, iou)
    return [(n, c) for n in taken for c in sorted(classes, key=lambda c: -scores[n, c])[:per_box]]


SCALES = (10.0, 8.0, 5.0, 4.0)


def anchored(seed=4, n=12, classes=4):
    rng = np.random.default_rng(seed)
    scores = rng.permutation(2 * n * classes).reshape(2, n, classes) / 128
    deltas = rng.integers(-16, 16, (2, n, 5)) / 4
    return scores, deltas, np.concatenate((rng.integers(0, 64, (n, 2)), rng.integers(8, 40, (n, 2))), axis=1) / 64


@FLOATS
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("regular", [False, True])
@pytest.mark.parametrize(("most", "per_box", "per_class"), [(5, 2, 2), (30, 9, 100), (3, 1, 1)])
def test_detection_postprocessing(evaluate, *, dtype, labelled, regular, most, per_box, per_class):
    """Slots hold the best boxes, of every class or of all of them, then zeros; labels count the background or not."""
    scores, deltas, anchors = anchored()
    inputs = [x.astype(dtype) for x in (scores, deltas, anchors)]
    scales, thresholds = [dtype(s) for s in SCALES], [dtype(x) for x in (0.25, 0.375)]
    options = regular, most, per_box, per_class, *thresholds, labelled
    found = evaluate("DETECTION_POSTPROCESSING", *inputs, *scales, *options)
    slots = most if regular else most * per_box
    assert [y.shape for y in found] == [(2, slots), (2, slots, 4), (2, slots), (2,)]
    for b in range(2):
        boxes = decoded(deltas[b], anchors, SCALES)
        expected = detected(scores[b], boxes, regular, most, per_box, per_class, 0.25, 0.375)
        count = len(expected)
        assert found[3][b] == count > 0
        np.testing.assert_allclose(found[0][b, :count], [scores[b][at] for at in expected], rtol=1e-3)
        limit = 1e-5 if dtype == np.float32 else 2e-3
        np.testing.assert_allclose(found[1][b, :count], [boxes[n] for n, _ in expected], rtol=limit, atol=limit)
        np.testing.assert_array_equal(found[2][b, :count], [c - (not labelled) for _, c in expected])
        assert not any(y[b, count:].any() for y in found[:3])


def detection_arguments(changes=(), regular=True):
    inputs = [x.astype(np.float32) for x in anchored()]
    arguments = [*inputs, *SCALES, regular, 5, 2, 3, 0.1, 0.5, False]
    return [dict(changes).get(i, argument) for i, argument in enumerate(arguments)]


@pytest.mark.parametrize(
    ("changes", "regular", "reason"),
    [
        ({0: np.ones((2, 12, 1), np.float32)}, True, "background"),
        ({1: np.ones((2, 12, 3), np.float32)}, True, "should have"),
        ({2: np.ones((11, 4), np.float32)}, True, "should have"),
        ({3: 0.0}, True, "scales"),
        ({6: math.nan}, True, "scales"),
        ({8: 0}, True, "maxima"),
        ({10: 0}, True, "maxima"),
        ({9: 0}, False, "maxima"),
        ({11: -1.0}, True, "thresholds"),
        ({12: math.nan}, False, "thresholds"),
        ({8: 2**15, 9: 2**16}, False, "larger than 4 GiB"),
        ({8: 2**31 - 1, 9: 2**31 - 1}, False, "dimensions"),
    ],
)
def test_detection_postprocessing_refuses(evaluate, changes, regular, reason):
    """Scales and maxima that are not above 0, thresholds below it and dimensions that do not fit fail."""
    with pytest.raises(REFUSAL, match=reason):
        evaluate("DETECTION_POSTPROCESSING", *detection_arguments(changes, regular))


@pytest.mark.parametrize("regular", [False, True])
def test_detection_postprocessing_ignores_the_other_maximum(evaluate, regular):
    """Of the two maxima of classes only the one of the kind of suppression counts."""
    assert evaluate("DETECTION_POSTPROCESSING", *detection_arguments({9 if regular else 10: 0}, regular))[3].all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("GENERATE_PROPOSALS", proposal_arguments()),
        ("DETECTION_POSTPROCESSING", detection_arguments(regular=True)),
        ("DETECTION_POSTPROCESSING", detection_arguments(regular=False)),
    ],
)
def test_generate_proposals_and_detection_postprocessing_of_any_number(evaluate, operation, arguments, value):
    """Whatever floats come in, results or a refusal come out, without a warning."""
    for position, argument in enumerate(arguments):
        if not isinstance(argument, np.ndarray) or argument.dtype != np.float32:
            continue
        changed = argument.copy()
        changed.reshape(-1)[::3] = value
        with contextlib.suppress(*REFUSAL):
            found = evaluate(operation, *arguments[:position], changed, *arguments[position + 1 :])
            assert len({len(y) for y in found}) == 1


def test_detection_postprocessing_stays_static():
    """The number of slots is known beforehand, so that steps are built once."""
    m = ModelBuilder()
    handles = [m.input("float32", a.shape) if isinstance(a, np.ndarray) else a for a in detection_arguments()]
    m.output(*m.operation("DETECTION_POSTPROCESSING", *handles))
    assert Interpreter(m.build()).is_static
