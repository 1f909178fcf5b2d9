"""The CPU device in the client's own process: the methods of a remote device, and nothing between call and kernel.

An execution is given up between two operations when its time is up, as in a device process, and its result is dropped
when it comes too late. A request is checked and bound as a device process does it.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst import (
    DeviceBuffer,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadlineTransient,
    Result,
    StatusError,
    Timing,
    Trace,
)
from burst._core import lib
from burst.errors import timed_out
from burst.request_checks import check_request
from driver import fork
from driver.client.buffers import buffers_for
from driver.client.completion import Completion
from driver.client.device_buffers import check_buffers
from driver.client.recovery import describe
from driver.client.statistics import spread, write_timeline
from driver.client.surface import AnyPreparedModel
from driver.client.workspace import InputSet, OutputSet, Workspace, output_views
from driver.deadlines import (
    WAITING,
    Wait,
    check,
    check_entry,
    deadline,
    due,
    nanoseconds,
    passed,
)
from driver.devices.reference import ReferenceDevice
from driver.engine.binding import BoundRequest
from driver.engine.output_checks import check_outputs
from driver.errors import ExecutionFailed
from driver.interface import Preparation
from driver.nn import validate
from driver.nn.known import explained
from driver.options import check_preference
from driver.runtime.frames import FrameBurst
from driver.runtime.launched import launch_here
from fmq import clock
from fmq.clock import FOREVER
from fmq.closing import Closing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from burst import Memory, OutputShape, Request
    from driver.client.buffers import RequestBuffers
    from driver.client.fenced import FencedExecution
    from driver.client.job import Job
    from driver.interface import Device
    from driver.nn import Model
    from driver.options import Options, Preference
    from driver.runtime.frames import PendingFrame

NAME = "cpu"


class Background:
    """Threads for executions in this process that no caller waits for: as many as it has processors."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        fork.abandon_in_child(self)

    def submit(self, work: Callable[[], Result]) -> Completion:
        """Complete a new completion with `work`, which waits for nothing that comes after it here."""
        completion = Completion()
        self.complete(completion, work)
        return completion

    def complete(self, completion: Completion, work: Callable[[], Result]) -> None:
        """Do the work, unless it is given up before, and settle the completion with it."""
        self._threads = self._threads or ThreadPoolExecutor(os.cpu_count(), "burst-cpu")
        self._threads.submit(completion.settle, work)

    def abandon(self) -> None:
        """Forget the threads in a forked child: they are the parent's."""
        self._threads = None


BACKGROUND = Background()


class LocalDevice(Closing):
    """Runs models in this process, by default as the reference device does. Any thread may use it."""

    address = NAME

    def __init__(self, device: Device | None = None) -> None:
        self._device = device or ReferenceDevice()
        self.name, self.version, self.type = NAME, self._device.version, "CPU"
        self.extensions = tuple(extension.name for extension in self._device.extensions)

    def supported_operations(self, model: Model) -> list[bool]:
        """Return True for each operation of the main subgraph that it supports. Raises InvalidModel."""
        return [reason is None for reason in self.explain(model)]

    def explain(self, model: Model) -> list[str | None]:
        """Return for each operation of the main subgraph why it is not supported; None: it is. Raises InvalidModel."""
        model = model.form_for(self.extensions)
        validate(model)
        return explained(model, self.extensions, self._device.explain)

    def prepare(
        self, model: Model, *, preference: Preference = "fast_single_answer", deadline: float | None = None
    ) -> LocalPrepared:
        """Make a model ready. Raises InvalidModel; MissedDeadline* when that is not done by a time.monotonic()."""
        check_preference(preference)
        model = model.form_for(self.extensions)
        validate(model)
        by = None if deadline is None else nanoseconds(deadline)
        with due(by):
            check_entry("before start")
            return LocalPrepared(self, model, preference, self._device)

    def free_memory(self, memory: Memory) -> None:
        """Do nothing: nothing is kept of pools."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process makes the same device, which holds nothing of this process."""
        return LocalDevice, (self._device,)

    def close(self) -> None:
        """Do nothing: prepared models go on."""


class LocalPrepared(AnyPreparedModel):
    """A model made ready to run in this process. Any thread may use it, several at once."""

    def __init__(self, device: LocalDevice, model: Model, preference: Preference, kernels: Device) -> None:
        """Use `device.prepare`."""
        self.device, self.model, self.preference = device, model, preference
        self._prepared = kernels.prepare(model, Preparation(preference, deadline(), partial(check, "preparing")))

    def perform(self, job: Job) -> Result:
        """Execute it in this thread. Raises Timeout when the result is not there in time."""
        request, by = job.request, job.wait.by
        check_buffers(request.pools, None)
        if missed := passed(by):
            return missed
        since = clock.now()
        try:
            with in_time(job.wait):
                execution = self.bind(request)
                run_here(execution)
                check("executing", by)
        except StatusError as error:
            return error.as_result()
        shapes, took = tuple(execution.shapes), timing(clock.now() - since, job.measure)
        return Result(ErrorStatus.NONE, output_views(self.model, request, shapes), shapes, took)

    def bind(self, request: Request) -> BoundRequest:
        """Check a request and bind it. Raises InvalidArgument, GeneralFailure."""
        check_request(request.inputs, request.outputs, len(request.pools))
        for pool in request.pools:
            if isinstance(pool, DeviceBuffer):
                raise InvalidArgument(f"token {pool.token}: no buffer of this process; it belongs to a device")
        return BoundRequest(self.model, self._prepared, request)

    def start(self, job: Job) -> Completion:
        """Execute it in a thread of this process: as many at once as it has processors."""
        missed = passed(job.wait.by)

        def work() -> Result:
            try:
                check("queued", job.wait.by)
            except StatusError as error:  # others were first, unless it was too late from the beginning
                return missed or error.as_result()
            return self.perform(job)

        return BACKGROUND.submit(work)

    def launch(self, job: Job) -> FencedExecution:
        """Execute it in a thread of its own."""
        check_buffers(job.request.pools, None)
        bound = self.bind(job.request)
        check_outputs(self.model, job.request)

        def execute(end: int | None) -> Result:
            check("queued", end)
            with due(end):
                run_here(bound)
            check("executing", end)
            return Result(ErrorStatus.NONE)

        return launch_here(self.model, job, execute)

    def open_burst(self, options: Options) -> LocalBurst:
        """Return a burst. Options about waiting and recovery have no effect: there is no other process."""
        return LocalBurst(self, options)

    def free_memory(self, memory: Memory) -> None:
        """Do nothing: nothing is kept of pools."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a recipe that prepares the model again, wherever it is unpickled."""
        return _prepare_again, (self.device, self.model, self.preference)

    def close(self) -> None:
        """Free the memory of earlier runs: bursts go on."""
        self._workspaces.clear()


def _prepare_again(device: LocalDevice, model: Model, preference: Preference) -> LocalPrepared:
    return device.prepare(model, preference=preference)


class LocalFrame(NamedTuple):
    """One execution's memory."""

    inputs: InputSet
    outputs: OutputSet


class LocalMemory:
    """The memory of frames in the buffers of a burst."""

    def __init__(self, buffers: RequestBuffers) -> None:
        self.buffers, self.copied = buffers, 0

    @property
    def inputs(self) -> tuple[NDArray[Any] | None, ...]:
        return self.buffers.inputs.arrays

    def frame(self, arrays: tuple[Any, ...]) -> LocalFrame:
        if arrays:
            self.copied += self.buffers.fill(arrays)
        inputs = self.buffers.inputs
        return LocalFrame(inputs, self.buffers.outputs_for(inputs))

    def lend(self, frame: LocalFrame) -> None:
        self.buffers.next_inputs()
        frame.outputs.is_busy = True

    def take_back(self, frame: LocalFrame) -> None:
        self.buffers.give_back(frame.inputs)
        frame.outputs.is_busy = False

    def close(self) -> None:
        self.buffers.close()


class LocalBurst(FrameBurst[LocalFrame]):
    """A burst in which an execution is a call: of `run` in its caller, of `submit` in a thread of the burst.

    The thread begins with the first `submit`, and ends with the burst.
    """

    def __init__(self, prepared: LocalPrepared, options: Options, buffers: RequestBuffers | None = None) -> None:
        """Use `prepared.burst()`. `buffers`: in place of its own."""
        memory = LocalMemory(buffers or buffers_for(prepared.model, options))
        super().__init__(options, memory)
        self._frames, self._prepared = memory, prepared
        self._bound: dict[LocalFrame, tuple[Memory, BoundRequest]] = {}
        self._trace, self._number, self._busy_ns, self._total_ns = Trace.create(), 0, 0, 0
        self._trace.describe(describe(prepared.model), options.depth)
        self._trace.page.client.pid = self._trace.page.device.pid = os.getpid()
        self._news = threading.Condition(self._lock)
        self._thread: ThreadPoolExecutor | None = None
        fork.abandon_in_child(self)

    @property
    def model(self) -> Model:
        return self._prepared.model

    def _run(self, arrays: tuple[Any, ...], timeout: float | None) -> Result:
        wait, buffers, since = Wait.of(timeout, None), self._frames.buffers, clock.now()
        if arrays:
            self._frames.copied += buffers.fill(arrays)
        with in_time(wait):
            return self._executed(LocalFrame(buffers.inputs, buffers.free_outputs()), since, clock.now())

    def _executed(self, frame: LocalFrame, begin: int, sent: int) -> Result:
        """Execute once in this thread, and note it in the trace. Raises StatusError."""
        outputs = frame.outputs
        taken, busy = clock.now(), time.thread_time_ns() if self.options.measure else 0
        execution = self._execution(frame)
        started = clock.now()
        try:
            run_here(execution)
        except StatusError as error:
            if not (error.result and self._grow(outputs, error.result.output_shapes)):
                raise
            execution = self._execution(frame)
            run_here(execution)
        shapes, done = tuple(execution.shapes), clock.now()
        result = Result(ErrorStatus.NONE, outputs.arrays(shapes), shapes, timing(done - taken, self.options.measure))
        if self.options.measure:
            self._busy_ns += time.thread_time_ns() - busy
        self._total_ns += done - begin
        self._number += 1
        self._trace.note(self._number, (begin, sent, taken, started, done, done))
        return result

    def _grow(self, outputs: OutputSet, shapes: tuple[OutputShape, ...]) -> bool:
        with self._lock:
            is_busy = outputs.is_busy
            old = self._frames.buffers.grow(outputs, shapes)
            outputs.is_busy = is_busy
        return old is not None

    def _execution(self, frame: LocalFrame) -> BoundRequest:
        """Return the request on that memory, bound once."""
        memory, execution = self._bound.get(frame, (None, None))
        if execution is None or memory is not frame.outputs.memory:
            execution = self._prepared.bind(Workspace(*frame).request)
            self._bound[frame] = frame.outputs.memory, execution
        return execution

    # ---- in its thread

    def _launch(self, pending: PendingFrame[LocalFrame]) -> None:
        self._thread = self._thread or ThreadPoolExecutor(1, "burst-cpu")
        self._thread.submit(self._work, pending, clock.now())

    def _work(self, pending: PendingFrame[LocalFrame], sent: int) -> None:
        result, failure = None, None
        try:
            if not (pending.completion.is_done or self._is_closed):
                check("queued", pending.completion.told)
                with due(pending.completion.told):
                    result = self._executed(pending.frame, pending.begin, sent)
                check("executing", pending.completion.told)
        except BaseException as error:  # noqa: BLE001 (it is what this request gets)
            failure = error
        with self._lock:
            if failure is not None:
                pending.completion.fail(failure)
            self._finish(pending, result if failure is None else None)
            self._news.notify_all()
        del result
        self._call_back()

    def _advance(self, pending: PendingFrame[LocalFrame], timeout: float | None) -> None:
        with self._lock:
            if pending in self._in_flight and not pending.completion.is_done and not self._news.wait(timeout):
                raise timed_out(timeout)

    def abandon(self) -> None:
        """Forget the frames in flight in a forked child: they are the parent's, and so is the thread."""
        self._lock = threading.RLock()
        self._news, self._thread = threading.Condition(self._lock), None
        self._in_flight.clear()
        self._finished.clear()
        self._staged = None

    # ----

    def perform(self, job: Job) -> Result:
        self._check()
        return self._prepared.perform(job)

    def free_memory(self, memory: Memory) -> None:
        """Do nothing: nothing is kept of pools."""

    def stats(self) -> dict[str, Any]:
        """Return figures as `Burst.stats` does: the client is the device, and its time is the device's."""
        total, busy = self._total_ns / 1e9, self._busy_ns / 1e9 if self.options.measure else None
        return self._counts() | {
            "recoveries": 0,
            "memories_sent": 0,
            "copied_bytes": {"bulk": self._frames.copied, "control": 0},
            "stages": {name: spread(ns) for name, ns in self._trace.stages().items()},
            "cpu_seconds": {"client": busy, "device": busy},
            "seconds": {"total": total, "in_driver": total, "on_device": total} if self.options.measure else None,
        }

    def timeline(self, name: str, first_lane: int = 0) -> list[dict[str, Any]]:
        """Return the last requests, for `trace`."""
        return self._trace.chrome_events(name, first_lane)

    def trace(self, path: str) -> int:
        """Write the last requests as `Burst.trace` does; return how many."""
        return write_timeline(path, self.timeline("burst"))

    def _end(self) -> None:
        self._bound.clear()
        if self._thread:
            self._thread.shutdown(wait=False)
        self._news.notify_all()


def run_here(execution: BoundRequest) -> None:
    """Run a request as a device process does. Raises StatusError."""
    try:
        with np.errstate(all="ignore"):
            execution.run()
    except ExecutionFailed as error:
        raise GeneralFailure(str(error)) from error


@contextmanager
def in_time(wait: Wait) -> Iterator[None]:
    """Bound an execution in this thread. Raises Timeout when its timeout has passed, during it or before."""
    end = FOREVER if wait.end is None else wait.end
    earliest = min(end, lib.burst_due())
    try:
        with due(earliest):
            yield
            late_by = (clock.now() - end) / 1e9
    except MissedDeadlineTransient as error:
        if not wait.ends_by_timeout or end != earliest or clock.now() <= end:  # a loop may have taken too long
            raise
        raise timed_out(wait.timeout, "executing", error.late_by) from None
    if wait.ends_by_timeout and late_by > 0:
        raise timed_out(wait.timeout, WAITING, late_by)


def timing(ns: int, measure: bool) -> Timing:
    """Return a timing with all of the time on the device, which is us."""
    microseconds = ns // 1000 if measure else None
    return Timing(microseconds, microseconds)
