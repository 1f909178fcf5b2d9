"""Threads of processes that serve others.

`threading.Thread.start` waits until the new thread says that it runs. A thread that finds no memory for its first frame
ends without a word, and its starter waits for ever, with the locks that it holds. It is enough that mappings run out
between the thread's stack and that frame. Here the starter is told in any case: whatever the interpreter drops unused
when it gives the thread up has a weak reference, whose callback is a function in C that needs no frame.

The kernel gets the thread's name, so that ps -L, top -H and gdb show it; CPython names threads only since 3.14, and
only those of `threading`.

An error that leaves the thread's function is logged; the process goes on.
"""

from __future__ import annotations

import _thread
import logging
import weakref
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from fmq._core import lib

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)


class ServingThread:
    """One thread, which ends with the process if not before."""

    def __init__(self, target: Callable[..., object], *arguments: Any, name: str) -> None:
        """Prepare a thread that will call `target(*arguments)`."""
        self.name = name
        self._call: Callable[[], object] | None = partial(target, *arguments)
        self._running = _thread.allocate_lock()
        self.has_started = False

    def start(self) -> None:
        """Raise RuntimeError when no thread can be started; another call tries again."""
        told: SimpleQueue[object] = SimpleQueue()
        begin = partial(self._run, told.put)
        given_up = weakref.ref(begin, told.put)
        self._running.acquire()
        try:
            _thread.start_new_thread(begin, ())
        except BaseException:
            self._running.release()
            raise
        del begin
        if told.get() is given_up:
            self._running.release()
            raise RuntimeError("can't start new thread")
        self.has_started = True

    def _run(self, tell: Callable[[object], object]) -> None:
        lib.fmq_name_thread(self.name.encode())
        tell(None)
        call, self._call = self._call, None
        try:
            if call:
                call()
        except SystemExit:
            pass
        except BaseException:  # noqa: BLE001 (others need the process)
            _log.exception("thread %r failed", self.name)
        finally:
            del call  # what it refers to goes before `join` returns
            self._running.release()

    def forget(self) -> None:
        """Never start it any more. Drops what it would have called, which may refer to the thread."""
        self._call = None

    def is_alive(self) -> bool:
        """Return True if it has started and has not ended."""
        return self.has_started and self._running.locked()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most `timeout` seconds."""
        if self.has_started and self._running.acquire(timeout=-1 if timeout is None else timeout):
            self._running.release()
