"""BOX_WITH_NMS_LIMIT against a definition of one box at a time."""

import contextlib
import itertools
import math

import numpy as np
import pytest
from boxes import overlap

from driver.nn import ExecutionFailed, InvalidModel, ModelBuilder
from driver.nn.ops import suppression

REFUSAL = (ExecutionFailed, InvalidModel)
FLOATS = pytest.mark.parametrize("dtype", [np.float32, np.float16])
BYTES = pytest.mark.parametrize("dtype", [np.uint8, np.int8])


def boxes_of(seed, n, side=64):
    """Boxes with corners on eighths."""
    rng = np.random.default_rng(seed)
    low = rng.integers(0, side * 6, (n, 2))
    return np.concatenate((low, low + rng.integers(8, side * 3, (n, 2))), axis=1) / 8


def limited(scores, boxes, of, low, most, kernel, iou, sigma, lowest):
    """BOX_WITH_NMS_LIMIT: (score, box, class, batch) for every box that is left."""
    factor = [
        lambda o: float(o < iou),
        lambda o: 1.0 if o < iou else 1 - o,
        lambda o: math.exp(-(o**2) / sigma),
    ][kernel]
    emitted = []
    for batch, run in itertools.groupby(range(len(of)), key=lambda n: of[n]):
        rows, found = tuple(run), []
        for c in range(1, scores.shape[1]):
            left, taken = {n: scores[n, c] for n in rows if scores[n, c] > low}, []
            while left and len(taken) != most:
                best = max(left, key=left.get)
                taken.append((left.pop(best), c, best))
                weakened = {n: s * factor(overlap(boxes[best, c], boxes[n, c])) for n, s in left.items()}
                left = {n: s for n, s in weakened.items() if not s < lowest}
            found += taken
        found = sorted(found, key=lambda f: -f[0])[: most if most >= 0 else None]
        emitted += [(s, boxes[n, c], c, batch) for s, c, n in sorted(found, key=lambda f: (f[1], -f[0]))]
    return [np.array(column) for column in zip(*emitted, strict=True)] or [np.empty(0)] * 4


def scored(seed=1, n=14, classes=4):
    """Scores without ties, boxes [n, classes, 4] and batch indices in runs."""
    scores = np.random.default_rng(seed).permutation(n * classes).reshape(n, classes) / 64
    of = np.array([5] * (n // 2) + [2] * (n - n // 2 - 1) + [5], np.int32)
    return scores, boxes_of(seed, n * classes).reshape(n, classes, 4), of


LIMITS = pytest.mark.parametrize("most", [-1, 3, 8, 0])
KERNELS = pytest.mark.parametrize(
    ("kernel", "lowest"), [(0, 0.1), (0, 0.0), (1, 0.25), (2, 0.25)], ids=["hard", "hard to 0", "linear", "gaussian"]
)


@FLOATS
@LIMITS
@KERNELS
def test_box_with_nms_limit_of_floats(evaluate, *, dtype, most, kernel, lowest):
    """Per run of a batch index and class, the best stay and weaken what they overlap; then the best of the run."""
    scores, boxes, of = scored()
    reals = [dtype(x) for x in (0.125, 0.25, 0.5, lowest)]
    expected = limited(scores, boxes, of, 0.125, most, kernel, 0.25, 0.5, float(dtype(lowest)))
    inputs = scores.astype(dtype), boxes.reshape(len(of), -1).astype(dtype), of
    found = evaluate("BOX_WITH_NMS_LIMIT", *inputs, reals[0], most, kernel, *reals[1:])
    for y, x in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, x.reshape(y.shape), rtol=1e-5 if dtype == np.float32 else 2e-3)


@BYTES
@KERNELS
def test_box_with_nms_limit_of_quantised(evaluate, quantised, requantise, *, dtype, kernel, lowest):
    """Boxes come out as they went in, scores with the parameters that they had."""
    scores, boxes, of = scored()
    zero_point = 10 if dtype == np.uint8 else -100
    inputs = (
        quantised((scores * 64 + zero_point).astype(dtype), 1 / 64, zero_point),
        quantised((boxes * 8).astype(np.uint16).reshape(len(of), -1), 0.125),
    )
    found = evaluate("BOX_WITH_NMS_LIMIT", *inputs, of, 0.125, 8, kernel, 0.25, 0.5, lowest)
    expected = limited(scores, boxes, of, 0.125, 8, kernel, 0.25, 0.5, float(np.float32(lowest)))
    np.testing.assert_array_equal(found[0], requantise(expected[0], 1 / 64, zero_point, dtype))
    np.testing.assert_array_equal(found[1] / 8, expected[1])
    for y, x in zip(found[2:], expected[2:], strict=True):
        np.testing.assert_array_equal(y, x)


def nms_arguments(changes=()):
    scores, boxes, of = scored()
    arguments = [scores.astype(np.float32), boxes.reshape(len(of), -1).astype(np.float32), of, 0.1, 5, 0, 0.5, 0.5, 0.1]
    return [dict(changes).get(i, argument) for i, argument in enumerate(arguments)]


@pytest.mark.parametrize("rows", [0, 1, 14])
def test_box_with_nms_limit_leaves_nothing(run_model, rows):
    """Without a score above the threshold, or without a row, the first dimension of every output is 0."""
    arguments = nms_arguments({3: 9.0})
    m = ModelBuilder()
    handles = [m.input(a.dtype, [0, *a.shape[1:]]) for a in arguments[:3]]
    m.output(*m.operation("BOX_WITH_NMS_LIMIT", *handles, *arguments[3:]))
    found = run_model(m.build(), *(a[:rows] for a in arguments[:3]))
    assert [y.shape for y in found] == [(0,), (0, 4), (0,), (0,)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({5: 3}, "kernel 3"),
        ({5: -1}, "kernel -1"),
        ({0: np.ones((14, 1), np.float32)}, "background"),
        ({1: np.ones((14, 12), np.float32)}, "should have"),
        ({2: np.zeros(13, np.int32)}, "should have"),
        ({1: np.full((14, 16), np.nan, np.float32)}, "ends before it begins"),
        ({1: -np.arange(224, dtype=np.float32).reshape(14, 16)}, "ends before it begins"),
    ],
)
def test_box_with_nms_limit_refuses(evaluate, changes, reason):
    """Kernels that do not exist, boxes of negative size and dimensions that do not fit fail."""
    with pytest.raises(REFUSAL, match=reason):
        evaluate("BOX_WITH_NMS_LIMIT", *nms_arguments(changes))


@KERNELS
def test_box_with_nms_limit_of_many(evaluate, monkeypatch, kernel, lowest):
    """Overlaps are computed all at once, or one box at a time when there are many: the results are the same."""
    arguments = nms_arguments({4: -1, 5: kernel, 6: 0.25, 8: lowest})
    expected = evaluate("BOX_WITH_NMS_LIMIT", *arguments)
    monkeypatch.setattr(suppression, "_FEW", 3)
    for y, x in zip(evaluate("BOX_WITH_NMS_LIMIT", *arguments), expected, strict=True):
        np.testing.assert_array_equal(y, x)


def test_box_with_nms_limit_refuses_other_scales(evaluate, quantised):
    """Quantised boxes are eighths and nothing else."""
    scores, boxes = quantised(np.ones((1, 2), np.uint8), 1.0), quantised(np.ones((1, 8), np.uint16), 1.0)
    with pytest.raises(REFUSAL, match=r"scale 1\.0"):
        evaluate("BOX_WITH_NMS_LIMIT", scores, boxes, np.zeros(1, np.int32), 0.1, 5, 0, 0.5, 0.5, 0.1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("kernel", [0, 1, 2])
def test_box_with_nms_limit_of_any_number(evaluate, kernel, value):
    """Whatever floats come in, results or a refusal come out, without a warning."""
    arguments = nms_arguments({4: -1, 5: kernel, 7: 0.0})
    for position, argument in enumerate(arguments):
        if not isinstance(argument, np.ndarray) or argument.dtype != np.float32:
            continue
        changed = argument.copy()
        changed.reshape(-1)[::3] = value
        with contextlib.suppress(*REFUSAL):
            found = evaluate("BOX_WITH_NMS_LIMIT", *arguments[:position], changed, *arguments[position + 1 :])
            assert len({len(y) for y in found}) == 1
