"""EventFlag: 32 sticky bits in any shared memory, on which a process can sleep."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

from fmq._core import ffi, lib
from fmq.errors import raise_errno
from fmq.queue import deadline_of

if TYPE_CHECKING:
    from fmq.region import Region

NBYTES = 8


class EventFlag:
    """Eight bytes of a region: the bits, and how many sleep. A bit is consumed by the first waiter that sees it."""

    def __init__(self, region: Region, offset: int) -> None:
        if offset % 4 or not 0 <= offset <= region.nbytes - NBYTES:
            raise ValueError(
                f"offset={offset}: a multiple of 4, with {NBYTES} bytes inside the region's {region.nbytes}"
            )
        self._region = region  # keeps it mapped
        self._flag = region.base + offset

    def wake(self, mask: int) -> None:
        """Sets the bits of `mask` and wakes who waits for one of them. No system call while nobody sleeps."""
        lib.fmq_event_wake(self._flag, _checked(mask))

    def wait(self, mask: int, timeout: float | None = None) -> int:
        """Sleeps until a bit of `mask` is set, clears and returns those that are. Raises Timeout."""
        deadline, bits = deadline_of(timeout), ffi.new("uint32_t *")
        is_main = threading.get_native_id() == os.getpid()  # where signal handlers run
        while True:
            until = (
                min(deadline, lib.fmq_now() + 100_000_000) if is_main else deadline
            )  # Ctrl-C is noticed within 0.1 s
            code = lib.fmq_event_wait(self._flag, _checked(mask), until, bits)
            if not code:
                return int(bits[0])
            if code == -errno.EINTR or (code == -errno.ETIMEDOUT and until < deadline):
                continue
            raise_errno(code, "wait")


def _checked(mask: int) -> int:
    if 0 < mask < 2**32:
        return mask
    raise ValueError(f"mask={mask:#x}: 1 to 32 bits of which at least one is set")
