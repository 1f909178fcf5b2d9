"""Reading a flatbuffer that nobody vouches for, with the accessors that its schema generates.

Generated accessors ask a *table* for everything: where a field lies, how long a vector is, what a number is. The one of
the flatbuffers package believes the file. `Guarded` answers the same questions and checks every answer against the
bounds of the file, so that whatever an accessor returns lies inside. Since a damaged file may list one long vector a
million times, each read is also charged to an account of a few times the size of the file; honest files touch each byte
about once.

    model = guarded(generated.Model(), Bytes(data), position)
    for subgraph in Tables(model, "Subgraphs", "subgraph"):
        inputs = numbers(subgraph, "Inputs")
"""
# ruff: noqa: N802 - the generated code calls these names

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driver.errors import ImportFailed

Array = NDArray[Any]
_U32, _S32, _U16 = struct.Struct("<I"), struct.Struct("<i"), struct.Struct("<H")
_FREE = 1 << 16
"""Bytes that even the smallest file may touch."""
_TABLE = 8
"""Bytes of the smallest table that says something."""
_MOST_TABLES = 1 << 16
"""In one list."""


class Account:
    """So many bytes may still be touched, or made."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes + _FREE

    def extend(self, nbytes: int) -> None:
        """So many more, for a further file."""
        self._left += nbytes

    def charge(self, nbytes: int) -> None:
        """`ImportFailed` when the file makes the reader touch or make much more than it holds."""
        self._left -= nbytes
        if self._left < 0:
            raise ImportFailed(
                "damaged: the same bytes are used over and over, or much more is asked for than it holds"
            )


class Bytes:
    """The file: `reads` is what may still be read of it, `makes` what may still be made from it."""

    def __init__(self, data: memoryview) -> None:
        self.data = data.cast("B")
        self._start = np.frombuffer(self.data, np.uint8).ctypes.data
        self.reads, self.makes = Account(4 * len(data)), Account(8 * len(data))

    def part(self, start: int, nbytes: int) -> Array:
        """A view of `nbytes` bytes from `start` on."""
        if start < 0 or nbytes < 0 or start + nbytes > len(self.data):
            raise ImportFailed(f"damaged: {nbytes} bytes at {start} lie outside the {len(self.data)} of the file")
        return np.frombuffer(self.data, np.uint8, nbytes, start)

    def offset(self, part: Array) -> int:
        """Where a view of the file begins in it."""
        return int(part.ctypes.data - self._start)

    def unpack(self, form: struct.Struct, position: int) -> Any:
        """The number at `position`."""
        if not 0 <= position <= len(self.data) - form.size:
            raise ImportFailed(f"damaged: position {position} lies outside the {len(self.data)} bytes of the file")
        return form.unpack_from(self.data, position)[0]


class Guarded:
    """One table of a file, as generated accessors expect it."""

    __slots__ = ("Bytes", "Pos", "_size", "_vtable")

    def __init__(self, data: Bytes, position: int) -> None:
        self.Bytes, self.Pos = data, position
        self._vtable = position - data.unpack(_S32, position)
        self._size = data.unpack(_U16, self._vtable)

    def Offset(self, slot: int) -> int:
        """Where the field of a vtable slot lies from the beginning of the table; 0 when it is not there."""
        return int(self.Bytes.unpack(_U16, self._vtable + slot)) if slot + 2 <= self._size else 0

    def Indirect(self, position: int) -> int:
        """The position that the offset at `position` points to."""
        target = position + int(self.Bytes.unpack(_U32, position))
        self.Bytes.unpack(_U32, target)
        return target

    def Get(self, flags: Any, position: int) -> Any:
        """The number of a schema type at `position`."""
        return flags.py_type(self.Bytes.unpack(flags.packer_type, position))

    def String(self, position: int) -> bytes:
        """The string that the offset at `position` points to."""
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
        """Let `table` be the one at `offset` from this table."""
        table.Bytes, table.Pos = self.Bytes, self.Indirect(self.Pos + offset)

    def GetVectorAsNumpy(self, flags: Any, offset: int) -> Array:
        """A view of the vector of numbers at `offset` from the table."""
        start, dtype = self.Indirect(self.Pos + offset), np.dtype(flags.packer_type.format)
        nbytes = int(self.Bytes.unpack(_U32, start)) * dtype.itemsize
        self.Bytes.reads.charge(nbytes)
        return self.Bytes.part(start + 4, nbytes).view(dtype)


def guarded(table: Any, data: Bytes, position: int) -> Any:
    """A generated `table` at `position`, with every answer checked."""
    data.reads.charge(_TABLE)
    table._tab = Guarded(data, position)
    return table


def inner(owner: Any, field: str, *index: int) -> Any:
    """The table in `field` of another, or element `index` of its vector of tables; None when it is not there."""
    found = getattr(owner, field)(*index)
    return None if found is None else guarded(found, found._tab.Bytes, found._tab.Pos)


class Tables(Sequence[Any]):
    """The tables that a field lists, each read when it is asked for; `word` says in errors what they are."""

    def __init__(self, owner: Any, field: str, word: str) -> None:
        self._owner, self._field, self._word = owner, field, word
        self._count = getattr(owner, f"{field}Length")()
        if self._count > _MOST_TABLES:
            raise ImportFailed(f"{self._count} {word}s; {_MOST_TABLES} can be read")

    def __len__(self) -> int:
        return int(self._count)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise ImportFailed(f"{self._word} {index} does not exist, there are {self._count}")
        return inner(self._owner, self._field, index)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(self._count))


def numbers(owner: Any, field: str) -> Array:
    """The numbers that a field lists, as a view of the file; none when it is not there."""
    found = getattr(owner, f"{field}AsNumpy")()
    return found if isinstance(found, np.ndarray) else np.zeros(0, np.int32)


def integers(owner: Any, field: str) -> tuple[int, ...]:
    """The same as Python integers."""
    return tuple(numbers(owner, field).tolist())


def text(owner: Any, field: str) -> str:
    """The string in a field; empty when it is not there."""
    return (getattr(owner, field)() or b"").decode("utf-8", "replace")
