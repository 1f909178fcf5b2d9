"""A .tflite file as LiteRT is to read it: the file's own tables, and a front of new ones where something has to differ.

    TfliteOutline(data)     what has to be known of the file before it runs
      .image(shapes)     the file with inputs of these shapes; no weight is copied

LiteRT reads a model twice: into a graph of its own, which is only for compilers and knows no variables, and into the
interpreter that runs it. Where it refuses the first, it is shown an outline of the model there.
"""

from __future__ import annotations

import math
import struct
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from driver.devices.litert.builtin import (
    CONVOLUTIONS,
    SHAPED,
    SHAPED_BY_FIRST,
    SHAPED_BY_REST,
    STATEFUL,
    UNPACKED,
    Builtin,
)
from driver.devices.litert.front import Front, NewNumbers, NewTable, NewTables, Number
from driver.devices.litert.weights import Image, shared_root
from driver.devices.lowering.alignment import ALIGNMENT
from driver.formats.flatbuffer import ColumnBytes, FlatColumns, root_column
from driver.formats.tflite_schema import DTYPES, FIELDS, IDENTIFIER, TYPE_NAMES, VERSION
from driver.nn import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from driver.devices.litert.front import Field

    Places = NDArray[np.int64]
    Shape = tuple[int, ...]

TYPES = {number: TYPE_NAMES[number] for number in DTYPES}
"""Element types of tensors that are carried, by their numbers in the schema."""
_INT32, _UINT8 = 2, 3
_SHAPE_OPTIONS = 55  # among the kinds of options
UNKNOWN = (1, 1)
"""What a shape's own shape never is."""
MODEL = {**FIELDS["Model"], "external_buffers": 9}
_CODE, _SUBGRAPH, _BUFFER = FIELDS["OperatorCode"], FIELDS["SubGraph"], FIELDS["Buffer"]
TENSOR = {**FIELDS["Tensor"], "external_buffer": 10}
OPERATOR = {**FIELDS["Operator"], "large_options": 9}
"""Places of fields that only the runtime reads, too."""
_NONE = np.zeros(0, np.int64)


class DeclaredTensor(NamedTuple):
    """An input or output as the file declares it."""

    place: int  #: among the tensors of the first subgraph
    name: str
    code: int  #: of its type
    shape: Shape  #: as long as no run says otherwise
    signature: Shape  #: -1 where a size is open


class Findings(NamedTuple):
    """The findings about all operators of a file together. Plain values."""

    work: int  #: multiply-adds of a run with the declared shapes, roughly
    loops: int  #: how many WHILEs
    is_plain: bool  #: the shapes of all tensors follow from those of its inputs
    gives_what_it_makes: bool  #: each output is made by an operator, and is given once
    has_state: bool  #: a run leaves something behind for the next one
    is_shareable: bool  #: no two operators read the same weights


class TfliteOutline:
    """A file, read as far as needed. inputs, outputs: of its first subgraph."""

    def __init__(self, data: NDArray[np.uint8], findings: Findings | None = None) -> None:
        """Read the file. `findings`: of the same file, if they are known.

        Raise InvalidModel for a file that is damaged, or that has weights elsewhere.
        """
        self.data = data
        self._model = model = model_table(data)
        self._codes = model.tables("operator_codes", _CODE)
        self._subgraphs = model.tables("subgraphs", _SUBGRAPH)
        self._buffers = model.tables("buffers", _BUFFER)
        if not len(self._subgraphs):
            raise InvalidModel("the .tflite file has no subgraph")
        self._main = _Graph(self._subgraphs.pick([0]))
        self.inputs, self.outputs = ([*self._main.declared(side)] for side in ("inputs", "outputs"))
        self.findings = findings or self._studied()

    @cached_property
    def content(self) -> bytes:
        """The bytes of the file, copied once for all interpreters of it."""
        return self.data.tobytes()

    def _studied(self) -> Findings:
        others = (_Graph(self._subgraphs.pick([n])) for n in range(1, len(self._subgraphs)))
        graphs = [self._main, *others]
        self._check(graphs)
        sizes, codes = self._constant_sizes(), kinds_of(self._codes)
        pairs = [(graph, codes[graph.codes]) for graph in graphs]
        kinds = np.concatenate([found for _, found in pairs])
        read, present = np.concatenate([graph.weights(sizes) for graph in graphs]), {*kinds.tolist()}
        gives_what_it_makes = self._gives_what_it_makes()
        return Findings(
            work=sum(graph.work(found) for graph, found in pairs),
            loops=int((kinds == Builtin.WHILE).sum()),
            is_plain=gives_what_it_makes and all(graph.is_plain(found, sizes) for graph, found in pairs),
            gives_what_it_makes=gives_what_it_makes,
            has_state=bool(STATEFUL & present) or any(graph.has_variables for graph in graphs),
            is_shareable=not UNPACKED & present and np.unique(read).size == read.size,
        )

    def _check(self, graphs: Sequence[_Graph]) -> None:
        elsewhere = (graph.tensors.numbers("external_buffer", 4).any() for graph in graphs)
        if self._model.counts("external_buffers")[0] or any(elsewhere):
            raise InvalidModel("the .tflite file has weights in other files, which LiteRT would open itself")
        for graph in graphs:
            if graph.codes.size and graph.codes.max() >= len(self._codes):
                raise InvalidModel("the .tflite file is damaged: it has no code for one of its operators")
            if graph.operators.numbers("large_options", 8).any():
                raise InvalidModel("the .tflite file has an operator whose options lie outside of its tables")

    def _constant_sizes(self) -> Places:
        """Return the bytes of each buffer; 0 of one that tensors have which are not constants."""
        is_behind = self._buffers.numbers("offset", 8) > 1
        return np.where(is_behind, self._buffers.numbers("size", 8), self._buffers.counts("data"))

    def _gives_what_it_makes(self) -> bool:
        """Return True if each output is made by an operator, and is given once."""
        made = {*self._main.operators.lists("outputs").values.tolist()}
        outputs = [tensor.place for tensor in self.outputs]
        return len({*outputs}) == len(outputs) and made.issuperset(outputs)

    def image(self, shapes: Sequence[Shape], *, is_asked: bool = False) -> FileImage:
        """Return the bytes that LiteRT reads. `shapes`: of the inputs.

        `is_asked`: its only output tells by its shape whether all shapes are known before a run: then it is not
        UNKNOWN.
        """
        fields: dict[int, Field] = {
            0: Number("I", VERSION),
            MODEL["operator_codes"]: NewTables(self._codes.places, more=[_SHAPE_CODE] if is_asked else []),
            MODEL["subgraphs"]: NewTables(self._subgraphs.places, {0: self._main_graph(shapes, is_asked=is_asked)}),
            MODEL["buffers"]: moved(self._buffers),
            # It may have an entry for each operator.
            MODEL["metadata"]: 0 if is_asked else int(self._model.targets("metadata")[0]),
        }
        front = Front([NewTable(fields), self._outline()])
        return FileImage(front, self.data, shareable=self.findings.is_shareable and not is_asked)

    def _main_graph(self, shapes: Sequence[Shape], *, is_asked: bool) -> NewTable:
        """Return the first subgraph, with inputs of these shapes."""
        pairs = zip(self.inputs, shapes, strict=True)
        resized = {t.place: self._main.resized(t.place, shape) for t, shape in pairs if t.shape != shape}
        names = ("inputs", "outputs", "operators", "name")
        fields: dict[int, Field] = {_SUBGRAPH[name]: int(self._main.table.targets(name)[0]) for name in names}
        tensors, operators = self._main.tensors.places, self._main.operators.places
        fields[_SUBGRAPH["tensors"]] = NewTables(tensors, resized, [new_tensor(UNKNOWN, _INT32)] if is_asked else [])
        if is_asked:
            shape: dict[int, Field] = {
                OPERATOR["opcode_index"]: Number("I", len(self._codes)),
                OPERATOR["inputs"]: NewNumbers([self.outputs[0].place]),
                OPERATOR["outputs"]: NewNumbers([tensors.size]),
                OPERATOR["builtin_options_type"]: Number("B", _SHAPE_OPTIONS),
                OPERATOR["builtin_options"]: NewTable({0: Number("b", _INT32)}),
            }
            fields[_SUBGRAPH["operators"]] = NewTables(operators, more=[NewTable(shape)])
            fields[_SUBGRAPH["outputs"]] = NewNumbers([tensors.size])
        return NewTable(fields)

    def _outline(self) -> NewTable:
        """Return a model with as many inputs and outputs, and nothing in between."""
        count, all_ = len(self.inputs), len(self.inputs) + len(self.outputs)
        graph: dict[int, Field] = {
            _SUBGRAPH["tensors"]: NewTables(_NONE, more=[new_tensor([1]) for _ in range(all_)]),
            _SUBGRAPH["inputs"]: NewNumbers(range(count)),
            _SUBGRAPH["outputs"]: NewNumbers(range(count, all_)),
            _SUBGRAPH["operators"]: NewTables(_NONE),
        }
        fields: dict[int, Field] = {
            0: Number("I", VERSION),
            MODEL["operator_codes"]: NewTables(_NONE),
            MODEL["subgraphs"]: NewTables(_NONE, more=[NewTable(graph)]),
            MODEL["buffers"]: NewTables(_NONE, more=[NewTable({})]),
        }
        return NewTable(fields)


def moved(buffers: FlatColumns) -> NewTables:
    """Return the buffers of a file with a front. Those behind its tables say how far they lie from its beginning."""
    offsets, sizes = buffers.numbers("offset", 8), buffers.numbers("size", 8)
    instead = {
        n: NewTable(
            {
                _BUFFER["offset"]: Number("Q", int(offsets[n]), is_place=True),
                _BUFFER["size"]: Number("Q", int(sizes[n])),
            }
        )
        for n in np.flatnonzero(offsets > 1).tolist()
    }
    return NewTables(buffers.places, instead)


def model_table(data: NDArray[np.uint8]) -> FlatColumns:
    """Return the table that the file is. Raise InvalidModel."""
    if data[4:8].tobytes() != IDENTIFIER:
        raise InvalidModel("it is no .tflite file: bytes 4 to 7 are not TFL3")
    return root_column(ColumnBytes(data.data, "the .tflite file is "), MODEL)


def kinds_of(codes: FlatColumns) -> Places:
    """Return the number of the builtin operator that each code stands for."""
    return np.maximum(codes.numbers("builtin_code", 4), codes.numbers("deprecated_builtin_code", 1))


class _Graph:
    """A subgraph."""

    def __init__(self, table: FlatColumns) -> None:
        self.table = table
        self.tensors = table.tables("tensors", TENSOR)
        self.operators = table.tables("operators", OPERATOR)
        self.codes = self.operators.numbers("opcode_index", 4)
        self._given, self._made = self.operators.lists("inputs"), self.operators.lists("outputs")
        self._shapes = self.tensors.lists("shape")
        for values, least in ((self._given.values, -1), (self._made.values, -1), (self._ends("inputs"), 0)):
            if values.size and not least <= values.min() <= values.max() < len(self.tensors):
                raise InvalidModel(
                    "the .tflite file is damaged: an operator or an input names a tensor that is not there"
                )

    def _ends(self, side: str) -> Places:
        return self.table.lists(side).values

    def declared(self, side: str) -> Iterator[DeclaredTensor]:
        """Yield the inputs or outputs."""
        indices = self._ends(side)
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self.tensors):
            raise InvalidModel(f"the .tflite file is damaged: one of its {side} is a tensor that is not there")
        found = self.tensors.pick(indices)
        shapes = [tuple(shape.tolist()) for shape in found.lists("shape")]
        signatures = [tuple(shape.tolist()) for shape in found.lists("shape_signature")]
        codes = found.numbers("type", 1).tolist()
        for n, index in enumerate(indices.tolist()):
            yield DeclaredTensor(
                index, found.text("name", n), codes[n], shapes[n], signature=signatures[n] or shapes[n]
            )

    def resized(self, index: int, shape: Shape) -> NewTable:
        """Return a tensor with another shape."""
        tensor = self.tensors.pick([index])
        old: dict[int, Field] = {
            TENSOR[name]: int(tensor.targets(name)[0]) for name in ("name", "quantization", "sparsity")
        }
        numbers: dict[int, Field] = {
            TENSOR["buffer"]: Number("I", int(tensor.numbers("buffer", 4)[0])),
            TENSOR["is_variable"]: Number("B", int(tensor.numbers("is_variable", 1)[0])),
        }
        return new_tensor(shape, int(tensor.numbers("type", 1)[0]), {**old, **numbers})

    @property
    def has_variables(self) -> bool:
        """True if a tensor keeps its value from one run to the next."""
        return bool(self.tensors.numbers("is_variable", 1).any())

    def is_plain(self, kinds: Places, sizes: Places) -> bool:
        """Return True if the shapes of all that its operators make follow from those of its inputs. `sizes`: of
        buffers.
        """
        owners = self._given.owners
        steers = np.ones(owners.size, bool)
        firsts = np.cumsum(self._given.counts) - self._given.counts
        firsts = firsts[self._given.counts > 0]
        steers[firsts] = False  # the rest
        by_rest = _among(kinds, SHAPED_BY_REST)[owners] & steers
        by_first = _among(kinds, SHAPED_BY_FIRST)[owners] & ~steers
        is_constant = self._buffer_sizes(sizes) > 0
        known = _among(kinds, SHAPED | SHAPED_BY_REST | SHAPED_BY_FIRST).all()
        return bool(known and is_constant[by_rest | by_first].all())

    def _buffer_sizes(self, sizes: Places) -> Places:
        """Return for each input of an operator the bytes of its contents; 0: it is no constant."""
        buffers = self._buffers()
        if buffers.size and buffers.max() >= sizes.size:
            raise InvalidModel("the .tflite file is damaged: a tensor has a buffer that is not there")
        found: Places = sizes[buffers]
        return found

    def _buffers(self) -> Places:
        """Return for each input of an operator the number of its buffer; 0 for one that is omitted."""
        buffers = np.append(self.tensors.numbers("buffer", 4), 0)  # the last for tensor -1
        found: Places = buffers[self._given.values]
        return found

    def weights(self, sizes: Places) -> Places:
        """Return the buffers of constants of more than one dimension, once for each operator that reads them."""
        ranks = np.append(self._shapes.counts, 0)
        is_weight = (self._buffer_sizes(sizes) > 0) & (ranks[self._given.values] > 1)
        pairs = np.stack([self._given.owners[is_weight], self._buffers()[is_weight]])
        found: Places = np.unique(pairs, axis=1)[1]
        return found

    def work(self, kinds: Places) -> int:
        """Multiply-adds of its convolutions and matrix products, as it declares their shapes; open sizes count as 1."""
        operators = np.flatnonzero(_among(kinds, CONVOLUTIONS) & (self._given.counts > 1) & (self._made.counts > 0))
        ends = np.cumsum(self._shapes.counts).tolist()
        sizes, counts, found = np.maximum(self._shapes.values, 1).tolist(), self._shapes.counts.tolist(), 0
        for weights, result in zip(self._given.at(operators, 1), self._made.at(operators, 0), strict=True):
            shapes = [sizes[ends[t] - counts[t] : ends[t]] for t in (weights, result)]
            found += math.prod(shapes[0]) * math.prod(shapes[1][:-1])
        return found


class FileImage(Image):
    """The file behind its front: mapped a second time where it lies in shared memory, else copied."""

    def __init__(self, front: Front, data: NDArray[np.uint8], *, shareable: bool) -> None:
        """Raise InvalidModel for a file that has its tables too far away."""
        begin = self._map(front.nbytes, data)
        try:
            front.write(self.bytes, begin)
        except struct.error:
            raise InvalidModel("the .tflite file is damaged: a table lies outside of it") from None
        self.shareable, self._roots = shareable, front.roots

    def _map(self, nbytes: int, data: NDArray[np.uint8]) -> int:
        """Make room for so many bytes, and the file behind them; return where the file begins."""
        held = shared_root([data])
        offset = 0 if held is None else data.ctypes.data - held.ctypes.data
        if held is not None and offset % ALIGNMENT == 0:
            with suppress(OSError):  # private memory cannot be mapped twice
                super().__init__(nbytes, held)
                return self.behind + offset
        begin = -(-nbytes // ALIGNMENT) * ALIGNMENT
        super().__init__(begin + data.nbytes, None)
        self.bytes[begin:] = data
        return begin

    def show(self, *, outline: bool) -> None:
        """Choose which of its two models LiteRT finds in it from now on."""
        struct.pack_into("<I", self.bytes.data, 0, self._roots[outline])


def _among(kinds: Places, these: frozenset[Builtin]) -> NDArray[np.bool_]:
    return np.isin(kinds, [*these])


def new_tensor(shape: Sequence[int], code: int = _UINT8, more: Mapping[int, Field] | None = None) -> NewTable:
    """Return a tensor of these sizes, of a type by its number in the schema."""
    fields: dict[int, Field] = {
        TENSOR["shape"]: NewNumbers(shape),
        TENSOR["type"]: Number("b", code),
        TENSOR["has_rank"]: Number("B", 1),
    }
    return NewTable({**fields, **(more or {})})


_SHAPE_CODE = NewTable(
    {
        _CODE["deprecated_builtin_code"]: Number("b", Builtin.SHAPE),
        _CODE["version"]: Number("i", 1),
        _CODE["builtin_code"]: Number("i", Builtin.SHAPE),
    }
)
