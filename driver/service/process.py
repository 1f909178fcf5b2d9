"""The service of a device: its socket, and all work that takes time in Python.

It checks who connects, decodes and validates models, and forwards the rest to the engine, the device's other process.
It lives while it has clients and a little longer, and ends with its engine.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

import numpy as np

from burst import InvalidArgument, Malformed, PeerDied, ResourceExhaustedTransient, StatusError, Timeout
from burst.channel import Channel, Message, close_all
from burst.turns import give_way
from driver.client.discovery import Place, runtime_dir
from driver.deadlines import overdue, passed, seconds_left
from driver.devices import device_class
from driver.engine.cache.compilations import files_needed
from driver.engine.limits import limits
from driver.engine.process import main as run_engine
from driver.nn import validate
from driver.protocol.model_codec import decode, handles_in, operations_on, sealed
from driver.protocol.prepare_arguments import PrepareArguments
from driver.protocol.rpc import PROTOCOL, Reply, call, serve
from driver.service.applications import application_of
from fmq import LifePage

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.interface import Device
    from driver.nn import Model

_log = logging.getLogger(__name__)
LINGER = 2.0  # seconds without a client
_RETRY = 0.1  # seconds after a failed accept
_START_TIMEOUT = 60.0
_REFUSALS = 8  # answered at once; further connections are only closed
_GREETING = 1.0  # seconds that a refused client may take to say hello


class ServiceOptions(NamedTuple):
    """How long a service stays, and which accounts it serves."""

    linger: float | None = LINGER  #: seconds without a client until it ends; None: it stays
    any_uid: bool = False  #: serves every account that may open its socket, not only its own
    stop: int | None = None  #: a descriptor; the service ends when it becomes readable
    on_start: Callable[[Service], object] | None = None  #: called with the service before it accepts clients


class Service:
    """Accepts clients. Each has one thread here and one in the engine; what it made there ends with it."""

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        place: Place,
        options: ServiceOptions,
        engine_channel: Channel,
        engine_pid: int,
    ) -> None:
        self._name, self._listener, self._engine, self._engine_pid = name, listener, engine_channel, engine_pid
        self._place, self._options = place, options
        self._device: Device = device_class(name)()
        self._life = LifePage()
        _, fds = call(engine_channel, "ready", fds=[self._life.fd], timeout=_START_TIMEOUT)
        engine_channel.watch(fds[0])
        self._clients = 0
        self._limits, self._door = limits(), threading.Lock()
        self._of_uid: Counter[int] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._refusing = threading.Semaphore(_REFUSALS)
        self._left = os.eventfd(0, os.EFD_CLOEXEC)
        # Validation runs at low priority, so that it takes no CPU from a listener: Linux priorities are per thread.
        self._heavy = ThreadPoolExecutor(1, "validation", initializer=give_way)

    def run(self) -> bool:
        """Serves until it has had no client for a while, or `stop` becomes readable; False if the engine has ended."""
        poll, linger, stop = select.poll(), self._options.linger, self._options.stop
        for fd in (self._listener.fileno(), self._engine.fileno(), self._left, *([] if stop is None else [stop])):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(None if self._clients or linger is None else linger * 1e3)}
            if self._left in ready:
                self._clients -= os.eventfd_read(self._left)  # the number of clients that have left since
            if stop in ready or self._engine.fileno() in ready:
                with self._place.locked():
                    self._place.leave(self._listener)
                if stop not in ready:
                    _log.error("the engine ended")
                return stop in ready
            if self._listener.fileno() in ready:
                self._accept()
            if not ready and not self._clients and self._retire():
                return True

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # the client has left, or too many files are open: go on serving others
            _log.error("a client could not be accepted: %s", error)
            time.sleep(_RETRY)
            return
        channel = Channel(sock)
        if not self._options.any_uid and channel.peer_uid != os.getuid():
            channel.close()
            return
        uid = channel.peer_uid
        if self._is_full(channel, uid):
            return
        self._clients += 1
        threading.Thread(target=self._serve, args=(channel, uid), name="client", daemon=True).start()

    def _is_full(self, channel: Channel, uid: int) -> bool:
        """Whether this client exceeds a limit: then it gets an error. Else it is counted, until `_leave`."""
        remedy = "close connections"
        with self._door:
            try:
                self._limits.check("device_clients", self._of_uid.total(), remedy)
                self._limits.check("uid_clients", self._of_uid[uid], remedy)
            except ResourceExhaustedTransient as error:
                full = error
            else:
                self._of_uid[uid] += 1
                return False
        if self._refusing.acquire(blocking=False):
            threading.Thread(target=self._refuse, args=(channel, full), name="refusal", daemon=True).start()
        else:
            channel.close()
        return True

    def _refuse(self, channel: Channel, error: StatusError) -> None:
        """Sends the error as the answer to `hello`. It must read `hello` first: closing a socket with unread data also
        drops data on its way to the client.
        """
        try:
            with channel, suppress(PeerDied, Timeout, Malformed, OSError):
                channel.receive(_GREETING).close()
                channel.send([None, int(error.status), str(error)])
        finally:
            self._refusing.release()

    def _leave(self, uid: int) -> None:
        with self._door:
            self._of_uid -= Counter((uid,))  # drops accounts without clients

    def _retire(self) -> bool:
        """Ends unless a client connects. A client takes the same lock before it starts a service, so it either finds
        this one or starts another.
        """
        with self._place.locked(wait=False) as alone:
            if not alone or select.select([self._listener], [], [], 0)[0]:
                return False
            self._place.leave(self._listener)
            return True

    def _serve(self, channel: Channel, uid: int) -> None:
        try:
            with ServiceClient(channel, self) as client:
                serve(channel, client.handlers)
        except PeerDied:
            pass
        finally:
            if self._engine.peer_has_died:
                threading.Event().wait()  # until this process ends: clients must not connect to it again
            channel.close()
            self._leave(uid)
            os.eventfd_write(self._left, 1)

    def own_client(self) -> Channel:
        """A connection for this process itself, outside the limits. It is served until it is closed."""
        near, far = Channel.pair()

        def serve_it() -> None:
            with far, ServiceClient(far, self) as client:
                serve(far, client.handlers)

        threading.Thread(target=serve_it, name="own client", daemon=True).start()
        return near

    def note(self, outcome: str) -> None:
        """Counts the outcome of a preparation."""
        with self._door:
            self._outcomes[outcome] += 1

    def counts(self) -> tuple[int, Counter[str]]:
        """Connected clients, and the outcomes of preparations so far."""
        with self._door:
            return self._of_uid.total(), self._outcomes.copy()

    def kill(self) -> None:
        """Kills the engine, and so the device, as a crash would. Clients that recover wait for its restart."""
        os.kill(self._engine_pid, signal.SIGKILL)

    def describe(self) -> list[object]:
        """The answer to `hello`."""
        device = self._device
        pids, files = [os.getpid(), self._engine_pid], files_needed(device)
        return [PROTOCOL, device.name, device.version, device.type, *pids, *files]

    def new_engine_channel(self, uid: int) -> Channel:
        """A connection to the engine for one client of that account."""
        near, far = Channel.pair()
        with far:
            self._engine.send(["client", uid], [far.fileno()])
        return near

    def supported(self, fds: list[int], where: object, deadline: int | None = None) -> tuple[Model, list[bool]]:
        """Decodes and validates a model in the low-priority thread. Owns `fds`.

        Raises MissedDeadline* if it is not done by the deadline.
        """
        if found := passed(deadline):
            close_all(fds)
            found.raise_for_status()
        future = self._heavy.submit(self._check, fds, where)
        if wait([future], seconds_left(deadline)).done:
            return future.result()
        was_queued = future.cancel()
        if was_queued:
            close_all(fds)
        raise overdue("queued" if was_queued else "preparing", deadline or 0)

    def _check(self, fds: list[int], where: object) -> tuple[Model, list[bool]]:
        memory = sealed(fds, where)
        self._limits.check_size("client_bytes", sum(memory.occupied.values()), "prepare a smaller model")
        model = decode(memory, where)
        validate(model)
        promised = self._device.supported_operations(model)
        if (kinds := self._device.memory_kinds) is None or len(promised) != len(model.main.operations):
            return model, promised
        refused = operations_on(model, lambda value: memory.kind_at(value.ctypes.data) not in {None, *kinds})
        return model, [can and not is_refused for can, is_refused in zip(promised, refused, strict=True)]


class ServiceClient:
    """One connection."""

    def __init__(self, channel: Channel, service: Service) -> None:
        self._service, self._channel = service, channel
        self._engine = service.new_engine_channel(channel.peer_uid)
        self._life = LifePage()
        self.handlers: dict[str, Callable[..., Reply]] = {
            "hello": self.hello,
            "supported": self.supported,
            "prepare": partial(self.noted, "prepared", "refused", self.prepare),
            **{method: partial(self.forward, method) for method in ("free", "channel", "fenced", "async", "burst")},
            **{method: partial(self.forward, method) for method in ("allocate", "release", "copy_from", "copy_to")},
            **{method: partial(self.forward, method) for method in ("copy", "buffer_state")},
            **{method: partial(self.forward, method) for method in ("stage", "turns", "status", "traces")},
            **{method: partial(self.forward, method) for method in ("figures", "census")},
            "restore": partial(self.noted, "restored", "not_restored", partial(self.forward, "restore")),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
        self._life.close()

    def hello(self, _: Message, version: int, *declared: object) -> Reply:
        """Describes the device. `declared`: the name of the client's application, or nothing.

        Raises InvalidArgument for another version of the protocol, or a name that cannot be one;
        ResourceExhaustedTransient while the account has as many applications as it may have.
        """
        if version != PROTOCOL:
            raise InvalidArgument(
                f"protocol {version}: this service speaks {PROTOCOL}; use the same release on both sides"
            )
        # The answer proves that the engine is alive: a client that reconnects after a death relies on it.
        call(self._engine, "join", application_of(self._channel, declared), bool(declared))
        return Reply(self._service.describe(), [os.dup(self._life.fd)])

    def supported(self, message: Message, where: object) -> Reply:
        """`supported_operations` of the model in the descriptors, one bit each."""
        _, supported = self._service.supported(message.take_fds(), where)
        return Reply([len(supported), np.packbits(supported).tobytes()])

    def prepare(self, message: Message, where: object, *plain: object) -> Reply:
        """Validates here, compiles in the engine; answers the prepared model's number.

        Cache files may follow the model's descriptors, as many as the arguments say, and then memory for a trace.
        """
        arguments = PrepareArguments.from_wire(*plain)
        count = 1 + len(handles_in(where))
        if len(message.fds) < count:
            raise Malformed("a descriptor of the model is missing")
        fds = message.take_fds()
        try:
            model, supported = self._service.supported([os.dup(fd) for fd in fds[:count]], where, arguments.deadline)
            if not all(supported):
                first = supported.index(False)
                raise InvalidArgument(
                    f"operation {first} ({model.main.operations[first].type}) and {supported.count(False) - 1} more "
                    "are not supported"
                )
            values, _ = call(self._engine, "load", where, *arguments.to_wire(), fds=fds)
        finally:
            close_all(fds)
        if arguments.cache_counts:
            self._service.note("declined" if values[-1] else "saved")
        return Reply(values)

    def noted(
        self, done: str, failed: str, method: Callable[..., Reply], message: Message, *arguments: object
    ) -> Reply:
        """Calls a method and counts its outcome."""
        try:
            reply = method(message, *arguments)
        except Exception:
            self._service.note(failed)
            raise
        self._service.note(done)
        return reply

    def forward(self, method: str, message: Message, *arguments: Any) -> Reply:
        """Passes a call on to the engine."""
        values, fds = call(self._engine, method, *arguments, fds=message.fds)
        return Reply(values, fds)


def start_engine(name: str, listener: socket.socket) -> tuple[Channel, int]:
    """Starts the engine process. It ends when this process dies or closes its end of the channel.

    By fork, because both processes begin with importing the same modules: a device starts in half the time. Only this
    thread exists yet, besides numpy's, which survive forks.
    """
    near, far = Channel.pair()
    gc.freeze()
    with warnings.catch_warnings(), far:
        warnings.simplefilter("ignore", DeprecationWarning)
        if pid := os.fork():
            return near, pid
        try:
            near.close()
            listener.close()
            run_engine(name, far)
        except BaseException:  # noqa: BLE001 (this process must not go on as a second service)
            _log.exception("the engine of device %r failed", name)
        finally:
            os._exit(1)


def isolate() -> None:
    """Undoes what was inherited from the first client: CPU affinity, resource limits, signal mask, umask."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))  # not 0: a core handler behind a pipe ignores 0 and takes seconds
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o077)


def run(name: str, fd: int, place: Place, options: ServiceOptions) -> NoReturn:
    """Runs the service process. `fd`: the listening socket. Exits with 1 after a failure."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s: %(message)s")
    isolate()
    listener = socket.socket(fileno=fd)
    try:
        service = Service(name, listener, place, options, *start_engine(name, listener))
        if options.on_start:
            options.on_start(service)
    except BaseException as error:  # noqa: BLE001 (no client may wait for a service that failed)
        if isinstance(error, PeerDied):
            _log.error("device %r failed to start: its engine ended", name)
        else:
            _log.exception("device %r failed to start", name)
        with place.locked():
            place.leave(listener)  # clients see the failure now and read the log
        os._exit(1)
    os._exit(0 if service.run() else 1)  # threads that still serve clients end here, too


def main() -> None:
    """Entry point of the process that a client starts. Arguments: device name, listening socket."""
    run(sys.argv[1], int(sys.argv[2]), Place(runtime_dir(), sys.argv[1]), ServiceOptions())
