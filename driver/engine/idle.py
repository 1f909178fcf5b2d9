"""Gives memory back while a device rests.

While bursts live, what their requests were bound to is kept: plans, and with them the temporaries of the reference
device, and programs for several shapes. What has not answered anything for a while lets go of its plans, and the next
request is bound anew, as the first one was; a few small plans stay, because they cost more to make than they hold.
What a client has handed over stays mapped: that is for the client to free.

Nothing is counted on the way of a request: a burst tells how many it has answered, and only to bind what is worth
giving back makes us look, `seconds` later, and again while there is such. When there is not, nothing wakes up.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from cffi import FFI

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ffi = FFI()
_ffi.cdef("int malloc_trim(size_t pad);")
_libc: Any = _ffi.dlopen(None)  # calls give up the GIL


class PlanHolder(Protocol):
    """What answers requests, and has something to let go of."""

    @property
    def answered(self) -> int:
        """How many, so far."""

    def forget_plans(self) -> None:
        """The next request is bound anew. From any thread; what runs is not disturbed."""


class IdleMonitor:
    """The monitor: one thread, from the first request on, that sleeps until there is something to look at."""

    def __init__(
        self, seconds: float, holders: Callable[[], Sequence[PlanHolder]], models: Callable[[], object] = lambda: None
    ) -> None:
        """`models`: called when nothing is bound any more."""
        self._seconds, self._holders, self._models = seconds, holders, models
        self._seen: WeakKeyDictionary[PlanHolder, int] = WeakKeyDictionary()
        self._resting: WeakKeyDictionary[PlanHolder, int] = WeakKeyDictionary()
        self._bound, self._never = threading.Event(), threading.Event()
        self._starting, self._thread = threading.Lock(), threading.Thread(target=self._watch, name="idle", daemon=True)

    def begin(self) -> None:
        """Something is being bound. Costs next to nothing, and is called often."""
        if not self._bound.is_set():
            self._bound.set()
            with self._starting:
                if self._thread.ident is None:
                    self._thread.start()

    def _watch(self) -> None:
        while True:
            self._bound.wait()
            self._never.wait(self._seconds)
            self._bound.clear()  # before we look: what is bound meanwhile is looked at next time
            if self.look():
                self._bound.set()
            elif not self._bound.is_set():
                self._models()
                _trim()

    def look(self) -> bool:
        """Who has answered nothing since the last look lets go. Whether somebody still has something to let go of."""
        is_held = False
        for holder in self._holders():
            answered = holder.answered
            if self._resting.get(holder) == answered:
                continue
            if self._seen.get(holder) == answered:
                self._resting[holder] = answered
                holder.forget_plans()
            else:
                self._seen[holder] = answered
                is_held = True
        return is_held


def _trim() -> None:
    """Free memory goes back to the system, where the C library knows how."""
    if trim := getattr(_libc, "malloc_trim", None):
        trim(0)
