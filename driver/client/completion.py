"""The outcome of an execution that is still to come.

The thread that waits for a burst's result takes the results that arrive, in order, and completes what they belong to.
So a request costs no thread switch, and an idle burst costs nothing. Two things need a thread that takes results where
no caller waits (`driver.client.receiver`): callbacks, and functions that wait for futures of any kind, such as
`concurrent.futures.wait`. The first of them starts it. Other executions are completed by another thread anyway.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
from collections import deque
from concurrent.futures import CancelledError
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self
from weakref import ref

from burst import Result, Timeout
from burst.errors import timed_out
from driver.client.receiver import RECEIVER
from driver.deadlines import check_times, checked, last_word, seconds_left, unanswered
from fmq import clock
from fmq.process_bound import ProcessBound

if TYPE_CHECKING:
    import asyncio
    from asyncio import AbstractEventLoop as _Loop
    from collections.abc import Callable, Generator

    from burst import ErrorStatus


_log = logging.getLogger(__name__)
_making = threading.RLock()  # held while a completion gets its condition, or ends without one
os.register_at_fork(after_in_child=_making._at_fork_reinit)  # type: ignore[attr-defined]


class ResultSource(Protocol):
    """A source of results: a burst, as its completions use it, or another thread."""

    def wait_for(self, completion: Completion, timeout: float | None) -> None:
        """Wait until it is done: at its deadline it is. Raise Timeout."""

    def look(self) -> None:
        """Take what has arrived, and call back. Does not wait."""

    def expire(self, completion: Completion) -> None:
        """Fail it because its deadline has passed, unless it is done."""

    def drop(self, completion: Completion) -> bool:
        """Cancel it. False if it was done."""

    def attend(self, loop: _Loop) -> None:
        """Have that loop, in its thread, take results."""


class OtherThread:
    """A source of executions that another thread completes, whether or not a caller waits for them."""

    def wait_for(self, completion: Completion, timeout: float | None) -> None:
        """Sleep until it is done. Raise Timeout."""
        wait_or_expire(completion, timeout, completion.sleep, self.expire)

    def look(self) -> None:
        """Do nothing: there is nothing to take."""

    def expire(self, completion: Completion) -> None:
        """Fail it, and give the execution up."""
        self._give_up(completion, unanswered(clock.now() - (completion.deadline or 0)))

    def drop(self, completion: Completion) -> bool:
        """Cancel it, and give the execution up. False if it was done."""
        return self._give_up(completion, CancelledError())

    def _give_up(self, completion: Completion, error: BaseException) -> bool:
        if completion.fail(error).failure is not error:  # another thread was first
            return completion.cancelled()
        if (give_up := completion.give_up) is not None:
            give_up()
        completion.call_back()
        return True

    def attend(self, loop: _Loop) -> None:
        """Do nothing: there is nothing to take."""


OTHER_THREAD = OtherThread()


class Completion(ProcessBound, concurrent.futures.Future[Result]):
    """The outcome of one execution, to come: a future of `concurrent.futures` that can be awaited, too.

    Any thread may wait for it. `concurrent.futures` looks at `_state`, and waits by `_condition` and `_waiters`, which
    are made when they are first asked for: `submit` and `result` of a burst need neither, so whatever asks for them is
    a foreign wait, and from then on the receiver takes results. A foreign wait holds the condition while it looks at
    the state; once there is a condition, `_end` holds it, too, and `_making` orders the two while there is none.
    """

    to_send = "pickle its result"

    give_up: Callable[[], object] | None = None  #: called when another thread would complete it, and it is cancelled
    deadline: int | None = None  #: of the request, CLOCK_MONOTONIC ns
    told: int | None = None  #: what the device is told, if the wait does not end there
    ends_by_timeout: bool = False  #: the deadline is the end of a timeout: the wait does not go on for the last word
    late_status: ErrorStatus | None = None  #: what the device has said of it when it was done already
    _source: ResultSource = OTHER_THREAD
    _state: str = PENDING
    _result: Result | None = None
    _exception: BaseException | None = None
    _made: threading.Condition | None = None  # `_condition`, once it was asked for
    _waiting: list[Any] | None = None  # `_waiters`, likewise
    _called: deque[Callable[[Any], object]] | None = None  # callbacks, where there are any
    _is_attended: bool = False  # the receiver has it

    def __init__(
        self, source: ResultSource = OTHER_THREAD, deadline: int | None = None, told: int | None = None
    ) -> None:
        """Begin. All that does not depend on arguments is in the class: a request costs as little as it may."""
        self.deadline, self.told = deadline, deadline if told is None else told
        self._source = source

    @property
    def last(self) -> int | None:
        """The time when it is done in any case: the device has its last word a moment after a deadline that it was
        told.
        """
        is_told = self.deadline is not None and self.deadline == self.told and not self.ends_by_timeout
        return last_word(self.deadline) if is_told else self.deadline

    # ---- for the caller

    def result(self, timeout: float | None = None, deadline: float | None = None) -> Result:
        """Wait for the result, and return it.

        After `timeout` seconds raises Timeout: the request goes on; ask again. At the `deadline`, a time.monotonic(),
        or at the one that it was submitted with, the request is over: it raises MissedDeadline*, now and later, and the
        device does not begin it any more.

        Raise StatusError for a request that failed, PeerDied, ValueError for what is no time, and CancelledError for
        a request that was cancelled, or dropped for a newer one.
        """
        if deadline is not None:
            self._bring_forward(deadline)
        if timeout is not None or self._state is PENDING:
            self.join(timeout)
        if self._exception is None:
            return self._result  # type: ignore[return-value]
        raise self._exception

    def exception(self, timeout: float | None = None, deadline: float | None = None) -> BaseException | None:
        """Return what `result` would raise, or None. Itself raises Timeout, ValueError, CancelledError."""
        if deadline is not None:
            self._bring_forward(deadline)
        self.join(timeout)
        if self._state is CANCELLED_AND_NOTIFIED:
            raise self._exception or CancelledError
        return self._exception

    def _bring_forward(self, deadline: float) -> None:
        by = checked("deadline", deadline)
        self.deadline = by if self.deadline is None else min(by, self.deadline)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it is done. Raise Timeout."""
        if timeout is not None:
            check_times(timeout=timeout)
        if self._state is PENDING:
            self._source.wait_for(self, timeout)

    def done(self) -> bool:
        """Return True if the result or an error is there. Takes what has arrived, and does not wait."""
        if self._state is PENDING:
            self._poll()
        return self._state is not PENDING

    def _poll(self) -> None:
        """Complete it without waiting, if what it waits for has come."""
        self._source.look()
        if self._state is PENDING and seconds_left(self.last) == 0:
            self._source.expire(self)

    def running(self) -> bool:
        """Return True if it is still to come."""
        return not self.done()

    def cancel(self) -> bool:
        """Give the request up: it is not begun if it was not yet, and its result is dropped when it comes; until then
        the device may write to its outputs.

        False when it has a result or an error.
        """
        return self.cancelled() or (self._state is PENDING and self._source.drop(self))

    def cancelled(self) -> bool:
        """Return True if it was cancelled, or dropped."""
        return self._state is CANCELLED_AND_NOTIFIED

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call fn(future) when it is done: in the thread that finds out, which may be the receiver's, where other
        callbacks wait for this one; at once if it is done.
        """
        self.when_done(fn)
        self._have_attended_once()

    def __await__(self) -> Generator[Any, None, Result]:
        if self._state is PENDING:
            try:
                yield from self.arrival().__await__()
            except BaseException:  # the task was cancelled
                self.cancel()
                raise
        return self.result(0)

    # ---- for what waits beside the caller

    @property
    def is_done(self) -> bool:
        """True if it is complete, without a look at what has arrived."""
        return self._state is not PENDING

    @property
    def failure(self) -> BaseException | None:
        """The error of one that is done; CancelledError, too."""
        return self._exception

    def when_done(self, function: Callable[[Any], object]) -> None:
        """Do as `add_done_callback`, for a caller that sees to it that a thread takes the result."""
        if self._called is None:
            with _making:
                self._called = self._called or deque()
        self._called.append(function)
        if self._state is not PENDING:
            self.call_back()

    def arrival(self) -> asyncio.Future[None]:
        """Return a future of the running loop that is done when this is; the loop takes results until then."""
        import asyncio

        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self.when_done(lambda _: complete_in(loop, done))
        if self._state is PENDING:
            self._source.attend(loop)
            if (left := seconds_left(self.last)) is not None:
                timer = loop.call_later(left, self._source.expire, self)
                done.add_done_callback(lambda _: timer.cancel())
        return done

    def attend(self) -> None:
        """Have an event loop, in its thread, complete this."""
        if self._state is PENDING:
            self.arrival()

    def _have_attended_once(self) -> None:
        if self._state is PENDING and not self._is_attended:
            self._is_attended = True
            self._have_attended()

    def _have_attended(self) -> None:
        """Have the receiver attend to it. The burst keeps it while it is in flight; the receiver, which may be late,
        does not, as the result would hold its buffers.
        """
        if self._source is not OTHER_THREAD:
            RECEIVER.call(partial(_attend_if_kept, ref(self)))

    # ---- for what completes it

    def sleep(self, timeout: float | None) -> None:
        """Wait until another thread completes it. Raise Timeout."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._state is not PENDING, timeout):
                raise timed_out(timeout)

    def settle(self, make: Callable[[], Result]) -> None:
        """Do `conclude`, and call back."""
        self.conclude(make)
        self.call_back()

    def conclude(self, make: Callable[[], Result]) -> None:
        """Do `attempt` in a thread that no caller waits in; it calls back later."""
        try:
            self.attempt(make)
        except BaseException as error:  # noqa: BLE001 (the caller would wait for ever)
            self.fail(error)
        self.give_up = None  # it may refer to this

    def attempt(self, make: Callable[[], Result]) -> None:
        """Complete it with what `make` returns or raises, unless it is done."""
        if self._state is PENDING:
            try:
                self.finish(make())
            except Exception as error:  # noqa: BLE001 (it belongs to the caller that asks for the result)
                self.fail(error)

    def finish(self, result: Result) -> Self:
        """Complete it; what does so calls back later. No effect on one that is done."""
        return self._end(FINISHED, result, None)

    def fail(self, error: BaseException) -> Self:
        """Complete it without a result, as `finish` does with one."""
        return self._end(CANCELLED_AND_NOTIFIED if isinstance(error, CancelledError) else FINISHED, None, error)

    def _end(self, state: str, result: Result | None, error: BaseException | None) -> Self:
        if self._state is PENDING:
            with _making:
                if self._made is None and self._state is PENDING:
                    self._result, self._exception = result, error
                    self._state = state
            if self._made is not None:
                self._tell_waiters(self._made, state, result, error)
        return self

    def _tell_waiters(
        self, condition: threading.Condition, state: str, result: Result | None, error: BaseException | None
    ) -> None:
        with condition:
            if self._state is not PENDING:
                return
            self._result, self._exception = result, error
            self._state = state
            for waiter in self._waiters:
                if state is CANCELLED_AND_NOTIFIED:
                    waiter.add_cancelled(self)
                elif error is not None:
                    waiter.add_exception(self)
                else:
                    waiter.add_result(self)
            condition.notify_all()

    def call_back(self) -> None:
        """Call the callbacks that are due."""
        while self._called:
            with suppress(IndexError):  # another thread took the last one
                self._call(self._called.popleft())

    def _call(self, function: Callable[[Self], object]) -> None:
        try:
            function(self)
        except BaseException as error:  # (as concurrent.futures does: the waiting thread has not caused it)
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C, or the end of the program; other threads complete what others wait for
            _log.exception("a callback of %r raised", self)

    # ---- for concurrent.futures

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        with _making:
            made = self._made = self._made or threading.Condition()
        self._have_attended_once()
        return made

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        """The waiters of `concurrent.futures`, which looks at them under `_condition`."""
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


def _attend_if_kept(known: ref[Completion]) -> None:
    if completion := known():
        completion.attend()


def follow(whole: Completion, execution: Completion, then: Callable[[Completion], object]) -> None:
    """Let `execution` be the part of `whole` that goes on now: cancelling `whole` cancels it. `then` gets it when it is
    done, in the thread that completes it, and settles `whole` or has it follow the next part.
    """

    def part_is_done(execution: Completion) -> None:
        try:
            then(execution)
        except BaseException as error:  # noqa: BLE001 (it belongs to the caller that asks for the result)
            whole.fail(error).call_back()

    whole.give_up = execution.cancel
    execution.add_done_callback(part_is_done)
    if whole.cancelled():
        execution.cancel()


def wait_or_expire(
    completion: Completion,
    timeout: float | None,
    wait: Callable[[float | None], object],
    expire: Callable[[Completion], object],
) -> None:
    """Do what `ResultSource.wait_for` says: `wait` ends when it is done, or raises Timeout after so many seconds."""
    left = None if completion.deadline is None else seconds_left(completion.last)
    if left is None or (timeout is not None and timeout <= left and left > 0):
        wait(timeout)
        return
    try:
        wait(left)
    except Timeout:
        expire(completion)


def call_in(loop: _Loop, function: Callable[..., None], *arguments: Any) -> bool:
    """Call it in the loop's thread; False when the loop is closed, and the tasks that waited there with it."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return False
    return True


def complete_in(loop: _Loop, future: asyncio.Future[None]) -> None:
    """Complete it from any thread, unless it is done. In the loop's own thread at once, as that needs no wake-up."""
    import asyncio

    if asyncio._get_running_loop() is loop:
        _complete(future)
    else:
        call_in(loop, _complete, future)


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
