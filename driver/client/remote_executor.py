"""The executor of models that are prepared on a device in another process: the lane, and bursts."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakSet

from burst import (
    Accepted,
    GeneralFailure,
    InvalidArgument,
    PeerDied,
    Quarantined,
    Timeout,
    Trace,
)
from burst.channel import close_all
from burst.errors import EngineEnded
from driver.client.burst import Burst
from driver.client.completion import Completion
from driver.client.device_buffers import check_buffers
from driver.client.executor import PLAIN, BurstParts
from driver.client.fenced import FencedExecution, output_shapes
from driver.client.pipeline import Pipeline
from driver.client.recovery import Crash, Key, crash_in_preparation, describe, digest_of, quarantine
from driver.client.socket_lane import Moved
from driver.client.workspace import KnownRequests
from driver.deadlines import passed
from driver.options import PrepareOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from burst import Controller, Memory, Offer, OutputShape, Request, Result
    from burst.controller import Configure
    from driver.client.connection import Connection
    from driver.client.device import RemoteDevice
    from driver.client.executor import OpenController
    from driver.client.job import Job
    from driver.client.stream_feed import StreamFeed
    from driver.nn import Model
    from driver.options import Options
    from driver.protocol.stream_terms import StreamTerms


_T = TypeVar("_T")


class Home(NamedTuple):
    """A place where a model is prepared: on one life of its device, under a number."""

    connection: Connection
    number: int
    declined: str = ""  #: why it was not kept in cache files


class RemoteExecutor:
    """A model, prepared on a device. It is prepared again when the device was started again."""

    _is_freed = True  # until there is something to be freed

    def __init__(
        self,
        device: RemoteDevice,
        model: Model,
        home: Home,
        options: PrepareOptions | None = None,
        prepare: Callable[[Trace], Home] | None = None,
    ) -> None:
        """Use `device.prepare`. `prepare`: prepares it when the device was started again; by default as at first."""
        lasting = self.options = (options or PrepareOptions()).lasting()
        self.device, self.model, self.home = device, model, home
        self._is_freed = False
        self.pipelines: WeakSet[Pipeline] = WeakSet()  #: its bursts
        device.executors.add(self)
        self._prepare = prepare or (lambda trace: device.home_of(model, lasting._replace(trace=trace)))
        self.preparing, self._crashed_in_preparation = threading.Lock(), False
        self._known = KnownRequests()

    @property
    def remote(self) -> RemoteExecutor:
        return self

    def perform(self, job: Job) -> Result:
        """Execute it on the plain path."""
        while True:
            try:
                return self._perform(job)
            except Moved:
                pass

    def _perform(self, job: Job) -> Result:
        self.device.check_process()
        request, wait = job.request, job.wait
        if wait.by is not None and (missed := passed(wait.by)):
            return missed
        home = self.present_home()
        check_buffers(request.pools, home.connection)
        known = self._known.of(request)
        try:
            result = home.connection.lane.execute(home.number, job, known)
        except Timeout:
            return wait.given_up()
        except EngineEnded as error:
            return error.as_result()
        return result if result.status else known.success(self.model, request, result)

    def start(self, job: Job) -> Completion:
        """Launch it on the lane. When the connection ends, what is pending raises PeerDied."""
        try:
            while True:
                with suppress(Moved):
                    return self._start(job)
        except Exception as error:  # noqa: BLE001 (it belongs to the completion)
            return Completion().fail(error)

    def _start(self, job: Job) -> Completion:
        self.device.check_process()
        request = job.request
        if missed := passed(job.wait.by):
            return Completion().finish(missed)
        home = self.present_home()
        check_buffers(request.pools, home.connection)
        known = self._known.of(request)

        def finish(result: Result) -> Result:
            return result if result.status else known.success(self.model, request, result)

        try:
            return home.connection.lane.begin(home.number, job, known, finish)
        except InvalidArgument as error:
            return Completion().finish(error.as_result())
        except Timeout:
            return Completion().finish(job.wait.given_up())

    def launch(self, job: Job) -> FencedExecution:
        """Execute it when its fences are signalled, which the device watches."""
        while True:
            with suppress(Moved):
                return self._launch(job)

    def _launch(self, job: Job) -> FencedExecution:
        self.device.check_process()
        if missed := passed(job.wait.by):
            missed.raise_for_status()
        request = job.request
        home = self.present_home()
        check_buffers(request.pools, home.connection)
        known = self._known.of(request)

        def outputs() -> tuple[NDArray[Any], ...]:
            return known.outputs(self.model, request, output_shapes(self.model, request))

        try:
            return home.connection.lane.launch(home.number, job, known, outputs)
        except Timeout:
            job.wait.given_up().raise_for_status()
            raise

    def open_stream(self, requests: Sequence[Request], terms: StreamTerms, feed: StreamFeed) -> None:
        """Open a stream of results, as `SocketLane.open_stream` does."""
        while True:
            home = self.present_home()
            for request in requests[:2]:
                check_buffers(request.pools, home.connection)
            with suppress(Moved):
                return home.connection.lane.open_stream(home.number, requests, terms, feed)

    def outputs(self, request: Request, shapes: Sequence[OutputShape]) -> tuple[NDArray[Any], ...]:
        """Return typed views of a request's outputs in its pools."""
        return self._known.of(request).outputs(self.model, request, shapes)

    def open_burst(self, options: Options, parts: BurstParts = PLAIN) -> Burst:
        """Return a burst on the device."""
        self.check_quarantine()
        pipeline = Pipeline(self, options, parts)
        self.pipelines.add(pipeline)
        return Burst(pipeline)

    @cached_property
    def _description(self) -> str:
        return describe(self.model)

    @cached_property
    def key(self) -> Key:
        """The key by which its crashes are counted."""
        return Key(self.device.address, digest_of(self.model))

    @property
    def stage(self) -> int:
        """The number of times that the device has replaced it by something better: 0 for what it made at first."""
        home = self.present_home()
        return int(home.connection.call("stage", home.number)[0][0])

    def check_quarantine(self) -> None:
        """Raise Quarantined if it may not run any more."""
        if quarantine.knows(self.device.address):
            quarantine.check(self.key)

    def present_home(self) -> Home:
        """Return where it is prepared.

        Prepares it again, once for all its users, if the device was started again since.
        """
        if self.device.connection.is_outlived:
            self.device.renew()
        if self.home.connection is not self.device.connection:
            with self.preparing:
                if self.home.connection is not self.device.connection:
                    self.check_quarantine()
                    self.home = self._prepared_again()
        return self.home

    def _prepared_again(self) -> Home:
        trace = Trace.create()
        try:
            return self._prepare(trace)
        except PeerDied:
            if crash := crash_in_preparation(trace):
                self.note_crash(crash, again=self._crashed_in_preparation)
                self._crashed_in_preparation = True
            raise

    def prepared_on(self, connection: Connection) -> Home:
        """Prepare it on another connection to the device, as it was prepared at first. Raise StatusError, PeerDied."""
        with self.device.preparing_on(connection):
            return self._prepare(Trace.create())

    def move(self, home: Home) -> None:
        """Be at home there from now on. The caller holds `preparing`."""
        if not self._is_freed:
            self.home = home

    def requests(self) -> list[Request]:
        """Return the requests that it has executed lately, with memory that still lives."""
        known_ones = [each for pipeline in list(self.pipelines) for each in pipeline.buffers.requests()]
        return [*(encoded.request for encoded in known_ones), *self._known.newest()]

    def note_crash(self, crash: Crash, *, again: bool) -> None:
        """Count a crash of this model. Raise Quarantined when it was one too many."""
        quarantine.note(self.key, self.model, crash, again=again)

    def new_controller(self, options: Options, home: Home, opened: OpenController) -> Controller:
        """Return a burst's queues and listener, where the model is prepared."""
        controller = opened(self.configure_burst(options.spin, home), options)
        home.connection.add_path(controller)
        controller.note_end(home.connection.at_end)
        controller.trace.describe(self._description, options.depth)
        if self.device.terms.real_time:
            try:
                controller.lock()
            except BaseException:
                controller.close()
                raise
        return controller

    def revived(self, dead: Connection, open_at: Callable[[Home], _T]) -> tuple[Home, _T]:
        """Return the home on the device's next life, and what was opened there. Raise Quarantined, and as
        `RemoteDevice.revive`.
        """
        while True:
            self.check_quarantine()
            self.device.revive(dead)
            dead = self.device.connection  # should it have died, too
            try:
                home = self.present_home()
                return home, open_at(home)
            except Quarantined:
                raise
            except PeerDied:
                pass

    def configure_burst(self, spin: float | str, home: Home | None = None) -> Configure:
        """Return the function by which burst.Controller configures a burst."""
        connection, number, _ = home or self.present_home()
        self.device.check_process()

        def configure(offer: Offer) -> Accepted:
            (request_wire, request_fds), (result_wire, result_fds) = offer.requests.to_wire(), offer.results.to_wire()
            fds = [*request_fds, *result_fds, offer.callback.fileno(), offer.context.fileno(), offer.trace.fd]
            versions = list(offer.versions)
            answer, found = connection.call("burst", number, request_wire, result_wire, spin, versions, fds=fds)
            if len(found) != 1:
                close_all(found)
                raise GeneralFailure(f"the device answered with {len(found)} descriptors; a burst's answer has one")
            return Accepted(int(answer[0]), found.pop(), connection.is_foreign)

        return configure

    def free_memory(self, memory: Memory) -> None:
        """Free memory as `RemoteDevice.free_memory` does."""
        self.device.free_memory(memory)

    def close(self) -> None:
        """Free the model on the device, if it still lives there."""
        self.device.check_process()
        if self.home.connection is self.device.connection:  # else its device died, and the model with it
            self.home.connection.free("free", self.home.number)
            self._is_freed = True

    def __del__(self) -> None:
        if not self._is_freed and self.home.number:
            self.home.connection.drop("free", self.home.number)
