"""Forked children: they leave their parent's bursts alone, and get errors that say so when they use one."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class ForkListener(Protocol):
    """An object that a forked child must not use."""

    def abandon(self) -> None:
        """Drop what is the parent's. Called in a forked child."""


_listeners: weakref.WeakSet[ForkListener] = weakref.WeakSet()


def abandon_in_child(listener: ForkListener) -> None:
    """Call the listener's `abandon` in every child that is forked from now on."""
    _listeners.add(listener)


class _Unusable:
    """Takes the place of an object that may not be used any more: every attribute raises."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def __getattr__(self, name: str) -> Any:
        self._check()
        raise AttributeError(name)


def unusable(check: Callable[[], None]) -> Any:
    """Return an object in place of one that may not be used any more. `check` raises the error that says why."""
    return _Unusable(check)


def _after_fork() -> None:
    for listener in list(_listeners):
        listener.abandon()


os.register_at_fork(after_in_child=_after_fork)
