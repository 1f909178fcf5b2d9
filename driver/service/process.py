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
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from burst import ErrorStatus, InvalidArgument, Malformed, PeerDied, ResourceExhaustedTransient, StatusError
from burst.channel import Channel, pack
from burst.errors import DeviceEnd
from burst.serving_thread import ServingThread
from driver.client.discovery import Place, runtime_dir
from driver.client.launch import BACKLOG
from driver.config import device_uid
from driver.devices import device_class
from driver.engine import sandbox, state
from driver.engine.cache.compilations import files_needed
from driver.engine.call_rules import Reach
from driver.engine.landlock import Access
from driver.engine.latency import KEPT
from driver.engine.ledger import Ledger
from driver.engine.limits import limits, or_raise, renew_when
from driver.engine.real_time import USUAL, RealTime
from driver.errors import signal_name
from driver.nn.file_form import FILE
from driver.protocol.greeting import Greeting
from driver.protocol.rpc import (
    PROTOCOL,
    SPEAK_WITHIN,
    Reply,
    beyond_the_sandbox,
    call,
    end_message,
    refuse,
    refuse_unheard,
    serve,
)
from driver.service.bounded_log import BoundedHandler, EngineLog, LogFile
from driver.service.client_census import ClientCensus
from driver.service.client_source import ListeningSocket
from driver.service.closing_process import ClosingProcess
from driver.service.engine_process import EngineProcess, exit_code, start_engine
from driver.service.engine_renewal import Renewal
from driver.service.engine_watch import EngineWatch
from driver.service.file_gate import FileGate
from driver.service.fork_server import SCORES
from driver.service.low_priority import LowPriority
from driver.service.preparation_times import PreparationTimes
from driver.service.service_client import ServiceClient
from driver.service.signals import is_hangup, readable_at_signals
from driver.service.trials import UNPROVOKED
from driver.service.upkeep import InstalledCode, Upkeep
from driver.service.validation import NOT_YOURS, ValidationBudget, Validator
from fmq import LifePage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from driver.interface import Device
    from driver.service.client_source import AcceptedClient, ClientSource
    from driver.service.engine_group import EngineGroup

_log = logging.getLogger(__name__)
LINGER = 2.0  # seconds without a client
_LAST_LINGER = 0.1  # the same, where another service has taken over
_RETRY = 0.1  # seconds after a failed accept
_START_TIMEOUT = 60.0


class ServiceOptions(NamedTuple):
    """How long a service stays, and which accounts it serves."""

    linger: float | None = LINGER  #: seconds without a client until it ends; None: it stays
    any_uid: bool = False  #: serves every account that may open its socket, not only its own
    stop: int | None = None  #: a descriptor; the service ends when it becomes readable
    on_start: Callable[[Service], object] | None = None  #: called with the service before it accepts clients
    account: int | None = None  #: the account that it serves alone, as a cell; None: its own, and others if `any_uid`
    files_of_others: bool = False  #: takes model files from every account that it serves
    group: EngineGroup | None = None  #: of its engine
    is_second: bool = False  #: another service of the device is there, whose clients are to come over
    real_time: RealTime = USUAL  #: what its owner says of that

    @property
    def is_shared(self) -> bool:
        """True if several accounts share its engine."""
        return self.any_uid and self.account is None

    @property
    def serves_others(self) -> bool:
        """True if its process has sockets of several accounts: of an engine that they share, or of metrics."""
        return self.any_uid and self.account in {None, device_uid()}


class Service:
    """Accepts clients. Each has one thread here and one in the engine; what it made there ends with it."""

    def __init__(
        self,
        name: str,
        kind: type[Device],
        source: ClientSource,
        options: ServiceOptions,
        engine: EngineProcess,
        low: LowPriority | None = None,
    ) -> None:
        """`low`: the priority that the engine has until its first client does not come from another one."""
        self._name, self._source, self._options = name, source, options
        self._engine, self._engine_pid, self._running = engine
        self._low = low
        self._device = kind()
        forks = options.serves_others
        self._closing = ClosingProcess(partial(sandbox.enter, self.needed_calls)) if forks else None
        self._limits = limits(is_shared=options.is_shared, is_own=not options.any_uid)
        self._door = threading.Lock()
        most = self._limits.engine_most(1)
        self.files = FileGate(self._device, name, most, options.account)  # forks: before there are threads
        self.times = PreparationTimes(self._device, name, options.account)
        self.ledger = Ledger(self._limits)  #: of what this process holds for clients; the engine has one of its own
        self.validator = Validator(self._device, self._limits, self.times, self._extensions)  # forks, too
        self.owner = device_uid() if options.account is None else options.account  #: the account of the engine
        whose = self.ledger.account(self.owner)
        code = None if options.account is not None else InstalledCode(kind.library)
        self.upkeep = Upkeep(self, renew_when(), code)
        end = None if options.is_shared else self._end_engine
        most_of_group = partial(self._limits.group_most, makes_pages=self.owner == device_uid())
        self.watch = EngineWatch(
            engine.pid,
            self._limits,
            whose,
            end,
            look=self.upkeep.look,
            group=options.group,
            group_most=most_of_group,
        )
        self._life = LifePage()
        (self._engine_gave_up,), fds = call(self._engine, "ready", fds=[self._life.fd], timeout=_START_TIMEOUT)
        self._engine.watch(fds[0])
        self._census = ClientCensus(self._limits if options.account is None else None)
        self._channels: set[Channel] = set()
        self._outcomes: Counter[str] = Counter()
        self._left = os.eventfd(0, os.EFD_CLOEXEC)
        self._linger, self._is_succeeded = options.linger, False
        wake = partial(os.eventfd_write, self._left, 1)
        restarts = options.linger is not None and options.account is None
        self.renewal = Renewal(source, self._obstacle(), self.watch.measure, wake, restarts=restarts)
        source.on_renew = partial(self.renew, "SIGHUP")

    def _obstacle(self) -> str:
        """Return why there can be no second engine; "": there can."""
        remedy = "restart the device, and clients that recover wait for it"
        if self._device.needs.is_one_of_a_kind(self._device.type):
            return f"device {self._device.name!r} exists once, and two engines cannot have it; {remedy}"
        if self._options.linger is None and self._options.account is None:
            return f"it is served by one process, which systemd or a shell knows; {remedy}, or serve it with --group"
        return ""

    def run(self) -> bool:
        """Serve until there was no client for a while, or `stop` becomes readable; return False if the engine has
        ended.
        """
        self.watch.start()
        if self._closing:
            self._closing.keep()
        poll, stop = select.poll(), self._options.stop
        if stop is None:
            stop = readable_at_signals(signal.SIGHUP)
        for fd in (self._source.fileno(), self._engine.fileno(), self._left, stop):
            poll.register(fd, select.POLLIN)
        while True:
            linger = self._linger
            ready = {fd for fd, _ in poll.poll(None if linger is None or self._census.total() else linger * 1e3)}
            if self._left in ready:
                os.eventfd_read(self._left)
                self._look_after_renewal(poll)
                if self.renewal.is_drained(self._census.total()):
                    self._end_drained()
                    return True
            is_stopped = stop in ready and not self._is_hangup(stop)
            if is_stopped or self._engine.fileno() in ready:
                self._end(is_stopped=is_stopped)
                return is_stopped
            if self._source.fileno() in ready:
                if linger is not None and self._options.account is None and self._device.is_outdated():
                    poll.unregister(self._source.fileno())
                    self._hand_over()
                elif not self._accept():
                    self._end(is_stopped=True)
                    return True
            if not ready and not self._census.total() and self._source.retire(self._save):
                return True

    def _is_hangup(self, stop: int) -> bool:
        """Return True for SIGHUP, by which the engine is renewed."""
        if is_hangup(stop):
            self.renew("SIGHUP")
            return True
        return False

    def _look_after_renewal(self, poll: select.poll) -> None:
        """Take no more clients once a second service does, and end with the last one that is here."""
        if self.renewal.is_succeeded and not self._is_succeeded:
            self._is_succeeded, self._linger = True, _LAST_LINGER
            if fixed := self.renewal.fixed:
                _log.info("clients that know nothing of renewals (%d), as programs in C, keep this engine", fixed)
            fd = self._source.fileno()
            if self._source.hand_over() and fd >= 0:
                poll.unregister(fd)

    def _end(self, *, is_stopped: bool) -> None:
        with self._source.ending():
            if not is_stopped and (self._device.asked_apart or self._running.ends()):  # the status comes late
                code = exit_code(self._engine_pid)
                self.files.note_end(code, self._running.ends())
                self._tell_end(code)
            self._save()  # before another service starts
        if not is_stopped:
            _log.error("the engine ended")

    def note_runtime(self, nbytes: int) -> None:
        """Write into the ledger what the engine holds that no client accounts for."""
        self.ledger.account(self.owner).note("runtime_bytes", nbytes)

    def end_low_priority(self) -> None:
        """Let the engine compute as others do. Any thread."""
        if self._low:
            self._low.end()

    def renew(self, why: str) -> None:
        """Have another engine take over what this one has; log why there is none."""
        try:
            self.renewal.begin(why)
        except StatusError as error:
            _log.error("%s", error)

    def _end_drained(self) -> None:
        """End the engine before another one can begin: there is one device for both."""
        with self._source.ending():
            self.kill()
            exit_code(self._engine_pid)
            self._save()

    def _save(self) -> None:
        """Save what is known of files and of preparations."""
        self.files.close()
        self.times.close()

    def _tell_end(self, code: int) -> None:
        """Tell all clients why the engine has ended, if that is the driver's doing."""
        words = self._running.shutdown_reason
        if not words and code < 0 and -code not in UNPROVOKED:
            functions = ", ".join(self._running.functions) or "execute, or a thread of its own"
            words = f"driver {self._device.name!r}: {functions} ended the engine with {signal_name(-code)}"
        if self._device.asked_apart and words:
            _log.error("%s", words)
            self._tell(DeviceEnd(words))

    def _end_engine(self, found: int, most: int) -> None:
        """End the engine, which has taken too much memory, and tell its clients. They come to the next one. Any thread,
        also more than once.
        """
        words = (
            f"the device's engine took {found} bytes of memory, and was ended: {most} are allowed for the clients that "
            f"it has had (client_bytes of each, and engine_bytes); make smaller requests{or_raise('engine_bytes')}"
        )
        _log.error("%s", words)
        is_alone = self._census.total() == 1
        status = ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT if is_alone else ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
        self._tell(DeviceEnd(words, status))
        self.kill()

    def _tell(self, end: DeviceEnd) -> None:
        """Tell all clients why the engine ends. One that does not read its messages is not told."""
        for channel in list(self._channels):
            with suppress(PeerDied, StatusError):
                channel.send_at_once(pack(end_message(end)))

    def _hand_over(self) -> None:
        """Take no more clients: the next client starts a service of the new code. Those that are here stay."""
        with self._source.ending():
            pass
        _log.info("the driver was replaced; new clients get another process")

    def _accept(self) -> bool:
        """Take a client; return False if the broker has ended this service."""
        try:
            found = self._source.accept()
        except PeerDied:
            return False
        except (OSError, Malformed) as error:  # it has left, or too many files are open: go on serving others
            _log.error("a client could not be accepted: %s", error)
            if isinstance(error, OSError):
                self._source.turn_away(error, self.close_socket)
            time.sleep(_RETRY)
            return True
        if found:
            self._begin(found)
        return True

    def _begin(self, found: AcceptedClient) -> None:
        """Serve a client in a thread of its own."""
        channel, uid = found.channel, found.channel.peer_uid
        if found.is_watcher:
            self._serve_apart(channel)
        elif not self._options.any_uid and uid != os.getuid():
            self.close_socket(channel.socket)
        elif not self._is_full(channel, uid):
            channel.accept_descriptors()
            self.watch.note(self._census.total())
            try:
                ServingThread(self._serve, channel, uid, name="client").start()
            except RuntimeError as error:  # no thread can be started
                _log.error("a client could not be served: %s", error)
                refuse_unheard(channel, error)
                self.close_socket(channel.socket)
                self._census.leave(uid)
                self._source.left()

    def _is_full(self, channel: Channel, uid: int) -> bool:
        """Count this client; return True if it exceeds a limit, after telling it so."""
        try:
            self._census.enter(uid)
        except ResourceExhaustedTransient as error:
            full = error
        else:
            return False
        refuse_unheard(channel, full)
        self.close_socket(channel.socket)
        self._source.left()
        return True

    def _serve(self, channel: Channel, uid: int) -> None:
        try:
            self._channels.add(channel)
            if not channel.await_message(SPEAK_WITHIN):
                _log.warning("a connection of uid %d has ended: no call came within %g s", uid, SPEAK_WITHIN)
                return
            with ServiceClient(channel, self) as client:
                serve(channel, client.handlers, client.take)
        except ResourceExhaustedTransient as error:
            refuse(channel, error)
        except PeerDied:
            pass
        except Exception as error:  # noqa: BLE001 (others are served)
            refuse(channel, error)
        finally:
            if self.has_lost_engine:
                threading.Event().wait()  # until this process ends: clients must not connect to it again
            self._channels.discard(channel)
            channel.close()
            self._census.leave(uid)
            self._source.left()
            os.eventfd_write(self._left, 1)

    def close_socket(self, sock: socket.socket) -> None:
        """Close a client's socket, for threads that serve several accounts: what lies in it may take long to close.

        Where too many wait to be closed, wait for room, or for what ends this service: the caller accepts no more of
        them meanwhile.
        """
        if self._closing:
            self._closing.close(sock)
            while not (self._closing.has_room or self._is_to_end(_RETRY)):
                pass
        else:
            sock.close()

    def _is_to_end(self, within: float) -> bool:
        """Return True if the engine has ended, or `stop` is readable, now or within so many seconds. Any thread."""
        poll, stop = select.poll(), self._options.stop
        for fd in (self._engine.fileno(), *([] if stop is None else [stop])):
            poll.register(fd, select.POLLIN)
        return bool(poll.poll(within * 1e3))

    @property
    def has_lost_engine(self) -> bool:
        """True if the engine has ended, and so this service is about to end."""
        return self._engine.peer_has_died

    @property
    def needed_calls(self) -> tuple[str, ...]:
        """System calls that the device says it needs."""
        return self._device.needs.system_calls

    def confinement(self) -> list[list[tuple[str, bool]]]:
        """Return what this process and the engine have given up, by layer."""
        return [list(sandbox.active().items()), self._engine_gave_up]

    def own_client(self) -> Channel:
        """Return a connection for this process itself, outside the limits. It is served until it is closed."""
        near, far = Channel.pair()
        self._serve_apart(far)
        return near

    def _serve_apart(self, channel: Channel) -> None:
        """Serve a connection outside the limits."""

        def serve_it() -> None:
            with channel, suppress(PeerDied), ServiceClient(channel, self, has_time=True) as client:
                serve(channel, client.handlers)

        ServingThread(serve_it, name="own client").start()

    def cells(self, uid: int, first: int) -> Reply:
        """Answer with `ClientSource.cells` for the device's own account and root; with none for others."""
        return Reply(*self._source.cells(first)) if uid in {0, device_uid()} else Reply([0])

    def note(self, outcome: str) -> None:
        """Count the outcome of a preparation."""
        with self._door:
            self._outcomes[outcome] += 1

    def counts(self) -> tuple[int, Counter[str]]:
        """Return the number of connected clients, and the outcomes of preparations so far."""
        with self._door:
            return self._census.total(), self._outcomes.copy()

    def kill(self) -> None:
        """Kill the engine, and so the device, as a crash would. Clients that recover wait for its restart."""
        with suppress(ProcessLookupError):
            os.kill(self._engine_pid, signal.SIGKILL)

    def describe(self, uid: int) -> Greeting:
        """Return the answer to `hello` of a client of that account."""
        device, files, pids = self._device, files_needed(self._device), self.pids
        return Greeting(
            protocol=PROTOCOL,
            name=device.name,
            version=device.version,
            type=device.type,
            service_pid=pids[0],
            engine_pid=pids[1],
            model_files=files.model,
            data_files=files.data,
            extensions=self._extensions(uid),
        )

    @property
    def pids(self) -> tuple[int, int]:
        """The numbers of this process and the engine."""
        return os.getpid(), self._engine_pid

    def _extensions(self, uid: int) -> list[str]:
        """Return those that clients of that account may use: a model file runs only in an engine of its account."""
        own = device_uid() if self._options.account is None else self._options.account
        names = [extension.name for extension in self._device.extensions]
        return [name for name in names if name != FILE.name or uid == own or self._options.files_of_others]

    def check_file(self, file: bytes, uid: int) -> None:
        """Raise InvalidArgument, GeneralFailure unless that account's client may run the file with this digest.

        b"": it is none.
        """
        if file and FILE.name not in self._extensions(uid):
            raise InvalidArgument(NOT_YOURS)
        self.files.check(file)

    def new_engine_channel(self, uid: int) -> Channel:
        """Return a connection to the engine for one client of that account."""
        near, far = Channel.pair()
        with far:
            self._engine.send(["client", uid], [far.fileno()])
        return near

    def new_budget(self, deadline: int | None, client: Channel) -> ValidationBudget:
        """Return the budget for the validation of one model of that client."""
        return ValidationBudget(self._limits, deadline, lambda: client.has_hung_up)


def isolate() -> None:
    """Undo what was inherited from the first client: CPU affinity, resource limits, signal mask, umask."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    leave_no_core()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o077)


def leave_no_core() -> None:
    """Have the kernel write no core file of this process, whatever the program that started it asked for."""
    if resource.getrlimit(resource.RLIMIT_CORE)[1]:  # else there is less than that already
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))  # a core handler behind a pipe ignores 0, and takes seconds


def kept_files(place: Place, device: type[Device]) -> dict[Path, Access]:
    """Return the files that the service keeps, beside those with which the device computes.

    Among them is the folder of its socket, which it takes away when it ends.
    """
    forks = device.asked_apart or FILE.name in {extension.name for extension in device.extensions}
    own = (SCORES if forks else {}) | KEPT | {place.socket.parent: Access.READ | Access.REMOVE_FILE}
    return own | dict.fromkeys((place.lock, place.log), Access.READ | Access.WRITE) | {state.made(): Access.EDIT}


def run(name: str, source: ClientSource, place: Place, options: ServiceOptions) -> NoReturn:
    """Run the service process. Exit with 1 after a failure."""
    file = LogFile(place.log)
    logging.basicConfig(level=logging.INFO, handlers=[BoundedHandler(file.write, "the service's log")], force=True)
    isolate()
    engine_log, engine = EngineLog(file), None
    try:
        low = LowPriority() if options.is_second else None
        rule = options.real_time
        rule.prepare()
        kept = sandbox.OF_CELLS | rule.capabilities
        sandbox.enter_files(kind := device_class(name), kept_files(place, kind), kept, locks=rule.locks)
        group = options.group
        is_shared = options.is_shared
        engine = start_engine(name, kind, source, engine_log, is_shared=is_shared, group=group, low=low, real_time=rule)
        service = Service(name, kind, source, options, engine=engine, low=low)
        gc.enable()
        engine_log.begin()
        connects = options.account is None  # to its own socket, before it takes the name away, or to systemd
        reach = Reach(os.getpid(), signals=[engine.pid], connects=connects, watches=True)
        sandbox.enter(service.needed_calls, reach)
        if options.on_start:
            options.on_start(service)
    except BaseException as error:  # noqa: BLE001 (no client may wait for a service that failed)
        if engine:  # while it has its copy of the socket, the name would stay as if a successor listened there
            os.kill(engine.pid, signal.SIGKILL)
            exit_code(engine.pid)
        engine_log.finish()
        if isinstance(error, PeerDied):
            _log.error("device %r failed to start: its engine ended", name)
        else:
            if remedy := beyond_the_sandbox(error).removeprefix("; "):
                error.add_note(remedy)  # last, where clients look
            _log.exception("device %r failed to start", name)
        with source.ending():  # clients see the failure now and read the log
            os._exit(1)
    is_well = service.run()
    engine_log.finish()
    os._exit(0 if is_well else 1)  # threads that still serve clients end here, too


def main() -> None:
    """Entry point of the process that a client starts. Arguments: device name, listening socket, which of several, and
    "second" where another service of it is there.
    """
    place = Place(runtime_dir(), sys.argv[1], apart=sys.argv[3])
    listener = socket.socket(fileno=int(sys.argv[2]))
    listener.listen(BACKLOG)  # from now on the kernel tells clients that they are connected to this process
    run(sys.argv[1], ListeningSocket(listener, place), place, ServiceOptions(is_second="second" in sys.argv[4:]))
