"""The result of a request that is still to come.

There is no thread in the background: the thread that waits for a future takes the results that arrive, in order, and
completes the futures that they belong to. So a request costs no thread switch, and an idle burst costs nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Generator

    from burst import Result
    from driver.client.workspace import EncodedRequest, InputSet, RequestBuffers


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

    __slots__ = ("_callbacks", "_error", "_is_done", "_result", "_source", "deadline")

    def __init__(self, source: ResultSource, deadline: int | None = None) -> None:
        """Made by `burst.submit`. `deadline`: of its request, CLOCK_MONOTONIC ns."""
        self.deadline = deadline
        self._source = source
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._is_done = False
        self._callbacks: deque[Callable[[Future], object]] = deque()

    def result(self, timeout: float | None = None) -> Result:
        """The result, waiting for it.

        Raises StatusError for a request that failed or has missed its deadline, PeerDied, Timeout (the request goes on;
        ask again), and CancelledError for one that was cancelled, or dropped for a newer one.
        """
        if not self._is_done:
            self._source.wait_for(self, timeout)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `result` would raise, or None."""
        if not self._is_done:
            self._source.wait_for(self, timeout)
        return self._error

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


class PendingRequest(NamedTuple):
    """A request whose result has not come."""

    number: int  #: of its result, counted by the controller
    encoded: EncodedRequest
    future: Future


class InFlight:
    """Oldest first. Three locks, always taken in this order:

    `submitting` is held by the thread that submits or runs, `receiving` by the thread that waits for results, and
    `lock`, briefly, by a thread that changes what both of them use. No thread waits for room while it holds
    `submitting`, and none calls back while it holds one of the others.
    """

    def __init__(self, buffers: RequestBuffers) -> None:
        self._buffers = buffers
        self.requests: deque[PendingRequest] = deque()
        self.staged: tuple[InputSet, Future] | None = None  #: the newest frame, kept until there is room
        self.finished: deque[Future] = deque()  #: futures whose callbacks are due
        self.is_moving = False  #: a request is being taken out, and another may take its place
        self.is_running = False  #: a `Burst.run` holds `submitting`, and its request is not among `requests`
        self.new_locks()

    def new_locks(self) -> None:
        self.submitting, self.receiving, self.lock = threading.RLock(), threading.Lock(), threading.RLock()

    @property
    def is_idle(self) -> bool:
        """Whether no request is in flight or about to be. `Burst.run` reads the same three fields itself."""
        return not (self.requests or self.staged or self.is_moving)

    def as_receiver(self, wait: float, work: Callable[[], None]) -> bool:
        """Run `work` holding `receiving`; False if not acquired within `wait` seconds (-1: no limit).

        By `for`, because Ctrl-C comes after a call, and so between `acquire()` and `try`.
        """
        for is_mine in map(self.receiving.acquire, (True,), (wait,)):
            try:
                if is_mine:
                    work()
            finally:
                if is_mine:
                    self.receiving.release()
        return is_mine

    def append(self, encoded: EncodedRequest, future: Future, number: int) -> None:
        """Under the lock: the newest request. Its outputs are in use from now on."""
        encoded.outputs.is_busy = True
        self.requests.append(PendingRequest(number, encoded, future))

    def append_next(self, encoded: EncodedRequest, future: Future, sent: int) -> None:
        """The same, for a request that is about to be sent after `sent` others."""
        while self.requests and self.requests[-1].number > sent:
            self.take_back()  # Ctrl-C came before it was sent
        self.append(encoded, future, sent + 1)

    def append_unsent(self, encoded: EncodedRequest, future: Future, sent: int) -> None:
        """The same, for a request that waits for the device to be started again, behind others that do."""
        last = self.requests[-1].number if self.requests else 0
        self.append(encoded, future, max(last, sent) + 1)

    def take_back(self) -> None:
        """Under the lock: the newest request was not sent."""
        self.release(self.requests.pop().encoded)

    def release(self, encoded: EncodedRequest) -> None:
        """Its memory is free for other requests."""
        encoded.outputs.is_busy = False
        self._buffers.give_back(encoded.inputs)

    def stage(self, inputs: InputSet, future: Future) -> bool:
        """Under the lock: keep the newest frame until there is room. True if an older frame was dropped for it."""
        is_drop = False
        if self.staged is not None:
            old, dropped = self.staged
            if is_drop := not dropped.done():
                self.finished.append(dropped.fail(CancelledError("a newer frame took its place")))
            self._buffers.give_back(old)
        self.staged = inputs, future
        return is_drop

    def abandon(self) -> None:
        """In a forked child: the requests are the parent's, and so were the threads that held the locks."""
        self.new_locks()
        self.requests.clear()
        self.finished.clear()
        self.staged = None
