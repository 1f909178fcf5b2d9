"""Small .onnx files, and feeds for them."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT


def saved(path, nodes, inputs, outputs, constants=(), **of_model):
    """Writes a model; returns its path as a string."""
    weights = [numpy_helper.from_array(array, name) for name, array in constants]
    graph = helper.make_graph(nodes, "net", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, **of_model)
    helper.set_model_props(model, {"author": "somebody"})
    path.write_bytes(model.SerializeToString())
    return str(path)


def tensor(name, shape, kind=FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def layers(path, rows="n"):
    """Two layers and a sum: outputs "y" and "total", of which the file does not say the sizes of one."""
    random = np.random.default_rng(3)
    weights = [(name, random.standard_normal((64, 64)).astype(np.float32)) for name in ("a", "b")]
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("MatMul", ["t", "b"], ["y"]),
        helper.make_node("ReduceSum", ["y"], ["total"], keepdims=0),
    ]
    return saved(path, nodes, [tensor("x", [rows, 64])], [tensor("y", None), tensor("total", [])], weights)


def feed(rows=3, seed=0):
    return {"x": np.random.default_rng(seed).standard_normal((rows, 64)).astype(np.float32)}
