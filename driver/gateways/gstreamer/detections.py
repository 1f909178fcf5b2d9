"""What the outputs of a detector mean: boxes in fractions of the frame, by the form in which the model gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.nn.tensors import TensorInfo

DetectorType = Literal["auto", "ssd", "yolo", "yolo-end2end"]
_OVERLAP = 0.45
"""Of two boxes of one class that overlap by more (intersection over union), the one with the lower score goes."""

_MOST_CANDIDATES, _MOST_DETECTIONS = 1000, 100


class Detection(NamedTuple):
    """An object: its class, how sure the model is, and its edges from 0 to 1."""

    label_id: int
    score: float
    left: float
    top: float
    right: float
    bottom: float


class DetectionDecoder:
    """Turns the outputs of one model into detections."""

    def __init__(self, kind: str, outputs: Sequence[TensorInfo], threshold: float, *, in_pixels: bool) -> None:
        """`in_pixels`: boxes of YOLO are in pixels of the model's input, not in fractions.

        Raises ValueError for a type that does not exist, or that the outputs are not of.
        """
        if kind not in get_args(DetectorType):
            raise ValueError(f"model-type={kind!r}: one of {', '.join(get_args(DetectorType))}")
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"threshold={threshold}: a score from 0 to 1")
        self.kind = _type_of(outputs) if kind == "auto" else kind
        self.threshold, self._outputs, self._in_pixels = threshold, outputs, in_pixels
        if self.kind not in _types_of(outputs):
            shapes = "; ".join(map(str, outputs))
            raise ValueError(f"model-type={kind!r}: the model's outputs are not of that type ({shapes}). {_FORMS}")

    def __call__(self, outputs: Sequence[NDArray[Any]], width: int, height: int) -> list[Detection]:
        """`width`, `height`: of the frame. Raises ValueError for outputs that are not of the type."""
        arrays = [_values(array, info) for array, info in zip(outputs, self._outputs, strict=True)]
        if self.kind == "ssd":
            boxes, labels, scores = _of_ssd(arrays)
        else:
            boxes, labels, scores = (_of_yolo if self.kind == "yolo" else _of_end2end)(arrays[0], self.threshold)
            if self._in_pixels:
                boxes = np.divide(boxes, np.array([width, height, width, height], np.float32), dtype=np.float32)
        wanted = np.flatnonzero((scores >= self.threshold) & np.isfinite(boxes).all(axis=1))
        wanted = wanted[np.argsort(-scores[wanted], kind="stable")][:_MOST_CANDIDATES]
        if self.kind == "yolo":
            wanted = wanted[_kept(boxes[wanted], labels[wanted])]
        edges = np.clip(boxes, 0.0, 1.0)
        return [Detection(int(labels[i]), float(scores[i]), *map(float, edges[i])) for i in wanted[:_MOST_DETECTIONS]]


_FORMS = (
    "ssd: boxes [1, N, 4], classes and scores [1, N], count [1]; yolo: [1, 4 + classes, N]; yolo-end2end: [1, N, 6]"
)


def _types_of(outputs: Sequence[TensorInfo]) -> tuple[str, ...]:
    """The types that the outputs may be of. A shape that the file leaves open may be any."""
    ranks = [None if info.shape is None else len(info.shape) for info in outputs]
    if len(outputs) == 4:
        return ("ssd",)
    if len(outputs) != 1 or ranks[0] not in (None, 3):
        return ()
    last = outputs[0].shape[2] if outputs[0].shape else None
    return ("yolo", "yolo-end2end") if last is None else ("yolo-end2end",) if last == 6 else ("yolo",)


def _type_of(outputs: Sequence[TensorInfo]) -> str:
    """Raises ValueError."""
    found = _types_of(outputs)
    if len(found) != 1:
        shapes = "; ".join(map(str, outputs))
        raise ValueError(f"model-type='auto' does not recognise a detector by its outputs ({shapes}). {_FORMS}")
    return found[0]


def _values(array: NDArray[Any], info: TensorInfo) -> NDArray[np.float32]:
    """What quantised numbers stand for."""
    floats = np.asarray(array, np.float32)
    return (floats - info.zero_point) * np.float32(info.scale) if info.scale and array.dtype.kind in "iu" else floats


def _of_ssd(arrays: Sequence[NDArray[np.float32]]) -> tuple[NDArray[np.float32], ...]:
    """TFLite's order is boxes, classes, scores, count; TensorFlow 2's is scores, boxes, count, classes."""
    is_older = arrays[0].shape[-1:] == (4,) and arrays[0].ndim >= 2
    boxes, labels, scores, count = arrays if is_older else (arrays[1], arrays[3], arrays[0], arrays[2])
    boxes, labels, scores = boxes.reshape(-1, 4), labels.reshape(-1), scores.reshape(-1)
    if count.size != 1 or not len(boxes) == len(labels) == len(scores):
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise ValueError(f"outputs of shapes {shapes} are not those of an SSD. {_FORMS}")
    several = max(0, min(int(count.reshape(-1)[0]), len(boxes))) if np.isfinite(count).all() else 0
    return boxes[:several][:, [1, 0, 3, 2]], labels[:several], scores[:several]


def _of_yolo(output: NDArray[np.float32], threshold: float) -> tuple[NDArray[np.float32], ...]:
    """Rows: middle, width and height of each candidate, then its score for each class."""
    if output.ndim != 3 or output.shape[0] != 1 or output.shape[1] < 5:
        raise ValueError(f"an output of shape {output.shape} is not that of a YOLO. {_FORMS}")
    scores = output[0, 4:].max(axis=0)
    some = np.flatnonzero(scores >= threshold)
    found = output[0][:, some]
    middle, half = found[:2].T, found[2:4].T / 2
    return np.concatenate([middle - half, middle + half], axis=1), found[4:].argmax(axis=0), scores[some]


def _of_end2end(output: NDArray[np.float32], _threshold: float) -> tuple[NDArray[np.float32], ...]:
    """Rows: left, top, right, bottom, score, class. The model has removed what overlaps."""
    if output.ndim != 3 or output.shape[0] != 1 or output.shape[2] != 6:
        raise ValueError(f"an output of shape {output.shape} is not that of an end-to-end YOLO. {_FORMS}")
    return output[0, :, :4], output[0, :, 5], output[0, :, 4]


def _kept(boxes: NDArray[np.float32], labels: NDArray[Any]) -> list[int]:
    """Which of these boxes, sorted by score, stay when those that overlap a better one of their class go."""
    areas = np.prod(np.maximum(boxes[:, 2:] - boxes[:, :2], 0), axis=1)
    left = np.arange(len(boxes))
    kept: list[int] = []
    while left.size and len(kept) < _MOST_DETECTIONS:
        best, left = left[0], left[1:]
        kept.append(int(best))
        corners = np.maximum(boxes[left, :2], boxes[best, :2]), np.minimum(boxes[left, 2:], boxes[best, 2:])
        shared = np.prod(np.maximum(corners[1] - corners[0], 0), axis=1)
        ratio = shared / np.maximum(areas[left] + areas[best] - shared, 1e-12)
        left = left[(ratio <= _OVERLAP) | (labels[left] != labels[best])]
    return kept


def label_of(labels: Sequence[str], label_id: int) -> str:
    """The name of a class, or its number where it has none."""
    return labels[label_id] if 0 <= label_id < len(labels) and labels[label_id] else f"class {label_id}"


def labels_of(text: str) -> list[str]:
    """The names in a file: one per line, in order, or all with their numbers ("17 cat", "17: cat")."""
    lines = [line.strip() for line in text.splitlines()]
    pairs = [line.replace(":", " ", 1).split(None, 1) for line in lines if line]
    if not pairs or not all(len(pair) == 2 and pair[0].isascii() and pair[0].isdigit() for pair in pairs):
        return lines
    numbered = {int(number): name for number, name in pairs if len(number) <= 5}
    return [numbered.get(n, "") for n in range(max(numbered, default=-1) + 1)]
