"""The kernel's account of another process: which one is stopped, and holds others up, and how long it ran."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_DEVICE = b"driver.service.process"  # among the words of a device that a client has started


class OtherProcess(NamedTuple):
    """A process, its name, and whether it is stopped: by a signal (Ctrl-Z), or by a debugger."""

    pid: int
    command: str
    is_stopped: bool

    @classmethod
    def of(cls, pid: int, states: str = "Tt") -> OtherProcess:
        """Read a process's state; `states`: those that count as stopped. Raise OSError if it ended, or is hidden."""
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition(" (")[2].rpartition(") ")
        return cls(pid, name, rest[0] in states)


def processor_time_ns(pid: int) -> int:
    """Return the processor time of a process, by the clock that clock_getcpuclockid(3) makes. Raise OSError,
    OverflowError: there is no such process.
    """
    return time.clock_gettime_ns(~pid << 3 | 2)


def stopped_of_device(pid: int) -> OtherProcess | None:
    """Return a process of the device with this service that a signal has stopped. None: there is none, or that is no
    device that a client has started. What a debugger has stopped will go on.
    """
    with suppress(OSError, ValueError):
        if _DEVICE in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            return next((found for each in (pid, *children) if (found := OtherProcess.of(each, "T")).is_stopped), None)
    return None
