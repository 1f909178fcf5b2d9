"""Memory that a binding's temporaries and kernels share: what is not needed at the same time lies in the same place."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .types import MAX_BYTES

Array = NDArray[np.uint8]

ALIGN = 64
"""Bytes of a cache line, on which everything begins."""

_CHUNK = 1 << 16


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _own(nbytes: int) -> Array:
    raw = np.zeros(nbytes + ALIGN, np.uint8)
    return raw[-raw.ctypes.data % ALIGN :][:nbytes]


source: ContextVar[Callable[[int], Array]] = ContextVar("source", default=_own)
"""Allocates for `memory`; a thread may set its own, to count what it takes on behalf of a client."""


on_accelerator: ContextVar[Callable[[int], object]] = ContextVar("on_accelerator", default=lambda _: None)
"""Counts memory of an accelerator that a binding is about to take; a thread may set its own, for a client. What it
returns gives that back with its last reference. Raises StatusError when the client may have no more.
"""


def memory(nbytes: int) -> Array:
    """Return zeros on a cache line; what is never touched costs nothing. Raise StatusError if there may be no more."""
    return source.get()(nbytes)


class Layout:
    """Offsets in one block of memory, given out and taken back: first fit, so that what is free is used again."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._gaps: list[tuple[int, int]] = []  # (begin, end), ascending and apart

    def take(self, nbytes: int) -> int:
        """Return the offset of that many bytes."""
        size = _aligned(max(nbytes, 1))
        for n, (begin, end) in enumerate(self._gaps):
            if end - begin >= size:
                self._gaps[n : n + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        begin = self._gaps.pop()[0] if self._gaps and self._gaps[-1][1] == self.nbytes else self.nbytes
        self.nbytes = begin + size
        return begin

    def give_back(self, offset: int, nbytes: int) -> None:
        """They may be taken again."""
        gaps = sorted([*self._gaps, (offset, offset + _aligned(max(nbytes, 1)))])
        self._gaps = gaps[:1]
        for begin, end in gaps[1:]:
            if begin == self._gaps[-1][1]:
                self._gaps[-1] = self._gaps[-1][0], end
            else:
                self._gaps.append((begin, end))


def lay_out(
    operations: Iterable[tuple[Sequence[int], Sequence[int]]],
    sizes: dict[int, int],
    pace: Callable[[], object] = lambda: None,
) -> tuple[dict[int, int], int]:
    """Return the offsets for the values of `sizes` (in bytes), and the size of the block.

    operations: what each reads and writes, in order. A value is there from its writer until its last reader.
    pace: called after each.
    """
    listed = list(operations)
    last = {value: n for n, (reads, writes) in enumerate(listed) for value in (*writes, *reads)}
    layout = Layout()
    places: dict[int, int] = {}
    for n, (reads, writes) in enumerate(listed):
        places |= {value: layout.take(sizes[value]) for value in writes if value in sizes}
        for value in {*reads, *writes}:
            if last[value] == n and value in places:
                layout.give_back(places[value], sizes[value])
        pace()
    return places, layout.nbytes


class Scratch:
    """Arrays of kernels: those of one operation lie apart from each other, and where those of the others lie."""

    def __init__(self) -> None:
        self._chunks: list[Array] = []
        self.begin()

    def begin(self) -> None:
        """Begin the next operation, which may have the same memory."""
        self._chunk = self._used = 0

    def array(self, shape: Sequence[int], dtype: DTypeLike, *, zeros: bool = False) -> NDArray[Any]:
        """Uninitialised and valid until the next operation runs; or zeros, and private."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size > 4 * MAX_BYTES:
            raise ValueError(f"scratch of dimensions {list(shape)} is too large")
        if zeros:
            return memory(size).view(dtype).reshape(shape)
        room = self._room(_aligned(size))
        return room[:size].view(dtype).reshape(shape)

    def _room(self, size: int) -> Array:
        while self._chunk < len(self._chunks):
            room = self._chunks[self._chunk][self._used :]
            if room.nbytes >= size:
                self._used += size
                return room
            self._chunk, self._used = self._chunk + 1, 0
        self._chunks.append(memory(max(size, _CHUNK)))
        self._used = size
        return self._chunks[-1]
