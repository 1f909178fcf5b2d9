"""Flatbuffers: the tables of an untrusted file, each place checked against the bounds of the file.

`FlatTable` reads one table at a time. `FlatColumns` reads one field of a thousand tables at a time, for files whose
tables take longer to read one by one than the runtime needs to load them. A damaged file may list one long vector a
million times; each read is therefore charged to a budget of a few times the size of the file.

    model = root(FlatBytes(data))
    for subgraph in model.tables(FIELDS["Model"]["subgraphs"]):
        inputs = subgraph.array(FIELDS["SubGraph"]["inputs"], "<i4")
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from driver.formats.file_bytes import Array, FileBytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Places = NDArray[np.int64]

U8, U16, U32, S32 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<i")
_SMALLEST = 8
"""Bytes of the smallest useful table."""
_VTABLE = 4
"""Bytes of a vtable's own sizes, before the offsets of fields."""


class FlatTable:
    """One table: its fields by their places in the schema, each checked against the bounds of the file."""

    __slots__ = ("_size", "_vtable", "data", "position")

    def __init__(self, data: FileBytes, position: int) -> None:
        data.reads.charge(_SMALLEST)
        self.data, self.position = data, position
        self._vtable = position - data.unpack(S32, position)
        self._size = data.unpack(U16, self._vtable)

    def offset(self, slot: int) -> int:
        """Return how far the field of a vtable's slot lies behind the table; 0 when the table does not have it."""
        return int(self.data.unpack(U16, self._vtable + slot)) if slot + 2 <= self._size else 0

    def place(self, field: int) -> int:
        """Return the position of a field's content; 0 when the table does not have it."""
        offset = self.offset(_VTABLE + 2 * field)
        return self.position + offset if offset else 0

    def target(self, place: int) -> int:
        """Return the position to which the offset at `place` leads."""
        target = place + int(self.data.unpack(U32, place))
        self.data.unpack(U32, target)
        return target

    def vector(self, place: int, dtype: str) -> Array:
        """Return a view of the list of numbers to which the offset at `place` leads."""
        start = self.target(place)
        nbytes = int(self.data.unpack(U32, start)) * np.dtype(dtype).itemsize
        self.data.reads.charge(nbytes)
        return self.data.part(start + 4, nbytes).view(dtype)

    def number(self, field: int, form: struct.Struct, default: int = 0) -> int:
        """Return a number."""
        place = self.place(field)
        return int(self.data.unpack(form, place)) if place else default

    def table(self, field: int) -> FlatTable | None:
        """Another table; None when absent."""
        place = self.place(field)
        return FlatTable(self.data, self.target(place)) if place else None

    def array(self, field: int, dtype: str) -> Array:
        """Return a list of numbers, or the bytes of a text, as a view of the file; empty when absent."""
        place = self.place(field)
        return self.vector(place, dtype) if place else np.zeros(0, dtype)

    def text(self, field: int) -> str:
        """Return a text; empty when absent."""
        return self.array(field, "u1").tobytes().decode("utf-8", "replace")

    def texts(self, field: int) -> list[str]:
        """Return a list of texts; empty when absent."""
        listed = self.tables(field)
        places = (listed.entry(n)[0] for n in range(len(listed)))
        return [self.vector(place, "u1").tobytes().decode("utf-8", "replace") for place in places]

    def tables(self, field: int) -> FlatTables:
        """Return a list of tables."""
        place = self.place(field)
        return FlatTables(self.data, self.target(place) if place else 0)


class FlatTables:
    """A list of tables, each read when it is asked for."""

    def __init__(self, data: FileBytes, start: int) -> None:
        self._data, self._start = data, start
        self._count = int(data.unpack(U32, start)) if start else 0

    def __len__(self) -> int:
        return self._count

    def entry(self, index: int) -> tuple[int, int]:
        """Return where an entry of the list is, and the table to which it leads."""
        if not 0 <= index < self._count:
            raise self._data.damaged(f"table {index} does not exist; there are {self._count}")
        place = self._start + 4 + 4 * index
        return place, place + self._data.unpack(U32, place)

    def __getitem__(self, index: int) -> FlatTable:
        return FlatTable(self._data, self.entry(index)[1])

    def __iter__(self) -> Iterator[FlatTable]:
        return (self[index] for index in range(self._count))


def root(data: FileBytes) -> FlatTable:
    """Return the table that a file consists of."""
    return FlatTable(data, data.unpack(U32, 0))


class Lists(NamedTuple):
    """One vector of numbers for each table, end to end."""

    values: Places
    counts: Places  #: how many of the values each table has

    @property
    def owners(self) -> Places:
        """For each value the number of its table."""
        return np.repeat(np.arange(self.counts.size), self.counts)

    def at(self, tables: Places, number: int) -> list[int]:
        """Value `number` of each of these tables, which have as many."""
        found: list[int] = self.values[(np.cumsum(self.counts) - self.counts)[tables] + number].tolist()
        return found

    def __iter__(self) -> Iterator[Places]:
        """Yield the values of each table."""
        return iter(np.split(self.values, np.cumsum(self.counts)[:-1]))


class ColumnBytes(FileBytes):
    """The bytes of a file, read at many places at once."""

    def __init__(self, data: memoryview, subject: str = "") -> None:
        super().__init__(data, subject)
        whole = np.frombuffer(self.data, np.uint8)
        self._words: dict[int, Array] = {
            size: whole[: whole.size - whole.size % size].view(f"<u{size}") for size in (1, 2, 4, 8)
        }

    def read(self, places: Places, size: int) -> Places:
        """Read the unsigned numbers of `size` bytes at these places, none of which is negative."""
        try:
            return self._words[size][places // size].astype(np.int64)
        except IndexError:
            raise self.damaged("a table lies outside of it") from None


class FlatColumns:
    """Tables of one kind. `fields`: the places of their fields in the schema, by name."""

    def __init__(self, file: ColumnBytes, places: Places, fields: Mapping[str, int]) -> None:
        self._file, self.places, self._fields = file, places, fields
        self._vtables = places - _signed(file.read(places, 4))
        if places.size and self._vtables.min() < 0:
            raise file.damaged("a table lies outside of it")
        self._sizes = file.read(self._vtables, 2)

    def __len__(self) -> int:
        return self.places.size

    def field(self, name: str) -> Places:
        """Return where the field lies in each table; 0 where the table has none."""
        offset = _VTABLE + 2 * self._fields[name]
        has = self._sizes >= offset + 2
        found = self._file.read(np.where(has, self._vtables + offset, 0), 2)
        has &= found > 0
        return np.where(has, self.places + found, 0)

    def numbers(self, name: str, size: int, default: int = 0) -> Places:
        """Return the unsigned number of `size` bytes in that field."""
        places = self.field(name)
        return np.where(places > 0, self._file.read(places, size), default)

    def targets(self, name: str) -> Places:
        """Return where the table or vector lies that the field refers to; 0 where there is none."""
        places = self.field(name)
        return np.where(places > 0, places + self._file.read(places, 4), 0)

    def lists(self, name: str) -> Lists:
        """Return the vector of signed 32-bit numbers in that field."""
        values, _, counts = self._elements(name)
        return Lists(_signed(values), counts)

    def counts(self, name: str) -> Places:
        """Return how many elements the vector in that field has."""
        return self._counts(self.targets(name))

    def _counts(self, targets: Places) -> Places:
        return np.where(targets > 0, self._file.read(targets, 4), 0)

    def tables(self, name: str, fields: Mapping[str, int]) -> FlatColumns:
        """Return the tables in the vectors in that field, those of all tables end to end."""
        offsets, places, _ = self._elements(name)
        return FlatColumns(self._file, places + offsets, fields)

    def text(self, name: str, number: int) -> str:
        """Return the text in that field of one table."""
        place = int(self.targets(name)[number])
        count = int(self._file.read(np.array([place]), 4)[0]) if place else 0
        self._file.reads.charge(count)
        return self._file.part(place + 4, count).tobytes().decode(errors="replace")

    def pick(self, numbers: Any) -> FlatColumns:
        """Return some of the tables."""
        return FlatColumns(self._file, self.places[numbers], self._fields)

    def _elements(self, name: str) -> tuple[Places, Places, Places]:
        """Return the elements of the vectors, of four bytes each; their places; how many each vector has."""
        targets = self.targets(name)
        counts = self._counts(targets)
        self._file.reads.charge(4 * int(counts.sum()))
        starts = np.repeat(targets + 4 - 4 * (np.cumsum(counts) - counts), counts)
        places = starts + 4 * np.arange(starts.size)
        return self._file.read(places, 4), places, counts


def root_column(file: ColumnBytes, fields: Mapping[str, int]) -> FlatColumns:
    """Return the table that a file consists of."""
    return FlatColumns(file, file.read(np.array([0]), 4), fields)


def _signed(values: Places) -> Places:
    return values.astype(np.uint32).view(np.int32).astype(np.int64)
