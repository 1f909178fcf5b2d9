"""What has arrived of a stream of results, between the thread that receives it and the caller that takes it."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from burst import BurstError, ErrorStatus, Result
from driver.client.completion import Completion
from driver.protocol.stream_terms import GOES_ON

if TYPE_CHECKING:
    from collections.abc import Callable

_NEWS = Result(ErrorStatus.NONE)


class StreamFeed:
    """Steps that have arrived, in order."""

    close: Callable[[], None]
    """Ends the stream on the device: nothing arrives any more."""

    give_room: Callable[[int], object]
    """Lets the engine write so many results in all."""

    def __init__(self, depth: int, deadline: int | None, *, is_latest: bool) -> None:
        """`depth`: results that there is memory for. `deadline`: CLOCK_MONOTONIC ns. `is_latest`: keep the newest."""
        self.depth, self._deadline, self._is_latest, self._lock = depth, deadline, is_latest, threading.Lock()
        self._arrived: deque[tuple[Result, int]] = deque()
        self._waiting: Completion | None = None
        self._failure: BaseException | None = None
        self.left = self.skipped = 0  #: steps that were taken or dropped; and dropped

    def take(self, result: Result, goes_on: int, count: int) -> None:
        """Add so many steps with that result. `goes_on`: of the last one."""
        with self._lock:
            self._arrived += [(result, GOES_ON)] * (count - 1)
            self._arrived.append((result, goes_on))
            if self._is_latest and len(self._arrived) > 1:
                self._skip()
            self._tell()

    def _skip(self) -> None:
        """Drop all steps but the newest."""
        dropped, newest = len(self._arrived) - 1, self._arrived[-1]
        self._arrived.clear()
        self._arrived.append(newest)
        self.left += dropped
        self.skipped += dropped
        self.give_room(self.left + self.depth)

    def fail(self, error: BaseException) -> None:
        """Note that nothing comes any more."""
        with self._lock:
            self._failure = self._failure or error
            self._tell()

    def end(self) -> None:
        """End the stream; what waits for news is complete, and so is what will."""
        self.close()
        self.fail(BurstError("the stream was closed"))

    def _tell(self) -> None:
        """Complete what waits for news. It calls back at once, which tells an event loop, however much more arrives."""
        waiting, self._waiting = self._waiting, None
        if waiting:
            waiting.finish(_NEWS).call_back()

    @property
    def has_news(self) -> bool:
        """True if `pop` has something to return or to raise; nothing but `pop` takes it away."""
        return bool(self._arrived or self._failure)

    def news(self) -> Completion:
        """Return what is done as soon as `pop` has something to return or to raise."""
        with self._lock:
            waiting = self._waiting
            if waiting is None or waiting.is_done:  # it was cancelled
                waiting = self._waiting = Completion(deadline=self._deadline)
            if self.has_news:
                self._waiting = None
                waiting.finish(_NEWS)
            return waiting

    def pop(self, of: Callable[[int, Result], Result]) -> tuple[Result, int]:
        """Return what `of` makes of the next step's number and result, and what was said besides.

        Raise why nothing comes any more.
        """
        with self._lock:
            if not self._arrived:
                assert self._failure
                raise self._failure
            result, goes_on = self._arrived.popleft()
            number, self.left = self.left, self.left + 1
            return of(number, result), goes_on
