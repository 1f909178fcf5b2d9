"""Arithmetic, activations, comparisons and choices."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from driver.devices.lowering.errors import require
from driver.devices.onnxruntime.lower.node import AWAY, OrtNode, number_type, stored_type
from driver.devices.onnxruntime.writer import CONTRIBUTED
from driver.formats.onnx_schema import TYPES
from driver.nn.types import OperandType

if TYPE_CHECKING:
    from collections.abc import Callable

LARGEST_RATIO = 2.0**14
"""Of the scale of a term to that of a quantised sum: beyond, float32 does not tell its steps apart."""

STEEPEST = 16.0
"""ELU's largest alpha: ONNX Runtime subtracts 1 from e^x, which leaves few digits near 0."""


def arithmetic(name: str, node: OrtNode) -> None:
    """ADD, SUB, MUL, DIV: with a fused activation."""
    a, b, out = node.input(0), node.input(1), node.output()
    if out.type.is_quantised and name != "Mul":
        require(max(a.scale, b.scale) <= LARGEST_RATIO * out.scale, "its scales are too far apart")
    if name == "Div" and out.type == OperandType.TENSOR_INT32:
        node.give(_floor_divided(node))
    elif out.type.is_quantised and name != "Sub":
        node.put(node.clamped(_in_integers(name, node), out, node.call.integer(2)))
    else:
        node.give(node.emit(name, node.read(0), node.read(1)), code=node.call.integer(2))


def _in_integers(name: str, node: OrtNode) -> str:
    """Return the sum or product of bytes, for which ONNX Runtime has kernels of its own."""
    operands = []
    for i in (0, 1):
        scale = node.graph.constant(np.array(node.input(i).scale, np.float32))
        operands += [node.read(i, stored_type(node.input(i))), scale, node.graph.zero_point(node.input(i))]
    scale = node.graph.constant(np.array(node.output().scale * AWAY, np.float32))
    return node.emit(f"QLinear{name}", *operands, scale, node.graph.zero_point(node.output()), domain=CONTRIBUTED)


def _floor_divided(node: OrtNode) -> str:
    """Divide integers by way of float64, which holds their quotients; what is divided by 0 is 0."""
    numerator, denominator = node.read(0, "DOUBLE"), node.read(1, "DOUBLE")
    quotient = node.emit("Floor", node.emit("Div", numerator, denominator))
    zero = node.graph.constant(np.array(0.0))
    kept = node.emit("Where", node.emit("Equal", denominator, zero), zero, quotient)
    return node.emit("Cast", kept, to=TYPES["INT32"])


def simple(name: str, node: OrtNode) -> None:
    """Lower a function of one tensor."""
    node.give(node.emit(name, node.read(0)))


def bounded(code: int, node: OrtNode) -> None:
    """RELU, RELU1, RELU6: quantised data stays as it is stored."""
    if node.output().type.is_quantised:
        stored = stored_type(node.output())
        node.put(node.clamped(node.emit("Identity", node.read(0, stored)), node.output(), code))
    else:
        node.give(node.read(0), code=code)


def rsqrt(node: OrtNode) -> None:
    """1 / sqrt(x)."""
    node.give(node.emit("Reciprocal", node.emit("Sqrt", node.read(0))))


def elu(node: OrtNode) -> None:
    """Lower it with any factor that leaves enough digits."""
    alpha = node.real(1)
    require(0 <= alpha <= STEEPEST, f"its alpha is {alpha}")
    node.give(node.emit("Elu", node.read(0), alpha=alpha))


def hard_swish(node: OrtNode) -> None:
    """x * clip(x + 3, 0, 6) / 6."""
    x = node.read(0)
    gate = node.emit("Clip", node.emit("Add", x, node.scalar(3.0)), node.scalar(0.0), node.scalar(6.0))
    node.give(node.emit("Mul", node.emit("Mul", gate, x), node.scalar(1 / 6)))


def pair(name: str, node: OrtNode) -> None:
    """MAXIMUM, MINIMUM, POW, LOGICAL_AND, LOGICAL_OR. Rounding keeps the order, so it can come after."""
    node.give(node.emit(name, node.read(0), node.read(1)))


def compare(name: str, negated: bool, node: OrtNode) -> None:
    """Compare in integers or reals; quantised data that is scaled differently in float64, as the HAL does."""
    found = node.emit(name, *(_comparable(node, i) for i in (0, 1)))
    node.give(node.emit("Not", found) if negated else found)


def _comparable(node: OrtNode, i: int) -> str:
    a, b, tensor = node.input(0), node.input(1), node.input(i)
    if tensor.type == OperandType.TENSOR_BOOL8:
        return node.emit("Cast", node.read(i), to=TYPES["INT32"])
    if not tensor.type.is_quantised:
        return node.read(i)
    if (a.scale, a.zero_point) == (b.scale, b.zero_point):
        return node.read(i, "INT32")
    zero, scale = (node.graph.constant(np.array(value, np.float64)) for value in (tensor.zero_point, tensor.scale))
    return node.emit("Mul", node.emit("Sub", node.read(i, "DOUBLE"), zero), scale)


def prelu(node: OrtNode) -> None:
    """alpha * x where x is negative, else x; both may be broadcast."""
    x = node.read(0)
    negative = node.emit("Less", x, node.scalar(0.0))
    node.give(node.emit("Where", negative, node.emit("Mul", x, node.read(1)), x))


def select(node: OrtNode) -> None:
    """Lower a choice, all three of one shape. There is no choice between bytes with a sign, so they are turned into
    int32.
    """
    out = node.output()
    type_ = node.raw_type(1) if node.raw_type(1) == node.raw_type(2) else stored_type(out)
    a, b = (node.requantised(i, type_) for i in (1, 2))
    if type_ in ("INT8", "FLOAT16"):
        wide = TYPES["INT32" if type_ == "INT8" else "FLOAT"]
        a, b = (node.emit("Cast", name, to=wide) for name in (a, b))
    found = node.emit("Where", node.read(0), a, b)
    if type_ in ("INT8", "FLOAT16"):
        found = node.emit("Cast", found, to=TYPES[type_])
    node.put(found, type_=type_)


def quantise(node: OrtNode) -> None:
    """QUANTIZE, DEQUANTIZE."""
    node.give(node.emit("Identity", node.read(0)))


def cast(node: OrtNode) -> None:
    """Cast stored numbers, without their scales; they saturate, and then lose their fraction."""
    source, out = node.input(0), node.output()
    if source.type == out.type:
        node.put(node.emit("Identity", node.read(0, stored_type(source))))
        return
    number = "INT32" if source.type.is_quantised else number_type(source)
    target = stored_type(out)
    if target in ("FLOAT", "FLOAT16"):
        node.put(node.emit("Cast", node.read(0, number), to=TYPES[target]))
        return
    info = np.iinfo(out.type.stored_dtype)
    wide = node.read(0, "DOUBLE")
    if number == "FLOAT":  # NaN becomes the smallest
        lowest = node.graph.constant(np.array(float(info.min)))
        wide = node.emit("Where", node.emit("IsNaN", wide), lowest, wide)
    limits = (node.graph.constant(np.array(float(limit))) for limit in (info.min, info.max))
    node.put(node.emit("Cast", node.emit("Clip", wide, *limits), to=TYPES[target]))


TABLE: dict[str, Callable[[OrtNode], None]] = {
    "ADD": partial(arithmetic, "Add"),
    "SUB": partial(arithmetic, "Sub"),
    "MUL": partial(arithmetic, "Mul"),
    "DIV": partial(arithmetic, "Div"),
    "RELU": partial(bounded, 1),
    "RELU1": partial(bounded, 2),
    "RELU6": partial(bounded, 3),
    "LOGISTIC": partial(simple, "Sigmoid"),
    "TANH": partial(simple, "Tanh"),
    "ABS": partial(simple, "Abs"),
    "EXP": partial(simple, "Exp"),
    "FLOOR": partial(simple, "Floor"),
    "HARD_SWISH": hard_swish,
    "LOG": partial(simple, "Log"),
    "LOGICAL_NOT": partial(simple, "Not"),
    "NEG": partial(simple, "Neg"),
    "RSQRT": rsqrt,
    "SIN": partial(simple, "Sin"),
    "SQRT": partial(simple, "Sqrt"),
    "ELU": elu,
    "MAXIMUM": partial(pair, "Max"),
    "MINIMUM": partial(pair, "Min"),
    "POW": partial(pair, "Pow"),
    "LOGICAL_AND": partial(pair, "And"),
    "LOGICAL_OR": partial(pair, "Or"),
    "EQUAL": partial(compare, "Equal", False),
    "NOT_EQUAL": partial(compare, "Equal", True),
    "GREATER": partial(compare, "Greater", False),
    "GREATER_EQUAL": partial(compare, "GreaterOrEqual", False),
    "LESS": partial(compare, "Less", False),
    "LESS_EQUAL": partial(compare, "LessOrEqual", False),
    "PRELU": prelu,
    "SELECT": select,
    "QUANTIZE": quantise,
    "DEQUANTIZE": quantise,
    "CAST": cast,
}
