"""Tables to put in front of a flatbuffer, whose own tables they refer to.

Offsets in a flatbuffer are positive, so whatever lies in front can refer to what lies behind: a file gets other inputs,
say, while all the rest of it, weights above all, stays where it is, in pages that cannot be written.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Field: TypeAlias = "int | Number | NewTable | NewTables | NewNumbers"

IDENTIFIER = b"TFL3"
_HEAD = 8
_GRID = 8  # bytes: what any field is aligned to


class Number(NamedTuple):
    """A number in a table; `form` as struct has it. is_place: it counts bytes from the beginning of the file."""

    form: str
    value: int
    is_place: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes that it takes up."""
        return max(4, struct.calcsize(f"<{self.form}"))


class NewTable:
    """A table of numbers, new tables and vectors, and old ones: these by their place in the file, 0 for none."""

    def __init__(self, fields: Mapping[int, Field]) -> None:
        self._fields = {slot: field for slot, field in fields.items() if not (isinstance(field, int) and field == 0)}
        slots = max(self._fields, default=-1) + 1
        self._vtable = -(-(4 + 2 * slots + 4) // _GRID) * _GRID - 4  # the fields behind it then lie on the grid
        wide = sorted(self._fields, key=lambda slot: -self._size(slot))
        self._places, end = dict[int, int](), 4
        for slot in wide:
            self._places[slot] = end
            end += self._size(slot)
        self._slots, self._end = slots, end
        self.nbytes = self._vtable + end

    def _size(self, slot: int) -> int:
        field = self._fields[slot]
        return field.nbytes if isinstance(field, Number) else 4

    @property
    def begin(self) -> int:
        """The place where the table begins, behind what is about it."""
        return self._vtable

    def children(self) -> Iterator[Any]:
        """Yield new things that it refers to."""
        return (field for field in self._fields.values() if not isinstance(field, int | Number))

    def write(self, front: NDArray[np.uint8], at: int, places: Mapping[int, int], behind: int) -> None:
        """Write it at `at`. `places`: where new things lie, by identity; `behind`: where the file begins."""
        table = at + self._vtable
        vtable = [4 + 2 * self._slots, self._end, *(self._places.get(slot, 0) for slot in range(self._slots))]
        struct.pack_into(f"<{len(vtable)}H", front.data, at, *vtable)
        struct.pack_into("<i", front.data, table, self._vtable)
        for slot, field in self._fields.items():
            place = table + self._places[slot]
            if isinstance(field, Number):
                value = field.value + (behind if field.is_place else 0)
                struct.pack_into(f"<{field.form}", front.data, place, value)
            else:
                target = behind + field if isinstance(field, int) else places[id(field)]
                struct.pack_into("<I", front.data, place, target - place)


class NewTables:
    """A vector of tables: old ones, by their places in the file, some of them replaced by new ones, and more new ones
    at its end.
    """

    def __init__(
        self, old: NDArray[np.int64], instead: Mapping[int, NewTable] | None = None, more: Sequence[NewTable] = ()
    ) -> None:
        self._old = old
        self._new = dict(instead or {}) | {old.size + n: table for n, table in enumerate(more)}
        self._count = old.size + len(more)
        self.begin, self.nbytes = 0, 4 + 4 * self._count

    def children(self) -> Iterator[NewTable]:
        """Yield the new tables."""
        return iter(self._new.values())

    def write(self, front: NDArray[np.uint8], at: int, places: Mapping[int, int], behind: int) -> None:
        """Write it, as NewTable does."""
        targets = np.zeros(self._count, np.int64)
        targets[: self._old.size] = self._old + behind
        for number, table in self._new.items():
            targets[number] = places[id(table)]
        offsets = targets - (at + 4 + 4 * np.arange(self._count))
        words = np.concatenate([[self._count], offsets]).astype(np.uint32)
        front[at : at + self.nbytes] = words.view(np.uint8)


class NewNumbers:
    """A vector of signed 32-bit numbers."""

    def __init__(self, values: Sequence[int] | NDArray[np.int64]) -> None:
        self._words = np.array([len(values), *values], np.int32)
        self.begin, self.nbytes = 0, self._words.nbytes

    def children(self) -> Iterator[NewTable]:
        """Return None: it has none."""
        return iter(())

    def write(self, front: NDArray[np.uint8], at: int, places: Mapping[int, int], behind: int) -> None:
        """Write it, as NewTable does."""
        del places, behind
        front[at : at + self.nbytes] = self._words.view(np.uint8)


class Front:
    """Tables laid out, from address 0 on. Each root begins a flatbuffer of its own."""

    def __init__(self, roots: Sequence[NewTable]) -> None:
        self._things: list[Any] = list(roots)
        for thing in self._things:  # grows meanwhile: what a thing refers to lies behind it
            self._things += thing.children()
        self._at, end = list[int](), _HEAD
        for thing in self._things:
            self._at.append(end)
            end += -(-thing.nbytes // _GRID) * _GRID
        self._places = {id(t): at + t.begin for t, at in zip(self._things, self._at, strict=True)}
        self.roots = [self._places[id(table)] for table in roots]
        self.nbytes = end

    def write(self, front: NDArray[np.uint8], behind: int) -> None:
        """Write everything, for the first root; `front` is zeroed. `behind`: where the file begins."""
        struct.pack_into("<I4s", front.data, 0, self.roots[0], IDENTIFIER)
        for thing, at in zip(self._things, self._at, strict=True):
            thing.write(front, at, self._places, behind)
