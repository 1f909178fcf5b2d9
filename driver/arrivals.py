"""Results of a burst for asyncio. The first await has the loop watch the result queue; nobody else pays for it."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from burst import Busy

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable

    from burst import Controller, Result
    from driver.future import Future
    from driver.pipeline import Pipeline


class Arrivals:
    """Of one pipeline. Any number of loops and tasks may wait."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._watched: dict[asyncio.AbstractEventLoop, tuple[Controller, int]] = {}
        self._waiters: list[asyncio.Future[None]] = []  # for any result

    def of(self, future: Future) -> asyncio.Future[None]:
        """Done in the running loop when `future` is."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(_set, done))
        self._watch(loop)
        return done

    def tell(self) -> None:
        """A result was taken."""
        while self._waiters:
            waiter = self._waiters.pop()
            waiter.get_loop().call_soon_threadsafe(_set, waiter)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        controller = self._pipeline.controller
        fd = controller.arrival_fd()
        if self._watched.get(loop) == (controller, fd):
            return
        self._unwatch(loop)
        self._watched[loop] = controller, fd
        loop.add_reader(fd, self._look, loop)

    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        _, fd = self._watched.pop(loop, (None, None))
        if fd is not None:
            loop.remove_reader(fd)

    def renew(self) -> None:
        """There is another controller: what loops watched is closed."""
        for loop in list(self._watched):
            with suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pipeline.look()
        if self._pipeline.flights:
            self._watch(loop)
        else:
            self._unwatch(loop)

    async def _until(self, condition: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        while not condition():
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.append(waiter)
            self._watch(loop)
            await waiter

    def _has_room(self) -> bool:
        return len(self._pipeline.flights) < self._pipeline.depth

    async def run(self, arrays: tuple[Any, ...]) -> Result:
        """As `Burst.run_async`."""
        if self._pipeline.options.policy == "block":
            await self._until(self._has_room)
        return await self._pipeline.submit(arrays, None)

    async def stream(self, frames: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Result]:
        """As `Burst.stream`."""
        source = aiter(frames) if hasattr(frames, "__aiter__") else _each(frames)
        pending: deque[Future] = deque()
        frame: asyncio.Future[Any] | None = asyncio.ensure_future(anext(source, _END))
        try:
            while frame or pending:
                await self._next(frame, pending)
                while pending and pending[0].done():
                    future = pending.popleft()
                    if not future.cancelled():
                        yield future.result(0)
                if frame and frame.done() and (self._has_room() or self._pipeline.options.policy != "block"):
                    frame = self._take(frame.result(), source, pending)
        finally:
            if frame:
                frame.cancel()
            for future in pending:
                future.cancel()

    def _take(self, given: Any, source: AsyncIterator[Any], pending: deque[Future]) -> asyncio.Future[Any] | None:
        if given is _END:
            return None
        try:
            pending.append(self._pipeline.submit(given if isinstance(given, tuple) else (given,), None))
        except Busy:  # policy "reject", which has counted it
            pass
        return asyncio.ensure_future(anext(source, _END))

    async def _next(self, frame: asyncio.Future[Any] | None, pending: deque[Future]) -> None:
        """Until there is a frame that can be sent, or the oldest result."""
        waits: list[asyncio.Future[Any]] = []
        if frame and (self._has_room() or self._pipeline.options.policy != "block"):
            waits.append(frame)
        if pending:
            waits.append(self.of(pending[0]))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)


_END = object()


async def _each(frames: Iterable[Any]) -> AsyncIterator[Any]:
    for frame in frames:
        yield frame
        await asyncio.sleep(0)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
