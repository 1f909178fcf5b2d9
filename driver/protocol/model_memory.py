"""The memory of a model: what its client sent, mapped as one range of addresses that no process can change.

A model's constants lie in its own memfd, or in pools of the client that are sealed against writing, as those made by
`burst.Memory.frozen` are. Such pools travel as handles and are not copied: each follows the one before it, from the
next page on, and the model's own memfd is the last. So every constant has one offset, whatever memory it lies in, and a
device sees one array of bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from burst import ResourceExhaustedTransient
from burst.backing import Backing, backing_of
from burst.exhaustion import exhausted
from burst.freezing import FROZEN
from burst.memory import KINDS
from burst.own_kinds import is_own_kind
from driver.libc import function
from driver.nn import InvalidModel
from fmq._core import ffi

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

_FIXED, _NO_RESERVE = 0x10, 0x4000  # MAP_FIXED, MAP_NORESERVE
_MAX_BYTES = 2**47  # what can be mapped at all
_DUPLICATE = 1 | 2  # MREMAP_MAYMOVE, MREMAP_FIXED

_memcmp = function("memcmp", "int(*)(const void *one, const void *other, size_t nbytes)")
_mmap = function("mmap", "void *(*)(void *address, size_t bytes, int protection, int flags, int fd, long offset)")
_mremap = function("mremap", "void *(*)(void *old, size_t old_bytes, size_t bytes, int flags, void *address)")
_munmap = function("munmap", "int(*)(void *address, size_t bytes)")
_FAILED = 2 ** (8 * ffi.sizeof("void *")) - 1
_BLOCK = 512  # bytes, the unit of st_blocks
_SAMPLE, _SAMPLES = 4096, 16  # bytes, of a sketch
MOST_HANDLES = 32
"""Pools of one model that travel as handles."""


class ModelBytes(Protocol):
    """The bytes of a model."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""

    @property
    def occupied(self) -> dict[Hashable, int]:
        """Bytes of memory that it keeps from being freed, by what tells this memory from other memory."""

    def asarray(self) -> NDArray[np.uint8]:
        """Return a view, which keeps the memory mapped."""


class Handle(NamedTuple):
    """A part of a pool, as it travels beside the pool's descriptor."""

    kind: str  #: of the pool: a key of `burst.memory.KINDS`, or a driver's own kind
    offset: int  #: in the pool's memory: a multiple of the page size
    nbytes: int


class Part(NamedTuple):
    """A part of a model's memory."""

    start: int  #: in the model's range of addresses
    nbytes: int
    kind: str | None  #: of a client's pool; None: the model's own memfd
    file: tuple[int, int, int]  #: device, inode and offset: which memory it is, while it is mapped
    of: int  #: bytes of that memory, of which this is a part


def pages(nbytes: int) -> int:
    """`nbytes`, rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def same_bytes(one: int, other: int, nbytes: int) -> bool:
    """Return True if two ranges of memory have equal bytes. Releases the GIL meanwhile."""
    return not _memcmp(ffi.cast("void *", one), ffi.cast("void *", other), nbytes)


def same_memory(one: ModelBytes, other: ModelBytes) -> bool:
    """Return True if two models of equal size have equal bytes. Compares only bytes that are not in the same memory."""
    if isinstance(one, SealedModel) and isinstance(other, SealedModel) and one.shape == other.shape:
        rest = [ours for ours, theirs in zip(one.parts, other.parts, strict=True) if ours.file != theirs.file]
        return all(same_bytes(one.address + part.start, other.address + part.start, part.nbytes) for part in rest)
    return same_bytes(_address(one), _address(other), one.nbytes)


def sketch_of(memory: ModelBytes) -> bytes:
    """Return a digest of some of a model's bytes: it tells many models apart soon, and proves no two to be equal."""
    whole = memory.asarray()
    last = max(0, whole.size - _SAMPLE)
    starts = sorted({last * n // (_SAMPLES - 1) for n in range(_SAMPLES)})
    return hashlib.blake2b(b"".join(whole[start : start + _SAMPLE].data for start in starts), digest_size=16).digest()


def _address(memory: ModelBytes) -> int:
    return memory.asarray().ctypes.data


class SealedModel:
    """The memory of a model that another process sent, mapped for reading. Keeps no descriptor.

    parts: in the order of their addresses; the last is the model's own memfd.
    """

    def __init__(self, fds: Sequence[int], handles: Sequence[Handle]) -> None:
        """`fds`: of the model's own memfd, then of each handle's pool. They stay the caller's. Raise InvalidModel."""
        parts: list[Part] = []
        for fd, handle in zip((*fds[1:], fds[0]), (*handles, None), strict=True):
            start = parts[-1].start + pages(parts[-1].nbytes) if parts else 0
            parts.append(_checked(fd, handle, start))
        self.parts = tuple(parts)
        self.nbytes = parts[-1].start + parts[-1].nbytes
        self.address = _reserved(pages(self.nbytes) + mmap.PAGESIZE)  # vector kernels read beyond the end
        pointer = ffi.cast("unsigned char *", self.address)
        unmapping: Any = _Unmapping(self.address, pages(self.nbytes) + mmap.PAGESIZE)
        memory: Any = ffi.gc(pointer, unmapping)
        for fd, part in zip((*fds[1:], fds[0]), parts, strict=True):
            place, flags = ffi.cast("void *", self.address + part.start), mmap.MAP_SHARED | _FIXED
            if _number(_mmap(place, part.nbytes, mmap.PROT_READ, flags, fd, part.file[2])) == _FAILED:
                error = OSError(ffi.errno, f"the model's memory cannot be mapped: {os.strerror(ffi.errno)}")
                raise exhausted(error) or InvalidModel(str(error))
        everything: Any = ffi.buffer(memory, self.nbytes)
        self._bytes: NDArray[np.uint8] = np.frombuffer(everything, np.uint8)
        self._bytes.flags.writeable = False
        _mapped[self.address] = self.parts

    @property
    def shape(self) -> tuple[tuple[int, int], ...]:
        """The places of its parts."""
        return tuple((part.start, part.nbytes) for part in self.parts)

    def asarray(self) -> NDArray[np.uint8]:
        """Return a read-only view, which keeps the memory mapped."""
        return self._bytes

    @property
    def occupied(self) -> dict[Hashable, int]:
        """The bytes in memory, by device and inode: the whole of a pool stays there while a part of it is mapped."""
        return {part.file[:2]: part.of for part in self.parts}

    def kind_at(self, address: int) -> str | None:
        """Return the kind of the client's pool that has this address; None if the model's own memory has it."""
        start = address - self.address
        return next((part.kind for part in self.parts if part.start <= start < part.start + part.nbytes), None)


_mapped: dict[int, tuple[Part, ...]] = {}  # by address, while it is mapped


class _Unmapping(NamedTuple):
    """Unmaps a range when the last array on it is gone."""

    address: int
    nbytes: int

    def __call__(self, memory: Any) -> None:
        _mapped.pop(self.address, None)
        _munmap(memory, self.nbytes)


def _number(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


def _reserved(nbytes: int) -> int:
    """Reserve addresses for so many bytes, which read as zeros. Raise InvalidModel."""
    if nbytes >= _MAX_BYTES:
        raise InvalidModel(f"a model of {nbytes} bytes: at most {_MAX_BYTES} can be mapped")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    found = _number(_mmap(ffi.NULL, nbytes, mmap.PROT_READ, flags, -1, 0))
    if found == _FAILED:
        raise ResourceExhaustedTransient(f"there are no addresses for a model of {nbytes} bytes; try again later")
    return found


def _checked(fd: int, handle: Handle | None, start: int) -> Part:
    """Return a part, checked. Raise InvalidModel for memory that another process could change, or that has no such
    part.
    """
    what = "the model's memory" if handle is None else f"the pool of kind {handle.kind!r:.40}"
    if backing_of(fd) is Backing.HUGE_PAGES:
        raise InvalidModel(f"{what} is of huge pages, which cannot be mapped in part; use pages of the usual size")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & FROZEN != FROZEN:
        raise InvalidModel(f"{what} is not sealed against writing, shrinking and growing")
    status = os.fstat(fd)  # after the look at the seals: the size cannot change
    if handle is None:
        handle = Handle("", 0, status.st_size)
    elif handle.kind not in KINDS and not is_own_kind(handle.kind):  # the service refuses operations on the latter
        raise InvalidModel(f"{what} is unknown: this device knows {', '.join(KINDS)}")
    offset, nbytes = handle.offset, handle.nbytes
    if nbytes < 1 or offset < 0 or offset % mmap.PAGESIZE or offset + nbytes > status.st_size:
        raise InvalidModel(f"{what}: {nbytes} bytes at {offset} are not whole pages of its {status.st_size} bytes")
    if has_holes(fd, handle):
        raise InvalidModel(f"{what} has holes, which would become pages of the device's when it reads them: write all")
    return Part(start, nbytes, handle.kind or None, (status.st_dev, status.st_ino, offset), of=status.st_size)


def has_holes(fd: int, handle: Handle) -> bool:
    """Return True if pages of this part do not exist, or cannot be told. Pages that the system has swapped out do."""
    try:
        return os.lseek(fd, handle.offset, os.SEEK_HOLE) < handle.offset + handle.nbytes
    except OSError:
        return True


def is_made_whole(fd: int, used: Sequence[tuple[int, int]]) -> bool:
    """Return True if a frozen pool has all its pages, which become this process's where it lacks some.

    `used`: where the constants in it begin and end; they are read in any case. A pool of which half is missing then is
    left as it is. So the answer stays the same, whichever of its constants a model uses.
    """
    nbytes = os.fstat(fd).st_size
    everything = Handle("", 0, nbytes)
    if has_holes(fd, everything):
        for start, end in used:
            _make_pages(fd, start // mmap.PAGESIZE * mmap.PAGESIZE, end)
        if 2 * _BLOCK * os.fstat(fd).st_blocks >= nbytes:
            _make_pages(fd, 0, nbytes)
    return not has_holes(fd, everything)


def _make_pages(fd: int, start: int, end: int) -> None:
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    with suppress(OSError), mmap.mmap(fd, end - start, flags, mmap.PROT_READ, offset=start):
        pass  # that they were mapped is enough


def map_again(root: NDArray[np.uint8], skew: int, target: Any) -> None:
    """Map the shared pages of `root` a second time, for reading, at the addresses from `target` on.

    `root` begins `skew` bytes behind the start of a page; `target` is where that page comes. Raise OSError when the
    pages are private, or there is no room.
    """
    address = root.ctypes.data
    known = _mapped.get(address)
    parts = [(part.start, part.nbytes) for part in known] if known else [(0, skew + root.nbytes)]
    for start, nbytes in parts:
        place, source = target + start, ffi.cast("void *", address - skew + start)
        if _number(_mremap(source, 0, nbytes, _DUPLICATE, ffi.cast("void *", place))) == _FAILED:
            raise OSError(ffi.errno, f"{nbytes} bytes of weights cannot be mapped twice")
