"""The scheduling attributes of threads: sched_getattr(2) and sched_setattr(2), for which Python has no functions."""

from __future__ import annotations

import errno
import os
import struct
from typing import NamedTuple

from driver.engine.system_calls import MACHINES, NUMBERS
from driver.libc import function
from fmq._core import ffi

_syscall = function("syscall", "long(*)(long number, long thread, void *attributes, long c, long d)")
_STRUCT = struct.Struct("IIQiIQQQII")  # struct sched_attr, since Linux 5.3


class SchedulingAttributes(NamedTuple):
    """The fields of struct sched_attr behind its size, as sched_setattr(2) explains them."""

    policy: int = 0
    flags: int = 0
    nice: int = 0
    priority: int = 0
    runtime: int = 0  #: ns; the time slice of SCHED_OTHER and SCHED_BATCH since Linux 6.12: 0 for the usual one
    deadline: int = 0
    period: int = 0
    least_utilisation: int = 0
    most_utilisation: int = 0


def attributes_of(thread: int = 0) -> SchedulingAttributes:
    """Return the attributes of a thread; 0 is the calling one. Raise OSError."""
    found = ffi.new("char[]", _STRUCT.size)
    _call("sched_getattr", thread, found, _STRUCT.size, 0)
    return SchedulingAttributes(*_STRUCT.unpack(ffi.buffer(found))[1:])


def set_attributes(attributes: SchedulingAttributes, thread: int = 0) -> None:
    """Give a thread these attributes. Raise OSError."""
    _call("sched_setattr", thread, ffi.from_buffer(_STRUCT.pack(_STRUCT.size, *attributes)), 0, 0)


def _call(name: str, thread: int, attributes: object, *rest: int) -> None:
    machine = os.uname().machine
    number = NUMBERS[name][MACHINES[machine][0]] if machine in MACHINES else None
    if number is None:
        raise OSError(errno.ENOSYS, f"no number of {name} is known for {machine}")
    if _syscall(number, thread, attributes, *rest) < 0:
        raise OSError(ffi.errno, os.strerror(ffi.errno))
