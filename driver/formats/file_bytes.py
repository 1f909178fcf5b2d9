"""The bytes of an untrusted file: every access is checked, and charged to a budget."""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driver.errors import ImportFailed, InvalidModel

Array = NDArray[Any]
_FREE = 1 << 16
"""Bytes that even the smallest file may touch."""


class DamagedFile(ImportFailed, InvalidModel):
    """The bytes of a model file break its format: an import fails, and a device refuses the model."""


class BudgetSpent(DamagedFile):
    """The file causes more work than its size allows; nothing further is read of it."""


class ByteBudget:
    """Bytes that may still be touched, or made."""

    def __init__(self, nbytes: int, subject: str = "") -> None:
        self._left, self._subject = nbytes + _FREE, subject

    def extend(self, nbytes: int) -> None:
        """Grow by `nbytes`, for a further file."""
        self._left += nbytes

    def affords(self, nbytes: int) -> bool:
        """Return True if half of what is left is enough for `nbytes`."""
        return 2 * nbytes <= self._left

    def charge(self, nbytes: int) -> None:
        """Raise `BudgetSpent` when the file makes the reader touch or make much more than the file holds."""
        self._left -= nbytes
        if self._left < 0:
            reason = "damaged: the file uses the same bytes repeatedly, or asks for far more than it holds"
            raise BudgetSpent(self._subject + reason)


class FileBytes:
    """The bytes of an untrusted file. All reads raise DamagedFile for a place outside of them.

    subject: the beginning of error messages, such as "the .onnx file is ".
    reads: budget for what is read of it. makes: budget for what is made from it.
    """

    def __init__(self, data: memoryview, subject: str = "") -> None:
        self.data, self._subject = data.cast("B"), subject
        self._start = np.frombuffer(self.data, np.uint8).ctypes.data
        self.reads, self.makes = ByteBudget(4 * len(data), subject), ByteBudget(8 * len(data), subject)

    def damaged(self, reason: str) -> DamagedFile:
        """Return the error for a damaged file."""
        return DamagedFile(f"{self._subject}damaged: {reason}")

    def part(self, start: int, nbytes: int) -> Array:
        """Return a view of `nbytes` bytes from `start` on."""
        if start < 0 or nbytes < 0 or start + nbytes > len(self.data):
            raise self.damaged(f"{nbytes} bytes at {start} lie outside the file of {len(self.data)} bytes")
        return np.frombuffer(self.data, np.uint8, nbytes, start)

    def offset(self, part: Array) -> int:
        """Return the offset of a view of the file in it."""
        return int(part.ctypes.data - self._start)

    def unpack(self, form: struct.Struct, position: int) -> Any:
        """Read the number at `position`."""
        if not 0 <= position <= len(self.data) - form.size:
            raise self.damaged(f"position {position} lies outside the file of {len(self.data)} bytes")
        return form.unpack_from(self.data, position)[0]
