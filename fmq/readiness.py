"""`ReadinessFd`: how select and asyncio wait for an end of a queue.

It is an eventfd. The process's bridge thread (csrc/fmq/bridge.c) sleeps on the queue in place of the program and writes
to the eventfd once; then nothing is written until it is armed again, which is cheap if nothing more came before. An end
has one for `fileno` and another one for its `async` methods.

Which thread may do what:

* `arm` and `disarm` belong to the thread that uses the end, like all its calls: `arm` raises Busy while another thread
  is inside a call on that end.
* `ready` is a coroutine. It runs in the thread of its event loop, and one task at a time may await it. That loop alone
  adds and removes the eventfd, because a loop must not lose a descriptor that it watches.
* `close` may be called in any thread, also while a task awaits `ready`. Then it only disarms the eventfd and asks the
  loop to resume that task; the task removes the eventfd from its loop and closes it. Without a task, or with one whose
  loop is closed already, `close` closes the eventfd itself.
* After `disarm` or `close` has returned, the bridge thread touches neither the queue's memory nor the eventfd: both may
  go. So `close` waits for an `arm` of another thread to end: what that one hung up is taken down, too.
* In a forked child there is no bridge thread. The child closes its copies of all eventfds (`abandon`) and makes new
  ones for ends that it may still use.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from fmq._core import lib
from fmq.errors import Busy, raise_errno

if TYPE_CHECKING:
    import asyncio

_all: weakref.WeakSet[ReadinessFd] = weakref.WeakSet()


class ReadinessFd:
    """An eventfd that the bridge thread writes to as soon as a transfer on an end would not wait."""

    def __init__(self, handle: Any) -> None:
        self._handle, self._token = handle, -1
        self.arming = threading.RLock()  # because a signal's handler may close what it interrupts
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self.is_closed = False
        _all.add(self)

    def arm(self, n: int) -> None:
        """Make it readable as soon as a transfer of n elements would not wait; that may be now. Raise Busy, Closed."""
        if self.fd < 0:
            return  # closed, or this is a forked child
        with self.arming:
            if not self.is_closed:
                self._token = lib.fmq_bridge(self._handle, n, self.fd, self._token)
        if self._token == -errno.EROFS:
            raise ValueError("a reader without write access cannot announce that it sleeps; open the queue writable")
        if self._token < 0 and self._token != -errno.EALREADY:
            raise_errno(self._token, "waiting for the queue")

    def disarm(self) -> None:
        """Let no thread write to it until it is armed again."""
        with self.arming:
            lib.fmq_unhang(self._token)
            self._token = -1

    @property
    def is_abandoned(self) -> bool:
        """True if this is a forked child, in which no thread writes to it."""
        return self.fd < 0

    async def ready(self, n: int) -> None:
        """Wait until a transfer of n elements would not wait, or this is closed."""
        import asyncio  # not with this module: it takes as long to load as the rest of fmq

        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if self._waiter:
            raise Busy("another task awaits this end; one at a time")
        self._waiter = loop, future
        try:
            if self.is_closed:
                raise_errno(-errno.ECANCELED, "waiting for the queue")
            loop.add_reader(self.fd, _resolve, future)
            self.arm(n)
            await future
        finally:
            self.disarm()
            loop.remove_reader(self.fd)
            self._waiter = None
            if self.is_closed:
                self.abandon()

    def close(self) -> None:
        """Close the eventfd. A task that awaits `ready` is resumed, and finds the end closed."""
        self.is_closed = True
        self.disarm()
        if self._waiter and not self._waiter[0].is_closed():
            loop, future = self._waiter  # the loop still watches the eventfd: the task removes it first
            loop.call_soon_threadsafe(_resolve, future)
        else:
            self.abandon()

    def abandon(self) -> None:
        """Close the eventfd, which no loop watches any more, or which is the copy of a forked child."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        _all.discard(self)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _after_fork() -> None:
    for readiness in list(_all):
        readiness.arming = threading.RLock()  # a thread of the parent may have it
        readiness.abandon()


os.register_at_fork(after_in_child=_after_fork)
