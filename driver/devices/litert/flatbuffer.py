"""Writes the flatbuffer of a model, by the schema that comes with LiteRT.

Its subgraphs share operators' codes and constants. The latter are not part of it: they follow behind, where its buffers
point to.
"""

from __future__ import annotations

import math
import struct
from functools import cache
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..lowering.alignment import ALIGNMENT, offset_in
from .weights import Image, shared_root

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from numpy.typing import NDArray

MOST_ELEMENTS = 2**28
"""TFLite counts bytes in signed 32-bit integers in places; a float32 element has four."""

_VERSION = 3
_IDENTIFIER = b"TFL3"
_OFFSET_FIELD = 6  # of Buffer.offset in its table
_LONGEST_OLD_CODE = 127
_MAX_RANK = 8


class Quantisation(NamedTuple):
    """Scales (one, or one for each channel along `axis`) and zero point."""

    scales: tuple[float, ...]
    zero_point: int = 0
    axis: int = 0


@cache
def schema() -> ModuleType:
    """TFLite's schema; loaded when a model is written, which is rare, and not when a device is listed."""
    return import_module("ai_edge_litert.schema_py_generated")


class SharedTables:
    """The tables that the subgraphs of a model share. It does not refer to them, so that no cycle keeps constants
    alive.
    """

    def __init__(self) -> None:
        self.names: list[str] = []  #: of all operations, in the order in which they were added
        self.codes: dict[str, int] = {}
        self.constants: list[NDArray[Any]] = []
        self._buffers: dict[tuple[Any, ...], int] = {}

    def buffer(self, array: NDArray[Any]) -> int:
        """Return the number of a constant, which tensors may share. Arrays are kept, so their addresses identify
        them.
        """
        key = array.__array_interface__["data"][0], array.shape, array.strides, array.dtype
        if key not in self._buffers:
            self.constants.append(array)
            self._buffers[key] = len(self.constants)  # buffer 0 is empty
        return self._buffers[key]

    def code(self, name: str) -> int:
        """Return the number of an operator's code."""
        self.names.append(name)
        return self.codes.setdefault(name, len(self.codes))


class Section:
    """A subgraph in the making: collects tensors and operations. Tensors are known by their numbers."""

    def __init__(self, shared: SharedTables, number: int) -> None:
        self.number = number  #: among the model's subgraphs
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self._shared = shared
        self._tensors: list[Any] = []
        self._operations: list[Any] = []

    def tensor(self, type_: str, dimensions: Sequence[int], quantisation: Quantisation | None = None) -> int:
        """Return a tensor that an operation writes or the subgraph is given. Raise ValueError when it is too large."""
        if math.prod(dimensions) > MOST_ELEMENTS:
            raise ValueError(f"a tensor of {list(dimensions)} has more than {MOST_ELEMENTS} elements")
        s = schema()
        tensor = s.TensorT()
        tensor.type, tensor.shape = getattr(s.TensorType, type_), np.array(dimensions, np.int32)
        tensor.name, tensor.hasRank = f"t{len(self._tensors)}", True
        if quantisation is not None:
            found = tensor.quantization = s.QuantizationParametersT()
            found.scale = np.array(quantisation.scales, np.float32)
            found.zeroPoint = np.full(len(quantisation.scales), quantisation.zero_point, np.int64)
            found.quantizedDimension = quantisation.axis
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def dimensions(self, index: int) -> tuple[int, ...]:
        """Return the dimensions of a tensor."""
        return tuple(int(d) for d in self._tensors[index].shape)

    def constant(self, type_: str, array: NDArray[Any], quantisation: Quantisation | None = None) -> int:
        """Return a tensor with a value. The array must not change until the model is written."""
        index = self.tensor(type_, array.shape, quantisation)
        self._tensors[index].buffer = self._shared.buffer(array)
        return index

    def operation(
        self, name: str, inputs: Sequence[int], outputs: Sequence[int], options: str | None = None, **fields: Any
    ) -> None:
        """Add an operation by TFLite's name; `fields` of the table `options`, by the schema's names."""
        s = schema()
        operation = s.OperatorT()
        operation.opcodeIndex = self._shared.code(name)
        operation.inputs, operation.outputs = np.array(inputs, np.int32), np.array(outputs, np.int32)
        if options is not None:
            table = getattr(s, f"{options}T")()
            for key, value in fields.items():
                setattr(table, key, value)
            operation.builtinOptionsType = getattr(s.BuiltinOptions, options)
            operation.builtinOptions = table
        self._operations.append(operation)

    def weights(self) -> Iterator[set[int]]:
        """Return for each operation the buffers of its constants that have more than one dimension."""
        for operation in self._operations:
            tensors = [self._tensors[i] for i in operation.inputs.tolist() if i >= 0]
            yield {tensor.buffer for tensor in tensors if tensor.buffer and len(tensor.shape) > 1}

    def table(self, pace: Callable[[], object]) -> Any:
        """Return the table of the schema."""
        graph = schema().SubGraphT()
        graph.tensors, graph.operators = _paced(self._tensors, pace), _paced(self._operations, pace)
        graph.inputs, graph.outputs = np.array(self.inputs, np.int32), np.array(self.outputs, np.int32)
        return graph


class FlatbufferWriter:
    """Collects the subgraphs of a model; `finish` writes the bytes."""

    def __init__(self) -> None:
        self.sections: list[Section] = []
        self._shared = SharedTables()

    @property
    def names(self) -> list[str]:
        """The names of the operations of all subgraphs, in the order in which they were added."""
        return self._shared.names

    def section(self) -> Section:
        """Return a new subgraph. The first one runs unless `finish` is told otherwise."""
        self.sections.append(Section(self._shared, len(self.sections)))
        return self.sections[-1]

    def finish(self, entries: Sequence[Section] = (), pace: Callable[[], object] = lambda: None) -> Image:
        """Return the model and its constants, as LiteRT reads them.

        entries: the subgraphs that can be run, by their places here; the first one alone when there are none.
        pace: called often.
        """
        import flatbuffers

        builder = flatbuffers.Builder(1 << 16)
        builder.Finish(self._model(entries, pace).Pack(builder), _IDENTIFIER)
        head = np.frombuffer(builder.Output(), np.uint8)
        try:
            return self._placed(head, shared_root(self._shared.constants), pace)
        except OSError:  # private memory cannot be mapped twice
            return self._placed(head, None, pace)

    def _placed(self, head: NDArray[np.uint8], root: NDArray[np.uint8] | None, pace: Callable[[], object]) -> Image:
        """Return it with the constants that lie in `root` where they are, and copies of the others. Raise OSError."""
        there = [offset_in(root, array) for array in self._shared.constants]
        copied = [
            0 if offset is not None else array.nbytes
            for offset, array in zip(there, self._shared.constants, strict=True)
        ]
        places, front = _places(copied, head.nbytes)
        image = Image(front, root if any(offset is not None for offset in there) else None)
        places = [p if offset is None else image.behind + offset for p, offset in zip(places, there, strict=True)]
        image.bytes[: head.nbytes] = head
        self._point(image.bytes[: head.nbytes], places, pace)
        for array, place, nbytes in zip(self._shared.constants, places, copied, strict=True):
            if nbytes:
                image.bytes[place : place + nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            pace()
        image.shareable = self._reads_weights_once(places, pace)
        return image

    def _reads_weights_once(self, places: Sequence[int], pace: Callable[[], object]) -> bool:
        """Return True if no two operations read constants of more than one dimension that begin at the same place."""
        read: set[int] = set()
        for buffers in chain.from_iterable(section.weights() for section in self.sections):
            found = {places[buffer - 1] for buffer in buffers}
            if not read.isdisjoint(found):
                return False
            read |= found
            pace()
        return True

    def _model(self, entries: Sequence[Section], pace: Callable[[], object]) -> Any:
        s = schema()
        model = s.ModelT()
        model.version, model.subgraphs = _VERSION, [section.table(pace) for section in self.sections]
        model.signatureDefs = [_signature(n, section) for n, section in enumerate(entries)]
        model.operatorCodes = [_code(name) for name in self._shared.codes]
        # An offset of 0 or 1 means that the data are inside.
        buffers = [s.BufferT(offset=2, size=max(1, array.nbytes)) for array in self._shared.constants]
        model.buffers = _paced([s.BufferT(), *buffers], pace)
        return model

    def _point(self, head: NDArray[np.uint8], places: Sequence[int], pace: Callable[[], object]) -> None:
        """Set the offsets, which depend on the size of the flatbuffer."""
        model = schema().Model.GetRootAs(head.data)
        for index, place in enumerate(places):
            table = model.Buffers(index + 1)._tab  # the generated classes have no setters
            struct.pack_into("<Q", head.data, table.Pos + table.Offset(_OFFSET_FIELD), place)
            pace()


def _places(sizes: Sequence[int], start: int) -> tuple[list[int], int]:
    """Return where each constant begins behind `start` bytes, and where the last one ends."""
    places = []
    for size in sizes:
        start += -start % ALIGNMENT
        places.append(start)
        start += max(1, size)
    return places, start


def _signature(number: int, section: Section) -> Any:
    s = schema()
    signature = s.SignatureDefT()
    signature.signatureKey, signature.subgraphIndex = f"s{number:05}", section.number
    signature.inputs, signature.outputs = _map("i", section.inputs), _map("o", section.outputs)
    return signature


def _map(letter: str, tensors: Sequence[int]) -> list[Any]:
    """Return the names that sort in the order of the tensors."""
    return [schema().TensorMapT(name=f"{letter}{n:05}", tensorIndex=tensor) for n, tensor in enumerate(tensors)]


def _code(name: str) -> Any:
    s = schema()
    code = s.OperatorCodeT()
    code.builtinCode, code.version = getattr(s.BuiltinOperator, name), 1
    code.deprecatedBuiltinCode = min(code.builtinCode, _LONGEST_OLD_CODE)
    return code


class _Paced:
    """A table that pauses before it is packed: a model has many, and running bursts come first."""

    def __init__(self, table: Any, pace: Callable[[], object]) -> None:
        self._table, self._pace = table, pace

    def Pack(self, builder: Any) -> Any:  # noqa: N802 (the schema's name)
        self._pace()
        return self._table.Pack(builder)


def _paced(tables: Sequence[Any], pace: Callable[[], object]) -> list[_Paced]:
    return [_Paced(table, pace) for table in tables]
