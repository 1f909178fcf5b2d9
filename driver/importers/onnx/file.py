"""The content of an .onnx file as plain records; every length and size is checked before it is used.

Weights may lie in other files, which the loader has opened.
"""

import contextlib
import functools
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from driver.errors import ImportFailed
from driver.importers.file_bytes import Array, FileBytes
from driver.importers.header import HIGHEST_RANK, ExternalRange
from driver.importers.obstacle import InputSizes

# ---- protocol buffers ------------------------------------------------------------------------------------------------
# Untrusted protocol buffers are read without unpacking them. The wire format is a sequence of fields: a number and a
# type, then an integer, four or eight bytes, or a counted run of bytes. A `ProtoMessage` is one such sequence, scanned
# once. The content of a field is read on demand, so weights stay where they are. Every length is checked against the
# message around it. The number of fields is limited, because a field of two bytes in the file can take a hundred in
# memory.
#
#     graph = ProtoMessage(ProtoBytes(data), 0, len(data)).message(7)
#     for node in graph.messages(1):
#         inputs = node.texts(1)

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_LONGEST_VARINT = 10
_MOST_FIELDS = 1 << 19
_F32 = struct.Struct("<f")
Span = tuple[int, int]


class ProtoBytes(FileBytes):
    """The bytes of the file, and a budget of fields."""

    def __init__(self, data: memoryview) -> None:
        super().__init__(data)
        self._fields = _MOST_FIELDS

    def count(self) -> None:
        """Charge one field to the budget."""
        self._fields -= 1
        if self._fields < 0:
            raise ImportFailed(f"damaged, or too large: it has more than {_MOST_FIELDS} fields")

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """Read the unsigned integer at `at`; returns it and the position behind it."""
        value = 0
        for shift in range(min(end - at, _LONGEST_VARINT)):
            byte = self.data[at + shift]
            value |= (byte & 0x7F) << 7 * shift
            if byte < 0x80:
                return value & (2**64 - 1), at + shift + 1
        raise ImportFailed(f"damaged: the integer at {at} has no end")


class ProtoMessage:
    """One message: the bytes from `start` to `end`."""

    __slots__ = ("_fields", "wire")

    def __init__(self, wire: ProtoBytes, start: int = 0, end: int | None = None) -> None:
        self.wire = wire
        self._fields: dict[int, list[tuple[int, Any]]] = {}
        at, end = start, len(wire.data) if end is None else end
        while at < end:
            wire.count()
            tag, at = wire.varint(at, end)
            value, at = self._value(tag & 7, at, end)
            self._fields.setdefault(tag >> 3, []).append((tag & 7, value))

    def _value(self, kind: int, at: int, end: int) -> tuple[Any, int]:
        if kind == _VARINT:
            return self.wire.varint(at, end)
        if kind == _BYTES:
            length, at = self.wire.varint(at, end)
        elif kind in (_FOUR, _EIGHT):
            length = 4 if kind == _FOUR else 8
        else:
            raise ImportFailed(f"damaged: field of unknown type {kind} at {at}")
        if at + length > end:
            raise ImportFailed(f"damaged: {length} bytes at {at} lie outside of their message")
        return (at, at + length), at + length

    def _of(self, number: int, *kinds: int) -> Iterator[tuple[int, Any]]:
        for kind, value in self._fields.get(number, ()):
            if kind not in kinds:
                raise ImportFailed(f"damaged: field {number} has type {kind}")
            yield kind, value

    def has(self, number: int) -> bool:
        """Whether the message has field `number`."""
        return number in self._fields

    def spans(self, number: int) -> list[Span]:
        """Start and end of the bytes of each field `number`."""
        return [value for _, value in self._of(number, _BYTES)]

    def texts(self, number: int) -> list[str]:
        """Each field `number` as a string."""
        return [self._text(span) for span in self.spans(number)]

    def text(self, number: int) -> str:
        """The last field `number` as a string; empty when absent."""
        spans = self.spans(number)
        return self._text(spans[-1]) if spans else ""

    def _text(self, span: Span) -> str:
        self.wire.reads.charge(span[1] - span[0])
        return bytes(self.wire.data[slice(*span)]).decode("utf-8", "replace")

    def messages(self, number: int) -> Iterator["ProtoMessage"]:
        """Each field `number` as a message."""
        return (ProtoMessage(self.wire, *span) for span in self.spans(number))

    def message(self, number: int) -> "ProtoMessage | None":
        """The last field `number` as a message; None when absent."""
        spans = self.spans(number)
        return ProtoMessage(self.wire, *spans[-1]) if spans else None

    def integer(self, number: int, default: int = 0) -> int:
        """The last field `number` as a signed integer."""
        values = [value for _, value in self._of(number, _VARINT)]
        return _signed(values[-1]) if values else default

    def real(self, number: int) -> float:
        """The last field `number` as a float32."""
        spans = [value for _, value in self._of(number, _FOUR)]
        return float(_F32.unpack(self.wire.data[slice(*spans[-1])])[0]) if spans else 0.0

    def integers(self, number: int) -> Array:
        """All fields `number` as integers, whether single or packed."""
        parts: list[Array] = []
        for kind, value in self._of(number, _VARINT, _BYTES):
            parts.append(np.array([_signed(value)], np.int64) if kind == _VARINT else self._packed(value))
        return np.concatenate(parts) if len(parts) > 1 else (parts or [np.zeros(0, np.int64)])[0]

    def reals(self, number: int, dtype: str = "<f4") -> Array:
        """All fields `number` as floats of 32 or 64 bits."""
        kind, size = (_FOUR if dtype == "<f4" else _EIGHT), np.dtype(dtype).itemsize
        parts = []
        for _, (start, end) in self._of(number, kind, _BYTES):
            if (end - start) % size:
                raise ImportFailed(f"damaged: {end - start} bytes at {start} do not hold whole numbers of {size} bytes")
            parts.append(self.wire.part(start, end - start).view(dtype))
        return np.concatenate(parts) if len(parts) > 1 else (parts or [np.zeros(0, dtype)])[0]

    def _packed(self, span: Span) -> Array:
        """Decode a run of packed varints (one to ten bytes each), vectorised."""
        data = self.wire.part(span[0], span[1] - span[0])
        self.wire.makes.charge(data.size)
        stops = np.flatnonzero(data < 0x80) + 1
        if (stops[-1] if stops.size else 0) != data.size:
            raise ImportFailed(f"damaged: the last integer at {span[0]} has no end")
        starts = np.concatenate(([0], stops[:-1])) if stops.size else stops
        lengths, values = stops - starts, np.zeros(stops.size, np.uint64)
        if lengths.size and lengths.max() > _LONGEST_VARINT:
            raise ImportFailed(f"damaged: an integer at {span[0]} has no end")
        for place in range(int(lengths.max(initial=0))):
            reaching = np.flatnonzero(lengths > place)
            values[reaching] |= (data[starts[reaching] + place] & np.uint64(0x7F)) << np.uint64(7 * place)
        return values.view(np.int64)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


# ---- the schema ------------------------------------------------------------------------------------------------------

FIELDS: dict[str, dict[str, int]] = {
    "ModelProto": {"ir_version": 1, "graph": 7, "opset_import": 8, "metadata_props": 14, "functions": 25},
    "OperatorSetIdProto": {"domain": 1, "version": 2},
    "GraphProto": {"node": 1, "initializer": 5, "input": 11, "output": 12, "value_info": 13, "sparse_initializer": 15},
    "NodeProto": {"input": 1, "output": 2, "op_type": 4, "attribute": 5, "domain": 7},
    "AttributeProto": {
        "name": 1,
        "f": 2,
        "i": 3,
        "s": 4,
        "t": 5,
        "g": 6,
        "floats": 7,
        "ints": 8,
        "strings": 9,
        "tensors": 10,
        "graphs": 11,
        "sparse_tensor": 22,
        "sparse_tensors": 23,
    },
    "ValueInfoProto": {"name": 1, "type": 2},
    "TypeProto": {
        "tensor_type": 1,
        "sequence_type": 4,
        "map_type": 5,
        "opaque_type": 7,
        "sparse_tensor_type": 8,
        "optional_type": 9,
    },
    "TypeProto.Tensor": {"elem_type": 1, "shape": 2},
    "TensorShapeProto": {"dim": 1},
    "TensorShapeProto.Dimension": {"dim_value": 1, "dim_param": 2},
    "StringStringEntryProto": {"key": 1, "value": 2},
    "TensorProto": {
        "dims": 1,
        "data_type": 2,
        "float_data": 4,
        "int32_data": 5,
        "int64_data": 7,
        "name": 8,
        "raw_data": 9,
        "double_data": 10,
        "uint64_data": 11,
        "external_data": 13,
        "data_location": 14,
    },
    "SparseTensorProto": {"values": 1, "indices": 2},
    "FunctionProto": {"node": 7},
    "TypeProto.Sequence": {"elem_type": 1},
    "TypeProto.Map": {"key_type": 1, "value_type": 2},
    "TypeProto.Optional": {"elem_type": 1},
}
"""Field numbers of the schema, for the fields that the importer reads."""
_MODEL, _SET, _GRAPH, _NODE, _ATTRIBUTE, _INFO, _TYPE, _TENSOR_TYPE, _SHAPE, _DIM, _ENTRY, _TENSOR = [*FIELDS.values()][
    :12
]
_ALL_TYPES = [
    "UNDEFINED",
    "FLOAT",
    "UINT8",
    "INT8",
    "UINT16",
    "INT16",
    "INT32",
    "INT64",
    "STRING",
    "BOOL",
    "FLOAT16",
    "DOUBLE",
    "UINT32",
    "UINT64",
    "COMPLEX64",
    "COMPLEX128",
    "BFLOAT16",
    "FLOAT8E4M3FN",
    "FLOAT8E4M3FNUZ",
    "FLOAT8E5M2",
    "FLOAT8E5M2FNUZ",
    "UINT4",
    "INT4",
    "FLOAT4E2M1",
    "FLOAT8E8M0",
    "UINT2",
    "INT2",
    "FLOAT6E2M3",
    "FLOAT6E3M2",
]
"""Names of all element types of ONNX, by their numbers."""
TYPES = {
    1: "FLOAT",
    2: "UINT8",
    3: "INT8",
    4: "UINT16",
    5: "INT16",
    6: "INT32",
    7: "INT64",
    9: "BOOL",
    10: "FLOAT16",
    11: "DOUBLE",
    12: "UINT32",
    13: "UINT64",
}
DTYPES = {
    "FLOAT": "<f4",
    "UINT8": "u1",
    "INT8": "i1",
    "UINT16": "<u2",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "BOOL": "u1",
    "FLOAT16": "<f2",
    "DOUBLE": "<f8",
    "UINT32": "<u4",
    "UINT64": "<u8",
}
_MOST_NODES = 1 << 14
_UNNAMED = frozenset(("?", "-1", "None"))
_NAME = 64
"""Characters of a name that an error message shows."""


@dataclass(frozen=True, slots=True)
class OnnxTensor:
    """A constant. offset: of its values in the file; None when they are elsewhere or encoded."""

    name: str
    type: str
    data: Array
    offset: int | None


@dataclass(frozen=True, slots=True)
class Declared:
    """An input, an output, or a value in between."""

    name: str
    type: str
    sizes: InputSizes


class OnnxNode:
    """One operator, its attributes by name."""

    __slots__ = ("_attributes", "_bodies", "_file", "domain", "index", "inputs", "kind", "outputs")

    def __init__(self, file: "OnnxFile", index: int, message: ProtoMessage) -> None:
        self._file, self.index = file, index
        self._bodies: dict[str, OnnxBody | None] = {}
        self.inputs, self.outputs = message.texts(_NODE["input"]), message.texts(_NODE["output"])
        self.kind, self.domain = message.text(_NODE["op_type"])[:_NAME], message.text(_NODE["domain"])[:_NAME]
        attributes = message.messages(_NODE["attribute"])
        self._attributes = {attribute.text(_ATTRIBUTE["name"]): attribute for attribute in attributes}

    @property
    def name(self) -> str:
        """The operator type, with its domain unless that is ONNX's own."""
        return self.kind if self.domain in ("", "ai.onnx") else f"{self.domain}.{self.kind}"

    def has(self, name: str) -> bool:
        """Whether the file has the attribute."""
        return name in self._attributes

    def integer(self, name: str, default: int = 0) -> int:
        """An attribute as an integer."""
        return self._attributes[name].integer(_ATTRIBUTE["i"]) if name in self._attributes else default

    def real(self, name: str, default: float = 0.0) -> float:
        """An attribute as a float."""
        return self._attributes[name].real(_ATTRIBUTE["f"]) if name in self._attributes else default

    def text(self, name: str, default: str = "") -> str:
        """An attribute as a string."""
        return self._attributes[name].text(_ATTRIBUTE["s"])[:_NAME] if name in self._attributes else default

    def texts(self, name: str) -> list[str]:
        """An attribute as a list of strings."""
        return self._attributes[name].texts(_ATTRIBUTE["strings"]) if name in self._attributes else []

    def integers(self, name: str) -> list[int] | None:
        """An attribute as a list of integers; None when absent."""
        if name not in self._attributes:
            return None
        return [int(value) for value in self._attributes[name].integers(_ATTRIBUTE["ints"])]

    def reals(self, name: str) -> list[float]:
        """An attribute as a list of floats."""
        return self._attributes[name].reals(_ATTRIBUTE["floats"]).tolist() if name in self._attributes else []

    def body(self, name: str) -> "OnnxBody | None":
        """An attribute as a graph."""
        if name not in self._bodies and name in self._attributes:
            message = self._attributes[name].message(_ATTRIBUTE["g"])
            self._bodies[name] = None if message is None else OnnxBody(self._file, message)
        return self._bodies.get(name)

    def bodies(self) -> "Iterator[OnnxBody]":
        """The branches of an If; none of any other operator."""
        names = ("then_branch", "else_branch") if self.kind == "If" else ()
        return (body for name in names if (body := self.body(name)) is not None)

    def tensor(self, name: str) -> OnnxTensor | None:
        """An attribute as a constant."""
        message = self._attributes[name].message(_ATTRIBUTE["t"]) if name in self._attributes else None
        return None if message is None else self._file.tensor(message)


class OnnxBody:
    """A graph of the file: the main one, or a branch of an If."""

    def __init__(self, file: "OnnxFile", message: ProtoMessage) -> None:
        if message.has(_GRAPH["sparse_initializer"]):
            raise ImportFailed("its weights are sparse; convert the model without sparsity")
        self.file, self._message = file, message

    @functools.cached_property
    def nodes(self) -> list[OnnxNode]:
        """The operators in execution order."""
        spans = self._message.spans(_GRAPH["node"])
        self.file.count_nodes(len(spans))
        return [OnnxNode(self.file, i, ProtoMessage(self.file.bytes, *span)) for i, span in enumerate(spans)]

    def empty(self) -> "OnnxBody":
        """A graph without operators."""
        return OnnxBody(self.file, ProtoMessage(self.file.bytes, 0, 0))

    def inputs(self) -> list[Declared]:
        """The inputs, some of which may have an initializer."""
        return [_declared(message) for message in self._message.messages(_GRAPH["input"])]

    def outputs(self) -> list[str]:
        """The names of the outputs."""
        return [message.text(_INFO["name"]) for message in self._message.messages(_GRAPH["output"])]

    @functools.cached_property
    def declared(self) -> dict[str, Declared]:
        """What the file says about outputs and the values in between; left out where it says nothing of use."""
        found = {}
        for field in ("value_info", "output"):
            for message in self._message.messages(_GRAPH[field]):
                with contextlib.suppress(ImportFailed):
                    info = _declared(message)
                    found[info.name] = info
        return found

    def initializers(self) -> Iterator[OnnxTensor]:
        """The constants of the graph."""
        return map(self.file.tensor, self._message.messages(_GRAPH["initializer"]))


class OnnxFile:
    """The model: its main graph, and the opset that it uses."""

    def __init__(self, data: memoryview, external: Mapping[str, Array]) -> None:
        self.bytes = ProtoBytes(data)
        for beside in external.values():
            self.bytes.makes.extend(8 * beside.size)
        self._external = external
        self._nodes = 0
        model = ProtoMessage(self.bytes)
        graph = model.message(_MODEL["graph"])
        if graph is None:
            raise ImportFailed("not an .onnx file, or damaged: it has no graph")
        sets = {s.text(_SET["domain"]): s.integer(_SET["version"]) for s in model.messages(_MODEL["opset_import"])}
        self.opset, self.ir_version = sets.get("", sets.get("ai.onnx", 1)), model.integer(_MODEL["ir_version"])
        self.main = OnnxBody(self, graph)

    def count_nodes(self, count: int) -> None:
        """Charge operators to the limit for the file."""
        self._nodes += count
        if self._nodes > _MOST_NODES:
            raise ImportFailed(f"more than {_MOST_NODES} operators")

    def tensor(self, message: ProtoMessage) -> OnnxTensor:
        """One constant; its values are a view of the file where they are stored raw."""
        name = message.text(_TENSOR["name"])
        kind = _type(message.integer(_TENSOR["data_type"]), f"tensor {name[:_NAME]!r}")
        shape = tuple(int(d) for d in message.integers(_TENSOR["dims"]))
        if len(shape) > HIGHEST_RANK or any(d < 0 for d in shape):
            raise ImportFailed(f"tensor {name[:_NAME]!r}: dimensions {list(shape)[:HIGHEST_RANK]} are invalid")
        data, offset = self._values(message, kind)
        dtype = np.dtype(DTYPES[kind])
        if data.nbytes != math.prod(shape) * dtype.itemsize:
            size = data.nbytes
            raise ImportFailed(f"tensor {name[:_NAME]!r}: {size} bytes for dimensions {list(shape)} of {kind}")
        return OnnxTensor(name, kind, data.view(dtype).reshape(shape), offset)

    def _values(self, message: ProtoMessage, kind: str) -> tuple[Array, int | None]:
        """The bytes of a constant and their offset in the file, if they are stored raw."""
        if message.integer(_TENSOR["data_location"]) == 1:
            return self._part_beside(external_range(message)), None
        if spans := message.spans(_TENSOR["raw_data"]):
            start, end = spans[-1]
            self.bytes.reads.charge(end - start)
            return self.bytes.part(start, end - start), start
        return self._numbers(message, kind).view(np.uint8), None

    def _part_beside(self, place: ExternalRange) -> Array:
        """The values of a constant that lie in another file."""
        if place.name not in self._external:
            raise ImportFailed(f"its weights lie in {place.name[:_NAME]!r}, which was not loaded with it")
        data = self._external[place.name]
        return data[slice(*place.check(data.size))]

    def _numbers(self, message: ProtoMessage, kind: str) -> Array:
        if kind == "FLOAT":
            return message.reals(_TENSOR["float_data"])
        if kind == "DOUBLE":
            return message.reals(_TENSOR["double_data"], "<f8")
        field = {"INT64": "int64_data", "UINT32": "uint64_data", "UINT64": "uint64_data"}.get(kind, "int32_data")
        values: Array = message.integers(_TENSOR[field])
        if kind == "FLOAT16":  # the bits of each, as an integer
            return values.astype("<u2")
        return values.astype(DTYPES[kind])


def type_name(number: int) -> str:
    """ONNX's name of an element type."""
    return _ALL_TYPES[number] if 0 <= number < len(_ALL_TYPES) else f"ONNX's type {number}"


def _type(number: int, where: str) -> str:
    if number not in TYPES:
        raise ImportFailed(f"{where}: tensors of {type_name(number)} have no counterpart in the HAL")
    return TYPES[number]


def _declared(message: ProtoMessage) -> Declared:
    name, kind = message.text(_INFO["name"]), message.message(_INFO["type"])
    tensor = kind.message(_TYPE["tensor_type"]) if kind else None
    if tensor is None:
        raise ImportFailed(f"input {name[:_NAME]!r} is not a tensor")
    word = _type(tensor.integer(_TENSOR_TYPE["elem_type"]), f"input {name[:_NAME]!r}")
    return Declared(name, word, declared_sizes(tensor, f"input {name[:_NAME]!r}"))


def declared_sizes(tensor: ProtoMessage, where: str) -> InputSizes:
    """The sizes of a `TypeProto.Tensor`. Exporters write an open size without a name as -1, "?" or "None", too."""
    shape = tensor.message(_TENSOR_TYPE["shape"])
    if shape is None:
        return InputSizes(None)
    dims: list[Any] = [(d.integer(_DIM["dim_value"]), d.text(_DIM["dim_param"])) for d in shape.messages(_SHAPE["dim"])]
    if len(dims) > HIGHEST_RANK or any(size >= 2**31 for size, _ in dims):
        raise ImportFailed(f"{where}: dimensions {[size for size, _ in dims][:HIGHEST_RANK]} are invalid")
    symbols = tuple("" if size > 0 or symbol in _UNNAMED else symbol for size, symbol in dims)
    return InputSizes(tuple(max(size, 0) for size, _ in dims), symbols)


def external_range(tensor: ProtoMessage) -> ExternalRange:
    """Where the values of a tensor lie that is outside of the model."""
    entries = {entry.text(_ENTRY["key"]): entry for entry in tensor.messages(_TENSOR["external_data"])}
    words = {key: entry.text(_ENTRY["value"]) for key, entry in entries.items()}
    name = tensor.text(_TENSOR["name"])
    length = _number(words["length"], name) if "length" in words else _needed(tensor)
    said = entries["offset"].spans(_ENTRY["value"])[-1] if words.get("offset") else None
    return ExternalRange(name, words.get("location", ""), _number(words.get("offset", "0"), name), length, said)


def _needed(tensor: ProtoMessage) -> int | None:
    """The bytes of a tensor's values; None for a type that is not read here."""
    kind, sizes = TYPES.get(tensor.integer(_TENSOR["data_type"])), tensor.integers(_TENSOR["dims"]).tolist()
    return None if kind is None or min(sizes, default=0) < 0 else math.prod(sizes) * np.dtype(DTYPES[kind]).itemsize


def _number(text: str, tensor: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ImportFailed(f"damaged: tensor {tensor[:_NAME]!r}: {text[:32]!r} is not an offset or length")
    return int(text)
