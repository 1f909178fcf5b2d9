"""Numbers of objects that an application dropped, which wait here until a connection may tell the device to
free them.

An object can be dropped anywhere, also inside the garbage collector, while the thread holds any lock. So `DropList.add`
takes no lock and sends nothing. One thread per process waits a few milliseconds after the first number and tells each
device what has gathered, in one message. It waits for no connection: where another thread is in a call, that thread
tells the device when the call ends (`tell_due`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from burst.errors import PeerDied

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)
_GATHER = 0.005  # seconds from the first number to the message
_MANY = 64  # numbers that a request takes along, because the thread does not keep up
_MOST = 4096  # numbers in one message
PATIENCE = 1.0  # seconds that the thread waits for the answer of a device
_T = TypeVar("_T")


class _DropThread:
    """The thread that tells devices. A forked child has none until it needs its own."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew in a forked child: the thread is the parent's."""
        self.due: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._starting, self._runs = threading.Lock(), False

    def start(self) -> None:
        """Start the thread unless it runs. Not from a finalizer."""
        with self._starting:
            if not self._runs:
                threading.Thread(target=_run, args=(self.due,), name="burst-drops", daemon=True).start()
                self._runs = True


_thread = _DropThread()
os.register_at_fork(after_in_child=_thread.forget)


def _run(due: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        found = [due.get()]
        time.sleep(_GATHER)
        while not due.empty():
            found.append(due.get())
        for function in found:
            try:
                function()
            except Exception as error:  # noqa: BLE001 (the others still need this thread)
                _log.debug("a device was not told what was dropped: %r", error)
        del found, function  # while this thread waits it must not keep anything alive


def later(function: Callable[[], None]) -> None:
    """Call it soon, in the thread. For finalizers, once a `DropList` was made in this process."""
    _thread.due.put(function)


class DropList(Generic[_T]):
    """Numbers that one device may free, and the lock of the connection on which it is told.

    `with` takes the lock for a call, and tells the device afterwards what could not be told meanwhile.
    """

    def __init__(self, tell: Callable[[list[_T]], None]) -> None:
        """`tell`: a method that sends the numbers, called under the lock. Its object is referred to weakly."""
        self.lock, self._tell, self._pid = threading.Lock(), weakref.WeakMethod(tell), os.getpid()
        self._numbers: deque[_T] = deque()
        self._is_known = False  # to the thread
        self.is_due = False  #: the thread that has the lock is to tell the device
        _thread.start()
        self._put = _thread.due.put

    def add(self, number: _T) -> None:
        """Let the device free this. Returns at once. Finalizers and weak references may call this."""
        self._numbers.append(number)
        if not self._is_known:
            self._is_known = True
            self._put(self.tell_now)
        elif len(self._numbers) >= _MANY:
            self.is_due = True

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        with suppress(PeerDied):  # the next call notices the death
            self.tell_due()

    def tell_now(self, *numbers: _T) -> None:
        """Tell the device of all, unless another thread holds the lock: that one does when it calls `tell_due`."""
        self._numbers.extend(numbers)
        self.is_due = True
        self.tell_due()

    def tell_due(self) -> None:
        """Tell of what is due. Each thread that has released the lock calls this, or looks at `is_due` first.

        Raise what `tell` raises.
        """
        while self.is_due and self.lock.acquire(blocking=False):
            try:
                self.tell()
            finally:
                self.lock.release()

    def tell(self) -> None:
        """Tell the device of what has gathered. The caller holds the lock."""
        self.is_due = self._is_known = False
        tell = self._tell()
        while self._numbers and tell and os.getpid() == self._pid:  # a forked child shares its parent's connection
            tell([self._numbers.popleft() for _ in range(min(len(self._numbers), _MOST))])
