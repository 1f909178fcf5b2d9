"""`wait_any`: a thread waits for several queues at once."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, TypeVar

from fmq._core import ffi, lib
from fmq.clock import deadline_of
from fmq.errors import raise_errno

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fmq.end import MessageQueueReader, MessageQueueWriter

E = TypeVar("E", bound="MessageQueueReader | MessageQueueWriter")


def wait_any(ends: Iterable[E], timeout: float | None = None) -> list[E]:
    """Sleep until at least one end is ready, and return those that are, in order.

    Ready: a transfer of one element would not wait; it goes through, or raises (the peer is gone, say). Raise Timeout,
    Busy. One system call sleeps on up to 63 ends; of more, the rest is looked at every millisecond.
    """
    listed = list(ends)
    if not listed:
        raise ValueError("ends=[]: nothing would ever be ready")
    ready, deadline = ffi.new("uint8_t[]", len(listed)), deadline_of(timeout)
    handles = ffi.new("fmq_end *[]", [end.usable() for end in listed])
    while (count := lib.fmq_wait_any(handles, len(listed), ready, deadline)) == -errno.EINTR:
        pass  # a signal's Python handler ran between the two calls
    if count == -errno.EROFS:
        raise ValueError("ends: a reader without write access cannot announce that it sleeps; open the queue writable")
    if count < 0:
        raise_errno(count, "wait_any")
    return [end for end, is_ready in zip(listed, ready, strict=True) if is_ready]
