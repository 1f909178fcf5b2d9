"""Shared memory, and views that keep it mapped.

Anonymous memory is a memfd whose size is frozen by seals: a crash leaves no name behind, and no peer can shrink it
while it is read. Named memory is POSIX shared memory, mode 0600, reserved when it is made: a full /dev/shm is an error
here and not a SIGBUS later. posix_ipc opens and unlinks it; without it, and on free-threaded CPython, where it would
switch the GIL on, we make the system calls that shm_open makes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import stat
import sys
import threading
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from fmq._core import ffi, lib
from fmq.errors import InvalidDescriptor, NoSpace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import DTypeLike, NDArray

Kind = Literal["memfd", "posix"]
_SHM = "/dev/shm"  # where glibc keeps POSIX shared memory
_SHM_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
# Held while a region's descriptor is closed, and while a role is taken through its number: no thread takes a role on a
# file that another thread has opened under a number that was just closed. A fork waits for this lock, so that the child
# knows each role that it inherits. Reentrant, because a finalizer or a signal handler may close a region while we hold
# it.
descriptors = threading.RLock()
os.register_at_fork(before=descriptors.acquire, after_in_parent=descriptors.release, after_in_child=descriptors.release)
_HUGE = "it is of huge pages, which cannot be mapped in part nor guarded; use pages of the usual size"


class Region:
    """`nbytes` of shared memory, mapped once.

    Arrays from `asarray` keep the mapping alive: `close` closes the descriptor and never invalidates a view.
    """

    _is_sealed = False  # True if that is known: no seal is ever taken away

    def __init__(
        self, fd: int, nbytes: int, *, writable: bool = True, name: str | None = None, offset: int = 0
    ) -> None:
        """Map `fd` from `offset` on and own it from now on. Use `create`, `open` or `from_fd`, which check first."""
        self.nbytes, self.name, self.writable = nbytes, name, writable
        base = ffi.new("void **")
        if code := lib.fmq_map_at(fd, nbytes, offset, writable, base):
            os.close(fd)
            why = _HUGE if code == -errno.EOPNOTSUPP else os.strerror(-code)
            raise OSError(-code, f"cannot map {nbytes} bytes of shared memory: {why}")
        self._fd = fd  # set last: after a failure above the descriptor is closed already
        pointer = ffi.cast("unsigned char *", base[0])
        self.base = ffi.gc(pointer, lambda p: lib.fmq_unmap(p, nbytes))
        self._bytes: NDArray[np.uint8] = np.frombuffer(ffi.buffer(self.base, nbytes), np.uint8)
        if not writable:
            self._protect(offset)

    def _protect(self, _: int) -> None:
        """Keep arrays from being written to: that would be a fault. The mapping begins at that offset of the memory."""
        self._bytes.flags.writeable = False

    @classmethod
    def create(
        cls,
        nbytes: int,
        kind: Kind | None = None,
        name: str | None = None,
        prepare: Callable[[Region], None] | None = None,
    ) -> Self:
        """Return new zeroed memory: "memfd" (None) or "posix". Memory with a `name` ("/like-this") is always "posix".

        `prepare` fills it before another process can open it. Raise FileExistsError when the name is taken, NoSpace
        when /dev/shm is too full.
        """
        if nbytes < 1:
            raise ValueError(f"nbytes={nbytes}: shared memory has at least one byte")
        if kind not in (None, "memfd", "posix") or (name is not None and kind == "memfd"):
            raise ValueError(f"memory={kind!r}, name={name!r}: memory is 'memfd' or 'posix', and 'posix' with a name")
        if name is not None:
            return cls._create_named(nbytes, checked_name(name), prepare)
        region = cls(_reserved(nbytes, 0o666) if kind == "posix" else memfd(nbytes), nbytes)
        region._is_sealed = kind != "posix"
        if prepare:
            prepare(region)
        return region

    @classmethod
    def _create_named(cls, nbytes: int, name: str, prepare: Callable[[Region], None] | None) -> Self:
        """Make and fill the memory first, and name it last: no process opens a half-made queue, and a creator that is
        killed on the way leaves nothing behind.
        """
        region = cls(_reserved(nbytes), nbytes, name=name)
        if prepare:
            prepare(region)
        try:  # src_dir_fd makes Python call linkat, which follows the link in /proc
            os.link(f"/proc/self/fd/{region.fd}", _SHM + name, src_dir_fd=region.fd)
        except FileExistsError:
            raise FileExistsError(errno.EEXIST, f"name={name!r} is taken; open it, or fmq.unlink it first") from None
        return region

    @classmethod
    def open(cls, name: str, *, writable: bool = True) -> Self:
        """Existing named memory that belongs to this user. Raise FileNotFoundError, PermissionError,
        InvalidDescriptor.
        """
        checked_name(name)
        with _by_name(name, "open") as posix_ipc:
            if posix_ipc:
                fd = int(posix_ipc.SharedMemory(name, read_only=not writable).fd)
            else:  # as shm_open does
                fd = os.open(_SHM + name, (os.O_RDWR if writable else os.O_RDONLY) | _SHM_FLAGS)
        status = os.fstat(fd)
        why = ""
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            why = "is empty, or no file"
        elif status.st_uid != os.geteuid():
            why = f"belongs to uid {status.st_uid}; only your own can be opened"
        if why:
            os.close(fd)
            raise InvalidDescriptor(f"name={name!r}: that shared memory {why}")
        return cls(fd, status.st_size, name=name, writable=writable)

    @classmethod
    def from_fd(cls, fd: int, nbytes: int | None = None, *, writable: bool = True, sealed: bool = True) -> Self:
        """Memory of another process, which is not trusted. Owns `fd`, also after an error.

        Maps the first `nbytes` (None: all). `sealed` demands that no process can shrink it any more; without that, a
        peer can kill us with SIGBUS. Raise InvalidDescriptor, and PermissionError for memory that may not be written.
        """
        try:
            nbytes = checked_size(fd, nbytes, sealed=sealed)
        except BaseException:
            os.close(fd)
            raise
        region = cls(fd, nbytes, writable=writable)
        region._is_sealed = sealed
        return region

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for `multiprocessing`, between processes of one program."""
        if self.name is not None:
            return _reopen, (self.name, self.writable)
        from multiprocessing import reduction  # takes as long to load as this package

        return _adopt, (reduction.DupFd(self.fd), self.nbytes, self.writable, self.sealed)

    def is_same_memory(self, other: Region) -> bool:
        """Return True if both regions map the same memory."""
        return os.path.sameopenfile(self.fd, other.fd)

    @property
    def sealed(self) -> bool:
        """True if a seal keeps every process from shrinking it."""
        return self._is_sealed or _has_seal(self.fd)

    @property
    def is_closed(self) -> bool:
        """True if `close` was called."""
        return self._fd < 0

    @property
    def fd(self) -> int:
        """The descriptor, for passing on. Raises ValueError after `close`."""
        if self._fd < 0:
            raise ValueError("this region is closed: its descriptor is gone (views of it live on)")
        return self._fd

    def asarray(
        self, dtype: DTypeLike = np.uint8, shape: int | tuple[int, ...] | None = None, offset: int = 0
    ) -> NDArray[Any]:
        """Return a view of `shape` elements of `dtype` at byte `offset`; None = all that fit from there."""
        dt = np.dtype(dtype)
        if not 0 <= offset <= self.nbytes:
            raise ValueError(f"offset={offset}: outside the region's {self.nbytes} bytes")
        dims = (self.nbytes - offset) // dt.itemsize if shape is None else shape
        count = math.prod(dims) if isinstance(dims, tuple) else int(dims)
        if count < 0 or count * dt.itemsize > self.nbytes - offset:
            raise ValueError(f"shape={shape} of {dt} at offset={offset}: outside the region's {self.nbytes} bytes")
        return np.ndarray(dims, dt, self._bytes, offset)

    def bring_pages(self, offset: int, nbytes: int) -> None:
        """Have the kernel bring these pages now, in this thread and without the GIL. What is out of range is left out.

        A page of a file may be long in coming, and one that a program touches holds up what its thread holds.
        """
        if 0 <= offset < self.nbytes and nbytes > 0:
            lib.fmq_populate(self.base + offset, min(nbytes, self.nbytes - offset))

    def close(self) -> None:
        """Close the descriptor. The memory itself goes when the last view and the last other process are gone."""
        with descriptors:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, TypeError, OSError):  # the interpreter may have cleared our module
            self.close()


def guard() -> None:
    """Make memory that a peer truncates read as zeros instead of raising SIGBUS. For processes that serve others."""
    if code := lib.fmq_guard():
        raise OSError(-code, f"cannot handle SIGBUS: {os.strerror(-code)}")


def checked_name(name: str) -> str:
    """Return the name, if it is legal for POSIX shared memory: one slash at the front, and more behind it."""
    if not name.startswith("/") or "/" in name[1:] or not 1 < len(name) < 250 or "\0" in name:
        raise ValueError(f"name={name!r}: a queue's name is '/' and up to 248 characters without another '/'")
    return name


def _posix_ipc() -> Any:
    """Return posix_ipc; None where it is not installed, or would switch the GIL of a free-threaded CPython on."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    try:
        import posix_ipc
    except ImportError:
        return None
    return posix_ipc


@contextlib.contextmanager
def _by_name(name: str, verb: str) -> Iterator[Any]:
    """Give posix_ipc, or None where we make the system calls; raise the errors of either as Python's, with the name."""
    posix_ipc = _posix_ipc()
    missing: tuple[type[Exception], ...] = (FileNotFoundError,)
    denied: tuple[type[Exception], ...] = (PermissionError,)
    if posix_ipc:
        missing, denied = (*missing, posix_ipc.ExistentialError), (*denied, posix_ipc.PermissionsError)
    try:
        yield posix_ipc
    except missing:
        raise FileNotFoundError(errno.ENOENT, f"name={name!r}: no shared memory of that name") from None
    except denied:
        raise PermissionError(errno.EACCES, f"name={name!r}: you may not {verb} it") from None


def unlink(name: str) -> None:
    """Remove a name. Processes that have the memory open keep it. Raise FileNotFoundError, PermissionError."""
    checked_name(name)
    with _by_name(name, "remove") as posix_ipc:
        if posix_ipc:
            posix_ipc.unlink_shared_memory(name)
        else:
            os.unlink(_SHM + name)


def memfd(nbytes: int) -> int:
    """Return new anonymous memory whose size is sealed."""
    fd: int = lib.fmq_memfd(nbytes)
    if fd < 0:
        raise OSError(-fd, os.strerror(-fd))
    return fd


def _reserved(nbytes: int, mode: int = 0o600) -> int:
    """POSIX shared memory that has no name yet, so that a crash leaves nothing behind.

    `mode` says which users may open it, by its name or through a descriptor that they received. A peer, perhaps of
    another account, opens memory without a name again to hold its role.
    """
    if nbytes > _free():  # told before any page is taken: the kernel would take them one by one, until none is left
        raise _no_space(nbytes)
    fd = os.open(_SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, mode)  # the umask does not apply here
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.ENOSPC:
            raise
        raise _no_space(nbytes) from None
    return fd


def _free() -> int:
    found = os.statvfs(_SHM)
    return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize  # mounted without a limit: 0 blocks


def _no_space(nbytes: int) -> NoSpace:
    return NoSpace(
        errno.ENOSPC,
        f"{nbytes} bytes of shared memory are needed and {_free()} are free in {_SHM}; make it larger, or use "
        "anonymous memory",
    )


def checked_size(fd: int, nbytes: int | None, *, sealed: bool) -> int:
    """`nbytes`, or (None) the size of the memory behind `fd`. Raise InvalidDescriptor for memory that is smaller."""
    if nbytes is not None and nbytes < 1:
        raise InvalidDescriptor(f"nbytes={nbytes}: shared memory has at least one byte")
    if sealed and not _has_seal(fd):
        raise InvalidDescriptor("the memory is not sealed against shrinking; make it with Region.create()")
    status = os.fstat(fd)  # after the look at the seals: from here on the size cannot change
    if not stat.S_ISREG(status.st_mode):
        raise InvalidDescriptor("the descriptor is not of shared memory")
    if status.st_size < (nbytes or 1):
        raise InvalidDescriptor(f"nbytes={nbytes}, but the memory has only {status.st_size}")
    return status.st_size if nbytes is None else nbytes


def _adopt(carried: Any, nbytes: int, writable: bool, sealed: bool) -> Region:
    return Region.from_fd(carried.detach(), nbytes, writable=writable, sealed=sealed)


def _reopen(name: str, writable: bool) -> Region:
    return Region.open(name, writable=writable)


def _has_seal(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False  # this kind of memory has no seals
