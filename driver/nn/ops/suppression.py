"""Non-maximum suppression: of boxes that overlap, the one with the best score stays. BOX_WITH_NMS_LIMIT."""

from collections.abc import Callable, Sequence

import numpy as np

from ..operation import Array, Call, OperationType, Signature, copy_results, declared, same_as_input
from ..types import Dimensions
from .boxes import eighths, expect_eighths, expect_ordered, expect_rank, expect_shape, private, reals, stored

Weaken = Callable[[Array, Array], tuple[Array, Array]]
"""From the scores that are left and their overlaps with the selected box to new scores, and which of them stay."""

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


def suppress(boxes: Array, scores: Array, limit: int, weaken: Weaken) -> tuple[Array, Array]:
    """Take the box with the best score, weaken those that overlap it, and so on until none is left.

    boxes: [n, 4]. scores: [n]. limit: how many to take at most; negative: all. Returns the indices taken, in this
    order, and their scores then.
    """
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
            row = overlap(corners[:, best, None], corners) if table is None else table[best]
            scores, stays = weaken(scores, row)
            left &= stays
            left[best] = False
        indices, corners, scores = indices[left], corners[:, left], scores[left]
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
    expect_shape(call, 1, n, classes * 4)
    expect_shape(call, 2, n)
    expect_eighths(call, 1)
    weaken = _weaken(call.integer(5), call.real(6), call.real(7), call.real(8))
    scores, boxes = call.tensor(0), call.tensor(1)
    raw = private(boxes).reshape(n, classes, 4)
    corners, batch = reals(raw, boxes), private(call.tensor(2))
    expect_ordered(corners)
    runs = np.cumsum(np.diff(batch, prepend=batch[:1]) != 0)
    found = _candidates(reals(scores.data, scores), corners, runs, call.real(3), (call.integer(4), weaken))
    rows, labels, weakened = _limited(*found, runs, call.integer(4))
    results = (stored(weakened, scores), raw[rows, labels], labels.astype(np.int32), batch[rows])
    call.results = results
    return [result.shape for result in results]


def _candidates(
    scores: Array, boxes: Array, runs: Array, threshold: float, rule: tuple[int, Weaken]
) -> tuple[Array, Array, Array]:
    """What suppression by `rule` leaves of each class of each run of rows: rows, classes and scores."""
    rows, labels = np.nonzero(scores[:, 1:] > threshold)
    labels += 1
    group = runs[rows] * scores.shape[1] + labels
    order = np.argsort(group, kind="stable")
    ends = np.flatnonzero(np.diff(group[order])) + 1
    chosen, kept = [np.empty(0, np.intp)], [np.empty(0, np.float32)]
    for members in np.split(order, ends) if order.size else ():
        at = rows[members], labels[members]
        taken, weakened = suppress(boxes[at], scores[at], *rule)
        chosen.append(members[taken])
        kept.append(weakened)
    found = np.concatenate(chosen)
    return rows[found], labels[found], np.concatenate(kept)


def _limited(rows: Array, labels: Array, scores: Array, runs: Array, limit: int) -> tuple[Array, Array, Array]:
    """The best `limit` of every run, ordered by run, then class, then score."""
    if limit >= 0:
        best = np.lexsort((-scores, runs[rows]))
        of = runs[rows[best]]
        best = best[np.arange(len(best)) - np.searchsorted(of, of) < limit]
        rows, labels, scores = rows[best], labels[best], scores[best]
    order = np.lexsort((-scores, labels, runs[rows]))
    return rows[order], labels[order], scores[order]


BOX_WITH_NMS_LIMIT = OperationType(
    "BOX_WITH_NMS_LIMIT",
    44,
    (
        Signature("f2 h2", "T T i S INT32 INT32 3*S", "T T i i", ranks=(2,)),
        Signature("q2 s3", "T W i S INT32 INT32 3*S", "T W i i", ranks=(2,)),
    ),
    _limited_shape,
    copy_results,
    quantisation=(same_as_input, eighths, declared, declared),
    takes_empty=True,
    is_dynamic=True,
)
