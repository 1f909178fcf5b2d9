"""A model that is prepared on a device in another process: its plain path, and its bursts."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from burst import (
    Accepted,
    Controller,
    GeneralFailure,
    InvalidArgument,
    PeerDied,
    Quarantined,
    Timeout,
    Trace,
)
from burst.channel import close_all
from driver.client.burst import Burst
from driver.client.completion import Completion
from driver.client.device_buffers import check_buffers
from driver.client.fenced import FencedExecution, output_shapes
from driver.client.pipeline import Pipeline
from driver.client.recovery import Crash, Key, crash_in_preparation, describe, digest_of, quarantine
from driver.client.surface import AnyPreparedModel
from driver.client.workspace import KnownRequest
from driver.deadlines import passed
from driver.errors import DriverError
from driver.options import Options, Policy, PrepareOptions, options_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from burst import Memory, Offer, OutputShape, Request, Result
    from burst.controller import Configure
    from driver.client.connection import Connection
    from driver.client.device import RemoteDevice
    from driver.client.job import Job
    from driver.client.session import Fallback
    from driver.nn import Model
    from driver.options import InputShapes
    from fmq.region import Kind


class Home(NamedTuple):
    """A place where a model is prepared: on one life of its device, under a number."""

    connection: Connection
    number: int
    declined: str = ""  #: why it was not kept in cache files


class RemotePreparedModel(AnyPreparedModel):
    """A model made ready to run on a device. Any thread may use it, several at once."""

    def __init__(
        self,
        device: RemoteDevice,
        model: Model,
        number: int,
        options: PrepareOptions | None = None,
        prepare: Callable[[Trace], Home] | None = None,
    ) -> None:
        """Use `device.prepare`. `prepare`: prepares it when the device was started again; by default as at first."""
        self._is_freed = True
        lasting = self._options = (options or PrepareOptions()).lasting()
        self.device, self.model = device, model
        self.preference, self.priority = lasting.preference, lasting.priority
        self.home, self._is_freed = Home(device.connection, number), False
        self._prepare = prepare or (lambda trace: device.home_of(model, lasting._replace(trace=trace)))
        self._preparing, self._crashed_in_preparation = threading.Lock(), False
        self._recent: KnownRequest | None = None

    def perform(self, job: Job) -> Result:
        """Execute it on the plain path."""
        self.device.check_process()
        request, wait = job.request, job.wait
        if missed := passed(wait.by):
            return missed
        home = self.present_home()
        check_buffers(request.pools, home.connection)
        known = self._recognised(request)
        try:
            result = home.connection.lane.execute(home.number, job, known)
        except Timeout:
            return wait.given_up()
        if result.status == 0:
            return result._replace(outputs=known.outputs(self.model, request, result.output_shapes))
        return result

    def _recognised(self, request: Request) -> KnownRequest:
        known = self._recent
        if known is None or not known.is_of(request):
            known = self._recent = KnownRequest(request)
        return known

    def start(self, job: Job) -> Completion:
        """Launch it on the lane. When the connection ends, what is pending raises PeerDied."""
        try:
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

        def finish(result: Result) -> Result:
            if result.status == 0:
                return result._replace(outputs=self.outputs(request, result.output_shapes))
            return result

        try:
            return home.connection.lane.begin(home.number, job, self._recognised(request), finish)
        except InvalidArgument as error:
            return Completion().finish(error.as_result())
        except Timeout:
            return Completion().finish(job.wait.given_up())

    def launch(self, job: Job) -> FencedExecution:
        """Execute it when its fences are signalled, which the device watches."""
        self.device.check_process()
        if missed := passed(job.wait.by):
            missed.raise_for_status()
        request = job.request
        home = self.present_home()
        check_buffers(request.pools, home.connection)

        def outputs() -> tuple[NDArray[Any], ...]:
            return self.outputs(request, output_shapes(self.model, request))

        try:
            return home.connection.lane.launch(home.number, job, self._recognised(request), outputs)
        except Timeout:
            job.wait.given_up().raise_for_status()
            raise

    def outputs(self, request: Request, shapes: Sequence[OutputShape]) -> tuple[NDArray[Any], ...]:
        """Return typed views of a request's outputs in its pools."""
        return self._recognised(request).outputs(self.model, request, shapes)

    def burst(
        self,
        *,
        spin: float | str | None = None,
        memory: Kind = "memfd",
        measure: bool = False,
        input_shapes: InputShapes | None = None,
        depth: int | None = None,
        policy: Policy = "block",
        recover: bool = False,
    ) -> Burst:
        """Open a burst.

        Args:
            spin: seconds that both sides poll before they sleep; 0 sleeps at once, "adaptive" polls while that pays.
                By default 50 us, and 0 for a model that was prepared for low power.
            memory: what its queues are made of, "memfd" or "posix".
            measure: whether results carry their timing.
            input_shapes: of the first inputs, by position or in a dict by name, for a model that leaves them open;
                None there omits that input. By default the inputs are made for the first arrays that are given.
            depth: requests that may be in flight at once, for `submit`, from 1 to 64. By default 1, and 4 for a model
                that was prepared for sustained speed.
            policy: what `submit` does when so many are: "block", "reject" or "latest".
            recover: when the device dies, start it again, prepare the model again and send again what was not
                answered; the caller sees one slow result. A model that crashes the device twice over one request, or
                three times in all, gets Quarantined; a burst that is bound to buffers of the device, BuffersLost.

        Raises StatusError, PeerDied, ValueError.
        """
        its = options_of(
            self.preference,
            spin=spin,
            memory=memory,
            measure=measure,
            input_shapes=input_shapes,
            depth=depth,
            policy=policy,
            recover=recover,
        )
        return self.open_burst(its)

    def open_burst(self, options: Options) -> Burst:
        """Return a burst on the device."""
        return self.open_burst_before(None, options)

    def open_burst_before(self, fallback: Fallback | None, options: Options) -> Burst:
        """Return a burst, and let `fallback` execute what the device does not answer."""
        self.check_quarantine()
        return Burst(Pipeline(self, options, fallback=fallback))

    @property
    def _number(self) -> int:
        return self.home.number

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
        if self.home.connection is not self.device.connection:
            with self._preparing:
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

    def note_crash(self, crash: Crash, *, again: bool) -> None:
        """Count a crash of this model. Raises Quarantined when it was one too many."""
        quarantine.note(self.key, self.model, crash, again=again)

    def new_controller(self, options: Options, home: Home) -> Controller:
        """Return a burst's queues and listener, where the model is prepared."""
        controller = Controller(self.configure_burst(options.spin, home), options.memory, options.spin)
        home.connection.add_path(controller)
        controller.note_end(home.connection.at_end)
        controller.trace.describe(describe(self.model), options.depth)
        return controller

    def revived(self, options: Options, dead: Connection) -> tuple[Home, Controller]:
        """Return home and controller on the device's next life. Raises Quarantined, and as `RemoteDevice.revive`."""
        while True:
            self.check_quarantine()
            self.device.revive(dead)
            dead = self.device.connection  # should it have died, too
            try:
                home = self.present_home()
                return home, self.new_controller(options, home)
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

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a recipe that connects by name and prepares the model again, wherever it is unpickled."""
        return _prepare_again, (self.device.address, self.model, self._options, self.device.application)

    def free_memory(self, memory: Memory) -> None:
        """Free memory as `RemoteDevice.free_memory` does."""
        self.device.free_memory(memory)

    def close(self) -> None:
        """Free the model on the device; bursts on it go on until they are closed.

        A device that does not answer, because it is stopped, say, is not waited for long: it frees the model later.
        """
        self._workspaces.clear()
        self.device.check_process()
        if self.home.connection is self.device.connection:  # else its device died, and the model with it
            self.home.connection.free("free", self.home.number)
            self._is_freed = True

    def __del__(self) -> None:
        if not self._is_freed and self.home.number:
            self.home.connection.drop("free", self.home.number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(PeerDied, DriverError):  # with the device, the model is gone too
            self.close()


def _prepare_again(address: str, model: Model, options: PrepareOptions, application: str | None) -> RemotePreparedModel:
    """Prepare an unpickled model again. Its connection is its own: `prepared.device`."""
    from driver.client.device import connect

    device = connect(address, application=application)
    try:
        return device.prepare(model, preference=options.preference, priority=options.priority)
    except BaseException:
        device.close()
        raise
