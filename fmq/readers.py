"""`ReaderState`: the readers of a broadcast queue, as its writer or an inspection sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fmq._core import ffi, lib
from fmq.errors import raise_errno
from fmq.role import SEAT, SEATS, SEATS_AT, is_taken

if TYPE_CHECKING:
    from fmq.region import Region

_LINE: Final = np.dtype(  # csrc/fmq/layout.h
    {
        "names": ["tail", "pid", "life", "state"],
        "formats": ["u8", "u4", "u4", "u4"],
        "offsets": [0, 20, 24, 28],
        "itemsize": 128,
    }
)


@dataclass(frozen=True, slots=True)
class ReaderState:
    """One reader at one moment."""

    pid: int  #: its process, as it says itself
    position: int  #: elements of the queue's life that it has passed
    unread: int  #: elements
    is_alive: bool  #: False: it died, and the writer has not looked since
    seat: int = field(repr=False)  #: its place in the queue
    turn: int = field(repr=False)  #: how many readers have had that place


def readers_of(handle: Any) -> tuple[ReaderState, ...]:
    """Return the readers of a writer that is the C core's end."""
    found = ffi.new("fmq_reader[]", SEATS)
    count = lib.fmq_readers(handle, found)
    if count < 0:
        raise_errno(count, "readers")
    return tuple(
        ReaderState(r.pid, r.position, r.unread, bool(r.is_alive), seat=r.seat, turn=r.turn) for r in found[0:count]
    )


def readers_seen(control: Region, at: int, head: int) -> tuple[ReaderState, ...]:
    """Return the readers of a broadcast queue as an inspection sees them: those that hold a seat's lock."""
    seats = control.asarray(_LINE, SEATS, at + SEATS_AT)
    found = []
    for k in np.flatnonzero(seats["state"] & 3):
        if is_taken(control.fd, at, SEAT + int(k)):
            tail, turn = int(seats["tail"][k]), int(seats["state"][k]) >> 2
            found.append(ReaderState(int(seats["pid"][k]), tail, max(0, head - tail), True, seat=int(k), turn=turn))
    return tuple(found)
