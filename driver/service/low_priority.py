"""The low priority of a second engine, while it prepares beside the first one and is warmed.

Its threads are SCHED_BATCH, with the longest time slice that there is (since Linux 6.12): they never preempt a thread
that serves a request, and such a thread preempts them soon. Both can be taken back without privileges, which a nice
value cannot. CPU affinity could be, too, but runtimes start as many threads as they have processors, and keep them.

No thread of the sandbox may schedule another one, not even of its own process. So what takes the low priority back is a
process outside of it, forked before there is a sandbox: when the engine is about to take over, and in any case after as
long as that may take. Then it ends.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

from driver.engine.scheduling_attributes import attributes_of, set_attributes
from driver.service.fork_server import close_all_but, end_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import NoReturn

LONGEST = 150.0
"""Seconds until it ends of itself: longer than a client takes for a move."""

_SLICE = 100_000_000  # ns; the kernel's longest
_PID = struct.Struct("i")


class LowPriority:
    """The low priority of one engine. Its service makes it, and the engine enters it as its first thread."""

    def __init__(self) -> None:
        """Fork the process that takes it back. No thread may exist but this one. Raise OSError."""
        self._near, far = socket.socketpair()
        self._lock, parent = threading.Lock(), os.getpid()
        with far, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # numpy's threads survive forks
            self._pid = os.fork()
            if not self._pid:
                _become_restorer(far, parent)

    def enter(self) -> None:
        """Give it to this process, which has one thread: all that it starts inherit it."""
        self._near.close()
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            set_attributes(attributes_of()._replace(runtime=_SLICE))

    def watch(self, pid: int) -> None:
        """Have it taken back from the process with this number, the engine, and no other one."""
        self._near.sendall(_PID.pack(pid))

    def end(self) -> None:
        """Take it back from all threads, unless that was done. Any thread."""
        with self._lock:
            if self._near.fileno() < 0:
                return
            with self._near, suppress(OSError):
                self._near.shutdown(socket.SHUT_WR)
                self._near.recv(1)  # the end of the other process
            os.waitpid(self._pid, 0)


def _become_restorer(far: socket.socket, parent: int) -> NoReturn:
    try:
        end_with_parent()
        if os.getppid() == parent:
            close_all_but(far.fileno())
            (pid,) = _PID.unpack(far.recv(_PID.size, socket.MSG_WAITALL))
            select.select([far], [], [], LONGEST)
            while any(_set_back(thread) for thread in _threads_of(pid)):
                pass  # threads that one of these has started meanwhile have it, too
    finally:
        os._exit(0)


def _threads_of(pid: int) -> Iterator[int]:
    with suppress(FileNotFoundError):
        yield from map(int, os.listdir(f"/proc/{pid}/task"))


def _set_back(thread: int) -> bool:
    """Take it back from a thread; return False if the thread does not have it, or has ended."""
    try:
        if os.sched_getscheduler(thread) != os.SCHED_BATCH:
            return False
        with suppress(OSError):  # where the kernel has no slices
            set_attributes(attributes_of(thread)._replace(runtime=0), thread)
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
    except ProcessLookupError:
        return False
    return True
