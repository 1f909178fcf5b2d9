"""One connection to one life of a device. When the device dies it ends, and `driver.client.recovery` makes another."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from burst import PeerDied, StatusError, Timeout
from burst.channel import Channel
from driver.client.fenced import FencesClient
from driver.client.plain import PlainClient
from driver.deadlines import seconds_left
from driver.interface import CacheFiles
from driver.protocol.rpc import PROTOCOL, call

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from burst import Memory

_START_TIMEOUT = 60.0  # seconds for a service and its engine to come up


class Connection:
    """Any thread may use it."""

    def __init__(self, channel: Channel, application: str | None = None, timeout: float = _START_TIMEOUT) -> None:
        """Says hello. Raises StatusError, PeerDied, Timeout; the channel stays the caller's then."""
        self.channel, self._lock, self._pid = channel, threading.Lock(), os.getpid()
        self._released: deque[int] = deque()
        self._is_over = False
        declared = () if application is None else (application,)
        values, fds = self.call("hello", PROTOCOL, *declared, timeout=timeout)
        channel.watch(fds[0])
        _, self.name, self.version, self.type, self.service_pid, self.engine_pid, *files = values
        self.cache_files = CacheFiles(*files)
        self._idle: list[PlainClient] = []
        self._fences: FencesClient | None = None
        self._opening = threading.Lock()

    def call(
        self, method: str, *arguments: object, fds: Sequence[int] = (), timeout: float | None = None
    ) -> tuple[list[Any], list[int]]:
        """One call to the service. Raises StatusError, PeerDied, Timeout; then the answer is dropped when it comes."""
        end = None if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise Timeout(f"another call to the device took longer than {timeout} s; nothing was sent")
        try:
            if timeout is None:
                self._release()
            left = None if end is None else end - time.monotonic()
            return call(self.channel, method, *arguments, fds=fds, timeout=left)
        finally:
            self._lock.release()

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
    def plain_path(self, deadline: int | None = None) -> Iterator[PlainClient]:
        """A connection for one call. Calls at the same time get connections of their own, which are kept.

        Raises Timeout when there is none by the deadline, CLOCK_MONOTONIC ns.
        """
        try:
            client = self._idle.pop()
        except IndexError:
            client = PlainClient(self._to_engine("channel", timeout=seconds_left(deadline)))
        try:
            yield client
        except BaseException:
            client.close()  # an answer may still be on its way
            raise
        self._idle.append(client)
        if self._is_over:  # closed meanwhile: no other thread closes this one
            self._close_idle()

    def _to_engine(self, method: str, timeout: float | None = None) -> Channel:
        """A connection past the service."""
        _, fds = self.call(method, timeout=timeout)
        channel = Channel.from_fd(fds[0])
        channel.watch(fds[1])
        return channel

    def fences(self) -> FencesClient:
        """For fenced executions, one connection for all of them. Raises StatusError, PeerDied."""
        with self._opening:
            if self._fences is None:
                self._fences = FencesClient(self._to_engine("fenced"))
            return self._fences

    def free_memory(self, memory: Memory) -> None:
        """The device may unmap it on the plain path."""
        for client in list(self._idle):
            client.free_memory(memory)
        if self._fences:
            self._fences.free_memory(memory)

    def close(self) -> None:
        """What was made through it ends. Harmless when done twice."""
        self._is_over = True
        self._close_idle()
        if self._fences:
            self._fences.close()
        self.channel.close()

    def abandon(self) -> None:
        """As `close`, while other threads may still wait in calls: those get PeerDied."""
        self.channel.shutdown()
        with self._lock:
            self.close()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()
