"""What a forked child finds of its parent's bursts: nothing that it could disturb, and errors that say so."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Abandoned(Protocol):
    """Who wants to know."""

    def abandon(self) -> None:
        """We are in a forked child."""


_told: weakref.WeakSet[Abandoned] = weakref.WeakSet()


def tell(somebody: Abandoned) -> None:
    """Calls its `abandon` in every child that is forked from now on."""
    _told.add(somebody)


class _Lost:
    """Stands for an object that is the parent's: whatever is asked of it raises."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def __getattr__(self, name: str) -> Any:
        self._check()
        raise AttributeError(name)


def lost(check: Callable[[], None]) -> Any:
    """In the place of something; `check` raises what there is to say."""
    return _Lost(check)


def _after_fork() -> None:
    for somebody in list(_told):
        somebody.abandon()


os.register_at_fork(after_in_child=_after_fork)
