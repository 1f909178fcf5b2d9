"""The result of a request that is still to come.

There is no thread in the background: the thread that waits for a future takes the results that arrive, in order, and
completes the futures that they belong to. So a request costs no thread switch, and an idle burst costs nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from burst import Timeout
from driver.deadlines import check_times, checked, seconds_left

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Generator

    from burst import Result


_log = logging.getLogger(__name__)


class ResultSource(Protocol):
    """Completes futures: a burst, as far as its futures know it."""

    def wait_for(self, future: Future, timeout: float | None) -> None:
        """Until it is done. Raises Timeout."""

    def drop(self, future: Future) -> bool:
        """Cancels it, unless it is done."""

    def arrival(self, future: Future) -> asyncio.Future[None]:
        """Done in the running loop when `future` is."""


class Future:
    """The result of one request, to come. Any thread may wait for it."""

    __slots__ = ("_callbacks", "_error", "_is_done", "_result", "_source", "deadline", "told")

    def __init__(self, source: ResultSource, deadline: int | None = None, told: int | None = None) -> None:
        """Made by `burst.submit`. `deadline`: of its request, CLOCK_MONOTONIC ns; `told`: what the device is told, if
        the wait does not end there.
        """
        self.deadline, self.told = deadline, deadline if told is None else told
        self._source = source
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._is_done = False
        self._callbacks: deque[Callable[[Future], object]] = deque()

    def result(self, timeout: float | None = None, deadline: float | None = None) -> Result:
        """The result, waiting for it.

        After `timeout` seconds raises Timeout: the request goes on; ask again. At the `deadline`, a time.monotonic(),
        or at the one that it was submitted with, the request is over: it raises MissedDeadline*, now and later, and the
        device does not begin it any more.

        Raises StatusError for a request that failed, PeerDied, ValueError for what is no time, and CancelledError for
        a request that was cancelled, or dropped for a newer one.
        """
        self._wait(timeout, deadline)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def exception(self, timeout: float | None = None, deadline: float | None = None) -> BaseException | None:
        """What `result` would raise, or None. Itself raises Timeout, ValueError."""
        self._wait(timeout, deadline)
        return self._error

    def _wait(self, timeout: float | None, deadline: float | None) -> None:
        check_times(timeout=timeout)
        if deadline is not None:
            by = checked("deadline", deadline)
            self.deadline = by if self.deadline is None else min(by, self.deadline)
        if not self._is_done:
            self._source.wait_for(self, timeout)

    def cancel(self) -> bool:
        """Gives the request up: it is not sent if it was not yet, and its result is dropped when it comes.

        False when it is done already.
        """
        return not self._is_done and self._source.drop(self)

    def done(self) -> bool:
        """Whether the result or an error is there. Results that have arrived count once a thread waits or submits."""
        return self._is_done

    def cancelled(self) -> bool:
        """Whether it was cancelled, or dropped."""
        return isinstance(self._error, CancelledError)

    def add_done_callback(self, function: Callable[[Future], object]) -> None:
        """Calls function(future) when it is done, in the thread that finds out; at once if it is done."""
        self._callbacks.append(function)
        if self._is_done:
            self.call_back()

    def attend(self) -> None:
        """By a burst of several steps, in the thread of an event loop: the loop takes results until this is done."""
        if not self._is_done:
            self._source.arrival(self)

    def finish(self, result: Result) -> Future:
        """By the burst, which calls back later. No effect on a future that is done."""
        if not self._is_done:
            self._result, self._is_done = result, True
        return self

    def fail(self, error: BaseException) -> Future:
        """As `finish`, without a result."""
        if not self._is_done:
            self._error, self._is_done = error, True
        return self

    def call_back(self) -> None:
        """By the burst: calls the callbacks that are due."""
        while self._callbacks:
            with suppress(IndexError):  # another thread took the last one
                self._call(self._callbacks.popleft())

    def _call(self, function: Callable[[Future], object]) -> None:
        try:
            function(self)
        except Exception:  # noqa: BLE001 (as concurrent.futures does: the waiting thread has not caused it)
            _log.exception("a callback of %r raised", self)

    def __await__(self) -> Generator[Any, None, Result]:
        if not self._is_done:
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
