"""A .tflite file like Frigate's default one: SSD for 300 x 300 bytes, ended by TFLite_Detection_PostProcess.

It finds the boxes of `frigate_models`, and the first pixel tells how far to the right the first one lies.
"""

import sys
from pathlib import Path

import numpy as np
from flatbuffers import flexbuffers
from frigate_models import BOXES, KINDS, SCORES, SHIFT

sys.path.insert(0, str(Path(__file__).parent / "importers"))

from tflite_writer import Writer

SIDE, CLASSES, MOST = 300, 3, 10
_SCALES = {"y_scale": 10.0, "x_scale": 10.0, "h_scale": 5.0, "w_scale": 5.0}


def _options():
    builder = flexbuffers.Builder()
    with builder.Map():
        for name, value in {"max_detections": MOST, "max_classes_per_detection": 1, "num_classes": CLASSES}.items():
            builder.Int(name, value)
        for name, value in (_SCALES | {"nms_score_threshold": 0.05, "nms_iou_threshold": 0.6}).items():
            builder.Float(name, value)
    return bytes(builder.Finish())


def _anchors():
    """Centre and size of each box, y first; and once more the first one, which is left out as it overlaps."""
    boxes = np.concatenate([BOXES, BOXES[:1]])
    centres, sizes = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    return np.concatenate([centres[:, ::-1], sizes[:, ::-1]], axis=1).astype(np.float32)


def write_ssd(path, has_shapes=True):
    """The file at `path`. has_shapes: its outputs say theirs, which converters leave out."""
    writer, anchors = Writer(), _anchors()
    frame = writer.input((1, SIDE, SIDE, 3), "uint8", scale=1 / 255, zero_point=0)
    starts, ones = (writer.constant(np.full(4, value, np.int32)) for value in (0, 1))
    corner = writer.operator("SLICE", [frame, starts, ones], (1, 1, 1, 1), "uint8", scale=1 / 255, zero_point=0)
    pixel = writer.operator("DEQUANTIZE", [corner], (1, 1, 1, 1))
    flat = writer.operator("RESHAPE", [pixel, writer.constant(np.array([1, 1, 1], np.int32))], (1, 1, 1))
    slope = np.zeros((1, len(anchors), 4), np.float32)
    slope[0, [0, 3], 1] = SHIFT / anchors[[0, 3], 3] * _SCALES["x_scale"]
    moves = writer.operator("MUL", [flat, writer.constant(slope)], slope.shape)
    scores = np.zeros((1, len(anchors), 1 + CLASSES), np.float32)
    for row, kind, score in zip(scores[0], (*KINDS, KINDS[0]), (*SCORES, 0.5), strict=True):
        row[1 + kind] = score
    inputs = [moves, writer.constant(scores), writer.constant(anchors)]
    shapes = [(1, MOST, 4), (1, MOST), (1, MOST), (1,)] if has_shapes else [()] * 4
    name = "CUSTOM:TFLite_Detection_PostProcess"
    outputs = writer.operator(name, inputs, shapes, ["float32"] * 4, custom=_options())
    path.write_bytes(writer.file(outputs))
    return path


def frame_of_bytes(pixel):
    """All of it is of that brightness, from 0 to 1."""
    return np.full((1, SIDE, SIDE, 3), round(pixel * 255), np.uint8)
