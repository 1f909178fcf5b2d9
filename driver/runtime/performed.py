"""Executors that do a job in parts in the thread that asks for it; when nobody waits, in a background thread."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any
from weakref import finalize

from burst import Result, StatusError
from driver import deadlines
from driver.client.completion import Completion
from driver.client.executor import PLAIN, BurstParts
from driver.client.job import Job
from driver.deadlines import Wait, passed
from driver.engine.binding import check_arguments
from driver.engine.output_checks import check_outputs
from driver.runtime.fallback import is_retryable, perform_with_fallback
from driver.runtime.launched import launch_here
from driver.runtime.local_burst import LocalBurst
from driver.runtime.local_executor import WAITING_JOBS
from driver.runtime.values import Rooms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from burst import Memory, OutputShape, Request
    from driver.client.fenced import FencedExecution
    from driver.nn import Model
    from driver.options import Options
    from driver.runtime.fallback import CpuFallback


class _Background(threading.local):
    """The execution that a thread does in the background."""

    completion: Completion | None = None


_working = _Background()


def check_wanted() -> None:
    """Raise CancelledError if what this thread executes in the background was cancelled."""
    if _working.completion is not None and _working.completion.cancelled():
        raise CancelledError


class PerformedHere(ABC):
    """An executor that is written as one function: `_perform`. Any thread, many jobs at once.

    `fallback`: what `FallbackExecutor` has for the whole, for the bursts that are made here.
    """

    remote = None

    def __init__(self, model: Model, fallback: CpuFallback | None = None) -> None:
        self.model, self.fallback, self.rooms = model, fallback, Rooms()
        self._bursts, self._is_closed = 0, False
        self._counting = threading.RLock()  # a finalizer may let go while this thread holds it

    @abstractmethod
    def _perform(self, job: Job) -> Result:
        """Execute a job whose arguments fit. Raise StatusError, PeerDied, Timeout."""

    def perform(self, job: Job) -> Result:
        """Execute it in this thread."""
        if missed := passed(job.wait.by):
            return missed
        try:
            check_arguments(self.model, job.request)
            return self._perform(job)
        except StatusError as error:
            return error.as_result()

    def start(self, job: Job) -> Completion:
        """Execute it in a thread of this process. After it was cancelled, no other part of it begins."""
        completion = Completion()

        def work() -> Result:
            _working.completion = completion
            try:
                return self.perform(job)
            finally:
                _working.completion = None

        WAITING_JOBS.complete(completion, work)
        return completion

    def launch(self, job: Job) -> FencedExecution:
        """Execute it in a thread of its own, which waits for the fences. Raise InvalidArgument."""
        check_arguments(self.model, job.request)
        check_outputs(self.model, job.request)
        return launch_here(self.model, job, lambda end: self.perform(job.by(end)))

    def open_burst(self, options: Options, parts: BurstParts = PLAIN) -> BurstInParts:
        """Return a burst whose requests are executed in this process, part by part. It goes on until it is closed."""
        return BurstInParts(self, options, parts)

    def perform_with_fallback(self, job: Job) -> Result:
        """Execute a burst's request, or else the whole model on the CPU."""
        return perform_with_fallback(lambda: self.perform(job), self._fallback_for, job)

    def _fallback_for(self, error: BaseException) -> CpuFallback | None:
        return self.fallback if is_retryable(error) else None

    def bind(self, request: Request) -> BoundJob:
        """Return the request, to be run several times."""
        return BoundJob(self, request)

    @abstractmethod
    def free_memory(self, memory: Memory) -> None:
        """Let all devices unmap it."""

    def hold(self) -> None:
        """Keep what is prepared until `let_go`, also when the model is closed before."""
        with self._counting:
            self._bursts += 1

    def let_go(self) -> None:
        """End one `hold`."""
        with self._counting:
            self._bursts -= 1
            is_last = self._is_closed and not self._bursts
        if is_last:
            self._free()

    def close(self) -> None:
        """Free what is prepared, once no burst needs it."""
        with self._counting:
            self._is_closed = True
            is_last = not self._bursts
        if is_last:
            self._free()

    @abstractmethod
    def _free(self) -> None:
        """Free what is prepared. Harmless when done twice."""


class BurstInParts(LocalBurst):
    """A burst of such an executor. Until it is closed, or let go, so is not what its requests need."""

    def __init__(self, executor: PerformedHere, options: Options, parts: BurstParts) -> None:
        """Use `prepared.burst()`."""
        super().__init__(executor, options, parts.buffers)
        self._executor = executor
        executor.hold()
        self._let_go = finalize(self, executor.let_go)
        self._let_go.atexit = False

    def perform(self, job: Job) -> Result:
        self._check()
        return self._executor.perform_with_fallback(job)

    def free_memory(self, memory: Memory) -> None:
        """Let all devices unmap a pool of `execute`. Unknown memory is no error."""
        self._executor.free_memory(memory)

    def stats(self) -> dict[str, Any]:
        """Return figures as those of a burst in this process, and the `fallbacks` of the compiled model."""
        fallback = self._executor.fallback
        return super().stats() | {"fallbacks": fallback.report() if fallback else None}

    def _end(self) -> None:
        super()._end()
        self._let_go()


class BoundJob:
    """A request of a burst. `shapes`: of the outputs, once it has run."""

    estimate = None  #: its devices judge it

    def __init__(self, executor: PerformedHere, request: Request) -> None:
        self._executor, self._request = executor, request
        self.shapes: Sequence[OutputShape] = ()

    def run(self) -> None:
        """Execute it by the deadline of this thread. Raise StatusError, PeerDied."""
        end = deadlines.deadline()
        result = self._executor.perform_with_fallback(Job(self._request, Wait(end, None, end)))
        self.shapes = result.output_shapes
        result.raise_for_status()
