"""The descriptors in a client's messages: of traces, models and memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self

from burst import Malformed, Memory, Trace
from burst.channel import close_all
from burst.exhaustion import exhausted
from driver.engine.cache.compilations import SentModel
from driver.protocol.model_codec import handles_in, sealed
from fmq import FmqError

if TYPE_CHECKING:
    from collections.abc import Sequence


def trace_memory(fds: list[int]) -> Memory | None:
    """Return memory for a trace, if the client sent some. Raise Malformed.

    Its descriptor stays open, for `traces`.
    """
    try:
        nbytes = Trace.nbytes_in(fds[-1]) if fds else 0
        return Memory.adopt(fds.pop(), nbytes) if fds else None
    except (FmqError, OSError) as error:
        raise exhausted(error) or Malformed(f"the trace cannot be used: {error}") from error


def trace_of(fds: list[int], others: int) -> Trace | None:
    """Return the trace in the descriptor that follows `others` others, if there is one. Raise Malformed."""
    memory = trace_memory([fds.pop()]) if fds and len(fds) == others + 1 else None
    if memory:
        memory.close()  # the mapping stays
    return Trace(memory) if memory else None


def sent_model(fds: list[int], where: Sequence[Any]) -> SentModel:
    """Return the model in the first descriptors, which it takes out of `fds`. Raise InvalidModel."""
    own = slice(1 + len(handles_in(where)))
    given, fds[own] = fds[own], []
    return SentModel(sealed(given, where), (where[0], where[1]))


def to_read(memory: Memory) -> int:
    """Return a descriptor to send.

    It is read-only unless its owner, of another account, has denied us to open the memory again.
    """
    try:
        return os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        return os.dup(memory.fd)


class Descriptors(list[int]):
    """A list of descriptors that are closed on leaving."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        close_all(self)


def burst_trace(fds: list[int], priority: int, application: str) -> Trace:
    """Return the trace of a burst, in the memory that its client hands over, or in new memory."""
    memory = trace_memory(fds)
    trace = Trace(memory) if memory else Trace.create()
    trace.page.device.priority = 1 + priority
    trace.note_application(application)
    return trace
