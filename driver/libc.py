"""Functions of the C library, librt included, that neither Python nor our own C code calls.

They are called by pointer. To declare them for cffi as C text would load its parser of C, which every process that
imports `driver` would wait for.
"""

from __future__ import annotations

from contextlib import suppress
from ctypes import CDLL, c_void_p, cast
from functools import cache
from typing import Any

from fmq._core import ffi

library = CDLL(None)


def function(name: str, kind: str) -> Any:
    """Return the function with this name as a pointer of the C type `kind`; None where the C library has none.

    A call gives up the GIL, and leaves errno in `ffi.errno`.
    """
    found = getattr(library, name, None) or getattr(_realtime(), name, None)
    return found and ffi.cast(kind, cast(found, c_void_p).value)


@cache
def _realtime() -> CDLL | None:
    """Return librt, where glibc had its timers before 2.34."""
    with suppress(OSError):
        return CDLL("librt.so.1")
    return None
