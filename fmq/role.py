"""Holding a role: an OFD lock on one byte of the queue's memory, and a life word in its control page.

The lock is held by the kernel and gone with the process, right across pid namespaces and never by a number that
a process wrote. The life word tells the other side of our death while it sleeps (csrc/fmq/life.c). A forked child
inherits the descriptor and with it the locks, so it gives them up at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import weakref

from fmq._core import lib
from fmq.errors import RoleTaken
from fmq.region import Region, descriptors

WRITER, READER, OBSERVER = lib.FMQ_WRITER, lib.FMQ_READER, lib.FMQ_OBSERVER
LIFE_AT = {WRITER: 768, READER: 896}  # csrc/fmq/layout.h
_NAMES = {WRITER: "writer", READER: "reader"}
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid
_files: weakref.WeakKeyDictionary[Region, LockFile] = weakref.WeakKeyDictionary()


class LockFile:
    """One open file description per region, which holds the locks of all roles that this process has there.

    Its own, because locks belong to a description, and the region's is shared with whoever sent it or got it.
    """

    def __init__(self, region: Region) -> None:
        self.fd = os.open(f"/proc/self/fd/{region.fd}", os.O_RDWR | os.O_CLOEXEC)
        self._bytes: set[int] = set()  # ours already: to the kernel, a description does not conflict with itself

    def lock(self, byte: int, what: str) -> None:
        """Raises RoleTaken when somebody alive, here or elsewhere, has it."""
        if byte in self._bytes or not _set_lock(self.fd, byte, fcntl.F_WRLCK):
            raise RoleTaken(f"this queue has a {what} already; it has room for one, and that is alive")
        self._bytes.add(byte)

    def unlock(self, byte: int) -> None:
        """Closing would not do: a child that was just forked, and has not let go yet, keeps the description."""
        _set_lock(self.fd, byte, fcntl.F_UNLCK)
        self._bytes.discard(byte)

    def close_if_unused(self) -> bool:
        """Whether it was closed."""
        if not self._bytes:
            self.abandon()
        return not self._bytes

    def abandon(self) -> None:
        """In a forked child: the locks are the parent's."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Role:
    """Writer or reader of one queue, exclusively, until `release` or death."""

    def __init__(self, control: Region, at: int, which: int) -> None:
        """Raises RoleTaken when somebody alive has it."""
        self._control, self._byte = control, at + which
        with descriptors:
            file = _files.get(control) or _files.setdefault(control, LockFile(control))
            try:
                file.lock(self._byte, _NAMES[which])
            finally:
                if file.close_if_unused():
                    del _files[control]
            self._file = file
            self._life = lib.fmq_life_hold(file.fd, at + LIFE_AT[which])
        if self._life < 0:
            self.release()
            raise OSError(-self._life, f"cannot announce this process's life: {_why(-self._life)}")

    def release(self) -> None:
        """Tells the peer, and lets somebody else take the role. Harmless when done twice, or in a forked child."""
        with descriptors:
            if not self.is_held:
                return
            if self._life >= 0:
                lib.fmq_life_release(self._life)
            self._file.unlock(self._byte)
            self._byte = -1
            if self._file.close_if_unused():
                del _files[self._control]

    @property
    def is_held(self) -> bool:
        """False after `release`, and in a forked child."""
        return self._byte >= 0 and self._file.fd >= 0


class Seat:
    """What readers of an unsynchronized queue have in place of a role: there is room for all.

    A lock that all of them share tells others that somebody is there. A forked child inherits the reader, and the lock.
    """

    def __init__(self, control: Region, at: int) -> None:
        self.is_held, self._fd = True, -1
        with (
            descriptors,
            contextlib.suppress(PermissionError),
        ):  # another user's memory: we are not seen
            self._fd = os.open(f"/proc/self/fd/{control.fd}", os.O_RDONLY | os.O_CLOEXEC)
            _set_lock(self._fd, at + READER, fcntl.F_RDLCK)

    def release(self) -> None:
        """As of a role."""
        self.is_held = False
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def is_taken(fd: int, at: int, which: int) -> bool:
    """Whether somebody alive, here or elsewhere, has that role: the kernel's word, and nobody is disturbed."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, at + which, 1, 0)
    kind: int = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK


def _why(code: int) -> str:
    if code == errno.ENOSPC:
        return "a process holds at most 2048 roles (the kernel's limit for robust futexes); close some or use another"
    return os.strerror(code)


def _set_lock(fd: int, byte: int, kind: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _after_fork() -> None:
    for file in list(_files.values()):
        file.abandon()
    _files.clear()


os.register_at_fork(after_in_child=_after_fork)
