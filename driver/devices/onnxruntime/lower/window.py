"""Windows over images: convolutions, pooling, resizing. ONNX's images have their channels first."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.devices.lowering.errors import require
from driver.devices.onnxruntime.lower.node import PLANAR, OrtNode, stored_type
from driver.devices.onnxruntime.lower.products import check_products, quantised, weights_type
from driver.formats.onnx_schema import TYPES
from driver.nn.ops.conv import geometry, transposed_geometry
from driver.nn.ops.resize import nearest_indices, neighbours
from driver.nn.ops.window import Axis, image_shape, window_axes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

LAST_FIRST = (3, 0, 1, 2)
"""The axes of the weights of transposed and of depthwise convolutions, in ONNX's order."""

LARGEST_SUM = 2.0**22
"""Of quantised products, times the steps that a unit of it makes: up to there float32 adds them up within a step."""

LARGEST_WINDOW = 1 << 20
"""Extents, strides and dilations whose positions stay in 32 bits."""


def _order(nchw: bool) -> tuple[int, ...]:
    return () if nchw else PLANAR


def _check_window(*axes: Axis) -> None:
    largest = max(n for a in axes for n in (a.filter, a.stride, a.dilation, a.head, a.tail))
    require(largest <= LARGEST_WINDOW, "its windows are too large")


def _pads(y: Axis, x: Axis) -> list[int]:
    return [y.head, x.head, max(0, y.tail), max(0, x.tail)]


def convolution(name: str, has_fan: bool, node: OrtNode) -> None:
    """CONV_2D, GROUPED_CONV_2D, DEPTHWISE_CONV_2D."""
    g = geometry(node.call, has_fan)
    _check_window(g.y, g.x)
    check_products(node)
    is_depthwise = name == "DEPTHWISE_CONV_2D"
    fields: dict[str, Any] = {
        "strides": [g.y.stride, g.x.stride],
        "dilations": [g.y.dilation, g.x.dilation],
        "kernel_shape": [g.y.filter, g.x.filter],
        "pads": _pads(g.y, g.x),
        "group": g.channels if is_depthwise else g.fan,
    }
    node.graph.work += math.prod(node.output().shape) * math.prod(node.input(1).shape[1 : 3 if is_depthwise else 4])
    order, weights = _order(g.nchw), LAST_FIRST if is_depthwise else PLANAR
    if node.output().type.is_quantised:
        operands = node.read(0, stored_type(node.input(0)), order), node.read(1, weights_type(node), weights)
        result = quantised("QLinearConv", "", node, operands, **fields)
        node.put(node.clamped(result, node.output(), g.activation), order=order)
    else:
        result = node.emit("Conv", node.read(0, order=order), node.read(1, order=weights), node.read(2), **fields)
        node.give(result, code=g.activation, order=order)


def transposed(node: OrtNode) -> None:
    """TRANSPOSE_CONV_2D. ONNX Runtime has it in float32 only, which holds sums of bytes up to a point."""
    y, x, activation, nchw = transposed_geometry(node.call)
    _check_window(y, x)
    check_products(node)
    order, is_quantised = _order(nchw), node.output().type.is_quantised
    node.graph.work += math.prod(node.input(0).shape) * math.prod(node.input(1).shape[:3])
    source, weights = node.read(0, "STEPS" if is_quantised else None, order), _spread(node)
    fields: dict[str, Any] = {"strides": [y.stride, x.stride], "kernel_shape": [y.filter, x.filter]}
    sums = node.emit("ConvTranspose", source, weights, pads=_pads(y, x), **fields)
    if min(y.tail, x.tail) < 0:  # what no window reaches
        beyond = [0] * 6 + [max(0, -y.tail), max(0, -x.tail)]
        sums = node.emit("Pad", sums, node.integers(beyond))
    bias = node.emit("Cast", node.read(2, "INT32"), to=TYPES["FLOAT"]) if is_quantised else node.read(2)
    total = node.emit("Add", sums, node.reshaped(bias, (-1, 1, 1)))
    if is_quantised:
        total = node.emit("Mul", total, node.graph.constant(_steps_of_sums(node)))
    node.give(total, code=activation, steps=True, order=order)


def _spread(node: OrtNode) -> str:
    """Return the weights in ONNX's order, without their zero point, which they have none of when they have many
    scales.
    """
    if node.input(1).channel_quant is None:
        return node.read(1, "STEPS" if node.input(1).type.is_quantised else None, LAST_FIRST)
    return node.emit("Cast", node.read(1, "INT32", LAST_FIRST), to=TYPES["FLOAT"])


def _steps_of_sums(node: OrtNode) -> NDArray[np.float32]:
    """Return how many steps of the output a unit of a sum of products is, for each channel."""
    source, weights, out = node.input(0), node.input(1), node.output()
    steps = np.array(weights.channel_quant[0] if weights.channel_quant else [weights.scale], np.float64)
    factor = (steps * source.scale / out.scale).reshape(-1, 1, 1)
    most = 255.0**2 * math.prod(weights.shape[1:])
    require(most * factor.max() <= LARGEST_SUM, "its sums are too large")
    return factor.astype(np.float32)


def pool(name: str, node: OrtNode) -> None:
    """MAX_POOL_2D, AVERAGE_POOL_2D, L2_POOL_2D. Padded positions do not count."""
    y, x, activation, nchw = window_axes(node.call)
    _check_window(y, x)
    order, is_quantised = _order(nchw), node.output().type.is_quantised
    fields: dict[str, Any] = {
        "strides": [y.stride, x.stride],
        "kernel_shape": [y.filter, x.filter],
        "pads": _pads(y, x),
    }
    if name == "MAX_POOL_2D" and is_quantised:
        source = node.read(0, stored_type(node.input(0)), order)
        node.put(node.clamped(node.emit("MaxPool", source, **fields), node.output(), activation), order=order)
        return
    source = node.read(0, "STEPS" if is_quantised else None, order)
    if name == "L2_POOL_2D":
        source = node.emit("Mul", source, source)
    found = node.emit("MaxPool" if name == "MAX_POOL_2D" else "AveragePool", source, **fields)
    if name == "L2_POOL_2D":
        found = node.emit("Sqrt", found)
    node.give(found, code=activation, steps=True, order=order)


def _extents(node: OrtNode, nchw: bool) -> Sequence[tuple[int, int, int]]:
    """Return the axis, the input extent and the output extent of height and width."""
    _, h, w, _ = image_shape(node.input(0).shape, nchw)
    _, height, width, _ = image_shape(node.output().shape, nchw)
    return ((2 if nchw else 1, h, height), (3 if nchw else 2, w, width))


def _positions(node: OrtNode, indices: NDArray[Any]) -> str:
    return node.graph.constant(indices.astype(np.int64))


def bilinear(node: OrtNode) -> None:
    """RESIZE_BILINEAR: rows and columns between which each result lies, and their shares, are known beforehand."""
    nchw, align, half_pixel = (node.call.flag(i) for i in (3, 4, 5))
    image = node.read(0, "STEPS" if node.output().type.is_quantised else None)
    for axis, size, out in _extents(node, nchw):
        low, high, weight = neighbours(size, out, align, half_pixel)
        near, far = (node.emit("Gather", image, _positions(node, i), axis=axis) for i in (low, high))
        share = node.graph.constant(weight.reshape([-1 if i == axis else 1 for i in range(axis, 4)]))
        image = node.emit("Add", near, node.emit("Mul", node.emit("Sub", far, near), share))
    node.give(image, steps=True)


def nearest(node: OrtNode) -> None:
    """RESIZE_NEAREST_NEIGHBOR: each row and column is a copy of one."""
    nchw, align, half_pixel = (node.call.flag(i) for i in (3, 4, 5))
    raw = node.raw_type(0)
    image = node.read(0, raw)
    for axis, size, out in _extents(node, nchw):
        image = node.emit("Gather", image, _positions(node, nearest_indices(size, out, align, half_pixel)), axis=axis)
    node.put(image, type_=raw)


TABLE: dict[str, Callable[[OrtNode], None]] = {
    "CONV_2D": partial(convolution, "CONV_2D", False),
    "GROUPED_CONV_2D": partial(convolution, "GROUPED_CONV_2D", True),
    "DEPTHWISE_CONV_2D": partial(convolution, "DEPTHWISE_CONV_2D", True),
    "TRANSPOSE_CONV_2D": transposed,
    "AVERAGE_POOL_2D": partial(pool, "AVERAGE_POOL_2D"),
    "MAX_POOL_2D": partial(pool, "MAX_POOL_2D"),
    "L2_POOL_2D": partial(pool, "L2_POOL_2D"),
    "RESIZE_BILINEAR": bilinear,
    "RESIZE_NEAREST_NEIGHBOR": nearest,
}
