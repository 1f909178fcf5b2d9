"""Functions of the C library that neither Python nor our own C code calls.

They are called by pointer. To declare them for cffi as C text would load its parser of C, which every process that
imports `driver` would wait for.
"""

from __future__ import annotations

from ctypes import CDLL, c_void_p, cast
from typing import Any

from fmq._core import ffi

_library = CDLL(None)


def function(name: str, kind: str) -> Any:
    """Return the function with this name as a pointer of the C type `kind`; None where the C library has none.

    A call gives up the GIL, and leaves errno in `ffi.errno`.
    """
    found = getattr(_library, name, None)
    return found and ffi.cast(kind, cast(found, c_void_p).value)
