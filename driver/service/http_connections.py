"""The connections of a small HTTP server: a bounded number, fairly shared by accounts, each for a bounded time.

A client that connects and then says nothing, or one byte now and then, holds its connection until the deadline. So that
such clients keep no others out, each account has a share of the connections, and a newcomer takes the place of the
oldest connection that has not yet made its request: of its own account when that has its share, else of the account
with the most. A probe makes its request at once, and is not in reach of that rule for longer; nor is one whose request
has arrived, and waits for a thread to read it.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

MOST, MOST_OF_ACCOUNT = 32, 8  # connections
PATIENCE = 10.0
"""Seconds that a connection may take in all, from its first byte to the last of the answer."""


class HttpConnection:
    """A connection of an HTTP server."""

    def __init__(self, account: Hashable, end: Callable[[], object], asks: Callable[[], bool]) -> None:
        """`end` closes the connection; it must not wait, and does no harm when done twice. `asks`: True if a whole
        request is there, unread.
        """
        self.account, self.end, self.asks = account, end, asks
        self.deadline: float | None = time.monotonic() + PATIENCE
        self.has_asked = False  #: the request is complete: no newcomer takes this connection's place
        self.is_evicted = False


class ConnectionLimiter:
    """A limiter of the connections to one server, which evicts silent ones. Safe from any thread."""

    def __init__(self, most: int = MOST, most_of_account: int = MOST_OF_ACCOUNT) -> None:
        self._most, self._share = most, most_of_account
        self._all: dict[HttpConnection, None] = {}  # in the order of their arrival
        self._lock = threading.Lock()

    def enter(
        self, account: Hashable, end: Callable[[], object], asks: Callable[[], bool] = lambda: False
    ) -> HttpConnection | None:
        """Count a new connection, if need be in the place of another; None if there is no place: close it then."""
        with self._lock:
            if len(self._all) >= 2 * self._most:  # those that were evicted have not left yet
                return None
            connection = HttpConnection(account, end, asks)
            if not self._make_room(account):
                return None
            self._all[connection] = None
            return connection

    def _make_room(self, account: Hashable) -> bool:
        present = [connection for connection in self._all if not connection.is_evicted]
        counts = Counter(connection.account for connection in present)
        if counts[account] >= self._share:
            crowded = account
        elif len(present) >= self._most:
            counts[account] += 1
            crowded = max(counts, key=counts.__getitem__)
        else:
            return True
        silent = (connection for connection in present if connection.account == crowded and not connection.has_asked)
        oldest = next((connection for connection in silent if not connection.asks()), None)
        if oldest is None:
            return False
        oldest.is_evicted = True
        oldest.end()
        return True

    def leave(self, connection: HttpConnection) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._all.pop(connection, None)

    def end_overdue(self) -> None:
        """End the connections whose deadline has passed. Call it now and then."""
        now = time.monotonic()
        with self._lock:
            overdue = [each for each in self._all if each.deadline is not None and each.deadline <= now]
        for connection in overdue:
            connection.end()


def account_of(connection: socket.socket) -> Hashable:
    """Return who connected: a uid at a Unix socket, else a machine's address; TCP does not tell accounts apart."""
    if connection.family == socket.AF_UNIX:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int(struct.unpack("3i", credentials)[1])
    try:
        return str(connection.getpeername()[0])
    except OSError:  # it has gone already
        return None
