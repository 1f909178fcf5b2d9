"""A process that closes the sockets of clients, for one that must not wait.

Whoever closes the last copy of a socket also closes the descriptors that lie in it unread, and closing one may take as
long as its sender likes: an hour, for a socket that lingers; for ever, for a file of a file system of its own. So each
account has threads of its own there (`driver.service.closing_threads`).

Its user never waits for it. What it does not take is kept; when it takes nothing for a while, or has ended, another one
begins, and goes on with what is on the way: the socket between the two outlives it. Nobody needs to signal the one
before, which ends when it sees that. Its user keeps half of its descriptors free: it accepts no
connection until that `has_room`. Sockets are numbered, and memory that all share has the number of the last one
that the user has closed on its side, of the last one taken, and of the last process.
"""

from __future__ import annotations

import logging
import mmap
import os
import resource
import select
import socket
import threading
import time
import warnings
from array import array
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from burst.channel import Channel, pack
from burst.serving_thread import ServingThread
from driver.service.closing_threads import BEGUN, CLOSED, TAKEN, NumberedClosings
from driver.service.fork_server import close_all_but, end_with_parent
from driver.service.http_connections import account_of
from fmq._core import lib

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)
_NOW = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
WITHIN = 5.0  # seconds in which it takes something, if there is something to take
_AGAIN = 1.0  # seconds between two beginnings
_TICK = 0.05  # seconds between two looks while something is due


class ClosingProcess:
    """The process, as those who have something to close see it. Safe from any thread.

    Its user calls `look` when it is readable, and every now and then while `is_waiting`; or it calls `keep`.
    """

    def __init__(self, confine: Callable[[], object]) -> None:
        """Fork. `confine`: called there."""
        self._confine = confine
        self._near, self._far = Channel.pair()
        self._memory = os.memfd_create("closing", os.MFD_CLOEXEC)
        os.ftruncate(self._memory, mmap.PAGESIZE)
        self._numbers = mmap.mmap(self._memory, mmap.PAGESIZE)
        self._numbers.madvise(mmap.MADV_DONTFORK)  # no cell can write to it
        self._shared = memoryview(self._numbers).cast("Q")
        self._due, self._lock = deque[tuple[int, object]](), threading.Lock()
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events = select.epoll()
        self._events.register(self._woken, select.EPOLLIN)
        self.pid, self._replaced = 0, set[int]()
        self._seen = 0  #: the number of the last one taken, at the last look
        self._begin()

    def close(self, sock: socket.socket, account: object = None) -> None:
        """Have it closed there, and close this process's copy, which then is not the last one.

        `account`: which sent what lies in it, if not who connected.
        """
        if sock.fileno() < 0:
            return
        account = account_of(sock) if account is None else account
        with self._lock:
            if self._near.await_reader(0):
                self._seen_at = time.monotonic()
            self._due.append((sock.detach(), account))
            self._hand_over()
        os.eventfd_write(self._woken, 1)

    def keep(self) -> None:
        """Start a thread that looks."""

        def look() -> None:
            while True:
                self._events.poll(_TICK if self.is_waiting else None)
                self.look()

        ServingThread(look, name="closing").start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `look` has something to do."""
        return self._events.fileno()

    @property
    def is_waiting(self) -> bool:
        """True while something is not taken yet, or there is no process."""
        return bool(self._due) or not self.pid or not self._near.await_reader(0)

    @property
    def has_room(self) -> bool:
        """False while so many sockets wait to be taken that its user is to accept no more."""
        return len(self._due) < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2

    def look(self) -> None:
        """Hand over what is due, and start the process again if it has ended or takes nothing. Waits for nothing."""
        with self._lock:
            with suppress(BlockingIOError):
                os.eventfd_read(self._woken)
            self._hand_over()
            now, taken = time.monotonic(), self._shared[TAKEN]
            if taken != self._seen or self._near.await_reader(0):
                self._seen, self._seen_at = taken, now
            for pid in self._replaced.copy():
                if os.waitpid(pid, os.WNOHANG)[0]:
                    self._replaced.discard(pid)
            if self.pid and os.waitpid(self.pid, os.WNOHANG)[0]:
                self._give_up("has ended")
            elif self.pid and now - self._seen_at > WITHIN:
                self._replaced.add(self.pid)
                self._give_up(f"has taken none for {WITHIN:g} s")
            if not self.pid and now - self._begun_at > _AGAIN:
                with suppress(OSError):  # the next look may be luckier
                    self._begin()

    def _give_up(self, why: str) -> None:
        _log.error("the process that closes the sockets of clients %s; another one is started", why)
        self._events.unregister(self._pidfd)
        os.close(self._pidfd)
        self.pid = 0

    def _hand_over(self) -> None:
        while self._due:
            fd, account = self._due[0]
            raw = pack([self._shared[CLOSED] + 1, account])
            try:
                self._near.socket.sendmsg([raw], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))], _NOW)
            except OSError:  # it has to take some first; or the kernel has no memory, or counts too many on their way
                return
            self._due.popleft()
            os.close(fd)
            self._shared[CLOSED] += 1

    def _begin(self) -> None:
        """Fork the process. Raise OSError. Where there are other threads, it is not to touch what they may lock."""
        self._begun_at = self._seen_at = time.monotonic()
        self._shared[BEGUN] += 1
        self._seen, number, parent = self._shared[TAKEN], self._shared[BEGUN], os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            self._become(number, parent)
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:  # it ends when it sees the next one
            self._replaced.add(pid)
            raise
        self.pid = pid
        self._events.register(self._pidfd, select.EPOLLIN)

    def _become(self, number: int, parent: int) -> NoReturn:
        try:
            end_with_parent()
            if os.getppid() != parent:
                os._exit(0)
            shared = memoryview(mmap.mmap(self._memory, mmap.PAGESIZE)).cast("Q")
            close_all_but(self._far.fileno())
            lib.fmq_name_thread(b"burst-closing")
            self._confine()
            NumberedClosings(self._far, shared, number).run()
        finally:
            os._exit(1)
