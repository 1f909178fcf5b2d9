"""The errors of a queue.

::

    FmqError
    ├── Timeout (TimeoutError)           the deadline passed; nothing was transferred; try again at will
    ├── Closed                           the peer released its role; what it left can still be read
    │   └── Evicted (Closed)             a broadcast queue's writer dropped this reader, which held it up
    ├── PeerDied (ConnectionError)       the peer's process is gone; what it left can still be read, and a successor
    │                                    may take its role
    ├── Overrun                          an unsynchronized queue's writer overtook this reader, which goes on later
    ├── Corrupt                          the peer broke the protocol, or a queue's memory is no queue; this end is lost
    ├── RoleTaken                        another writer (reader) holds this queue's role; wait for it or use its end
    ├── TooLong                          a record is longer than its receiver accepts; it was skipped
    ├── Busy                             a second thread, or a call inside a reservation; the first goes on undisturbed
    ├── InvalidDescriptor (ValueError)   a descriptor or a queue's memory contradicts itself; nothing was attached
    └── NoSpace (OSError)                shared memory is full; says how much is needed and how much is free
"""

from __future__ import annotations

import errno
import os
from typing import Any, NoReturn


class FmqError(Exception):
    """Base of all errors of this package, besides ValueError and TypeError for bad arguments."""


class Timeout(FmqError, TimeoutError):
    """The deadline passed first. Nothing was transferred and the queue stays usable."""

    reader: Any = None  #: of a broadcast queue: the ReaderState of the living reader that held the writer up most


class Closed(FmqError):
    """The peer released its role in good order, or this end was closed, and fewer elements are left than needed."""


class Evicted(Closed):
    """The writer of a broadcast queue dropped this reader, which held it up. Open another one to see later elements."""


class PeerDied(FmqError, ConnectionError):
    """The peer's process is gone and it left fewer elements than needed. A successor that takes its role ends this."""


class Overrun(FmqError):
    """The writer of an unsynchronized queue has overwritten what this reader had not read. Nothing was returned."""

    def __init__(self, lost: int, position: int) -> None:
        super().__init__(f"the writer was faster: {lost} elements are lost, and reading goes on at element {position}")
        self.lost = lost  #: elements
        self.position = position  #: of the element that the next read begins with, counted over the queue's life

    def __reduce__(self) -> tuple[type[Overrun], tuple[int, int]]:
        return Overrun, (self.lost, self.position)


class Corrupt(FmqError):
    """The peer moved its counter to where it cannot be, or woke us a thousand times for nothing. This end is lost."""


class RoleTaken(FmqError):
    """A synchronized queue has one writer and one reader, and another end holds this role."""


class TooLong(FmqError):
    """A record is longer than its receiver accepts. It was skipped; the next call receives a later one."""


class Busy(FmqError):
    """One thread at a time may use an end, and nothing but commit may follow a reservation."""


class InvalidDescriptor(FmqError, ValueError):
    """A descriptor or a memory is not that of a queue which can be attached safely."""


class NoSpace(FmqError, OSError):
    """The file system of the shared memory cannot hold the queue."""


_BY_ERRNO: dict[int, tuple[type[FmqError], str]] = {
    errno.EAGAIN: (Timeout, "timeout=0, and it was not possible at once"),
    errno.ETIMEDOUT: (Timeout, "the timeout passed first"),
    errno.EPIPE: (PeerDied, "the other side's process is gone"),
    errno.ESHUTDOWN: (Closed, "the other side closed its end"),
    errno.ECANCELED: (Closed, "this end is closed, or was opened before a fork; open the queue again in this process"),
    errno.EPROTO: (Corrupt, "the other side broke the queue's protocol; this end is of no more use"),
    errno.ESTALE: (Evicted, "the writer evicted this reader, which held it up; open another reader to go on"),
    errno.EBUSY: (Busy, "another thread uses this end, or a reservation is open; finish it first"),
}


def raise_errno(code: int, what: str) -> NoReturn:
    """Raise the exception for a negative errno of the C core. No other place maps them."""
    if -code in _BY_ERRNO:
        kind, reason = _BY_ERRNO[-code]
        raise kind(f"{what}: {reason}")
    raise OSError(-code, f"{what}: {os.strerror(-code)}")
