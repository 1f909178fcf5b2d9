"""How a process tells others of its death and learns of theirs, whatever its size (csrc/fmq/life.c and bridge.c)."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from typing import TYPE_CHECKING, Final

from fmq._core import lib
from fmq.closing import Closing
from fmq.mapped import finalize_mapped
from fmq.process_bound import ProcessBound
from fmq.region import Region

if TYPE_CHECKING:
    import socket


class LifePage(ProcessBound):
    """A word that says whether this process lives, on a page that no other process can write.

    One page serves one peer: the kernel wakes one waiter per word.
    """

    to_send = "it says that this process lives; another process makes its own"

    nbytes: Final = 4096

    def __init__(self) -> None:
        self.fd = os.memfd_create("fmq-life", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.nbytes)
        except BaseException:
            os.close(self.fd)
            raise
        self._slot = lib.fmq_life_hold(self.fd, 0, 1)
        if self._slot < 0:
            os.close(self.fd)
            raise OSError(-self._slot, f"cannot announce this process's life: {os.strerror(-self._slot)}")
        self._finalizer = weakref.finalize(self, _end_page, self.fd, self._slot)
        try:
            # Our own mapping stays writable; from here on no process can make another writable one.
            size = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, size | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the word, which tells the peer that this process left in good order."""
        self._finalizer()

    def die(self) -> None:
        """Mark the word as if this process had died: for one that stands in for another process, which has."""
        if self._finalizer.detach():
            lib.fmq_life_die(self._slot)
            os.close(self.fd)


class Watch(Closing):
    """Shuts a socket down, for both directions, as soon as the process behind a life word dies."""

    to_send = "watch where that is needed"

    def __init__(self, region: Region, offset: int, sock: socket.socket) -> None:
        """Watch the word at `offset` of `region`. Beyond some 4,000 watches in a process it does nothing; then the
        socket ends when the kernel closes the peer's: about 80 ms later per GB.
        """
        self._region, self._word = region, region.base + offset  # the region keeps the word mapped
        token = lib.fmq_watch(self._word, sock.fileno())
        if token < 0 and -token != errno.ENOSPC:
            raise OSError(-token, f"cannot watch a peer: {os.strerror(-token)}")
        self._finalizer = finalize_mapped(self, region, lib.fmq_unhang, token)

    @classmethod
    def of_page(cls, fd: int, sock: socket.socket) -> Watch:
        """Watch a LifePage that a peer sent. Owns `fd`. Raise InvalidDescriptor."""
        page = Region.from_fd(fd, LifePage.nbytes, writable=False)
        page.close()
        return cls(page, 0, sock)

    @property
    def has_died(self) -> bool:
        """True if the process is dead now. The kernel marks the word before it closes the process's sockets."""
        return bool(lib.fmq_life_state(self._word) == lib.FMQ_DEAD)

    def close(self) -> None:
        """Stop watching."""
        self._finalizer()


_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, 5.1; not yet in Python's fcntl


def _end_page(fd: int, slot: int) -> None:
    lib.fmq_life_release(slot)
    os.close(fd)
