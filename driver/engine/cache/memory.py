"""Private memory into which files are read once, so that what is checked is what is used."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from numpy.typing import NDArray

_LARGE = 2**21
"""Bytes from which huge pages are requested: filling them takes a third of the time."""


class PrivateMemory:
    """A block of consecutive arrays of given sizes, each at the start of a page, to be filled once."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Make memory for parts of these sizes. Raise OSError, ValueError if there is not enough memory."""
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._mapping = mmap.mmap(-1, max(end, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if end >= _LARGE:
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        memory: Any = np.frombuffer(self._mapping, np.uint8)
        self.arrays: list[NDArray[np.uint8]] = [
            memory[start : start + size] for start, size in zip(starts, sizes, strict=True)
        ]

    def fill(self, sources: Iterable[tuple[int, int]]) -> None:
        """Read each array from (descriptor, offset). Raise OSError if a file is too short."""
        for array, (fd, offset) in zip(self.arrays, sources, strict=True):
            done = 0
            while done < array.nbytes:
                count = os.preadv(fd, [array.data[done:]], offset + done)
                if not count:
                    raise OSError("a file has become shorter")
                done += count


class ModelMemory:
    """The bytes of a model in private memory, as `driver.protocol.model_codec.decode` reads them."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        array.flags.writeable = False
        self._array = array

    @property
    def nbytes(self) -> int:
        """The length in bytes."""
        return self._array.nbytes

    @property
    def occupied(self) -> dict[Hashable, int]:
        """The memory by its address: it is private."""
        return {("private", self._array.ctypes.data): self._array.nbytes}

    def asarray(self) -> NDArray[np.uint8]:
        """Return a read-only view."""
        return self._array
