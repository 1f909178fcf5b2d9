"""An entry of a .tflite file as a file of its own, whose variables are further inputs and outputs.

    entry = EntryFile(data, 1)      subgraph 1 and what it calls
      .data                         the bytes: subgraph 1 is the first, and keeps nothing between runs
      .places                       tensors of subgraph 1 in the order of the inputs and outputs
      .initial()                    a file that gives the first values of its named variables

So who runs it holds the state: it can be run again from the values before a run, anywhere, and by several in turn.

  a variable tensor     of SVDF, LSTM: it is itself an input and an output. An interpreter clears it when it allocates
                        tensors, which comes before the inputs are set.
  a named variable      of VAR_HANDLE: the first operators are CALL_ONCE as in the file, then ASSIGN_VARIABLE from
                        inputs; the last are READ_VARIABLE to outputs.

New tables lie in front of the file; none of its bytes changes.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from driver.devices.litert.front import Front, NewNumbers, NewTable, NewTables, Number
from driver.devices.litert.tflite_file import MODEL, OPERATOR, TENSOR, kinds_of, model_table, moved, new_tensor
from driver.devices.lowering.alignment import ALIGNMENT
from driver.formats.file_bytes import FileBytes
from driver.formats.flatbuffer import S32, FlatTable
from driver.formats.tflite_schema import DTYPES, FIELDS, TYPE_NAMES, VERSION
from driver.nn import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from driver.devices.litert.front import Field
    from driver.formats.flatbuffer import FlatColumns

    Shape = tuple[int, ...]

_CODE, _SUBGRAPH, _BUFFER = FIELDS["OperatorCode"], FIELDS["SubGraph"], FIELDS["Buffer"]


class StateOperator(IntEnum):
    """Operators that keep a state, or run a subgraph, by their codes in the schema."""

    IF = 118
    WHILE = 119
    CALL_ONCE = 129
    VAR_HANDLE = 142
    READ_VARIABLE = 143
    ASSIGN_VARIABLE = 144


_RESOURCE = TYPE_NAMES.index("RESOURCE")
_ADDED = (StateOperator.VAR_HANDLE, StateOperator.READ_VARIABLE, StateOperator.ASSIGN_VARIABLE)


class NamedVariable(NamedTuple):
    """A variable that operators find by its name. options: where those of its VAR_HANDLE lie, and their kind."""

    name: tuple[str, str]
    options: tuple[int, int]
    type: int
    shape: Shape


class EntryFile:
    """A subgraph of a file, made a file of its own.

    inputs, outputs: tensors of the subgraph, as the file lists them. cells: its variable tensors. variables: the named
    ones, if the file has any. made: outputs that a run writes; others are constants, or inputs.
    The inputs of `data` are inputs, cells and variables; its outputs are outputs, cells and variables.
    """

    def __init__(self, data: NDArray[np.uint8], number: int = 0) -> None:
        """Read a subgraph, by its number. Raise InvalidModel for a damaged file, and for one whose state cannot be
        taken out of it.
        """
        self._data, self._number = data, number
        self._model = model = model_table(data)
        self._codes = model.tables("operator_codes", _CODE)
        self._subgraphs = model.tables("subgraphs", _SUBGRAPH)
        if not 0 <= number < len(self._subgraphs):
            raise InvalidModel(f"the .tflite file has {len(self._subgraphs)} subgraphs, and no number {number}")
        self._graphs = [
            _EntryGraph(self._subgraphs.pick([n]), kinds_of(self._codes)) for n in range(len(self._subgraphs))
        ]
        self._main = self._graphs[number]
        self.inputs, self.outputs = (self._main.table.lists(side).values.tolist() for side in ("inputs", "outputs"))
        self.cells = self._main.cells
        self.made = self._main.made
        self.variables = [*self._named()]
        self._check()

    def _check(self) -> None:
        others = [graph for graph in self._graphs if graph is not self._main]
        if self._is_called and any(graph.cells for graph in others):
            raise InvalidModel("a branch or a loop of the .tflite file keeps a state of its own")
        if not {*self.cells}.isdisjoint([*self.inputs, *self.outputs]):
            raise InvalidModel("an input or output of the .tflite file is a variable")
        starts = {self._options(place).number(0, S32) for graph in self._graphs for place in graph.initialisers}
        if self.variables and len(starts) > 1:
            raise InvalidModel("several subgraphs of the .tflite file set its variables for the first time")

    @property
    def _is_called(self) -> bool:
        """True if a graph of the file may call another one."""
        return any(
            (graph.kinds == kind).any() for graph in self._graphs for kind in (StateOperator.WHILE, StateOperator.IF)
        )

    def _named(self) -> Iterator[NamedVariable]:
        """Yield the named variables of the whole file, each once. Raise InvalidModel where nothing tells its type."""
        found: dict[tuple[str, str], NamedVariable] = {}
        wanted = set[tuple[str, str]]()
        for graph in self._graphs:
            handles = {handle: self._name_of(options) for handle, options in graph.handles}
            wanted |= {*handles.values()}
            options = {self._name_of(place): place for _, place in graph.handles}
            for handle, tensor in graph.values:
                if handle in handles and handles[handle] not in found:
                    type_, shape = graph.kind_of(tensor)
                    name = handles[handle]
                    found[name] = NamedVariable(name, options[name], type_, shape)
        if unknown := wanted - found.keys():
            raise InvalidModel(f"nothing in the .tflite file tells the type of its variable {min(unknown)[1]!r:.100}")
        for variable in found.values():
            if variable.type not in DTYPES:
                raise InvalidModel(f"the variable {variable.name[1]!r:.100} has elements that are not carried")
            yield variable

    def _name_of(self, options: tuple[int, int]) -> tuple[str, str]:
        if not options[0]:
            return "", ""
        table = self._options(options[0])
        return table.text(0), table.text(1)

    def _options(self, place: int) -> FlatTable:
        return FlatTable(FileBytes(self._data.data, "the .tflite file is "), place)

    @property
    def has_state(self) -> bool:
        """True if a run leaves something behind for the next one."""
        return bool(self.cells or self.variables)

    @cached_property
    def data(self) -> NDArray[np.uint8]:
        """The bytes of the file."""
        if self._number == 0 and not self.has_state:
            return self._data
        count, own = len(self._main.table_tensors), len(self.variables)
        given, taken = range(count + own, count + 2 * own), range(count + 2 * own, count + 3 * own)
        first = [*self._handles(count), *self._assigned(count, given)]
        return self._file(
            [*self.inputs, *self.cells, *given],
            [*self.outputs, *self.cells, *taken],
            operators=self._operators(first, self._read(count, taken)),
        )

    @property
    def calls_once(self) -> bool:
        """True if its first run sets variables."""
        return bool(self._main.once.size)

    def initial(self) -> NDArray[np.uint8]:
        """Return a file without inputs, whose outputs are the values of the named variables before the first run."""
        count, own = len(self._main.table_tensors), len(self.variables)
        taken = range(count + 2 * own, count + 3 * own)
        operators = NewTables(self._main.once, more=[*self._handles(count), *self._read(count, taken)])
        return self._file([], [*taken], operators=operators)

    def _operators(self, first: Sequence[NewTable], last: Sequence[NewTable]) -> NewTables:
        """Return the operators: those that are called once, the first ones, the file's own, the last ones."""
        once, rest = self._main.once, self._main.rest
        room = np.zeros(len(first), np.int64)
        instead = {once.size + n: table for n, table in enumerate(first)}
        return NewTables(np.concatenate([once, room, rest]), instead, last)

    def _file(self, inputs: Sequence[int], outputs: Sequence[int], *, operators: NewTables) -> NDArray[np.uint8]:
        more = [new_tensor([], _RESOURCE) for _ in self.variables]
        more += [new_tensor(each.shape, each.type) for _ in range(2) for each in self.variables]
        graph: dict[int, Field] = {
            _SUBGRAPH["tensors"]: NewTables(self._main.table_tensors.places, more=more),
            _SUBGRAPH["inputs"]: NewNumbers(inputs),
            _SUBGRAPH["outputs"]: NewNumbers(outputs),
            _SUBGRAPH["operators"]: operators,
        }
        fields: dict[int, Field] = {
            0: Number("I", VERSION),
            MODEL["operator_codes"]: NewTables(self._codes.places, more=[_code(kind) for kind in _ADDED]),
            MODEL["subgraphs"]: NewTables(self._subgraphs.places, {0: NewTable(graph)}),
            MODEL["buffers"]: moved(self._model.tables("buffers", _BUFFER)),
        }
        front = Front([NewTable(fields)])
        begin = -(-front.nbytes // ALIGNMENT) * ALIGNMENT
        found = np.zeros(begin + self._data.nbytes, np.uint8)
        found[begin:] = self._data
        try:
            front.write(found, begin)
        except struct.error:
            raise InvalidModel("the .tflite file is damaged: a table lies outside of it") from None
        return found

    def _handles(self, first: int) -> list[NewTable]:
        return [
            self._operator(StateOperator.VAR_HANDLE, [], [first + n], variable.options)
            for n, variable in enumerate(self.variables)
        ]

    def _assigned(self, first: int, given: Sequence[int]) -> list[NewTable]:
        return [
            self._operator(StateOperator.ASSIGN_VARIABLE, [first + n, tensor], []) for n, tensor in enumerate(given)
        ]

    def _read(self, first: int, taken: Sequence[int]) -> list[NewTable]:
        return [self._operator(StateOperator.READ_VARIABLE, [first + n], [tensor]) for n, tensor in enumerate(taken)]

    def _operator(
        self, kind: StateOperator, inputs: Sequence[int], outputs: Sequence[int], options: tuple[int, int] = (0, 0)
    ) -> NewTable:
        fields: dict[int, Field] = {
            OPERATOR["opcode_index"]: Number("I", len(self._codes) + _ADDED.index(kind)),
            OPERATOR["inputs"]: NewNumbers(inputs),
            OPERATOR["outputs"]: NewNumbers(outputs),
        }
        if options[0]:
            fields[OPERATOR["builtin_options_type"]] = Number("B", options[1])
            fields[OPERATOR["builtin_options"]] = options[0]
        return NewTable(fields)


class _EntryGraph:
    """A subgraph, as far as its state is concerned."""

    def __init__(self, table: FlatColumns, codes: NDArray[np.int64]) -> None:
        self.table = table
        self.table_tensors = table.tables("tensors", TENSOR)
        self._operators = table.tables("operators", OPERATOR)
        numbers = self._operators.numbers("opcode_index", 4)
        if numbers.size and numbers.max() >= codes.size:
            raise InvalidModel("the .tflite file is damaged: it has no code for one of its operators")
        self.kinds = codes[numbers]
        self._given, self._made = (
            [each.tolist() for each in self._operators.lists(side)] if len(self._operators) else []
            for side in ("inputs", "outputs")
        )

    @property
    def cells(self) -> list[int]:
        """The tensors that keep their values."""
        found: list[int] = np.flatnonzero(self.table_tensors.numbers("is_variable", 1)).tolist()
        return found

    @property
    def made(self) -> set[int]:
        """The tensors that operators write."""
        return {tensor for outputs in self._made for tensor in outputs}

    def _of(self, *kinds: StateOperator) -> list[int]:
        found: list[int] = np.flatnonzero(np.isin(self.kinds, kinds)).tolist()
        return found

    @property
    def once(self) -> NDArray[np.int64]:
        """The places of its operators that are called once."""
        return self._operators.places[self._of(StateOperator.CALL_ONCE)]

    @property
    def rest(self) -> NDArray[np.int64]:
        """The places of all others."""
        found: NDArray[np.int64] = self._operators.places[self.kinds != StateOperator.CALL_ONCE]
        return found

    @property
    def initialisers(self) -> list[int]:
        """The places of the options of operators that are called once; they say which subgraph is."""
        targets = self._operators.targets("builtin_options")[self._of(StateOperator.CALL_ONCE)]
        return [place for place in targets.tolist() if place]

    @property
    def handles(self) -> list[tuple[int, tuple[int, int]]]:
        """The tensors that are handles, and the place and the kind of the options that name the variable."""
        places = self._operators.targets("builtin_options").tolist()
        kinds = self._operators.numbers("builtin_options_type", 1).tolist()
        return [(self._made[n][0], (places[n], kinds[n])) for n in self._of(StateOperator.VAR_HANDLE) if self._made[n]]

    @property
    def values(self) -> Iterator[tuple[int, int]]:
        """Yield each handle through which a variable is read or assigned, and the tensor with the value."""
        for n in self._of(StateOperator.READ_VARIABLE):
            if self._given[n] and self._made[n]:
                yield self._given[n][0], self._made[n][0]
        for n in self._of(StateOperator.ASSIGN_VARIABLE):
            if len(self._given[n]) > 1:
                yield self._given[n][0], self._given[n][1]

    def kind_of(self, tensor: int) -> tuple[int, Shape]:
        """Return the type and the sizes of a tensor. Raise InvalidModel."""
        if not 0 <= tensor < len(self.table_tensors):
            raise InvalidModel("the .tflite file is damaged: an operator names a tensor that is not there")
        one = self.table_tensors.pick([tensor])
        return int(one.numbers("type", 1)[0]), tuple(one.lists("shape").values.tolist())


def _code(kind: StateOperator) -> NewTable:
    return NewTable(
        {
            _CODE["deprecated_builtin_code"]: Number("b", min(kind, 127)),
            _CODE["version"]: Number("i", 1),
            _CODE["builtin_code"]: Number("i", kind),
        }
    )
