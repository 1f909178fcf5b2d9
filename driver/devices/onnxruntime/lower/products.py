"""What convolutions and the fully connected layer share: quantised sums of products in integers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.devices.lowering.errors import require
from driver.devices.onnxruntime.lower.node import AWAY, SHIFT, stored_type

if TYPE_CHECKING:
    from driver.devices.onnxruntime.lower.node import OrtNode

LARGEST_FACTOR = 2.0**14
"""Of a unit of a sum to the steps of the output: beyond, what float32 leaves of the sum does not tell them apart."""


def check_products(node: OrtNode) -> None:
    """Refuse the operation unless its bias can be added to the quantised products as it is."""
    source, weights, out = node.input(0), node.input(1), node.output()
    if not out.type.is_quantised:
        return
    scales = weights.channel_quant[0] if weights.channel_quant else [weights.scale]
    fits = weights.channel_quant or math.isclose(node.input(2).scale, source.scale * weights.scale, rel_tol=1e-6)
    require(fits and min(scales) > 0, "the scale of its bias is not that of its products")
    require(source.scale * max(scales) <= LARGEST_FACTOR * out.scale, "the scale of its output is too small")


def quantised(name: str, domain: str, node: OrtNode, operands: tuple[str, str], **fields: Any) -> str:
    """`operands`: data and weights. Their products in integers, plus the bias, as output 0 stores them.

    Weights have a sign only when the data has one: where a processor has no VNNI, ONNX Runtime's products of bytes
    without and with one saturate in 16 bits. (Its own switch against that, `session.x64quantprecision`, makes graphs
    of data with a sign that it has no kernels for.)
    """
    source, weights, out = node.input(0), node.input(1), node.output()
    steps = weights.channel_quant[0] if weights.channel_quant else weights.scale
    zero = weights.zero_point + SHIFT * (weights_type(node) != stored_type(weights))
    zeros = np.full(np.shape(steps), zero, weights_type(node).lower())
    constant = node.graph.constant
    of_source = constant(np.array(source.scale, np.float32)), node.graph.zero_point(source)
    of_weights = constant(np.array(steps, np.float32)), constant(zeros)
    of_out = constant(np.array(out.scale * AWAY, np.float32)), node.graph.zero_point(out)
    factors = operands[0], *of_source, operands[1], *of_weights
    bias = node.read(2, "INT32")
    last = (*of_out, bias) if not domain else (bias, *of_out)
    return node.emit(name, *factors, *last, domain=domain, **fields)


def weights_type(node: OrtNode) -> str:
    """Return the type that quantised weights are multiplied in."""
    return "UINT8" if stored_type(node.input(0)) == "UINT8" else stored_type(node.input(1))
