"""A burst on a prepared model, in arrays: write the inputs in place, run, read the outputs in place."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NoReturn

from burst import Busy, ErrorStatus, MissedDeadlineTransient, Request, Result, Timeout
from burst.errors import status_error
from driver.client.future import Future
from driver.deadlines import WAITING, nanoseconds, passed
from driver.options import ExecuteOptions
from fmq.closing import Closing

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Iterable

    from numpy.typing import NDArray

    from burst import Memory
    from driver.client.pipeline import Pipeline

_NONE = ErrorStatus.NONE


class Burst(Closing):
    """Executions in quick succession. `run` from one thread; `submit` and futures from any.

    `inputs` are arrays in shared memory: the device reads what is written there, without a copy. They belong to the
    next request: with `submit`, look them up for each. The `outputs` of a result are arrays in shared memory, too, and
    yours as long as you hold them, or views of them.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        """Use `prepared.burst()`."""
        self._pipeline, self._buffers, self._measure = pipeline, pipeline.buffers, pipeline.options.measure
        self._in_flight, self._session = pipeline.in_flight, pipeline.session
        self._statistics = pipeline.session.statistics

    @property
    def inputs(self) -> tuple[NDArray[Any] | None, ...]:
        """Arrays of the next request, to be written in place; None where an input is omitted."""
        return self._buffers.inputs.arrays

    def run(self, *arrays: Any, timeout: float | None = None) -> Result:
        """Executes once; with arrays, copies them into the inputs first.

        Raises ValueError for a wrong dtype or shape (nothing was sent), StatusError, PeerDied, Busy, ResultsHeld, and
        Timeout when the result does not come in `timeout` seconds: the burst stays usable, a late result is dropped.
        """
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
                        self._statistics.copied += buffers.inputs.fill(arrays)
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
                            arrays = tuple(outputs.given) if known else outputs.arrays(shapes)
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
        return self.run(*arrays, timeout=None if timeout is None else max(0.0, begin + timeout - time.monotonic()))

    def _submit_and_wait(self, arrays: tuple[Any, ...], timeout: float | None, deadline: float | None) -> Result:
        future = self.submit(*arrays, timeout=timeout, deadline=deadline)
        try:
            return future.result()
        except MissedDeadlineTransient as error:
            if error.phase == WAITING:
                raise Timeout(f"no result within {timeout} s; the burst stays usable", WAITING, error.late_by) from None
            raise

    def submit(self, *arrays: Any, timeout: float | None = None, deadline: float | None = None) -> Future:
        """Sends a request and does not wait for its result. With arrays, copies them into the inputs first.

        While `depth` requests are in flight, policy "block" waits (at most `timeout` seconds, then Timeout), "reject"
        raises Busy, and "latest" keeps this request until there is room, in the place of one that was kept before.
        `deadline`: a time.monotonic() by which it has to be done; then the future is, with MissedDeadline*.
        Raises as `run` does for what was not sent.
        """
        by = None if deadline is None else nanoseconds(deadline)
        if missed := passed(by):
            return Future(self._pipeline, by).fail(status_error(missed.status, missed.message, missed.cause))
        return self._pipeline.submit(arrays, timeout, by)

    async def run_async(self, *arrays: Any) -> Result:
        """As `run`, for asyncio. Cancelling the task drops the result when it comes."""
        return await self._pipeline.arrivals.run(arrays)

    def stream(self, frames: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Result]:
        """`async for result in burst.stream(frames)`: results in the order of the frames, `depth` in flight.

        A frame is an array, or a tuple of one for each input. With policy "latest" a source that is faster than the
        device loses frames, and not time; with "reject", too, and the oldest stay.
        """
        return self._pipeline.arrivals.stream(frames)

    def execute(
        self,
        request: Request,
        measure: bool = False,
        timeout: float | None = None,
        deadline: float | None = None,
        loop_timeout: float | None = None,
    ) -> Result:
        """An explicit request on pools of your own, with any status.

        `timeout`: seconds from now, `deadline`: a time.monotonic(). The device is told the earlier one, and gives up
        what it cannot do by then. The wait ends there whatever it does: at the deadline with a result of status
        MISSED_DEADLINE_TRANSIENT, after the timeout by Timeout. `loop_timeout`: seconds that a WHILE may take.

        Raises PeerDied, Timeout, Busy.
        """
        return self._pipeline.execute(request, ExecuteOptions(measure, timeout, loop_timeout, deadline))

    def free_memory(self, memory: Memory) -> None:
        """The device may unmap a pool of `execute`. Unknown memory is no error."""
        self._pipeline.free_memory(memory)

    def stats(self) -> dict[str, Any]:
        """Counts since the beginning, and where the time went; `driver.client.session.Statistics` says what each is.

        `fallbacks`: those of the compiled model, if this is a burst of one.
        """
        return self._session.stats(len(self._in_flight.requests))

    def trace(self, path: str) -> int:
        """Writes the last requests, stage by stage, as a file for Perfetto or chrome://tracing; returns how many."""
        return self._session.write_trace(path)

    def close(self) -> None:
        """Ends the burst on both sides. Arrays stay readable."""
        self._pipeline.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a burst cannot be pickled: pickle its prepared model, and open a burst on the unpickled one")
