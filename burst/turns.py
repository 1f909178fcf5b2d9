"""Turns: which execution of a device runs when. What csrc/README.md, "Turns", describes, as objects.

A queue has a share for each uid, a share a flow for each priority of each of its clients, a flow a ticket for each
thread that executes. All of them end with their last reference, in any order.

A device need not know any of them: in the thread of an execution, `checkpoint` and `stoppable` find its ticket.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from burst._core import ffi, lib
from burst.errors import GeneralFailure, MissedDeadlineTransient
from burst.messages import Cause
from fmq import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from burst.messages import Phase

FOREVER = 2**64 - 1
MOST_WEIGHT = 1000

_waiters = lib.burst_waiters()


def _owned(pointer: Any, free: Callable[[Any], None]) -> Any:
    """Freed with its last reference. Raises MemoryError."""
    if not pointer:
        raise MemoryError("no memory for a run queue")
    return ffi.gc(pointer, free)


class RunQueue:
    """Of one device."""

    def __init__(self, slots: int, quantum: float) -> None:
        """`slots`: executions at a time. `quantum`: seconds that one client may go on while its equals wait.

        Raises ValueError.
        """
        if not 1 <= slots < 2**32 or not 1e-9 <= quantum <= 1e9:
            raise ValueError(
                f"slots={slots!r}, quantum={quantum!r}: from 1 slot, and from a nanosecond to 10^9 seconds"
            )
        self.slots = slots
        self.handle = _owned(lib.burst_runqueue_new(slots, int(quantum * 1e9)), lib.burst_runqueue_free)


class Share:
    """Of one uid."""

    def __init__(self, queue: RunQueue, weight: int) -> None:
        """`weight`: from 1 to 1000, against those of the others."""
        self.weight = weight
        self.handle = _owned(lib.burst_share_new(queue.handle, weight), lib.burst_share_free)


class Counts(NamedTuple):
    """What a flow has done. Times are seconds; those that were *used* count only while somebody waited for a slot."""

    executions: int
    waits: int
    yields: int
    waiting: int  #: now
    waited: float  #: by all, and so far by those that wait now
    used: float
    used_by_uid: float
    used_by_all: float


class Flow:
    """Of one client, at one priority: 0, 1 or 2 for low, medium, high."""

    def __init__(self, share: Share, priority: int) -> None:
        self.gives_way = priority == 0
        self.handle = _owned(lib.burst_flow_new(share.handle, priority), lib.burst_flow_free)

    def counts(self) -> Counts:
        """At the moment."""
        found = ffi.new("burst_flow_counts *")
        lib.burst_flow_count(self.handle, found)
        times = (found.waited_ns, found.used_ns, found.share_used_ns, found.all_used_ns)
        return Counts(found.executions, found.waits, found.yields, found.waiting, *(ns / 1e9 for ns in times))


class Ticket:
    """Of one thread, which enters with it before an execution and leaves after it. Any thread may close it."""

    def __init__(self, flow: Flow) -> None:
        self.gives_way = flow.gives_way
        self.handle = _owned(lib.burst_ticket_new(flow.handle), lib.burst_ticket_free)

    def enter(self, deadline: int = FOREVER) -> None:
        """Waits for a slot. Raises MissedDeadlineTransient, GeneralFailure; then there is none."""
        _check(lib.burst_enter(self.handle, 0, deadline, clock.now()), "queued")

    def leave(self) -> None:
        """Harmless without a slot."""
        lib.burst_leave(self.handle)

    def close(self) -> None:
        """Who waits with it, now or later, is told."""
        lib.burst_ticket_close(self.handle)


class Tickets:
    """Of one thread, which executes for several flows: a ticket for each. Any thread may close them."""

    def __init__(self) -> None:
        self._tickets: dict[Flow, Ticket] = {}
        self._is_closed = False

    def of(self, flow: Flow) -> Ticket:
        """The one for that flow."""
        ticket = self._tickets.get(flow)
        if ticket is None:
            ticket = self._tickets[flow] = Ticket(flow)
            if self._is_closed:
                ticket.close()
        return ticket

    def close(self) -> None:
        """Who waits with one of them, now or later, is told."""
        self._is_closed = True  # before we look: one that is made meanwhile is closed by who makes it
        for ticket in list(self._tickets.values()):
            ticket.close()


def give_way() -> None:
    """From now on this thread, and those that it starts, compute when nothing else on the machine wants to, or little.

    There is no way back without privileges.
    """
    os.setpriority(os.PRIO_PROCESS, 0, 10)  # of a thread: Linux has them one by one


def _check(code: int, phase: Phase) -> None:
    if code == -errno.ETIMEDOUT:
        raise MissedDeadlineTransient(cause=Cause(phase))
    if code:
        raise GeneralFailure("its client is gone")


def waiters() -> int:
    """How many executions wait for a slot in this process."""
    return int(_waiters[0])


def checkpoint() -> None:
    """At a point where this thread's execution can wait: lets others through that come before it.

    Raises MissedDeadlineTransient, GeneralFailure; then the execution has to end.
    """
    if _waiters[0]:
        _check(lib.burst_checkpoint(), "executing")


class _Attempt:
    """One that goes on. `was_stopped`: for somebody who is more urgent."""

    def __init__(self, ticket: Any, stop: Callable[[], object]) -> None:
        self.ticket, self._stop, self.was_stopped = ticket, stop, False

    def stop(self) -> None:
        self.was_stopped = True
        self._stop()


_attempts: list[_Attempt] = []  # in the order in which they began
_looking = threading.Lock()  # around that list
_watch: threading.Thread | None = None


@contextmanager
def stoppable(stop: Callable[[], object]) -> Iterator[_Attempt]:
    """Around a call that has no checkpoints, but can be made again from its beginning: `stop` ends it, in any thread,
    when somebody waits who is more urgent. Then the caller has to look at `was_stopped`, and to come to a `checkpoint`.
    """
    checkpoint()
    attempt = _Attempt(lib.burst_breakable(True), stop)
    if not attempt.ticket:
        yield attempt
        return
    try:
        with _looking:
            _attempts.append(attempt)
            _begin_to_watch()
            _stop_for_others()  # for who came before we were listed
        yield attempt
    finally:
        with _looking:
            _attempts.remove(attempt)
        lib.burst_breakable(False)


def _begin_to_watch() -> None:
    global _watch  # noqa: PLW0603 (one for the process)
    if _watch is None:
        _watch = threading.Thread(target=_watch_for_urgent, name="burst-urgent", daemon=True)
        _watch.start()


def _watch_for_urgent() -> None:
    seen = 0
    while True:
        seen = lib.burst_await_urgent(seen)
        with _looking:
            _stop_for_others()


def _stop_for_others() -> None:
    """Of each account as many as wait for them, those first that began last: they lose the least."""
    for attempt in reversed(_attempts):
        share = lib.burst_share_of(attempt.ticket)
        making_room = sum(a.was_stopped and lib.burst_share_of(a.ticket) == share for a in _attempts)
        if not attempt.was_stopped and lib.burst_outranking(attempt.ticket) > making_room:
            attempt.stop()
