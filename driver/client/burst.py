"""A burst on a prepared model, in arrays: write the inputs in place, run, read the outputs in place."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from burst import Busy, ErrorStatus, MissedDeadlineTransient, Request, Result, Timeout
from burst.dropped import later
from burst.errors import timed_out
from driver.client.names import together
from driver.client.statistics import write_timeline
from driver.client.surface import AnyBurst
from driver.client.tasks import TaskTimes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from burst import Memory
    from driver.client.pipeline import Pipeline
    from driver.client.tasks import Tasks
    from driver.nn import Model
    from driver.options import ExecuteOptions

_NONE = ErrorStatus.NONE


class Burst(AnyBurst):
    """As `AnyBurst`, on one device."""

    def __init__(self, pipeline: Pipeline) -> None:
        """Use `prepared.burst()`."""
        self._pipeline, self._buffers, self._measure = pipeline, pipeline.buffers, pipeline.options.measure
        self._in_flight, self._session = pipeline.in_flight, pipeline.session
        self._statistics = pipeline.session.statistics

    @property
    def model(self) -> Model:
        return self._session.prepared.model

    @property
    def inputs(self) -> tuple[NDArray[Any] | None, ...]:
        return self._buffers.inputs.arrays

    def run(self, *arrays: Any, timeout: float | None = None, **by_name: Any) -> Result:
        if by_name:
            arrays = together(arrays, by_name)
        in_flight = self._in_flight
        if in_flight.is_running:
            raise Busy("this burst is executing in another thread; wait for it, or open another burst")
        with in_flight.submitting:
            # From here to `return` this is written out, without calls that the usual request can do without.
            if in_flight.requests or in_flight.staged or in_flight.is_moving:
                future = None
            else:
                in_flight.is_running = True
                try:  # whatever comes, the burst is usable again, and event loops look at its results
                    session, buffers = self._session, self._buffers
                    controller = session.controller
                    end = None if timeout is None else session.begin_by(timeout)
                    if arrays:
                        controller.mark_begin()
                        self._statistics.copied += buffers.fill(arrays)
                    outputs, inputs = buffers.free_outputs(), buffers.inputs
                    encoded = outputs.encoded.get(inputs) or session.encode(inputs, outputs)
                    try:  # the exchange: an error in it, Ctrl-C too, may leave a result behind that still comes
                        code = encoded.packet.call()
                        is_usual = not (code or self._measure or end)
                        reply = controller.last if is_usual else controller.go_on(code, encoded.packet, timeout, end)
                    except BaseException as error:  # noqa: BLE001 (raised again, unless there is another way)
                        controller.interrupted(error)
                        future = self._pipeline.recover_from(error, encoded, timeout)
                    else:
                        if reply.status is _NONE:
                            if self._measure:
                                self._statistics.note(reply.timing)
                            shapes = reply.output_shapes
                            # The arrays were made for these very shapes: no call is needed to find them.
                            known = outputs.shapes is shapes
                            arrays = outputs.named(outputs.given) if known else outputs.arrays(shapes)
                            return Result(_NONE, arrays, shapes, reply.timing)
                        future = self._pipeline.retry_with_larger_outputs(encoded, reply, timeout, end)
                finally:
                    in_flight.is_running = False
                    if timeout is not None:
                        self._session.controller.due(None)
                    if self._pipeline.loops:
                        self._pipeline.loops.rearm()
        return future.result() if future else self._run_behind_others(arrays, timeout)

    def _run_behind_others(self, arrays: tuple[Any, ...], timeout: float | None) -> Result:
        """While other requests are in flight."""
        pipeline = self._pipeline
        if pipeline.session.depth > 1 or pipeline.options.policy == "latest":
            deadline = None if timeout is None else time.monotonic() + timeout
            return self._submit_and_wait(arrays, timeout, deadline)
        begin = time.monotonic()
        pipeline.drain(timeout)
        try:
            return self.run(*arrays, timeout=None if timeout is None else max(1e-9, begin + timeout - time.monotonic()))
        except Timeout as error:
            raise timed_out(timeout, error.phase, error.late_by) from None

    def _submit_and_wait(self, arrays: tuple[Any, ...], timeout: float | None, deadline: float | None) -> Result:
        future = self.submit(*arrays, timeout=timeout, deadline=deadline)
        try:
            return future.result()
        except MissedDeadlineTransient as error:
            raise TaskTimes.of(timeout, None).error(error) from None

    @property
    def source(self) -> Pipeline:
        return self._pipeline

    @property
    def tasks(self) -> Tasks:
        return self._pipeline.arrivals.tasks

    def execute_as(self, request: Request, options: ExecuteOptions) -> Result:
        return self._session.executed(partial(self._pipeline.execute, request, options), request, options)

    def free_memory(self, memory: Memory) -> None:
        self._pipeline.free_memory(memory)

    def stats(self) -> dict[str, Any]:
        return self._session.stats(len(self._in_flight.requests))

    def trace(self, path: str) -> int:
        return write_timeline(path, self._session.timeline("burst"))

    def close(self) -> None:
        self._pipeline.close()

    def __del__(self) -> None:
        if self._in_flight.requests:
            later(partial(_settle, self._pipeline))


def _settle(pipeline: Pipeline) -> None:
    """In the thread of `later`, after a burst was dropped: completes what is in flight, and the pipeline ends."""
    pipeline.look()
    if pipeline.in_flight.requests:
        later(partial(_settle, pipeline))
