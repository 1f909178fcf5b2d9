"""Signals of a device's processes as a descriptor: SIGHUP renews an engine, the others end the device."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

ENDS = (signal.SIGTERM, signal.SIGINT)
"""The signals that end a device that is served."""


def readable_at_signals(*numbers: signal.Signals) -> int:
    """Return a descriptor that these signals make readable, unless they are ignored, as a shell has background jobs
    ignore SIGINT.

    Processes that are forked afterwards inherit it: a signal to one of them is as good as one to all.
    """
    readable, writable = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    return readable


def is_hangup(fd: int) -> bool:
    """Take what came, and return True if it was SIGHUP alone, or nothing, and so does not end the device."""
    with suppress(BlockingIOError):
        return set(os.read(fd, 1024)) <= {signal.SIGHUP}
    return True
