"""One connection to one life of a device. When the device dies it ends, and `driver.client.recovery` makes another."""

from __future__ import annotations

import fcntl
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args
from weakref import WeakSet, ref

from burst import InvalidArgument, Malformed, Memory, PeerDied, StatusError, Timeout, Trace
from burst.channel import Channel, close_all
from burst.dropped import PATIENCE, DropList
from burst.errors import DeviceEnd, EngineEnded
from burst.serving_thread import ServingThread
from driver.client.other_process import stopped_of_device
from driver.client.socket_lane import SocketLane
from driver.errors import DeviceFailed
from driver.protocol.greeting import Greeting
from driver.protocol.rpc import PROTOCOL, call, end_of
from fmq import InvalidDescriptor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from threading import Thread

_START_TIMEOUT = 60.0  # seconds for a service and its engine to come up
_MOST_TRACES = 16_384
_CLOCK_ERROR = 1_000_000  # nanoseconds: one kernel has one clock
Dropped = Literal["release", "free"]
"""What the device frees: a buffer, or a prepared model. The method that takes their numbers."""


class MemoryPath(Protocol):
    """A way for requests into the device, which knows memory by slots."""

    def free_memory(self, memory: Memory) -> None:
        """Have the device unmap it, after the executions that use it. Unknown memory is no error. Raise PeerDied."""


class Connection:
    """A connection to one life of a device. Any thread may use it."""

    def __init__(self, channel: Channel, application: str | None = None, timeout: float = _START_TIMEOUT) -> None:
        """Say hello. Raise StatusError, PeerDied, Timeout, DeviceFailed; the channel stays the caller's then."""
        self.channel, self._is_over = channel, False
        self.is_outlived = False  #: its engine was ended for the memory that it took: another one serves
        self.is_foreign = channel.is_foreign  #: the device is another account's
        self.shutdown_grace = 0.05  #: seconds in which a service whose engine has died may say why
        self._dropped = DropList(self._tell)
        self._paths: WeakSet[MemoryPath] = WeakSet()
        self.buffers: WeakSet[object] = WeakSet()  #: of the device, which are not released yet
        self.is_watched = False  #: for the renewal of its engine
        self.watcher: Callable[[], Thread | None] = lambda: None  #: returns the thread that does so
        self.is_retired = False  #: another connection has taken its place
        self._listing = threading.Lock()
        self.service_pid = channel.peer_pid  #: until it says hello; who starts a device is its own socket's peer
        declared = () if application is None else (application,)
        values, fds = self.call("hello", PROTOCOL, *declared, timeout=timeout)
        channel.watch(fds[0])
        told = Greeting.from_wire(values)
        self.name, self.version, self.type = told.name, told.version, told.type
        self.service_pid, self.engine_pid = told.service_pid, told.engine_pid
        self.cache_files, self.extensions = told.cache_files, tuple(map(str, told.extensions))
        self.lane = SocketLane(self)  #: for what is not executed in a burst
        self.add_path(self.lane)
        self._compare_clocks(timeout)

    def _compare_clocks(self, timeout: float) -> None:
        """Raise DeviceFailed where the device's clock counts from another beginning, as in a time namespace of its own.

        A deadline would be another moment there.
        """
        before = time.monotonic_ns()
        try:
            (there,), _ = self.call("clock", timeout=timeout)
        except InvalidArgument:  # an earlier release, which does not tell
            return
        after = time.monotonic_ns()
        if not before - _CLOCK_ERROR <= there <= after + _CLOCK_ERROR:
            words = (
                f"its CLOCK_MONOTONIC is {(there - after) / 1e9:+.3f} s from this process's, and deadlines go by that"
            )
            remedy = "run both in one time namespace, or set BURST_RUNTIME_DIR to a directory of this one's own"
            raise DeviceFailed(f"the device is in another time namespace: {words}; {remedy}")

    def call(
        self, method: str, *arguments: object, fds: Sequence[int] = (), timeout: float | None = None
    ) -> tuple[list[Any], list[int]]:
        """Call the service, and return its answer.

        Raise StatusError, PeerDied, Timeout, and DeviceFailed while one of the device's processes is stopped; then the
        answer is dropped when it comes.
        """
        end = None if timeout is None else time.monotonic() + timeout
        lock = self._dropped.lock
        if not lock.acquire(timeout=-1 if timeout is None else timeout):
            raise Timeout(f"another call to the device took longer than {timeout} s; nothing was sent")
        try:
            if timeout is None or timeout > PATIENCE:
                self._dropped.tell()
            left = None if end is None else end - time.monotonic()
            answer = call(self.channel, method, *arguments, fds=fds, timeout=left, look=self._look)
        except EngineEnded:
            self.is_outlived = True
            raise
        finally:
            lock.release()
        if self._dropped.is_due:
            self._dropped.tell_due()
        return answer

    def _look(self) -> None:
        """Raise DeviceFailed when a process of the device has been stopped, and so does not answer."""
        if found := stopped_of_device(self.service_pid):
            words = f"the device does not answer: its process {found.pid} ({found.command}) is stopped"
            raise DeviceFailed(
                f"{words}; continue it with `kill -CONT {found.pid}`, or end it with `kill -9 {found.pid}`"
            )

    def drop(self, what: Dropped, number: int) -> None:
        """Have the device free a buffer or a prepared model, soon. Finalizers may call this."""
        self._dropped.add((what, number))

    def free(self, what: Dropped, number: int) -> None:
        """Have the device free it now, or when the call of another thread has ended."""
        self._dropped.tell_now((what, number))

    def _tell(self, dropped: list[tuple[Dropped, int]]) -> None:
        with suppress(PeerDied, StatusError, Timeout):  # gone with the device, or with this connection; or on its way
            for method in get_args(Dropped):
                numbers = [number for what, number in dropped if what == method]
                if numbers and not self._is_over:
                    call(self.channel, method, *numbers, timeout=PATIENCE)

    def to_engine(self, timeout: float | None = None) -> Channel:
        """Open a socket of the lane. Raise as `call`."""
        _, fds = self.call("lane", timeout=timeout)
        channel = Channel.from_fd(fds[0])
        channel.watch(fds[1])
        channel.note_end(self.at_end)
        return channel

    @property
    def at_end(self) -> Callable[[], DeviceEnd]:
        """The function `device_end`, for what this connection refers to."""
        return partial(_device_end_of, ref(self))

    def device_end(self) -> DeviceEnd:
        """Return the device's end, as it is about to tell of it or has told."""
        with self._dropped.lock:
            found = end_of(self.channel, self.shutdown_grace)
        self.is_outlived = self.is_outlived or bool(found.status)
        return found

    def add_path(self, path: MemoryPath) -> None:
        """Add a path on which requests name memory: `free_memory` reaches it as long as it lives."""
        with self._listing:
            self._paths.add(path)

    def free_memory(self, memory: Memory) -> None:
        """Have the device unmap it on all paths, bursts too: at once, or after the executions that use it."""
        with self._listing:
            paths = list(self._paths)
        for path in paths:
            with suppress(PeerDied):  # its memory is free
                path.free_memory(memory)

    @property
    def has_ended(self) -> bool:
        """True if it was closed, or the device has ended."""
        return self._is_over or self.channel.peer_has_died

    def close(self) -> None:
        """End the connection, and what was made through it. Harmless when done twice."""
        self._is_over = True
        self.lane.close()
        self.channel.close()

    def abandon(self) -> None:
        """Close it while other threads may still wait in calls: those get PeerDied."""
        self.channel.shutdown()
        with self._dropped.lock:
            self.close()


def trace_memory(connection: Connection, timeout: float | None = None) -> list[int]:
    """Return descriptors of the traces that this connection may read: sealed memory. Raise as `Connection.call`, and
    Malformed.
    """
    fds: list[int] = []
    try:
        while True:
            values, more = connection.call("traces", len(fds), timeout=timeout)
            fds += more
            if len(fds) >= _total(values, fds) or not more:
                return fds
    except BaseException:
        ServingThread(close_all, fds, name="close").start()  # of what is no memory that may never end
        raise


def _total(values: list[Any], fds: list[int]) -> int:
    """Return how many traces there are, once the answer and the descriptors so far are checked. Raise Malformed."""
    match values:
        case [int(total)] if len(fds) <= _MOST_TRACES and all(map(_is_sealed, fds)):
            return total
    raise Malformed("what the device sends as traces is none, or too much")


def _is_sealed(fd: int) -> bool:
    """Return True for memory that no process can shrink. Asks no file system, as that of another process might wait."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def _trace(fd: int) -> Trace:
    return Trace(Memory.adopt(fd, Trace.nbytes_in(fd), writable=False))


def traces_of(connection: Connection, timeout: float | None = None) -> list[Trace]:
    """Return the traces that this connection may read. Raise as `trace_memory`."""
    fds = trace_memory(connection, timeout)
    try:
        return [_trace(fds.pop(0)) for _ in range(len(fds))]
    except InvalidDescriptor as error:
        raise Malformed(f"what the device sends as a trace is none: {error}") from error
    finally:
        close_all(fds)


def _device_end_of(connection: ref[Connection]) -> DeviceEnd:
    found = connection()
    return found.device_end() if found else DeviceEnd()
