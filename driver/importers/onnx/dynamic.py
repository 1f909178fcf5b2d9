"""What onnxruntime's `quantize_dynamic` writes: DynamicQuantizeLinear, MatMulInteger, ConvInteger.

The HAL has no scales that are computed while a model runs, so the integers are computed as floats. That is exact: an
8-bit integer and its products with another one are floats without rounding, and a sum of them is rounded like any
other sum of floats. A value that is such integers keeps them as `ValueEntry.real`; Cast makes floats of them for free.
"""

import copy
from typing import Any

import numpy as np

from driver.errors import ImportFailed
from driver.formats.file_bytes import Array
from driver.nn.builder import Value

from .call import Convert, OnnxCall
from .graph import BYTES, ValueEntry
from .products import matmul
from .windows import conv

_ROUNDER = np.array([3 << 22], np.float32)
"""A float of this size has no fraction: adding and subtracting it rounds to the nearest integer, half to even."""
_SMALLEST, _ZERO, _STEPS = (np.array([value], np.float32) for value in (1e-35, 0, 255))


def dynamic_quantise(call: OnnxCall) -> None:
    """DynamicQuantizeLinear: scale and zero point from the least and the largest element, in floats."""
    entry, emit = call.entry(0), call.emit
    if entry.type != "FLOAT":
        raise ImportFailed(f"input 0, {entry}, must be floats")
    x, is_image = call.input_in_its_layout()
    rank = len(x.operand.dimensions)
    axes = np.arange(rank, dtype=np.int32)
    least = emit("MINIMUM", emit("REDUCE_MIN", x, axes, False), _ZERO)
    largest = emit("MAXIMUM", emit("REDUCE_MAX", x, axes, False), _ZERO)
    scale = emit("MAXIMUM", emit("DIV", emit("SUB", largest, least, 0), _STEPS, 0), _SMALLEST)
    zero_point = _rounded(call, emit("SUB", _ZERO, emit("DIV", least, scale, 0), 0))
    steps = emit("ADD", _rounded(call, emit("DIV", x, scale, 0)), zero_point, 0)
    steps = emit("MINIMUM", emit("MAXIMUM", steps, _ZERO), _STEPS)
    names = (*call.node.outputs, "", "")[:3]
    _bind(call, names[0], "UINT8", entry.shape, value=steps, is_image=is_image)
    call.give(scale, shape=(), at=1)
    _bind(call, names[2], "UINT8", (), value=zero_point)


def _rounded(call: OnnxCall, value: Value) -> Any:
    return call.emit("SUB", call.emit("ADD", value, _ROUNDER, 0), _ROUNDER, 0)


def _bind(
    call: OnnxCall, name: str, kind: str, shape: tuple[int, ...], value: Value, *, is_image: bool = False
) -> None:
    """Bind integers that are held as floats."""
    if name:
        plain, image = (None, value) if is_image else (value, None)
        real = ValueEntry(f"{name} in floats", "FLOAT", shape, plain=plain, image=image)
        call.graph.bind(real)
        call.graph.bind(ValueEntry(name, kind, shape, real=real))


def integer_product(convert: Convert, channel: int) -> Convert:
    """MatMulInteger or ConvInteger as the product of floats that `convert` makes.

    channel: the dimension of the weights that zero points per channel belong to.
    """

    def converted(call: OnnxCall) -> None:
        name = call.node.outputs[0]
        names = [f"{name} factor {position}" for position in (0, 1)]
        for position in (0, 1):
            call.graph.bind(_centred(call, position, names[position], channel if position else None))
        node = copy.copy(call.node)
        node.inputs, node.outputs = names, [f"{name} in floats"]
        convert(OnnxCall(call.graph, node, node.outputs[0]))
        real = call.graph.entry(node.outputs[0])
        call.graph.bind(ValueEntry(name, "INT32", real.shape, real=real))

    return converted


def _centred(call: OnnxCall, position: int, name: str, channel: int | None) -> ValueEntry:
    """Return an input less its zero point, as floats."""
    entry, zero = call.entry(position), call.entry(position + 2) if call.given(position + 2) else None
    if entry.array is not None:
        call.graph.charge(4 * entry.array.size)
        array = entry.array.astype(np.float32) - _zero_points(entry, zero, channel)
        return ValueEntry(name, "FLOAT", entry.shape, array)
    if entry.real is None or entry.type not in BYTES:
        raise ImportFailed(f"input {position}, {entry}, must be a constant or the result of DynamicQuantizeLinear")
    real = entry.real
    if zero is None:
        return ValueEntry(name, "FLOAT", entry.shape, plain=real.plain, image=real.image)
    if zero.real is not None:
        offset: Any = call.graph.plain(zero.real)
    else:
        offset = np.atleast_1d(np.asarray(_zero_points(entry, zero, None), np.float32))
    is_image = call.graph.is_image(real)
    value = call.emit("SUB", call.graph.image(real) if is_image else call.graph.plain_squeezed(real), offset, 0)
    plain, image = (None, value) if is_image else (value, None)
    return ValueEntry(name, "FLOAT", entry.shape, plain=plain, image=image)


def _zero_points(entry: ValueEntry, zero: ValueEntry | None, channel: int | None) -> Array:
    """Return the zero points of an input, to be subtracted from it: one, or one for each channel."""
    if zero is None:
        return np.zeros((), np.float32)
    if zero.array is None:
        raise ImportFailed(f"the zero point {zero} must be a constant")
    array = zero.array.astype(np.float32)
    if array.size == 1:
        return array.reshape(())
    sizes = [1] * len(entry.shape)
    if channel is None or array.ndim != 1 or not sizes or array.size != entry.shape[channel]:
        raise ImportFailed(f"the zero points {zero} do not fit {entry}")
    sizes[channel] = array.size
    return array.reshape(sizes)


matmul_integer, conv_integer = integer_product(matmul, -1), integer_product(conv, 0)
