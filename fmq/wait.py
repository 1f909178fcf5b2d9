"""Waiting for several queues at once, from a thread (`wait_any`), select or asyncio (`Bell`)."""

from __future__ import annotations

import asyncio
import errno
import os
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from fmq._core import ffi, lib
from fmq.clock import deadline_of
from fmq.errors import Busy, raise_errno

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fmq.end import MessageQueueReader, MessageQueueWriter

E = TypeVar("E", bound="MessageQueueReader | MessageQueueWriter")
_bells: weakref.WeakSet[Bell] = weakref.WeakSet()


def wait_any(ends: Iterable[E], timeout: float | None = None) -> list[E]:
    """Sleeps until at least one end is ready, and returns those that are, in order.

    Ready: a transfer of one element would not wait; it goes through, or raises (the peer is gone, say). Raises Timeout,
    Busy. One system call sleeps on up to 64 ends; of more, the rest is looked at every millisecond.
    """
    listed = list(ends)
    if not listed:
        raise ValueError("ends=[]: nothing would ever be ready")
    ready, deadline = ffi.new("uint8_t[]", len(listed)), deadline_of(timeout)
    handles = ffi.new("fmq_end *[]", [end.usable() for end in listed])
    while (count := lib.fmq_wait_any(handles, len(listed), ready, deadline)) == -errno.EINTR:
        pass  # a signal's Python handler ran between the two calls
    if count == -errno.EROFS:
        raise ValueError("ends: a reader without write access cannot announce that it sleeps; open the queue writable")
    if count < 0:
        raise_errno(count, "wait_any")
    return [end for end, is_ready in zip(listed, ready, strict=True) if is_ready]


class Bell:
    """An eventfd that the process's bridge thread rings when a transfer on an end would not wait any more."""

    def __init__(self, handle: Any) -> None:
        self._handle, self._token = handle, -1
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._is_closed = False
        _bells.add(self)

    def arm(self, n: int) -> None:
        """Rings once when a transfer of n elements would not wait; at once if that is so now. Raises Busy, Closed."""
        if self.fd < 0:
            return  # closed meanwhile, or the parent's
        self._token = lib.fmq_bridge(self._handle, n, self.fd, self._token)
        if self._token == -errno.EROFS:
            raise ValueError("a reader without write access cannot announce that it sleeps; open the queue writable")
        if self._token < 0 and self._token != -errno.EALREADY:
            raise_errno(self._token, "waiting for the queue")

    def rest(self) -> None:
        """Rings no more until it is armed again."""
        lib.fmq_unhang(self._token)
        self._token = -1

    @property
    def is_abandoned(self) -> bool:
        """In a forked child."""
        return self.fd < 0

    async def rung(self, n: int) -> None:
        """Until a transfer of n elements would not wait, or the bell is closed."""
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
        """Gives the eventfd back. A task that awaits the bell goes on, and finds the end closed."""
        self.rest()
        self._is_closed = True
        if self._waiter and not self._waiter[0].is_closed():
            loop, future = self._waiter  # the loop still watches the eventfd: the task lets go of it first
            loop.call_soon_threadsafe(_resolve, future)
        else:
            self.abandon()

    def abandon(self) -> None:
        """In a forked child: the bell is the parent's."""
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
