"""A burst on a prepared model, in arrays: write the inputs in place, run, read the outputs in place."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NoReturn, Self

from burst import (
    Busy,
    ErrorStatus,
    GeneralFailure,
    MissedDeadlineTransient,
    NotSent,
    PeerDied,
    Request,
    Result,
    Timeout,
)
from burst.errors import status_error
from driver.client.buffers import Buffers, Shot
from driver.client.future import Future
from driver.client.pipeline import Pipeline, error_of
from driver.deadlines import WAITING, missed_in_waiting, nanoseconds, passed, seconds_left
from driver.protocol.plain_codec import with_loop_timeout
from fmq.clock import deadline_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Iterable

    from numpy.typing import NDArray

    from burst import Memory
    from burst.wire import ResultPacket
    from driver.client.prepared_model import RemotePreparedModel
    from driver.client.workspace import Shapes
    from driver.nn import Model
    from driver.options import Options

_NONE = ErrorStatus.NONE


class Burst:
    """A run of executions in quick succession. `run` from one thread; `submit` and futures from any.

    `inputs` are arrays in shared memory: what is written there is what the device reads, without a copy. They are those
    of the next request: with `submit` look them up for each. The `outputs` of a result are arrays in shared memory
    too, and yours as long as you hold them, or views of them.
    """

    def __init__(
        self,
        prepared: RemotePreparedModel,
        options: Options,
        buffers: Buffers | None = None,
        kind: type[Pipeline] = Pipeline,
    ) -> None:
        """Use `prepared.burst()`. `buffers`: in place of its own, for who places requests in other memory.

        `kind`: of its requests in flight, for who does something about those that fail.
        """
        self._prepared, self._measure = prepared, options.measure
        self._buffers = buffers or Buffers(prepared.model, shapes_of(prepared.model, options), options.depth)
        self._pipeline = kind(prepared, options, self._buffers)
        self._flights, self._statistics = self._pipeline.flights, self._pipeline.statistics

    @property
    def inputs(self) -> tuple[NDArray[Any] | None, ...]:
        """Arrays of the next request, to be written in place; None where an input is omitted."""
        return self._buffers.inputs.arrays

    def run(self, *arrays: Any, timeout: float | None = None) -> Result:
        """Executes once; with arrays, copies them into the inputs first.

        Raises ValueError for a wrong dtype or shape (nothing was sent), StatusError, PeerDied, Busy, ResultsHeld, and
        Timeout when the result does not come in `timeout` seconds: the burst stays usable, a late result is dropped.
        """
        pipeline, buffers = self._pipeline, self._buffers
        if pipeline.is_running:
            raise Busy("this burst is executing in another thread; wait for it, or open another burst")
        with pipeline.submitting:
            if pipeline.flights or pipeline.staged or pipeline.is_moving:
                future = None
            else:
                pipeline.is_running = True
                try:
                    end = pipeline.begin_by(timeout)
                    if arrays:
                        pipeline.controller.mark_begin()
                        self._statistics.copied += buffers.inputs.fill(arrays)
                    outputs, inputs = buffers.free_outputs(), buffers.inputs
                    shot = outputs.shots.get(inputs) or pipeline.shot(inputs, outputs)
                    controller = pipeline.controller
                    try:
                        code = shot.packet.call()
                        is_usual = not (code or self._measure or end)
                        reply = controller.last if is_usual else controller.go_on(code, shot.packet, timeout, end)
                    except BaseException as error:  # noqa: BLE001 (raised again, unless there is another way)
                        controller.interrupted(error)
                        future = self._after(error, shot, timeout)
                    else:
                        if reply.status is _NONE:
                            if self._measure:
                                self._statistics.note(reply.timing)
                            shapes = reply.output_shapes
                            known = outputs.shapes is shapes  # in place of a call: this is the way that counts
                            arrays = tuple(outputs.given) if known else outputs.arrays(shapes)
                            return Result(_NONE, arrays, shapes, reply.timing)
                        future = self._again(shot, reply, timeout, end)
                finally:
                    pipeline.is_running = False
                    if timeout is not None:
                        pipeline.controller.due(None)
                    if pipeline.loops:
                        pipeline.loops.rearm()
        return future.result() if future else self._join(arrays, timeout)

    def _join(self, arrays: tuple[Any, ...], timeout: float | None) -> Result:
        """While there are others in flight."""
        pipeline = self._pipeline
        if pipeline.depth > 1 or pipeline.options.policy == "latest":
            deadline = None if timeout is None else time.monotonic() + timeout
            return self._submit_and_wait(arrays, timeout, deadline)
        begin = time.monotonic()
        pipeline.advance(lambda: not self._flights, timeout)
        return self.run(*arrays, timeout=None if timeout is None else max(0.0, begin + timeout - time.monotonic()))

    def _submit_and_wait(self, arrays: tuple[Any, ...], timeout: float | None, deadline: float | None) -> Result:
        future = self.submit(*arrays, timeout=timeout, deadline=deadline)
        try:
            return future.result()
        except MissedDeadlineTransient as error:
            if error.phase == WAITING:
                raise Timeout(f"no result within {timeout} s; the burst stays usable", WAITING, error.late_by) from None
            raise

    def _again(self, shot: Shot, reply: ResultPacket, timeout: float | None, end: int | None) -> Future:
        """Once more, when it lacked only room for its outputs. Done: nobody may write to its inputs until then."""
        larger = self._pipeline.grown(shot, reply)
        if larger is None:
            raise error_of(reply, self._pipeline.cause_of(reply, end))
        return self._behind(larger, None if end is None else max(1e-9, seconds_left(end) or 0.0))

    def _behind(self, shot: Shot, timeout: float | None) -> Future:
        """Sends it and waits for its result when no event loop looks at the results. Done."""
        try:
            end = None if timeout is None else deadline_of(timeout)
            reply = self._pipeline.exchange(shot.packet, timeout)
        except BaseException as error:  # noqa: BLE001 (raised again, unless there is another way)
            return self._after(error, shot, timeout)
        if reply.status is not _NONE:
            return self._again(shot, reply, timeout, end)
        return Future(self._pipeline).finish(self._pipeline.result_of(shot, reply))

    def _after(self, error: BaseException, shot: Shot, timeout: float | None) -> Future:
        """When `run` did not get its result: another way to it, which has led there, or the error."""
        if isinstance(error, Busy):
            return self._behind(shot, timeout)
        if isinstance(error, NotSent):
            try:
                return Future(self._pipeline).finish(self._pipeline.run_plain(shot, timeout))
            except PeerDied as died:
                error = died
        if isinstance(error, GeneralFailure):
            self._pipeline.check()
        self._buffers.lent = shot.inputs
        try:
            future = self._pipeline.rescue(error, shot)
            future.exception(timeout)
            return future
        finally:
            if not self._flights:
                self._buffers.lent = None

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
        pipeline = self._pipeline
        terms = measure, timeout, None if deadline is None else nanoseconds(deadline)
        if missed := passed(terms[2]):
            return missed
        request = with_loop_timeout(request, loop_timeout)
        pipeline.check()
        while True:
            pipeline.advance(lambda: not self._flights, timeout)
            pipeline.bind(request)
            try:
                with pipeline.submitting:
                    if not (self._flights or pipeline.staged or pipeline.is_moving):
                        return self._execute(request, *terms)
            except PeerDied as error:
                pipeline.recover(error, request)
            finally:
                if pipeline.loops:
                    pipeline.loops.rearm()

    def _execute(self, request: Request, measure: bool, timeout: float | None, deadline: int | None) -> Result:
        pipeline = self._pipeline
        try:
            packet = pipeline.controller.packet(request, measure=measure)
            reply = pipeline.exchange(packet, timeout, deadline)
        except NotSent:
            pipeline.check()
            self._statistics.note_plain(pipeline.controller.trace)
            until = None if deadline is None else deadline / 1e9
            return self._prepared.execute(request, measure=measure, timeout=timeout, deadline=until)
        except Timeout:
            if missed := missed_in_waiting(deadline):
                return missed
            raise
        outputs = self._prepared.outputs(request, reply.output_shapes) if reply.status == 0 else ()
        return Result(reply.status, outputs, reply.output_shapes, reply.timing, "", pipeline.cause_of(reply, deadline))

    def free_memory(self, memory: Memory) -> None:
        """The device may unmap a pool of `execute`. Unknown memory is no error."""
        self._pipeline.check_process()
        self._pipeline.controller.free_memory(memory)

    def stats(self) -> dict[str, Any]:
        """Counts since the beginning, and where the time went; `driver.client.statistics` says what each figure is."""
        self._pipeline.check_process()
        return self._statistics.report(self._pipeline.controller, len(self._flights), self._measure)

    def trace(self, path: str) -> int:
        """Writes the last requests, stage by stage, as a file for Perfetto or chrome://tracing; returns how many."""
        self._pipeline.check_process()
        return self._statistics.write_trace(self._pipeline.controller.trace, path)

    def close(self) -> None:
        """Ends the burst on both sides. Arrays stay readable."""
        self._pipeline.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a burst cannot be pickled: pickle its prepared model, and open a burst on what that becomes")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def shapes_of(model: Model, options: Options) -> Shapes:
    """Of the inputs of a burst's requests. Raises ValueError when nobody says them."""
    if options.input_shapes is not None:
        return tuple(options.input_shapes)
    operands = [model.main.operands[i] for i in model.main.inputs]
    for n, operand in enumerate(operands):
        if not operand.is_known:
            raise ValueError(f"input {n} has the open shape {operand.dimensions}; say it with burst(input_shapes=…)")
    return tuple(operand.dimensions for operand in operands)
