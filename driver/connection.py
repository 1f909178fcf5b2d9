"""One connection to one life of a device: when the device dies, it is over, and `driver.recovery` makes another."""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from burst import PeerDied, StatusError
from burst.channel import Channel
from driver.plain import PlainClient
from driver.rpc import PROTOCOL, call

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from burst import Memory

_START_TIMEOUT = 60.0  # seconds for a service and its engine to come up


class Connection:
    """Any thread may use it."""

    def __init__(self, channel: Channel) -> None:
        """Says hello. Raises StatusError, PeerDied; the channel stays the caller's then."""
        self.channel, self._lock, self._pid = channel, threading.Lock(), os.getpid()
        self._released: deque[int] = deque()
        self._is_over = False
        values, fds = self.call("hello", PROTOCOL, timeout=_START_TIMEOUT)
        channel.watch(fds[0])
        _, self.name, self.version, self.type, self.service_pid, self.engine_pid = values
        self._idle: list[PlainClient] = []

    def call(
        self, method: str, *arguments: object, fds: Sequence[int] = (), timeout: float | None = None
    ) -> tuple[list[Any], list[int]]:
        """One call to the service. Raises StatusError, PeerDied."""
        with self._lock:
            self._release()
            return call(self.channel, method, *arguments, fds=fds, timeout=timeout)

    def release(self, token: int) -> None:
        """The device frees a buffer: now, or with the next call while another goes on. Finalizers may come here."""
        self._released.append(token)
        if self._lock.acquire(blocking=False):
            try:
                self._release()
            finally:
                self._lock.release()

    def _release(self) -> None:
        with suppress(PeerDied, StatusError, ValueError):  # gone with the device, or with this connection
            while self._released and not self._is_over and os.getpid() == self._pid:
                call(self.channel, "release", self._released.popleft())

    @contextmanager
    def plain_path(self) -> Iterator[PlainClient]:
        """A connection for one call. Calls at the same time get connections of their own, which are kept."""
        try:
            client = self._idle.pop()
        except IndexError:
            _, fds = self.call("channel")
            channel = Channel.from_fd(fds[0])
            channel.watch(fds[1])
            client = PlainClient(channel)
        try:
            yield client
        except BaseException:
            client.close()  # an answer may still be on its way
            raise
        self._idle.append(client)
        if self._is_over:  # meanwhile, and nobody else will close it
            self._close_idle()

    def free_memory(self, memory: Memory) -> None:
        """The device may unmap it on the plain path."""
        for client in list(self._idle):
            client.free_memory(memory)

    def close(self) -> None:
        """What was made through it ends. Harmless when done twice."""
        self._is_over = True
        self._close_idle()
        self.channel.close()

    def abandon(self) -> None:
        """As `close`, while other threads may still wait in calls: those get PeerDied."""
        self.channel.shutdown()
        with self._lock:
            self.close()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()
