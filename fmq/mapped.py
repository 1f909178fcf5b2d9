"""Finalizers that read shared memory, which stays mapped until they have.

`weakref.finalize` holds nothing of its object. When the interpreter ends it calls all that are left, and while one
waits in C, without the GIL, another thread may drop the object, and with it the last reference to its memory.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


def finalize_mapped(
    owner: _T, memory: object, function: Callable[..., object], *arguments: object
) -> weakref.finalize[..., _T]:
    """Return a finalizer of `owner` that calls `function` and refers to `memory` until it has."""
    return weakref.finalize(owner, _call, memory, function, *arguments)


def _call(_: object, function: Callable[..., object], *arguments: object) -> None:
    function(*arguments)
