"""Memory for traces, which clients send to the engine and observers read."""

from __future__ import annotations

import os

from burst import Malformed, Memory, Trace
from fmq import FmqError


def trace_memory(fds: list[int]) -> Memory | None:
    """Memory for a trace, if the client sent some. Its descriptor stays open, for `traces`. Raises Malformed."""
    try:
        return Memory.adopt(fds.pop(), Trace.nbytes) if fds else None
    except (FmqError, OSError) as error:
        raise Malformed(f"the trace cannot be used: {error}") from error


def trace_of(fds: list[int], others: int) -> Trace | None:
    """The trace in the descriptor that follows `others` others, if there is one. Raises Malformed."""
    memory = trace_memory([fds.pop()]) if fds and len(fds) == others + 1 else None
    if memory:
        memory.close()  # the mapping stays
    return Trace(memory) if memory else None


def to_read(memory: Memory) -> int:
    """A descriptor to send, read-only unless its owner, of another account, has denied us to open the memory again."""
    try:
        return os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        return os.dup(memory.fd)
