"""Writes .onnx files for tests, and makes models in file form of them, without `driver.load`."""

import numpy as np
import onnx
from onnx import TensorProto, helper

from driver.nn import Operand
from driver.nn.file_form import ModelFile, model_of_file, tensor_type

DTYPES = {
    TensorProto.FLOAT: "float32",
    TensorProto.DOUBLE: "float64",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
    TensorProto.BOOL: "bool",
    **{
        getattr(TensorProto, f"{sign}INT{bits}"): f"{sign}INT{bits}".lower()
        for sign in ("", "U")
        for bits in (8, 16, 32, 64)
    },
}
NUMBERS = {name: number for number, name in DTYPES.items()}


def value(name, dtype, shape):
    """An input or output; `shape` None: of unknown rank."""
    return helper.make_tensor_value_info(name, NUMBERS[dtype], shape)


def written(nodes, inputs, outputs, weights=(), opset=18, **more):
    """The bytes of a model. `inputs`, `outputs`: (name, dtype, shape); `weights`: name -> array, or TensorProto."""
    tensors = [onnx.numpy_helper.from_array(a, n) if isinstance(a, np.ndarray) else a for n, a in dict(weights).items()]
    sides = [[v if not isinstance(v, tuple) else value(*v) for v in side] for side in (inputs, outputs)]
    graph = helper.make_graph(nodes, "main", *sides, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8, **more)
    return model.SerializeToString()


def operand(info):
    """The operand of an input or output of a file."""
    tensor = info.type.tensor_type
    rank = len(tensor.shape.dim) if tensor.HasField("shape") else None
    dimensions = [dimension.dim_value for dimension in tensor.shape.dim]
    return Operand(tensor_type(DTYPES[tensor.elem_type], rank), dimensions, extra={"name": info.name})


def file_model(data, external=None):
    """The model in file form of an .onnx file."""
    graph = onnx.load_model_from_string(data).graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [operand(info) for info in graph.input if info.name not in weights]
    file = ModelFile("onnx", np.frombuffer(data, np.uint8), external or {})
    return model_of_file(file, inputs, [operand(info) for info in graph.output])


def one(operator, dtypes, shape, results=("float32",), out=None, **attributes):
    """A file of one operator; all inputs have the same shape."""
    inputs = [(f"x{n}", dtype, shape) for n, dtype in enumerate(dtypes)]
    outputs = [(f"y{n}", dtype, out) for n, dtype in enumerate(results)]
    node = helper.make_node(operator, [i[0] for i in inputs], [o[0] for o in outputs], **attributes)
    return written([node], inputs, outputs)
