"""The content of an .onnx file as plain records; every length and size is checked before it is used.

Weights may lie in other files, which the loader has opened.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from driver.errors import ImportFailed
from driver.formats.file_bytes import Array
from driver.formats.onnx_schema import DTYPES as NUMPY_NAMES
from driver.formats.onnx_schema import ELEMENTS, FIELDS, TYPE_NAMES
from driver.formats.protobuf import ProtoBytes, ProtoMessage
from driver.importers.header import HIGHEST_RANK, ExternalRange
from driver.importers.obstacle import InputSizes

_MODEL, _SET, _GRAPH, _NODE, _ATTRIBUTE, _INFO, _TYPE, _TENSOR_TYPE, _SHAPE, _DIM, _ENTRY, _TENSOR = [*FIELDS.values()][
    :12
]
TYPES = {number: TYPE_NAMES[number] for number, word in NUMPY_NAMES.items() if word != "bfloat16"}
DTYPES = {**ELEMENTS, "BOOL": np.dtype("u1")}
"""Elements as files store them."""
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
        """Return True if the file has the attribute."""
        return name in self._attributes

    def integer(self, name: str, default: int = 0) -> int:
        """Return an attribute as an integer."""
        return self._attributes[name].integer(_ATTRIBUTE["i"]) if name in self._attributes else default

    def real(self, name: str, default: float = 0.0) -> float:
        """Return an attribute as a float."""
        return self._attributes[name].real(_ATTRIBUTE["f"]) if name in self._attributes else default

    def text(self, name: str, default: str = "") -> str:
        """Return an attribute as a string."""
        return self._attributes[name].text(_ATTRIBUTE["s"])[:_NAME] if name in self._attributes else default

    def texts(self, name: str) -> list[str]:
        """Return an attribute as a list of strings."""
        return self._attributes[name].texts(_ATTRIBUTE["strings"]) if name in self._attributes else []

    def integers(self, name: str) -> list[int] | None:
        """Return an attribute as a list of integers; None when absent."""
        if name not in self._attributes:
            return None
        return [int(value) for value in self._attributes[name].integers(_ATTRIBUTE["ints"])]

    def reals(self, name: str) -> list[float]:
        """Return an attribute as a list of floats."""
        return self._attributes[name].reals(_ATTRIBUTE["floats"]).tolist() if name in self._attributes else []

    def body(self, name: str) -> "OnnxBody | None":
        """Return an attribute as a graph."""
        if name not in self._bodies and name in self._attributes:
            message = self._attributes[name].message(_ATTRIBUTE["g"])
            self._bodies[name] = None if message is None else OnnxBody(self._file, message)
        return self._bodies.get(name)

    def bodies(self) -> "Iterator[OnnxBody]":
        """Return the branches of an If; none of any other operator."""
        names = ("then_branch", "else_branch") if self.kind == "If" else ()
        return (body for name in names if (body := self.body(name)) is not None)

    def tensor(self, name: str) -> OnnxTensor | None:
        """Return an attribute as a constant."""
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
        """Return a graph without operators."""
        return OnnxBody(self.file, ProtoMessage(self.file.bytes, 0, 0))

    def inputs(self) -> list[Declared]:
        """Return the inputs, some of which may have an initializer."""
        return [_declared(message) for message in self._message.messages(_GRAPH["input"])]

    def outputs(self) -> list[str]:
        """Return the names of the outputs."""
        return [message.text(_INFO["name"]) for message in self._message.messages(_GRAPH["output"])]

    @functools.cached_property
    def declared(self) -> dict[str, Declared]:
        """The file's statements about outputs and the values in between; left out where it says nothing of use."""
        found = {}
        for field in ("value_info", "output"):
            for message in self._message.messages(_GRAPH[field]):
                with contextlib.suppress(ImportFailed):
                    info = _declared(message)
                    found[info.name] = info
        return found

    def initializers(self) -> Iterator[OnnxTensor]:
        """Yield the constants of the graph."""
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
        """Return one constant; its values are a view of the file where they are stored raw."""
        name = message.text(_TENSOR["name"])
        kind = _type(message.integer(_TENSOR["data_type"]), f"tensor {name[:_NAME]!r}")
        shape = tuple(int(d) for d in message.integers(_TENSOR["dims"]))
        if len(shape) > HIGHEST_RANK or any(d < 0 for d in shape):
            raise ImportFailed(f"tensor {name[:_NAME]!r}: dimensions {list(shape)[:HIGHEST_RANK]} are invalid")
        data, offset = self._values(message, kind)
        dtype = DTYPES[kind]
        if data.nbytes != math.prod(shape) * dtype.itemsize:
            size = data.nbytes
            raise ImportFailed(f"tensor {name[:_NAME]!r}: {size} bytes for dimensions {list(shape)} of {kind}")
        return OnnxTensor(name, kind, data.view(dtype).reshape(shape), offset)

    def _values(self, message: ProtoMessage, kind: str) -> tuple[Array, int | None]:
        """Return the bytes of a constant and their offset in the file, if they are stored raw."""
        if message.integer(_TENSOR["data_location"]) == 1:
            return self._part_beside(external_range(message)), None
        if spans := message.spans(_TENSOR["raw_data"]):
            start, end = spans[-1]
            self.bytes.reads.charge(end - start)
            return self.bytes.part(start, end - start), start
        return self._numbers(message, kind).view(np.uint8), None

    def _part_beside(self, place: ExternalRange) -> Array:
        """Return the values of a constant that lie in another file."""
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
    return TYPE_NAMES[number] if 0 <= number < len(TYPE_NAMES) else f"ONNX's type {number}"


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
    """Return the sizes of a `TypeProto.Tensor`. Exporters write an open size without a name as -1, "?" or "None",
    too.
    """
    shape = tensor.message(_TENSOR_TYPE["shape"])
    if shape is None:
        return InputSizes(None)
    dims: list[Any] = [(d.integer(_DIM["dim_value"]), d.text(_DIM["dim_param"])) for d in shape.messages(_SHAPE["dim"])]
    if len(dims) > HIGHEST_RANK or any(size >= 2**31 for size, _ in dims):
        raise ImportFailed(f"{where}: dimensions {[size for size, _ in dims][:HIGHEST_RANK]} are invalid")
    symbols = tuple("" if size > 0 or symbol in _UNNAMED else symbol for size, symbol in dims)
    return InputSizes(tuple(max(size, 0) for size, _ in dims), symbols)


def external_range(tensor: ProtoMessage) -> ExternalRange:
    """Return where the values of a tensor lie that is outside of the model."""
    entries = {entry.text(_ENTRY["key"]): entry for entry in tensor.messages(_TENSOR["external_data"])}
    words = {key: entry.text(_ENTRY["value"]) for key, entry in entries.items()}
    name = tensor.text(_TENSOR["name"])
    length = _number(words["length"], name) if "length" in words else _needed(tensor)
    said = entries["offset"].spans(_ENTRY["value"])[-1] if words.get("offset") else None
    return ExternalRange(name, words.get("location", ""), _number(words.get("offset", "0"), name), length, said=said)


def _needed(tensor: ProtoMessage) -> int | None:
    """Return the bytes of a tensor's values; None for a type that is not read here."""
    kind, sizes = TYPES.get(tensor.integer(_TENSOR["data_type"])), tensor.integers(_TENSOR["dims"]).tolist()
    return None if kind is None or min(sizes, default=0) < 0 else math.prod(sizes) * DTYPES[kind].itemsize


def _number(text: str, tensor: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ImportFailed(f"damaged: tensor {tensor[:_NAME]!r}: {text[:32]!r} is not an offset or length")
    return int(text)
