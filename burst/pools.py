"""The kinds of memory pools. A new one is a class like these, and its place in `KINDS`."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from typing import Any, ClassVar

from burst.images import DmaBuf, HardwareBuffer, checked_usage, is_dma_buf
from burst.memory import Memory
from fmq._core import lib
from fmq.errors import InvalidDescriptor, raise_errno
from fmq.region import checked_size

_READ, _BOTH = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
_MAX_BYTES = 2**47  # what can be mapped at all


class MappedFd(Memory):
    """Part of whatever can be mapped, most often of a file: the HAL's `mmap_fd`. Made by `Memory.from_fd`.

    What was written to a file on a disk is there when the execution's result comes.
    """

    kind: ClassVar[str] = "mmap_fd"

    def __init__(self, fd: int, nbytes: int, protection: int, offset: int) -> None:
        """Owns `fd`, which was checked."""
        is_on_disk = _is_file(fd) and not _is_memory(fd)
        super().__init__(fd, nbytes, writable=protection == _BOTH, offset=offset)
        self.protection, self.offset = protection, offset
        self.needs_sync = self.writable and is_on_disk

    def fields(self) -> list[Any]:
        """Bytes, protection as of `mmap`, and where they begin in the file."""
        return [self.nbytes, self.protection, self.offset]

    @classmethod
    def checked(cls, fields: list[Any], fd: int) -> dict[str, Any]:
        """As of `Memory`."""
        match fields:
            case [int(nbytes), int(protection), int(offset)] if all(type(field) is int for field in fields):
                pass
            case _:
                raise InvalidDescriptor(f"{fields!r:.80} does not describe a mapping: [bytes, protection, offset]")
        if protection not in (_READ, _BOTH):
            raise InvalidDescriptor(f"protection={protection}: PROT_READ, or PROT_READ | PROT_WRITE")
        if offset % mmap.PAGESIZE or not 0 <= offset < _MAX_BYTES:
            raise InvalidDescriptor(f"offset={offset}: a multiple of the page size, {mmap.PAGESIZE}")
        if not 0 < nbytes < _MAX_BYTES:
            raise InvalidDescriptor(f"nbytes={nbytes}: a pool has at least one byte")
        if _is_file(fd):  # of others mmap knows
            checked_size(fd, offset + nbytes, sealed=False)
        return {"nbytes": nbytes, "protection": protection, "offset": offset}

    def end(self, *, writes: bool) -> None:
        """Waits until the disk has it."""
        if writes and (code := lib.fmq_flush(self.base, self.nbytes)):
            raise_errno(code, "flush")


class HardwareBufferBlob(DmaBuf):
    """A hardware buffer that is no image: bytes. Made by `Memory.from_hardware_buffer` with the format "blob"."""

    kind: ClassVar[str] = "hardware_buffer_blob"

    def fields(self) -> list[Any]:
        """Bytes, which is the buffer's width, and usage."""
        return [self.nbytes, int(self.usage)]

    @classmethod
    def checked(cls, fields: list[Any], fd: int) -> dict[str, Any]:
        """As of `Memory`."""
        match fields:
            case [int(nbytes), int(usage)] if type(nbytes) is int and 0 < nbytes < _MAX_BYTES:
                if not is_dma_buf(fd):
                    checked_size(fd, nbytes, sealed=False)
                return {"nbytes": nbytes, "usage": checked_usage(usage)}
        raise InvalidDescriptor(f"{fields!r:.80} does not describe a blob: [bytes, usage]")


def _is_file(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)


def _is_memory(fd: int) -> bool:
    """Whether nothing but memory is behind the file."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


KINDS: dict[str, type[Memory]] = {
    kind.kind: kind for kind in (Memory, MappedFd, HardwareBufferBlob, HardwareBuffer)
}  #: by the name that travels
