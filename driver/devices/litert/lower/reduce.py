"""Reductions, normalisations and the fully connected layer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from driver.devices.litert.lower.node import MAX_RANK, LiteRtNode
from driver.devices.litert.lower.sums import NONE, Sums
from driver.devices.litert.lower.window import LARGEST_FACTOR, check_products
from driver.devices.lowering.errors import require
from driver.nn.ops.axes import all_axes, one_axis
from driver.nn.ops.window import image_shape
from driver.nn.types import OperandType

if TYPE_CHECKING:
    from collections.abc import Callable


def reduction(name: str, node: LiteRtNode) -> None:
    """TFLite's reductions keep the axes here; whether the HAL's do is a matter of the shape only."""
    shape = node.input(0).shape
    axes = all_axes(node.call.values(1), len(shape))
    if not axes:
        node.reshape(node.read(0), node.write(), node.output().shape)
        return
    kept = tuple(1 if i in axes else d for i, d in enumerate(shape))
    source, is_direct = node.read(0), kept == node.output().shape
    result = node.write() if is_direct else node.like_output(0, kept)
    node.emit(name, [source, node.integers(axes)], [result], "Reducer", keepDims=True)
    if not is_direct:
        node.reshape(result, node.write(), node.output().shape)


def extreme(name: str, options: str, node: LiteRtNode) -> None:
    """ARGMAX, ARGMIN."""
    shape = node.input(0).shape
    axis = one_axis(node.call.integer(1), len(shape))
    found = (*shape[:axis], *shape[axis + 1 :])
    is_direct = found == node.output().shape
    result = node.write() if is_direct else node.like_output(0, found)
    node.emit(name, [node.read(0), node.integers(np.array(axis))], [result], options, outputType=2)
    if not is_direct:
        node.reshape(result, node.write(), node.output().shape)


def fully_connected(node: LiteRtNode) -> None:
    """Lower FULLY_CONNECTED: inputs of any shape are rows of as many elements as a unit has weights."""
    rows, size = node.output().shape[0], node.input(1).shape[1]
    is_matmul = _is_matmul(node)
    if is_matmul:
        fine = node.input(0).scale * node.input(1).scale / LARGEST_FACTOR
        require(node.output().scale >= fine, "the scale of its output is too small")
    else:
        check_products(node)
    source = node.read(0)
    if node.input(0).shape != (rows, size):
        flat = node.like_input(0, (rows, size))
        node.reshape(source, flat, (rows, size))
        source = flat
    if is_matmul:
        node.emit("BATCH_MATMUL", [source, node.read(1)], [node.write()], "BatchMatMul", adjY=True)
        return
    inputs = [source, node.read(1), node.read(2)]
    activation = node.call.integer(3)
    node.emit("FULLY_CONNECTED", inputs, [node.write()], "FullyConnected", fusedActivationFunction=activation)


def _is_matmul(node: LiteRtNode) -> bool:
    """Return True if it multiplies two computed matrices with a sign and zero points, and neither adds nor clips
    anything.
    """
    weights, bias, signed = node.input(1), node.input(2), OperandType.TENSOR_QUANT8_ASYMM_SIGNED
    is_computed = weights.type == signed and weights.zero_point != 0 and not weights.fixed
    return is_computed and bias.fixed and not np.any(bias.data) and node.call.integer(3) == NONE


def along(axis: int, node: LiteRtNode, emit: Callable[[int, int], None]) -> None:
    """Do along another axis an operation that TFLite does along the last one: move that axis there and back."""
    shape, out = node.input(0).shape, node.output().shape
    last = len(shape) - 1
    if axis == last:
        emit(node.read(0), node.write())
        return
    order = [i for i in range(len(shape)) if i != axis] + [axis]
    back = [order.index(i) for i in range(len(shape))]
    require(len(shape) <= MAX_RANK, "its rank is above 4")
    source = node.like_input(0, [shape[i] for i in order])
    result = node.like_output(0, [out[i] for i in order])
    node.emit("TRANSPOSE", [node.read(0), node.integers(order)], [source], "Transpose")
    emit(source, result)
    node.emit("TRANSPOSE", [result, node.integers(back)], [node.write()], "Transpose")


def _axis(node: LiteRtNode, i: int) -> int:
    return one_axis(node.call.integer(i) if node.call.given(i) else -1, len(node.input(0).shape))


def softmax(node: LiteRtNode) -> None:
    """Along any axis."""
    beta = node.real(1)

    def emit(source: int, result: int) -> None:
        node.emit("SOFTMAX", [source], [result], "Softmax", beta=beta)

    along(_axis(node, 2), node, emit)


def log_softmax(node: LiteRtNode) -> None:
    """TFLite's knows no beta, so what is not 1 is multiplied with before."""
    beta = node.real(1)

    def emit(source: int, result: int) -> None:
        if beta != 1.0:
            scaled = node.graph.writer.tensor("FLOAT32", node.graph.writer.dimensions(source))
            factor = node.graph.writer.constant("FLOAT32", np.array([beta], np.float32))
            node.emit("MUL", [source, factor], [scaled], "Mul", fusedActivationFunction=0)
            source = scaled
        node.emit("LOG_SOFTMAX", [source], [result], "LogSoftmax")

    along(_axis(node, 2), node, emit)


def instance_normalisation(node: LiteRtNode) -> None:
    """(x - mean) * gamma / sqrt(variance + epsilon) + beta, for each channel of each image."""
    nchw, (gamma, beta, epsilon) = node.call.flag(4), (node.real(i) for i in (1, 2, 3))
    sums = Sums(node)
    shape = image_shape(node.input(0).shape, nchw)
    column, axes, source = (shape[0], 1, 1, shape[3]), node.integers((1, 2)), node.read(0, moved=nchw)
    mean = sums.emit("MEAN", [source, axes], column, "Reducer", keepDims=True)
    apart = sums.subtract(source, mean, shape)
    squares = sums.multiply(apart, apart, shape)
    spread = sums.emit("MEAN", [squares, axes], column, "Reducer", keepDims=True)
    factor = sums.emit("RSQRT", [sums.add(spread, sums.constant(epsilon), column)], column)
    scaled = sums.multiply(apart, sums.multiply(factor, sums.constant(gamma), column), shape)
    result = node.write(moved=nchw)
    node.emit("ADD", [scaled, sums.constant(beta)], [result], "Add", fusedActivationFunction=0)


def top(node: LiteRtNode) -> None:
    """TOPK_V2: of equal ones TFLite lists the first, and the HAL the last, so TFLite gets them in reverse."""
    shape = node.input(0).shape
    values, last = node.write(0), node.graph.writer.constant("INT32", np.array([shape[-1] - 1], np.int32))
    turned, found = node.like_input(0, shape), node.graph.writer.tensor("INT32", node.output(1).shape)
    node.emit("REVERSE_V2", [node.read(0), node.integers([len(shape) - 1])], [turned], "ReverseV2")
    node.emit("TOPK_V2", [turned, node.integers(np.array(node.call.integer(1)))], [values, found], "TopKV2")
    node.emit("SUB", [last, found], [node.write(1)], "Sub", fusedActivationFunction=0)


def l2_normalisation(node: LiteRtNode) -> None:
    """Along any axis."""

    def emit(source: int, result: int) -> None:
        node.emit("L2_NORMALIZATION", [source], [result], "L2Norm", fusedActivationFunction=0)

    along(_axis(node, 1), node, emit)


def response_normalisation(node: LiteRtNode) -> None:
    """TFLite's takes four dimensions, so there are more of size 1 before."""
    bias, alpha, beta = (node.real(i) for i in (2, 3, 4))
    axis = _axis(node, 5)
    radius = min(node.call.integer(1), node.input(0).shape[axis] - 1)  # a larger one sees no more
    fields = {"radius": radius, "bias": bias, "alpha": alpha, "beta": beta}

    def emit(source: int, result: int) -> None:
        shape = node.graph.writer.dimensions(source)
        four = (1,) * (MAX_RANK - len(shape)) + shape
        images = [source, result] if four == shape else [node.like_input(0, four), node.like_output(0, four)]
        if four != shape:
            node.reshape(source, images[0], four)
        node.emit("LOCAL_RESPONSE_NORMALIZATION", images[:1], images[1:], "LocalResponseNormalization", **fields)
        if four != shape:
            node.reshape(images[1], result, shape)

    along(axis, node, emit)


TABLE: dict[str, Callable[[LiteRtNode], None]] = {
    "MEAN": partial(reduction, "MEAN"),
    "REDUCE_ALL": partial(reduction, "REDUCE_ALL"),
    "REDUCE_ANY": partial(reduction, "REDUCE_ANY"),
    "REDUCE_MAX": partial(reduction, "REDUCE_MAX"),
    "REDUCE_MIN": partial(reduction, "REDUCE_MIN"),
    "REDUCE_PROD": partial(reduction, "REDUCE_PROD"),
    "REDUCE_SUM": partial(reduction, "SUM"),
    "ARGMAX": partial(extreme, "ARG_MAX", "ArgMax"),
    "ARGMIN": partial(extreme, "ARG_MIN", "ArgMin"),
    "FULLY_CONNECTED": fully_connected,
    "SOFTMAX": softmax,
    "LOG_SOFTMAX": log_softmax,
    "INSTANCE_NORMALIZATION": instance_normalisation,
    "TOPK_V2": top,
    "L2_NORMALIZATION": l2_normalisation,
    "LOCAL_RESPONSE_NORMALIZATION": response_normalisation,
}
