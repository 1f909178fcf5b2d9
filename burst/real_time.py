"""Real time: threads that the kernel runs before all ordinary ones (SCHED_FIFO), and memory that stays in place."""

from __future__ import annotations

import os
import resource
import threading
from typing import TYPE_CHECKING

from burst._core import ffi, lib
from burst.ends import handles_of
from burst.errors import ResourceExhaustedPersistent

if TYPE_CHECKING:
    from burst.trace import Trace
    from fmq import MessageQueueReader, MessageQueueWriter
    from fmq.region import Region

PRIORITY = 5
"""The priority of threads that serve bursts: before ordinary ones, behind sound servers (10 or more) and interrupts."""

LONGEST = 0.2
"""Seconds that such a thread may run without a sleep; then it goes on as an ordinary one, and says so."""

_LAST = 1.0  # seconds after which the kernel ends the process
_HIGHEST = 99


def bound() -> None:
    """Bound what threads in real time may run (RLIMIT_RTTIME), of all of this process. Raise OSError."""
    _check(lib.burst_bound_real_time(int(LONGEST * 1e6), int(_LAST * 1e6)), "RLIMIT_RTTIME")


def enter(priority: int = PRIORITY) -> None:
    """Have the calling thread run in real time, until its end. Raise OSError."""
    _check(lib.burst_real_time(priority), "SCHED_FIFO")


def why_not(priority: int = PRIORITY) -> str:
    """Return why a thread of this process may not run in real time, tried in one of its own; "": it may."""
    found: list[str] = []

    def attempt() -> None:
        try:
            enter(priority)
        except OSError as error:
            found.append(f"SCHED_FIFO, priority {priority}, is refused with {error.strerror}; {limit_text()}")

    thread = threading.Thread(target=attempt, name="real-time-trial")
    thread.start()
    thread.join()
    return "".join(found)


def limits() -> tuple[int, int]:
    """Return RLIMIT_RTPRIO, soft and hard: the highest priority that this process may give its threads; 0: none."""
    soft, hard = (_HIGHEST if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_RTPRIO))
    return soft, hard


def limit_text() -> str:
    """Return RLIMIT_RTPRIO in words."""
    soft, hard = limits()
    return f"RLIMIT_RTPRIO is {soft}" + (f" (at most {hard})" if hard != soft else "")


def lock(memory: Region) -> None:
    """Keep the pages of this mapping in memory, from when each is used. Raise ResourceExhaustedPersistent."""
    _check_lock(lib.burst_lock(memory.base, memory.nbytes), memory.nbytes)


def lock_ends(writer: MessageQueueWriter, reader: MessageQueueReader, trace: Trace) -> None:
    """Do so with a burst's queues and its trace. Raise ResourceExhaustedPersistent."""
    _check_lock(lib.burst_lock_ends(*handles_of(writer, reader), trace.page), ffi.sizeof("burst_trace"))


def _check_lock(code: int, nbytes: int) -> None:
    if code:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        raise ResourceExhaustedPersistent(
            f"{nbytes} bytes of a burst in real time cannot be locked: {os.strerror(-code)}; RLIMIT_MEMLOCK is {soft} "
            "bytes: raise it (ulimit -l, LimitMEMLOCK= of a unit), or use less memory"
        )


def _check(code: int, what: str) -> None:
    if code:
        raise OSError(-code, os.strerror(-code), what)
