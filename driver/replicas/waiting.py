"""The bounded queue of a served model: which requests run next, and together.

A request is taken in the order in which it came, as long as each can be done in time. Where deadlines are too near for
that, the oldest request that can still be done comes first, and those before it are told at once that they cannot; so a
server with more work than it can do answers as much as before, and not too late.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from burst import Busy, MissedDeadlineTransient
from burst.errors import timed_out
from burst.messages import Cause
from fmq import clock
from fmq.clock import FOREVER

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator
    from typing import Any

    from burst.messages import Phase
    from driver.client.tasks import TaskTimes

_NS = 1e9


class QueueFull(Busy):
    """The queue of a served model has no room. Nothing was executed.

    retry_after: seconds after which there may be room, by how long requests take at present.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.retry_after)


class WaitingRequest:
    """One caller's request. `done` gets its outputs, or its error."""

    __slots__ = ("arrays", "begin", "done", "key", "rows", "times")

    def __init__(
        self, arrays: tuple[Any, ...], times: TaskTimes, done: asyncio.Future[Any], rows: int = 1, key: object = None
    ) -> None:
        """`rows`: along the open dimension. Requests with equal keys can run together."""
        self.arrays, self.times, self.done, self.rows, self.key = arrays, times, done, rows, key
        self.begin = clock.now()

    @property
    def end(self) -> int:
        """The time when it has to be done, CLOCK_MONOTONIC ns."""
        return FOREVER if self.times.end is None else self.times.end

    def miss(self, phase: Phase) -> None:
        """Fail the request, which is not done in time: with Timeout or MissedDeadlineTransient, as the caller has
        asked.
        """
        if self.done.done():
            return
        now = clock.now()
        late_by = max(0, now - self.end) / _NS
        by = self.times.deadline
        if self.times.timeout is not None and (by is None or by > self.end):
            self.done.set_exception(timed_out(self.times.timeout, phase, late_by))
        else:
            self.done.set_exception(MissedDeadlineTransient(cause=Cause(phase, late_by)))


class ExecutionEstimate:
    """How long an execution takes, from when it is sent: a mean that follows, and how far off it usually is."""

    def __init__(self) -> None:
        self._mean = self._deviation = 0.0  # ns

    def took(self, ns: int) -> None:
        if not self._mean:
            self._mean, self._deviation = float(ns), ns / 4
            return
        off = abs(ns - self._mean)
        self._deviation += (off - self._deviation) / 8
        self._mean += (ns - self._mean) / 8

    @property
    def usual(self) -> int:
        """In ns; 0 when nothing is known."""
        return int(self._mean)

    @property
    def most(self) -> int:
        """Nearly all executions take less."""
        return int(self._mean + 4 * self._deviation)


class Ready(NamedTuple):
    """An answer of `RequestQueue.take`: requests that run together, or when to ask again (CLOCK_MONOTONIC ns)."""

    requests: list[WaitingRequest]
    again: int | None = None


class RequestQueue:
    """At most so many requests that wait, in the order in which they came. Of one event loop."""

    def __init__(self, most: int, batch: int, window: float) -> None:
        """`batch`: rows that may run together. `window`: seconds that a request waits for others."""
        self.most, self.batch, self._window = most, batch, int(window * _NS)
        self._waiting: list[WaitingRequest] = []
        self._expects_company = False

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[WaitingRequest]:
        return iter(list(self._waiting))

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= self.most

    def append(self, request: WaitingRequest) -> None:
        """Add a request. The caller has seen that there is room."""
        self._waiting.append(request)

    def discard(self, request: WaitingRequest) -> bool:
        """Remove a request; return True if it was still here."""
        try:
            self._waiting.remove(request)
        except ValueError:
            return False
        return True

    def take(self, estimate: ExecutionEstimate, *, at_once: bool) -> Ready:
        """Return the next requests to run. `at_once`: nothing runs, and no request will come any more."""
        self._waiting = [request for request in self._waiting if not request.done.done()]  # their tasks were cancelled
        self._tell_hopeless(estimate)
        if not self._waiting:
            return Ready([])
        now = clock.now()
        first = self._first(now + estimate.most)
        found = self._alike(first)
        rows = sum(request.rows for request in found)
        again = first.begin + self._window
        if rows < self.batch and self._expects_company and now < again and not at_once:
            return Ready([], again)
        self._expects_company = len(found) > 1 or len(self._waiting) > len(found)
        taken = set(map(id, found))
        self._waiting = [request for request in self._waiting if id(request) not in taken]
        return Ready(found)

    def note_company(self) -> None:
        """Note that a request came while others ran."""
        self._expects_company = True

    def _first(self, done_by: int) -> WaitingRequest:
        """Return the oldest request that can be done in time; if there is none, the one with the most time left: an
        execution that took unusually long must not end all others.
        """
        for request in self._waiting:
            if request.end >= done_by:
                return request
        return max(self._waiting, key=lambda request: request.end)

    def _alike(self, first: WaitingRequest) -> list[WaitingRequest]:
        """Return this request and those that can run with it, as many as a batch takes."""
        found, rows = [first], first.rows
        if self.batch == 1:
            return found
        for request in self._waiting:
            if request is not first and request.key == first.key and rows + request.rows <= self.batch:
                found.append(request)
                rows += request.rows
        return found

    def _tell_hopeless(self, estimate: ExecutionEstimate) -> None:
        """Fail requests that cannot be done in time, while others can: they would only be in the way."""
        done_by = clock.now() + estimate.most
        hopeful = [request for request in self._waiting if request.end >= done_by]
        if not hopeful or len(hopeful) == len(self._waiting):
            return
        for request in self._waiting:
            if request.end < done_by:
                request.miss("queued")
        self._waiting = hopeful
