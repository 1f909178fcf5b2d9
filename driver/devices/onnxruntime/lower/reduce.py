"""Reductions, normalisations and the fully connected layer."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from driver.devices.onnxruntime.lower.node import OrtNode, stored_type
from driver.devices.onnxruntime.lower.products import check_products, quantised, weights_type
from driver.devices.onnxruntime.writer import CONTRIBUTED
from driver.formats.onnx_schema import TYPES
from driver.nn.ops.axes import LEAST_NORM, all_axes, one_axis

if TYPE_CHECKING:
    from collections.abc import Callable


FEW = 64
"""Elements up to which float32 adds and multiplies closely enough; more of them are in float64."""


def _reduced(name: str, node: OrtNode, source: str) -> str:
    """Over the axes of input 1, in the shape of output 0."""
    axes = all_axes(node.call.values(1), len(node.input(0).shape))
    if axes:
        source = node.emit(name, source, node.integers(axes), keepdims=1)
    return node.reshaped(source, node.output().shape)


def _accumulated(name: str, node: OrtNode, source: str) -> str:
    """Reduce as `_reduced` does, float32 in which rounding errors could add up."""
    if math.prod(node.input(0).shape) <= FEW * math.prod(node.output().shape):
        return _reduced(name, node, source)
    found = _reduced(name, node, node.emit("Cast", source, to=TYPES["DOUBLE"]))
    return node.emit("Cast", found, to=TYPES["FLOAT"])


def mean(node: OrtNode) -> None:
    """Lower MEAN, of steps if it is quantised."""
    source = node.read(0, "STEPS" if node.output().type.is_quantised else None)
    node.give(_accumulated("ReduceMean", node, source), steps=True)


def sum_or_product(name: str, node: OrtNode) -> None:
    """REDUCE_SUM, REDUCE_PROD."""
    node.give(_accumulated(name, node, node.read(0)))


def reduction(name: str, node: OrtNode) -> None:
    """REDUCE_MAX, REDUCE_MIN: quantised data as it is stored."""
    if node.output().type.is_quantised:
        node.put(_reduced(name, node, node.read(0, stored_type(node.input(0)))))
    else:
        node.give(_reduced(name, node, node.read(0)))


def agreement(name: str, node: OrtNode) -> None:
    """REDUCE_ALL, REDUCE_ANY: extremes of 0 and 1."""
    bits = node.emit("Cast", node.read(0), to=TYPES["INT32"])
    node.give(node.emit("Cast", _reduced(name, node, bits), to=TYPES["BOOL"]))


def extreme(name: str, node: OrtNode) -> None:
    """ARGMAX, ARGMIN: the first of equal ones."""
    axis = one_axis(node.call.integer(1), len(node.input(0).shape))
    source = node.read(0, "INT32" if node.input(0).type.is_quantised else None)
    found = node.emit("Cast", node.emit(name, source, axis=axis, keepdims=0), to=TYPES["INT32"])
    node.put(node.reshaped(found, node.output().shape))


def top(node: OrtNode) -> None:
    """TOPK_V2: of equal ones ONNX Runtime lists the first, and the HAL the last, so it gets them in reverse."""
    size, tensor = node.input(0).shape[-1], node.input(0)
    source = node.read(0, "INT32" if tensor.type.is_quantised else None)
    axis = len(tensor.shape) - 1
    numbers = (node.integers([value]) for value in (size - 1, -size - 1, axis, -1))
    turned, k = node.emit("Slice", source, *numbers), node.integers([node.call.integer(1)])
    values, places = node.graph.writer.node("TopK", [turned, k], 2)
    found = node.emit("Sub", node.integers(size - 1), places)
    node.put(node.emit("Cast", found, to=TYPES["INT32"]), 1)
    if tensor.type.is_quantised:
        node.put(node.emit("Cast", values, to=TYPES[stored_type(tensor)]))
    else:
        node.give(values)


def fully_connected(node: OrtNode) -> None:
    """Lower FULLY_CONNECTED: inputs of any shape are rows of as many elements as a unit has weights."""
    check_products(node)
    rows, (units, size) = node.output().shape[0], node.input(1).shape
    node.graph.work += rows * units * size
    activation, out = node.call.integer(3), node.output()
    if not out.type.is_quantised:
        source = node.reshaped(node.read(0), (rows, size))
        node.give(node.emit("Gemm", source, node.read(1), node.read(2), transB=1), code=activation)
        return
    source = node.reshaped(node.read(0, stored_type(node.input(0))), (rows, size))
    operands = source, node.read(1, weights_type(node))
    result = quantised("QGemm", CONTRIBUTED, node, operands, transB=1)
    node.put(node.clamped(result, out, activation))


def _axis(node: OrtNode, i: int) -> int:
    return one_axis(node.call.integer(i) if node.call.given(i) else -1, len(node.input(0).shape))


def softmax(name: str, node: OrtNode) -> None:
    """SOFTMAX, LOG_SOFTMAX: along any axis; of differences to the largest, so that large numbers lose no digits."""
    source, beta, axis = node.read(0), node.real(1), _axis(node, 2)
    if name == "LogSoftmax" or beta != 1.0:
        source = node.emit("Sub", source, node.emit("ReduceMax", source, node.integers([axis]), keepdims=1))
    if beta != 1.0:
        source = node.emit("Mul", source, node.scalar(beta))
    node.give(node.emit(name, source, axis=axis))


def l2_normalisation(node: OrtNode) -> None:
    """Along any axis; steps have the same direction as what they stand for."""
    source = node.read(0, "STEPS" if node.input(0).type.is_quantised else None)
    norm = node.emit("ReduceL2", source, node.integers([_axis(node, 1)]), keepdims=1)
    node.give(node.emit("Div", source, node.emit("Max", norm, node.scalar(LEAST_NORM))))


def response_normalisation(node: OrtNode) -> None:
    """ONNX's has the channels second, and divides alpha by the window."""
    shape, axis = node.input(0).shape, _axis(node, 5)
    bias, alpha, beta = (node.real(i) for i in (2, 3, 4))
    size = 2 * min(node.call.integer(1), shape[axis] - 1) + 1  # a larger one sees no more
    image = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]), 1)
    source = node.reshaped(node.read(0), image)
    found = node.emit("LRN", source, alpha=alpha * size, beta=beta, bias=bias, size=size)
    node.give(node.reshaped(found, shape))


def instance_normalisation(node: OrtNode) -> None:
    """(x - mean) * gamma / sqrt(variance + epsilon) + beta, for each channel of each image."""
    axes = node.integers([2, 3] if node.call.flag(4) else [1, 2])
    gamma, beta, epsilon = (node.real(i) for i in (1, 2, 3))
    wide = node.emit("Cast", node.read(0), to=TYPES["DOUBLE"])  # values may be close to each other and far from 0
    apart = node.emit("Sub", wide, node.emit("ReduceMean", wide, axes, keepdims=1))
    apart = node.emit("Cast", apart, to=TYPES["FLOAT"])
    spread = node.emit("ReduceMean", node.emit("Mul", apart, apart), axes, keepdims=1)
    root = node.emit("Sqrt", node.emit("Add", spread, node.scalar(epsilon)))
    scaled = node.emit("Mul", apart, node.emit("Div", node.scalar(gamma), root))
    node.give(node.emit("Add", scaled, node.scalar(beta)))


TABLE: dict[str, Callable[[OrtNode], None]] = {
    "MEAN": mean,
    "REDUCE_ALL": partial(agreement, "ReduceMin"),
    "REDUCE_ANY": partial(agreement, "ReduceMax"),
    "REDUCE_MAX": partial(reduction, "ReduceMax"),
    "REDUCE_MIN": partial(reduction, "ReduceMin"),
    "REDUCE_PROD": partial(sum_or_product, "ReduceProd"),
    "REDUCE_SUM": partial(sum_or_product, "ReduceSum"),
    "ARGMAX": partial(extreme, "ArgMax"),
    "ARGMIN": partial(extreme, "ArgMin"),
    "FULLY_CONNECTED": fully_connected,
    "SOFTMAX": partial(softmax, "Softmax"),
    "LOG_SOFTMAX": partial(softmax, "LogSoftmax"),
    "INSTANCE_NORMALIZATION": instance_normalisation,
    "TOPK_V2": top,
    "L2_NORMALIZATION": l2_normalisation,
    "LOCAL_RESPONSE_NORMALIZATION": response_normalisation,
}
