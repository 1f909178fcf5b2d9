"""Exchange: one message each way in one C call."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, NoReturn

from fmq._core import ffi, lib
from fmq._hot import lib as hot
from fmq.clock import FOREVER
from fmq.errors import raise_errno

if TYPE_CHECKING:
    from fmq.end import MessageQueueReader, MessageQueueWriter

_exchange, _hot_exchange = lib.fmq_exchange, hot.fmq_hot_exchange
_START = ffi.cast("void *", ffi.addressof(lib, "fmq_exchange_start"))


class Exchange:
    """A request and its answer in one call: writes a packet to one queue and takes the message that arrives on another.

    It polls as long as `back` does. One thread at a time; a second one gets Busy. A hot loop calls the bound method
    `exchange.__call__`, which saves Python a look-up each time.
    """

    __slots__ = ("_back", "_free", "_hold", "_out")

    def __init__(self, out: MessageQueueWriter, back: MessageQueueReader, *, hold: float = 0.0) -> None:
        """`hold`: for so many of its first seconds a call keeps the GIL, up to 1e-3. Short answers are then faster, and
        a busy thread of this process does not delay them by its time slice; but no other thread runs meanwhile.
        """
        if out.overwrites or back.overwrites:
            raise ValueError("an exchange takes two synchronized queues: every message has to arrive")
        self._out, self._back = out, back
        buffer = ffi.new("char[]", back.capacity * back.dtype.itemsize)
        if not 0 <= hold <= 1e-3:
            raise ValueError(f"hold={hold!r}: seconds from 0 to 0.001")
        ends, patience = (out.handle, back.handle), (back.spin_ns, int(hold * 1e9))
        channel = ffi.new("fmq_channel *", (_START, *ends, buffer, len(buffer), *patience))
        back.follow_spin(channel)
        self._hold = hold > 0
        self._free: list[tuple[Any, Any]] = [(channel, ffi.buffer(buffer))]  # empty while a thread is inside

    def __call__(self, packet: bytes, deadline: int = FOREVER) -> bytes:
        """Sends `packet` (b"": nothing) and returns the next message. `deadline`: absolute CLOCK_MONOTONIC ns.

        Raises BufferError when the packet does not fit: then nothing was sent. Timeout: it was sent.
        """
        try:
            inside = self._free.pop()
        except IndexError:
            raise_errno(-errno.EBUSY, "exchange")
        channel, buffer = inside
        try:
            if self._hold:
                got = _hot_exchange(channel, packet, len(packet))
            else:
                got = _exchange(channel, packet, len(packet), deadline)
            if got < 0:
                got = self._go_on(got, channel, len(packet), deadline)
            received: bytes = buffer[:got]
            return received
        finally:
            self._free.append(inside)

    def _go_on(self, got: int, channel: Any, nbytes: int, deadline: int) -> int:
        """After what was not the answer: the rest of the wait, or the error."""
        if got == -errno.ETIMEDOUT and self._hold and lib.fmq_now() < deadline:
            got = -errno.EINTR  # its first microseconds are over
        while got == -errno.EINTR:
            got = _exchange(channel, b"", 0, deadline)
        if got < 0:
            _refuse(got, nbytes)
        return got


def _refuse(code: int, nbytes: int) -> NoReturn:
    if code in (-errno.EAGAIN, -errno.EMSGSIZE):
        raise BufferError(f"a packet of {nbytes} bytes does not fit into the channel")
    if code == -errno.EINVAL:
        raise ValueError(f"packet of {nbytes} bytes: not a whole number of the queue's elements")
    raise_errno(code, "exchange")
