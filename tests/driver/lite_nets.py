"""Small .tflite files: one that is plain, and those that keep a state or have sizes that only a run knows."""

import sys
from pathlib import Path

import numpy as np
import tflite

sys.path.append(str(Path(__file__).parent / "importers"))

from tflite_writer import Writer


def spread(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def network(w, shape=(1, 8, 8, 4), **more):
    """A convolution, and what comes after it."""
    x = w.input(shape, **more)
    y = w.operator(
        "CONV_2D", [x, w.random((8, 3, 3, 4)), w.random((8,))], (*shape[:3], 8), Padding=0, StrideW=1, StrideH=1
    )
    return w.operator("SOFTMAX", [y], (*shape[:3], 8), Beta=1.0)


def convolution(**more):
    w = Writer()
    return w.file([network(w, **more)])


def memory(cells=3):
    """Keeps what it has seen: an SVDF with a state."""
    w = Writer()
    state = w.variable((1, 2 * cells))
    weights = [w.random((cells, 4)), w.random((cells, 2)), -1]
    return w.file([w.operator("SVDF", [w.input((1, 4)), *weights, state], (1, cells), Rank=1)])


def counter(start=10):
    """Adds its input to a variable that CALL_ONCE has set, and gives the sum."""
    w = Writer()
    setup = w.graph()
    for graph in (setup, w):
        graph.handle = graph.operator("VAR_HANDLE", [], (), "int32", SharedName="sum")
        graph.tensors[graph.handle]["Type"] = tflite.TensorType.RESOURCE
    setup.operator("ASSIGN_VARIABLE", [setup.handle, setup.constant(np.full((1,), start, np.float32))], [])
    setup.outputs = []
    w.operators.insert(0, ("CALL_ONCE", [], [], {"InitSubgraphIndex": 1}))
    x = w.input((1,))
    total = w.operator("ADD", [x, w.operator("READ_VARIABLE", [w.handle], (1,))], (1,))
    w.operator("ASSIGN_VARIABLE", [w.handle, total], [])
    return w.file([total])


def selection():
    """The places of what is positive: how many, only the run knows."""
    w = Writer()
    is_positive = w.operator("GREATER", [w.input((4,)), w.constant(np.zeros(4, np.float32))], (4,), "bool")
    places = w.operator("WHERE", [is_positive], (0, 1), "int64")
    return w.file([w.operator("CAST", [places], (0, 1), "int32"), places])


def entries():
    """Two signatures, "add" and "multiply", which change one variable, and a third, "scale", that has no state."""
    w = Writer()
    setup, second, third = (w.graph() for _ in range(3))
    for graph in (setup, w, second):
        graph.handle = graph.operator("VAR_HANDLE", [], (), "int32", SharedName="sum")
        graph.tensors[graph.handle]["Type"] = tflite.TensorType.RESOURCE
    setup.operator("ASSIGN_VARIABLE", [setup.handle, setup.constant(np.full((2,), 3, np.float32))], [])
    setup.outputs = []
    for graph, name in ((w, "ADD"), (second, "MUL")):
        graph.operators.insert(0, ("CALL_ONCE", [], [], {"InitSubgraphIndex": 1}))
        x = graph.input((2,))
        found = graph.operator(name, [x, graph.operator("READ_VARIABLE", [graph.handle], (2,))], (2,))
        graph.operator("ASSIGN_VARIABLE", [graph.handle, found], [])
        graph.outputs, graph.place = [found], x
    y = third.input((1, 4), signature=(-1, 4))
    third.outputs, third.place = [third.operator("FULLY_CONNECTED", [y, third.random((3, 4))], (1, 3))], y
    names = {"add": (0, w), "multiply": (2, second), "scale": (3, third)}
    signatures = [(key, n, {"x": g.place}, {"y": g.outputs[0]}) for key, (n, g) in names.items()]
    return w.file(w.outputs, signatures=signatures)
