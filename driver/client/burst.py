"""A burst on a prepared model, in arrays: write the inputs in place, run, read the outputs in place."""

from __future__ import annotations

import time
import weakref
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from burst import Busy, ErrorStatus, MissedDeadlineTransient, PeerDied, Result, StatusError, Timeout
from burst._hot import HotBurst
from burst.dropped import later
from burst.errors import timed_out
from driver.client.burst_requests import RUNNING
from driver.client.device_stream import DeviceStream, EndedMemory
from driver.client.names import together
from driver.client.recovering_stream import RecoveringStream
from driver.client.surface import AnyBurst
from driver.deadlines import MISSED, WAITING, last_word, missed, nanoseconds, seconds_left, until
from fmq import clock

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from burst import Memory
    from driver.client.buffers import EncodedRequest
    from driver.client.job import Job
    from driver.client.pipeline import Pipeline
    from driver.client.result_stream import ResultStream
    from driver.client.stream_plan import StreamPlan
    from driver.client.tasks import Tasks
    from driver.client.workspace import OutputSet
    from driver.nn import Model

_NONE = ErrorStatus.NONE


class Burst(HotBurst, AnyBurst):
    """A burst on one device. `run` is C's (csrc/burst/hot.c): it returns a result that was made ready here."""

    def __init__(self, pipeline: Pipeline) -> None:
        """Use `prepared.burst()`."""
        self._pipeline, self._buffers, self._measure = pipeline, pipeline.buffers, pipeline.options.measure
        self._in_flight, self._session = pipeline.in_flight, pipeline.session
        self._statistics = pipeline.session.statistics
        self._ready_for: tuple[object, ...] = ()
        self._ready: list[OutputSet] = []
        self._streams: WeakSet[ResultStream] = WeakSet()
        self._ended = EndedMemory()
        weakref.finalize(self, _drop, pipeline).atexit = False

    @property
    def model(self) -> Model:
        return self._session.prepared.model

    @property
    def inputs(self) -> tuple[NDArray[Any] | None, ...]:
        return self._buffers.inputs.arrays

    def _run(self, *arrays: Any, timeout: float | None = None, deadline: float | None = None, **by_name: Any) -> Result:
        """Run a request for which no result is ready."""
        if deadline is not None:
            return self._run_until(together(arrays, by_name), timeout, deadline)
        if by_name:
            arrays = together(arrays, by_name)
        in_flight, controller = self._in_flight, self._session.controller
        if in_flight.is_running or (controller.is_ready and controller.is_calling):
            raise Busy(RUNNING)
        with in_flight.submitting:
            in_flight.begin(controller)
            if in_flight.is_idle:
                return self._run_alone(arrays, timeout)
        return self._run_behind_others(arrays, timeout)

    def _run_until(self, arrays: tuple[Any, ...], timeout: float | None, deadline: float) -> Result:
        try:
            with until(timeout, deadline) as left:
                return self.run(*arrays, timeout=left)
        except MissedDeadlineTransient as error:
            if error.phase == WAITING and (said := self._last_word(nanoseconds(deadline))):
                raise said from None
            raise

    def _last_word(self, by: int) -> StatusError | None:
        """Wait a moment for what the device says of a request that was not done by then; None: nothing of that."""
        with self._in_flight.lock:
            future = self._in_flight.requests[-1].future if self._in_flight.requests else None
        if future is None or not future.is_done:
            return None
        with suppress(Timeout, StatusError, PeerDied, CancelledError):
            self._pipeline.advance(lambda: future.late_status is not None, seconds_left(last_word(by)))
        status = future.late_status
        return missed(status, "executing", clock.now(), by) if status in MISSED else None

    def _run_alone(self, arrays: tuple[Any, ...], timeout: float | None) -> Result:
        """Run the only request in flight. The caller holds `submitting`."""
        in_flight, session, buffers = self._in_flight, self._session, self._buffers
        in_flight.is_running = True
        try:  # whatever comes, the burst is usable again, and event loops look at its results
            controller = session.controller
            end = None if timeout is None else session.begin_by(timeout)
            if arrays:
                controller.mark_begin()
                self._statistics.copied += buffers.fill(arrays)
            outputs, inputs = buffers.free_outputs(), buffers.inputs
            encoded = outputs.encoded.get(inputs) or session.encode(inputs, outputs)
            return self._finish(encoded, None, timeout, end)
        finally:
            self._end(timeout)

    def _go_on(self, encoded: EncodedRequest, code: int, timeout: float | None, end: int) -> Result:
        """Finish a `run` under `submitting` whose exchange ended with that code or later than `end`. 0: no end."""
        try:
            self._in_flight.is_running = True
            return self._finish(encoded, code, timeout, end or None)
        finally:
            self._end(timeout)

    def _end(self, timeout: float | None) -> None:
        self._in_flight.is_running = False
        if timeout is not None:
            self._session.controller.due(None)
        self._tell_loops()

    def _tell_loops(self) -> None:
        """Have event loops that watch the results look again. `run` calls it, too, if one began to watch meanwhile."""
        if self._pipeline.loops:
            self._pipeline.loops.rearm()

    def _finish(self, encoded: EncodedRequest, code: int | None, timeout: float | None, end: int | None) -> Result:
        """Do the exchange, unless it has ended with `code`, and return what came of it."""
        controller, pipeline = self._session.controller, self._pipeline
        try:  # an error in it, Ctrl-C too, may leave a result behind that still comes
            if code is None:
                encoded.outputs.number = controller.sent + 1
                code = encoded.packet.call()
            is_usual = not (code or self._measure or end)
            reply = controller.last if is_usual else controller.await_reply(code, encoded.packet, timeout, end)
        except BaseException as error:  # noqa: BLE001 (raised again, unless there is another way)
            controller.interrupted(error)
            return pipeline.recover_from(error, encoded, timeout).result()
        if reply.status is not _NONE:
            return pipeline.retry_with_larger_outputs(encoded, reply, timeout, end).result()
        if self._measure:
            self._statistics.note(reply.timing)
        result = encoded.outputs.result(reply.output_shapes, reply.timing)
        if not (self._measure or pipeline.loops):
            self._make_ready(encoded, result)
        return result

    def _make_ready(self, encoded: EncodedRequest, result: Result) -> None:
        """Let the next `run` return this result, once nothing holds it any more, if the device answers as just now."""
        controller, buffers, outputs = self._session.controller, self._buffers, encoded.outputs
        its = controller, encoded.inputs, controller.last
        if encoded.inputs is not buffers.inputs or outputs.ready is not result or not encoded.packet.address:
            return
        is_known = self._ready_for and all(a is b for a, b in zip(its, self._ready_for, strict=True))
        if not (is_known and all(each.is_ready for each in self._ready)):
            self._forget()
            arrays = encoded.inputs.given()
            self._begin_ready(controller.address, controller, self._in_flight.submitting, arrays)
            self._ready_for = its
        packet = encoded.packet
        if not outputs.is_ready and self._add_ready(result, encoded, packet.address, packet.nbytes, outputs.number_at):
            self._ready.append(outputs)
            outputs.is_ready = True
        controller.is_ready = True

    def _forget(self) -> None:
        self._forget_ready()
        for outputs in self._ready:
            outputs.is_ready = False
        self._ready.clear()
        self._ready_for = ()

    def _run_behind_others(self, arrays: tuple[Any, ...], timeout: float | None) -> Result:
        """Run a request while others are in flight."""
        pipeline = self._pipeline
        if pipeline.session.depth > 1 or pipeline.options.policy == "latest":
            deadline = None if timeout is None else time.monotonic() + timeout
            return self.submit_and_wait(arrays, timeout, deadline)
        begin = time.monotonic()
        pipeline.drain(timeout)
        try:
            return self.run(*arrays, timeout=None if timeout is None else max(1e-9, begin + timeout - time.monotonic()))
        except Timeout as error:
            raise timed_out(timeout, error.phase, error.late_by) from None

    @property
    def source(self) -> Pipeline:
        return self._pipeline

    @property
    def tasks(self) -> Tasks:
        return self._pipeline.arrivals.tasks

    def perform(self, job: Job) -> Result:
        return self._session.perform_with_fallback(partial(self._pipeline.perform, job), job)

    def repeated(self, plan: StreamPlan, inputs: tuple[Any, ...], deadline: float | None) -> ResultStream:
        self._session.check()
        if self._session.is_displaced:
            return super().repeated(plan, inputs, deadline)
        prepared, options = self._session.prepared, self._pipeline.options
        segment = partial(DeviceStream, prepared, options=options, deadline=deadline, ended=self._ended)
        stream: ResultStream
        stream = RecoveringStream(prepared, plan, inputs, segment) if options.recover else segment(plan, inputs)
        self._streams.add(stream)
        if self._session.is_closed:  # meanwhile
            stream.close_with_burst()
        return stream

    def free_memory(self, memory: Memory) -> None:
        self._pipeline.free_memory(memory)

    def stats(self) -> dict[str, Any]:
        self._statistics.copied_ready = self._copied_bytes()
        return self._session.stats(len(self._in_flight.requests))

    def timeline(self, name: str, first_lane: int = 0) -> list[dict[str, Any]]:
        return self._session.timeline(name, first_lane)

    def close(self) -> None:
        self._pipeline.close()
        for stream in list(self._streams):
            stream.close_with_burst()
        self._ended.close()
        self._forget()


def _drop(pipeline: Pipeline) -> None:
    """Let go of a dropped burst's pipeline once nothing is in flight.

    Called with the last reference from outside to it: had the burst's own finalizer the only one, garbage collection of
    a cycle, as an exception with its frames is, would have unmapped the queues before.
    """
    if pipeline.in_flight.requests:
        later(partial(_settle, pipeline))


def _settle(pipeline: Pipeline) -> None:
    """Complete what a dropped burst has in flight, in the thread of `later`; then the pipeline ends."""
    pipeline.look()
    if pipeline.in_flight.requests:
        later(partial(_settle, pipeline))
