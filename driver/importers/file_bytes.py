"""A model file in memory: mapped instead of read, and every access to it checked."""

import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driver.errors import ImportFailed

Array = NDArray[Any]
_FREE = 1 << 16
"""Bytes that even the smallest file may touch."""


def map_file(file: Path) -> memoryview:
    """Map a file read-only; `ImportFailed` when it is empty."""
    with file.open("rb") as opened:
        return map_descriptor(opened.fileno(), file.name)


def map_descriptor(descriptor: int, name: str) -> memoryview:
    """Map an open file, which may be closed afterwards. name: for the error message."""
    if os.fstat(descriptor).st_size == 0:
        raise ImportFailed(f"{name!r} is empty")
    return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))


class ByteBudget:
    """Bytes that may still be touched, or made."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes + _FREE

    def extend(self, nbytes: int) -> None:
        """Grow by `nbytes`, for a further file."""
        self._left += nbytes

    def charge(self, nbytes: int) -> None:
        """Raise `ImportFailed` when the file makes the reader touch or make much more than the file holds."""
        self._left -= nbytes
        if self._left < 0:
            raise ImportFailed("damaged: the file uses the same bytes repeatedly, or asks for far more than it holds")


class FileBytes:
    """The bytes of an untrusted file.

    reads: budget for what is read of it. makes: budget for what is made from it.
    """

    def __init__(self, data: memoryview) -> None:
        self.data = data.cast("B")
        self._start = np.frombuffer(self.data, np.uint8).ctypes.data
        self.reads, self.makes = ByteBudget(4 * len(data)), ByteBudget(8 * len(data))

    def part(self, start: int, nbytes: int) -> Array:
        """A view of `nbytes` bytes from `start` on."""
        if start < 0 or nbytes < 0 or start + nbytes > len(self.data):
            raise ImportFailed(f"damaged: {nbytes} bytes at {start} lie outside the file of {len(self.data)} bytes")
        return np.frombuffer(self.data, np.uint8, nbytes, start)

    def offset(self, part: Array) -> int:
        """Offset of a view of the file in it."""
        return int(part.ctypes.data - self._start)

    def unpack(self, form: struct.Struct, position: int) -> Any:
        """Read the number at `position`."""
        if not 0 <= position <= len(self.data) - form.size:
            raise ImportFailed(f"damaged: position {position} lies outside the file of {len(self.data)} bytes")
        return form.unpack_from(self.data, position)[0]
