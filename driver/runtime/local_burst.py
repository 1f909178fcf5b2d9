"""Bursts in this process."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from burst import ErrorStatus, Result, StatusError, Trace
from burst.errors import timed_out
from driver import fork
from driver.client.buffers import buffers_for
from driver.client.recovery import describe
from driver.client.statistics import spread
from driver.client.workspace import InputSet, OutputSet, Workspace
from driver.deadlines import Wait, check, due
from driver.protocol.lane_codec import with_loop_timeout
from driver.runtime.frames import FrameBurst
from driver.runtime.local_executor import in_time, run_here, timing
from fmq import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from burst import Memory, OutputShape, Request
    from driver.client.buffers import RequestBuffers
    from driver.client.job import Job
    from driver.nn import Model
    from driver.options import Options
    from driver.runtime.frames import PendingFrame


class LocalRequest(Protocol):
    """A request, bound to its memory."""

    estimate: Any
    """The burst_estimate of such requests; None: nothing is known of the time that they take."""

    @property
    def shapes(self) -> Sequence[OutputShape]:
        """The shapes of the outputs, once it has run."""

    @property
    def run(self) -> Callable[[], object]:
        """The function that executes it once, and raises StatusError, ExecutionFailed."""


class BindingExecutor(Protocol):
    """A model that is executed in this process: by the CPU, or part by part on several devices."""

    @property
    def model(self) -> Model:
        """The model that it executes."""

    def bind(self, request: Request) -> LocalRequest:
        """Return a request, to be run several times. Raise StatusError."""

    def perform(self, job: Job) -> Result:
        """Execute the job in this thread."""


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

    def __init__(self, prepared: BindingExecutor, options: Options, buffers: RequestBuffers | None = None) -> None:
        """Use `prepared.burst()`. `buffers`: in place of its own."""
        memory = LocalMemory(buffers or buffers_for(prepared.model, options))
        super().__init__(options, memory)
        self._frames, self._prepared = memory, prepared
        self._bound: dict[LocalFrame, tuple[Memory, LocalRequest]] = {}
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
        """Execute once in this thread, and note it in the trace. Raise StatusError."""
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

    def _execution(self, frame: LocalFrame) -> LocalRequest:
        """Return the request on that memory, bound once."""
        memory, execution = self._bound.get(frame, (None, None))
        if execution is None or memory is not frame.outputs.memory:
            execution = self._prepared.bind(with_loop_timeout(Workspace(*frame).request, self.options.loop_timeout))
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

    def _end(self) -> None:
        self._bound.clear()
        if self._thread:
            self._thread.shutdown(wait=False)
        self._news.notify_all()
