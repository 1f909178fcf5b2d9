"""The content of a .tflite file as plain records; every index and size is checked before it is used."""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tflite

from driver.errors import ImportFailed
from driver.importers.file_bytes import Array, FileBytes

from .flatbuffer import Tables, guarded, inner, integers, numbers, text

_IDENTIFIER = b"TFL3"
_ROOT = struct.Struct("<I")
_MOST_OPERATORS = 1 << 14
_HIGHEST_RANK = 32
_CUSTOM = 32
_NO_FIELDS = FileBytes(memoryview(struct.pack("<HHi", 4, 4, 4)))
"""A table (at position 4) without fields: every field has its default."""
_DTYPES = {
    "FLOAT32": "<f4",
    "FLOAT16": "<f2",
    "INT64": "<i8",
    "INT32": "<i4",
    "INT8": "i1",
    "UINT8": "u1",
    "BOOL": "u1",
}


def _names(enumeration: Any) -> dict[int, str]:
    return {value: name for name, value in vars(enumeration).items() if isinstance(value, int)}


_OPERATORS, _OPTIONS, _TYPES = map(_names, (tflite.BuiltinOperator, tflite.BuiltinOptions, tflite.TensorType))


@dataclass(frozen=True, slots=True)
class TfliteTensor:
    """One tensor of a subgraph.

    type: name in the schema. shape: 0 where unknown; None when the rank is unknown.
    scales, zero_points, channel: quantisation; several scales when per channel, along dimension `channel`.
    data: the values of a constant, a view of the file; offset: their position. is_empty: a constant without elements.
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
        return f"tensor {self.index} ({self.name[:64]!r}, {self.type})"


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator: its name in the schema, and the tensors it reads (-1 where omitted) and writes."""

    index: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    table: Any

    def options(self, kind: str) -> Any:
        """The options as a table of class `kind`; defaults of the schema when the file has none."""
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
        if bytes(data[4:8]) != _IDENTIFIER:
            raise ImportFailed("not a .tflite file: bytes 4 to 7 are not TFL3")
        model = guarded(tflite.Model(), self.bytes, self.bytes.unpack(_ROOT, 0))
        if model.Version() != 3:
            raise ImportFailed(f"schema version {model.Version()}; only 3 is supported")
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
        """Names of inputs and outputs in the first signature of a subgraph, by tensor."""
        for signature in self._signatures:
            if signature.SubgraphIndex() == number:
                inputs, outputs = (
                    {entry.TensorIndex(): text(entry, "Name") for entry in Tables(signature, field, "name")}
                    for field in ("Inputs", "Outputs")
                )
                return inputs, outputs
        return {}, {}

    def operator(self, index: int, table: Any) -> Operator:
        """One operator of a subgraph."""
        self._operators += 1
        if self._operators > _MOST_OPERATORS:
            raise ImportFailed(f"more than {_MOST_OPERATORS} operators")
        code = table.OpcodeIndex()
        if code not in self._names:
            self._names[code] = _operator_name(self._codes[code])
        return Operator(index, self._names[code], integers(table, "Inputs"), integers(table, "Outputs"), table)

    def data(self, number: int) -> tuple[Array | None, int]:
        """The bytes of buffer `number` and their offset in the file; None for an empty buffer."""
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
        """The operators in execution order."""
        return (self.file.operator(index, table) for index, table in enumerate(self._operators))

    def tensor(self, index: int) -> TfliteTensor:
        """Tensor `index`."""
        if index not in self._read:
            self._read[index] = self._tensor(index, self._tensors[index])
        return self._read[index]

    def _tensor(self, index: int, table: Any) -> TfliteTensor:
        name, kind = text(table, "Name"), _TYPES.get(table.Type(), str(table.Type()))
        where = f"tensor {index} ({name[:64]!r}, {kind})"
        if kind not in _DTYPES:
            raise ImportFailed(f"{where}: the HAL has no tensors of this type")
        if inner(table, "Sparsity") is not None:
            raise ImportFailed(f"{where}: its values are sparse; convert the model without sparsity")
        data, offset = self.file.data(table.Buffer())
        shape = _shape(table, where, is_constant=data is not None)
        if data is not None:
            data = _values(data, kind, shape, where)
        quantisation = _quantisation(inner(table, "Quantization"), where)
        is_empty = data is None and not table.ShapeSignatureLength() and 0 in (shape or ())
        return TfliteTensor(index, name, kind, shape, *quantisation, data, offset, is_empty, bool(table.IsVariable()))


def _shape(table: Any, where: str, *, is_constant: bool) -> tuple[int, ...] | None:
    shape, signature = integers(table, "Shape"), integers(table, "ShapeSignature")
    if signature and not is_constant:
        shape = tuple(0 if d == -1 else d for d in signature)
    if len(shape) > _HIGHEST_RANK or any(d < 0 for d in shape):
        raise ImportFailed(f"{where}: dimensions {list(shape)[:_HIGHEST_RANK]} are invalid")
    is_scalar = is_constant or table.HasRank() or table.Type() == tflite.TensorType.BOOL
    return shape if shape or is_scalar else None


def _values(data: Array, kind: str, shape: tuple[int, ...] | None, where: str) -> Array:
    dtype = np.dtype(_DTYPES[kind])
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
