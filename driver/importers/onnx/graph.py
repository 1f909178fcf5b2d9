"""The graph of an .onnx file during conversion: its values by name, each in the layouts that operators needed.

ONNX stores the channels of an image before its pixels; the HAL stores them last. A value can have both layouts:
`plain`, that of the file, and `image`, channels-last. Operators on images read and write `image`. Element-wise
operators take whichever exists. All others read `plain`. So a network is transposed only where its images begin and
end. A value of rank 3 is an image of height 1; one of rank 0 becomes one element of rank 1.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from driver.errors import ImportFailed
from driver.importers.file_bytes import Array
from driver.nn import Model, ModelBuilder, OperandLifeTime, OperandType, Subgraph
from driver.nn.builder import Value

from .file import Declared, OnnxFile, OnnxTensor

HAL_TYPES = {
    "FLOAT": OperandType.TENSOR_FLOAT32,
    "FLOAT16": OperandType.TENSOR_FLOAT16,
    "INT32": OperandType.TENSOR_INT32,
    "INT64": OperandType.TENSOR_INT32,
    "UINT8": OperandType.TENSOR_QUANT8_ASYMM,
    "INT8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    "BOOL": OperandType.TENSOR_BOOL8,
}
FLOATS, INTEGERS, BYTES = ("FLOAT", "FLOAT16"), ("INT32", "INT64"), ("UINT8", "INT8")
UNKNOWN, DERIVED = -(2**40), -(2**40) - 1
"""Markers in the values of shapes: an unknown size, and a value computed from one."""
_HIGHEST_RANK = 4
_MOST_OPERATIONS = 1 << 15
"""Limit for the model: one operator can become thousands."""
Shape = tuple[int, ...]


@dataclass(slots=True, eq=False)
class ValueEntry:
    """One named value of the file, and the operands that hold it.

    shape: 0 where unknown. array: of a constant; offset: its position in the file.
    scales, zero_points, axis: quantisation of 8-bit (or bias) integers. source: the quantised value it was read from.
    """

    name: str
    type: str
    shape: Shape
    array: Array | None = None
    offset: int | None = None
    plain: Value | None = None
    image: Value | None = None
    scales: tuple[float, ...] = ()
    zero_points: tuple[int, ...] = ()
    axis: int = 0
    source: "ValueEntry | None" = None
    forms: dict[Any, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name[:64]!r} ({self.type} {list(self.shape)})"


class OnnxGraph:
    """The values by name, and the model under construction."""

    def __init__(self, file: OnnxFile) -> None:
        self.file, self.builder = file, ModelBuilder()
        self.entries: dict[str, ValueEntry] = {}
        self.symbols: set[str] = set()
        self._names: dict[int, str] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._inputs: list[tuple[Value, str]] = []
        self._operations = 0
        for tensor in file.initializers():
            self.define(tensor)

    def define(self, tensor: OnnxTensor) -> None:
        """Add a constant of the file."""
        self.entries[tensor.name] = ValueEntry(tensor.name, tensor.type, tensor.data.shape, tensor.data, tensor.offset)

    def declare(self, info: Declared, scale: float, zero_point: int) -> None:
        """Add an input of the model, unless it is an initializer that a caller may override."""
        if info.name in self.entries:
            return
        if info.type not in HAL_TYPES:
            raise ImportFailed(f"input {info.name[:64]!r} is of {info.type}, which is not a type of the HAL")
        if info.shape is None:
            raise ImportFailed(f"input {info.name[:64]!r} has no shape; export the model with one")
        kind = HAL_TYPES[info.type]
        more: dict[str, Any] = {"scale": scale, "zero_point": zero_point} if kind.is_quantised else {}
        value = self.builder.input(kind, info.shape or (1,), **more)
        scales, zero_points = ((scale,), (zero_point,)) if more else ((), ())
        entry = ValueEntry(info.name, info.type, info.shape, plain=value, scales=scales, zero_points=zero_points)
        self.entries[info.name] = entry
        self.symbols |= set(info.symbols)
        self._inputs.append((value, info.name))

    def entry(self, name: str) -> ValueEntry:
        """Look up a value by name."""
        if name not in self.entries:
            raise ImportFailed(f"nothing gives {name[:64]!r} a value before it is read")
        return self.entries[name]

    def bind(self, entry: ValueEntry) -> None:
        """Add a value that an operator computes."""
        self.alias(entry.name, entry)
        for value in (entry.plain, entry.image):
            if value is not None:
                self._names.setdefault(value.index, entry.name)

    def charge(self, nbytes: int) -> None:
        """Charge `nbytes` to the budget for data made from the file."""
        self.file.bytes.makes.charge(nbytes)

    def alias(self, name: str, entry: ValueEntry) -> None:
        """Give a value another name."""
        if name in self.entries:
            raise ImportFailed(f"{name[:64]!r} has a value already")
        self.entries[name] = entry

    # ---- layouts

    def plain(self, entry: ValueEntry) -> Value:
        """The operand of a value in the layout of the file."""
        value = self.plain_squeezed(entry)
        if len(entry.shape) > _HIGHEST_RANK and len(value.operand.dimensions) != len(entry.shape):
            raise ImportFailed(f"{entry}: the HAL takes at most 4 dimensions here")
        return value

    def plain_squeezed(self, entry: ValueEntry) -> Value:
        """As `plain`, but without dimensions of size 1 when the value has more than four dimensions."""
        if entry.plain is None and entry.array is None:
            self.derive(entry)
        if entry.plain is None:
            entry.plain = self._from_image(entry) if entry.array is None else self.constant(entry, entry.array)
        return entry.plain

    def image(self, entry: ValueEntry, rank: int | None = None) -> Value:
        """The channels-last operand of a value. A constant is broadcast to `rank`."""
        rank = len(entry.shape) if rank is None else rank
        if entry.image is None and entry.array is None:
            self.derive(entry)
        if entry.array is not None:
            return self._image_constant(entry, rank)
        if entry.image is None:
            entry.image = self._to_image(entry)
        return entry.image

    def is_image(self, entry: ValueEntry) -> bool:
        """Whether a value exists in the channels-last layout only."""
        held = entry if entry.source is None or entry.plain or entry.image else entry.source
        return held.plain is None and held.image is not None

    def derive(self, entry: ValueEntry) -> None:
        """Dequantise a value that has only its integers so far."""
        if entry.source is None or entry.plain or entry.image:
            return
        source = entry.source
        if source.array is not None:
            self.charge(4 * source.array.size)
            entry.array = dequantised(source)
        elif self.is_image(source):
            entry.image = self.cast(self.operation("DEQUANTIZE", source.image))
        else:
            entry.plain = self.cast(self.operation("DEQUANTIZE", self.plain(source)))

    def _from_image(self, entry: ValueEntry) -> Value:
        if entry.image is None:
            raise ImportFailed(f"{entry} has no value")
        if all(d == 1 for d in entry.shape[2:]):
            return self.reshape(entry.image, entry.shape)
        if len(entry.shape) == 3:
            row = self.operation("SQUEEZE", entry.image, np.array([1], np.int32))
            return self.transpose(row, (0, 2, 1))
        return self.transpose(entry.image, (0, 3, 1, 2))

    def _to_image(self, entry: ValueEntry) -> Value:
        value, rank = self.plain(entry), len(entry.shape)
        if rank not in (3, 4):
            raise ImportFailed(f"{entry} has rank {rank}; an image has rank 4, a signal rank 3")
        if rank == 3:
            return self.cast(self.operation("EXPAND_DIMS", self.transpose(value, (0, 2, 1)), 1))
        if all(d == 1 for d in entry.shape[2:]):
            return self.reshape(value, (*entry.shape[:1], 1, 1, *entry.shape[1:2]))
        return self.transpose(value, (0, 2, 3, 1))

    def _image_constant(self, entry: ValueEntry, rank: int) -> Value:
        assert entry.array is not None
        if rank not in (3, 4) or entry.array.ndim > rank:
            raise ImportFailed(f"{entry} is neither an image nor a signal")
        if rank not in entry.forms:
            array = entry.array.reshape((1,) * (rank - entry.array.ndim) + entry.array.shape)
            array = array[:, :, None] if rank == 3 else array
            self.charge(array.nbytes)
            entry.forms[rank] = self.constant(entry, array.transpose(0, 2, 3, 1))
        return entry.forms[rank]

    # ---- operations and constants

    def operation(self, kind: str, *arguments: Any, **asked: Any) -> Any:
        """Add an operation and return its result or results."""
        self._operations += 1
        if self._operations > _MOST_OPERATIONS:
            raise ImportFailed(f"more than {_MOST_OPERATIONS} operations")
        return self.builder.operation(kind, *arguments, **asked)

    def transpose(self, value: Value, order: Sequence[int]) -> Value:
        """Add a TRANSPOSE."""
        return self.cast(self.operation("TRANSPOSE", value, np.array(order, np.int32)))

    def cast(self, value: Any) -> Value:
        """Narrow the result of an operation with one output to `Value`."""
        assert isinstance(value, Value)
        return value

    def reshape(self, value: Value, shape: Iterable[int]) -> Value:
        """Reshape `value`; one dimension of `shape` may be unknown (0)."""
        sizes = [d or -1 for d in shape] or [1]
        if tuple(sizes) == value.operand.dimensions:
            return value
        if value.operand.type == OperandType.TENSOR_INT32 and (places := _inserted(value.operand.dimensions, sizes)):
            for place in places:
                value = self.cast(self.operation("EXPAND_DIMS", value, place))
            return value
        if sizes.count(-1) > 1 or len(sizes) > _HIGHEST_RANK:
            raise ImportFailed(f"cannot reshape to {sizes}: {self.shape_hint()}")
        return self.cast(self.operation("RESHAPE", value, np.array(sizes, np.int32)))

    def shape_hint(self) -> str:
        """The remedy to add to an error message about a shape."""
        named = ", ".join(sorted(self.symbols)[:4])
        return f"give {named} a fixed size" if named else "the HAL takes at most 4 dimensions here"

    def constant(self, entry: ValueEntry, array: Array) -> Value:
        """Add `array` as a constant with the type and quantisation of `entry`."""
        if entry.type not in HAL_TYPES:
            raise ImportFailed(f"{entry}: the HAL has no tensors of this type")
        kind, is_own = HAL_TYPES[entry.type], array is entry.array  # the bytes of the file, unchanged
        array = array.reshape(array.shape or (1,))
        if entry.type == "INT64":
            self.charge(array.nbytes)
            array, is_own = small(array, str(entry)), False
        if not (array.flags.aligned and array.flags.c_contiguous):
            array, is_own = np.array(array, order="C"), False
        asked: dict[str, Any] = {}
        if kind.is_quantised:
            asked = {"scale": (entry.scales or (1.0,))[0], "zero_point": (entry.zero_points or (0,))[0]}
        value = self.builder.constant(array, dtype=kind, **asked)
        self._names.setdefault(value.index, entry.name)
        if is_own and entry.offset is not None:
            self._places[value.index] = (entry.offset, array.nbytes)
        return value

    # ---- the end

    def finish(self, outputs: Sequence[str]) -> Model:
        """Build the model; operands carry their names in the file."""
        names = dict(self._names)
        if not outputs:
            raise ImportFailed("the graph has no output")
        taken: set[int] = set()
        for name in outputs:
            value = self.plain(self.entry(name))
            if value.operand.lifetime != OperandLifeTime.TEMPORARY_VARIABLE or value.index in taken:
                value = self.cast(self.operation("CAST", value))
            taken.add(value.index)
            names[value.index] = name
            self.builder.output(value)
        names |= {value.index: name for value, name in self._inputs}
        model = self.builder.build()
        return Model(self._named(model.main, names), model.referenced, relaxed=model.relaxed)

    def _named(self, graph: Subgraph, names: dict[int, str]) -> Subgraph:
        operands = list(graph.operands)
        for index, name in names.items():
            place = self._places.get(index)
            more: dict[str, Any] = {}
            if place:
                more = {"lifetime": OperandLifeTime.CONSTANT_REFERENCE, "location": place}
            operands[index] = replace(operands[index], extra={"name": name}, **more)
        return Subgraph(operands, graph.operations, graph.inputs, graph.outputs)


def _inserted(source: Sequence[int], target: Sequence[int]) -> list[int]:
    """Positions of new dimensions of size 1 in `target`; empty when it differs otherwise.

    For integers: the HAL has EXPAND_DIMS for them, but no RESHAPE.
    """
    rest, places = list(source), []
    for place, size in enumerate(target):
        if rest and rest[0] == size:
            rest.pop(0)
        elif size == 1:
            places.append(place)
        else:
            return []
    return [] if rest else places


def small(array: Array, where: str) -> Array:
    """Narrow 64-bit integers to 32 bits."""
    if array.size and not -(2**31) <= array.min() <= array.max() < 2**31:
        raise ImportFailed(f"{where} does not fit into 32 bits")
    return array.astype(np.int32)


def dequantised(entry: ValueEntry) -> Array:
    """Dequantise a constant."""
    assert entry.array is not None
    along = [-1 if i == entry.axis else 1 for i in range(entry.array.ndim)]
    scales, zero_points = (
        np.reshape(np.asarray(v, np.float32), along if len(v) > 1 else ())
        for v in (entry.scales, entry.zero_points or (0,))
    )
    return np.asarray((entry.array.astype(np.float32) - zero_points) * scales, np.float32)
