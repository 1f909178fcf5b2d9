"""Fenced executions that end in this process: on the CPU here, or here in the place of a device that has failed."""

from __future__ import annotations

import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from burst import (
    ErrorStatus,
    InvalidArgument,
    MissedDeadlineTransient,
    ResourceExhaustedTransient,
    Result,
    StatusError,
    Timing,
)
from burst.channel import close_all
from burst.messages import NO_TIMING, Cause
from driver.client.fenced import ExecutionInfo, FencedExecution, FencedOptions, duplicates, output_shapes
from driver.client.workspace import output_views
from driver.deadlines import passed
from driver.protocol.fences import FenceSignal, FenceState, kind_of, look

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from burst import Request
    from driver.client.fenced import Waitable
    from driver.nn import Model
    from driver.runtime.partition import Step

_FENCE_FAILED = "a fence that it waited for was set to error"


class LaunchedHere:
    """An execution in a thread of its own, which waits for its fences, executes, and signals the fence that it is."""

    def __init__(self, execute: Callable[[int | None], Result], fds: list[int], options: FencedOptions) -> None:
        """`execute`: until that deadline, CLOCK_MONOTONIC ns, once all fences `fds` are signalled: it owns these.

        Raises ResourceExhaustedTransient.
        """
        self._execute, self._fds, self._options = execute, list(fds), options
        self._launched_at, self._fenced_at = time.monotonic_ns(), 0
        self._told: tuple[ExecutionInfo, str, Cause] | None = None
        try:
            self._signal = FenceSignal()
        except OSError as error:
            raise ResourceExhaustedTransient(f"no file descriptors are left for another fence: {error}") from error
        self.fence = self._signal.fence  #: the caller's
        try:
            threading.Thread(target=self._run, name="burst-fenced", daemon=True).start()
        except RuntimeError as error:
            os.close(self.fence)
            self._signal.fail()
            raise ResourceExhaustedTransient(f"no thread can be started for another execution: {error}") from error

    # ---- what `FencedExecution` asks

    def ask(self, number: int) -> tuple[ExecutionInfo, str, Cause]:
        """How it ended. Its fence has been signalled, or set to error."""
        del number
        assert self._told is not None
        return self._told

    def forget(self, number: int) -> None:
        """There is nothing to free: it ends with the last who holds it."""

    def watch(self, poll: select.poll) -> None:
        """It dies with this process."""

    # ---- in its thread

    def _run(self) -> None:
        try:
            result = self._result()
        except StatusError as error:
            result = error.as_result()
        except Exception as error:  # noqa: BLE001 (it is what this execution gets)
            result = Result(ErrorStatus.GENERAL_FAILURE, message=f"{type(error).__name__}: {error}")
        finally:
            close_all(self._fds)
        now = time.monotonic_ns()
        launched, fenced = (self._timing(result, since, now) for since in (self._launched_at, self._fenced_at))
        self._told = ExecutionInfo(result.status, launched, fenced), result.message, result.cause
        if result.status:
            self._signal.fail()
        else:
            self._signal.signal()

    def _result(self) -> Result:
        deadline, duration = self._options.deadline, self._options.duration
        state = _awaited(self._fds, deadline)
        self._fenced_at = time.monotonic_ns()
        if state == FenceState.ERROR:
            return Result(ErrorStatus.GENERAL_FAILURE, message=_FENCE_FAILED)
        if state == FenceState.ACTIVE:
            late = (self._fenced_at - (deadline or 0)) / 1e9
            text = f"it missed its deadline by {late * 1e3:.1f} ms while it waited for fences"
            raise MissedDeadlineTransient(text, cause=Cause("queued", late))
        ends = [deadline, None if duration is None else self._fenced_at + duration]
        return self._execute(min((end for end in ends if end is not None), default=None))

    def _timing(self, result: Result, since: int, now: int) -> Timing:
        if not (self._options.measure and since) or result.status:
            return NO_TIMING
        took = (now - since) // 1000
        return Timing(took if result.timing.time_on_device is None else result.timing.time_on_device, took)


class StepsLaunched(NamedTuple):
    """The executions of a model's steps, each of which waits for the one before."""

    executions: list[FencedExecution]
    steps: Sequence[Step]
    delay: int  #: microseconds from before the first was launched until the last was

    def ask(self, number: int) -> tuple[ExecutionInfo, str, Cause]:
        """As the first one that has failed, or all of them one after the other. Raises PeerDied."""
        del number
        found = []
        for step, execution in zip(self.steps, self.executions, strict=True):
            if not execution.done():  # a later one has missed the deadline first
                continue
            info, text, cause = execution.details()
            if info.status:
                return info, f"operations {list(step.operations)}: {text}", cause
            found.append((info, text, cause))
        infos = [info for info, _, _ in found]
        fenced, launched = _sum([info.fenced for info in infos]), infos[-1].launched.time_in_driver
        whole = Timing(fenced.time_on_device, None if launched is None else launched + self.delay)
        return ExecutionInfo(ErrorStatus.NONE, whole, fenced), "", found[-1][2]

    def forget(self, number: int) -> None:
        """Each execution is forgotten with its object."""

    def watch(self, poll: select.poll) -> None:
        """Makes `poll` return when one of the devices dies."""
        for execution in self.executions:
            execution.watch(poll)


def follow_all(
    executions: list[FencedExecution],
    steps: Sequence[Step],
    delay: int,
    outputs: Callable[[], tuple[NDArray[Any], ...]],
) -> FencedExecution:
    """All of them as one, whose fence is that of the last one; `delay` as in `StepsLaunched`.

    Raises ResourceExhaustedTransient.
    """
    try:
        fence = os.dup(executions[-1].fence)
    except OSError as error:
        raise ResourceExhaustedTransient(f"no file descriptors are left for another fence: {error}") from error
    return FencedExecution(StepsLaunched(executions, steps, delay), 0, fence, outputs)


def failed_here(error: BaseException) -> FencedExecution:
    """One that could not be launched: its fence is in error."""

    def execute(_: int | None) -> Result:
        raise error

    launched = LaunchedHere(execute, [], FencedOptions(False, None, None))
    return FencedExecution(launched, 0, launched.fence, tuple)


def _sum(timings: list[Timing]) -> Timing:
    parts = [[t[n] for t in timings] for n in range(2)]
    return Timing(*(None if None in part else sum(p for p in part if p is not None) for part in parts))


def _awaited(fds: Sequence[int], deadline: int | None) -> FenceState:
    """SIGNALED when all of them are, ERROR when one is in error, ACTIVE at the deadline, CLOCK_MONOTONIC ns."""
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
    """Raises InvalidArgument for a descriptor that is not a fence, or is in error."""
    for n, fd in enumerate(fds):
        if not (kind := kind_of(fd)):
            raise InvalidArgument(f"wait_for: fence {n} is not a fence: fences are pipes, eventfds and sync files")
        if look(fd) in {FenceState.ERROR, FenceState.UNKNOWN}:
            raise InvalidArgument(f"wait_for: fence {n}, {kind}, is already in error")


def launch_here(
    model: Model,
    request: Request,
    wait_for: Sequence[Waitable | None],
    options: FencedOptions,
    execute: Callable[[int | None], Result],
    *,
    may_have_failed: bool = False,
) -> FencedExecution:
    """`execute`, until a deadline, CLOCK_MONOTONIC ns, in a thread that waits for these fences first.

    `may_have_failed`: a device has looked at the fences already. Raises InvalidArgument, MissedDeadlinePersistent,
    ResourceExhaustedTransient.
    """
    if missed := passed(options.deadline):
        missed.raise_for_status()
    with duplicates(wait_for) as fds:
        if len(fds) < len(wait_for):
            raise InvalidArgument(f"wait_for: {len(wait_for) - len(fds)} of {len(wait_for)} fences are null")
        if not may_have_failed:
            check_fences(fds)
        launched = LaunchedHere(execute, fds, options)
        fds[:] = ()  # they are the thread's
    shapes = output_shapes(model, request)
    return FencedExecution(launched, 0, launched.fence, lambda: output_views(model, request, shapes))
