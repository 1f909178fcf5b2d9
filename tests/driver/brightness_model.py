"""A detector whose answer follows from its frame, so that each answer can be checked against its frame."""

import numpy as np
import onnx
from onnx import TensorProto, helper


def write_brightness(path, width=64, height=48, dtype="UINT8", planar=False, factor=1.0):
    """SSD's four outputs: one box, whose score is the mean of the frame's bytes / 255 (times `factor`)."""
    shape = [1, 3, height, width] if planar else [1, height, width, 3]
    scale = factor / 255 if dtype == "UINT8" else factor
    nodes = [
        helper.make_node("Cast", ["frame"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["floats"], ["mean"], axes=[1, 2, 3], keepdims=0),
        helper.make_node("Mul", ["mean", "scale"], ["score"]),
        helper.make_node("Reshape", ["score", "one_by_one"], ["scores"]),
        helper.make_node("Identity", ["box"], ["boxes"]),
        helper.make_node("Identity", ["label"], ["classes"]),
        helper.make_node("Identity", ["one"], ["count"]),
    ]
    constants = {
        "scale": np.float32(scale).reshape(1),
        "one_by_one": np.array([1, 1], np.int64),
        "box": np.array([[[0.25, 0.125, 0.75, 0.5]]], np.float32),  # top, left, bottom, right
        "label": np.array([[1]], np.float32),
        "one": np.array([1], np.float32),
    }
    outputs = {"boxes": [1, 1, 4], "classes": [1, 1], "scores": [1, 1], "count": [1]}
    graph = helper.make_graph(
        nodes,
        "brightness",
        [helper.make_tensor_value_info("frame", getattr(TensorProto, dtype), shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, its) for name, its in outputs.items()],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path
