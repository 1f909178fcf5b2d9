"""The types of models that find objects: what their outputs look like, and what they mean. The names are Frigate's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driver.gateways.detection.found_boxes import FoundBoxes, corners_of_centres

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Outputs = Sequence[NDArray[Any]]

END2END = "yolo-end2end"  # a name of ours: Frigate has none
_STRIDES = (8, 16, 32)
_ANCHORS = ((12, 16, 19, 36, 40, 28), (36, 75, 76, 55, 72, 146), (142, 110, 192, 243, 459, 401))


class FrameSize(NamedTuple):
    """In pixels. in_pixels: the model gives boxes in pixels where it is free to, not in parts of the frame."""

    width: int
    height: int
    in_pixels: bool = True

    @property
    def corners(self) -> NDArray[np.float32]:
        """The factors that turn pixels into parts of the frame."""
        return np.array([self.width, self.height] * 2, np.float32)

    @property
    def unit(self) -> NDArray[np.float32]:
        """The factors that turn boxes of a model that is free to choose into parts of the frame."""
        return self.corners if self.in_pixels else np.ones(4, np.float32)

    @property
    def cells(self) -> int:
        """The number of boxes of a model of three grids."""
        return sum((self.height // stride) * (self.width // stride) for stride in _STRIDES)


class DetectorType(NamedTuple):
    """form: the outputs that it has, for people. fits: whether outputs have this form. found: what they mean.

    `found` may leave out what is below a threshold.
    """

    form: str
    fits: Callable[[Outputs, FrameSize], bool]
    found: Callable[[Outputs, FrameSize, float], FoundBoxes]
    inputs: int = 1


def _floats(*outputs: NDArray[Any]) -> bool:
    return all(each.dtype.kind == "f" for each in outputs)


# ---- ssd: TensorFlow's four outputs, or OpenVINO's rows of image, class, score, x1, y1, x2, y2


def _is_ssd(outputs: Outputs, _: FrameSize) -> bool:
    if not outputs or not _floats(outputs[0]):
        return False
    if len(outputs) == 1:
        return outputs[0].ndim == 4 and outputs[0].shape[:2] == (1, 1) and outputs[0].shape[3] == 7
    if len(outputs) != 4:
        return False
    boxes, classes, scores, count = _of_tensorflow(outputs)
    if boxes.ndim != 3 or not _floats(boxes, scores):
        return False
    many = boxes.shape[1]
    return boxes.shape == (1, many, 4) and classes.shape == scores.shape == (1, many) and count.size == 1


def _of_tensorflow(outputs: Outputs) -> Outputs:
    """Return boxes, classes, scores, count: the order of TensorFlow 1. That of 2 is scores, boxes, count, classes."""
    return outputs if outputs[0].ndim == 3 else [outputs[n] for n in (1, 3, 0, 2)]


def _ssd(outputs: Outputs, _: FrameSize, _threshold: float) -> FoundBoxes:
    if len(outputs) == 1:
        rows = outputs[0].reshape(-1, 7).astype(np.float32)
        ends = np.flatnonzero(rows[:, 0] < 0)  # the image is -1 behind the last row
        rows = rows[: ends[0]] if ends.size else rows
        return FoundBoxes(rows[:, 3:7], rows[:, 2], rows[:, 1], is_final=True)
    boxes, classes, scores, count = (np.asarray(o, np.float32) for o in _of_tensorflow(outputs))
    if not np.isfinite(count).all():
        raise ValueError("the model found a number of boxes that is no finite number")
    many = int(np.clip(count.reshape(-1)[0], 0, boxes.shape[1]))
    return FoundBoxes(boxes[0, :many][:, [1, 0, 3, 2]], scores[0, :many], classes[0, :many], is_final=True)


# ---- yolonas, exported in flat form


def _is_yolonas(outputs: Outputs, _: FrameSize) -> bool:
    return len(outputs) == 1 and _floats(*outputs) and outputs[0].ndim == 2 and outputs[0].shape[1] == 7


def _yolonas(outputs: Outputs, size: FrameSize, _threshold: float) -> FoundBoxes:
    rows = outputs[0].astype(np.float32)
    ends = np.flatnonzero(rows[:, 6] < 0)  # a class of -1 is behind the last row
    rows = rows[: ends[0]] if ends.size else rows
    return FoundBoxes(rows[:, 1:5] / size.corners, rows[:, 5], rows[:, 6], is_final=True)


# ---- yolo-end2end: rows of x1, y1, x2, y2, score, class


def _is_yolo_end2end(outputs: Outputs, _: FrameSize) -> bool:
    return len(outputs) == 1 and _floats(*outputs) and outputs[0].ndim == 3 and outputs[0].shape[::2] == (1, 6)


def _yolo_end2end(outputs: Outputs, size: FrameSize, _threshold: float) -> FoundBoxes:
    rows = outputs[0][0].astype(np.float32)
    return FoundBoxes(rows[:, :4] / size.unit, rows[:, 4], rows[:, 5], is_final=True)


# ---- yolo-generic: boxes with their classes in one output, or three grids with anchors


def _is_yolo_generic(outputs: Outputs, size: FrameSize) -> bool:
    if not _floats(*outputs):
        return False
    if len(outputs) == 3:
        grids = [(size.height // stride, size.width // stride) for stride in _STRIDES]
        depths = {output.shape[1] for output in outputs if output.ndim == 4}
        return all(o.ndim == 4 and o.shape[2:] == g for o, g in zip(outputs, grids, strict=True)) and (
            len(depths) == 1 and not (depth := depths.pop()) % 3 and depth >= 18
        )
    return (
        len(outputs) == 1
        and outputs[0].ndim == 3
        and outputs[0].shape[0] == 1
        and (min(outputs[0].shape[1:]) >= 5 and not _is_yolox(outputs, size))
    )


def _yolo_generic(outputs: Outputs, size: FrameSize, threshold: float) -> FoundBoxes:
    if len(outputs) == 3:
        return _of_anchors(outputs, size, threshold)
    rows = outputs[0][0].astype(np.float32, copy=False)
    if rows.shape[0] < rows.shape[1]:
        rows = rows.T
    scores = rows[:, 4:].max(axis=1)
    rows, scores = rows[keep := ~(scores < threshold)], scores[keep]
    return FoundBoxes(corners_of_centres(rows) / size.unit, scores, rows[:, 4:].argmax(axis=1))


def _of_anchors(outputs: Outputs, size: FrameSize, threshold: float) -> FoundBoxes:
    every = []
    for output, stride, anchors in zip(outputs, _STRIDES, _ANCHORS, strict=True):
        _, depth, height, width = output.shape
        cells = output.astype(np.float32).reshape(3, depth // 3, height, width).transpose(0, 2, 3, 1)
        rows, columns = np.mgrid[:height, :width].astype(np.float32)
        at = np.stack([columns, rows], axis=-1)
        cells[..., :2] = (cells[..., :2] * 2 - 0.5 + at) * stride
        cells[..., 2:4] = (cells[..., 2:4] * 2) ** 2 * np.array(anchors, np.float32).reshape(3, 1, 1, 2)
        every.append(cells.reshape(-1, depth // 3))
    return _with_objectness(np.concatenate(every), size, threshold)


def _with_objectness(rows: NDArray[np.float32], size: FrameSize, threshold: float) -> FoundBoxes:
    """Split rows of centre, size, the score of there being an object, and those of its classes."""
    scores = rows[:, 4] * rows[:, 5:].max(axis=1)
    rows, scores = rows[keep := ~(scores < threshold)], scores[keep]
    return FoundBoxes(corners_of_centres(rows) / size.corners, scores, rows[:, 5:].argmax(axis=1))


# ---- yolox: places within cells, sizes as logarithms


def _is_yolox(outputs: Outputs, size: FrameSize) -> bool:
    if len(outputs) != 1 or not _floats(*outputs) or outputs[0].ndim != 3:
        return False
    return outputs[0].shape[:2] == (1, size.cells) and outputs[0].shape[2] >= 6


def _yolox(outputs: Outputs, size: FrameSize, threshold: float) -> FoundBoxes:
    places, strides = [], []
    for stride in _STRIDES:
        rows, columns = np.mgrid[: size.height // stride, : size.width // stride]
        places.append(np.stack([columns.ravel(), rows.ravel()], axis=1))
        strides.append(np.full((rows.size, 1), stride, np.float32))
    cells, stride_of = outputs[0][0].astype(np.float32), np.concatenate(strides)
    cells[:, :2] = (cells[:, :2] + np.concatenate(places)) * stride_of
    cells[:, 2:4] = np.exp(cells[:, 2:4]) * stride_of
    return _with_objectness(cells, size, threshold)


# ---- the transformers


def _is_rfdetr(outputs: Outputs, _: FrameSize) -> bool:
    if len(outputs) != 2 or not _floats(*outputs) or any(output.ndim != 3 for output in outputs):
        return False
    boxes, logits = outputs
    return boxes.shape == (1, logits.shape[1], 4) and logits.shape[0] == 1 and logits.shape[2] >= 2


def _rfdetr(outputs: Outputs, _: FrameSize, _threshold: float) -> FoundBoxes:
    boxes, logits = (output[0].astype(np.float32) for output in outputs)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores = powers[:, 1:] / powers.sum(axis=1, keepdims=True)  # the first class is the background
    return FoundBoxes(corners_of_centres(boxes), scores.max(axis=1), scores.argmax(axis=1))


def _is_dfine(outputs: Outputs, _: FrameSize) -> bool:
    if len(outputs) != 3 or outputs[0].ndim != 2 or not _floats(*outputs[1:]):
        return False
    labels, boxes, scores = outputs
    return labels.shape == scores.shape and boxes.shape == (*labels.shape, 4) and labels.shape[0] == 1


def _dfine(outputs: Outputs, size: FrameSize, _threshold: float) -> FoundBoxes:
    labels, boxes, scores = outputs
    return FoundBoxes(boxes[0].astype(np.float32) / size.corners, scores[0].astype(np.float32), labels[0])


TYPES = {
    "ssd": DetectorType(
        "boxes (1, N, 4), classes (1, N), scores (1, N) and a count, in this order or as TensorFlow 2 gives them, or "
        "one of (1, 1, N, 7)",
        _is_ssd,
        _ssd,
    ),
    "yolonas": DetectorType("one of (N, 7), in flat form", _is_yolonas, _yolonas),
    END2END: DetectorType("one of (1, N, 6): x1, y1, x2, y2, score, class", _is_yolo_end2end, _yolo_end2end),
    "yolo-generic": DetectorType(
        "one of (1, 4 + classes, boxes), or three grids (1, 3 * (5 + classes), height / 8 …, width / 8 …)",
        _is_yolo_generic,
        _yolo_generic,
    ),
    "yolox": DetectorType("one of (1, cells, 5 + classes)", _is_yolox, _yolox),
    "rfdetr": DetectorType("boxes (1, N, 4) and logits (1, N, 1 + classes)", _is_rfdetr, _rfdetr),
    "dfine": DetectorType("labels (1, N), boxes (1, N, 4) and scores (1, N), of two inputs", _is_dfine, _dfine, 2),
}
