"""Models of every type that Frigate knows, whose boxes are known, and clients that send what Frigate's detector sends.

Each model finds the same three boxes. How far to the right the first one lies tells the first pixel of the frame, so an
answer to another frame is seen to be one.
"""

import json
import math
import os
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import onnx
import zmq
from onnx import TensorProto, helper, numpy_helper

SIZE = 64
STRIDES = (8, 16, 32)
GRIDS = [SIZE // stride for stride in STRIDES]
CELLS = sum(grid * grid for grid in GRIDS)
CLASSES = 3
SHIFT = 0.25  # of the first box, at the brightest pixel
BOXES = np.array([[0.1, 0.2, 0.3, 0.5], [0.6, 0.6, 0.9, 0.8], [0.05, 0.7, 0.25, 0.95]])  # x1, y1, x2, y2
SCORES, KINDS = (0.9, 0.8, 0.6), (2, 0, 1)
NAMES = ("ssd", "yolonas", "yolo-generic", "yolox", "rfdetr", "dfine")


def rows_for(pixel):
    """What is found in a frame whose first pixel is that, from 0 to 1."""
    found = np.zeros((20, 6), np.float32)
    boxes = BOXES + np.array([[SHIFT * pixel, 0, SHIFT * pixel, 0], [0] * 4, [0] * 4])
    for row, box, score, kind in zip(found, boxes, SCORES, KINDS, strict=False):
        row[:] = [kind, score, box[1], box[0], box[3], box[2]]
    return found


def _centres(scale):
    """Centre and size, and how the first pixel moves these."""
    base = np.concatenate([(BOXES[:, :2] + BOXES[:, 2:]) / 2, BOXES[:, 2:] - BOXES[:, :2]], axis=1) * scale
    slope = np.zeros((3, 4))
    slope[0, 0] = SHIFT * scale
    return base, slope


def _corners(scale):
    slope = np.zeros((3, 4))
    slope[0, [0, 2]] = SHIFT * scale
    return BOXES * scale, slope


def _ssd():
    (boxes, slope), pad = _corners(1), np.zeros((2, 4))
    order = [1, 0, 3, 2]
    return {
        "boxes": (np.concatenate([boxes, pad])[None][..., order], np.concatenate([slope, pad])[None][..., order]),
        "classes": (np.array([[*KINDS, 0.0, 0]]), 0),
        "scores": (np.array([[*SCORES, 0.1, 0]]), 0),
        "count": (np.array([4.0]), 0),
    }


def _yolonas():
    boxes, slope = _corners(SIZE)
    base = np.concatenate([np.zeros((3, 1)), boxes, np.array([SCORES]).T, np.array([KINDS]).T], axis=1)
    return {"rows": (base, np.pad(slope, ((0, 0), (1, 2))))}


def _yolo_generic():
    boxes, slope = _centres(SIZE)
    base, move = np.zeros((4 + CLASSES, CELLS)), np.zeros((4 + CLASSES, CELLS))
    base[:4, :3], move[:4, :3] = boxes.T, slope.T
    for place, (score, kind) in enumerate(zip(SCORES, KINDS, strict=True)):
        base[4 + kind, place] = score
    base[:4, 3], base[4, 3] = boxes[1] + [1, 0, 0, 0], 0.7  # the second box again, less sure
    return {"found": (base[None], move[None])}


def _yolox():
    boxes, slope = _centres(SIZE)
    base, move = np.zeros((CELLS, 5 + CLASSES)), np.zeros((CELLS, 5 + CLASSES))
    for place, (score, kind) in enumerate(zip(SCORES, KINDS, strict=True)):
        cell = place + 1  # of the first row of the finest grid
        base[cell] = [*(boxes[place, :2] / 8 - [cell, 0]), *np.log(boxes[place, 2:] / 8), 1, *[0] * CLASSES]
        base[cell, 5 + kind], move[cell, :2] = score, slope[place, :2] / 8
    return {"found": (base[None], move[None])}


def _rfdetr():
    boxes, slope = _centres(1)
    logits = np.full((3, 1 + CLASSES), -50.0)
    for row, score, kind in zip(logits, SCORES, KINDS, strict=True):
        row[0], row[1 + kind] = math.log(1 - score), math.log(score)
    return {"dets": (boxes[None], slope[None]), "labels": (logits[None], 0)}


def _dfine():
    boxes, slope = _corners(1)  # the model multiplies them by the size that it is given
    return {
        "labels": (np.array([KINDS], np.int64), 0),
        "boxes": (boxes[None], slope[None]),
        "scores": (np.array([SCORES]), 0),
    }


OUTPUTS = dict(zip(NAMES, (_ssd, _yolonas, _yolo_generic, _yolox, _rfdetr, _dfine), strict=True))


def outputs_for(name, pixel):
    """What the model answers, without a model."""
    found = []
    for base, slope in OUTPUTS[name]().values():
        array = base if base.dtype == np.int64 else (base + slope * pixel).astype(np.float32)
        found.append(array * SIZE if name == "dfine" and array.shape[-1] == 4 else array)
    return found


def write_detector(path, name, dtype="float32", layout="nchw", outputs=None):
    """A model of that type in a file."""
    nodes, weights = [], []

    def constant(label, array):
        weights.append(numpy_helper.from_array(np.asarray(array), label))
        return label

    shape = (1, 3, SIZE, SIZE) if layout == "nchw" else (1, SIZE, SIZE, 3)
    bounds = [constant(k, np.array(v, np.int64)) for k, v in (("from", [0] * 4), ("to", [1] * 4))]
    nodes.append(helper.make_node("Slice", ["images", *bounds], ["corner"]))
    nodes.append(helper.make_node("Cast", ["corner"], ["as_float"], to=TensorProto.FLOAT))
    brightest = constant("brightest", np.array([255.0 if dtype == "uint8" else 1.0], np.float32))
    nodes.append(helper.make_node("Reshape", ["as_float", constant("one", np.array([1], np.int64))], ["flat"]))
    nodes.append(helper.make_node("Div", ["flat", brightest], ["pixel"]))
    kind = TensorProto.UINT8 if dtype == "uint8" else TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("images", kind, shape)]
    if name == "dfine":
        inputs.append(helper.make_tensor_value_info("orig_target_sizes", TensorProto.INT64, (1, 2)))
        nodes.append(helper.make_node("Cast", ["orig_target_sizes"], ["size"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Concat", ["size", "size"], ["scale"], axis=1))
    ports = []
    for label, (base, slope) in (outputs or OUTPUTS[name]()).items():
        if base.dtype == np.int64:
            nodes.append(helper.make_node("Identity", [constant(f"{label}_base", base)], [label]))
            ports.append(helper.make_tensor_value_info(label, TensorProto.INT64, base.shape))
            continue
        is_scaled = name == "dfine" and base.shape[-1] == 4
        moves = np.broadcast_to(np.float32(slope), base.shape).copy()
        nodes.append(helper.make_node("Mul", [constant(f"{label}_slope", moves), "pixel"], [f"{label}_moved"]))
        sum_of = [constant(f"{label}_base", base.astype(np.float32)), f"{label}_moved"]
        nodes.append(helper.make_node("Add", sum_of, [f"{label}_sum" if is_scaled else label]))
        if is_scaled:
            nodes.append(helper.make_node("Mul", [f"{label}_sum", "scale"], [label]))
        ports.append(helper.make_tensor_value_info(label, TensorProto.FLOAT, base.shape))
    graph = helper.make_graph(nodes, "detector", inputs, ports, initializer=weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def frame_of(pixel, dtype="float32", layout="nchw"):
    """All of it is of that brightness, from 0 to 1."""
    shape = (1, 3, SIZE, SIZE) if layout == "nchw" else (1, SIZE, SIZE, 3)
    return np.full(shape, pixel * 255 if dtype == "uint8" else pixel, dtype)


class Asker:
    """A REQ socket. It sends what it is told to."""

    def __init__(self, address, timeout=30.0):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.REQ)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, int(timeout * 1000))
        self.socket.connect(address)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        self.context.term()

    def ask(self, *parts):
        self.socket.send_multipart([part if isinstance(part, bytes) else json.dumps(part).encode() for part in parts])
        return self.socket.recv_multipart()

    def look(self, frame, model_type="yologeneric"):
        """The rows, or the text of the refusal."""
        header = {"shape": list(frame.shape), "dtype": frame.dtype.name, "model_type": model_type}
        head, body = self.ask(header, frame.tobytes())
        said = json.loads(head)
        rows = np.frombuffer(body, said["dtype"]).reshape(said["shape"])
        if "error" in said:
            assert rows.shape == (0, 6)
            return said["error"]
        return rows


def command(device, address, model, model_type, *more):
    words = ["--frigate", address, "--model", str(model), "--model-type", model_type, "--json", *more]
    return [sys.executable, "-m", "driver.cli", "serve", device, *words]


@contextmanager
def serving(device, address, model, model_type, *more):
    """(process, what it said) of a server that clients may connect to."""
    with subprocess.Popen(command(device, address, model, model_type, *more), stdout=subprocess.PIPE, text=True) as it:
        try:
            line = it.stdout.readline()
            assert line, "the server has not started"
            yield it, json.loads(line)
        finally:
            it.terminate()
            it.wait(30)


def frigate_source():
    """Where Frigate's own repository lies, or None."""
    return os.environ.get("FRIGATE_SOURCE")
