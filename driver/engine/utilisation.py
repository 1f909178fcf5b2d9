"""The least utilisation that the kernel assumes of this process's threads: it picks processors and clocks by that.

A thread that sleeps between requests looks idle, so the clock is low when its next request comes. A clamp (uclamp,
sched_setattr(2)) says that it is busy whenever it runs. A thread clamps itself, without privilege, and threads that it
starts inherit the clamp. The sandbox lets it clamp no other one, which might be another program's.
"""

from __future__ import annotations

import errno
import os
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING

from driver.engine.system_calls import MACHINES, NUMBERS
from driver.libc import function
from fmq._core import ffi

if TYPE_CHECKING:
    from collections.abc import Iterator

FULL = 1024
"""The utilisation of a thread that is always busy, on the fastest processor."""

_syscall = function("syscall", "long(*)(long number, long thread, void *attributes, long c, long d)")
_ATTRIBUTES = struct.Struct("IIQiIQQQII")  # struct sched_attr, since Linux 5.3
_KEEP, _CLAMP_LEAST = 0x08 | 0x10, 0x20  # policy and parameters stay; sched_util_min is given


def least() -> int:
    """Return the clamp of the calling thread. Raise OSError."""
    attributes = ffi.new("char[]", _ATTRIBUTES.size)
    _call("sched_getattr", attributes, _ATTRIBUTES.size, 0)
    return int(_ATTRIBUTES.unpack(ffi.buffer(attributes))[-2])


def set_least(value: int) -> None:
    """Clamp the calling thread. Raise OSError, with EOPNOTSUPP where the kernel cannot."""
    flags = _KEEP | _CLAMP_LEAST
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, 0, flags, 0, 0, 0, 0, 0, value, 0)
    _call("sched_setattr", ffi.from_buffer(attributes), 0, 0)


def _call(name: str, attributes: object, *rest: int) -> None:
    machine = os.uname().machine
    number = NUMBERS[name][MACHINES[machine][0]] if machine in MACHINES else None
    if number is None:
        raise OSError(errno.ENOSYS, f"no number of {name} is known for {machine}")
    if _syscall(number, 0, attributes, *rest) < 0:
        raise OSError(ffi.errno, os.strerror(ffi.errno))


@contextmanager
def clamped() -> Iterator[None]:
    """Clamp the calling thread to FULL within the block; threads that it starts meanwhile stay so. Raise OSError."""
    before = least()
    set_least(FULL)
    try:
        yield
    finally:
        set_least(before)
