"""A device in another process, behind the same methods: what `driver.connect` and `device.prepare` return."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from burst import DeviceUnavailable, Memory, PeerDied, StatusError, Timeout, Trace
from burst.channel import MAX_FDS
from burst.run_queue import FlowCounts
from driver.client import discovery, moving, served_sockets
from driver.client.cells import cells_of
from driver.client.connection import Connection, traces_of
from driver.client.device_buffers import BufferWish, allocated
from driver.client.encoded_models import latest
from driver.client.hardening import confinement
from driver.client.new_connection import ATTEMPTS, USUAL_TERMS, ClientTerms, greeted, to_any, to_own, to_served_again
from driver.client.prepared_model import RemotePreparedModel
from driver.client.recovery import Key, Revivals, digest_of, quarantine
from driver.client.remote_executor import Home, RemoteExecutor
from driver.deadlines import check_sent_in_time, last_word, seconds_left, waiting
from driver.devices.library.description import absolute
from driver.errors import DeviceFailed, DriverError
from driver.interface import DeviceStatus
from driver.nn import validate
from driver.nn.file_form import is_file
from driver.nn.model import check_model
from driver.options import PRIORITIES, Batch, Preference, PrepareOptions, Priority, check_application, number_of
from driver.protocol.model_memory import MOST_HANDLES
from driver.protocol.prepare_arguments import JoinTerms, PrepareArguments
from driver.protocol.stated_capabilities import from_wire
from fmq.closing import Closing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from burst.channel import Channel
    from driver.client.device_buffers import Buffer, BufferDesc, BufferRole
    from driver.interface import CacheFiles, Capabilities
    from driver.nn import Model
    from driver.options import Cache


_PATIENCE = 10.0  # seconds for the owner of a served device to start it again
_NO_REASON = "the device does not support it either; the reasons against other operations come first"
_ANSWER = 1.0  # seconds that a device may take to say how it is
_ANSWERS = 10.0  # the same, for all cells of a device


@discovery.as_ours()
def connect(
    name: str = "reference", *, application: str | None = None, reconnect: bool = False, real_time: bool = False
) -> RemoteDevice:
    """Return a device as `driver.connect` does, which says more."""
    if application is not None:
        check_application(application)
    name = absolute(name)
    terms = ClientTerms(application, real_time)
    device = RemoteDevice(to_any(name, terms), name, terms)
    device.reconnects = reconnect
    return device


def status_of(name: str) -> DeviceStatus:
    """Return the status of a device of this account. "unknown" while it does not run; this does not start it."""
    try:
        if channel := discovery.running(name):
            with channel:
                return DeviceStatus(*Connection(channel, timeout=_ANSWER).call("status", timeout=_ANSWER)[0])
    except DeviceFailed as error:
        return DeviceStatus("unknown", "" if error.is_of_all else str(error))
    except (PeerDied, StatusError, Timeout):
        pass
    return DeviceStatus("unknown")


def _left_until(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _of_bits(count: int, bits: bytes) -> list[bool]:
    return [bool(bit) for bit in np.unpackbits(np.frombuffer(bits, np.uint8), count=count)]


class RemoteDevice(Closing):
    """A connection to a device. Any thread may use it; what was made through it ends with it.

    When the device dies, so does all of that, except for bursts that recover: they connect this again, in place, and
    from then on everything that is done through it goes to the device's next life.
    """

    to_send = "send its `address`, and connect to that"

    reconnects = False  #: whether the next preparation or question finds a device again that has ended

    def __init__(self, connection: Connection, address: str, terms: ClientTerms = USUAL_TERMS) -> None:
        """Use `connect`. `terms`: on which it connects again."""
        self.connection, self.address, self._pid = connection, address, os.getpid()
        self.terms = terms
        self._lock, self._reviving = threading.Lock(), threading.Lock()
        self._revivals, self._attempts = Revivals(), 0
        self._failure: Exception | None = None  # of the last attempt
        self._closed = threading.Event()
        self.executors: WeakSet[RemoteExecutor] = WeakSet()  #: models that are prepared on it
        self._elsewhere = threading.local()  # the connection that this thread prepares models on, if another

    @property
    def name(self) -> str:
        """The name that the device gives itself."""
        return str(self.connection.name)

    @property
    def version(self) -> str:
        """The version of the device's driver."""
        return str(self.connection.version)

    @property
    def type(self) -> str:
        """The kind of device: OTHER, CPU, GPU or ACCELERATOR."""
        return str(self.connection.type)

    @property
    def service_pid(self) -> int:
        """The id of the process that listens."""
        return int(self.connection.service_pid)

    @property
    def engine_pid(self) -> int:
        """The id of the process that executes."""
        return int(self.connection.engine_pid)

    @property
    def is_closed(self) -> bool:
        """True if `close` has ended it: nothing revives it."""
        return self._closed.is_set()

    @property
    def _channel(self) -> Channel:
        return self.connection.channel

    def call(
        self, method: str, *arguments: object, fds: Sequence[int] = (), timeout: float | None = None
    ) -> tuple[list[Any], list[int]]:
        """Call the service, and return its answer. Raise StatusError, PeerDied, Timeout, DeviceFailed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._find_again(deadline)
        return self.connection.call(method, *arguments, fds=fds, timeout=_left_until(deadline))

    def check_process(self) -> None:
        """Raise DriverError in a forked child: the connection is its parent's."""
        if os.getpid() != self._pid:
            raise DriverError("this device was connected before a fork; connect again in this process")

    def _find_again(self, deadline: float | None = None) -> None:
        """Connect again if the device has ended, and that was asked for. Nothing is done twice: this comes before it.

        `deadline`: a time.monotonic(). Raise as `revive`; DriverError in a forked child.
        """
        self.check_process()
        self.renew(_left_until(deadline))
        if not self.reconnects or self.is_closed:
            return
        left, connection = _left_until(deadline), self.connection
        try:
            with suppress(StatusError):
                connection.call("status", timeout=_ANSWER if left is None else min(_ANSWER, left))
        except PeerDied:
            self.revive(connection, _left_until(deadline))
        except Timeout:  # the call that follows says so
            pass

    def renew(self, patience: float | None = None) -> None:
        """Connect again if the engine was ended for the memory that it took. Raise as `revive`."""
        if self.connection.is_outlived and not self.is_closed:
            self.revive(self.connection, patience)

    def revive(self, dead: Connection, patience: float | None = None) -> None:
        """Connect again, in place, unless another thread has replaced `dead` already. Threads share one attempt.

        `patience`: seconds in which the owner of a served device may start it again; by default 10.

        Raise DeviceNotFound, DeviceFailed; PeerDied when this device died too often lately, or was closed.
        """
        self.check_process()
        seen = self._attempts
        with self._reviving:
            if self.connection is not dead:
                return
            if self._attempts != seen and self._failure:  # while we waited
                raise type(self._failure)(*self._failure.args) from self._failure
            if self.is_closed:
                raise PeerDied(f"device {self.address!r} died, and its connection was closed")
            self._attempts += 1
            try:
                self._revivals.count(self.address)
                if served_sockets.is_path(self.address):
                    wait = _PATIENCE if patience is None else patience
                    self.connection = to_served_again(self.address, self.terms, wait)
                else:
                    self.connection = to_own(self.address, self.terms, 2 * ATTEMPTS)
                if self._closed.is_set():  # meanwhile
                    self.connection.close()
            except Exception as error:
                self._failure = error
                raise
            self._failure = None
        dead.abandon()

    @property
    def extensions(self) -> tuple[str, ...]:
        """The names of the vendor extensions that the device knows."""
        return self.connection.extensions

    def supported_operations(self, model: Model) -> list[bool]:
        """Return True for each operation of the main subgraph that it promises to support. Raise InvalidModel.

        A model that has several forms is asked about, and prepared, in the form that suits the device.
        """
        return _of_bits(*self._ask("supported", model))

    def explain(self, model: Model) -> list[str | None]:
        """Return for each operation of the main subgraph why the device does not support it; None: it does.

        Raise InvalidModel.
        """
        *bits, reasons = self._ask("explain", model)
        found = [None if is_supported else _NO_REASON for is_supported in _of_bits(*bits)]
        for number, reason in reasons:
            found[number] = reason
        return found

    def _ask(self, method: str, model: Model) -> list[Any]:
        check_model(model)
        model = model.form_for(self.extensions)
        validate(model)
        self._find_again()
        encoded = latest.asked(model, MOST_HANDLES)
        answer, _ = self.connection.call(method, encoded.where, fds=encoded.fds)
        return answer

    def number_of_cache_files_needed(self) -> CacheFiles:
        """Return how many files of each kind keep a compilation; (0, 0) when this device keeps none."""
        return self.connection.cache_files

    def prepare(
        self,
        model: Model,
        *,
        preference: Preference = "fast_single_answer",
        priority: Priority = "medium",
        cache: Cache | None = None,
        deadline: float | None = None,
        batch: Batch | None = None,
    ) -> RemotePreparedModel:
        """Compile a model on the device.

        Args:
            model: is validated first.
            preference: "low_power" (no polling, and one thread for each execution), "fast_single_answer", or
                "sustained_speed" (bursts of depth 4, and executions at the same time rather than threads of one).
            priority: "low", "medium" or "high", of its executions among all of this application on the device.
            cache: files for the device to keep the compilation in. It may decline; `prepared.home.declined` says why.
            deadline: a time.monotonic() by which it has to be done. The device gives up what it cannot do by then, and
                the wait ends 0.2 s later whatever it does, with MissedDeadlineTransient or MissedDeadlinePersistent.
            batch: has executions of several clients run together, for a model whose first dimension is open.

        Raise InvalidModel and ValueError before anything is sent, StatusError, PeerDied.
        """
        check_model(model)
        model = model.form_for(self.extensions)
        validate(model)
        options = PrepareOptions(preference, priority, deadline, cache, batch=batch)
        return self.prepared(model, options, lambda: self.home_of(model, options))

    def prepare_from_cache(
        self,
        model: Model,
        cache: Cache,
        *,
        preference: Preference | None = None,
        priority: Priority | None = None,
        deadline: float | None = None,
    ) -> RemotePreparedModel:
        """Return a model that this device has kept in these files. Only a file is sent, and nothing is compiled.

        `model`: what the files hold; it says what requests look like, and is compiled when the device is started again.
        `preference`, `priority`: None, those that the model was prepared with when it was kept. `deadline`: as in
        `prepare`.

        Raise InvalidArgument for other counts of files than the device needs, GeneralFailure for whatever it has not
        written itself under that token, or not as it is now; PeerDied.
        """
        takes_saved = preference is None, priority is None
        given = PrepareOptions(preference or "fast_single_answer", priority or "medium", deadline, cache).checked()
        model = model.form_for(self.extensions)
        self._find_again(deadline)
        self._check_quarantine(model)
        home, its_preference, its_priority = self._restored(given, model, takes_saved)
        options = given._replace(preference=its_preference, priority=PRIORITIES[its_priority])
        return RemotePreparedModel(RemoteExecutor(self, model, home, options))

    def prepared(
        self,
        model: Model,
        options: PrepareOptions,
        at_first: Callable[[], Home],
        again: Callable[[Trace], Home] | None = None,
    ) -> RemotePreparedModel:
        """Return a model that `at_first` prepares now, and `again`, or `home_of`, should the device die.

        Raise ValueError, Quarantined, and what `at_first` raises.
        """
        options = options.checked(model)
        self._find_again(options.deadline)
        self._check_quarantine(model)
        return RemotePreparedModel(RemoteExecutor(self, model, at_first(), options, prepare=again))

    def _check_quarantine(self, model: Model) -> None:
        if quarantine.knows(self.address):
            quarantine.check(Key(self.address, digest_of(model)))

    def allocate(
        self,
        desc: BufferDesc,
        prepared_models: Sequence[RemotePreparedModel | RemoteExecutor],
        input_roles: Sequence[BufferRole] = (),
        output_roles: Sequence[BufferRole] = (),
    ) -> Buffer:
        """Allocate memory on the device for inputs and outputs of these models, to be named in requests.

        Raise StatusError: INVALID_ARGUMENT for models of another device, roles that are given twice, do not exist or
        contradict each other; RESOURCE_EXHAUSTED_TRANSIENT or _PERSISTENT when the device has no room. PeerDied.
        """
        return self.allocate_all([BufferWish(desc, prepared_models, input_roles, output_roles)])[0]

    def allocate_all(self, wishes: Sequence[BufferWish]) -> list[Buffer]:
        """Allocate several buffers in one call to the device: all, or none. Raise as `allocate`."""
        self.renew()
        return allocated(self.connection, wishes)

    def beside(self, channel: Channel | None = None) -> Connection:
        """Return one more connection, to the device's service of now, or over a channel. Raise as `connect`."""
        if channel is not None:
            return greeted(self.address, channel, self.terms)
        return to_any(self.address, self.terms)

    def move(self, old: Connection, new: Connection, homes: Mapping[RemoteExecutor, Home]) -> bool:
        """Go on over another connection, on which these models are prepared, unless this device was revived or closed,
        or has buffers, since.
        """
        with self._reviving, ExitStack() as held:
            for executor in homes:
                held.enter_context(executor.preparing)
            if self.connection is not old or self.is_closed or old.buffers:
                return False
            self.connection = new
            for executor, home in homes.items():
                executor.move(home)
        if self._closed.is_set():  # meanwhile
            new.close()
        return True

    @contextmanager
    def preparing_on(self, connection: Connection) -> Iterator[None]:
        """Have this thread prepare models on another connection to the device."""
        self._elsewhere.connection = connection
        try:
            yield
        finally:
            del self._elsewhere.connection

    def _present_connection(self) -> Connection:
        """Return the connection on which models are prepared. It is watched from now on: they may have to move."""
        self.check_process()
        connection = getattr(self._elsewhere, "connection", None) or self.connection
        moving.watch(self, connection)
        return connection

    def home_of(self, model: Model, options: PrepareOptions) -> Home:
        """Prepare a valid model, and keep it in the cache files, if there are any."""
        connection = self._present_connection()
        try:
            return self._home_on(connection, model, options)
        except PeerDied:
            if not connection.is_retired:
                raise
            return self.home_of(model, options)

    def _home_on(self, connection: Connection, model: Model, options: PrepareOptions) -> Home:
        with waiting(options.deadline) as by:
            arguments, fds = _on_the_wire(options, by)
            encoded = latest.prepared(model, min(MOST_HANDLES, MAX_FDS - 1 - len(fds)))
            check_sent_in_time(by)
            arguments = encoded.where, *arguments
            timeout = seconds_left(last_word(by))
            said, _ = connection.call("prepare", *arguments, fds=[*encoded.fds, *fds], timeout=timeout)
        latest.forget(model)
        return Home(connection, *said)

    def restored_home(self, options: PrepareOptions, model: Model | None = None) -> Home:
        """Prepare a model that the device has kept in cache files.

        `model`: if it is a file, which lies in memory that can be sent, the device reads only what it made of it.
        Raise InvalidArgument, GeneralFailure.
        """
        return self._restored(options, model)[0]

    def _restored(
        self, options: PrepareOptions, model: Model | None, takes_saved: tuple[bool, bool] = (False, False)
    ) -> tuple[Home, Preference, int]:
        """Return the prepared model, and preference and priority, which are the saved ones where `takes_saved`."""
        connection = self._present_connection()
        with waiting(options.deadline) as by:
            arguments, fds = _on_the_wire(options, by, takes_saved)
            if model is not None and is_file(model):
                encoded = latest.prepared(model, min(MOST_HANDLES, MAX_FDS - 1 - len(fds)))
                arguments, fds = (*arguments, encoded.where), [*encoded.fds, *fds]
            check_sent_in_time(by)
            timeout = seconds_left(last_word(by))
            (number, said, its), _ = connection.call("restore", *arguments, fds=fds, timeout=timeout)
        return Home(connection, number), said, its

    def free_memory(self, memory: Memory) -> None:
        """Have the device unmap it on all paths, bursts too: at once, or after the executions that use it.

        Memory that the application drops is freed without this.
        """
        self.connection.free_memory(memory)

    def status(self) -> DeviceStatus:
        """Return the status that the device states: whether it takes work. Raise PeerDied."""
        return DeviceStatus(*self.call("status")[0])

    def stated_capabilities(self) -> Capabilities | None:
        """Return what the driver states about speed and power; None: nothing, so that `driver.compile` measures.

        Raise GeneralFailure for what makes no sense; PeerDied.
        """
        return from_wire(self.name, self.call("capabilities")[0])

    def check_available(self) -> None:
        """Raise DeviceUnavailable while the device takes no work; PeerDied."""
        status = self.status()
        if not status.takes_work:
            raise DeviceUnavailable(f"device {self.name!r} is {status}")

    def stats(self) -> dict[str, Any]:
        """Return how this connection's executions have fared on the device, and what this account has used of it.

        `slots`: executions that run at once. `waiting`: executions in the run queue, of all accounts. `weight`: of this
        account, against others'. `share`: the part of all contended time that this account has used since it came.
        `application`: the name that was declared, or the control group's, or "" for what belongs to the account alone.
        `application_share`: the part of the account's contended time that this application has used since it came.
        `sandbox`: for "service" and "engine", what the process has given up, by layer.
        `priorities`: for "low", "medium" and "high" what `burst.run_queue.FlowCounts` says.
        """
        (slots, waiting, weight, application, flows), _ = self.call("turns")
        counts = [FlowCounts(*plain) for plain in flows]
        _, *used = counts[0][-4:]
        application_share, share = (part / whole if whole else None for part, whole in pairwise(used))
        priorities = {name: found._asdict() for name, found in zip(PRIORITIES, counts, strict=True)}
        return {
            "slots": slots,
            "waiting": waiting,
            "weight": weight,
            "share": share,
            "application": application,
            "application_share": application_share,
            "priorities": priorities,
            "sandbox": confinement(self.call("sandbox")[0]),
        }

    def traces(self) -> list[Trace]:
        """Return the notes of the bursts of all clients of this device that are of our account.

        They can be read while the bursts run, at no cost. The device's own account and root get those of all.
        """
        self.check_process()
        with cells_of(self.connection, _ANSWERS) as cells:
            return [trace for cell in cells.connected for trace in traces_of(cell.connection)]

    def close(self) -> None:
        """End the connection: prepared models and bursts made through it end too. Harmless when done twice."""
        self._closed.set()
        self.connection.close()
        moving.await_watcher(self.connection)


def _on_the_wire(
    options: PrepareOptions, deadline: int | None, takes_saved: tuple[bool, bool] = (False, False)
) -> tuple[Sequence[object], list[int]]:
    """Return the arguments and descriptors that follow the model's in "prepare"; in "restore" there are no others."""
    cache, trace = options.cache, options.trace
    counts, token = ((len(cache.model_files), len(cache.data_files)), cache.token) if cache else (None, None)
    files = [*cache.model_files, *cache.data_files] if cache else []
    fds = [*files, trace.memory.fd] if trace else files
    priority = number_of(options.priority)
    batch = options.batch and JoinTerms(
        options.batch.rows, int(options.batch.window * 1e9), options.batch.mask is not None
    )
    arguments = PrepareArguments(
        counts, token, options.preference, deadline, priority=priority, batch=batch, takes_saved=takes_saved
    )
    return arguments.to_wire(), fds
