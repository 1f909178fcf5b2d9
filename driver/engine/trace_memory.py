"""Memory for notes, between an engine and those who read them: clients' traces, and the engine's own counts."""

from __future__ import annotations

import os

from burst import Malformed, Memory, Trace
from fmq import FmqError


def trace_memory(fds: list[int]) -> Memory | None:
    """For a trace, if a client sent some; its descriptor is kept, for `traces`. Raises Malformed."""
    try:
        return Memory.adopt(fds.pop(), Trace.nbytes) if fds else None
    except (FmqError, OSError) as error:
        raise Malformed(f"the trace cannot be used: {error}") from error


def trace_of(fds: list[int], others: int) -> Trace | None:
    """A trace in what follows so many others, if something does. Raises Malformed."""
    memory = trace_memory([fds.pop()]) if fds and len(fds) == others + 1 else None
    if memory:
        memory.close()  # what is mapped stays
    return Trace(memory) if memory else None


def to_read(memory: Memory) -> int:
    """A descriptor to send; its owner, of another account, may have seen to it that we cannot make a read-only one."""
    try:
        return os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        return os.dup(memory.fd)
