"""The CPU device in the client's own process: the methods of a remote device, and nothing between call and kernel.

An execution is given up between two operations when its time is up, as in a device process, and its result is dropped
when it comes too late. A request is checked and bound as a device process does it.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from burst import (
    BurstError,
    ErrorStatus,
    GeneralFailure,
    MissedDeadlineTransient,
    Result,
    StatusError,
    Timeout,
    Timing,
)
from burst._core import lib
from burst.request_checks import check_pool, check_request
from driver.client.buffers import buffers_for
from driver.client.future import Future
from driver.client.workspace import InputSet, OutputSet, Workspace, input_shapes, output_views
from driver.deadlines import WAITING, check, check_entry, due, nanoseconds, passed
from driver.devices.reference import ReferenceDevice
from driver.engine.binding import BoundRequest
from driver.errors import ExecutionFailed
from driver.nn import validate
from driver.options import ExecuteOptions, check_preference, options_of
from driver.protocol.plain_codec import with_loop_timeout
from fmq.clock import FOREVER
from fmq.closing import Closing

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Iterable, Iterator

    from numpy.typing import ArrayLike, NDArray

    from burst import Memory, Request
    from driver.client.buffers import RequestBuffers
    from driver.interface import Device
    from driver.nn import Model
    from driver.options import Options, Preference

NAME = "cpu"


class LocalDevice(Closing):
    """Runs models in this process, by default as the reference device does. Any thread may use it."""

    address = NAME

    def __init__(self, device: Device | None = None) -> None:
        self._device = device or ReferenceDevice()
        self.name, self.version, self.type = NAME, self._device.version, "CPU"

    def supported_operations(self, model: Model) -> list[bool]:
        """For each operation of the main subgraph: True is a promise. Raises InvalidModel."""
        validate(model)
        return self._device.supported_operations(model)

    def prepare(
        self, model: Model, *, preference: Preference = "fast_single_answer", deadline: float | None = None
    ) -> LocalPrepared:
        """Makes a model ready. Raises InvalidModel; MissedDeadline* when that is not done by a time.monotonic()."""
        check_preference(preference)
        validate(model)
        by = None if deadline is None else nanoseconds(deadline)
        with due(by):
            check_entry("before start")
            return LocalPrepared(self, model, preference, self._device)

    def free_memory(self, memory: Memory) -> None:
        """Nothing is kept of pools."""

    def close(self) -> None:
        """Nothing to close: prepared models go on."""


class LocalPrepared(Closing):
    """A model made ready to run in this process. Any thread may use it, several at once."""

    def __init__(self, device: LocalDevice, model: Model, preference: Preference, kernels: Device) -> None:
        """Use `device.prepare`."""
        self.device, self.model, self.preference = device, model, preference
        self._prepared = kernels.prepare(model, partial(check, "preparing"), preference)

    def run(self, *arrays: ArrayLike | None, timeout: float | None = None) -> tuple[NDArray[Any], ...]:
        """As `RemotePreparedModel.run`."""
        workspace = Workspace.create(self.model, input_shapes(self.model, arrays))
        workspace.inputs.fill(arrays)
        options = ExecuteOptions(timeout=timeout)
        result = self._execute(workspace.request, options)
        if result.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE and workspace.grow(result.output_shapes):
            result = self._execute(workspace.request, options)
        result.raise_for_status()
        return result.outputs

    def execute(
        self,
        request: Request,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
        deadline: float | None = None,
    ) -> Result:
        """As `RemotePreparedModel.execute`. Raises Timeout when the result is not there in `timeout` seconds."""
        return self._execute(request, ExecuteOptions(measure, timeout, loop_timeout, deadline))

    def _execute(self, request: Request, options: ExecuteOptions) -> Result:
        for n, pool in enumerate(request.pools):
            check_pool(n, pool)
        request = with_loop_timeout(request, options.loop_timeout)
        by = None if options.deadline is None else nanoseconds(options.deadline)
        if missed := passed(by):
            return missed
        begin = time.monotonic()
        try:
            with in_time(begin, options.timeout, by):
                execution = self.bind(request)
                run_here(execution)
                check("executing", by)
        except StatusError as error:
            return error.as_result()
        shapes, timing = tuple(execution.shapes), timing_since(begin, measure=options.measure)
        return Result(ErrorStatus.NONE, output_views(self.model, request, shapes), shapes, timing)

    def bind(self, request: Request) -> BoundRequest:
        """Checks a request and binds it. Raises InvalidArgument, GeneralFailure."""
        check_request(request.inputs, request.outputs, len(request.pools))
        return BoundRequest(self.model, self._prepared, request)

    def burst(self, **options: Any) -> LocalBurst:
        """As `RemotePreparedModel.burst`; what says how to wait, how deep, and how to recover has nothing to say."""
        return LocalBurst(self, options_of(self.preference, **options))

    def close(self) -> None:
        """Nothing to close: bursts go on."""


class LocalBurst(Closing):
    """The surface of `driver.Burst`, where an execution is a call. Any thread may run; one does at a time."""

    def __init__(self, prepared: LocalPrepared, options: Options, buffers: RequestBuffers | None = None) -> None:
        """Use `prepared.burst()`. `buffers`: in place of its own."""
        self._prepared, self._measure = prepared, options.measure
        self._buffers: RequestBuffers = buffers or buffers_for(prepared.model, options)
        self._bound: dict[tuple[InputSet, OutputSet], tuple[Memory, BoundRequest]] = {}
        self._lock = threading.RLock()
        self._runs = self._copied = self._total_ns = 0
        self._is_closed = False

    @property
    def inputs(self) -> tuple[NDArray[Any] | None, ...]:
        """Arrays of the next request, to be written in place; None where an input is omitted."""
        return self._buffers.inputs.arrays

    def run(self, *arrays: Any, timeout: float | None = None) -> Result:
        """As `Burst.run`. Raises Timeout when the result comes later than in `timeout` seconds."""
        with self._lock:
            if self._is_closed:
                raise ValueError("this burst is closed; open another")
            begin = time.monotonic()
            buffers = self._buffers
            if arrays:
                self._copied += buffers.inputs.fill(arrays)
            outputs = buffers.free_outputs()
            with in_time(begin, timeout):
                execution = self._run(buffers.inputs, outputs)
            self._runs += 1
            self._total_ns += int((time.monotonic() - begin) * 1e9)
            shapes = tuple(execution.shapes)
            timing = timing_since(begin, measure=self._measure)
            return Result(ErrorStatus.NONE, outputs.arrays(shapes), shapes, timing)

    def _run(self, inputs: InputSet, outputs: OutputSet) -> BoundRequest:
        """Executes, once more if it lacked only room for its outputs. Raises StatusError."""
        try:
            execution = self._execution(inputs, outputs)
            run_here(execution)
        except StatusError as error:
            if not (error.result and self._buffers.grow(outputs, error.result.output_shapes)):
                raise
            return self._run(inputs, outputs)
        return execution

    def _execution(self, inputs: InputSet, outputs: OutputSet) -> BoundRequest:
        """The request on that memory, bound once."""
        memory, execution = self._bound.get((inputs, outputs), (None, None))
        if execution is None or memory is not outputs.memory:
            execution = self._prepared.bind(Workspace(inputs, outputs).request)
            self._bound[inputs, outputs] = outputs.memory, execution
        return execution

    def submit(self, *arrays: Any, timeout: float | None = None, deadline: float | None = None) -> Future:
        """As `Burst.submit`: the future is done."""
        by = None if deadline is None else nanoseconds(deadline)
        future = Future(self, by)
        try:
            with in_time(time.monotonic(), None, by):
                result = self.run(*arrays, timeout=timeout)
                check("executing", by)
            return future.finish(result)
        except BurstError as error:
            return future.fail(error)

    async def run_async(self, *arrays: Any) -> Result:
        """As `run`, for asyncio: the loop stands still meanwhile."""
        return self.run(*arrays)

    async def stream(self, frames: Iterable[Any]) -> AsyncIterator[Result]:
        """As `Burst.stream`, for an ordinary iterable."""
        for frame in frames:
            yield self.run(*(frame if isinstance(frame, tuple) else (frame,)))

    def execute(self, request: Request, **options: Any) -> Result:
        """As `LocalPrepared.execute`."""
        return self._prepared.execute(request, **options)

    def free_memory(self, memory: Memory) -> None:
        """Nothing is kept of pools."""

    def stats(self) -> dict[str, Any]:
        """The figures of `Burst.stats` that there are here."""
        return {
            "runs": {"burst": self._runs, "plain": 0},
            "in_flight": 0,
            "copied_bytes": {"bulk": self._copied, "control": 0},
            "seconds": {"total": self._total_ns / 1e9},
        }

    def close(self) -> None:
        """Ends the burst. Arrays stay readable."""
        with self._lock:
            self._is_closed = True
            self._bound.clear()
            self._buffers.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a burst cannot be pickled: pickle the model, and compile it where it is unpickled")

    # ---- of futures, which are done

    def wait_for(self, future: Future, timeout: float | None) -> None:
        """They are done."""

    def drop(self, future: Future) -> bool:
        """They are done."""
        return False

    def arrival(self, future: Future) -> asyncio.Future[None]:
        """They are done."""
        raise AssertionError(future)


def run_here(execution: BoundRequest) -> None:
    """As a device process does it. Raises StatusError."""
    try:
        with np.errstate(all="ignore"):
            execution.run()
    except ExecutionFailed as error:
        raise GeneralFailure(str(error)) from error


@contextmanager
def in_time(begin: float, timeout: float | None, deadline: int | None = None) -> Iterator[None]:
    """An execution that has to end so many seconds after `begin`, or else raises Timeout, and by the deadline."""
    end = FOREVER if timeout is None else nanoseconds(begin + timeout)
    earliest = min(end, lib.burst_due(), FOREVER if deadline is None else deadline)
    try:
        with due(earliest):
            yield
            late_by = time.monotonic() - begin - timeout if timeout is not None else 0.0
    except MissedDeadlineTransient as error:
        if end != earliest:
            raise
        raise Timeout(f"no result within {timeout} s; the execution was stopped", "executing", error.late_by) from None
    if late_by > 0:
        raise Timeout(f"no result within {timeout} s; the result came later and is dropped", WAITING, late_by)


def timing_since(begin: float, *, measure: bool) -> Timing:
    """All of it on the device, which is us."""
    microseconds = int((time.monotonic() - begin) * 1e6) if measure else None
    return Timing(microseconds, microseconds)
