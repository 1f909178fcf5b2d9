"""The result of a request that is still to come.

The thread that waits for a future takes the results that arrive, in order, and completes the futures that they belong
to. So a request costs no thread switch, and an idle burst costs nothing. Two things need a thread that takes results
where no caller waits (`driver.client.receiver`): callbacks, and what waits for futures of any kind, such as
`concurrent.futures.wait`. The first of them starts it.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import CancelledError
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar
from weakref import ref

from burst import Result, Timeout
from driver.client.receiver import RECEIVER
from driver.deadlines import check_times, checked, seconds_left
from fmq.process_bound import ProcessBound

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Generator


_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_making = threading.RLock()  # held while a future gets its condition, or ends without one
os.register_at_fork(after_in_child=_making._at_fork_reinit)  # type: ignore[attr-defined]


class Completion(ProcessBound, concurrent.futures.Future[_T], ABC):
    """A future of `concurrent.futures` that the thread that waits for it completes, and else the receiver.

    `concurrent.futures` looks at `_state`, and waits by `_condition` and `_waiters`, which are made when they are first
    asked for: `submit` and `result` need neither. Nothing here asks for them, so the one that does is a foreign wait:
    the receiver takes results from then on. A foreign wait holds the condition while it looks at the state; once there
    is a condition, `_end` holds it, too, and `_making` orders the two while there is none.
    """

    to_send = "pickle its result"

    _state: str = PENDING
    _result: _T | None = None
    _exception: BaseException | None = None
    _made: threading.Condition | None = None  # `_condition`, once it was asked for
    _waiting: list[Any] | None = None  # `_waiters`, likewise
    _called: deque[Callable[[Any], object]] | None = None  # callbacks, where there are any

    def __init__(self) -> None:
        """All there is to begin with is in the class: a request costs as little as it may."""

    @abstractmethod
    def join(self, timeout: float | None = None) -> None:
        """Wait until it is done. Raises Timeout."""

    @abstractmethod
    def attend(self) -> None:
        """In the thread of an event loop: have the loop complete this."""

    def _have_attended(self) -> None:
        """Have the receiver attend to it."""
        RECEIVER.call(self.attend)

    @abstractmethod
    def _poll(self) -> None:
        """Complete it without waiting, if what it waits for has come."""

    @property
    def is_done(self) -> bool:
        """Whether it is complete, without a look at what has arrived."""
        return self._state is not PENDING

    def done(self) -> bool:
        """Whether the result or an error is there. Takes what has arrived, and does not wait."""
        if self._state is PENDING:
            self._poll()
        return self._state is not PENDING

    def running(self) -> bool:
        """Whether it is still to come."""
        return not self.done()

    def cancelled(self) -> bool:
        """Whether it was cancelled, or dropped."""
        return self._state is CANCELLED_AND_NOTIFIED

    def result(self, timeout: float | None = None) -> _T:
        """The result, waiting for it. Raises what it failed with, CancelledError, and Timeout after so many seconds."""
        if timeout is not None or self._state is PENDING:
            self.join(timeout)
        if self._exception is None:
            return self._result  # type: ignore[return-value]
        raise self._exception

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `result` would raise, or None. Itself raises CancelledError, Timeout."""
        self.join(timeout)
        if self._state is CANCELLED_AND_NOTIFIED:
            raise self._exception or CancelledError
        return self._exception

    @property
    def failure(self) -> BaseException | None:
        """The error of one that is done; CancelledError, too."""
        return self._exception

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Calls fn(future) when it is done: in the thread that finds out, which may be the receiver's, where other
        callbacks wait for this one; at once if it is done.
        """
        self.when_done(fn)
        if self._state is PENDING:
            self._have_attended()

    def when_done(self, function: Callable[[Any], object]) -> None:
        """As `add_done_callback`, for a caller that sees to it that a thread takes the result."""
        if self._called is None:
            with _making:
                self._called = self._called or deque()
        self._called.append(function)
        if self._state is not PENDING:
            self.call_back()

    def finish(self, result: _T) -> Self:
        """By what completes it, which calls back later. No effect on a future that is done."""
        return self._end(FINISHED, result, None)

    def fail(self, error: BaseException) -> Self:
        """As `finish`, without a result."""
        return self._end(CANCELLED_AND_NOTIFIED if isinstance(error, CancelledError) else FINISHED, None, error)

    def _end(self, state: str, result: _T | None, error: BaseException | None) -> Self:
        if self._state is PENDING:
            self._result, self._exception = result, error
            with _making:
                if self._made is None:
                    self._state = state
            if self._made is not None:
                self._tell_waiters(self._made, state)
        return self

    def _tell_waiters(self, condition: threading.Condition, state: str) -> None:
        with condition:
            if self._state is not PENDING:
                return
            self._state = state
            for waiter in self._waiters:
                if self._state is CANCELLED_AND_NOTIFIED:
                    waiter.add_cancelled(self)
                elif self._exception is not None:
                    waiter.add_exception(self)
                else:
                    waiter.add_result(self)
            condition.notify_all()

    def call_back(self) -> None:
        """By what completes it: calls the callbacks that are due."""
        while self._called:
            with suppress(IndexError):  # another thread took the last one
                self._call(self._called.popleft())

    def _call(self, function: Callable[[Self], object]) -> None:
        try:
            function(self)
        except Exception:  # noqa: BLE001 (as concurrent.futures does: the waiting thread has not caused it)
            _log.exception("a callback of %r raised", self)

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        with _making:
            made = self._made = self._made or threading.Condition()
        if self._state is PENDING:
            self._have_attended()
        return made

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        """Under `_condition`."""
        if self._waiting is None:
            self._waiting = []
        return self._waiting

    def __repr__(self) -> str:
        if self._state is PENDING:
            state = "pending"
        elif self.cancelled():
            state = "cancelled"
        else:
            state = f"returned {self._result!r:.200}" if self._exception is None else f"raised {self._exception!r:.200}"
        return f"<{type(self).__name__}: {state}>"


class ResultSource(Protocol):
    """Completes futures: a burst, as far as its futures know it."""

    def wait_for(self, future: Future, timeout: float | None) -> None:
        """Until it is done. Raises Timeout."""

    def look(self) -> None:
        """Takes what has arrived, and calls back. Does not wait."""

    def expire(self, future: Future) -> None:
        """At its deadline: it is done, whatever comes."""

    def drop(self, future: Future) -> bool:
        """Cancels it, unless it is done."""

    def arrival(self, future: Future) -> asyncio.Future[None]:
        """Done in the running loop when `future` is."""


def _attend_if_kept(known: ref[Future]) -> None:
    if future := known():
        future.attend()


class Future(Completion[Result]):
    """The result of one request, to come. Any thread may wait for it."""

    def __init__(self, source: ResultSource, deadline: int | None = None, told: int | None = None) -> None:
        """Made by `burst.submit`. `deadline`: of its request, CLOCK_MONOTONIC ns; `told`: what the device is told, if
        the wait does not end there.
        """
        self.deadline, self.told = deadline, deadline if told is None else told
        self._source = source

    def result(self, timeout: float | None = None, deadline: float | None = None) -> Result:
        """The result, waiting for it.

        After `timeout` seconds raises Timeout: the request goes on; ask again. At the `deadline`, a time.monotonic(),
        or at the one that it was submitted with, the request is over: it raises MissedDeadline*, now and later, and the
        device does not begin it any more.

        Raises StatusError for a request that failed, PeerDied, ValueError for what is no time, and CancelledError for
        a request that was cancelled, or dropped for a newer one.
        """
        if deadline is not None:
            self._bring_forward(deadline)
        if timeout is not None or self._state is PENDING:  # as of `Completion`, without a call
            self.join(timeout)
        if self._exception is None:
            return self._result  # type: ignore[return-value]
        raise self._exception

    def exception(self, timeout: float | None = None, deadline: float | None = None) -> BaseException | None:
        """What `result` would raise, or None. Itself raises Timeout, ValueError, CancelledError."""
        if deadline is not None:
            self._bring_forward(deadline)
        return super().exception(timeout)

    def _bring_forward(self, deadline: float) -> None:
        by = checked("deadline", deadline)
        self.deadline = by if self.deadline is None else min(by, self.deadline)

    def join(self, timeout: float | None = None) -> None:
        if timeout is not None:
            check_times(timeout=timeout)
        if self._state is PENDING:
            self._source.wait_for(self, timeout)

    def _poll(self) -> None:
        self._source.look()
        if self._state is PENDING and seconds_left(self.deadline) == 0:
            self._source.expire(self)

    def cancel(self) -> bool:
        """Gives the request up: it is not sent if it was not yet, and its result is dropped when it comes.

        False when it has a result or an error.
        """
        return self.cancelled() or (self._state is PENDING and self._source.drop(self))

    def _have_attended(self) -> None:
        """Have the receiver attend to it. The burst keeps it while it is in flight; the receiver, which may be late,
        does not, as the result would hold its buffers.
        """
        RECEIVER.call(partial(_attend_if_kept, ref(self)))

    def attend(self) -> None:
        """In the thread of an event loop: the loop takes results until this is done."""
        if self._state is PENDING:
            self._source.arrival(self)

    def __await__(self) -> Generator[Any, None, Result]:
        if self._state is PENDING:
            try:
                yield from self._source.arrival(self).__await__()
            except BaseException:  # the task was cancelled
                self.cancel()
                raise
        return self.result(0)


def wait_or_expire(
    future: Future,
    timeout: float | None,
    wait: Callable[[float | None], object],
    expire: Callable[[Future], object],
) -> None:
    """As `ResultSource.wait_for`: `wait` ends when the future is done, or raises Timeout after so many seconds."""
    left = seconds_left(future.deadline)
    if left is None or (timeout is not None and timeout <= left):
        wait(timeout)
        return
    try:
        wait(left)
    except Timeout:
        expire(future)
