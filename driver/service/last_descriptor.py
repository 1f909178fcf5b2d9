"""One descriptor in reserve: with it, a client can be told that the process has no more."""

from __future__ import annotations

import os
import select
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from burst.channel import Channel
from burst.exhaustion import exhausted
from driver.protocol.rpc import refuse_unheard

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator


class LastDescriptor:
    """Kept by a process that accepts connections. One thread uses it."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC)

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Let this process open one more descriptor meanwhile."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        try:
            yield
        finally:
            with suppress(OSError):  # another thread has taken it; the next time may be luckier
                self._fd = os.eventfd(0, os.EFD_CLOEXEC)

    def turn_away(self, listener: socket.socket, error: OSError, close: Callable[[socket.socket], object]) -> None:
        """Tell the next client of `listener` why it cannot be served, and `close` its socket."""
        if not exhausted(error):
            return
        with self.given_up(), suppress(OSError):
            if select.select([listener], [], [], 0)[0]:
                client = Channel(listener.accept()[0])
                refuse_unheard(client, error)
                close(client.socket)
