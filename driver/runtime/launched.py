"""Fenced executions that end in this process: on the CPU here, or here in the place of a device that has failed."""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from burst import (
    ErrorStatus,
    MissedDeadlineTransient,
    ResourceExhaustedTransient,
    Result,
    StatusError,
    Timing,
)
from burst.channel import close_all
from burst.messages import NO_TIMING, Cause
from driver.client.fenced import Ending, ExecutionInfo, FencedExecution, duplicates, output_shapes
from driver.client.session import FAILURES
from driver.client.workspace import output_views
from driver.deadlines import earlier, passed, timeout_until
from driver.protocol.fences import (
    FenceSignal,
    FenceState,
    check_count,
    is_pending,
    kinds_of,
    look,
    no_descriptor,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from burst import Request
    from driver.client.job import Job
    from driver.nn import Model
    from driver.runtime.partition import Step

_FENCE_FAILED = "a fence that it waited for was set to error"


class Launch(NamedTuple):
    """A job that was launched, with copies of its fences.

    launched_at, fenced_at: when that was, and when its fences were signalled, CLOCK_MONOTONIC ns; 0: not known yet.
    """

    job: Job
    fds: list[int]
    launched_at: int
    fenced_at: int = 0


@contextmanager
def launching(job: Job) -> Iterator[Launch]:
    """Give what it takes to execute the job later, when the caller has closed its fences.

    Raise InvalidArgument, ResourceExhaustedTransient.
    """
    now = time.monotonic_ns()
    with duplicates(job.after) as fds:
        if all(look(fd) == FenceState.SIGNALED for fd in fds):
            close_all(fds)
            yield Launch(job, fds, now, fenced_at=now)
        else:
            yield Launch(job, fds, now)


class FencedThread:
    """The thread of an execution in this process: it waits for the fences, executes, and signals a fence of its own."""

    def __init__(self, execute: Callable[[int | None], Result], launch: Launch) -> None:
        """Start the thread. `execute`: until that deadline, CLOCK_MONOTONIC ns, once all fences are signalled.

        The thread owns the fences' copies. Raise ResourceExhaustedTransient.
        """
        self._execute, self._fds, self._job = execute, list(launch.fds), launch.job
        self._launched_at, self._fenced_at = launch.launched_at, launch.fenced_at
        self._ending: Ending | None = None
        self._signal = FenceSignal()
        self.fence = self._signal.fence  #: the caller's
        try:
            threading.Thread(target=self._run, name="burst-fenced", daemon=True).start()
        except RuntimeError as error:
            os.close(self.fence)
            self._signal.fail()
            raise ResourceExhaustedTransient(f"no thread can be started for another execution: {error}") from error
        launch.fds.clear()

    def ending(self) -> Ending:
        """Return how it ended. Its fence has been signalled, or set to error."""
        assert self._ending is not None
        return self._ending

    def _run(self) -> None:
        try:
            result = _result_of(self._result)
        finally:
            close_all(self._fds)
        now = time.monotonic_ns()
        launched, fenced = (self._timing(result, since, now) for since in (self._launched_at, self._fenced_at))
        self._ending = Ending(ExecutionInfo(result.status, launched, fenced), result.message, result.cause)
        if result.status:
            self._signal.fail()
        else:
            self._signal.signal()

    def _result(self) -> Result:
        deadline, duration = self._job.wait.end, self._job.duration
        state = _awaited(self._fds, deadline)
        now = time.monotonic_ns()
        self._fenced_at = self._fenced_at or now
        if state == FenceState.ERROR:
            return Result(ErrorStatus.GENERAL_FAILURE, message=_FENCE_FAILED)
        if state == FenceState.ACTIVE:
            late = (now - (deadline or 0)) / 1e9
            text = f"it missed its deadline by {late * 1e3:.1f} ms while it waited for fences"
            raise MissedDeadlineTransient(text, cause=Cause("queued", late))
        ends = [deadline, None if duration is None else self._fenced_at + duration]
        return self._execute(min((end for end in ends if end is not None), default=None))

    def _timing(self, result: Result, since: int, now: int) -> Timing:
        if not (self._job.measure and since) or result.status:
            return NO_TIMING
        took = (now - since) // 1000
        return Timing(took if result.timing.time_on_device is None else result.timing.time_on_device, took)


def _result_of(execute: Callable[[], Result]) -> Result:
    """Return the result of a call, or a result without outputs where the call raises."""
    try:
        return execute()
    except StatusError as error:
        return error.as_result()
    except Exception as error:  # noqa: BLE001 (it is what this execution gets)
        return Result(ErrorStatus.GENERAL_FAILURE, message=f"{type(error).__name__}: {error}")


def follow_all(
    executions: list[FencedExecution],
    steps: Sequence[Step],
    delay: int,
    outputs: Callable[[], tuple[NDArray[Any], ...]],
) -> FencedExecution:
    """Join the executions of a model's steps, each of which waits for the one before; the fence is the last one's.

    delay: microseconds from before the first was launched until the last was. Raise ResourceExhaustedTransient.
    """
    try:
        fence = os.dup(executions[-1].fence)
    except OSError as error:
        raise no_descriptor(error) from error
    ask = partial(_ending_of_all, executions, steps, delay)
    return FencedExecution(fence, ask, outputs, watch=partial(_watch_all, executions))


def _ending_of_all(executions: list[FencedExecution], steps: Sequence[Step], delay: int) -> Ending:
    """Return the ending of the first execution that has failed, or one for all of them. Raise PeerDied."""
    found = []
    for step, execution in zip(steps, executions, strict=True):
        if not execution.done():  # a later one has missed the deadline first
            continue
        ending = execution.details()
        if ending.info.status:
            return ending._replace(message=f"operations {list(step.operations)}: {ending.message}")
        found.append(ending)
    fenced, launched = total_of([ending.info.fenced for ending in found]), found[-1].info.launched.time_in_driver
    whole = Timing(fenced.time_on_device, None if launched is None else launched + delay)
    return Ending(ExecutionInfo(ErrorStatus.NONE, whole, fenced), cause=found[-1].cause)


def _watch_all(executions: list[FencedExecution], poll: select.poll) -> None:
    """Make `poll` return when one of the devices dies."""
    for execution in executions:
        execution.watch(poll)


def failed_here(error: Exception) -> FencedExecution:
    """Return an execution that could not be launched: its fence is in error. Raise ResourceExhaustedTransient."""

    def execute() -> Result:
        raise error

    result, signal = _result_of(execute), FenceSignal()
    signal.fail()
    ending = Ending(ExecutionInfo(result.status, NO_TIMING, NO_TIMING), result.message, result.cause)
    return FencedExecution(signal.fence, lambda: ending, tuple)


def total_of(spent: Sequence[Timing]) -> Timing:
    """Return the times of all steps together; None where one of them was not measured."""
    columns = zip(*spent, strict=True)
    return Timing(*(None if None in times else sum(filter(None, times)) for times in columns))


def _awaited(fds: Sequence[int], deadline: int | None) -> FenceState:
    """Return SIGNALED when all are, ERROR when one is in error, ACTIVE at the deadline, CLOCK_MONOTONIC ns."""
    waiting = list(fds)
    while True:
        states = {fd: look(fd) for fd in waiting}
        if not {FenceState.ERROR, FenceState.UNKNOWN}.isdisjoint(states.values()):
            return FenceState.ERROR
        waiting = [fd for fd, state in states.items() if state == FenceState.ACTIVE]
        if not waiting:
            return FenceState.SIGNALED
        left = None if deadline is None else deadline - time.monotonic_ns()
        if left is not None and left <= 0:
            return FenceState.ACTIVE
        poll = select.poll()
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        poll.poll(None if left is None else -(-left // 1_000_000))


def check_fences(fds: Sequence[int]) -> None:
    """Raise InvalidArgument for a descriptor that is not a fence, or is in error."""
    for n, (fd, kind) in enumerate(zip(fds, kinds_of(fds), strict=True)):
        is_pending(n, fd, kind)


def launch_here(model: Model, job: Job, execute: Callable[[int | None], Result]) -> FencedExecution:
    """Run `execute`, until a deadline, CLOCK_MONOTONIC ns, in a thread that waits for the job's fences first.

    Raise InvalidArgument, MissedDeadlinePersistent, ResourceExhaustedTransient.
    """
    if missed := passed(job.wait.by):
        missed.raise_for_status()
    with duplicates(job.after) as fds:
        check_count(fds, len(job.after))
        check_fences(fds)
        thread = FencedThread(execute, Launch(job, fds, time.monotonic_ns()))
    return FencedExecution(thread.fence, thread.ending, partial(_views, model, job.request))


def _views(model: Model, request: Request) -> tuple[NDArray[Any], ...]:
    return output_views(model, request, output_shapes(model, request))


class FencedFallback(FencedExecution):
    """A fenced execution on a device, and another one in this process for when that fails.

    While the device succeeds it costs no thread. The other one begins when the device's failure is found out by a call
    of this, or when the fence is asked for while it is not known yet whether the device succeeds: for the device's own
    fence would be in error then. Its times count from the launch; from the fences only if these were signalled then, or
    else from when it finds them so.
    """

    def __init__(
        self, launched: FencedExecution, model: Model, launch: Launch, execute: Callable[[int | None], Result]
    ) -> None:
        """Start no thread yet; own the fences' copies. `execute`: until that deadline, after `launched` has ended."""
        self._launch = launch._replace(fds=list(launch.fds))
        launch.fds.clear()
        super().__init__(-1, launched.details, partial(_views, model, launch.job.request))
        self._launched, self._execute = launched, execute
        self._here: FencedExecution | None = None
        self._is_closed, self._beginning = False, threading.Lock()

    def _begin_here(self) -> FencedExecution:
        """Return what executes here. Raise ResourceExhaustedTransient."""
        with self._beginning:
            if self._here is None and not self._is_closed:
                thread = FencedThread(self._execute, self._launch)
                self._here = FencedExecution(thread.fence, thread.ending, self._outputs)
            return self._here or self._launched

    def _wait_there(self, timeout: float | None) -> FenceState:
        """Wait for the device. Once that has succeeded, so have the fences."""
        state = self._launched.wait(timeout)
        if state == FenceState.SIGNALED and self._launch.fds:
            with self._beginning:
                close_all(self._launch.fds)
        return state

    @property
    def fence(self) -> int:
        has_succeeded = self._wait_there(0) in {FenceState.SIGNALED, FenceState.UNKNOWN}
        return (self._launched if has_succeeded and self._here is None else self._begin_here()).fence

    def copied(self) -> int:
        """Return a copy of the fence of what is executing: the other one's only once that has begun."""
        return (self._here or self._launched).copied()

    def wait(self, timeout: float | None = None) -> FenceState:
        """Wait for the end of the one, and of the other if that failed. Raise ResourceExhaustedTransient."""
        end = earlier(timeout, None) if timeout else None
        if self._here is None and (state := self._wait_there(timeout)) != FenceState.ERROR:
            return state
        return self._begin_here().wait(timeout_until(end) if timeout else timeout)

    def watch(self, poll: select.poll) -> None:
        """Make `poll` return when the device dies, unless this process executes."""
        if self._here is None:
            self._launched.watch(poll)

    def details(self) -> Ending:
        if self._wait_there(0) != FenceState.ERROR:
            with suppress(*FAILURES):  # it died after it had signalled its fence
                return self._launched.details()
        return self._begin_here().details()

    def _outcome(self) -> Result:
        if self._wait_there(0) != FenceState.ERROR:
            with suppress(*FAILURES):
                return self._launched.result(0)
        return self._begin_here().result()

    def close(self) -> None:
        """Close the fence here. The executions go on."""
        with self._beginning:
            self._is_closed = True
            close_all(self._launch.fds)
            if self._here is not None:
                self._here.close()
            else:
                self._launched.close()  # else the thread waits for it
