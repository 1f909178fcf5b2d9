"""Arithmetic, activations, comparisons and choices."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.devices.litert.lower.node import MAX_RANK, LiteRtNode
from driver.devices.lowering.errors import require
from driver.nn.ops.real import table
from driver.nn.types import OperandType

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from driver.nn.operation import Tensor

LARGEST_RATIO = 256.0
"""Between the scales of a quantised sum: far beyond, TFLite's fixed-point arithmetic overflows."""

FLOATS = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)


def arithmetic(options: str, node: LiteRtNode) -> None:
    """ADD, SUB, MUL, DIV: with a fused activation, the codes of which are TFLite's."""
    a, b, out = node.input(0), node.input(1), node.output()
    name = node.operation.type
    if out.type.is_quantised:
        scales = [t.scale for t in (a, b, out)]
        require(name == "MUL" or max(scales) <= LARGEST_RATIO * min(scales), "its scales are too far apart")
    if name == "DIV" and out.type == OperandType.TENSOR_INT32:
        require(b.fixed and np.all(b.data), "TFLite fails where an integer is divided by 0")
        node.emit("FLOOR_DIV", [node.read(0), node.read(1)], [node.write()], "FloorDiv")
        return
    activation = node.call.integer(2)
    node.emit(name, [node.read(0), node.read(1)], [node.write()], options, fusedActivationFunction=activation)


def simple(name: str, node: LiteRtNode) -> None:
    """Lower a function of one tensor."""
    node.emit(name, [node.read(0)], [node.write()])


def with_options(name: str, options: str, node: LiteRtNode) -> None:
    """Lower a function of one tensor, whose table of options TFLite insists on."""
    node.emit(name, [node.read(0)], [node.write()], options)


def elu(node: LiteRtNode) -> None:
    """TFLite knows no factor but 1."""
    require(node.real(1) == 1.0, "its alpha is not 1")
    simple("ELU", node)


def pair(options: str, node: LiteRtNode) -> None:
    """Lower a function of two tensors whose result has no other scale than they."""
    require(max(len(node.input(i).shape) for i in (0, 1)) <= MAX_RANK, "its rank is above 4")
    sources = [node.requantised(0), node.requantised(1)]
    node.emit(node.operation.type, sources, [node.write()], options)


def logical(node: LiteRtNode) -> None:
    """LOGICAL_AND, LOGICAL_OR."""
    require(max(len(node.input(i).shape) for i in (0, 1)) <= MAX_RANK, "its rank is above 4")
    options = {"LOGICAL_AND": "LogicalAnd", "LOGICAL_OR": "LogicalOr"}[node.operation.type]
    node.emit(node.operation.type, [node.read(0), node.read(1)], [node.write()], options)


def compare(options: str, node: LiteRtNode) -> None:
    """Quantised data is compared as it is stored, or by its ranks when the sides are scaled differently."""
    a, b = node.input(0), node.input(1)
    require(max(len(a.shape), len(b.shape)) <= MAX_RANK, "its rank is above 4")
    sources = [node.read(0), node.read(1)]
    if a.type.is_quantised or a.type == OperandType.TENSOR_BOOL8:
        sources = [_as_integers(node, source, node.input(i).shape) for i, source in enumerate(sources)]
    if (a.scale, a.zero_point) != (b.scale, b.zero_point):
        sources = [
            _ranked(node, i, source, ranks) for i, source, ranks in zip((0, 1), sources, _ranks(a, b), strict=True)
        ]
    node.emit(node.operation.type, sources, [node.write()], options)


def _as_integers(node: LiteRtNode, source: int, shape: tuple[int, ...]) -> int:
    result = node.graph.writer.tensor("INT32", shape)
    node.graph.convert(source, result, "CAST")
    return result


def _ranks(a: Tensor, b: Tensor) -> NDArray[Any]:
    """Return the places of the 256 values of each side in the order of all of them; equal ones have the same."""
    reals = [np.roll(table(t), 128 if t.type.stored_dtype == np.int8 else 0) for t in (a, b)]  # ascending
    _, ranks = np.unique(np.concatenate(reals), return_inverse=True)
    return ranks.reshape(2, 256).astype(np.int32)


def _ranked(node: LiteRtNode, i: int, source: int, ranks: NDArray[Any]) -> int:
    """Return the ranks of stored integers, the least of which is 0 or -128."""
    shape, writer = node.input(i).shape, node.graph.writer
    if node.type_of(node.input(i)) == "INT8":
        index = writer.tensor("INT32", shape)
        least = writer.constant("INT32", np.array([128], np.int32))
        node.emit("ADD", [source, least], [index], "Add", fusedActivationFunction=0)
        source = index
    result = writer.tensor("INT32", shape)
    node.emit("GATHER", [writer.constant("INT32", ranks), source], [result], "Gather", axis=0)
    return result


def prelu(node: LiteRtNode) -> None:
    """TFLite broadcasts the slopes, and not what they are multiplied with."""
    require(node.input(0).shape == node.output().shape, "its input is broadcast")
    node.emit("PRELU", [node.read(0), node.read(1)], [node.write()])


def select(node: LiteRtNode) -> None:
    """Lower a choice, all three of one shape."""
    node.emit("SELECT", [node.read(0), node.requantised(1), node.requantised(2)], [node.write()], "Select")


def quantise(node: LiteRtNode) -> None:
    """QUANTIZE and DEQUANTIZE."""
    name = node.operation.type
    node.emit(name, [node.read(0)], [node.write()], name.capitalize())


def cast(node: LiteRtNode) -> None:
    """Cast stored numbers, without their scales. Integers that may not fit are clamped before; reals saturate in
    TFLite.
    """
    source, out = node.input(0), node.output()
    if source.type == out.type:
        raw = "UINT8" if source.type == OperandType.TENSOR_BOOL8 else None
        node.reshape(node.read(0, raw), node.write(0, raw), out.shape)
        return
    read = {OperandType.TENSOR_QUANT8_ASYMM: "UINT8", OperandType.TENSOR_FLOAT16: "FLOAT16"}.get(source.type)
    write = {OperandType.TENSOR_QUANT8_ASYMM: "UINT8", OperandType.TENSOR_FLOAT16: "FLOAT16"}.get(out.type)
    tensor = node.read(0, read)
    if source.type in FLOATS and out.type not in FLOATS:
        tensor = node.read(0)
        if out.type == OperandType.TENSOR_QUANT8_ASYMM:
            integers = node.graph.writer.tensor("INT32", out.shape)
            node.graph.convert(tensor, integers, "CAST")
            tensor = integers
    if out.type == OperandType.TENSOR_QUANT8_ASYMM:
        tensor = _clamped(node, tensor, 0, 255)
    node.graph.convert(tensor, node.write(0, write), "CAST")


def _clamped(node: LiteRtNode, tensor: int, low: int, high: int) -> int:
    """int32 in a range."""
    for name, bound in (("MAXIMUM", low), ("MINIMUM", high)):
        result = node.graph.writer.tensor("INT32", node.input(0).shape)
        limit = node.graph.writer.constant("INT32", np.array([bound], np.int32))
        node.emit(name, [tensor, limit], [result], "MaximumMinimum")
        tensor = result
    return tensor


TABLE: dict[str, Callable[[LiteRtNode], None]] = {
    "ADD": partial(arithmetic, "Add"),
    "SUB": partial(arithmetic, "Sub"),
    "MUL": partial(arithmetic, "Mul"),
    "DIV": partial(arithmetic, "Div"),
    "RELU": partial(simple, "RELU"),
    "RELU1": partial(simple, "RELU_N1_TO_1"),
    "RELU6": partial(simple, "RELU6"),
    "LOGISTIC": partial(simple, "LOGISTIC"),
    "TANH": partial(simple, "TANH"),
    "ABS": partial(with_options, "ABS", "Abs"),
    "EXP": partial(with_options, "EXP", "Exp"),
    "FLOOR": partial(simple, "FLOOR"),
    "HARD_SWISH": partial(with_options, "HARD_SWISH", "HardSwish"),
    "LOG": partial(simple, "LOG"),
    "LOGICAL_NOT": partial(with_options, "LOGICAL_NOT", "LogicalNot"),
    "NEG": partial(with_options, "NEG", "Neg"),
    "RSQRT": partial(simple, "RSQRT"),
    "SIN": partial(simple, "SIN"),
    "SQRT": partial(simple, "SQRT"),
    "ELU": elu,
    "MAXIMUM": partial(pair, "MaximumMinimum"),
    "MINIMUM": partial(pair, "MaximumMinimum"),
    "POW": partial(pair, "Pow"),
    "LOGICAL_AND": logical,
    "LOGICAL_OR": logical,
    "EQUAL": partial(compare, "Equal"),
    "NOT_EQUAL": partial(compare, "NotEqual"),
    "GREATER": partial(compare, "Greater"),
    "GREATER_EQUAL": partial(compare, "GreaterEqual"),
    "LESS": partial(compare, "Less"),
    "LESS_EQUAL": partial(compare, "LessEqual"),
    "PRELU": prelu,
    "SELECT": select,
    "QUANTIZE": quantise,
    "DEQUANTIZE": quantise,
    "CAST": cast,
}
