"""Small .onnx files, feeds for them, and what came of their runs."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT
CPU = ["CPUExecutionProvider"]


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


def endless(path):
    """A loop that goes on for as long as anybody may wait."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Sin", ["a"], ["b"])],
        "body",
        [tensor("i", [], TensorProto.INT64), tensor("go", [], TensorProto.BOOL), tensor("a", [1])],
        [tensor("on", [], TensorProto.BOOL), tensor("b", [1])],
    )
    nodes = [helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)]
    return saved(path, nodes, [tensor("x", [1]), tensor("n", [], TensorProto.INT64)], [tensor("y", [1])])


def bits(arrays):
    return [(a.dtype, a.shape, a.tobytes()) for a in arrays]


def ran(counted):
    """How many runs went to the device, and how many did not."""
    models = counted()["models"]
    return tuple(sum(row.get(what, 0) for row in models) for what in ("device_runs", "process_runs"))
