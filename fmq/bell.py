"""`Bell`: how select and asyncio wait for an end of a queue.

A bell is an eventfd. The process's bridge thread (csrc/fmq/bridge.c) sleeps on the queue in place of the program and
writes to the eventfd once; then the bell is silent until it is armed again, which is cheap if nothing more came before.
An end has one bell for `fileno` and another one for its `async` methods.

Which thread may do what:

* `arm` and `rest` belong to the thread that uses the end, as all its calls do: `arm` raises Busy while another thread
  is inside a call on that end.
* `rung` is a coroutine. It runs in the thread of its event loop, and one task at a time may await it. That loop alone
  adds and removes the eventfd, because a loop must not lose a descriptor that it watches.
* `close` may be called in any thread, also while a task awaits the bell. Then it only silences the bell and asks the
  loop to resume that task; the task removes the eventfd from its loop and closes it. Without a task, or with one whose
  loop is closed already, `close` closes the eventfd itself.
* After `rest` or `close` has returned, the bridge thread touches neither the queue's memory nor the eventfd: both may
  go.
* In a forked child there is no bridge thread. The child closes its copies of all eventfds (`abandon`) and makes new
  bells for ends that it may still use.
"""

from __future__ import annotations

import errno
import os
import weakref
from typing import TYPE_CHECKING, Any

from fmq._core import lib
from fmq.errors import Busy, raise_errno

if TYPE_CHECKING:
    import asyncio

_bells: weakref.WeakSet[Bell] = weakref.WeakSet()


class Bell:
    """An eventfd that the bridge thread writes to as soon as a transfer on an end would not wait."""

    def __init__(self, handle: Any) -> None:
        self._handle, self._token = handle, -1
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._is_closed = False
        _bells.add(self)

    def arm(self, n: int) -> None:
        """Rings once as soon as a transfer of n elements would not wait; that may be now. Raises Busy, Closed."""
        if self.fd < 0:
            return  # closed, or this is a forked child
        self._token = lib.fmq_bridge(self._handle, n, self.fd, self._token)
        if self._token == -errno.EROFS:
            raise ValueError("a reader without write access cannot announce that it sleeps; open the queue writable")
        if self._token < 0 and self._token != -errno.EALREADY:
            raise_errno(self._token, "waiting for the queue")

    def rest(self) -> None:
        """Silences the bell until it is armed again."""
        lib.fmq_unhang(self._token)
        self._token = -1

    @property
    def is_abandoned(self) -> bool:
        """Whether this is a forked child, in which no thread rings the bell."""
        return self.fd < 0

    async def rung(self, n: int) -> None:
        """Waits until a transfer of n elements would not wait, or the bell is closed."""
        import asyncio  # not with this module: it takes as long to load as the rest of fmq

        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if self._waiter:
            raise Busy("another task awaits this end; one at a time")
        self._waiter = loop, future
        try:
            if self._is_closed:
                raise_errno(-errno.ECANCELED, "waiting for the queue")
            loop.add_reader(self.fd, _resolve, future)
            self.arm(n)
            await future
        finally:
            self.rest()
            loop.remove_reader(self.fd)
            self._waiter = None
            if self._is_closed:
                self.abandon()

    def close(self) -> None:
        """Closes the eventfd. A task that awaits the bell is resumed, and finds the end closed."""
        self.rest()
        self._is_closed = True
        if self._waiter and not self._waiter[0].is_closed():
            loop, future = self._waiter  # the loop still watches the eventfd: the task removes it first
            loop.call_soon_threadsafe(_resolve, future)
        else:
            self.abandon()

    def abandon(self) -> None:
        """Closes the eventfd, which no loop watches any more, or which is the copy of a forked child."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        _bells.discard(self)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _after_fork() -> None:
    for bell in list(_bells):
        bell.abandon()


os.register_at_fork(after_in_child=_after_fork)
