"""Models for the Open Inference Protocol's tests, and clients of it."""

import itertools
import os
from contextlib import contextmanager

import numpy as np
import onnx
import tritonclient.grpc
import tritonclient.http
from onnx import TensorProto, helper
from tritonclient.utils import shared_memory

_SAME = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FLOAT16", "FLOAT", "DOUBLE")
_OTHERS = {"FLOAT16": "FP16", "FLOAT": "FP32", "DOUBLE": "FP64", "BFLOAT16": "BF16"}
TYPES = {_OTHERS.get(name, name): getattr(TensorProto, name) for name in (*_SAME, "BFLOAT16")}
_numbers = itertools.count()


def write_model(path, nodes, inputs, outputs):
    """inputs, outputs: name -> (type of onnx, shape)."""
    sides = [[helper.make_tensor_value_info(n, *t) for n, t in side.items()] for side in (inputs, outputs)]
    graph = helper.make_graph(nodes, "graph", *sides)
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}")
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), hidden)
    hidden.rename(path)


def write_sum(path, shape=("rows", 4), operator="Add"):
    """sum = x + y, of float32."""
    ports = dict.fromkeys(("x", "y", "sum"), (TensorProto.FLOAT, shape))
    output = {"sum": ports.pop("sum")}
    write_model(path, [helper.make_node(operator, ["x", "y"], ["sum"])], ports, output)


def write_join(path):
    """joined = x beside y, which need as many rows; the sizes of neither say so."""
    inputs = {name: (TensorProto.FLOAT, (f"rows_{name}", f"columns_{name}")) for name in ("x", "y")}
    outputs = {"joined": (TensorProto.FLOAT, ("rows", "columns"))}
    write_model(path, [helper.make_node("Concat", ["x", "y"], ["joined"], axis=1)], inputs, outputs)


def write_copies(path):
    """An output for each input, one of each type."""
    nodes = [helper.make_node("Identity", [f"in_{name}"], [f"out_{name}"]) for name in TYPES]
    inputs = {f"in_{name}": (kind, ("n",)) for name, kind in TYPES.items()}
    outputs = {f"out_{name}": (kind, ("n",)) for name, kind in TYPES.items()}
    write_model(path, nodes, inputs, outputs)


def write_counter(path):
    """value = step + 1, and whether that is at least the limit."""
    one = helper.make_node("Constant", [], ["one"], value=helper.make_tensor("o", TensorProto.FLOAT, (1,), [1]))
    add = helper.make_node("Add", ["step", "one"], ["value"])
    done = helper.make_node("GreaterOrEqual", ["value", "limit"], ["done"])
    inputs = dict.fromkeys(("step", "limit"), (TensorProto.FLOAT, (1,)))
    outputs = {"value": (TensorProto.FLOAT, (1,)), "done": (TensorProto.BOOL, (1,))}
    write_model(path, [one, add, done], inputs, outputs)


def write_negation(path, shape):
    """y = -x, of float32."""
    ports = [{port: (TensorProto.FLOAT, shape)} for port in ("x", "y")]
    write_model(path, [helper.make_node("Neg", ["x"], ["y"])], *ports)


def write_ranges(path):
    """range = 0 … limit: an output whose size only its execution tells."""
    nodes = [
        helper.make_node("Constant", [], ["zero"], value=helper.make_tensor("z", TensorProto.INT64, (), [0])),
        helper.make_node("Constant", [], ["one"], value=helper.make_tensor("o", TensorProto.INT64, (), [1])),
        helper.make_node("Range", ["zero", "limit", "one"], ["range"]),
    ]
    ports = {"limit": (TensorProto.INT64, ())}, {"range": (TensorProto.INT64, ("n",))}
    write_model(path, nodes, *ports)


def rows(count=2, begin=0.0):
    return np.arange(begin, begin + count * 4, dtype=np.float32).reshape(count, 4)


class Client:
    """tritonclient, as it comes from PyPI, at an address that a server has told."""

    def __init__(self, address):
        self.kit = tritonclient.http if address.startswith("http") else tritonclient.grpc
        self.raw = self.kit.InferenceServerClient(address.removeprefix("http://"))

    def __getattr__(self, name):
        return getattr(self.raw, name)

    def input(self, name, array, datatype=None, **options):
        known = {"float32": "FP32", "int64": "INT64", "int32": "INT32"}
        found = self.kit.InferInput(name, list(array.shape), datatype or known[array.dtype.name])
        found.set_data_from_numpy(array, **options)
        return found

    def placed(self, name, array, datatype, region, nbytes, offset=0):
        found = self.kit.InferInput(name, list(array.shape), datatype)
        found.set_shared_memory(region, nbytes, offset=offset)
        return found

    def output(self, name, region=None, nbytes=0, offset=0):
        found = self.kit.InferRequestedOutput(name)
        if region:
            found.set_shared_memory(region, nbytes, offset=offset)
        return found

    def sum(self, x, y, model="sum", **options):
        return self.raw.infer(model, [self.input("x", x), self.input("y", y)], **options)


@contextmanager
def client_memory(nbytes):
    """A region of POSIX shared memory as tritonclient makes it: (handle, key)."""
    key = f"/burst-oip-test-{os.getpid()}-{next(_numbers)}"
    handle = shared_memory.create_shared_memory_region("client", key, nbytes)
    try:
        yield handle, key
    finally:
        shared_memory.destroy_shared_memory_region(handle)
