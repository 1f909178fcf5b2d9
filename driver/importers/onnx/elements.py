"""Element-wise operators: those that are one operation of the HAL, and those that are several."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from driver.errors import ImportFailed
from driver.nn import OperandType
from driver.nn.builder import Value

from .call import Convert, OnnxCall, broadcast
from .graph import FLOATS, INTEGERS, ValueEntry
from .shapes import identity, spread

ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
"""Abramowitz and Stegun, 7.1.26: with P, erf x is within 1.5e-7 of 1 - (ERF[0] t + ... + ERF[4] t^5) e^(-x*x)."""
P = 0.3275911


def require_floats(call: OnnxCall, position: int = 0) -> None:
    """Raise `ImportFailed` unless input `position` holds floats: the HAL has the operation for no other type."""
    if call.entry(position).type not in (*FLOATS, "UINT8", "INT8"):
        raise ImportFailed(f"input {position}, {call.entry(position)}: the HAL computes this for floats only")


def unary(*kinds: str) -> Convert:
    """Return a chain of operations with one input each."""

    def convert(call: OnnxCall) -> None:
        value, is_image = call.input_in_its_layout()
        for kind in kinds:
            value = call.emit(kind, value)
        _give(call, value, is_image)

    return convert


def _give(call: OnnxCall, value: Any, is_image: bool, *positions: int) -> None:
    """Bind a result that has the broadcast shape of the inputs."""
    call.give(value, shape=broadcast(*(call.shape(i) for i in positions or (0,))), is_image=is_image)


def formula(build: Callable[[OnnxCall, Value], Any]) -> Convert:
    """Return an expression of several operations on input 0."""

    def convert(call: OnnxCall) -> None:
        require_floats(call)
        value, is_image = call.input_in_its_layout()
        _give(call, build(call, value), is_image)

    return convert


def binary(kind: str, *, fuses: bool = False) -> Convert:
    """Return an operation with two inputs and no attributes. fuses: it takes the code of an activation too."""

    def convert(call: OnnxCall) -> None:
        if kind == "DIV" and call.entry(0).type in INTEGERS:
            raise ImportFailed("the HAL rounds integer division towards minus infinity, ONNX towards zero")
        if len(call) != 2:
            raise ImportFailed(f"{len(call)} inputs; expected 2")
        (x, y), is_image = call.inputs_in_one_layout()
        _give(call, call.emit(kind, x, y, *((call.code,) if fuses else ())), is_image, 0, 1)

    return convert


def variadic(kind: str, *more: int, mean: bool = False) -> Convert:
    """Fold any number of inputs with a binary operation; one input is passed through."""

    def convert(call: OnnxCall) -> None:
        if len(call) < 2:
            identity(call)
            return
        values, is_image = call.inputs_in_one_layout()
        total = values[0]
        for value in values[1:]:
            total = call.emit(kind, total, value, *more)
        if mean:
            total = call.emit("MUL", total, call.scalar(1 / len(values)), 0)
        _give(call, total, is_image, *range(len(call)))

    return convert


def power(call: OnnxCall) -> None:
    """MUL for squares, SQRT for roots, else POW."""
    require_floats(call)
    exponent = call.entry(1)
    number = float(exponent.array.reshape(-1)[0]) if exponent.array is not None and exponent.array.size == 1 else None
    if number in (2.0, 3.0, 0.5) and broadcast(call.shape(0), exponent.shape) == call.shape(0):
        x, is_image = call.input_in_its_layout()
        result = call.emit("SQRT", x) if number == 0.5 else call.emit("MUL", x, x, 0)
        _give(call, call.emit("MUL", result, x, 0) if number == 3.0 else result, is_image)
        return
    if exponent.type not in FLOATS and number is not None:
        x, is_image = call.input_in_its_layout()
        _give(call, call.emit("POW", x, call.scalar(number)), is_image)
        return
    binary("POW")(call)


# ---- activations ---------------------------------------------------------------------------------------------------


def bounds(call: OnnxCall) -> tuple[float | None, float | None]:
    """Lower and upper bound of Clip."""
    if call.opset < 11:
        return call.node.real("min", -math.inf), call.node.real("max", math.inf)
    lower, upper = (call.number(i) if call.given(i) else None for i in (1, 2))
    return lower, upper


def clip(call: OnnxCall) -> None:
    """RELU, RELU1 or RELU6 where the bounds match, else MAXIMUM and MINIMUM; the identity without bounds."""
    if any(call.given(i) and call.entry(i).array is None for i in (1, 2)):
        _clip_by_values(call)
        return
    lower, upper = (None if bound is None or math.isinf(bound) else bound for bound in bounds(call))
    kinds: dict[object, str] = {(0.0, 6.0): "RELU6", (-1.0, 1.0): "RELU1", (0.0, None): "RELU"}
    kind = kinds.get((lower, upper))
    value, is_image = call.input_in_its_layout()
    if kind and call.entry(0).type in FLOATS:
        _give(call, call.emit(kind, value), is_image)
    elif lower is None and upper is None:
        identity(call)
    else:
        for name, bound in (("MAXIMUM", lower), ("MINIMUM", upper)):
            value = value if bound is None else call.emit(name, value, call.scalar(bound))
        _give(call, value, is_image)


def _clip_by_values(call: OnnxCall) -> None:
    """MAXIMUM and MINIMUM with bounds that are computed."""
    value, is_image = call.input_in_its_layout()
    for name, position in (("MAXIMUM", 1), ("MINIMUM", 2)):
        if call.given(position):
            value = call.emit(name, value, call.graph.reshape(call.value(position), (1,)))
    _give(call, value, is_image)


def leaky_relu(call: OnnxCall) -> None:
    """PRELU with one slope."""
    x, is_image = call.input_in_its_layout()
    _give(call, call.emit("PRELU", x, call.scalar(call.node.real("alpha", 0.01))), is_image)


def elu(call: OnnxCall) -> None:
    """ELU."""
    x, is_image = call.input_in_its_layout()
    _give(call, call.emit("ELU", x, call.node.real("alpha", 1.0)), is_image)


def selu(call: OnnxCall, x: Value) -> Any:
    """gamma * ELU."""
    alpha, gamma = (call.node.real(*word) for word in (("alpha", 1.67326319), ("gamma", 1.05070102)))
    return call.emit("MUL", call.emit("ELU", x, alpha), call.scalar(gamma), 0)


def celu(call: OnnxCall, x: Value) -> Any:
    """max(0, x) + min(0, alpha * (e^(x / alpha) - 1))."""
    alpha = call.node.real("alpha", 1.0)
    if alpha == 0:
        raise ImportFailed("alpha is 0")
    inner = call.emit("ELU", call.emit("MUL", x, call.scalar(1 / alpha), 0), 1.0)
    return call.emit("MUL", inner, call.scalar(alpha), 0)


def hard_sigmoid(call: OnnxCall, x: Value) -> Any:
    """max(0, min(1, alpha * x + beta))."""
    alpha, beta = call.node.real("alpha", 0.2), call.node.real("beta", 0.5)
    line = call.emit("ADD", call.emit("MUL", x, call.scalar(alpha), 0), call.scalar(beta), 0)
    return call.emit("MINIMUM", call.emit("RELU", line), call.scalar(1.0))


def softplus(call: OnnxCall, x: Value) -> Any:
    """max(0, x) + log(1 + e^-|x|), which does not overflow."""
    small = call.emit("EXP", call.emit("NEG", call.emit("ABS", x)))
    return call.emit("ADD", call.emit("RELU", x), call.emit("LOG", call.emit("ADD", small, call.scalar(1.0), 0)), 0)


def softsign(call: OnnxCall, x: Value) -> Any:
    """x / (1 + |x|)."""
    return call.emit("DIV", x, call.emit("ADD", call.emit("ABS", x), call.scalar(1.0), 0), 0)


def mish(call: OnnxCall, x: Value) -> Any:
    """x * tanh(softplus(x))."""
    return call.emit("MUL", x, call.emit("TANH", softplus(call, x)), 0)


def erf(call: OnnxCall, x: Value) -> Any:
    """Return the formula of ERF for |x|, times the sign of x: x scaled up, then clipped to -1..1."""
    size = call.emit("ABS", x)
    t = call.emit(
        "DIV", call.scalar(1.0), call.emit("ADD", call.emit("MUL", size, call.scalar(P), 0), call.scalar(1.0), 0), 0
    )
    total = call.emit("MUL", t, call.scalar(ERF[4]), 0)
    for factor in ERF[3::-1]:
        total = call.emit("MUL", call.emit("ADD", total, call.scalar(factor), 0), t, 0)
    decay = call.emit("EXP", call.emit("NEG", call.emit("MUL", x, x, 0)))
    rest = call.emit("SUB", call.scalar(1.0), call.emit("MUL", total, decay, 0), 0)
    large = 1e30 if x.operand.type == OperandType.TENSOR_FLOAT32 else 6e4
    return call.emit("MUL", call.emit("RELU1", call.emit("MUL", x, call.scalar(large), 0)), rest, 0)


def gelu(call: OnnxCall, x: Value) -> Any:
    """x * (1 + erf(x / sqrt 2)) / 2, or its approximation by tanh where the file requests it."""
    if call.node.text("approximate", "none") == "tanh":
        cube = call.emit("MUL", call.emit("MUL", x, x, 0), x, 0)
        line = call.emit("ADD", x, call.emit("MUL", cube, call.scalar(0.044715), 0), 0)
        part = call.emit("TANH", call.emit("MUL", line, call.scalar(math.sqrt(2 / math.pi)), 0))
    else:
        part = erf(call, call.emit("MUL", x, call.scalar(math.sqrt(0.5)), 0))
    half = call.emit("MUL", x, call.scalar(0.5), 0)
    return call.emit("MUL", half, call.emit("ADD", part, call.scalar(1.0), 0), 0)


def reciprocal(call: OnnxCall, x: Value) -> Any:
    """1 / x."""
    return call.emit("DIV", call.scalar(1.0), x, 0)


def cos(call: OnnxCall, x: Value) -> Any:
    """SIN of x + pi / 2."""
    return call.emit("SIN", call.emit("ADD", x, call.scalar(math.pi / 2), 0))


# ---- choices and types ---------------------------------------------------------------------------------------------


def where(call: OnnxCall) -> None:
    """SELECT, whose three inputs must have one shape: smaller inputs are repeated."""
    entries = [call.entry(i) for i in range(3)]
    wanted = broadcast(*(e.shape for e in entries))
    values = [_broadcast_entry(call, entry, wanted) for entry in entries]
    call.give(call.emit("SELECT", *values), shape=wanted)


def _broadcast_entry(call: OnnxCall, entry: ValueEntry, wanted: Sequence[int]) -> Value:
    if entry.array is not None and entry.shape != wanted and 0 not in wanted:
        call.graph.charge(entry.array.itemsize * math.prod(wanted))
        array = np.ascontiguousarray(np.broadcast_to(entry.array, wanted))
        return call.graph.constant(ValueEntry(entry.name, entry.type, array.shape, array), array)
    return spread(call, call.graph.plain_squeezed(entry), entry.shape, tuple(wanted))


def cast(call: OnnxCall) -> None:
    """CAST; a comparison for a cast to booleans, a SELECT for one from booleans."""
    kind = {1: "FLOAT", 6: "INT32", 7: "INT32", 9: "BOOL", 10: "FLOAT16"}.get(call.node.integer("to"))
    entry = call.entry(0)
    if kind is None:
        raise ImportFailed(
            f"cannot cast to ONNX type {call.node.integer('to')}; the HAL has floats, 32-bit integers and booleans"
        )
    if entry.type in (kind, "INT64" if kind == "INT32" else kind):
        identity(call)
        return
    if entry.real is not None and kind == "FLOAT":
        call.graph.alias(call.node.outputs[0], entry.real)
        return
    value, is_image = call.input_in_its_layout()
    if kind == "BOOL":
        _give(call, call.emit("NOT_EQUAL", value, call.scalar(0)), is_image)
    elif entry.type == "BOOL":
        dtype = {"FLOAT": np.float32, "INT32": np.int32}.get(kind, np.float16)
        _give(call, call.graph.numbers(value, dtype), is_image)
    else:
        _give(
            call, call.emit("CAST", value, dtype={"INT32": "int32", "FLOAT": "float32"}.get(kind, "float16")), is_image
        )
