"""Read an untrusted flatbuffer with the accessors that its schema generates.

Generated accessors ask a *table* for everything: where a field lies, how long a vector is, what a number is. The table
of the flatbuffers package trusts the file. `CheckedTable` answers the same questions and checks every answer against
the bounds of the file, so whatever an accessor returns lies inside. A damaged file may list one long vector a million
times; each read is therefore charged to a budget of a few times the size of the file. Honest files touch each byte
about once.

    model = guarded(generated.Model(), FileBytes(data), position)
    for subgraph in Tables(model, "Subgraphs", "subgraph"):
        inputs = numbers(subgraph, "Inputs")
"""
# ruff: noqa: N802 - the generated code calls these names

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from driver.errors import ImportFailed
from driver.importers.file_bytes import Array, FileBytes

_U32, _S32, _U16 = struct.Struct("<I"), struct.Struct("<i"), struct.Struct("<H")
_TABLE = 8
"""Bytes of the smallest useful table."""
_MOST_TABLES = 1 << 16
"""Limit for one list."""


class CheckedTable:
    """One table of a file, with the methods that generated accessors call."""

    __slots__ = ("Bytes", "Pos", "_size", "_vtable")

    def __init__(self, data: FileBytes, position: int) -> None:
        self.Bytes, self.Pos = data, position
        self._vtable = position - data.unpack(_S32, position)
        self._size = data.unpack(_U16, self._vtable)

    def Offset(self, slot: int) -> int:
        """Offset of a vtable slot's field from the beginning of the table; 0 when the field is absent."""
        return int(self.Bytes.unpack(_U16, self._vtable + slot)) if slot + 2 <= self._size else 0

    def Indirect(self, position: int) -> int:
        """Return the position that the offset at `position` points to."""
        target = position + int(self.Bytes.unpack(_U32, position))
        self.Bytes.unpack(_U32, target)
        return target

    def Get(self, flags: Any, position: int) -> Any:
        """Read the number of a schema type at `position`."""
        return flags.py_type(self.Bytes.unpack(flags.packer_type, position))

    def String(self, position: int) -> bytes:
        """Read the string that the offset at `position` points to."""
        start = self.Indirect(position)
        length = self.Bytes.unpack(_U32, start)
        self.Bytes.reads.charge(length)
        return self.Bytes.part(start + 4, length).tobytes()

    def VectorLen(self, offset: int) -> int:
        """How many tables the vector at `offset` from the table lists."""
        start = self.Indirect(self.Pos + offset)
        length = int(self.Bytes.unpack(_U32, start))
        self.Bytes.part(start + 4, 4 * length)
        self.Bytes.reads.charge(4 * length)
        return length

    def Vector(self, offset: int) -> int:
        """The position of the first element of the vector at `offset` from the table."""
        return self.Indirect(self.Pos + offset) + 4

    def Union(self, table: Any, offset: int) -> None:
        """Point `table` at the one at `offset` from this table."""
        table.Bytes, table.Pos = self.Bytes, self.Indirect(self.Pos + offset)

    def GetVectorAsNumpy(self, flags: Any, offset: int) -> Array:
        """A view of the vector of numbers at `offset` from the table."""
        start, dtype = self.Indirect(self.Pos + offset), np.dtype(flags.packer_type.format)
        nbytes = int(self.Bytes.unpack(_U32, start)) * dtype.itemsize
        self.Bytes.reads.charge(nbytes)
        return self.Bytes.part(start + 4, nbytes).view(dtype)


def guarded(table: Any, data: FileBytes, position: int) -> Any:
    """Attach a generated `table` accessor to `position`, with every answer checked."""
    data.reads.charge(_TABLE)
    table._tab = CheckedTable(data, position)
    return table


def inner(owner: Any, field: str, *index: int) -> Any:
    """The table in `field` of another, or element `index` of its vector of tables; None when absent."""
    found = getattr(owner, field)(*index)
    return None if found is None else guarded(found, found._tab.Bytes, found._tab.Pos)


class Tables(Sequence[Any]):
    """The tables that a field lists, read lazily; `word` names them in error messages."""

    def __init__(self, owner: Any, field: str, word: str) -> None:
        self._owner, self._field, self._word = owner, field, word
        self._count = getattr(owner, f"{field}Length")()
        if self._count > _MOST_TABLES:
            raise ImportFailed(f"{self._count} {word}s; the limit is {_MOST_TABLES}")

    def __len__(self) -> int:
        return int(self._count)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise ImportFailed(f"{self._word} {index} does not exist; there are {self._count}")
        return inner(self._owner, self._field, index)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(self._count))


def numbers(owner: Any, field: str) -> Array:
    """The numbers that a field lists, as a view of the file; an empty array when absent."""
    found = getattr(owner, f"{field}AsNumpy")()
    return found if isinstance(found, np.ndarray) else np.zeros(0, np.int32)


def integers(owner: Any, field: str) -> tuple[int, ...]:
    """Same as `numbers`, as Python integers."""
    return tuple(numbers(owner, field).tolist())


def text(owner: Any, field: str) -> str:
    """The string in a field; empty when absent."""
    return (getattr(owner, field)() or b"").decode("utf-8", "replace")
