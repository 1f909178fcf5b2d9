"""Windows over images: convolutions, pooling, resizing, blocks. TFLite's images have their channels last."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.devices.litert.flatbuffer import Quantisation
from driver.devices.litert.lower.node import LiteRtNode, quantisation
from driver.devices.litert.lower.sums import Sums
from driver.devices.lowering.errors import require
from driver.nn.ops.conv import geometry, transposed_geometry
from driver.nn.ops.slices import paddings
from driver.nn.ops.window import Axis, image_shape, implicit, window_axes
from driver.nn.types import OperandType

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

SAME, VALID = 0, 1  # TFLite's; the HAL counts from 1
LARGEST_FACTOR = 256.0
"""Of a quantised sum of products to the steps of the output."""
LARGEST_WINDOW = 1 << 20
"""Extents and strides with which TFLite's positions stay in 32 bits."""

_MIDDLE = 128


def _scheme(y: Axis, x: Axis) -> int | None:
    """Return the padding scheme that gives these paddings, or None."""
    if not (y.head or y.tail or x.head or x.tail):
        return VALID
    same = [implicit(1, a.size, a.filter, a.stride, dilation=a.dilation) for a in (y, x)]
    return SAME if same == [y, x] else None


def _window(node: LiteRtNode, source: int, y: Axis, x: Axis, nchw: bool, fill: Any = None) -> tuple[int, int]:
    """Return the image, and the padding scheme for it. Paddings that no scheme gives are added: zeros, or `fill`."""
    require(all(max(a.filter, a.stride, a.dilation) <= LARGEST_WINDOW for a in (y, x)), "its windows are too large")
    scheme = _scheme(y, x)
    if scheme is not None:
        return source, scheme
    n, h, w, c = image_shape(node.input(0).shape, nchw)
    pads = node.integers([[0, 0], [y.head, y.tail], [x.head, x.tail], [0, 0]])
    result = node.like_input(0, (n, h + y.head + y.tail, w + x.head + x.tail, c))
    if fill is None:
        node.emit("PAD", [source, pads], [result], "Pad")
    else:
        node.emit("PADV2", [source, pads, fill], [result], "PadV2")
    return result, VALID


def check_products(node: LiteRtNode) -> None:
    """Require that TFLite can sum the quantised products of inputs 0 and 1, and choose the sign of their bytes.

    Its signed kernels take no zero point of weights. So bytes are signed where the weights' zero is the middle of their
    range, and unsigned elsewhere.
    """
    data, weights, out = node.input(0), node.input(1), node.output()
    if not out.type.is_quantised:
        return
    middle = _MIDDLE if data.type == OperandType.TENSOR_QUANT8_ASYMM else 0
    is_centred = weights.channel_quant is not None or weights.zero_point == middle
    node.byte = node.signed_byte = "INT8" if is_centred else "UINT8"
    scales = weights.channel_quant[0] if weights.channel_quant else [weights.scale]
    fits = weights.channel_quant or math.isclose(node.input(2).scale, data.scale * weights.scale, rel_tol=1e-6)
    require(fits and min(scales) > 0, "the scale of its bias is not that of its products")
    require(data.scale * max(scales) <= LARGEST_FACTOR * out.scale, "the scale of its output is too small")


def _bias(node: LiteRtNode) -> int:
    """Input 2, which has a scale for each channel when the weights have."""
    channels, bias = node.input(1).channel_quant, node.input(2)
    if channels is None or not bias.fixed:
        return node.read(2)
    scales = tuple(node.input(0).scale * scale for scale in channels[0])
    return node.graph.writer.constant("INT32", bias.data, Quantisation(scales))


def convolution(name: str, has_fan: bool, node: LiteRtNode) -> None:
    """CONV_2D, GROUPED_CONV_2D, DEPTHWISE_CONV_2D."""
    g = geometry(node.call, has_fan)
    check_products(node)
    source, scheme = _window(node, node.read(0, moved=g.nchw), g.y, g.x, nchw=g.nchw)
    fields: dict[str, Any] = {
        "padding": scheme,
        "strideH": g.y.stride,
        "strideW": g.x.stride,
        "dilationHFactor": g.y.dilation,
        "dilationWFactor": g.x.dilation,
        "fusedActivationFunction": g.activation,
    }
    if name == "DEPTHWISE_CONV_2D":
        fields["depthMultiplier"] = g.fan
    options = "DepthwiseConv2D" if name == "DEPTHWISE_CONV_2D" else "Conv2D"
    weights = node.read(1)
    node.emit(name, [source, weights, _bias(node)], [node.write(moved=g.nchw)], options, **fields)


def transposed(node: LiteRtNode) -> None:
    """TRANSPOSE_CONV_2D: with the scheme that gives its paddings; if none does, what they cut off is cut off after."""
    y, x, activation, nchw = transposed_geometry(node.call)
    check_products(node)
    n, *_ = node.input(0).shape
    wanted = (n, y.size, x.size, node.input(1).shape[0])
    schemes = [scheme for scheme in (SAME, VALID) if _fits(y, scheme) and _fits(x, scheme)]
    whole = wanted if schemes else (n, _whole(y), _whole(x), wanted[3])
    require(schemes or all(a.head + a.size <= _whole(a) for a in (y, x)), "its output is larger than its windows reach")
    result = node.write(moved=nchw)
    target = result if schemes else node.like_output(0, whole)
    node.emit(
        "TRANSPOSE_CONV",
        [node.integers(whole), node.read(1), node.read(0, moved=nchw), _bias(node)],
        [target],
        "TransposeConv",
        padding=schemes[0] if schemes else VALID,
        strideH=y.stride,
        strideW=x.stride,
        fusedActivationFunction=activation,
    )
    if not schemes:
        node.emit("SLICE", [target, node.integers((0, y.head, x.head, 0)), node.integers(wanted)], [result], "Slice")


def _whole(axis: Axis) -> int:
    """Return how far the windows reach, which are set by the input here."""
    return (axis.out - 1) * axis.stride + axis.filter


def _fits(axis: Axis, scheme: int) -> bool:
    """Return True if TFLite, which sees a convolution the other way round, pads this axis alike."""
    if axis.filter > axis.size and scheme == VALID:
        return False
    needed = max(0, (axis.out - 1) * axis.stride + axis.filter - axis.size)
    out = -(-axis.size // axis.stride) if scheme == SAME else -(-(axis.size - axis.filter + 1) // axis.stride)
    return axis.out == out and axis.head == (needed // 2 if scheme == SAME else 0)


def pool(name: str, node: LiteRtNode) -> None:
    """MAX_POOL_2D, AVERAGE_POOL_2D, L2_POOL_2D. Padded positions do not count."""
    y, x, activation, nchw = window_axes(node.call)
    source, fill, factor = node.read(0, moved=nchw), None, None
    if _scheme(y, x) is None:
        is_real = node.input(0).type in (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)
        require(
            name == "MAX_POOL_2D" or is_real,
            "its paddings are neither SAME nor VALID, so that padding would count as data",
        )
        fill = _lowest(node) if name == "MAX_POOL_2D" else None
        factor = None if name == "MAX_POOL_2D" else _share(y, x)
    source, scheme = _window(node, source, y, x, nchw=nchw, fill=fill)
    if factor is not None:
        _padded_mean(node, name, source, factor, window=(y, x, activation, nchw))
        return
    node.emit(
        name,
        [source],
        [node.write(moved=nchw)],
        "Pool2D",
        padding=scheme,
        strideH=y.stride,
        strideW=x.stride,
        filterHeight=y.filter,
        filterWidth=x.filter,
        fusedActivationFunction=activation,
    )


def _share(y: Axis, x: Axis) -> NDArray[np.float32]:
    """Return the positions of each window, by those of them that are no padding."""
    return (y.filter * x.filter / np.outer(y.counts(), x.counts())).astype(np.float32)[None, :, :, None]


def _padded_mean(
    node: LiteRtNode, name: str, source: int, factor: NDArray[np.float32], window: tuple[Axis, Axis, int, bool]
) -> None:
    """Lower a mean over zeros, too, which is made larger by the share of these; of squares before the root is drawn."""
    y, x, activation, nchw = window
    sums, shape = Sums(node), image_shape(node.output().shape, nchw)
    if name == "L2_POOL_2D":
        source = sums.multiply(source, source, node.graph.writer.dimensions(source))
    fields = {"strideH": y.stride, "strideW": x.stride, "filterHeight": y.filter, "filterWidth": x.filter}
    mean = sums.emit("AVERAGE_POOL_2D", [source], shape, "Pool2D", padding=VALID, **fields)
    result = sums.multiply(mean, node.graph.writer.constant("FLOAT32", factor), shape)
    if name == "L2_POOL_2D":
        result = sums.emit("SQRT", [result], shape)
    node.emit("ADD", [result, sums.constant(0.0)], [node.write(moved=nchw)], "Add", fusedActivationFunction=activation)


def _lowest(node: LiteRtNode) -> int:
    """Return the least value of input 0's type, as a constant like it."""
    type_ = node.type_of(node.input(0))
    lowest = {"FLOAT32": -np.inf, "INT8": -128, "UINT8": 0}[type_]
    array = np.array([lowest], np.dtype(type_.lower()))
    return node.graph.writer.constant(type_, array, quantisation(node.input(0), type_))


def _is_exact(size: int, out: int) -> bool:
    """Return True if the nearest positions are the same in TFLite's arithmetic with 16 bits behind the point."""
    positions = np.arange(out)
    nearest = (positions.astype(np.float32) * np.float32(size / out)).astype(np.int64)
    return size < 1 << 15 and bool((np.minimum(positions * ((size << 16) // out + 1) >> 16, size - 1) == nearest).all())


def resize(name: str, node: LiteRtNode) -> None:
    """RESIZE_BILINEAR, RESIZE_NEAREST_NEIGHBOR."""
    nchw, align, half_pixel = (node.call.flag(i) for i in (3, 4, 5))
    _, h, w, _ = image_shape(node.input(0).shape, nchw)
    _, height, width, _ = image_shape(node.output().shape, nchw)
    if name == "RESIZE_NEAREST_NEIGHBOR" and not (align or half_pixel):
        require(_is_exact(h, height) and _is_exact(w, width), "TFLite's fixed-point positions are not exact enough")
    options = {"RESIZE_BILINEAR": "ResizeBilinear", "RESIZE_NEAREST_NEIGHBOR": "ResizeNearestNeighbor"}[name]
    inputs = [node.read(0, moved=nchw), node.integers([height, width])]
    node.emit(name, inputs, [node.write(moved=nchw)], options, alignCorners=align, halfPixelCenters=half_pixel)


def block(name: str, options: str, node: LiteRtNode) -> None:
    """DEPTH_TO_SPACE, SPACE_TO_DEPTH."""
    nchw = node.call.flag(2)
    source, result = node.read(0, moved=nchw), node.write(moved=nchw)
    node.emit(name, [source], [result], options, blockSize=node.call.integer(1))


def batch_to_space(node: LiteRtNode) -> None:
    """Lower it without cropping."""
    nchw = node.call.flag(2)
    inputs = [node.read(0, moved=nchw), node.integers(node.call.values(1)), node.integers(np.zeros((2, 2)))]
    node.emit("BATCH_TO_SPACE_ND", inputs, [node.write(moved=nchw)], "BatchToSpaceND")


def space_to_batch(node: LiteRtNode) -> None:
    """Lower it with paddings."""
    nchw = node.call.flag(3)
    sizes, pads = node.integers(node.call.values(1)), node.integers(paddings(node.call, 2, 2))
    inputs = [node.read(0, moved=nchw), sizes, pads]
    node.emit("SPACE_TO_BATCH_ND", inputs, [node.write(moved=nchw)], "SpaceToBatchND")


TABLE: dict[str, Callable[[LiteRtNode], None]] = {
    "CONV_2D": partial(convolution, "CONV_2D", False),
    "GROUPED_CONV_2D": partial(convolution, "CONV_2D", True),
    "DEPTHWISE_CONV_2D": partial(convolution, "DEPTHWISE_CONV_2D", True),
    "TRANSPOSE_CONV_2D": transposed,
    "AVERAGE_POOL_2D": partial(pool, "AVERAGE_POOL_2D"),
    "MAX_POOL_2D": partial(pool, "MAX_POOL_2D"),
    "L2_POOL_2D": partial(pool, "L2_POOL_2D"),
    "RESIZE_BILINEAR": partial(resize, "RESIZE_BILINEAR"),
    "RESIZE_NEAREST_NEIGHBOR": partial(resize, "RESIZE_NEAREST_NEIGHBOR"),
    "DEPTH_TO_SPACE": partial(block, "DEPTH_TO_SPACE", "DepthToSpace"),
    "SPACE_TO_DEPTH": partial(block, "SPACE_TO_DEPTH", "SpaceToDepth"),
    "BATCH_TO_SPACE_ND": batch_to_space,
    "SPACE_TO_BATCH_ND": space_to_batch,
}
