"""A burst on a prepared model, in arrays: write the inputs in place, run, read the outputs in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from burst import Busy, ErrorStatus, GeneralFailure, NotSent, Request, Result
from driver.buffers import Buffers, Shot
from driver.future import Future
from driver.pipeline import Pipeline, error_of
from driver.workspace import is_known

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Iterable

    from numpy.typing import NDArray

    from burst import Memory
    from burst.wire import ResultPacket
    from driver.options import Options
    from driver.remote import RemotePreparedModel
    from driver.workspace import Shapes

_NONE = ErrorStatus.NONE


class Burst:
    """A run of executions in quick succession. `run` from one thread; `submit` and futures from any.

    `inputs` are arrays in shared memory: what is written there is what the device reads, without a copy. They are those
    of the next request: with `submit` look them up for each. The `outputs` of a result are arrays in shared memory
    too, and yours as long as you hold them, or views of them.
    """

    def __init__(self, prepared: RemotePreparedModel, options: Options) -> None:
        """Use `prepared.burst()`."""
        self._prepared, self._measure = prepared, options.measure
        self._buffers = Buffers(prepared.model, _shapes(prepared, options), options.depth)
        self._pipeline = Pipeline(prepared, options, self._buffers)
        self._flights, self._statistics = self._pipeline.flights, self._pipeline.statistics

    @property
    def inputs(self) -> tuple[NDArray[Any] | None, ...]:
        """Arrays of the next request, to be written in place; None where an input is omitted."""
        return self._buffers.inputs.arrays

    def run(self, *arrays: Any, timeout: float | None = None) -> Result:
        """Executes once; with arrays, copies them into the inputs first.

        Raises ValueError for a wrong dtype or shape (nothing was sent), StatusError, PeerDied, Busy, ResultsHeld, and
        Timeout when the result does not come in `timeout` seconds: the burst stays usable, and a late result is dropped.
        """
        if self._flights:
            return self.submit(*arrays, timeout=timeout).result(timeout)
        pipeline, buffers = self._pipeline, self._buffers
        if arrays:
            pipeline.controller.mark_begin()
            self._statistics.copied += buffers.inputs.fill(arrays)
        outputs, inputs = buffers.free_outputs(), buffers.inputs
        shot = outputs.shots.get(inputs) or pipeline.shot(inputs, outputs)
        try:
            reply = pipeline.controller.send(shot.packet, timeout)
        except BaseException as error:  # noqa: BLE001 (raised again, unless there is another way to the result)
            return self._after(error, shot, timeout)
        if reply.status is not _NONE:
            return self._again(shot, reply, timeout)
        if self._measure:
            self._statistics.note(reply.timing)
        return Result(_NONE, outputs.arrays(reply.output_shapes), reply.output_shapes, reply.timing)

    def _again(self, shot: Shot, reply: ResultPacket, timeout: float | None) -> Result:
        """Once more, when it lacked only room for its outputs."""
        larger = self._pipeline.grown(shot, reply)
        if larger is None:
            raise error_of(reply)
        future = Future(self._pipeline)
        self._pipeline.adopt(larger, future)
        return future.result(timeout)

    def _after(self, error: BaseException, shot: Shot, timeout: float | None) -> Result:
        """When `run` did not get its result: another way to it, or the error."""
        if isinstance(error, NotSent):
            return self._pipeline.run_plain(shot, timeout)
        if isinstance(error, GeneralFailure):
            self._pipeline.check()
        if isinstance(error, Busy):
            raise error
        return self._pipeline.rescue(error, shot).result(timeout)

    def submit(self, *arrays: Any, timeout: float | None = None) -> Future:
        """Sends a request and does not wait for its result. With arrays, copies them into the inputs first.

        While `depth` requests are in flight, policy "block" waits (at most `timeout` seconds, then Timeout), "reject"
        raises Busy, and "latest" keeps this request until there is room, in the place of one that was kept before.
        Raises as `run` does for what was not sent.
        """
        return self._pipeline.submit(arrays, timeout)

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

        `timeout`: seconds that we wait. `deadline`: a time.monotonic() by which the device must have begun, or it answers
        MISSED_DEADLINE_TRANSIENT. `loop_timeout`: seconds that a WHILE may take. Raises PeerDied, Timeout, Busy.
        """
        pipeline = self._pipeline
        pipeline.advance(lambda: not self._flights, timeout)
        controller = pipeline.controller
        try:
            packet = controller.encode(request, measure=measure, loop_timeout=_nanoseconds(loop_timeout))
            reply = controller.send(packet, timeout, _nanoseconds(deadline))
        except NotSent:
            pipeline.check()
            self._statistics.plain += 1
            return self._prepared.execute(request, measure=measure, timeout=timeout)
        outputs = self._prepared.outputs(request, reply.output_shapes) if reply.status == 0 else ()
        return Result(reply.status, outputs, reply.output_shapes, reply.timing)

    def free_memory(self, memory: Memory) -> None:
        """The device may unmap a pool of `execute`. Unknown memory is no error."""
        self._pipeline.controller.free_memory(memory)

    def stats(self) -> dict[str, Any]:
        """Counts since the beginning, and where the time went; `driver.statistics` says what each figure is."""
        return self._statistics.report(self._pipeline.controller, len(self._flights), self._measure)

    def trace(self, path: str) -> int:
        """Writes the last requests, stage by stage, as a file for Perfetto or chrome://tracing; returns how many."""
        return self._statistics.write_trace(self._pipeline.controller.trace, path)

    def close(self) -> None:
        """Ends the burst on both sides. Arrays stay readable."""
        self._pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1e9)


def _shapes(prepared: RemotePreparedModel, options: Options) -> Shapes:
    if options.input_shapes is not None:
        return tuple(options.input_shapes)
    operands = [prepared.model.main.operands[i] for i in prepared.model.main.inputs]
    for n, operand in enumerate(operands):
        if not is_known(operand):
            raise ValueError(f"input {n} has the open shape {operand.dimensions}; say it with burst(input_shapes=…)")
    return tuple(operand.dimensions for operand in operands)
