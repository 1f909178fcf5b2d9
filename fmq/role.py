"""Holding a role: an OFD lock on one byte of the queue's file, and a life word in its control page.

The lock is held by the kernel and gone with the process, right across pid namespaces and never by a number that
somebody wrote. The life word tells the other side of our death while it sleeps (csrc/life.c). A forked child inherits
the descriptor and with it the lock, so it gives both up at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import weakref

from fmq._core import lib
from fmq.errors import RoleTaken

WRITER, READER = lib.FMQ_WRITER, lib.FMQ_READER
LIFE_AT = {WRITER: 768, READER: 896}  # csrc/layout.h
_NAMES = {WRITER: "writer", READER: "reader"}
_held: weakref.WeakSet[Role] = weakref.WeakSet()


class Role:
    """Writer or reader of one queue, exclusively, until `release` or death."""

    def __init__(self, fd: int, which: int) -> None:
        """Raises RoleTaken when somebody alive has it."""
        self._which = which
        # A descriptor of our own: locks belong to an open file description, and `fd`'s is shared with whoever sent it.
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            _lock(self._fd, which, fcntl.F_WRLCK)
        except BaseException:
            os.close(self._fd)
            raise
        self._life = lib.fmq_life_hold(self._fd, LIFE_AT[which])
        if self._life < 0:
            os.close(self._fd)
            raise OSError(-self._life, f"cannot announce this process's life: {os.strerror(-self._life)}")
        _held.add(self)

    def release(self) -> None:
        """Tells the peer, and lets somebody else take the role. Harmless when done twice."""
        if self._fd >= 0:
            lib.fmq_life_release(self._life)
            # Closing would not do: a child that was just forked, and has not abandoned it yet, keeps the file open.
            _lock(self._fd, self._which, fcntl.F_UNLCK)
            self.abandon()

    def abandon(self) -> None:
        """In a forked child: lets go of what belongs to the parent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        _held.discard(self)

    @property
    def is_held(self) -> bool:
        """False after `release`, and in a forked child."""
        return self._fd >= 0


def _lock(fd: int, which: int, kind: int) -> None:
    byte = struct.pack("hhqqi4x", kind, os.SEEK_SET, which, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, byte)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise RoleTaken(
            f"this queue has a {_NAMES[which]} already; a synchronized queue has one, and it is alive"
        ) from None


def _after_fork() -> None:
    for role in list(_held):
        role.abandon()


os.register_at_fork(after_in_child=_after_fork)
