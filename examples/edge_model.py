"""Writes driver/demos/edges.onnx, the model file that comes with Burst: the strength of the edges in an image.

    pip install onnx && python examples/edge_model.py driver/demos/edges.onnx

Nothing in it is trained: the luma of ITU-R BT.601, the two kernels of Sobel, and the length of the gradient.
"""

import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIDE = 64
LUMA = np.array([0.299, 0.587, 0.114], np.float32).reshape(1, 3, 1, 1)
ACROSS = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]], np.float32)
SOBEL = np.stack([ACROSS, ACROSS.T])[:, None]


def edges() -> onnx.ModelProto:
    """image: 1 x 3 x 64 x 64, from 0 to 1 -> edges: 1 x 1 x 62 x 62, without the border."""
    nodes = [
        helper.make_node("Conv", ["image", "luma"], ["grey"], kernel_shape=[1, 1]),
        helper.make_node("Conv", ["grey", "sobel"], ["gradient"], kernel_shape=[3, 3]),
        helper.make_node("Mul", ["gradient", "gradient"], ["squares"]),
        helper.make_node("ReduceSum", ["squares", "channels"], ["square"], keepdims=1),
        helper.make_node("Sqrt", ["square"], ["edges"]),
    ]
    constants = [
        numpy_helper.from_array(array, name)
        for name, array in (("luma", LUMA), ("sobel", SOBEL), ("channels", np.array([1], np.int64)))
    ]
    image, found = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("image", [1, 3, SIDE, SIDE]), ("edges", [1, 1, SIDE - 2, SIDE - 2]))
    )
    graph = helper.make_graph(nodes, "edges", [image], [found], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


if __name__ == "__main__":
    onnx.save(edges(), sys.argv[1])
