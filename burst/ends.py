"""What burst's C code takes from Python: addresses, and ends of queues, whose memory burst._core reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burst._core import ffi, lib
from burst_engine.names import install_command
from fmq._core import lib as queue

if TYPE_CHECKING:
    from fmq import MessageQueueReader, MessageQueueWriter

if lib.burst_fits(queue.fmq_this_process()):
    raise ImportError(
        f"burst._core and fmq._core were built from different sources: {install_command()} --force-reinstall"
    )


def handles_of(writer: MessageQueueWriter, reader: MessageQueueReader) -> tuple[Any, Any]:
    """Return the handles of both ends, borrowed: the caller keeps the ends alive."""
    return ffi.cast("fmq_end *", writer.handle), ffi.cast("fmq_end *", reader.handle)


def address_of(pointer: Any) -> int:
    """Return where a pointer of C points to, for C that is written by hand."""
    return int(ffi.cast("uintptr_t", pointer))
