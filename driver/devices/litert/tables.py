"""Tables of a flatbuffer, read in columns: one field of a thousand tables at a time, each place checked.

Generated accessors read one field of one table at a time, which takes longer than LiteRT needs to load the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driver.nn import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    Places = NDArray[np.int64]

_VTABLE = 4  # bytes of its own sizes, before the offsets of fields


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
        """The values of each table."""
        return iter(np.split(self.values, np.cumsum(self.counts)[:-1]))


class TableBytes:
    """The bytes of a file. All its reads raise InvalidModel for a place outside of them."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data = data
        self._words = {
            size: data[: data.size - data.size % size].view(f"<u{size}") if size > 1 else data for size in (1, 2, 4, 8)
        }
        self._left = data.size  # elements of vectors that may still be read: none is told twice in an honest file

    def read(self, places: Places, size: int) -> Places:
        """The unsigned numbers of `size` bytes at these places, none of which is negative."""
        try:
            return self._words[size][places // size].astype(np.int64)
        except IndexError:
            raise InvalidModel("the .tflite file is damaged: a table lies outside of it") from None

    def spend(self, count: int) -> None:
        """Charges `count` elements of vectors."""
        self._left -= count
        if self._left < 0:
            raise InvalidModel("the .tflite file is damaged: its lists overlap")


class Tables:
    """Tables of one kind. `fields`: the places of their fields in the schema, by name."""

    def __init__(self, file: TableBytes, places: Places, fields: Mapping[str, int]) -> None:
        self._file, self.places, self._fields = file, places, fields
        self._vtables = places - _signed(file.read(places, 4))
        if places.size and self._vtables.min() < 0:
            raise InvalidModel("the .tflite file is damaged: a table lies outside of it")
        self._sizes = file.read(self._vtables, 2)

    def __len__(self) -> int:
        return self.places.size

    def field(self, name: str) -> Places:
        """Where the field lies in each table; 0 where the table has none."""
        offset = _VTABLE + 2 * self._fields[name]
        has = self._sizes >= offset + 2
        found = self._file.read(np.where(has, self._vtables + offset, 0), 2)
        has &= found > 0
        return np.where(has, self.places + found, 0)

    def numbers(self, name: str, size: int, default: int = 0) -> Places:
        """The unsigned number of `size` bytes in that field."""
        places = self.field(name)
        return np.where(places > 0, self._file.read(places, size), default)

    def targets(self, name: str) -> Places:
        """Where the table or vector lies that the field refers to; 0 where there is none."""
        places = self.field(name)
        return np.where(places > 0, places + self._file.read(places, 4), 0)

    def lists(self, name: str) -> Lists:
        """The vector of signed 32-bit numbers in that field."""
        values, _, counts = self._elements(name)
        return Lists(_signed(values), counts)

    def counts(self, name: str) -> Places:
        """How many elements the vector in that field has."""
        return self._counts(self.targets(name))

    def _counts(self, targets: Places) -> Places:
        return np.where(targets > 0, self._file.read(targets, 4), 0)

    def tables(self, name: str, fields: Mapping[str, int]) -> Tables:
        """The tables in the vectors in that field, those of all tables end to end."""
        offsets, places, _ = self._elements(name)
        return Tables(self._file, places + offsets, fields)

    def text(self, name: str, number: int) -> str:
        """The text in that field of one table."""
        place = int(self.targets(name)[number])
        count = int(self._file.read(np.array([place]), 4)[0]) if place else 0
        self._file.spend(count)
        return self._file.data[place + 4 : place + 4 + count].tobytes().decode(errors="replace")

    def pick(self, numbers: Any) -> Tables:
        """Some of them."""
        return Tables(self._file, self.places[numbers], self._fields)

    def _elements(self, name: str) -> tuple[Places, Places, Places]:
        """The elements of the vectors, of four bytes each; their places; how many each vector has."""
        targets = self.targets(name)
        counts = self._counts(targets)
        self._file.spend(int(counts.sum()))
        starts = np.repeat(targets + 4 - 4 * (np.cumsum(counts) - counts), counts)
        places = starts + 4 * np.arange(starts.size)
        return self._file.read(places, 4), places, counts


def root(file: TableBytes, fields: Mapping[str, int]) -> Tables:
    """The table that a file consists of."""
    return Tables(file, file.read(np.array([0]), 4), fields)


def _signed(values: Places) -> Places:
    return values.astype(np.uint32).view(np.int32).astype(np.int64)
