"""One operator of an .onnx file, during conversion to operations of the HAL.

A function of the table takes an `OnnxCall`, emits operations, and binds the result to its name:

    def _softsign(call: OnnxCall) -> None:
        x, is_image = call.input_in_its_layout(0)
        size = call.emit("ADD", call.emit("ABS", x), call.scalar(1.0), 0)
        call.give(call.emit("DIV", x, size, 0), is_image=is_image)

An operator between DequantizeLinear and QuantizeLinear is computed on the integers: `call.target` then holds the scale
and zero point of its result. `call.code` is the code of a fused activation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from driver.errors import ImportFailed
from driver.formats.file_bytes import Array
from driver.importers.transposes import MOST_DIMENSIONS
from driver.nn import OPERATIONS, OperandType
from driver.nn.builder import Value
from driver.nn.calls import match_signature
from driver.nn.operands import constant_operand
from driver.nn.operation import Tensor as Shaped

from .file import OnnxNode
from .graph import DERIVED, HAL_TYPES, UNKNOWN, OnnxGraph, Shape, ValueEntry, dequantised


@dataclass(frozen=True, slots=True)
class QuantTarget:
    """Type, scale and zero point that a result is quantised to."""

    type: str
    scale: float
    zero_point: int


class OnnxCall:
    """One operator and the graph under construction. name: of its first result, after what is fused into it."""

    def __init__(
        self, graph: OnnxGraph, node: OnnxNode, name: str, code: int = 0, target: QuantTarget | None = None
    ) -> None:
        self.graph, self.node, self.code, self.target = graph, node, code, target
        self.opset = graph.file.opset
        self._name = name

    def __len__(self) -> int:
        return len(self.node.inputs)

    # ---- inputs

    def given(self, position: int) -> bool:
        """Return True if the operator has an input at `position`."""
        return position < len(self) and bool(self.node.inputs[position])

    def entry(self, position: int) -> ValueEntry:
        """Return the entry of input `position`; of a quantised operator, that of the integers."""
        if not self.given(position):
            raise ImportFailed(f"input {position} is missing")
        entry = self.graph.entry(self.node.inputs[position])
        return entry.source if self.target is not None and entry.source is not None else entry

    def shape(self, position: int, rank: int | None = None) -> Shape:
        """Return the dimensions of input `position`. rank: how many there must be."""
        shape = self.entry(position).shape
        if rank not in (None, len(shape)):
            raise ImportFailed(f"input {position}, {self.entry(position)}, must have {rank} dimensions")
        return shape

    def known(self, position: int) -> Shape:
        """Return the dimensions of input `position`, all of which must be known."""
        if 0 in self.shape(position):
            raise self.graph.unsized(f"input {position}, {self.entry(position)}: its sizes must be known")
        return self.shape(position)

    def value(self, position: int) -> Value:
        """Input `position` in the layout of the file."""
        return self.graph.plain(self.entry(position))

    def image(self, position: int) -> Value:
        """Input `position` with its channels last."""
        return self.graph.image(self.entry(position))

    def constant(self, position: int) -> Array:
        """Return the values of input `position`, which must be constant."""
        entry = self.entry(position)
        if entry.array is None:
            raise ImportFailed(f"input {position}, {entry}, must be a constant")
        return entry.array

    def weights(self, position: int) -> ValueEntry:
        """Input `position`, which must be constant; dequantised unless the operator is quantised."""
        entry = self.entry(position)
        self.graph.derive(entry)
        self.constant(position)
        return entry

    def number(self, position: int) -> float:
        """Return a constant input as one number."""
        values = self.constant(position)
        if values.size != 1:
            raise ImportFailed(f"input {position} has {values.size} values; expected one")
        return float(values.reshape(-1)[0])

    def integers(self, position: int) -> list[int]:
        """Return a constant input as a list of integers."""
        values = self.constant(position)
        if values.dtype.kind not in "iu" or values.size > 1 << 16:
            raise ImportFailed(f"input {position}, {self.entry(position)}, must hold integers")
        return [int(v) for v in values.reshape(-1)]

    def attribute_or_input(self, name: str, position: int) -> list[int] | None:
        """Return the integers that are an attribute in older opsets and an input in newer ones; None when absent."""
        if self.given(position):
            found = self.integers(position)
            if UNKNOWN in found or DERIVED in found:
                raise self.graph.unsized(f"input {position} depends on an unknown dimension")
            return found
        return self.node.integers(name)

    def axis(self, default: int, rank: int) -> int:
        """Return the attribute `axis` as an index from the front."""
        return axis_of(self.node.integer("axis", default), rank)

    def inputs_in_one_layout(self) -> tuple[list[Value], bool]:
        """Return all inputs in one layout, that of most of them; and whether that layout is channels-last."""
        entries = [self.entry(i) for i in range(len(self))]
        computed = [e for e in entries if e.array is None and (e.source is None or e.source.array is None)]
        rank = max((len(e.shape) for e in entries), default=0)
        if rank > MOST_DIMENSIONS:
            return self._with_fewer_dimensions(entries), False
        is_image = rank in (3, 4) and any(map(self.graph.is_image, computed))
        if is_image and all(len(e.shape) == rank for e in computed):
            return [self.graph.image(e, rank) for e in entries], True
        return [self.graph.plain(e) for e in entries], False

    def _with_fewer_dimensions(self, entries: Sequence[ValueEntry]) -> list[Value]:
        """Return the values of more than four dimensions, for an operation on their elements."""
        fewer = fewer_dimensions(self.graph, [e.shape for e in entries])
        return [
            self.graph.reshape(self.graph.plain_squeezed(e), sizes) for e, sizes in zip(entries, fewer, strict=True)
        ]

    def input_in_its_layout(self, position: int = 0) -> tuple[Value, bool]:
        """Input `position` in the layout that it has, and whether that layout is channels-last.

        With more than four dimensions it comes with fewer, its elements in the same order.
        """
        entry = self.entry(position)
        if len(entry.shape) > MOST_DIMENSIONS:
            return self.graph.plain_squeezed(entry), False
        is_image = self.graph.is_image(entry)
        return (self.graph.image(entry) if is_image else self.graph.plain(entry)), is_image

    def scalar(self, value: float) -> Array:
        """Return a constant of one element, of the type of input 0."""
        kind = HAL_TYPES[self.entry(0).type]
        if kind.dtype.kind != "f" and not (
            np.isfinite(value) and np.can_cast(np.min_scalar_type(int(value)), kind.dtype)
        ):
            raise ImportFailed(f"{value} does not fit {kind.name}")
        return np.array([value], kind.dtype)

    # ---- results

    def emit(self, kind: str, *arguments: Any, **asked: Any) -> Any:
        """Add an operation and return its result or results. Quantised ones get the target's scale if possible."""
        if self.target is not None and "outputs" not in asked and "scale" not in asked:
            asked |= self._scale(kind, arguments)
        return self.graph.operation(kind, *arguments, **asked)

    def _scale(self, kind: str, arguments: Sequence[Any]) -> dict[str, Any]:
        """Return the scale and zero point nearest to the target's that the operation can produce."""
        assert self.target is not None
        inputs = [a.operand if isinstance(a, Value) else constant_operand(a) for a in arguments]
        signature, _ = match_signature(OPERATIONS[kind], inputs)
        source = inputs[signature.of]
        if not source.type.is_quantised:
            return {}
        wish = Shaped(source.base_type, (), self.target.scale, self.target.zero_point)
        scale, zero_point = OPERATIONS[kind].quantise(0, Shaped.of(source), wish)
        return {"scale": scale, "zero_point": zero_point}

    def give(
        self, value: Any, *, shape: Shape | None = None, is_image: bool = False, rank: int = 4, at: int = 0
    ) -> None:
        """Bind output `at` of the operator to a value. is_image: the value is channels-last.

        shape: in ONNX, where it differs from the operand's. rank: of an image; 3 for a signal.
        """
        value = self.graph.cast(value)
        if at >= len(self.node.outputs) or not self.node.outputs[at]:
            return
        if self.target is not None and value.operand.type.is_quantised:
            value = self._requantised(value)
        dims = value.operand.dimensions
        if not dims:
            raise self.graph.unsized("the dimensions of its result cannot be inferred")
        if shape is None:
            shape = _of_image(dims, rank) if is_image else dims
        operand = value.operand
        entry = ValueEntry(self._name if at == 0 else self.node.outputs[at], _TYPE_NAMES[operand.type], shape)
        if operand.type.is_quantised:
            entry.scales, entry.zero_points = (operand.scale,), (operand.zero_point,)
        entry.plain, entry.image = (None, value) if is_image else (value, None)
        self.graph.bind(entry)

    def define(self, array: Array, kind: str) -> None:
        """Bind the result to a constant."""
        self.graph.bind(ValueEntry(self._name, kind, array.shape, array))

    def _requantised(self, value: Value) -> Value:
        """Requantise data to the scale and type of the target."""
        target = self.target
        assert target is not None
        operand, kind = value.operand, HAL_TYPES[target.type]
        is_scaled = np.float32(operand.scale) == np.float32(target.scale) and operand.zero_point == target.zero_point
        if is_scaled and operand.type == kind:
            return value
        real = self.graph.operation("DEQUANTIZE", value)
        return self.graph.cast(
            self.graph.operation("QUANTIZE", real, scale=target.scale, zero_point=target.zero_point, dtype=kind)
        )


Convert = Callable[[OnnxCall], None]
"""Emits the operations of one operator, and binds its results."""
_TYPE_NAMES = {kind: name for name, kind in HAL_TYPES.items() if name != "INT64"}


def _of_image(dims: Sequence[int], rank: int) -> Shape:
    n, h, w, c = dims
    return (n, c, w) if rank == 3 else (n, c, h, w)


def axis_of(axis: int, rank: int) -> int:
    """Normalise an axis to an index from the front."""
    if not -rank <= axis < rank:
        raise ImportFailed(f"axis {axis} must be in {-rank}..{rank - 1}")
    return axis % rank


def broadcast(*shapes: Shape) -> Shape:
    """Return the dimensions that these shapes broadcast to."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    if any(len(set(sizes) - {0, 1}) > 1 for sizes in zip(*padded, strict=True)):
        raise ImportFailed(f"dimensions {', '.join(str(list(s)) for s in shapes[:3])} do not broadcast")
    return tuple(max(sizes) if 0 not in sizes or max(sizes) > 1 else 0 for sizes in zip(*padded, strict=True))


def fewer_dimensions(graph: OnnxGraph, shapes: Sequence[Shape]) -> list[list[int]]:
    """Return the shapes that broadcast, in four dimensions at most: neighbours are joined where each value has both of
    them in full, or is repeated along both.
    """
    whole = broadcast(*shapes)
    if 0 in whole:
        raise graph.unsized(f"its result has dimensions {list(whole)}; the HAL takes at most {MOST_DIMENSIONS}")
    padded = [(1,) * (len(whole) - len(shape)) + shape for shape in shapes]
    runs: list[list[int]] = []
    ways: list[tuple[bool, ...]] = []
    for axis in (i for i, size in enumerate(whole) if size != 1):
        way = tuple(shape[axis] == 1 for shape in padded)
        if not ways or ways[-1] != way:
            runs.append([])
            ways.append(way)
        runs[-1].append(axis)
    if len(runs) > MOST_DIMENSIONS:
        named = " and ".join(str(list(shape)) for shape in shapes[:3])
        raise ImportFailed(
            f"it combines dimensions {named}, which cannot be joined to the {MOST_DIMENSIONS} that the HAL takes"
        )
    return [[math.prod(shape[i] for i in run) for run in runs] or [1] for shape in padded]


# ---- filters, matrices and biases in the layout and types that the HAL's products take -------------------------------

_SIGNED, _UNSIGNED = OperandType.TENSOR_QUANT8_ASYMM_SIGNED, OperandType.TENSOR_QUANT8_ASYMM
MIDDLE = 128


def filters(call: OnnxCall, entry: ValueEntry, array: Array, channel: int, x: Value) -> Value:
    """Add the weights `entry`, rearranged as `array`, for data of the type of `x`.

    channel: the dimension that per-channel scales belong to. 8-bit weights are converted to the type of the data,
    unless they have a scale per channel; the numbers that they stand for stay the same.
    """
    graph = call.graph
    if not x.operand.type.is_quantised:
        if array is entry.array:
            return graph.plain(entry)
        graph.charge(array.nbytes)
        return graph.builder.constant(np.ascontiguousarray(array), dtype=x.operand.type)
    if entry.type not in ("INT8", "UINT8"):
        raise ImportFailed(f"weights {entry} of a quantised operator must be 8-bit integers")
    graph.charge(array.nbytes)
    zero_points, is_signed = entry.zero_points or (0,), entry.type == "INT8"
    if len(entry.scales) > 1:
        if any(zero_point != (0 if is_signed else MIDDLE) for zero_point in zero_points):
            raise ImportFailed(f"weights {entry} have a zero point per channel; the HAL has none for weights")
        quant = (entry.scales, channel)
        return graph.builder.constant(_with_sign(array, is_signed, wanted=True), channel_quant=quant)
    wanted = x.operand.type == _SIGNED
    shift = 0 if wanted == is_signed else -MIDDLE if wanted else MIDDLE
    kind = _SIGNED if wanted else _UNSIGNED
    data = _with_sign(array, is_signed, wanted=wanted)
    return graph.builder.constant(data, dtype=kind, scale=entry.scales[0], zero_point=zero_points[0] + shift)


def _with_sign(array: Array, is_signed: bool, *, wanted: bool) -> Array:
    array = np.ascontiguousarray(array)
    return array if is_signed == wanted else (array.view(np.uint8) ^ 0x80).view(np.int8 if wanted else np.uint8)


def bias(call: OnnxCall, position: int, x: Value, weights: Value, units: int, factor: float = 1.0) -> Value:
    """Input `position` times `factor` as a bias: zeros when absent, integers for quantised products."""
    graph = call.graph
    graph.charge(4 * units)
    if not x.operand.type.is_quantised:
        if not call.given(position):
            return graph.builder.constant(np.zeros(units, x.operand.type.dtype))
        entry = call.weights(position)
        assert entry.array is not None
        if factor == 1.0 and entry.shape == (units,):
            return graph.plain(entry)
        return graph.builder.constant(_row(entry.array, units) * x.operand.type.dtype.type(factor))
    numbers = _row(_real(call, position), units).astype(np.float64) if call.given(position) else np.zeros(units)
    channels = weights.operand.channel_quant
    scales = np.float64(x.operand.scale) * np.array(channels[0] if channels else weights.operand.scale)
    steps = np.clip(np.rint(numbers * factor / scales), -(2**31), 2**31 - 1).astype(np.int32)
    return graph.builder.constant(steps, scale=0.0 if channels else float(scales))


def _real(call: OnnxCall, position: int) -> Array:
    entry = call.weights(position)
    assert entry.array is not None
    return dequantised(entry) if entry.scales else entry.array


def _row(array: Array, units: int) -> Array:
    """Return one bias per unit."""
    if array.size not in (1, units):
        raise ImportFailed(f"a bias of dimensions {list(array.shape)} does not fit {units} units")
    return np.ascontiguousarray(np.broadcast_to(array.reshape(-1), (units,)))


def pair(values: Sequence[int] | None, rank: int, default: int, what: str) -> tuple[int, int]:
    """Return the values for height and width, from an attribute with one value per dimension of an image or signal."""
    values = [default] * (rank - 2) if not values else list(values)
    if rank not in (3, 4) or len(values) != rank - 2 or any(not 0 <= v < 2**31 for v in values):
        raise ImportFailed(f"{what} {values[:8]} for an input of rank {rank}; an image takes 2 values, a signal 1")
    return (default, values[0]) if rank == 3 else (values[0], values[1])
