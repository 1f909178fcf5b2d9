"""The graph of an .onnx file during conversion: its values by name, each in the layouts that operators needed.

ONNX stores the channels of an image before its pixels; the HAL stores them last. A value can have both layouts:
`plain`, that of the file, and `image`, channels-last. Operators on images read and write `image`. Element-wise
operators take whichever exists. All others read `plain`. So a network is transposed only where its images begin and
end. A value of rank 3 is an image of height 1; one of rank 0 becomes one element of rank 1.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from driver.errors import ImportFailed, InvalidModel
from driver.formats.file_bytes import Array, BudgetSpent
from driver.importers.obstacle import Consequence, InputSizes, remedy_of
from driver.importers.transposes import MOST_DIMENSIONS
from driver.nn import Model, ModelBuilder, OperandLifeTime, OperandType, Subgraph
from driver.nn.builder import Value

from .file import Declared, OnnxBody, OnnxFile, OnnxTensor

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
_HALF = np.array([1 << 16], np.int32)
_MOST_OPERATIONS = 1 << 15
"""Limit for the model: one operator can become thousands."""
Shape = tuple[int, ...]


@dataclass(slots=True, eq=False)
class ValueEntry:
    """One named value of the file, and the operands that hold it.

    shape: 0 where unknown. array: of a constant; offset: its position in the file.
    scales, zero_points, axis: quantisation of 8-bit (or bias) integers. source: the quantised value it was read from.
    real: of integers that exist as floats only, those floats.
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
    real: "ValueEntry | None" = None
    forms: dict[Any, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name[:64]!r} ({self.type} {list(self.shape)})"


class GraphContext:
    """The parts that a graph and the branches in it share: the file, the inputs, and the limit of operations."""

    def __init__(self, file: OnnxFile) -> None:
        self.file, self.inputs = file, dict[str, InputSizes]()
        self._operations = 0

    def count(self) -> None:
        """Charge one operation to the limit."""
        self._operations += 1
        if self._operations > _MOST_OPERATIONS:
            raise BudgetSpent(f"more than {_MOST_OPERATIONS} operations")

    @property
    def symbols(self) -> set[str]:
        """The sizes that the inputs leave open, by name; one without a name has a name of its own here."""
        return {
            declared.symbols[i] or f"{name} {i}"
            for name, declared in self.inputs.items()
            for i, size in enumerate(declared.shape or ())
            if not size
        }


class OnnxGraph:
    """The values by name, and the model under construction.

    outer: the graph around a branch. Its values can be read here: as they are when the branch is the only one that can
    run and has the same builder, else as inputs of the branch (`captures`: the value outside, and the one here).
    """

    def __init__(
        self, shared: GraphContext, body: OnnxBody, outer: "OnnxGraph | None" = None, *, apart: bool = True
    ) -> None:
        self.shared, self.file, self.body, self.outer = shared, shared.file, body, outer
        self.builder: ModelBuilder = ModelBuilder() if outer is None or apart else outer.builder
        self.entries: dict[str, ValueEntry] = {}
        self.broken: set[str] = set()
        self.captures: list[tuple[Value, Value]] = []
        self._names: dict[int, str] = {} if outer is None or apart else outer._names
        self._places: dict[int, tuple[int, int]] = {} if outer is None or apart else outer._places
        self._inputs: list[tuple[Value, str]] = []
        for tensor in body.initializers():
            self.define(tensor)

    def apart(self) -> "OnnxGraph":
        """Return a graph of its own that can read the values of this one."""
        return OnnxGraph(self.shared, self.body.empty(), self)

    def define(self, tensor: OnnxTensor) -> None:
        """Add a constant of the file."""
        self.entries[tensor.name] = ValueEntry(
            tensor.name, tensor.type, tensor.data.shape, tensor.data, offset=tensor.offset
        )

    def declare(self, info: Declared, scale: float, zero_point: int) -> None:
        """Add an input of the model, unless it is an initializer that a caller may override."""
        if info.name in self.entries:
            return
        if info.type not in HAL_TYPES:
            raise ImportFailed(f"input {info.name[:64]!r} is of {info.type}, which is not a type of the HAL")
        shape = info.sizes.shape
        if shape is None:
            raise self.unsized(f"input {info.name[:64]!r} has no shape")
        kind = HAL_TYPES[info.type]
        more: dict[str, Any] = {"scale": scale, "zero_point": zero_point} if kind.is_quantised else {}
        value = self.builder.input(kind, shape or (1,), **more)
        scales, zero_points = ((scale,), (zero_point,)) if more else ((), ())
        self.entries[info.name] = ValueEntry(
            info.name, info.type, shape, plain=value, scales=scales, zero_points=zero_points
        )
        self._inputs.append((value, info.name))

    def entry(self, name: str) -> ValueEntry:
        """Look up a value by name, here and in the graphs around this one."""
        if name not in self.entries and self.outer is not None and name not in self.broken:
            found = self.outer.entry(name)
            if self.builder is self.outer.builder:
                return found
            self.entries[name] = self._captured(found)
        if name in self.broken:
            raise Consequence(f"{name[:64]!r} is the result of an operator that cannot be imported")
        if name not in self.entries:
            raise ImportFailed(f"nothing gives {name[:64]!r} a value before it is read")
        return self.entries[name]

    def find(self, name: str) -> ValueEntry | None:
        """Return the entry of a name; None if there is no such value."""
        try:
            return self.entry(name)
        except ImportFailed:
            return None

    def _captured(self, found: ValueEntry) -> ValueEntry:
        """Return a value of the graph around this branch: a constant as it is, and any other as an input of the
        branch.
        """
        copy = replace(found, plain=None, image=None, forms={})
        if found.source is not None:
            copy.source = self._captured(found.source)
        elif found.real is not None:
            copy.real = self._captured(found.real)
        elif found.array is None:
            assert self.outer is not None
            value = self.outer.plain_squeezed(found)
            o = value.operand
            more: dict[str, Any] = {"scale": o.scale, "zero_point": o.zero_point} if o.type.is_quantised else {}
            copy.plain = self.builder.input(o.type, o.dimensions, **more)
            self._names[copy.plain.index] = found.name
            self.captures.append((value, copy.plain))
        return copy

    def bind(self, entry: ValueEntry) -> None:
        """Add a value that an operator computes."""
        self.alias(entry.name, entry)
        for value in (entry.plain, entry.image):
            if value is not None:
                self._names.setdefault(value.index, entry.name)

    def give_up(self, name: str, info: Declared | None) -> None:
        """Go on without the operator that gives `name`: as an input where the file declares all of it, else without.

        For finding further obstacles; the model is not built.
        """
        if name in self.entries:
            return
        if info is not None and info.type in FLOATS and info.sizes.shape is not None and 0 not in info.sizes.shape:
            with contextlib.suppress(InvalidModel):
                self.declare(replace(info, name=name), 1.0, 0)
                return
        self.broken.add(name)

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
        """Return the operand of a value in the layout of the file."""
        value = self.plain_squeezed(entry)
        if len(entry.shape) <= MOST_DIMENSIONS or value.operand.dimensions == entry.shape:
            return value
        fewer = [d for d in entry.shape if d != 1] or [1]
        if len(fewer) > MOST_DIMENSIONS:
            raise ImportFailed(f"{entry}: the HAL takes at most 4 dimensions here")
        value = self.reshape(value, fewer)
        for place in _inserted(fewer, entry.shape):
            value = self.cast(self.operation("EXPAND_DIMS", value, place))
        return value

    def plain_squeezed(self, entry: ValueEntry) -> Value:
        """Return the operand of `plain`, but with fewer dimensions when the value has more than four; its elements have
        their order.
        """
        if entry.plain is None and entry.array is None:
            self.derive(entry)
        if entry.plain is None and entry.real is not None:
            if entry.type not in INTEGERS:
                raise ImportFailed(f"{entry} has a scale that is computed; only MatMulInteger and ConvInteger read it")
            entry.plain = self.cast(self.operation("CAST", self.plain_squeezed(entry.real), dtype="int32"))
        if entry.plain is None:
            entry.plain = self._from_image(entry) if entry.array is None else self.constant(entry, entry.array)
        return entry.plain

    def image(self, entry: ValueEntry, rank: int | None = None) -> Value:
        """Return the channels-last operand of a value. A constant is broadcast to `rank`."""
        rank = len(entry.shape) if rank is None else rank
        if entry.image is None and entry.array is None:
            self.derive(entry)
        if entry.array is not None:
            return self._image_constant(entry, rank)
        if entry.image is None:
            entry.image = self._to_image(entry)
        return entry.image

    def is_image(self, entry: ValueEntry) -> bool:
        """Return True if a value exists in the channels-last layout only."""
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
        self.shared.count()
        return self.builder.operation(kind, *arguments, **asked)

    def transpose(self, value: Value, order: Sequence[int]) -> Value:
        """Add a TRANSPOSE."""
        turned = np.array(order, np.int32)
        return self.moved(value, lambda v: self.cast(self.operation("TRANSPOSE", v, turned)))

    def joined(self, values: Sequence[Value], axis: int) -> Value:
        """Add a CONCATENATION. The HAL has none of integers and booleans; they are joined as floats."""
        kind = values[0].operand.type
        if kind not in (OperandType.TENSOR_INT32, OperandType.TENSOR_BOOL8):
            return self.cast(self.operation("CONCATENATION", *values, axis))
        if kind == OperandType.TENSOR_BOOL8:
            whole = self.joined([self.numbers(value) for value in values], axis)
            return self.cast(self.operation("NOT_EQUAL", whole, np.zeros(1, np.float32)))
        high, low = zip(*(self._halves(value) for value in values), strict=True)
        return self._whole(self.joined(high, axis), self.joined(low, axis))

    def cast(self, value: Any) -> Value:
        """Narrow the result of an operation with one output to `Value`."""
        assert isinstance(value, Value)
        return value

    def reshape(self, value: Value, shape: Iterable[int]) -> Value:
        """Reshape `value`; one dimension of `shape` may be unknown (0)."""
        sizes = [d or -1 for d in shape] or [1]
        if tuple(sizes) == value.operand.dimensions:
            return value
        held = value.operand
        if held.value is not None and held.channel_quant is None and sizes.count(-1) <= 1:
            try:
                array = held.value.reshape(sizes)
                return self.builder.constant(array, dtype=held.type, scale=held.scale, zero_point=held.zero_point)
            except ValueError:
                raise ImportFailed(f"cannot reshape a constant of {list(held.dimensions)} to {sizes}") from None
        if value.operand.type == OperandType.TENSOR_INT32 and (places := _inserted(value.operand.dimensions, sizes)):
            for place in places:
                value = self.cast(self.operation("EXPAND_DIMS", value, place))
            return value
        if len(sizes) > MOST_DIMENSIONS:
            raise ImportFailed(f"it has {len(sizes)} dimensions, {sizes}; the HAL takes at most {MOST_DIMENSIONS} here")
        if sizes.count(-1) > 1:
            raise self.unsized(f"cannot reshape to {sizes}: more than one size is open")
        return self.moved(value, lambda v: self.cast(self.operation("RESHAPE", v, np.array(sizes, np.int32))))

    def moved(self, value: Value, move: Callable[[Value], Value], *, integers: bool = False) -> Value:
        """`move` the elements of a value of any type; the HAL moves most ways only floats and 8-bit integers.

        Booleans are moved as 0 and 1. 32-bit integers are moved as two halves of 16 bits, which are exact as floats.
        integers: the HAL moves those too.
        """
        kind = value.operand.type
        if kind == OperandType.TENSOR_BOOL8:
            return self.cast(self.operation("NOT_EQUAL", move(self.numbers(value)), np.zeros(1, np.float32)))
        if kind != OperandType.TENSOR_INT32 or integers:
            return move(value)
        high, low = self._halves(value)
        return self._whole(move(high), move(low))

    def _halves(self, value: Value) -> tuple[Value, Value]:
        """Return the high and the low 16 bits of integers, as floats."""
        high = self.operation("DIV", value, _HALF, 0)  # rounds towards minus infinity: the low half is never negative
        low = self.operation("SUB", value, self.operation("MUL", high, _HALF, 0), 0)
        high, low = (self.operation("CAST", half, dtype="float32") for half in (high, low))
        return self.cast(high), self.cast(low)

    def _whole(self, high: Value, low: Value) -> Value:
        """Join integers of two halves."""
        high, low = (self.cast(self.operation("CAST", half, dtype="int32")) for half in (high, low))
        return self.cast(self.operation("ADD", self.operation("MUL", high, _HALF, 0), low, 0))

    def numbers(self, value: Value, dtype: Any = np.float32) -> Value:
        """Return booleans as 1 and 0."""
        dims = value.operand.dimensions
        if not dims or 0 in dims:
            raise self.unsized(f"booleans of dimensions {list(dims)} become numbers only when all sizes are known")
        if value.operand.value is not None:
            return self.builder.constant(value.operand.value.astype(dtype))
        self.charge(8 * math.prod(dims))
        return self.cast(self.operation("SELECT", value, np.ones(dims, dtype), np.zeros(dims, dtype)))

    def unsized(self, reason: str) -> ImportFailed:
        """Return the error for an operator that needs sizes which the file leaves open; it tells how to fix them."""
        return ImportFailed(reason, remedy=remedy_of(self.shared.inputs))

    def check_known(self, entry: ValueEntry) -> None:
        """Raise `ImportFailed` for a constant that depends on a size which the file leaves open."""
        if entry.array is not None and is_open(entry.array):
            raise self.unsized(f"{entry} depends on a dimension of unknown size")

    def constant(self, entry: ValueEntry, array: Array) -> Value:
        """Add `array` as a constant with the type and quantisation of `entry`."""
        self.check_known(entry)
        if entry.type not in HAL_TYPES:
            raise ImportFailed(f"{entry}: the HAL has no tensors of this type")
        if not array.size:
            raise ImportFailed(f"{entry} is empty; the HAL has no tensors without elements")
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
                value = self.copy(value)
            taken.add(value.index)
            names[value.index] = name
            self.builder.output(value)
        names |= {value.index: name for value, name in self._inputs}
        model = self.builder.build()
        return Model(self._named(model.main, names), model.referenced, relaxed=model.relaxed)

    def copy(self, value: Value) -> Value:
        """Return the same elements as the result of an operation."""
        return self.cast(self.operation("CAST", value))

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
    """Return the positions of new dimensions of size 1 in `target`; empty when it differs otherwise.

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


def is_open(array: Array) -> bool:
    """Return True if there are unknown sizes among these values of shapes."""
    return array.dtype == np.int64 and bool(np.isin(array, (UNKNOWN, DERIVED)).any())


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
