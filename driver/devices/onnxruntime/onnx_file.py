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

from driver.devices.lowering.alignment import aligned
from driver.devices.lowering.placing import at_once
from driver.devices.onnxruntime.session_settings import KEY, SessionSettings, settings_of
from driver.devices.onnxruntime.writer import SMALL, lying_elsewhere
from driver.formats.onnx_schema import FIELDS, PARTS, check_depth, element_dtype, tensors
from driver.formats.protobuf import ProtoBytes, ProtoMessage, ProtoWriter
from driver.nn import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from driver.formats.protobuf import Field

    Weights = list[tuple[str, NDArray[Any]]]

_MODEL, _GRAPH, _NODE, _TENSOR = (FIELDS[f"{name}Proto"] for name in ("Model", "Graph", "Node", "Tensor"))
_INFO, _ENTRY = FIELDS["ValueInfoProto"], FIELDS["StringStringEntryProto"]
_CONVOLUTIONS = frozenset({"Conv", "ConvInteger", "ConvTranspose", "QLinearConv"})
_WITH_BODIES = frozenset({"If", "Loop", "Scan", "SequenceMap"})
_LOOP = re.compile(rb"\x22\x04Loop")  # the field that says which operator a node is
_WEIGHT, _POSITIONS = 4, 100
_KEY = "location"
_BYTES_OF_KEY = _KEY.encode()

_MOST_FIELDS = 1 << 22


class SplitOnnxFile(NamedTuple):
    """A file, taken apart."""

    graph: bytes  #: the model without its large weights
    weights: Weights  #: these, by their names
    work: int  #: multiply-adds of a run, roughly: one for each weight, or 100 where there are convolutions
    loops: int
    sources: Mapping[str, NDArray[np.uint8]] = MappingProxyType({})  #: the weights where they lie in the file
    settings: SessionSettings | None = None  #: of its session, where the file tells them


def taken_apart(
    data: NDArray[np.uint8],
    external: Mapping[str, NDArray[np.uint8]] = MappingProxyType({}),
    pace: Callable[[], object] = at_once,
) -> SplitOnnxFile:
    """Take a file apart. `external`: the files beside it, by the names by which it calls them.

    Raise InvalidModel for one that is damaged, or that names another file.
    """
    return _FileSplitter(data, external, pace).file()


def without_weights(data: NDArray[np.uint8], external: Mapping[str, NDArray[np.uint8]]) -> SplitOnnxFile:
    """Take a file apart that is only to be looked at: its weights are zeros, in memory that nothing has touched."""
    splitter = _FileSplitter(data, external, at_once)
    splitter.has_weights = False
    return splitter.file()


def check_places(data: NDArray[np.uint8], external: Mapping[str, NDArray[np.uint8]]) -> None:
    """Raise InvalidModel unless every tensor of the file lies in it, or in one of the files beside it: `external`."""
    if re.search(_BYTES_OF_KEY, data.data):
        _FileSplitter(data, external, at_once).check_places()


class _FileSplitter:
    has_weights = True

    def __init__(
        self, data: NDArray[np.uint8], external: Mapping[str, NDArray[np.uint8]], pace: Callable[[], object]
    ) -> None:
        self._data, self._view, self._external, self._pace = data, data.data, external, pace
        self._wire = ProtoBytes(data.data, "the .onnx file is ", _MOST_FIELDS)
        self._kept: list[bytes] = []  # of the message
        self._weights: Weights = []
        self._sources: dict[str, NDArray[np.uint8]] = {}
        self._others = self._loops = 0  # bytes of weights that stay in the message; loops
        self._has_windows = False

    def file(self) -> SplitOnnxFile:
        end = len(self._view)
        fields = list(self._wire.fields(0, end))
        graphs = [field for field in fields if field.number == _MODEL["graph"]]
        if len(graphs) != 1:
            raise InvalidModel(f"the .onnx file has {len(graphs)} graphs instead of one")
        told = [self._message(f) for f in fields if f.number == _MODEL["metadata_props"]]
        settings = [entry.text(_ENTRY["value"]) for entry in told if entry.text(_ENTRY["key"]) == KEY]
        self._loops = sum(_loops(self._view[f.start : f.end]) for f in fields if f.number == _MODEL["functions"])
        graph = graphs[0]
        found = ProtoWriter().encoded(self._keep(0, graph.tag))
        found.message(graph.number, self._graph(graph.start, graph.end)).encoded(self._keep(graph.end, end))
        if any(_BYTES_OF_KEY in chunk for chunk in self._kept):
            self.check_places()
        weights = sum(array.nbytes for _, array in self._weights) + self._others
        work = weights // _WEIGHT * (_POSITIONS if self._has_windows else 1)
        split = SplitOnnxFile(found.joined(), self._weights, work, self._loops, sources=self._sources)
        return split._replace(settings=settings_of(settings[-1])) if settings else split

    def _keep(self, start: int, end: int) -> bytes:
        chunk = bytes(self._view[start:end])
        self._kept.append(chunk)
        return chunk

    def _graph(self, start: int, end: int) -> ProtoWriter:
        fields, found, kept = list(self._wire.fields(start, end)), ProtoWriter(), start
        given = {self._message(f).text(_INFO["name"]) for f in fields if f.number == _GRAPH["input"]}
        for field in fields:
            changed = None
            if field.number == _GRAPH["node"]:
                changed = self._node(field)
            elif field.number == _GRAPH["initializer"]:
                changed = self._initializer(field, given)
            if changed is not None:
                found.encoded(self._keep(kept, field.tag)).message(field.number, changed)
                kept = field.end
            self._pace()
        return found.encoded(self._keep(kept, end))

    def _message(self, field: Field) -> ProtoMessage:
        return ProtoMessage(self._wire, field.start, field.end)

    def _node(self, field: Field) -> ProtoWriter | None:
        """Count what a node does. Return it with the contents of tensors in other files; None if it has no such."""
        content = self._view[field.start : field.end]
        operator = self._message(field).text(_NODE["op_type"])
        if operator == "Constant":
            self._others += len(content)
        elif operator in _WITH_BODIES:
            self._loops += _loops(content)
        self._has_windows = self._has_windows or operator in _CONVOLUTIONS
        if _BYTES_OF_KEY not in bytes(content):
            return None
        return self._with_contents("NodeProto", field.start, field.end, 0)

    def _initializer(self, field: Field, given: set[str]) -> ProtoWriter | None:
        """Return a tensor without its contents; None if they stay in the message. `given`: inputs may replace these."""
        tensor = self._message(field)
        name = tensor.text(_TENSOR["name"])
        contents = None if name in given else self._contents(tensor)
        if contents is None:
            self._others += field.end - field.start
            return None
        self._weights.append((name, contents))
        return lying_elsewhere(_described(tensor))

    def _with_contents(self, kind: str, start: int, end: int, depth: int) -> ProtoWriter:
        """Return the message with the contents of tensors that lie in other files.

        Of tensors in nodes, ONNX Runtime looks for the files themselves while it infers shapes. Raise InvalidModel.
        """
        check_depth(self._wire, depth)
        if kind == "TensorProto" and _is_elsewhere(tensor := ProtoMessage(self._wire, start, end)):
            return _described(tensor).data(_TENSOR["raw_data"], self._elsewhere(_place(tensor)).tobytes())
        found, kept = ProtoWriter(), start
        for field in self._wire.fields(start, end):
            part = PARTS[kind].get(field.number)
            if part is not None:
                whole = self._with_contents(part, field.start, field.end, depth + 1)
                found.encoded(bytes(self._view[kept : field.tag])).message(field.number, whole)
                kept = field.end
        return found.encoded(bytes(self._view[kept:end]))

    def _contents(self, tensor: ProtoMessage) -> NDArray[Any] | None:
        """Return the contents of a large tensor of the main graph; None: they stay in the message."""
        found, data, name = None, tensor.spans(_TENSOR["raw_data"]), tensor.text(_TENSOR["name"])
        if _is_elsewhere(tensor):
            found = self._elsewhere(_place(tensor))
        elif len(data) == 1:
            found = self._data[slice(*data[0])]
        dtype, shape = element_dtype(tensor.integer(_TENSOR["data_type"])), tensor.integers(_TENSOR["dims"]).tolist()
        if found is None or dtype is None or not name.isascii() or found.nbytes <= SMALL:
            return None
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != found.nbytes:
            return None
        if not self.has_weights:
            return np.zeros(shape, dtype)
        self._sources[name] = found
        return aligned(found).view(dtype).reshape(shape)

    def _elsewhere(self, place: Mapping[str, str]) -> NDArray[np.uint8]:
        """Return what lies in one of the files beside it. Raise InvalidModel."""
        name = place.get(_KEY, "")
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

    def check_places(self) -> None:
        """Raise InvalidModel unless all files that tensors lie in were sent along."""
        for tensor in tensors(ProtoMessage(self._wire), "ModelProto"):
            place = _place(tensor)
            if _KEY in place:
                self._elsewhere(place)
            for entry in tensor.messages(_TENSOR["external_data"]):  # of several, a runtime may take any
                if entry.text(_ENTRY["key"]) == _KEY:
                    self._elsewhere({_KEY: entry.text(_ENTRY["value"])})


def _described(tensor: ProtoMessage) -> ProtoWriter:
    """Return the sizes, type and name of a tensor."""
    found = ProtoWriter()
    for size in tensor.integers(_TENSOR["dims"]).tolist():
        found.integer(_TENSOR["dims"], size)
    found.integer(_TENSOR["data_type"], tensor.integer(_TENSOR["data_type"]))
    return found.text(_TENSOR["name"], tensor.text(_TENSOR["name"]))


def _place(tensor: ProtoMessage) -> dict[str, str]:
    """Return where a tensor lies in another file."""
    entries = tensor.messages(_TENSOR["external_data"])
    return {entry.text(_ENTRY["key"]): entry.text(_ENTRY["value"]) for entry in entries}


def _is_elsewhere(tensor: ProtoMessage) -> bool:
    return tensor.integer(_TENSOR["data_location"]) == 1


def _loops(view: memoryview) -> int:
    return sum(1 for _ in _LOOP.finditer(view))
