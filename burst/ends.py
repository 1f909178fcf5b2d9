"""The ends of queues as burst's C code takes them: fmq._core makes them, burst._core reads and writes their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burst._core import ffi, lib
from fmq._core import lib as queue

if TYPE_CHECKING:
    from fmq import MessageQueueReader, MessageQueueWriter

if lib.burst_fits(queue.fmq_this_process()):
    raise ImportError(
        "burst._core and fmq._core were built from different sources: pip install --force-reinstall burst-engine"
    )


def handles_of(writer: MessageQueueWriter, reader: MessageQueueReader) -> tuple[Any, Any]:
    """Return the handles of both ends, borrowed: the caller keeps the ends alive."""
    return ffi.cast("fmq_end *", writer.handle), ffi.cast("fmq_end *", reader.handle)
