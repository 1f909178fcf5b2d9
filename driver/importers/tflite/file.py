"""The content of a .tflite file as plain records; every index and size is checked before it is used."""
# ruff: noqa: N802 - the generated code calls the names of CheckedTable

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tflite

from driver.errors import ImportFailed
from driver.formats.file_bytes import Array, FileBytes
from driver.formats.flatbuffer import U32, FlatTable
from driver.formats.tflite_schema import IDENTIFIER, TYPE_NAMES, VERSION
from driver.importers.header import HIGHEST_RANK

from .sparse import Level, dense

# ---- flatbuffers -----------------------------------------------------------------------------------------------------
# Generated accessors ask a *table* for everything: where a field lies, how long a vector is, what a number is. The
# table of the flatbuffers package trusts the file. `CheckedTable` answers the same questions from a `FlatTable`, which
# checks every answer, so whatever an accessor returns lies inside the file.
#
#     model = guarded(generated.Model(), FileBytes(data), position)
#     for subgraph in Tables(model, "Subgraphs", "subgraph"):
#         inputs = numbers(subgraph, "Inputs")

_MOST_TABLES = 1 << 16
"""Limit for one list."""


class CheckedTable(FlatTable):
    """One table of a file, with the methods that generated accessors call."""

    __slots__ = ()
    Bytes = property(lambda self: self.data)
    Pos = property(lambda self: self.position)
    Offset, Indirect = FlatTable.offset, FlatTable.target

    def Get(self, flags: Any, position: int) -> Any:
        """Read the number of a schema type at `position`."""
        return flags.py_type(self.data.unpack(flags.packer_type, position))

    def String(self, position: int) -> bytes:
        """Read the string that the offset at `position` points to."""
        return self.vector(position, "u1").tobytes()

    def VectorLen(self, offset: int) -> int:
        """Return how many tables the vector at `offset` from the table lists."""
        return self.vector(self.position + offset, "<u4").size

    def Vector(self, offset: int) -> int:
        """Return the position of the first element of the vector at `offset` from the table."""
        return self.target(self.position + offset) + 4

    def Union(self, table: Any, offset: int) -> None:
        """Point `table` at the one at `offset` from this table."""
        table.Bytes, table.Pos = self.data, self.target(self.position + offset)

    def GetVectorAsNumpy(self, flags: Any, offset: int) -> Array:
        """Return a view of the vector of numbers at `offset` from the table."""
        return self.vector(self.position + offset, flags.packer_type.format)


def guarded(table: Any, data: FileBytes, position: int) -> Any:
    """Attach a generated `table` accessor to `position`, with every answer checked."""
    table._tab = CheckedTable(data, position)
    return table


def inner(owner: Any, field: str, *index: int) -> Any:
    """Return the table in `field` of another, or element `index` of its vector of tables; None when absent."""
    found = getattr(owner, field)(*index)
    return None if found is None else guarded(found, found._tab.Bytes, found._tab.Pos)


class Tables(Sequence[Any]):
    """The tables that a field lists, read lazily; `word` names them in error messages."""

    def __init__(self, owner: Any, field: str, word: str) -> None:
        self._owner, self._field, self._word = owner, field, word
        self._count = getattr(owner, f"{field}Length")()
        if self._count > _MOST_TABLES:
            raise ImportFailed(f"{self._count} {word}s; the limit is {_MOST_TABLES}")

    def __len__(self) -> int:
        return int(self._count)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise ImportFailed(f"{self._word} {index} does not exist; there are {self._count}")
        return inner(self._owner, self._field, index)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(self._count))


def numbers(owner: Any, field: str) -> Array:
    """Return the numbers that a field lists, as a view of the file; an empty array when absent."""
    found = getattr(owner, f"{field}AsNumpy")()
    return found if isinstance(found, np.ndarray) else np.zeros(0, np.int32)


def integers(owner: Any, field: str) -> tuple[int, ...]:
    """Return the numbers that a field lists, as Python integers."""
    return tuple(numbers(owner, field).tolist())


def text(owner: Any, field: str) -> str:
    """Return the string in a field; empty when absent."""
    return (getattr(owner, field)() or b"").decode("utf-8", "replace")


# ---- the schema ------------------------------------------------------------------------------------------------------

_MOST_OPERATORS = 1 << 14
_CUSTOM = 32
_NO_FIELDS = FileBytes(memoryview(struct.pack("<HHi", 4, 4, 4)))
"""A table (at position 4) without fields: every field has its default."""
_DTYPES = {
    name: np.dtype("u1" if name == "BOOL" else name.lower())
    for name in ("FLOAT32", "FLOAT16", "INT64", "INT32", "INT8", "UINT8", "BOOL")
}


def _names(enumeration: Any) -> dict[int, str]:
    return {value: name for name, value in vars(enumeration).items() if isinstance(value, int)}


_OPERATORS, _OPTIONS = map(_names, (tflite.BuiltinOperator, tflite.BuiltinOptions))


@dataclass(frozen=True, slots=True)
class TfliteTensor:
    """One tensor of a subgraph.

    type: name in the schema. shape: 0 where unknown; None when the rank is unknown.
    scales, zero_points, channel: quantisation; several scales when per channel, along dimension `channel`.
    data: the values of a constant, a view of the file; offset: their position, -1 where they
    were computed. is_empty: a constant without elements.
    is_variable: keeps its value between executions.
    """

    index: int
    name: str
    type: str
    shape: tuple[int, ...] | None
    scales: tuple[float, ...]
    zero_points: tuple[int, ...]
    channel: int
    data: Array | None
    offset: int
    is_empty: bool
    is_variable: bool

    def __str__(self) -> str:
        shape = "of any shape" if self.shape is None else list(self.shape)
        return f"tensor {self.index} ({self.name[:64]!r}, {self.type} {shape})"


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator: its name in the schema, and the tensors it reads (-1 where omitted) and writes."""

    index: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    table: Any

    def options(self, kind: str) -> Any:
        """Return the options as a table of class `kind`; defaults of the schema when the file has none."""
        given, union = _OPTIONS.get(self.table.BuiltinOptionsType(), "unknown"), self.table.BuiltinOptions()
        if given == "NONE" or union is None:
            return guarded(getattr(tflite, kind)(), _NO_FIELDS, 4)
        if given != kind:
            raise ImportFailed(f"it has options {given}; it takes {kind}")
        return guarded(getattr(tflite, kind)(), union.Bytes, union.Pos)


class TfliteFile:
    """The tables that all subgraphs share."""

    def __init__(self, data: memoryview) -> None:
        self.bytes = FileBytes(data)
        if bytes(data[4:8]) != IDENTIFIER:
            raise ImportFailed("not a .tflite file: bytes 4 to 7 are not TFL3")
        model = guarded(tflite.Model(), self.bytes, self.bytes.unpack(U32, 0))
        if model.Version() != VERSION:
            raise ImportFailed(f"schema version {model.Version()}; only {VERSION} is supported")
        self._codes = Tables(model, "OperatorCodes", "operator code")
        self._buffers = Tables(model, "Buffers", "buffer")
        self._subgraphs = Tables(model, "Subgraphs", "subgraph")
        self._signatures = Tables(model, "SignatureDefs", "signature")
        self._data: dict[int, tuple[Array | None, int]] = {}
        self._names: dict[int, str] = {}
        self._operators = 0

    def subgraph(self, number: int) -> "TfliteSubgraph":
        """Subgraph `number`."""
        return TfliteSubgraph(self, self._subgraphs[number])

    def names(self, number: int) -> tuple[dict[int, str], dict[int, str]]:
        """Return the names of inputs and outputs in the first signature of a subgraph, by tensor."""
        for signature in self._signatures:
            if signature.SubgraphIndex() == number:
                inputs, outputs = (
                    {entry.TensorIndex(): text(entry, "Name") for entry in Tables(signature, field, "name")}
                    for field in ("Inputs", "Outputs")
                )
                return inputs, outputs
        return {}, {}

    def operator(self, index: int, table: Any) -> Operator:
        """Return one operator of a subgraph."""
        self._operators += 1
        if self._operators > _MOST_OPERATORS:
            raise ImportFailed(f"more than {_MOST_OPERATORS} operators")
        code = table.OpcodeIndex()
        if code not in self._names:
            self._names[code] = _operator_name(self._codes[code])
        return Operator(index, self._names[code], integers(table, "Inputs"), integers(table, "Outputs"), table=table)

    def data(self, number: int) -> tuple[Array | None, int]:
        """Return the bytes of buffer `number` and their offset in the file; None for an empty buffer."""
        if number not in self._data:
            self._data[number] = self._buffer(self._buffers[number])
        return self._data[number]

    def _buffer(self, table: Any) -> tuple[Array | None, int]:
        if table.Offset() > 1:  # data behind the tables, in files of more than 2 GiB
            return self.bytes.part(table.Offset(), table.Size()), table.Offset()
        data = numbers(table, "Data")
        return (data, self.bytes.offset(data)) if data.size else (None, 0)


def _operator_name(code: Any) -> str:
    """Name of an operator code: the larger of its two fields, of which the older has one byte."""
    number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
    if number == _CUSTOM:
        return f"CUSTOM {text(code, 'CustomCode')[:64]!r}"
    return _OPERATORS.get(number, f"builtin {number}")


class TfliteSubgraph:
    """One subgraph; its tensors and operators are read on demand."""

    def __init__(self, file: TfliteFile, table: Any) -> None:
        self.file = file
        self.inputs, self.outputs = integers(table, "Inputs"), integers(table, "Outputs")
        self._tensors = Tables(table, "Tensors", "tensor")
        self._operators = Tables(table, "Operators", "operator")
        self._read: dict[int, TfliteTensor] = {}

    def operators(self) -> Iterator[Operator]:
        """Yield the operators in execution order."""
        return (self.file.operator(index, table) for index, table in enumerate(self._operators))

    def tensor(self, index: int) -> TfliteTensor:
        """Tensor `index`."""
        if index not in self._read:
            self._read[index] = self._tensor(index, self._tensors[index])
        return self._read[index]

    def resize(self, index: int, shape: tuple[int, ...]) -> None:
        """Give tensor `index` other dimensions than the file declares."""
        self._read[index] = replace(self.tensor(index), shape=shape)

    def define(self, index: int, source: TfliteTensor) -> None:
        """Make tensor `index` the same constant as `source`."""
        info = self.tensor(index)
        self._read[index] = replace(source, index=index, name=info.name)

    def name(self, index: int) -> str:
        """Return the name of tensor `index`; its number where the file has none."""
        return (text(self._tensors[index], "Name") if 0 <= index < len(self._tensors) else "") or f"tensor {index}"

    def _tensor(self, index: int, table: Any) -> TfliteTensor:
        name, kind = text(table, "Name"), _type_name(table.Type())
        where = f"tensor {index} ({name[:64]!r}, {kind})"
        if kind not in _DTYPES:
            raise ImportFailed(f"{where}: the HAL has no tensors of this type")
        data, offset = self.file.data(table.Buffer())
        shape = _shape(table, where, is_constant=data is not None)
        sparsity = inner(table, "Sparsity")
        if data is not None and sparsity is not None:
            data, offset = self._dense(data, kind, shape or (), sparsity, where=where), -1
        elif data is not None:
            data = _values(data, kind, shape, where)
        scales, zero_points, channel = _quantisation(inner(table, "Quantization"), where)
        is_empty = data is None and not table.ShapeSignatureLength() and 0 in (shape or ())
        return TfliteTensor(
            index,
            name,
            kind,
            shape,
            scales=scales,
            zero_points=zero_points,
            channel=channel,
            data=data,
            offset=offset,
            is_empty=is_empty,
            is_variable=bool(table.IsVariable()),
        )

    def _dense(self, data: Array, kind: str, shape: tuple[int, ...], sparsity: Any, where: str) -> Array:
        """Return the values of a sparse constant, with zeros between them."""
        dtype = _DTYPES[kind]
        order, metadata = integers(sparsity, "TraversalOrder"), Tables(sparsity, "DimMetadata", "level")
        if data.nbytes % dtype.itemsize or len(order) != len(metadata) or shape == ():
            raise ImportFailed(f"{where}: damaged: {data.nbytes} bytes, {len(order)} and {len(metadata)} sparse levels")
        self.file.bytes.makes.charge(dtype.itemsize * math.prod(shape))
        levels = [_level(dimension, table) for dimension, table in zip(order, metadata, strict=True)]
        return dense(levels, integers(sparsity, "BlockMap"), data.view(dtype), shape)


def _type_name(number: int) -> str:
    return TYPE_NAMES[number] if 0 <= number < len(TYPE_NAMES) else str(number)


_VECTORS = {1: tflite.Int32Vector, 2: tflite.Uint16Vector, 3: tflite.Uint8Vector}


def _level(dimension: int, table: Any) -> Level:
    """Return one level of a sparse constant; format 0 is dense."""
    if table.Format() == 0:
        return Level(dimension, table.DenseSize())
    lists = []
    for kind, union in (
        (table.ArraySegmentsType(), table.ArraySegments()),
        (table.ArrayIndicesType(), table.ArrayIndices()),
    ):
        if kind not in _VECTORS or union is None:
            raise ImportFailed("damaged: a level of a sparse tensor has no indices")
        lists.append(numbers(guarded(_VECTORS[kind](), union.Bytes, union.Pos), "Values").astype(np.int64))
    return Level(dimension, 0, *lists)


def _shape(table: Any, where: str, *, is_constant: bool) -> tuple[int, ...] | None:
    shape, signature = integers(table, "Shape"), integers(table, "ShapeSignature")
    if signature and not is_constant:
        shape = tuple(0 if d == -1 else d for d in signature)
    if len(shape) > HIGHEST_RANK or any(d < 0 for d in shape):
        raise ImportFailed(f"{where}: dimensions {list(shape)[:HIGHEST_RANK]} are invalid")
    is_scalar = is_constant or table.HasRank() or table.Type() == tflite.TensorType.BOOL
    return shape if shape or is_scalar else None


def _values(data: Array, kind: str, shape: tuple[int, ...] | None, where: str) -> Array:
    dtype = _DTYPES[kind]
    if data.nbytes != math.prod(shape or ()) * dtype.itemsize:
        raise ImportFailed(f"{where}: {data.nbytes} bytes do not fit dimensions {list(shape or ())}")
    return data.view(dtype).reshape(shape or ())


def _quantisation(table: Any, where: str) -> tuple[tuple[float, ...], tuple[int, ...], int]:
    if table is None:
        return (), (), 0
    if table.DetailsType():
        raise ImportFailed(f"{where}: custom quantisation is not supported")
    scales, zero_points = (tuple(numbers(table, field).tolist()) for field in ("Scale", "ZeroPoint"))
    return scales, zero_points, table.QuantizedDimension()
