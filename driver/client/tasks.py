"""The tasks of event loops that use a burst, whatever executes its requests: requests in turn, and streams.

Functions import asyncio: a program that uses none of them need not wait until it is loaded.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from burst import Busy, MissedDeadlineTransient
from burst.errors import timed_out
from driver.client.completion import complete_in
from driver.deadlines import WAITING, check_times, earlier, nanoseconds, passed, seconds_left, unanswered
from fmq import clock

if TYPE_CHECKING:
    import asyncio
    from asyncio import AbstractEventLoop as _Loop
    from collections.abc import AsyncIterator, Iterable

    from burst import Result
    from driver.client.burst_requests import BurstRequests
    from driver.client.completion import Completion

_UNCLAIMED = 8  # results that tasks may be about to take; fewer than a burst lets be held


class Tasks:
    """The tasks that wait for one burst, in any number of event loops, beside threads.

    It does not refer to the burst, which ends with the last reference of the application or of a task that waits.
    """

    def __init__(self) -> None:
        self._queue: deque[_WaitingTask] = deque()  # of tasks that wait for room
        self._is_late = False  # a task in the queue has given up, and there is one still
        self._unclaimed: Counter[_Loop] = Counter()  # results and requests of `run`

    def tell(self, source: BurstRequests) -> None:
        """Wake the next task, from any thread: there may be room for it, or the burst was closed."""
        if self._queue and source.has_room:
            with suppress(IndexError):  # it has just left
                self._next().ring()

    def _next(self) -> _WaitingTask:
        """Return the first task; the last one while tasks give up, as the first have no time left for the device."""
        return self._queue[-1 if self._is_late else 0]

    async def run(
        self, source: BurstRequests, arrays: tuple[Any, ...], timeout: float | None, deadline: float | None
    ) -> Result:
        """Run a request as `Burst.run_async` does."""
        import asyncio

        loop, times = asyncio.get_running_loop(), TaskTimes.of(timeout, deadline)
        while self._unclaimed[loop] >= source.depth + _UNCLAIMED:
            await asyncio.sleep(0)  # tasks whose results are there hold them until they have had their turn
        future = await self._submit(source, arrays, times)
        future.ends_by_timeout = times.ends_by_timeout
        self._unclaimed[loop] += 1
        try:
            return await future
        except MissedDeadlineTransient as error:
            raise times.error(error) from None
        finally:
            self._unclaimed[loop] -= 1
            self._unclaimed += Counter()  # keeps no zeros, and no loops

    async def _submit(self, source: BurstRequests, arrays: tuple[Any, ...], times: TaskTimes) -> Completion:
        import asyncio

        deadline = times.end
        if source.options.policy != "block":
            return source.submit_by(arrays, 0, deadline)
        if not self._queue and (future := source.admit(arrays, deadline)):
            return future
        loop = asyncio.get_running_loop()
        turn = _WaitingTask(loop)
        self._queue.append(turn)
        try:
            async with asyncio.timeout(seconds_left(deadline)):
                while True:
                    turn.rung = loop.create_future()
                    source.attend(loop)
                    if self._next() is turn and (future := source.admit(arrays, deadline)):
                        return future
                    await turn.rung
        except TimeoutError:
            self._is_late = True
            raise times.error(unanswered(clock.now() - (deadline or 0))) from None
        except asyncio.CancelledError:
            self._is_late = True
            raise
        finally:
            self._queue.remove(turn)
            self._is_late = self._is_late and bool(self._queue)
            self.tell(source)

    async def stream(
        self,
        source: BurstRequests,
        frames: Iterable[Any] | AsyncIterable[Any],
        timeout: float | None,
        deadline: float | None,
    ) -> AsyncIterator[Result]:
        """Yield results as `Burst.stream` does."""
        import asyncio

        given = aiter(frames) if isinstance(frames, AsyncIterable) else _PlainFrames(frames)
        pending: deque[tuple[Completion, asyncio.Future[None]]] = deque()
        times = TaskTimes.of(timeout, deadline)  # checks them
        send = partial(self._send, source, given, timeout, deadline)
        sending: asyncio.Future[Completion | None] | None = asyncio.ensure_future(send())
        try:
            while sending or pending:
                waits: list[asyncio.Future[Any]] = [pending[0][1]] if pending else []
                if sending and not sending.done():
                    waits.append(sending)
                if waits:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                while pending and pending[0][0].is_done:
                    if not pending[0][0].cancelled():
                        try:
                            yield pending.popleft()[0].result(0)  # only the caller holds it now
                        except MissedDeadlineTransient as error:
                            raise times.error(error) from None
                    else:
                        pending.popleft()
                if sending and sending.done() and not (pending and sending.exception()):  # results first
                    future = sending.result()
                    sending = asyncio.ensure_future(send()) if future else None
                    if future:
                        pending.append((future, future.arrival()))
                    del future
        finally:
            left = [future for future, _ in pending]
            if sending and not sending.cancel() and not sending.exception():
                left += [future] if (future := sending.result()) else []
            for future in left:
                future.cancel()

    async def _send(
        self, source: BurstRequests, frames: AsyncIterator[Any], timeout: float | None, deadline: float | None
    ) -> Completion | None:
        """Send the next frame that is not refused, and return it; None at the end."""
        while (given := await anext(frames, _END)) is not _END:
            with suppress(Busy):  # policy "reject", which has counted it
                arrays = given if isinstance(given, tuple) else (given,)
                times = TaskTimes.of(timeout, deadline)
                future = await self._submit(source, arrays, times)
                future.ends_by_timeout = times.ends_by_timeout
                return future
        return None


class TaskTimes(NamedTuple):
    """The end of a wait, and what ends it."""

    timeout: float | None
    deadline: int | None  #: CLOCK_MONOTONIC ns
    end: int | None  #: the earlier one

    @classmethod
    def of(cls, timeout: float | None, deadline: float | None) -> TaskTimes:
        """Count from now; `deadline`: a time.monotonic(). Raise ValueError, MissedDeadlinePersistent."""
        check_times(timeout=timeout, deadline=deadline)
        by = None if deadline is None else nanoseconds(deadline)
        if missed := passed(by):
            missed.raise_for_status()
        return cls(timeout, by, earlier(timeout, by))

    @property
    def ends_by_timeout(self) -> bool:
        """True if the timeout ends it, and not the deadline."""
        return self.timeout is not None and self.end != self.deadline

    def error(self, error: MissedDeadlineTransient) -> BaseException:
        """Return what the caller gets when the wait has ended: Timeout, if it was the timeout that ended it."""
        if error.phase != WAITING or self.timeout is None or (self.deadline and clock.now() > self.deadline):
            return error
        return timed_out(self.timeout, WAITING, error.late_by)


class _WaitingTask:
    """A task's place in the queue."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop
        self.rung: asyncio.Future[None] = loop.create_future()

    def ring(self) -> None:
        """Wake the task, from any thread: there is room for it."""
        complete_in(self._loop, self.rung)


_END = object()


class _PlainFrames:
    """An iterator over plain frames that lets other tasks run in between. (An async generator that is left early makes
    the loop a task.)
    """

    def __init__(self, frames: Iterable[Any]) -> None:
        self._frames, self._has_begun = iter(frames), False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        import asyncio

        if self._has_begun:
            await asyncio.sleep(0)
        self._has_begun = True
        try:
            return next(self._frames)
        except StopIteration:
            raise StopAsyncIteration from None
