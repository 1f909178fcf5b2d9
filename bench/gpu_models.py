"""The .onnx files that gpu.py runs when it is given none: MobileNetV1, a transformer's encoder, chains of products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from models import CLASSES, layers
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

TOKENS, WIDTH, HEADS, LAYERS = 128, 384, 6, 6  # about those of a sentence encoder: 11 million parameters
ROWS, COLUMNS = 8192, 1024  # of the matrices in a chain: 32 MB


class Graph:
    """A graph under construction: each node's only output is the next node's first input."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: NDArray[Any]) -> str:
        """Its name."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def node(self, type_: str, *inputs: str, **attributes: Any) -> str:
        """Its output's name."""
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(type_, inputs, [name], **attributes))
        return name

    def save(self, path: Path, shape: Sequence[int | str], output: str, result: Sequence[int | str]) -> Path:
        """Writes the file: float32 `x` of that shape in, float32 `output` of the shape `result` out. A word is an open
        dimension.
        """
        ends = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, dimensions)
            for name, dimensions in (("x", shape), (output, result))
        ]
        graph = helper.make_graph(self.nodes, path.stem, ends[:1], ends[1:], self.constants)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.save(made, path)
        return path


def mobilenet(path: Path, pixels: int = 224) -> Path:
    """MobileNetV1 1.0, channels first, with the weights of the other benchmarks."""
    graph, at = Graph(), "x"
    low, high = graph.constant(np.float32(0)), graph.constant(np.float32(6))
    *body, last = layers()
    for layer in body:
        at = graph.node("Clip", _convolution(graph, at, layer), low, high)
    at = _convolution(graph, graph.node("GlobalAveragePool", at), last)
    at = graph.node("Softmax", graph.node("Flatten", at), axis=1)
    return graph.save(path, (1, 3, pixels, pixels), at, (1, CLASSES))


def _convolution(graph: Graph, at: str, layer: Any) -> str:
    if layer.depthwise:
        weights, group = layer.weights.transpose(3, 0, 1, 2), layer.weights.shape[3]
    else:
        weights, group = layer.weights.transpose(0, 3, 1, 2), 1
    options = {"auto_pad": "SAME_UPPER", "strides": [layer.stride] * 2, "group": group}
    return graph.node("Conv", at, graph.constant(weights), graph.constant(layer.bias), **options)


def encoder(path: Path) -> Path:
    """A transformer's encoder on embedded tokens."""
    graph, at = Graph(), "x"
    random = np.random.default_rng(7)

    def linear(at: str, inputs: int, outputs: int) -> str:
        weights = random.standard_normal((inputs, outputs)).astype(np.float32) / np.float32(np.sqrt(inputs))
        product = graph.node("MatMul", at, graph.constant(weights))
        return graph.node("Add", product, graph.constant(np.zeros(outputs, np.float32)))

    def normalised(at: str) -> str:
        ends = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
        return graph.node("LayerNormalization", at, *map(graph.constant, ends), axis=-1)

    for _ in range(LAYERS):
        at = normalised(graph.node("Add", at, _attention(graph, at, linear)))
        inner = linear(at, WIDTH, 4 * WIDTH)
        bell = graph.node("Erf", graph.node("Mul", inner, graph.constant(np.float32(0.5**0.5))))
        half = graph.node("Mul", inner, graph.constant(np.float32(0.5)))
        inner = graph.node("Mul", half, graph.node("Add", bell, graph.constant(np.float32(1))))
        at = normalised(graph.node("Add", at, linear(inner, 4 * WIDTH, WIDTH)))
    return graph.save(path, (1, TOKENS, WIDTH), at, (1, TOKENS, WIDTH))


def _attention(graph: Graph, at: str, linear: Callable[[str, int, int], str]) -> str:
    split, joined = (
        graph.constant(np.array(shape, np.int64)) for shape in ((1, TOKENS, HEADS, -1), (1, TOKENS, WIDTH))
    )
    query, key, value = (
        graph.node("Transpose", graph.node("Reshape", linear(at, WIDTH, WIDTH), split), perm=perm)
        for perm in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3))
    )
    scale = graph.constant(np.float32((WIDTH // HEADS) ** -0.5))
    weights = graph.node("Softmax", graph.node("Mul", graph.node("MatMul", query, key), scale), axis=-1)
    found = graph.node("Transpose", graph.node("MatMul", weights, value), perm=(0, 2, 1, 3))
    return linear(graph.node("Reshape", found, joined), WIDTH, WIDTH)


def chain(path: Path, links: int, rows: int = ROWS) -> Path:
    """Products with a matrix, one after the other; what goes in and comes out has `rows` x COLUMNS floats."""
    graph, at = Graph(), "x"
    matrix = graph.constant(np.eye(COLUMNS, dtype=np.float32))
    for _ in range(links):
        at = graph.node("MatMul", at, matrix)
    return graph.save(path, (rows, COLUMNS), at, (rows, COLUMNS))


def addition(path: Path) -> Path:
    """ADD of 4 floats."""
    graph = Graph()
    found = graph.node("Add", "x", graph.constant(np.ones(4, np.float32)))
    return graph.save(path, (1, 4), found, (1, 4))
