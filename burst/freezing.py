"""Filling memory that no process can change afterwards."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from burst.backing import fill_holes
from burst.memory_limits import check_available

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from io import FileIO

    from numpy.typing import NDArray

FROZEN = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""The seals of memory that no process can change any more."""
_CHUNK = 1 << 18  # bytes of a file that are copied at a time: they stay in the cache of the processor


def is_frozen(fd: int) -> bool:
    """Return True if no process can change it any more."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & FROZEN == FROZEN
    except OSError:
        return False  # this kind of memory has no seals


def frozen_fd(nbytes: int, write: Callable[[int, int], object]) -> int:
    """Return a descriptor of new frozen memory. `write` gets the descriptor, and `nbytes`.

    Raise what it raises, ValueError, ResourceExhaustedPersistent.
    """
    if nbytes < 1:
        raise ValueError(f"nbytes={nbytes}: shared memory has at least one byte")
    check_available(nbytes)
    fd = os.memfd_create("burst-constants", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        write(fd, nbytes)
        fill_holes(fd)  # now: nothing can be added to it later
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, FROZEN | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def filled(fill: Callable[[NDArray[np.uint8]], object]) -> Callable[[int, int], None]:
    """Write memory through a mapping, which it closes: the kernel refuses to seal memory that is mapped writable."""

    def write(fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)
        pages = mmap.mmap(fd, nbytes)
        room: NDArray[np.uint8] = np.frombuffer(pages, np.uint8)
        fill(room)
        del room
        try:
            pages.close()
        except BufferError:
            raise ValueError("fill kept an array of the memory, which could still be written through it") from None

    return write


def copy_file(file: FileIO, parts: Sequence[tuple[int, int]], fd: int, nbytes: int) -> None:
    """Copy parts of a file, one behind the other, through a small buffer: half the time of reading it into mapped
    pages, which fault one by one. `parts`: the first byte of each, and the one behind the last; `nbytes` of all.
    """
    buffer, done = memoryview(bytearray(min(nbytes, _CHUNK))), 0
    for begin, end in parts:
        left = end - begin
        while left:
            count = os.preadv(file.fileno(), [buffer[:left]], end - left)
            if not count:
                raise file_changed(file)
            if os.pwrite(fd, buffer[:count], done) != count:
                raise OSError(errno.ENOSPC, "no memory left for a copy", str(file.name))
            left, done = left - count, done + count


def file_changed(file: FileIO) -> OSError:
    """Return the error of a file that another process writes meanwhile."""
    name: Any = file.name
    return OSError(errno.ESTALE, "the file has changed while it was read", name)
