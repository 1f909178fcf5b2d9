"""A burst's end on its device: the controller, and the other ways to a result when the queues do not lead there.

When the device dies, the session goes on with a controller on the device's next life.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from burst import ErrorStatus, PeerDied, Request, Result, StatusError
from burst.causes import failure_of
from burst.controller import CHANNEL_LENGTH
from burst.datum import DATUM
from burst.errors import status_error
from burst.real_time import lock
from driver.client.buffers import EncodedRequest
from driver.client.burst_requests import CLOSED
from driver.client.device_buffers import check_buffers
from driver.client.job import Job, perform_with_room
from driver.client.recovery import Recovery
from driver.client.statistics import Statistics
from driver.deadlines import earlier
from driver.errors import DeviceFailed
from driver.protocol.lane_codec import with_loop_timeout
from fmq import Closed, FmqError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from burst import Controller
    from burst.messages import Cause
    from burst.wire import ResultPacket
    from driver.client.buffers import RequestBuffers
    from driver.client.connection import Connection
    from driver.client.executor import BurstParts, Executor
    from driver.client.in_flight import InFlight
    from driver.client.moving import BurstBeside
    from driver.client.remote_executor import Home, RemoteExecutor
    from driver.client.workspace import InputSet, OutputSet
    from driver.options import Options


FAILURES = (StatusError, PeerDied, DeviceFailed)
"""A device's answers and ends after which a fallback may execute the request."""


class BurstSession:
    """A burst's session with its device. It executes by the queues, the plain path, or the fallback."""

    def __init__(self, prepared: RemoteExecutor, options: Options, buffers: RequestBuffers, parts: BurstParts) -> None:
        """Begin with a controller. Raise StatusError, PeerDied."""
        self.prepared, self.options, self.buffers, self.fallback = prepared, options, buffers, parts.fallback
        self.depth = options.depth
        self.statistics = Statistics()
        self.is_closed = False
        self.is_displaced = False  #: its device died, and the fallback executes instead
        self._recovery = Recovery(prepared, options, parts.open_controller)
        self._home, self.controller = self._recovery.begin()

    def check(self) -> None:
        """Raise ValueError, DriverError unless the burst is ours. Called before other ways than the queues."""
        self.check_process()
        if self.is_closed:
            raise ValueError(CLOSED)
        self.prepared.check_quarantine()

    def check_process(self) -> None:
        """Raise DriverError in a forked child."""
        self.prepared.device.check_process()

    def bind(self, request: Request, in_flight: InFlight) -> None:
        """Bind the burst to the buffers that this request names. Raise BuffersLost, ValueError."""
        self.try_return_to_device(in_flight)
        check_buffers(request.pools, self._home.connection)
        self._recovery.bind(request)

    # ---- requests and results

    def encode(self, inputs: InputSet, outputs: OutputSet) -> EncodedRequest:
        """Return the request on that memory, encoded once."""
        encoded = outputs.encoded.get(inputs)
        if encoded is None:
            request = Request(inputs.arguments, outputs.arguments, (inputs.memory, outputs.memory))
            if self.controller.version > 1:  # the first one has no loop timeout: the device's own holds
                request = with_loop_timeout(request, self.options.loop_timeout)
            packet = self.controller.encode(request, measure=self.options.measure)
            if self.prepared.device.terms.real_time:
                lock(inputs.memory)
                lock(outputs.memory)
            fitting = CHANNEL_LENGTH * DATUM // packet.nbytes  # into the channel
            self.depth = 1 if self.controller.version == 1 else max(1, min(self.depth, fitting))
            outputs.encoded[inputs] = encoded = EncodedRequest(inputs, outputs, request, packet)
        return encoded

    def with_larger_outputs(self, encoded: EncodedRequest, reply: ResultPacket) -> EncodedRequest | None:
        """Return the request with outputs that suffice, or None when that was not what it lacked."""
        if reply.status != ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
            return None
        old = self.buffers.grow(encoded.outputs, reply.output_shapes)
        if old is None:
            return None
        with suppress(PeerDied):  # the next request notices the death
            self.controller.free_memory(old)
        return self.encode(encoded.inputs, encoded.outputs)

    def result_of(self, encoded: EncodedRequest, reply: ResultPacket) -> Result:
        """Return the result of a request that succeeded. Raise GeneralFailure."""
        self.statistics.note(reply.timing)
        return encoded.outputs.result(reply.output_shapes, reply.timing)

    def error_of(self, reply: ResultPacket, deadline: int | None) -> StatusError:
        """Return the exception for the last result, which has no outputs."""
        text, cause = self.failure_of(reply, deadline)
        error = status_error(reply.status, text, cause)
        error.result = Result(reply.status, (), reply.output_shapes, reply.timing, message=text, cause=error.as_cause())
        return error

    def failure_of(self, reply: ResultPacket, deadline: int | None) -> tuple[str, Cause]:
        """Return what is known about the last result, which is a failure: the text and the cause."""
        controller = self.controller
        return failure_of(reply.status, deadline, controller.trace, controller.received)

    def begin_by(self, timeout: float | None) -> int | None:
        """Set when the next request has to be done, CLOCK_MONOTONIC ns; `controller.due(None)` ends that."""
        end = earlier(timeout, None)
        if end is not None:
            self.controller.due(end)
        return end

    def abandon(self, numbers: Sequence[int]) -> None:
        """Tell the device that it need not begin these requests any more."""
        for number in numbers:
            self.controller.abandon(number)

    def note_drop(self) -> None:
        """Count a request that was cancelled, refused or replaced."""
        self.statistics.note_drop(self.controller.trace)

    def note_plain(self) -> None:
        """Count a request that was executed on the plain path."""
        self.statistics.note_plain(self.controller.trace)

    def stats(self, in_flight: int) -> dict[str, Any]:
        """Return the figures of `Burst.stats`."""
        self.check_process()
        figures = self.statistics.report(self.controller, in_flight, self.options.measure)
        return figures if self.fallback is None else figures | {"fallbacks": self.fallback.report()}

    def timeline(self, name: str, first_lane: int = 0) -> list[dict[str, Any]]:
        """Return the last requests, for `Burst.trace`."""
        self.check_process()
        return self.controller.trace.chrome_events(name, first_lane)

    # ---- other ways to a result

    def perform_with_fallback(self, attempt: Callable[[], Result], job: Job) -> Result:
        """Return what `attempt` gives for a request on the caller's pools; after a failure, what the fallback gives."""
        return self.fallback.perform_with_fallback(attempt, job, self._failed) if self.fallback else attempt()

    def _failed(self, error: BaseException) -> Home:
        """Return where the burst was at home. If the device has died, the fallback takes its place."""
        self.is_displaced = self.is_displaced or isinstance(error, PeerDied)
        return self._home

    def run_plain(self, encoded: EncodedRequest, timeout: float | None) -> Result:
        """Execute once on the plain path, or by the fallback. Raise StatusError, PeerDied."""
        try:
            self.check()
            result = self.prepared.perform(Job.of(encoded.request, measure=self.options.measure, timeout=timeout))
            self.note_plain()
            self._recovery.note_answer()
            return self._checked(encoded, result)
        except FAILURES as error:
            if self.fallback is None or self.is_recoverable(error):
                raise
            return self.run_fallback(encoded, error, timeout)

    def run_fallback(self, encoded: EncodedRequest, error: BaseException, timeout: float | None = None) -> Result:
        """Execute once by the fallback after that error, on the same memory: the device is done with it.

        The device has answered with an error, or is dead. Raise `error` where there is no fallback or it would fail
        likewise, and what the fallback raises.
        """
        self.check_process()
        if self.fallback is None or self.is_closed:
            raise error
        job = Job.of(encoded.request, measure=self.options.measure, timeout=timeout)

        def grown(result: Result) -> Request | None:
            if self.buffers.grow(encoded.outputs, result.output_shapes) is None:
                return None
            return self.encode(encoded.inputs, encoded.outputs).request

        def perform(replacement: Executor) -> Result:
            return perform_with_room(replacement.perform, job, grown)

        return self._checked(encoded, self.fallback.perform_at(error, self._failed(error), perform))

    def _checked(self, encoded: EncodedRequest, result: Result) -> Result:
        result.raise_for_status()
        return result._replace(outputs=encoded.outputs.arrays(result.output_shapes))

    # ---- the device's death

    @property
    def has_ended(self) -> bool:
        """True if the device is gone, or the model is in quarantine."""
        try:
            return self.controller.has_died
        except Closed:  # in quarantine
            return True

    def check_engine(self) -> None:
        """Raise PeerDied if the burst recovers, and its engine was ended for the memory that it took."""
        if self.options.recover and self._home.connection.is_outlived:
            raise PeerDied("the burst's engine was ended for the memory that it took; another one serves")

    @property
    def has_result(self) -> bool:
        """True if `controller.receive` has something to say: a result, or how the device ended."""
        try:
            return self.controller.has_result
        except FmqError:  # receiving raises what there is to raise
            return True

    def is_recoverable(self, error: BaseException) -> bool:
        """Return True if the error is the device's death, and the burst goes on with the device's next life."""
        return not self.is_closed and self._recovery.is_recoverable(error, lambda: self.controller.has_died)

    def recover(self, error: BaseException, waiting: Sequence[tuple[object, Request | None]]) -> None:
        """Go on with the device's next life; `waiting` as for `Recovery.successor`.

        Nothing that was encoded before is known there. Raise what all waiting requests are to get.
        """
        if self.is_closed:
            raise error
        self._adopt_controller(*self._recovery.successor(error, self._home, self.controller.trace, waiting))

    def try_return_to_device(self, in_flight: InFlight) -> bool:
        """Go back to the device after the fallback took its place, if the device is there again and has prepared the
        model, and nothing is in flight. False: it does not, and the fallback goes on.
        """
        before = self.controller
        if self.is_displaced:
            in_flight.when_idle(self._return_to_device)
        return self.controller is not before

    def _return_to_device(self) -> None:
        home = self.fallback.home if self.fallback else None
        if home is None or home is self._home:
            return
        with suppress(*FAILURES, ValueError):
            self.check()
            self._adopt_controller(home, self._recovery.open_at(home))
            self.is_displaced = False

    # ---- another engine

    def is_at(self, connection: Connection) -> bool:
        """Return True if its requests go there, and not to the fallback."""
        is_there = self._home.connection is connection and not self.is_displaced
        return is_there and not (self.is_closed or self.has_ended)

    def opened_at(self, home: Home) -> Controller:
        """Return a controller for this burst where the model is prepared, too. Raise StatusError, PeerDied."""
        return self._recovery.open_at(home)

    def move(self, home: Home, beside: BurstBeside) -> None:
        """Go on there, where these requests are known. Nothing is in flight, and nothing becomes so meanwhile."""
        known = [each for each in beside.known if each.inputs in each.outputs.encoded]
        self._recovery.forget_buffers()
        self.statistics.recoveries -= 1  # it is none
        self._adopt_controller(home, beside.controller)
        for encoded in known:
            if encoded.request.pools == (encoded.inputs.memory, encoded.outputs.memory):
                encoded.outputs.encoded[encoded.inputs] = encoded

    def _adopt_controller(self, home: Home, controller: Controller) -> None:
        """Go on with another controller. Raise PeerDied, ValueError."""
        self.statistics.retire(self.controller)
        self.statistics.recoveries += 1
        self.controller.close()
        self._home, self.controller = home, controller
        self.statistics.tell(controller.trace)
        try:
            self.check()  # a thread that closed this burst or its model meanwhile closed only the other controller
        except (PeerDied, ValueError):
            controller.close()
            raise
        self.buffers.forget_requests()
