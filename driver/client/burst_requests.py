"""The requests of one burst, whatever executes them: how they are admitted, and how a caller waits for one."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any

from burst import Busy, Timeout
from driver.client.completion import wait_or_expire

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop as _Loop
    from collections.abc import Callable

    from driver.client.completion import Completion
    from driver.options import Options

CLOSED = "this burst is closed; open another"
CLOSED_IN_FLIGHT = "this burst was closed before the result came"
RUNNING = "this burst is executing in another thread; wait for it, or open another burst"


class BurstRequests(ABC):
    """The requests of one burst, at most `depth` in flight. Any thread may submit, and wait for any of them."""

    options: Options

    @property
    @abstractmethod
    def depth(self) -> int:
        """The number of requests that may be in flight: what was asked for, or as many as fit."""

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """True if one more may be in flight."""

    def submit_by(self, arrays: tuple[Any, ...], timeout: float | None, deadline: int | None) -> Completion:
        """Submit a request as `Burst.submit` does; `deadline`: CLOCK_MONOTONIC ns."""
        end = None if timeout is None else time.monotonic() + timeout
        while (completion := self.admit(arrays, deadline)) is None:
            depth = self.depth
            if self.options.policy == "reject":
                self.note_drop()
                raise Busy(f"depth={depth} requests are in flight, and policy is 'reject'; wait for a result")
            try:
                self.advance(lambda: self.has_room, None if end is None else max(0.0, end - time.monotonic()))
            except Timeout:
                raise Timeout(f"depth={depth} requests were in flight for {timeout} s; nothing was sent") from None
        return completion

    @abstractmethod
    def admit(self, arrays: tuple[Any, ...], deadline: int | None, told: int | None = None) -> Completion | None:
        """Submit without waiting; `told` as for `Completion`. None: there is no room."""

    @abstractmethod
    def advance(self, until: Callable[[], bool], timeout: float | None, completion: Completion | None = None) -> None:
        """Take results until that holds; `completion` is what the caller waits for, if it is one. Raise Timeout."""

    @abstractmethod
    def note_drop(self) -> None:
        """Count a request that was cancelled, refused or replaced."""

    # ---- what completions ask for

    def wait_for(self, completion: Completion, timeout: float | None) -> None:
        """Wait until it is done, whichever thread finds that out: at its deadline it is. Raise Timeout."""
        wait = partial(self.advance, lambda: completion.is_done, completion=completion)
        wait_or_expire(completion, timeout, wait, self.expire)

    @abstractmethod
    def look(self) -> None:
        """Take what has arrived, and call back. Does not wait."""

    @abstractmethod
    def expire(self, completion: Completion) -> None:
        """Fail it because its deadline has passed, unless it is done."""

    @abstractmethod
    def drop(self, completion: Completion) -> bool:
        """Cancel it. False if it was done."""

    @abstractmethod
    def attend(self, loop: _Loop) -> None:
        """Have that loop, in its thread, take results until there is room. Then the burst calls `Tasks.tell`."""
