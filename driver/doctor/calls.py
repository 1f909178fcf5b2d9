"""Tries the system calls that bursts need: a kernel may lack them, or a container's filter refuse them."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from cffi import FFI

from driver.doctor.finding import Finding, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ffi = FFI()
_ffi.cdef("long syscall(long number, ...);")
_libc: Any = _ffi.dlopen(None)
_FUTEX_WAITV = 449  # on every architecture
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_F_OFD_SETLK = 37
_ALLOW = "allow the call in the container's seccomp profile, or use a newer kernel"


class Call(NamedTuple):
    """A system call to try. `state`: the finding if it is refused."""

    name: str
    attempt: Callable[[], object]
    state: State
    why: str


def tried() -> Iterator[Finding]:
    """Makes each call once, harmlessly."""
    for call in CALLS:
        try:
            call.attempt()
        except OSError as error:
            number = errno.errorcode.get(error.errno or 0, str(error.errno))
            yield Finding(call.name, call.state, f"refused with {number}", call.why, _ALLOW)
        else:
            yield Finding(call.name, "ok", "works")


def futex_waitv() -> None:
    """Waits on nothing: a kernel that has the call answers EINVAL. Raises OSError."""
    arguments = [_ffi.cast("long", 0)] * 5
    if _libc.syscall(_ffi.cast("long", _FUTEX_WAITV), *arguments) < 0 and _ffi.errno != errno.EINVAL:
        raise OSError(_ffi.errno, os.strerror(_ffi.errno))


def memfd() -> None:
    """Makes anonymous memory and seals its size. Raises OSError."""
    fd = _new_memfd()
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    finally:
        os.close(fd)


def ofd_lock() -> None:
    """Takes a lock that belongs to an open file, as the roles of a queue do. Raises OSError."""
    fd = _new_memfd()
    try:
        fcntl.fcntl(fd, _F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    finally:
        os.close(fd)


def _new_memfd() -> int:
    return os.memfd_create("burst-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


CALLS = [
    Call("memfd_create and seals", memfd, "warning", "queues and pools are sealed anonymous memory"),
    Call("open file locks (OFD)", ofd_lock, "warning", "the reader and the writer of a queue each hold one"),
    Call("futex_waitv", futex_waitv, "note", "without it (Linux 5.16), the death of a large peer is detected later"),
]
