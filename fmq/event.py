"""EventFlag: 32 sticky bits in any shared memory, on which a process can sleep."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Any, Protocol

from fmq._core import ffi, lib
from fmq.clock import deadline_of
from fmq.errors import raise_errno

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fmq.region import Region

NBYTES = 8
_MOST_PEERS = 126  # what one futex_waitv takes besides the bits and the process's own word
_SLICE = 100_000_000  # ns: in the main thread, where signal handlers run, Ctrl-C is noticed this soon


class HasPeer(Protocol):
    """An end of a queue."""

    def usable(self) -> Any:
        """Return the C core's end. Raise Closed."""


class EventFlag:
    """Eight bytes of a region: the bits, and how many threads sleep. The first waiter that sees a bit consumes it."""

    def __init__(self, region: Region, offset: int) -> None:
        if offset % 4 or not 0 <= offset <= region.nbytes - NBYTES:
            raise ValueError(
                f"offset={offset}: a multiple of 4, with {NBYTES} bytes inside the region's {region.nbytes}"
            )
        if not region.writable:
            raise ValueError("region: it is mapped read-only, and both wake and wait write to the flag")
        self._region = region  # keeps it mapped
        self.address = region.base + offset

    def wake(self, mask: int) -> None:
        """Set the bits of `mask` and wake the threads that wait for one of them. No system call while none sleeps."""
        lib.fmq_event_wake(self.address, self.checked(mask))

    def wait(self, mask: int, timeout: float | None = None, peers: Sequence[HasPeer] = ()) -> int:
        """Sleep until a bit of `mask` is set; clear and return the bits that are. Raise Timeout.

        `peers`: ends of queues whose other sides wake this flag. The wait ends with PeerDied or Closed when one of
        these is gone, after the bits that it had set were returned.
        """
        if len(peers) > _MOST_PEERS:
            raise ValueError(f"peers: {len(peers)} ends; one wait watches at most {_MOST_PEERS}")
        deadline, bits = deadline_of(timeout), ffi.new("uint32_t *")
        ends = ffi.new("fmq_end *[]", [end.usable() for end in peers])
        is_main = threading.get_native_id() == os.getpid()
        while True:
            until = min(deadline, lib.fmq_now() + _SLICE) if is_main else deadline
            code = lib.fmq_event_wait(self.address, self.checked(mask), ends, len(ends), until, bits)
            if not code:
                return int(bits[0])
            if code != -errno.EINTR and (code != -errno.ETIMEDOUT or until == deadline):
                raise_errno(code, "wait")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it for `multiprocessing`, as its region is."""
        return EventFlag, (self._region, self.address - self._region.base)

    @staticmethod
    def checked(mask: int) -> int:
        """Return the mask, if it is one. Raise ValueError."""
        if 0 < mask < 2**32:
            return mask
        raise ValueError(f"mask={mask:#x}: 1 to 32 bits of which at least one is set")
