"""DETECTION_POSTPROCESSING: boxes decoded from anchors, suppressed, and written into a fixed number of slots."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ..operation import Array, Call, OperationType, Signature, Tensor
from ..types import Dimensions
from .boxes import expect_rank, expect_shape, reals
from .suppression import hard, suppress

Chosen = tuple[Array, Array]
"""The anchors and the classes of the detections, best first."""

Choice = Callable[[Array, Array], Chosen]
"""From the scores [n, classes] and the boxes [n, 4] of an image to its detections."""


def _detection_shape(call: Call) -> Sequence[Dimensions]:
    (batches, n, classes), (*_, length) = expect_rank(call, 0, 3), expect_rank(call, 1, 3)
    expect_shape(call, 1, batches, n, max(length, 4))
    expect_shape(call, 2, n, 4)
    if classes < 2:
        raise ValueError(f"input 0 has {classes} classes; it needs the background and one more at least")
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
    """Boxes (y1, x1, y2, x2) from `deltas` [n, 4] and `anchors` [n, 4], both as (y, x, height, width)."""
    parts = deltas / scales
    centre = anchors[:, :2] + anchors[:, 2:] * parts[:, :2]
    half = anchors[:, 2:] * np.exp(parts[:, 2:]) / 2
    return np.concatenate((centre - half, centre + half), axis=1)


def _regular(scores: Array, boxes: Array, *, best: int, per_class: int, threshold: float, iou: float) -> Chosen:
    """Suppression within each class, then the best of all classes: anchors and classes."""
    anchors, labels = [np.empty(0, np.intp)], [np.empty(0, np.intp)]
    for label in range(1, scores.shape[1]):
        members = np.flatnonzero(scores[:, label] > threshold)
        taken, _ = suppress(boxes[members], scores[members, label], per_class, hard(iou))
        anchors.append(members[taken])
        labels.append(np.full(len(taken), label, np.intp))
    rows, columns = np.concatenate(anchors), np.concatenate(labels)
    order = np.argsort(-scores[rows, columns], kind="stable")[:best]
    return rows[order], columns[order]


def _fast(scores: Array, boxes: Array, *, best: int, per_box: int, threshold: float, iou: float) -> Chosen:
    """Suppression between anchors by their best class, then the best classes of each: anchors and classes."""
    highest = scores[:, 1:].max(axis=1)
    members = np.flatnonzero(highest > threshold)
    taken, _ = suppress(boxes[members], highest[members], best, hard(iou))
    rows = members[taken]
    labels = 1 + np.argsort(-scores[rows, 1:], axis=1, kind="stable")[:, :per_box]
    return np.repeat(rows, labels.shape[1]), labels.reshape(-1)


def _detect(inputs: Sequence[Tensor], outputs: Sequence[Tensor], scales: Array, choose: Choice, first: int) -> None:
    scores, deltas, anchors = (reals(tensor.data, tensor) for tensor in inputs)
    for out in outputs:
        out.data.fill(0)
    for b, (image_scores, image_deltas) in enumerate(zip(scores, deltas, strict=True)):
        boxes = _decode(image_deltas[:, :4], anchors, scales)
        rows, labels = choose(image_scores, boxes)
        found = (image_scores[rows, labels], boxes[rows], labels - first, len(rows))
        for out, values in zip(outputs[:3], found[:3], strict=True):
            out.data[b, : len(rows)] = values
        outputs[3].data[b] = len(rows)


def _build(call: Call) -> None:
    is_regular, detections, per_detection, per_class = (call.integer(i) for i in (7, 8, 9, 10))
    limits = {"best": detections, "threshold": call.real(11), "iou": call.real(12)}
    choose = partial(_regular, per_class=per_class) if is_regular else partial(_fast, per_box=per_detection)
    scales = np.array([call.real(i) for i in (3, 4, 5, 6)], np.float32)
    inputs = [call.tensor(i) for i in range(3)]
    call.step(_detect, inputs, call.outputs, scales, partial(choose, **limits), 0 if call.flag(13) else 1)


DETECTION_POSTPROCESSING = OperationType(
    "DETECTION_POSTPROCESSING",
    47,
    (Signature("f2 h2", "T T T 4*S BOOL 3*INT32 2*S BOOL", "T T i i", ranks=(3,)),),
    _detection_shape,
    _build,
)
