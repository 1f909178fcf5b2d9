"""Takes an .onnx file apart: its weights stay where they lie in memory, and ONNX Runtime gets their addresses.

ONNX Runtime copies weights four times when it reads them out of a file. What it reads instead is the same message, in
which the large weights of the main graph are said to lie elsewhere.

The file comes from a client, in sealed memory. ONNX Runtime would open any path that the file names; so every file that
it names has to be one of those that were sent along.
"""

from __future__ import annotations

import math
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driver.devices.lowering.model import aligned
from driver.devices.lowering.placing import at_once
from driver.devices.onnxruntime.writer import SMALL, TYPES, ProtobufMessage, lying_elsewhere
from driver.nn import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    Weights = list[tuple[str, NDArray[Any]]]

_GRAPH, _FUNCTION = 7, 25  # fields of a model
_NODE, _INITIALIZER, _INPUT = 1, 5, 11  # of a graph
_OPERATOR = 4  # of a node
_DIMENSIONS, _TYPE, _NAME, _DATA, _EXTERNAL, _PLACE = 1, 2, 8, 9, 13, 14  # of a tensor
_CONVOLUTIONS = frozenset({b"Conv", b"ConvInteger", b"ConvTranspose", b"QLinearConv"})
_WITH_BODIES = frozenset({b"If", b"Loop", b"Scan", b"SequenceMap"})
_LOOP = re.compile(rb"\x22\x04Loop")  # the field that says which operator a node is
_WEIGHT, _POSITIONS = 4, 100
_KEY = b"location"

_PARTS = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {_EXTERNAL: "elsewhere"},
}
"""Message -> its fields in which tensors may be, and what message each is."""

_DEEPEST = 100
_NUMBER, _BYTES, _SIZES = 0, 2, {1: 8, 5: 4}  # kinds of fields
_DTYPES = {
    number: np.dtype({"FLOAT": "float32", "DOUBLE": "float64"}.get(name, name.lower()))
    for name, number in TYPES.items()
    if name != "BFLOAT16"
}


class OnnxFile(NamedTuple):
    """A file, taken apart."""

    graph: bytes  #: the model without its large weights
    weights: Weights  #: these, by their names
    work: int  #: multiply-adds of a run, roughly: one for each weight, or 100 where there are convolutions
    loops: int
    sources: Mapping[str, NDArray[np.uint8]] = MappingProxyType({})  #: the weights where they lie in the file


def taken_apart(
    data: NDArray[np.uint8],
    external: Mapping[str, NDArray[np.uint8]] = MappingProxyType({}),
    pace: Callable[[], object] = at_once,
) -> OnnxFile:
    """Takes a file apart. `external`: the files beside it, by the names by which it calls them.

    Raises InvalidModel for one that is damaged, or that names another file.
    """
    return _Reader(data, external, pace).file()


def check_places(data: NDArray[np.uint8], external: Mapping[str, NDArray[np.uint8]]) -> None:
    """Raises InvalidModel unless every tensor of the file lies in it, or in one of the files beside it: `external`."""
    if re.search(_KEY, data.data):
        _Reader(data, external, at_once).check_places("model", 0, data.nbytes, 0)


class _Reader:
    def __init__(
        self, data: NDArray[np.uint8], external: Mapping[str, NDArray[np.uint8]], pace: Callable[[], object]
    ) -> None:
        self._data, self._view, self._external, self._pace = data, data.data, external, pace
        self._kept: list[bytes] = []  # of the message
        self._weights: Weights = []
        self._sources: dict[str, NDArray[np.uint8]] = {}
        self._others = self._loops = 0  # bytes of weights that stay in the message; loops
        self._has_windows = False

    def file(self) -> OnnxFile:
        end = len(self._view)
        fields = list(_fields(self._view, 0, end))
        graphs = [field for field in fields if field.number == _GRAPH]
        if len(graphs) != 1:
            raise InvalidModel(f"the .onnx file has {len(graphs)} graphs instead of one")
        self._loops = sum(_loops(self._view[f.start : f.end]) for f in fields if f.number == _FUNCTION)
        graph = graphs[0]
        found = ProtobufMessage().encoded(self._keep(0, graph.tag))
        found.message(_GRAPH, self._graph(graph.start, graph.end)).encoded(self._keep(graph.end, end))
        if any(_KEY in chunk for chunk in self._kept):
            self.check_places("model", 0, end, 0)
        weights = sum(array.nbytes for _, array in self._weights) + self._others
        work = weights // _WEIGHT * (_POSITIONS if self._has_windows else 1)
        return OnnxFile(found.joined(), self._weights, work, self._loops, self._sources)

    def _keep(self, start: int, end: int) -> bytes:
        chunk = bytes(self._view[start:end])
        self._kept.append(chunk)
        return chunk

    def _graph(self, start: int, end: int) -> ProtobufMessage:
        fields, found, kept = list(_fields(self._view, start, end)), ProtobufMessage(), start
        given = {self._text(1, f.start, f.end) for f in fields if f.number == _INPUT}  # others may replace these
        for field in fields:
            if field.number == _NODE:
                self._node(field.start, field.end)
                if _KEY in bytes(self._view[field.start : field.end]):
                    whole = self._with_contents("node", field.start, field.end, 0)
                    found.encoded(self._keep(kept, field.tag)).message(_NODE, whole)
                    kept = field.end
            elif field.number == _INITIALIZER:
                tensor = _Tensor(self._view, field.start, field.end)
                contents = None if tensor.name in given else self._contents(tensor)
                if contents is None:
                    self._others += field.end - field.start
                else:
                    self._weights.append((tensor.name.decode(), contents))
                    found.encoded(self._keep(kept, field.tag)).message(_INITIALIZER, tensor.lying_elsewhere())
                    kept = field.end
            self._pace()
        return found.encoded(self._keep(kept, end))

    def _with_contents(self, kind: str, start: int, end: int, depth: int) -> ProtobufMessage:
        """The same message, in which tensors that lie in other files have their contents.

        Of tensors in nodes, ONNX Runtime looks for the files themselves while it infers shapes. Raises InvalidModel.
        """
        if depth > _DEEPEST:
            raise InvalidModel("the .onnx file is damaged: its graphs are nested too deeply")
        if kind == "tensor" and (tensor := _Tensor(self._view, start, end)).is_elsewhere:
            return tensor.described().data(_DATA, self._elsewhere(self._place(tensor)).tobytes())
        found, kept = ProtobufMessage(), start
        for field in _fields(self._view, start, end):
            part = _PARTS[kind].get(field.number)
            if part is not None and part != "elsewhere":
                whole = self._with_contents(part, field.start, field.end, depth + 1)
                found.encoded(bytes(self._view[kept : field.tag])).message(field.number, whole)
                kept = field.end
        return found.encoded(bytes(self._view[kept:end]))

    def _place(self, tensor: _Tensor) -> dict[str, str]:
        """Where a tensor lies in another file."""
        entries = {self._text(1, *of).decode(errors="replace"): self._text(2, *of) for of in tensor.external}
        return {key: value.decode(errors="replace") for key, value in entries.items()}

    def _text(self, number: int, start: int, end: int) -> bytes:
        """Of that field; b"" where there is none. The last one counts, as in protobuf."""
        found = b""
        for field in _fields(self._view, start, end):
            if field.number == number:
                found = bytes(self._view[field.start : field.end])
        return found

    def _node(self, start: int, end: int) -> None:
        operator = self._text(_OPERATOR, start, end)
        if operator == b"Constant":
            self._others += end - start
        elif operator in _WITH_BODIES:
            self._loops += _loops(self._view[start:end])
        self._has_windows = self._has_windows or operator in _CONVOLUTIONS

    def _contents(self, tensor: _Tensor) -> NDArray[Any] | None:
        """The contents of a large tensor of the main graph; None: they stay in the message."""
        found = None
        if tensor.is_elsewhere:
            found = self._elsewhere(self._place(tensor))
        elif len(tensor.data) == 1:
            found = self._data[slice(*tensor.data[0])]
        if found is None or tensor.dtype is None or not tensor.name.isascii() or found.nbytes <= SMALL:
            return None
        if math.prod(tensor.shape) * tensor.dtype.itemsize != found.nbytes:
            return None
        self._sources[tensor.name.decode()] = found
        return aligned(found).view(tensor.dtype).reshape(tensor.shape)

    def _elsewhere(self, place: Mapping[str, str]) -> NDArray[np.uint8]:
        """What lies in one of the files beside it. Raises InvalidModel."""
        name = place.get("location", "")
        if name not in self._external:
            raise InvalidModel(f"the .onnx file has weights in the file {name!r:.200}, which was not sent along")
        found = self._external[name]
        try:
            offset = int(place.get("offset", "0"))
            length = int(place.get("length", found.nbytes - offset))
        except ValueError:
            offset = length = -1
        if not 0 <= offset <= offset + length <= found.nbytes:
            raise InvalidModel(f"the .onnx file names a place that the file {name!r:.200} does not have: {place}")
        return found[offset : offset + length]

    def check_places(self, kind: str, start: int, end: int, depth: int) -> None:
        """Whether all files that tensors lie in were sent along. Raises InvalidModel."""
        if depth > _DEEPEST:
            raise InvalidModel("the .onnx file is damaged: its graphs are nested too deeply")
        place = self._place(_Tensor(self._view, start, end)) if kind == "tensor" else {}
        if "location" in place:
            self._elsewhere(place)
        for field in _fields(self._view, start, end):
            part = _PARTS[kind].get(field.number)
            if part == "elsewhere":
                if self._text(1, field.start, field.end) == _KEY:
                    self._elsewhere({"location": self._text(2, field.start, field.end).decode(errors="replace")})
            elif part is not None:
                self.check_places(part, field.start, field.end, depth + 1)


class _Tensor:
    """The message of a tensor."""

    def __init__(self, view: memoryview, start: int, end: int) -> None:
        self.shape, self.data, self.external = list[int](), list[tuple[int, int]](), list[tuple[int, int]]()
        self.name, self.is_elsewhere, self._type = b"", False, 0
        for number, _, first, last, _ in _fields(view, start, end):
            if number == _DIMENSIONS:
                self.shape += _numbers(view, first, last)
            elif number == _TYPE:
                self._type = _varint(view, first, last)[0]
            elif number == _NAME:
                self.name = bytes(view[first:last])
            elif number == _DATA:
                self.data.append((first, last))
            elif number == _EXTERNAL:
                self.external.append((first, last))
            elif number == _PLACE:
                self.is_elsewhere = _varint(view, first, last)[0] == 1
        self.dtype = _DTYPES.get(self._type)

    def lying_elsewhere(self) -> ProtobufMessage:
        """The same tensor without its contents."""
        return lying_elsewhere(self.described())

    def described(self) -> ProtobufMessage:
        """Its sizes, type and name."""
        found = ProtobufMessage()
        for size in self.shape:
            found.integer(_DIMENSIONS, size)
        return found.integer(_TYPE, self._type).data(_NAME, self.name)


def _loops(view: memoryview) -> int:
    return sum(1 for _ in _LOOP.finditer(view))


def _numbers(view: memoryview, at: int, end: int) -> Iterator[int]:
    while at < end:
        number, at = _varint(view, at, end)
        yield number


class _Field(NamedTuple):
    number: int
    tag: int  #: where it begins
    start: int  #: where its contents begin
    end: int
    kind: int


def _fields(view: memoryview, at: int, end: int) -> Iterator[_Field]:
    """The fields of a protobuf message. Raises InvalidModel where it is damaged."""
    while at < end:
        begin = at
        tag, at = _varint(view, at, end)
        kind = tag & 7
        if kind == _BYTES:
            length, at = _varint(view, at, end)
            after = at + length
        elif kind == _NUMBER:
            after = _varint(view, at, end)[1]
        else:
            after = at + _SIZES.get(kind, end)
        if after > end:
            raise InvalidModel(f"the .onnx file is damaged at byte {begin}: a field of its message is cut off")
        yield _Field(tag >> 3, begin, at, after, kind)
        at = after


def _varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    """A number, and where the next one begins. Raises InvalidModel."""
    found = shift = 0
    while at < end and shift < 64:
        byte = view[at]
        found |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return found, at
    raise InvalidModel("the .onnx file is damaged: a number of its message has no end")
