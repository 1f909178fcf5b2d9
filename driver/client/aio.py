"""Results of a burst for asyncio. The first await has the loop watch the result queue; other bursts pay nothing.

A loop watches a copy of the descriptor, and closes it when it stops: so its number means the same until then, whatever
becomes of the burst.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter, deque
from collections.abc import AsyncIterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from burst import Busy
from driver.deadlines import seconds_left

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from burst import Controller, Result
    from driver.client.future import Future
    from driver.client.pipeline import Pipeline

_Loop = asyncio.AbstractEventLoop
_UNCLAIMED = 8  # results that tasks may be about to take; fewer than a burst lets be held


class Arrivals:
    """Of one pipeline. Any number of loops and tasks may wait, beside threads."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._watched: dict[_Loop, tuple[Controller, int]] = {}
        self._refused: set[_Loop] = set()  # loops that watch as soon as another thread stops receiving
        self._looking = threading.RLock()
        self._queue: deque[_WaitingTask] = deque()  # of tasks that wait for room
        self._unclaimed: Counter[_Loop] = Counter()  # results and requests of `run`

    # ---- what the pipeline calls, in any thread

    def of(self, future: Future) -> asyncio.Future[None]:
        """Done in the running loop when `future` is."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        future.add_done_callback(lambda _: _call(loop, _set, done))
        if not done.done():
            self._watch(loop)
            if (left := seconds_left(future.deadline)) is not None:
                timer = loop.call_later(left, self._pipeline.expire, future)
                done.add_done_callback(lambda _: timer.cancel())
        return done

    def tell(self) -> None:
        """Results may have been taken: there may be room for the first task in the queue, or another device."""
        if self._queue and (self._pipeline.has_room or self._pipeline.session.is_closed):
            with suppress(IndexError):  # it has just left
                self._queue[0].ring()
        for loop, (controller, _) in list(self._watched.items()):
            if controller is not self._pipeline.session.controller:
                _call(loop, self._look, loop)

    def renew(self) -> None:
        """The controller was closed while tasks wait."""
        for loop in list(self._watched):
            _call(loop, self._look, loop)

    def rearm(self) -> None:
        """A thread has stopped running or receiving: from now on the descriptor shows new results."""
        if self._watched:
            self._watch_fd()
        while self._refused:
            with suppress(KeyError):  # another thread took the last one
                loop = self._refused.pop()
                _call(loop, self._watch, loop)

    def close(self) -> None:
        """Nothing will come any more."""
        for loop in list(self._watched):
            if not _call(loop, self._unwatch, loop):
                self._unwatch(loop)
        self.tell()

    # ---- what loops call, each in its thread

    def _watch(self, loop: _Loop) -> None:
        controller, (watched, _) = self._pipeline.session.controller, self._watched.get(loop, (None, -1))
        if watched is controller or self._pipeline.session.is_closed:
            return
        self._unwatch(loop)
        for other in [other for other in list(self._watched) if other.is_closed()]:
            self._unwatch(other)
        self._refused.add(loop)  # before we try, so that a thread that receives now sees it afterwards
        fd = self._watch_fd()
        if fd >= 0:
            self._refused.discard(loop)
            self._watched[loop] = controller, os.dup(fd)
            loop.add_reader(self._watched[loop][1], self._look, loop)

    def _watch_fd(self) -> int:
        """One loop after the other, or each would take the other for a thread that calls `rearm`."""
        with self._looking:
            return self._pipeline.watch_fd()

    def _unwatch(self, loop: _Loop) -> None:
        _, fd = self._watched.pop(loop, (None, -1))
        if fd >= 0:
            loop.remove_reader(fd)
            os.close(fd)

    def _look(self, loop: _Loop) -> None:
        was_idle = not self._pipeline.in_flight.requests
        self._pipeline.look()
        if was_idle or self._pipeline.session.is_closed:
            self._unwatch(loop)  # with no request in flight, only an end makes it readable
        else:
            if self._pipeline.is_recovering:
                self._unwatch(loop)  # until the recovering thread calls `rearm`: the descriptor would stay readable
            self._watch(loop)

    # ---- for tasks

    async def run(self, arrays: tuple[Any, ...]) -> Result:
        """As `Burst.run_async`."""
        loop = asyncio.get_running_loop()
        while self._unclaimed[loop] >= self._pipeline.session.depth + _UNCLAIMED:
            await asyncio.sleep(0)  # tasks whose results are there hold them until they have had their turn
        future = await self._submit(arrays)
        self._unclaimed[loop] += 1
        try:
            return await future
        finally:
            self._unclaimed[loop] -= 1
            self._unclaimed += Counter()  # keeps no zeros, and no loops

    async def _submit(self, arrays: tuple[Any, ...]) -> Future:
        if self._pipeline.options.policy != "block":
            return self._pipeline.submit(arrays, 0)
        if not self._queue and (future := self._pipeline.try_submit(arrays)):
            return future
        loop = asyncio.get_running_loop()
        turn = _WaitingTask(loop)
        self._queue.append(turn)
        try:
            while True:
                turn.rung = loop.create_future()
                self._watch(loop)
                if self._queue[0] is turn and (future := self._pipeline.try_submit(arrays)):
                    return future
                await turn.rung
        finally:
            self._queue.remove(turn)
            self.tell()

    async def stream(self, frames: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Result]:
        """As `Burst.stream`."""
        source = aiter(frames) if isinstance(frames, AsyncIterable) else _each(frames)
        pending: deque[tuple[Future, asyncio.Future[None]]] = deque()
        sending: asyncio.Future[Future | None] | None = asyncio.ensure_future(self._send_next(source))
        try:
            while sending or pending:
                waits: list[asyncio.Future[Any]] = [pending[0][1]] if pending else []
                if sending and not sending.done():
                    waits.append(sending)
                if waits:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                while pending and pending[0][0].done():
                    if not pending[0][0].cancelled():
                        yield pending.popleft()[0].result(0)  # only the caller holds it now
                    else:
                        pending.popleft()
                if sending and sending.done() and not (pending and sending.exception()):  # results first
                    future = sending.result()
                    sending = asyncio.ensure_future(self._send_next(source)) if future else None
                    if future:
                        pending.append((future, self.of(future)))
                    del future
        finally:
            left = [future for future, _ in pending]
            if sending and not sending.cancel() and not sending.exception():
                left += [future] if (future := sending.result()) else []
            for future in left:
                future.cancel()

    async def _send_next(self, source: AsyncIterator[Any]) -> Future | None:
        """The next frame that is not refused, sent; None at the end."""
        while (given := await anext(source, _END)) is not _END:
            with suppress(Busy):  # policy "reject", which has counted it
                return await self._submit(given if isinstance(given, tuple) else (given,))
        return None


class _WaitingTask:
    """A task's place in the queue."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop
        self.rung: asyncio.Future[None] = loop.create_future()

    def ring(self) -> None:
        """In any thread: there is room for this task."""
        _call(self._loop, _set, self.rung)


_END = object()


async def _each(frames: Iterable[Any]) -> AsyncIterator[Any]:
    for frame in frames:
        yield frame
        await asyncio.sleep(0)


def _call(loop: _Loop, function: Callable[..., None], *arguments: Any) -> bool:
    """In the loop's thread; False when the loop is closed, and the tasks that waited there with it."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return False
    return True


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
