"""Landlock: a process gives up files, signals and abstract sockets, for itself and its children, for good.

Each call adds a layer, up to 16, and what one of the layers refuses is refused. A layer holds for the thread that
enters it, and for the threads and processes that this thread starts later. So enter it while the process has one.

A process may signal and trace only processes of its own layers, and of layers that were added below.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from contextlib import suppress
from enum import IntFlag
from typing import TYPE_CHECKING

from driver.libc import function
from fmq._core import ffi

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_prctl = function("prctl", "int(*)(int, unsigned long, unsigned long, unsigned long, unsigned long)")
_syscall = function("syscall", "long(*)(long number, long a, long b, long c, long d)")

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # on every architecture
_VERSION, _BENEATH, _NO_NEW_PRIVS = 1, 1, 38
_CONNECTS, _CONTROLS, SCOPES = 4, 5, 6
"""The first versions of the ABI with rules for TCP, for ioctl, and for signals and abstract sockets."""


class Access(IntFlag):
    """The kinds of access that may be given beneath a path, as in linux/landlock.h."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_FOLDER = 1 << 3
    REMOVE_FOLDER = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_FOLDER = 1 << 7
    MAKE_FILE = 1 << 8
    MAKE_FIFO = 1 << 10
    MAKE_LINK = 1 << 12
    TRUNCATE = 1 << 14
    CONTROL = 1 << 15  #: ioctl on a device

    READ = READ_FILE | READ_FOLDER
    WRITE = WRITE_FILE | TRUNCATE
    OF_FILES = EXECUTE | READ_FILE | WRITE | CONTROL
    EDIT = READ | WRITE | REMOVE_FOLDER | REMOVE_FILE | MAKE_FOLDER | MAKE_FILE | MAKE_FIFO | MAKE_LINK


_ALL_BY_ABI = (0, (1 << 13) - 1, (1 << 14) - 1, (1 << 15) - 1, (1 << 15) - 1, (1 << 16) - 1)


def abi() -> int:
    """Return the version of Landlock in the kernel; 0: it has none, or it is off."""
    return max(0, int(_syscall(_CREATE, 0, 0, _VERSION, 0)))


def restrict(rules: Mapping[Path, Access], *, network: bool = False, abstract: bool = False) -> int:
    """Leave this thread the files beneath these paths, and signals to processes of its layers.

    It gets no TCP unless `network`, and no sockets of others in the abstract namespace unless `abstract`.

    What is open stays usable. A path that is not there, or that this account cannot look up, gives nothing. Returns the
    version of the ABI; 0: Landlock is not there.

    Raise OSError.
    """
    version = abi()
    if not version:
        return 0
    known = _ALL_BY_ABI[min(version, _CONTROLS)]
    fields = [known, 0 if network else 3, 2 if abstract else 3]
    words = fields[: 3 if version >= SCOPES else 2 if version >= _CONNECTS else 1]
    attributes = ffi.from_buffer(struct.pack(f"{len(words)}Q", *words))
    ruleset = _called(_CREATE, int(ffi.cast("uintptr_t", attributes)), 8 * len(words), 0)
    try:
        for path, access in rules.items():
            _add(ruleset, path, access & known)
        if _prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ffi.errno, "no_new_privs")
        _called(_RESTRICT, ruleset, 0, 0)
    finally:
        os.close(ruleset)
    return version


def _add(ruleset: int, path: Path, access: int) -> None:
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(fd).st_mode):
                access &= Access.OF_FILES
            rule = ffi.from_buffer(struct.pack("=Qi", access, fd))
            if access:
                _called(_ADD, ruleset, _BENEATH, int(ffi.cast("uintptr_t", rule)))
        finally:
            os.close(fd)


def _called(number: int, *arguments: int) -> int:
    result = int(_syscall(number, *arguments, *[0] * (4 - len(arguments))))
    if result < 0:
        raise OSError(ffi.errno, f"Landlock: {os.strerror(ffi.errno)} ({errno.errorcode.get(ffi.errno)})")
    return result
