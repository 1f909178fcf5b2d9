"""One operator of an .onnx file, during conversion to operations of the HAL.

A function of the table takes an `OnnxCall`, emits operations, and binds the result to its name:

    def _softsign(call: OnnxCall) -> None:
        x, is_image = call.input_in_its_layout(0)
        size = call.emit("ADD", call.emit("ABS", x), call.scalar(1.0), 0)
        call.give(call.emit("DIV", x, size, 0), is_image=is_image)

An operator between DequantizeLinear and QuantizeLinear is computed on the integers: `call.target` then holds the scale
and zero point of its result. `call.code` is the code of a fused activation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from driver.errors import ImportFailed
from driver.importers.file_bytes import Array
from driver.nn import OPERATIONS, OperandType
from driver.nn.builder import Value
from driver.nn.calls import match_signature
from driver.nn.operands import constant_operand
from driver.nn.operation import Tensor as Shaped

from .file import OnnxNode
from .graph import DERIVED, HAL_TYPES, UNKNOWN, OnnxGraph, Shape, ValueEntry


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
        """Whether the operator has an input at `position`."""
        return position < len(self) and bool(self.node.inputs[position])

    def entry(self, position: int) -> ValueEntry:
        """The entry of input `position`; of a quantised operator, that of the integers."""
        if not self.given(position):
            raise ImportFailed(f"input {position} is missing")
        entry = self.graph.entry(self.node.inputs[position])
        return entry.source if self.target is not None and entry.source is not None else entry

    def shape(self, position: int, rank: int | None = None) -> Shape:
        """The dimensions of input `position`. rank: how many there must be."""
        shape = self.entry(position).shape
        if rank not in (None, len(shape)):
            raise ImportFailed(f"input {position}, {self.entry(position)}, must have {rank} dimensions")
        return shape

    def known(self, position: int) -> Shape:
        """The dimensions of input `position`, all of which must be known."""
        if 0 in self.shape(position):
            raise ImportFailed(f"input {position}, {self.entry(position)}: {self.graph.shape_hint()}")
        return self.shape(position)

    def value(self, position: int) -> Value:
        """Input `position` in the layout of the file."""
        return self.graph.plain(self.entry(position))

    def image(self, position: int) -> Value:
        """Input `position` with its channels last."""
        return self.graph.image(self.entry(position))

    def constant(self, position: int) -> Array:
        """The values of input `position`, which must be constant."""
        entry = self.entry(position)
        if entry.array is None:
            raise ImportFailed(f"input {position}, {entry}, must be a constant")
        return entry.array

    def weights(self, position: int) -> ValueEntry:
        """Input `position`, which must be constant; dequantised unless the operator is quantised."""
        entry = self.entry(position)
        self.graph.derive(entry)
        if entry.array is None:
            raise ImportFailed(f"input {position}, {entry}, must be a constant")
        return entry

    def number(self, position: int) -> float:
        """A constant input as one number."""
        values = self.constant(position)
        if values.size != 1:
            raise ImportFailed(f"input {position} has {values.size} values; expected one")
        return float(values.reshape(-1)[0])

    def integers(self, position: int) -> list[int]:
        """A constant input as a list of integers."""
        values = self.constant(position)
        if values.dtype.kind not in "iu" or values.size > 1 << 16:
            raise ImportFailed(f"input {position}, {self.entry(position)}, must hold integers")
        return [int(v) for v in values.reshape(-1)]

    def attribute_or_input(self, name: str, position: int) -> list[int] | None:
        """Integers that are an attribute in older opsets and an input in newer ones; None when absent."""
        if self.given(position):
            found = self.integers(position)
            if UNKNOWN in found or DERIVED in found:
                raise ImportFailed(f"input {position} depends on an unknown dimension; {self.graph.shape_hint()}")
            return found
        return self.node.integers(name)

    def axis(self, default: int, rank: int) -> int:
        """The attribute `axis` as an index from the front."""
        return axis_of(self.node.integer("axis", default), rank)

    def inputs_in_one_layout(self) -> tuple[list[Value], bool]:
        """All inputs in one layout, that of most of them; and whether that layout is channels-last."""
        entries = [self.entry(i) for i in range(len(self))]
        computed = [e for e in entries if e.array is None and (e.source is None or e.source.array is None)]
        rank = max((len(e.shape) for e in entries), default=0)
        is_image = rank in (3, 4) and any(map(self.graph.is_image, computed))
        if is_image and all(len(e.shape) == rank for e in computed):
            return [self.graph.image(e, rank) for e in entries], True
        return [self.graph.plain(e) for e in entries], False

    def input_in_its_layout(self, position: int = 0) -> tuple[Value, bool]:
        """Input `position` in the layout that it has, and whether that layout is channels-last."""
        entry = self.entry(position)
        is_image = self.graph.is_image(entry)
        return (self.graph.image(entry) if is_image else self.graph.plain(entry)), is_image

    def scalar(self, value: float) -> Array:
        """A constant of one element, of the type of input 0."""
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
        """The scale and zero point nearest to the target's that the operation can produce."""
        assert self.target is not None
        inputs = [a.operand if isinstance(a, Value) else constant_operand(a) for a in arguments]
        signature, _ = match_signature(OPERATIONS[kind], inputs)
        source = inputs[signature.of]
        if not source.type.is_quantised:
            return {}
        wish = Shaped(source.type, (), self.target.scale, self.target.zero_point)
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
            raise ImportFailed(f"the dimensions of its result cannot be inferred; {self.graph.shape_hint()}")
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


_TYPE_NAMES = {kind: name for name, kind in HAL_TYPES.items() if name != "INT64"}
assert _TYPE_NAMES[OperandType.TENSOR_INT32] == "INT32"


def _of_image(dims: Sequence[int], rank: int) -> Shape:
    n, h, w, c = dims
    return (n, c, w) if rank == 3 else (n, c, h, w)


def axis_of(axis: int, rank: int) -> int:
    """Normalise an axis to an index from the front."""
    if not -rank <= axis < rank:
        raise ImportFailed(f"axis {axis} must be in {-rank}..{rank - 1}")
    return axis % rank


def broadcast(*shapes: Shape) -> Shape:
    """The dimensions that these shapes broadcast to."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    if any(len(set(sizes) - {0, 1}) > 1 for sizes in zip(*padded, strict=True)):
        raise ImportFailed(f"dimensions {', '.join(str(list(s)) for s in shapes[:3])} do not broadcast")
    return tuple(max(sizes) if 0 not in sizes or max(sizes) > 1 else 0 for sizes in zip(*padded, strict=True))
