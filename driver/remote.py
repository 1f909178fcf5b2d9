"""A device in another process, behind the same methods: what `driver.connect` and `device.prepare` return."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self, get_args

import numpy as np

from burst import InvalidArgument, Memory, PeerDied, Trace
from driver import rendezvous
from driver.connection import Connection
from driver.domains import Buffer
from driver.encoding import encode
from driver.errors import DeviceFailed, DriverError
from driver.nn import validate
from driver.options import Preference
from driver.prepared import Home, RemotePreparedModel
from driver.recovery import Revivals, quarantine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from burst import Result
    from burst.channel import Channel
    from driver.domains import BufferDesc, BufferRole
    from driver.nn import Model
    from driver.plain import PlainClient

_ATTEMPTS = 3  # a service may retire just when we come; twice as many for a device that was killed, and may be again


def connect(name: str = "reference") -> RemoteDevice:
    """A device by name, its process started when there is none. Raises DeviceNotFound, DeviceFailed."""
    return RemoteDevice(_connection(name), name)


def _connection(name: str, attempts: int = _ATTEMPTS) -> Connection:
    for _ in range(attempts):
        with suppress(PeerDied):
            channel = rendezvous.connect(name)
            try:
                return Connection(channel)
            except BaseException:
                channel.close()
                raise
    log = rendezvous.Place(rendezvous.runtime_dir(), name).log
    raise DeviceFailed(f"device {name!r} ended while it started; its log is {log}")


class RemoteDevice:
    """One connection to a device. Any thread may use it; what was made through it ends with it.

    When the device dies, so does all of that, except for bursts that recover: they connect this again, in place, and
    from then on everything that is done through it goes to the device's next life.
    """

    def __init__(self, connection: Connection, address: str) -> None:
        """Use `connect`."""
        self.connection, self.address, self._pid = connection, address, os.getpid()
        self._lock, self._reviving = threading.Lock(), threading.Lock()
        self._revivals, self._attempts = Revivals(), 0
        self._failure: Exception | None = None  # of the last attempt
        self._threads: ThreadPoolExecutor | None = None
        self._is_closed = False

    @property
    def name(self) -> str:
        """As the device calls itself."""
        return str(self.connection.name)

    @property
    def version(self) -> str:
        """Of the device's driver."""
        return str(self.connection.version)

    @property
    def type(self) -> str:
        """OTHER, CPU, GPU or ACCELERATOR."""
        return str(self.connection.type)

    @property
    def service_pid(self) -> int:
        """Of the process that listens."""
        return int(self.connection.service_pid)

    @property
    def engine_pid(self) -> int:
        """Of the process that executes."""
        return int(self.connection.engine_pid)

    @property
    def _channel(self) -> Channel:
        return self.connection.channel

    def call(
        self, method: str, *arguments: object, fds: Sequence[int] = (), timeout: float | None = None
    ) -> tuple[list[Any], list[int]]:
        """One call to the service. Raises StatusError, PeerDied."""
        self.check_process()
        return self.connection.call(method, *arguments, fds=fds, timeout=timeout)

    def check_process(self) -> None:
        """Raises DriverError in a forked child: the connection is its parent's."""
        if os.getpid() != self._pid:
            raise DriverError("this device was connected before a fork; connect again in this process")

    def revive(self, dead: Connection) -> None:
        """Connects again, in place, unless somebody did since `dead` was the connection. Threads make one attempt.

        Raises DeviceNotFound, DeviceFailed; PeerDied when this device has died too often lately, or was closed.
        """
        self.check_process()
        seen = self._attempts
        with self._reviving:
            if self.connection is not dead:
                return
            if self._attempts != seen and self._failure:  # while we waited
                raise type(self._failure)(*self._failure.args) from self._failure
            if self._is_closed:
                raise PeerDied(f"device {self.address!r} died, and its connection was closed")
            self._attempts += 1
            try:
                self._revivals.count(self.address)
                self.connection = _connection(self.address, 2 * _ATTEMPTS)
            except Exception as error:
                self._failure = error
                raise
            self._failure = None
        dead.abandon()

    def supported_operations(self, model: Model) -> list[bool]:
        """For each operation of the main subgraph: True is a promise. Raises InvalidModel."""
        validate(model)
        self.check_process()
        n, bits = self._with_model(self.connection, "supported", model)
        return [bool(bit) for bit in np.unpackbits(np.frombuffer(bits, np.uint8), count=n)]

    def prepare(self, model: Model, *, preference: Preference = "fast_single_answer") -> RemotePreparedModel:
        """Compiles a model on the device.

        `preference`: "low_power", "fast_single_answer" or "sustained_speed"; so far it only says how bursts wait.
        Raises InvalidModel before anything is sent, StatusError, PeerDied.
        """
        if preference not in get_args(Preference):
            raise ValueError(f"preference={preference!r}: one of {', '.join(map(repr, get_args(Preference)))}")
        validate(model)
        prepared = RemotePreparedModel(self, model, 0, preference)
        if quarantine.knows(self.address):
            quarantine.check(prepared.key)
        prepared.home = self.home_of(model)
        return prepared

    def allocate(
        self,
        desc: BufferDesc,
        prepared_models: Sequence[RemotePreparedModel],
        input_roles: Sequence[BufferRole] = (),
        output_roles: Sequence[BufferRole] = (),
    ) -> Buffer:
        """Memory on the device for inputs and outputs of these models, to be named in requests.

        Raises StatusError: INVALID_ARGUMENT for models of another device, roles that are given twice, do not exist or
        contradict each other; RESOURCE_EXHAUSTED_PERSISTENT when the device has no room. PeerDied.
        """
        connection = self.connection
        homes = [prepared.present_home() for prepared in prepared_models]
        for n, home in enumerate(homes):
            if home.connection is not connection:
                raise InvalidArgument(f"prepared_models[{n}] was prepared on another device or connection than this")
        (token,), _ = connection.call(
            "allocate", desc.dimensions, [home.number for home in homes], list(input_roles), list(output_roles)
        )
        return Buffer(connection, token)

    def home_of(self, model: Model, trace: Trace | None = None) -> Home:
        """Prepares a valid model. A crash while that goes on is noted in the trace."""
        self.check_process()
        connection = self.connection
        (number,) = self._with_model(connection, "prepare", model, [trace.memory.fd] if trace else [])
        return Home(connection, number)

    def _with_model(self, connection: Connection, method: str, model: Model, fds: Sequence[int] = ()) -> list[Any]:
        fd, where = encode(model)
        try:
            return connection.call(method, where, fds=[fd, *fds])[0]
        finally:
            os.close(fd)

    @contextmanager
    def plain_path(self) -> Iterator[PlainClient]:
        """A connection for one call. Calls at the same time get connections of their own, which are kept."""
        self.check_process()
        with self.connection.plain_path() as path:
            yield path

    def free_memory(self, memory: Memory) -> None:
        """The device may unmap it on the plain path; a burst has its own free_memory."""
        self.connection.free_memory(memory)

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        """Runs an execution in a thread; eight at the same time."""
        with self._lock:
            self._threads = self._threads or ThreadPoolExecutor(8, "execute")
        return self._threads.submit(function)

    def traces(self) -> list[Trace]:
        """The notes of the bursts of all clients of this device: to be read while they run, at no cost."""
        found: list[Trace] = []
        while True:
            (count,), fds = self.call("traces", len(found))
            found += [Trace(Memory.adopt(fd, Trace.nbytes, writable=False)) for fd in fds]
            if not fds or len(found) >= count:
                return found

    def close(self) -> None:
        """Ends the connection: prepared models and bursts made through it end too. Harmless when done twice."""
        if self._threads:
            self._threads.shutdown()
        self._is_closed = True
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
