"""Roles: an OFD lock on one byte of the queue's memory, and a life word in its control page.

The kernel holds the lock and drops it with the process. That works across pid namespaces and trusts no number that a
process wrote. The life word tells the other side of our death while it sleeps (csrc/fmq/life.c). A forked child
inherits the descriptor and with it the locks, so it closes its copy at once.
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
SEAT, SEATS, SEATS_AT = lib.FMQ_SEAT, 64, 4096  # of a broadcast queue: SEAT + k is the reader in seat k
LIFE_AT = {WRITER: 768, READER: 896} | {SEAT + k: SEATS_AT + 128 * k + 24 for k in range(SEATS)}
"""Where in the control pages the life word of a role lies (csrc/fmq/layout.h)."""
_NAMES = {WRITER: "writer", READER: "reader"}
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid
_files: weakref.WeakKeyDictionary[Region, LockFile] = weakref.WeakKeyDictionary()


class LockFile:
    """One open file description per region: it holds the locks of all roles that this process has there.

    The region's own description would not do, because the process that sent the memory, or received it, shares that.
    """

    def __init__(self, region: Region) -> None:
        self.fd = os.open(f"/proc/self/fd/{region.fd}", os.O_RDWR | os.O_CLOEXEC)
        self._bytes: set[int] = set()  # locked by us; to the kernel, a description does not conflict with itself

    def lock(self, byte: int, what: str) -> None:
        """Raise RoleTaken when a living process, this one or another, holds it. Then a file without locks is closed."""
        code = -errno.EAGAIN if byte in self._bytes else lib.fmq_lock(self.fd, byte)
        if not code:
            self._bytes.add(byte)
            return
        self.close_if_unused()
        if code == -errno.EAGAIN:
            raise RoleTaken(f"this queue has a {what} already; it has room for one, and that is alive")
        raise OSError(-code, f"cannot lock the role of a {what}: {os.strerror(-code)}")

    def unlock(self, byte: int) -> None:
        """Unlock explicitly: a child that was just forked may still have the description open, and keep the lock."""
        lib.fmq_unlock(self.fd, byte)  # if the kernel has no memory for that, the end of the file unlocks it, too
        self._bytes.discard(byte)

    def close_if_unused(self) -> bool:
        """Close the file when it holds no lock. Returns whether it did."""
        if not self._bytes:
            self.abandon()
        return not self._bytes

    def abandon(self) -> None:
        """Close the file. A forked child calls it, too: the locks are its parent's."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Role:
    """The exclusive right to write to a queue, or to read from it, until `release` or death."""

    def __init__(self, control: Region, at: int, which: int, *, announces: bool = True) -> None:
        """Raise RoleTaken while another end holds it. `announces`: by the life word in the control page."""
        self._control, self._byte, self.which = control, at + which, which
        with descriptors:
            self._file = file = _files.get(control) or LockFile(control)
            file.lock(self._byte, _NAMES.get(which, "reader"))
            _files[control] = file
            if which >= SEAT:
                lib.fmq_clear_seat(control.base + at, which)
            self._life = lib.fmq_life_hold(file.fd, at + LIFE_AT[which], 0) if announces else -1
        if announces and self._life < 0:
            self.release()
            raise OSError(-self._life, f"cannot announce this process's life: {_why(-self._life)}")

    def release(self) -> None:
        """Tell the peer, and free the role. Does nothing the second time, or in a forked child."""
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
    def lock_fd(self) -> int:
        """The file that has the lock, while the role is held."""
        return self._file.fd

    @property
    def is_held(self) -> bool:
        """False after `release`, and in a forked child."""
        return self._byte >= 0 and self._file.fd >= 0


def take_seat(control: Region, at: int, *, announces: bool = True) -> Role:
    """Return the first free seat of a broadcast queue. Raise RoleTaken when all are taken."""
    if not announces:
        raise ValueError("announces=False: a broadcast queue's writer waits for its readers by their life words")
    for which in range(SEAT, SEAT + SEATS):
        with contextlib.suppress(RoleTaken):
            return Role(control, at, which)
    raise RoleTaken(f"this broadcast queue has {SEATS} readers already, and all are alive; close one")


class Seat:
    """A place for a reader of an unsynchronized queue, which has no role: any number of readers may exist.

    They share a lock, which shows other processes that at least one is there. A forked child inherits reader and lock.
    """

    def __init__(self, control: Region, at: int) -> None:
        self.is_held, self._fd = True, -1
        with (
            descriptors,
            contextlib.suppress(PermissionError),
        ):  # in memory of another user a reader is not visible
            self._fd = os.open(f"/proc/self/fd/{control.fd}", os.O_RDONLY | os.O_CLOEXEC)
            shared = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, at + READER, 1, 0)
            with contextlib.suppress(BlockingIOError, PermissionError):
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, shared)

    @property
    def lock_fd(self) -> int:
        """The file that has the lock; -1: it is not shared."""
        return self._fd

    def release(self) -> None:
        """Give up the share of the lock."""
        self.is_held = False
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def is_taken(fd: int, at: int, which: int, count: int = 1) -> bool:
    """Return True if a living process, this one or another, holds that role, or one of `count` from there on. Only asks
    the kernel about the lock.
    """
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, at + which, count, 0)
    kind: int = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK


def _why(code: int) -> str:
    if code == errno.ENOSPC:
        return "a process holds at most 2048 roles (the kernel's limit for robust futexes); close some or use another"
    return os.strerror(code)


def _after_fork() -> None:
    for file in list(_files.values()):
        file.abandon()
    _files.clear()


os.register_at_fork(after_in_child=_after_fork)
