"""Which bursts of a device are served in real time: those of its owner who asks, where the kernel lets the device.

A device has RLIMIT_RTPRIO of the program that started it, as other limits are, or of its unit. With --real-time,
`burst serve` raises it, if it may, and keeps CAP_SYS_NICE, if it has that. rtkit is not asked: it makes threads real
time at the wish of a session, where devices are for all programs of an account, and no maintained library for Python
speaks with it.
"""

from __future__ import annotations

import logging
import resource
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from burst import InvalidArgument
from burst.memory import VendorMemory
from burst.real_time import PRIORITY, bound, limits, lock, why_not
from driver.engine import sandbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst import Memory

_log = logging.getLogger(__name__)
REMEDY = (
    "allow it by LimitRTPRIO= in the device's unit (burst serve --unit --real-time), or by a line as "
    '"@audio - rtprio 10" in /etc/security/limits.conf, log in again, and start the device anew'
)
_OTHERS = (
    "real_time=True: this device serves other accounts, too, and its owner says for all of them whether they have "
    "real time: burst serve --real-time"
)


class RealTime(NamedTuple):
    """The rule of a device's owner about real time."""

    is_given: bool = False  #: all bursts are served so
    may_be_asked: bool = True  #: its clients may ask

    def prepare(self) -> None:
        """Raise RLIMIT_RTPRIO of this process, if it may. Called before it gives up capabilities."""
        soft, hard = limits()
        if self.is_given and hard < PRIORITY:
            soft = hard = PRIORITY
        elif self.is_given or self.may_be_asked:
            soft = hard
        with suppress(OSError, ValueError):  # only with the privilege
            resource.setrlimit(resource.RLIMIT_RTPRIO, (soft, hard))

    @property
    def locks(self) -> bool:
        """True if the device may lock memory, because it may have real time."""
        return (self.is_given and priority() > 0) or (self.may_be_asked and limits()[0] > 0)

    @property
    def capabilities(self) -> int:
        """Those that its processes keep for that."""
        return sandbox.SYS_NICE if self.is_given else 0

    def begin(self) -> None:
        """Bound what threads in real time may run, in the engine, before there is one."""
        if self.locks:
            try:
                bound()
            except OSError as error:
                _log.warning("threads in real time are not bounded: %s", error)

    def check_asked(self) -> None:
        """Raise InvalidArgument unless a client may have its bursts served so."""
        if not (self.is_given or self.may_be_asked):
            raise InvalidArgument(_OTHERS)
        if why := why_not(priority() or PRIORITY):
            raise InvalidArgument(f"real_time=True: the device may not: {why}; {REMEDY}")


USUAL = RealTime()
"""The rule of an owner who says nothing."""


def priority() -> int:
    """Return the priority that this process may give its threads; 0: none."""
    return PRIORITY if sandbox.has_capabilities(sandbox.SYS_NICE) else min(PRIORITY, limits()[0])


def refusal() -> str:
    """Return why a device that this process becomes could not be real time; "": it could."""
    RealTime(is_given=True).prepare()
    return f"{why}; {REMEDY}" if (why := why_not(priority() or PRIORITY)) else ""


def locked(memory_from: Callable[[Any, int], Memory]) -> Callable[[Any, int], Memory]:
    """Return a function that maps what `memory_from` maps, and locks it. It raises ResourceExhaustedPersistent, too."""

    def map_locked(plain: Any, fd: int) -> Memory:
        memory = memory_from(plain, fd)
        if not isinstance(memory, VendorMemory):  # which only its driver can map
            lock(memory)
        return memory

    return map_locked
