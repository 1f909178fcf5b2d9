"""Exchange: one message each way in one C call."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, NoReturn

from fmq._hot import HotExchange
from fmq.errors import raise_errno
from fmq.process_bound import ProcessBound

if TYPE_CHECKING:
    from fmq.end import MessageQueueReader, MessageQueueWriter


class Exchange(ProcessBound, HotExchange):
    """A request and its answer in one call: writes a packet to one queue and takes the message that arrives on another.

    It polls as long as `back` does. One thread at a time; a second one gets Busy. A hot loop calls the bound method
    `exchange.__call__`, which saves Python a look-up each time.
    """

    to_send = "send the descriptors of its queues"

    __slots__ = ()

    def __init__(self, out: MessageQueueWriter, back: MessageQueueReader, *, hold: float = 0.0) -> None:
        """`hold`: for so many of its first seconds a call keeps the GIL, up to 1e-3. Short answers are then faster, and
        a busy thread of this process does not delay them by its time slice; but no other thread runs meanwhile.
        """
        if out.overwrites or back.overwrites or out.broadcasts or back.broadcasts:
            raise ValueError("an exchange takes two synchronized queues: every message has to arrive")
        if not 0 <= hold <= 1e-3:
            raise ValueError(f"hold={hold!r}: seconds from 0 to 0.001")
        self._begin_hot(out, back, hold)

    def _refuse(self, code: int, nbytes: int) -> NoReturn:
        if code in (-errno.EAGAIN, -errno.EMSGSIZE):
            raise BufferError(f"a packet of {nbytes} bytes does not fit into the channel")
        if code == -errno.EINVAL:
            raise ValueError(f"packet of {nbytes} bytes: not a whole number of the queue's elements")
        raise_errno(code, "exchange")
