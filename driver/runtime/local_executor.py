"""The executor of models in this process."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from burst import (
    DeviceBuffer,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadlinePersistent,
    MissedDeadlineTransient,
    Result,
    StatusError,
    Timing,
)
from burst._core import ffi, lib
from burst.errors import timed_out
from burst.executor import Estimates, run_judged
from burst.request_checks import check_request
from driver import fork
from driver.client.completion import Completion
from driver.client.device_buffers import check_buffers
from driver.client.executor import PLAIN, BurstParts
from driver.client.workspace import output_views
from driver.deadlines import WAITING, Wait, check, deadline, due, passed
from driver.engine.binding import BoundRequest
from driver.engine.output_checks import check_outputs
from driver.errors import ExecutionFailed
from driver.interface import Preparation
from driver.nn.older import form_for_version
from driver.runtime.launched import launch_here
from fmq import clock
from fmq.clock import FOREVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from burst import Memory, Request
    from driver.client.fenced import FencedExecution
    from driver.client.job import Job
    from driver.interface import Device
    from driver.nn import Model
    from driver.options import Options, Preference
    from driver.runtime.local_burst import LocalBurst, LocalRequest


class Background:
    """At most so many threads, for executions in this process that no caller waits for."""

    def __init__(self, most: int | None, name: str) -> None:
        self._most, self._name = most, name
        self._threads: ThreadPoolExecutor | None = None
        fork.abandon_in_child(self)

    def submit(self, work: Callable[[], Result]) -> Completion:
        """Complete a new completion with `work`, which waits for nothing that comes after it here."""
        completion = Completion()
        self.complete(completion, work)
        return completion

    def complete(self, completion: Completion, work: Callable[[], Result]) -> None:
        """Do the work, unless it is given up before, and settle the completion with it."""
        self._threads = self._threads or ThreadPoolExecutor(self._most, self._name)
        self._threads.submit(completion.settle, work)

    def abandon(self) -> None:
        """Forget the threads in a forked child: they are the parent's."""
        self._threads = None


BACKGROUND = Background(os.cpu_count(), "burst-cpu")
"""For what this process computes: one thread for each processor."""

WAITING_JOBS = Background(64, "burst-job")
"""For jobs that mostly wait for devices, so that none of these is in the way of what this process computes."""


class LocalExecutor:
    """A model, prepared in this process."""

    remote = None

    def __init__(self, model: Model, preference: Preference, kernels: Device) -> None:
        self.model = model
        form = form_for_version(model, kernels.hal_version)
        self._prepared = kernels.prepare(form, Preparation(preference, deadline(), partial(check, "preparing")))
        self._estimates = Estimates()

    def perform(self, job: Job) -> Result:
        """Execute it in this thread. Raise Timeout when the result is not there in time."""
        request, by = job.request, job.wait.by
        check_buffers(request.pools, None)
        if missed := passed(by):
            return missed
        since = clock.now()
        try:
            with in_time(job.wait):
                execution = self.bind(request)
                run_here(execution)
        except StatusError as error:
            return error.as_result()
        shapes, took = tuple(execution.shapes), timing(clock.now() - since, job.measure)
        return Result(ErrorStatus.NONE, output_views(self.model, request, shapes), shapes, took)

    def bind(self, request: Request) -> BoundRequest:
        """Check a request and bind it. Raise InvalidArgument, GeneralFailure."""
        check_request(request.inputs, request.outputs, len(request.pools))
        for pool in request.pools:
            if isinstance(pool, DeviceBuffer):
                raise InvalidArgument(f"token {pool.token}: no buffer of this process; it belongs to a device")
        bound = BoundRequest(self.model, self._prepared, request)
        bound.estimate = self._estimates.of(request)
        return bound

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
            return Result(ErrorStatus.NONE)

        return launch_here(self.model, job, execute)

    def open_burst(self, options: Options, parts: BurstParts = PLAIN) -> LocalBurst:
        """Return a burst. Options about waiting and recovery have no effect: there is no other process."""
        from driver.runtime.local_burst import LocalBurst

        return LocalBurst(self, options, parts.buffers)

    def free_memory(self, memory: Memory) -> None:
        """Do nothing: nothing is kept of pools."""

    def close(self) -> None:
        """Do nothing: bursts go on, and nothing else is there to be freed."""


def run_here(execution: LocalRequest) -> None:
    """Run a request as a device process does. Raise StatusError."""
    estimate = execution.estimate
    try:
        with np.errstate(all="ignore"):
            if estimate is None:
                execution.run()
            else:
                judged = ffi.new("burst_attempt *", {"deadline": lib.burst_due(), "estimate": estimate})
                run_judged(judged, execution.run)
    except ExecutionFailed as error:
        raise GeneralFailure(str(error)) from error


@contextmanager
def in_time(wait: Wait) -> Iterator[None]:
    """Bound an execution in this thread. Raise Timeout when its timeout has passed, during it or before."""
    end = FOREVER if wait.end is None else wait.end
    earliest = min(end, lib.burst_due())
    try:
        with due(earliest):
            yield
            late_by = (clock.now() - end) / 1e9
    except (MissedDeadlineTransient, MissedDeadlinePersistent) as error:
        if not wait.ends_by_timeout or end != earliest or clock.now() <= end:  # a loop, or it is known to be too short
            raise
        raise timed_out(wait.timeout, "executing", error.late_by) from None
    if wait.ends_by_timeout and late_by > 0:
        raise timed_out(wait.timeout, WAITING, late_by)


def timing(ns: int, measure: bool) -> Timing:
    """Return a timing with all of the time on the device, which is us."""
    microseconds = ns // 1000 if measure else None
    return Timing(microseconds, microseconds)
