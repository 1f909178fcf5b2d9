"""Turns at what a gateway has little of, such as threads: accounts alternate, however much each of them asks for."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Hashable

    _Waiting = deque[tuple[int, asyncio.Future[None]]]


class FairTurns:
    """Turns of the tasks of one event loop. What has its turn takes its share until it is done."""

    def __init__(self, most: int) -> None:
        """`most`: that is taken at a time."""
        self._most = self._left = most
        self._waiting: dict[Hashable, _Waiting] = {}  # by account, that whose turn is next first

    @asynccontextmanager
    async def taken(self, account: Hashable, share: int = 1) -> AsyncIterator[None]:
        """Wait for a turn of that account, and take its share meanwhile."""
        share = min(share, self._most)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(account, deque()).append((share, turn))
        self._grant()
        try:
            await turn
            yield
        finally:
            if turn.cancelled():  # while it waited
                self._grant()
            else:
                self._left += share
                self._grant()

    def _grant(self) -> None:
        while self._waiting:
            account, waiting = next(iter(self._waiting.items()))
            share, turn = waiting[0]
            if not turn.cancelled():
                if share > self._left:
                    return
                self._left -= share
                turn.set_result(None)
            waiting.popleft()
            del self._waiting[account]
            if waiting:  # behind the others
                self._waiting[account] = waiting
