"""A thread with an event loop of its own, in which a gateway serves."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    Serve = Callable[[Callable[[], object], asyncio.Future["T"]], Coroutine[Any, Any, None]]

T = TypeVar("T")


class LoopThread(Generic[T]):
    """A thread whose event loop serves until it is told to end."""

    def __init__(self, name: str, serve: Serve[T]) -> None:
        """`serve`: calls its first argument when it serves, and ends when the second one is done."""
        self._serve, self._begun = serve, Future[None]()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name=name, daemon=True)

    def begin(self) -> None:
        """Serve from now on. Raise what keeps it from that."""
        self._thread.start()
        self._begun.result()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[T] = self._loop.create_future()
        try:
            await self._serve(partial(self._begun.set_result, None), self._end)
        except Exception as error:
            if self._begun.done():
                raise
            self._begun.set_exception(error)

    def end(self, how: T) -> None:
        """Tell it how to end, and wait for that. One that has not begun has nothing to end."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set_result, how)
            self._thread.join()
