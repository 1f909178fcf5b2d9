"""Drops plans and scratch memory of idle clients.

An open burst keeps the plans of its requests, and with them the temporaries of the reference device and programs for
several shapes. A server that has answered nothing for a while drops its plans, and its next request is bound anew, as
the first one was. A few small plans stay, as they cost more to make than they hold. Memory that a client has handed
over stays mapped: the client frees it.

Nothing is added to the path of a request. A server counts its answers anyway, and binding a request that is worth
dropping schedules a look, `seconds` later, which repeats while there is something to drop. Otherwise no thread wakes.
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
    """A server that answers requests and keeps plans."""

    @property
    def answered(self) -> int:
        """Number of requests so far."""

    def forget_plans(self) -> None:
        """Drops the plans. From any thread; a running execution goes on."""


class IdleMonitor:
    """One thread, started by the first request, that sleeps while there is nothing to drop."""

    def __init__(
        self, seconds: float, holders: Callable[[], Sequence[PlanHolder]], models: Callable[[], object] = lambda: None
    ) -> None:
        """`models`: called when no plans are left to drop."""
        self._seconds, self._holders, self._models = seconds, holders, models
        self._seen: WeakKeyDictionary[PlanHolder, int] = WeakKeyDictionary()
        self._resting: WeakKeyDictionary[PlanHolder, int] = WeakKeyDictionary()
        self._bound, self._never = threading.Event(), threading.Event()
        self._starting, self._thread = threading.Lock(), threading.Thread(target=self._watch, name="idle", daemon=True)

    def begin(self) -> None:
        """A request was bound. Called often, and cheap."""
        if not self._bound.is_set():
            self._bound.set()
            with self._starting:
                if self._thread.ident is None:
                    self._thread.start()

    def _watch(self) -> None:
        while True:
            self._bound.wait()
            self._never.wait(self._seconds)
            self._bound.clear()  # before looking: what is bound meanwhile is seen next time
            if self.look():
                self._bound.set()
            elif not self._bound.is_set():
                self._models()
                _trim()

    def look(self) -> bool:
        """Drops the plans of servers that have answered nothing since the last look. Whether any server keeps plans."""
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
    """Returns free memory to the system, if the C library can."""
    if trim := getattr(_libc, "malloc_trim", None):
        trim(0)
