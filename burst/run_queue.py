"""Which execution of a device runs when. These are the objects of csrc/README.md, "Run queue".

A queue has a share for each account, a share an application for each program of the account, an application a flow for
each priority of each of its clients, a flow a ticket for each thread that executes. All of them end with their last
reference, in any order.

A device need not know them: `checkpoint` and `stoppable` find the ticket of the thread that executes.
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
from burst.serving_thread import ServingThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FOREVER = 2**64 - 1
MOST_WEIGHT = 1000

_waiters = lib.burst_waiters()


def _owned(pointer: Any, free: Callable[[Any], None]) -> Any:
    """Freed with its last reference. Raise MemoryError."""
    if not pointer:
        raise MemoryError("no memory for a run queue")
    return ffi.gc(pointer, free)


class RunQueue:
    """Decides which execution of a device runs when."""

    def __init__(self, slots: int, quantum: float, *, is_shared: bool = False) -> None:
        """`slots`: executions at a time. `quantum`: seconds that one client may go on while its equals wait.

        is_shared: by accounts. Then no thread that has a slot is nice to other programs: beside busy ones it would keep
        the slot, and the lock of the queue, from other accounts.

        Raise ValueError.
        """
        if not 1 <= slots < 2**32 or not 1e-9 <= quantum <= 1e9:
            raise ValueError(
                f"slots={slots!r}, quantum={quantum!r}: from 1 slot, and from a nanosecond to 10^9 seconds"
            )
        self.slots, self.is_shared = slots, is_shared
        self.handle = _owned(lib.burst_run_queue_new(slots, int(quantum * 1e9)), lib.burst_run_queue_free)

    @property
    def is_idle(self) -> bool:
        """True if no execution has a slot and none waits, at this moment."""
        return bool(lib.burst_run_queue_is_idle(self.handle))


class Share:
    """Fair-share scheduling group: all clients of one account."""

    def __init__(self, queue: RunQueue, weight: int) -> None:
        """`weight`: from 1 to 1000, against those of the others."""
        self.queue, self.weight = queue, weight
        self.handle = _owned(lib.burst_share_new(queue.handle, weight), lib.burst_share_free)


class Application:
    """All clients of one program of an account: priorities order its executions, and no others."""

    def __init__(self, share: Share, name: str) -> None:
        """`name`: within the account; for display."""
        self.share, self.name = share, name
        self.handle = _owned(lib.burst_application_new(share.handle), lib.burst_application_free)


class FlowCounts(NamedTuple):
    """The work of a flow. Times are seconds; what was *used* counts only while a ticket waited for a slot."""

    executions: int
    joined: int  #: of these, those that were part of another one's run
    waits: int
    yields: int
    waiting: int  #: now
    waited: float  #: by all its tickets, also by those that still wait
    used: float
    used_by_application: float
    used_by_uid: float
    used_by_all: float


class Flow:
    """The executions of one client at one priority: 0, 1 or 2 for low, medium, high."""

    def __init__(self, application: Application, priority: int) -> None:
        self.application = application  # an account has one share as long as any of its executions runs
        self.gives_way = priority == 0 and not application.share.queue.is_shared
        self.handle = _owned(lib.burst_flow_new(application.handle, priority), lib.burst_flow_free)
        self._lock = threading.Lock()  # of what follows: executions that wait for another one's run
        self._joined = self._waits = self._waiting = 0
        self._waited = 0.0

    def begin_wait(self) -> None:
        """Note that an execution waits, to be part of another one's run or to begin its own. Any thread."""
        with self._lock:
            self._waits, self._waiting = self._waits + 1, self._waiting + 1

    def end_wait(self, seconds: float, *, joined: bool) -> None:
        """Note that it waits no longer, after so many seconds. `joined`: it was part of another one's run."""
        with self._lock:
            self._joined, self._waiting = self._joined + joined, self._waiting - 1
            self._waited += seconds

    def counts(self) -> FlowCounts:
        found = ffi.new("burst_flow_counts *")
        lib.burst_flow_count(self.handle, found)
        with self._lock:
            joined, waits, waiting, waited = self._joined, self._waits, self._waiting, self._waited
        return FlowCounts(
            executions=found.executions + joined,
            joined=joined,
            waits=found.waits + waits,
            yields=found.yields,
            waiting=found.waiting + waiting,
            waited=found.waited_ns / 1e9 + waited,
            used=found.used_ns / 1e9,
            used_by_application=found.application_used_ns / 1e9,
            used_by_uid=found.share_used_ns / 1e9,
            used_by_all=found.all_used_ns / 1e9,
        )


class Ticket:
    """Lets one thread execute: csrc/burst/deadline.c enters and leaves with it. Any thread may close the ticket."""

    def __init__(self, flow: Flow) -> None:
        self.flow, self.gives_way = flow, flow.gives_way
        self.handle = _owned(lib.burst_ticket_new(flow.handle), lib.burst_ticket_free)

    def leave(self) -> None:
        """Give the slot up, if it has one."""
        lib.burst_leave(self.handle)

    def close(self) -> None:
        """End the wait of the thread that waits with it, now or later: GeneralFailure."""
        lib.burst_ticket_close(self.handle)


class Tickets:
    """The tickets of one thread that executes for several flows: one for each. Any thread may close them."""

    def __init__(self) -> None:
        self._tickets: dict[Flow, Ticket] = {}
        self._is_closed = False

    def of(self, flow: Flow) -> Ticket:
        ticket = self._tickets.get(flow)
        if ticket is None:
            ticket = self._tickets[flow] = Ticket(flow)
            if self._is_closed:
                ticket.close()
        return ticket

    def close(self) -> None:
        """Close all of them, also those that `of` makes later."""
        self._is_closed = True  # before the loop: a ticket that `of` makes meanwhile is closed there
        for ticket in list(self._tickets.values()):
            ticket.close()


def give_way() -> None:
    """Lower the priority of this thread, and of those that it starts, below that of other programs on the machine.

    Raising it again takes privileges, and so does raising one that is lower already.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(10, os.getpriority(os.PRIO_PROCESS, 0)))  # Linux has one for each thread


def waiters() -> int:
    """Return how many executions of this process wait for a slot."""
    return int(_waiters[0])


def checkpoint() -> None:
    """Give this thread's slot to executions that come first, and wait for it. Called where the execution
    can pause.

    Raise MissedDeadlineTransient, GeneralFailure; then the execution has to end.
    """
    if _waiters[0] and (code := lib.burst_checkpoint()):
        if code == -errno.ETIMEDOUT:
            raise MissedDeadlineTransient(cause=Cause("executing"))
        raise GeneralFailure("its client is gone")


class _Attempt:
    """A run in progress that can be stopped. `was_stopped`: for an execution with a higher priority."""

    def __init__(self, ticket: Any, stop: Callable[[], object]) -> None:
        self.ticket, self._stop, self.was_stopped = ticket, stop, False

    def stop(self) -> None:
        self.was_stopped = True
        self._stop()


_attempts: list[_Attempt] = []  # in the order in which they began
_attempts_lock = threading.Lock()
_watch: ServingThread | None = None


@contextmanager
def stoppable(stop: Callable[[], object]) -> Iterator[_Attempt]:
    """Make a call preemptible that has no checkpoints but can be repeated from its beginning.

    Another thread calls `stop` to end it when an execution with a higher priority waits. Then the caller looks at
    `was_stopped`, comes to a `checkpoint`, and repeats the call.
    """
    checkpoint()
    attempt = _Attempt(lib.burst_set_preemptible(True), stop)
    if not attempt.ticket:
        yield attempt
        return
    try:
        with _attempts_lock:
            _attempts.append(attempt)
            _begin_to_watch()
            _stop_for_others()  # for executions that began to wait before this one was listed
        yield attempt
    finally:
        with _attempts_lock:
            _attempts.remove(attempt)
        lib.burst_set_preemptible(False)


def _begin_to_watch() -> None:
    global _watch  # noqa: PLW0603 (one for the process)
    if _watch is None:
        watch = ServingThread(_watch_for_preemption, name="burst-preempt")
        watch.start()
        _watch = watch


def _watch_for_preemption() -> None:
    seen = 0
    while True:
        seen = lib.burst_await_preemption(seen)
        with _attempts_lock:
            _stop_for_others()


def _stop_for_others() -> None:
    """Stop as many executions of each application as higher ones wait; the latest first: they lose the least work."""
    for attempt in reversed(_attempts):
        application = lib.burst_application_of(attempt.ticket)
        stopping = sum(a.was_stopped and lib.burst_application_of(a.ticket) == application for a in _attempts)
        if not attempt.was_stopped and lib.burst_outranking(attempt.ticket) > stopping:
            attempt.stop()
