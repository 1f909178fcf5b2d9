"""Non-maximum suppression: of boxes that overlap, the one with the best score stays.

BOX_WITH_NMS_LIMIT suppresses the boxes that it gets, DETECTION_POSTPROCESSING those that it decodes from anchors, and
GENERATE_PROPOSALS anchors at every cell of a feature map, moved by what was predicted there.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ..blocks import Look, each, pieces, reduce
from ..operation import Array, Call, OperationType, Signature, Tensor, copy_results, declared, same_as_input
from ..types import Dimensions, OperandType
from .boxes import (
    BLOCK,
    EIGHTH,
    eighths,
    expect_eighths,
    expect_ordered,
    expect_rank,
    expect_shape,
    private,
    reals,
    stored,
    transform,
)
from .window import NHWC_FROM_NCHW, image_shape, stored_shape

Weaken = Callable[[Array, Array], tuple[Array, Array]]
"""From the scores that are left and their overlaps with the selected box to new scores, and which of them stay."""

MOST_BOXES = 1 << 18
"""Boxes of one image, or of one class, that one call of numpy sorts in tens of milliseconds; more are refused."""

MOST_SCORES = 1 << 21
"""Scores that are looked through at once."""

_FEW = 512
"""Boxes whose overlaps are quicker computed all at once than one box at a time."""

_HARD, _LINEAR, _GAUSSIAN = range(3)


def overlap(box: Array, boxes: Array) -> Array:
    """Intersection over union of boxes [4, ...] that are broadcast; 0 where there is no area at all."""
    sides = np.minimum(box[2:], boxes[2:])
    sides -= np.maximum(box[:2], boxes[:2])
    np.maximum(sides, 0, out=sides)
    common = sides[0] * sides[1]
    union = _area(box) + _area(boxes) - common
    ratio: Array = np.divide(common, union, out=common)
    ratio[np.isnan(ratio)] = 0
    return ratio


def _area(boxes: Array) -> Array:
    sides = boxes[2:] - boxes[:2]
    return np.asarray(sides[0] * sides[1])


def suppress(look: Look, boxes: Array, scores: Array, limit: int, weaken: Weaken) -> tuple[Array, Array]:
    """Take the box with the best score, weaken those that overlap it, and so on until none is left.

    boxes: [n, 4]. scores: [n]. limit: how many to take at most; negative: all. Returns the indices taken, in this
    order, and their scores then. Raise ValueError for more than MOST_BOXES.
    """
    if len(scores) > MOST_BOXES:
        raise ValueError(f"{len(scores)} boxes to choose from are more than {MOST_BOXES}")
    indices, corners = np.arange(len(scores)), np.ascontiguousarray(boxes.T)
    taken: list[int] = []
    best_scores: list[float] = []
    while indices.size and len(taken) != limit:
        left, is_few = np.ones(indices.size, bool), indices.size <= _FEW
        table = overlap(corners[:, :, None], corners[:, None]) if is_few else None
        while len(taken) != limit and np.count_nonzero(left) > (0 if is_few else left.size // 2):
            best = int(np.where(left, scores, -np.inf).argmax())
            best = best if left[best] else int(left.argmax())  # when nothing is above -inf
            taken.append(int(indices[best]))
            best_scores.append(float(scores[best]))
            if table is None:
                look()
            row = overlap(corners[:, best, None], corners) if table is None else table[best]
            scores, stays = weaken(scores, row)
            left &= stays
            left[best] = False
        indices, corners, scores = indices[left], corners[:, left], scores[left]
        look()
    return np.array(taken, np.intp), np.array(best_scores, np.float32)


def hard(threshold: float) -> Weaken:
    """Drop whatever overlaps by `threshold` or more, and leave the other scores alone."""
    return lambda scores, overlaps: (scores, overlaps < threshold)


def _weaken(kernel: int, threshold: float, sigma: float, lowest: float) -> Weaken:
    """Multiply scores by the kernel of their overlap, and drop those that fall below `lowest`."""

    def factors(overlaps: Array) -> Array:
        if kernel == _GAUSSIAN:
            return np.asarray(np.exp(-(overlaps**2) / np.float32(sigma)))
        return np.where(overlaps < threshold, np.float32(1), 1 - overlaps if kernel == _LINEAR else np.float32(0))

    def weaken(scores: Array, overlaps: Array) -> tuple[Array, Array]:
        weakened = scores * factors(overlaps)
        return weakened, ~(weakened < lowest)

    if kernel not in (_HARD, _LINEAR, _GAUSSIAN):
        raise ValueError(f"suppression kernel {kernel} does not exist; use 0 (hard), 1 (linear) or 2 (gaussian)")
    return weaken


@np.errstate(all="ignore")
def _limited_shape(call: Call) -> Sequence[Dimensions]:
    n, classes = expect_rank(call, 0, 2)
    if classes < 2:
        raise ValueError(f"input 0 has {classes} classes; it needs the background and one more at least")
    if n * classes > MOST_SCORES:
        raise ValueError(f"{n} boxes of {classes} classes are more than {MOST_SCORES} scores")
    expect_shape(call, 1, n, classes * 4)
    expect_shape(call, 2, n)
    expect_eighths(call, 1)
    weaken = _weaken(call.integer(5), call.real(6), call.real(7), call.real(8))
    scores, boxes = call.tensor(0), call.tensor(1)
    raw = private(boxes).reshape(n, classes, 4)
    corners, batch = reals(raw, boxes), private(call.tensor(2))
    expect_ordered(corners)
    runs = np.cumsum(np.diff(batch, prepend=batch[:1]) != 0)
    rule = call.integer(4), weaken
    found = _candidates(call.look, reals(scores.data, scores), corners, runs, threshold=call.real(3), rule=rule)
    rows, labels, weakened = _limited(*found, runs, call.integer(4))
    results = (stored(weakened, scores), raw[rows, labels], labels.astype(np.int32), batch[rows])
    call.results = results
    return [result.shape for result in results]


def _candidates(
    look: Look, scores: Array, boxes: Array, runs: Array, threshold: float, *, rule: tuple[int, Weaken]
) -> tuple[Array, Array, Array]:
    """Return what suppression by `rule` leaves of each class of each run of rows: rows, classes and scores."""
    rows, labels = np.nonzero(scores[:, 1:] > threshold)
    labels += 1
    if rows.size > MOST_BOXES:
        raise ValueError(f"{rows.size} boxes to choose from are more than {MOST_BOXES}")
    look()
    group = runs[rows] * scores.shape[1] + labels
    order = np.argsort(group, kind="stable")
    ends = np.flatnonzero(np.diff(group[order])) + 1
    chosen, kept = [np.empty(0, np.intp)], [np.empty(0, np.float32)]
    for members in np.split(order, ends) if order.size else ():
        at = rows[members], labels[members]
        look()
        taken, weakened = suppress(look, boxes[at], scores[at], *rule)
        chosen.append(members[taken])
        kept.append(weakened)
    found = np.concatenate(chosen)
    return rows[found], labels[found], np.concatenate(kept)


def _limited(rows: Array, labels: Array, scores: Array, runs: Array, limit: int) -> tuple[Array, Array, Array]:
    """Return the best `limit` of every run, ordered by run, then class, then score."""
    if limit >= 0:
        best = np.lexsort((-scores, runs[rows]))
        of = runs[rows[best]]
        best = best[np.arange(len(best)) - np.searchsorted(of, of) < limit]
        rows, labels, scores = rows[best], labels[best], scores[best]
    order = np.lexsort((-scores, labels, runs[rows]))
    return rows[order], labels[order], scores[order]


Chosen = tuple[Array, Array]
"""The anchors and the classes of the detections, best first."""

Choice = Callable[[Look, Array, Array], Chosen]
"""From the scores [n, classes] and the boxes [n, 4] of an image to its detections."""


def _detection_shape(call: Call) -> Sequence[Dimensions]:
    (batches, n, classes), (*_, length) = expect_rank(call, 0, 3), expect_rank(call, 1, 3)
    expect_shape(call, 1, batches, n, max(length, 4))
    expect_shape(call, 2, n, 4)
    if classes < 2:
        raise ValueError(f"input 0 has {classes} classes; it needs the background and one more at least")
    if n > MOST_BOXES or classes > MOST_BOXES:
        raise ValueError(f"{n} anchors and {classes} classes: each has to be {MOST_BOXES} at most")
    is_regular, detections, per_detection, per_class = (call.integer(i) for i in (7, 8, 9, 10))
    scales, thresholds = [call.real(i) for i in (3, 4, 5, 6)], [call.real(i) for i in (11, 12)]
    if not all(s > 0 for s in scales) or not all(t >= 0 for t in thresholds):
        raise ValueError(f"scales {scales} have to be above 0, thresholds {thresholds} not below")
    if detections < 1 or (per_class if is_regular else per_detection) < 1:
        raise ValueError(
            f"maxima of {detections} detections, {per_detection} classes of each and {per_class} of each class "
            "have to be above 0"
        )
    slots = detections if is_regular else detections * per_detection
    return [(batches, slots), (batches, slots, 4), (batches, slots), (batches,)]


def _decode(deltas: Array, anchors: Array, scales: Array) -> Array:
    """Return the boxes (y1, x1, y2, x2) from `deltas` [n, 4] and `anchors` [n, 4], both as (y, x, height, width)."""
    parts = deltas / scales
    centre = anchors[:, :2] + anchors[:, 2:] * parts[:, :2]
    half = anchors[:, 2:] * np.exp(parts[:, 2:]) / 2
    return np.concatenate((centre - half, centre + half), axis=1)


def _regular(
    look: Look, scores: Array, boxes: Array, *, best: int, per_class: int, threshold: float, iou: float
) -> Chosen:
    """Suppression within each class, then the best of all classes: anchors and classes."""
    anchors, labels = [np.empty(0, np.intp)], [np.empty(0, np.intp)]
    for label in range(1, scores.shape[1]):
        look()
        members = np.flatnonzero(scores[:, label] > threshold)
        taken, _ = suppress(look, boxes[members], scores[members, label], per_class, weaken=hard(iou))
        anchors.append(members[taken])
        labels.append(np.full(len(taken), label, np.intp))
    rows, columns = np.concatenate(anchors), np.concatenate(labels)
    order = np.argsort(-scores[rows, columns], kind="stable")[:best]
    return rows[order], columns[order]


def _fast(look: Look, scores: Array, boxes: Array, *, best: int, per_box: int, threshold: float, iou: float) -> Chosen:
    """Suppression between anchors by their best class, then the best classes of each: anchors and classes."""
    highest = np.empty((len(scores), 1), np.float32)
    reduce(look, np.maximum, scores[:, 1:], (1,), out=highest)
    highest = highest[:, 0]
    members = np.flatnonzero(highest > threshold)
    taken, _ = suppress(look, boxes[members], highest[members], best, weaken=hard(iou))
    rows = members[taken]
    labels = np.empty((len(rows), min(per_box, scores.shape[1] - 1)), np.intp)
    for (some,) in pieces(rows.shape, max(1, BLOCK // scores.shape[1])):
        look()
        labels[some] = 1 + np.argsort(-scores[rows[some], 1:], axis=1, kind="stable")[:, :per_box]
    return np.repeat(rows, labels.shape[1]), labels.reshape(-1)


def _detect(
    look: Look, inputs: Sequence[Tensor], outputs: Sequence[Tensor], scales: Array, choose: Choice, *, first: int
) -> None:
    scores, deltas = (tensor.data for tensor in inputs[:2])
    anchors = reals(inputs[2].data, inputs[2])
    for out in outputs:
        each(look, np.copyto, out.data, 0)
    for b, (raw_scores, image_deltas) in enumerate(zip(scores, deltas, strict=True)):
        image_scores = np.empty(raw_scores.shape, np.float32)
        each(look, np.copyto, image_scores, raw_scores)
        boxes = _decode(reals(image_deltas[:, :4], inputs[1]), anchors, scales)
        rows, labels = choose(look, image_scores, boxes)
        found = (image_scores[rows, labels], boxes[rows], labels - first, len(rows))
        for out, values in zip(outputs[:3], found[:3], strict=True):
            out.data[b, : len(rows)] = values
        outputs[3].data[b] = len(rows)


def _detection(call: Call) -> None:
    is_regular, detections, per_detection, per_class = (call.integer(i) for i in (7, 8, 9, 10))
    limits = {"best": detections, "threshold": call.real(11), "iou": call.real(12)}
    choose = partial(_regular, per_class=per_class) if is_regular else partial(_fast, per_box=per_detection)
    scales = np.array([call.real(i) for i in (3, 4, 5, 6)], np.float32)
    inputs = [call.tensor(i) for i in range(3)]
    choose, first = partial(choose, **limits), 0 if call.flag(13) else 1
    call.step(_detect, call.look, inputs, call.outputs, scales, choose, first=first)


def _check_proposals(call: Call, cells: Dimensions) -> None:
    """Refuse dimensions that do not go with scores for `cells` [batches, height, width, anchors]."""
    batches, height, width, anchors = cells
    if height * width * anchors > MOST_BOXES:
        raise ValueError(f"{anchors} anchors at {height} x {width} cells are more than {MOST_BOXES} boxes")
    expect_shape(call, 1, *stored_shape(batches, height, width, anchors * 4, nchw=call.flag(10)))
    expect_shape(call, 2, anchors, 4)
    expect_shape(call, 3, batches, 2)
    tensor = call.tensor(2)
    if call.tensor(0).type == OperandType.TENSOR_QUANT8_ASYMM:  # the HAL leaves the parameters to the signed form
        expect_eighths(call, 2, 3)
    elif not all(tensor.scale > 0 for tensor in (tensor, call.tensor(3)) if tensor.type.is_quantised):
        raise ValueError("quantised anchors and image sizes need a scale above 0")


@np.errstate(all="ignore")
def _proposed_shape(call: Call) -> Sequence[Dimensions]:
    cells = image_shape(call.shape(0), call.flag(10))
    _check_proposals(call, cells)
    strides = np.array([call.real(5), call.real(4)] * 2, np.float32)
    scores, deltas = (_by_cell(call, index) for index in (0, 1))
    anchors = _anchors(reals(call.array(2), call.tensor(2)), cells[1], cells[2], strides)
    sizes = reals(call.array(3), call.tensor(3))
    call.look()
    found = [_propose(call, *image, anchors) for image in zip(scores, deltas, sizes[:, None], strict=True)]
    rows = [np.full(len(best), b, np.int32) for b, (best, _) in enumerate(found)]
    best, boxes = (np.concatenate(parts) for parts in zip(*found, strict=True))
    proposed = replace(call.outputs[1], scale=EIGHTH, zero_point=0)
    results = (stored(best, call.tensor(0)), stored(boxes, proposed), np.concatenate(rows))
    call.results = results
    return [result.shape for result in results]


def _by_cell(call: Call, index: int) -> Array:
    """Input `index` as float32 [batches, height * width, values of a cell]."""
    data = call.array(index)
    ordered = data.transpose(NHWC_FROM_NCHW) if call.flag(10) else data
    return reals(ordered, call.tensor(index)).reshape(data.shape[0], -1, ordered.shape[3])


def _anchors(anchors: Array, height: int, width: int, strides: Array) -> Array:
    """Return the anchors [anchors, 4] of all cells: [height * width * anchors, 4]."""
    y, x = np.mgrid[:height, :width].astype(np.float32)
    offsets = np.stack((x, y, x, y), axis=-1) * strides
    return np.asarray((offsets[:, :, None] + anchors).reshape(-1, 4))


def _propose(call: Call, scores: Array, deltas: Array, size: Array, anchors: Array) -> tuple[Array, Array]:
    """Return the scores and boxes of one image of `size` [1, 2], best first."""
    before, after, threshold, smallest = call.integer(6), call.integer(7), call.real(8), call.real(9)
    call.look()
    flat = scores.reshape(-1)
    boxes, moves = np.empty((len(flat), 4), np.float32), deltas.reshape(-1, 1, 4)
    for rows, _ in pieces(boxes.shape, BLOCK):
        call.look()
        boxes[rows] = transform(anchors[rows], moves[rows], size)[:, 0]
    best = np.argsort(-flat, kind="stable")[: before if before > 0 else None]
    call.look()
    stays = np.empty(len(best), np.bool_)
    for (rows,) in pieces(best.shape, BLOCK):
        call.look()
        low, high = np.split(boxes[best[rows]], 2, axis=1)
        extent = high - low
        stays[rows] = ((extent > smallest) & (low + extent / 2 < size[:, ::-1])).all(axis=1)
    best = best[stays & ~np.isnan(flat[best])]
    call.look()
    taken, _ = suppress(call.look, boxes[best], flat[best], after, weaken=hard(threshold))
    return flat[best[taken]], boxes[best[taken]]


OPERATIONS = (
    OperationType(
        "BOX_WITH_NMS_LIMIT",
        44,
        (
            Signature("f2 h2", "T T i S INT32 INT32 3*S", "T T i i", ranks=(2,)),
            Signature("q2 s3", "T W i S INT32 INT32 3*S", "T W i i", ranks=(2,)),
        ),
        _limited_shape,
        build=copy_results,
        quantisation=(same_as_input, eighths, declared, declared),
        takes_empty=True,
        is_dynamic=True,
    ),
    OperationType(
        "DETECTION_POSTPROCESSING",
        47,
        (Signature("f2 h2", "T T T 4*S BOOL 3*INT32 2*S BOOL", "T T i i", ranks=(3,)),),
        _detection_shape,
        build=_detection,
    ),
    OperationType(
        "GENERATE_PROPOSALS",
        52,
        (
            Signature("f2 h2", "4*T 2*S INT32 INT32 2*S BOOL", "T T i", ranks=(4,)),
            Signature("q2 s3", "2*T w W 2*S INT32 INT32 2*S BOOL", "T W i", ranks=(4,)),
        ),
        _proposed_shape,
        build=copy_results,
        quantisation=(same_as_input, eighths, declared),
        is_dynamic=True,
    ),
)
