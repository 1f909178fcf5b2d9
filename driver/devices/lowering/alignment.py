"""Where arrays have to lie for libraries to use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALIGNMENT = 64
"""Of memory that libraries use in place."""


def offset_in(root: NDArray[np.uint8] | None, array: NDArray[Any], alignment: int = ALIGNMENT) -> int | None:
    """Return the offset of the array in `root`, if it lies there contiguous and aligned; else None."""
    if root is None or not array.flags.c_contiguous or array.ctypes.data % alignment:
        return None
    offset = array.ctypes.data - root.ctypes.data
    return offset if array.nbytes and 0 <= offset <= root.nbytes - array.nbytes else None


def aligned(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the bytes where libraries can use them: themselves if possible, else a copy."""
    if array.ctypes.data % ALIGNMENT == 0:
        return array
    block = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    found = block[-block.ctypes.data % ALIGNMENT :][: array.nbytes]
    found[:] = array
    return found
