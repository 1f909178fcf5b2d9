"""The burst of a model on several devices: a burst for each step, with the data left in place.

Inputs and what goes between steps lie in one memory, outputs in another; every step's burst knows both, so that what
one device writes the next one reads there. `run` executes the steps one after the other. With `submit`, frames stay in
order and do not wait for each other: while one device has frame k, the device before it has frame k + 1. Here, too,
there is no thread in the background: the thread that waits, or submits, takes each frame from one step to the next.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from burst import ErrorStatus, PeerDied, Request, Result, Timeout
from driver.client.executor import BurstParts
from driver.client.job import Job
from driver.client.session import FAILURES
from driver.client.workspace import shapes_of
from driver.deadlines import seconds_left
from driver.options import MOST_DEPTH
from driver.runtime.fallback import is_retryable, perform_with_fallback
from driver.runtime.frames import FrameBurst
from driver.runtime.places import ChainFrame, ChainMemory, StepBuffers
from driver.runtime.plan import free_everywhere

if TYPE_CHECKING:
    from burst import Memory
    from driver.client.completion import Completion
    from driver.client.executor import Executor
    from driver.client.surface import AnyBurst
    from driver.nn import Model
    from driver.options import Options
    from driver.runtime.fallback import CpuFallback
    from driver.runtime.frames import PendingFrame
    from driver.runtime.places import StepInputs, StepOutputs
    from driver.runtime.plan import PreparedStep, StepsExecutor


class StepBurst:
    """A step's burst, and what takes its place."""

    def __init__(self, prepared: PreparedStep, options: Options) -> None:
        """Open it where the step is executed now. Raise StatusError, PeerDied."""
        self.prepared, self._options = prepared, options._replace(policy="block")
        self.buffers = StepBuffers()
        self._life = prepared.model.life
        self._open(prepared.model.prepared)

    def _open(self, executor: Executor) -> None:
        self.burst = executor.open_burst(self._options, BurstParts(buffers=self.buffers))
        self._is_here = executor.remote is None

    def go_back(self) -> None:
        """Go back to the device, if the CPU took its place and the device is there again. No frame is in flight."""
        model = self.prepared.model
        if self._is_here and model.remote:
            old, life = self.burst, model.life
            with suppress(*FAILURES):  # else the CPU goes on
                self._open(model.prepared)
                self._life = life
                old.close()

    @property
    def device(self) -> str:
        """The place where the step is executed now."""
        return "cpu" if self._is_here else self.prepared.device

    def fell_back(self, error: BaseException, reads: StepInputs, writes: StepOutputs) -> bool:
        """Execute the step on the CPU, from now on if its device has died. False: it failed there, or may not."""
        model = self.prepared.model
        if model.fallback is None or self._is_here:
            return False
        cpu = model.replacement(error, self._life)
        local = cpu.prepared
        if isinstance(error, PeerDied):
            old = self.burst
            self._open(local)
            old.close()
        request = Request(reads.arguments, writes.arguments, (reads.memory, writes.memory))
        job = Job.of(request, loop_timeout=self._options.loop_timeout)
        return cpu.attempt(error, local, lambda executor: executor.perform(job)).status == ErrorStatus.NONE

    def perform(self, job: Job) -> Result:
        """Execute it in the burst, or on the CPU if that fails."""
        return perform_with_fallback(lambda: self.burst.perform(job), self._fallback_for, job)

    def _fallback_for(self, error: BaseException) -> CpuFallback | None:
        return None if self._is_here else self.prepared.model.fallback_for(error, self._life)


class Chain(FrameBurst[ChainFrame]):
    """A burst for each step: `run` from one thread, `submit` and futures from any. Made by `prepared.burst()`."""

    def __init__(self, planned: StepsExecutor, options: Options) -> None:
        """Use `prepared.burst()`. Raise StatusError, PeerDied, ValueError."""
        shapes = shapes_of(planned.model, options.input_shapes)
        self._planned = planned
        self._steps = [StepBurst(step, options) for step in planned.steps]
        steps, buffers = [step.step for step in planned.steps], [burst.buffers for burst in self._steps]
        self._frames = ChainMemory(
            planned.model, planned.temporaries, steps, buffers, shapes=shapes, depth=options.depth
        )
        self._launching = 0
        super().__init__(options, self._frames)

    @property
    def model(self) -> Model:
        return self._planned.model

    def _runs_here(self, timeout: float | None) -> bool:
        return timeout is None  # else a step that is late would be in the way of the next frame

    def _run(self, arrays: tuple[Any, ...], timeout: float | None) -> Result:
        frame = self._frames.frame(arrays)
        try:
            for n, step in enumerate(self._steps):
                step.go_back()
                step.buffers.aim(*frame.steps[n])
                try:
                    step.burst.run(timeout=timeout)
                except FAILURES as error:
                    if self._fall_back(n, frame, error):
                        break
        except BaseException:
            self._frames.put_aside(frame)
            raise
        return _result(frame)

    # ---- frames on their way

    def _launch(self, pending: PendingFrame[ChainFrame]) -> None:
        """Take it as far as it gets without waiting."""
        self._launching += 1
        if pending.at == 0 and len(self._in_flight) == 1:
            for step in self._steps:
                step.go_back()
        try:
            if not self._is_on_its_way(pending):
                self._finish(pending, None if pending.completion.is_done else _result(pending.frame))
        except BaseException:  # Ctrl-C, perhaps: no thread takes the frame on
            pending.completion.fail(CancelledError("the request was interrupted on its way"))
            self._finish(pending, None)
            raise
        finally:
            self._launching -= 1

    def _is_on_its_way(self, pending: PendingFrame[ChainFrame]) -> bool:
        """Send the frame to its next step; False if there is none, or none that does not end at once.

        The frame stays in flight until the step has been answered, whatever its deadline: so there is room for it.
        """
        while pending.at < len(self._steps) and not pending.completion.is_done:
            step = self._steps[pending.at]
            step.buffers.aim(*pending.frame.steps[pending.at])
            try:
                request = step.burst.source.admit((), None, pending.completion.deadline)
            except FAILURES as error:
                self._end_step(pending, error)
                continue
            assert request is not None
            if request.is_done:
                self._end_step(pending, request.failure)
                continue
            pending.request = request
            self._attended(request)
            request.when_done(partial(self._arrived, pending))
            return True
        return False

    def _end_step(self, pending: PendingFrame[ChainFrame], error: BaseException | None) -> None:
        """Note that a step has ended, and fall back if it failed. The caller holds the lock."""
        n = pending.at
        pending.at += 1
        if error is None or pending.completion.is_done:
            return
        try:
            if self._fall_back(n, pending.frame, error):
                pending.at = len(self._steps)
        except (Exception, CancelledError) as final:  # noqa: BLE001 (it is what the caller gets)
            pending.completion.fail(final)

    def _fall_back(self, n: int, frame: ChainFrame, error: BaseException) -> bool:
        """Execute step `n` on the CPU; or else the whole model, which is True. Raise what no fallback helps."""
        if self._is_closed or not is_retryable(error):
            raise error
        if self._steps[n].fell_back(error, *frame.steps[n]):
            return False
        if self._planned.fallback is None:
            raise error
        cpu = self._planned.fallback
        cpu.attempt(error, cpu.prepared, lambda executor: executor.perform(Job(frame.whole))).raise_for_status()
        return True

    def _arrived(self, pending: PendingFrame[ChainFrame], request: Completion) -> None:
        """Take the frame on, in the thread that is first to find out that its step's request is done."""
        with self._lock:
            if pending.request is not request:
                return
            pending.request = None
            self._end_step(pending, request.failure)
            self._launch(pending)
            is_outermost = not self._launching  # else this thread still holds the lock, and calls back later
        if is_outermost:
            self._call_back()

    def _collect(self) -> None:
        for step in self._steps if self._in_flight else ():
            step.burst.source.look()

    def _advance(self, pending: PendingFrame[ChainFrame], timeout: float | None) -> None:
        with self._lock:  # another thread that holds it may be taking the frame to its next step
            request = pending.request
        if request is not None:
            request.join(timeout)
            self._arrived(pending, request)

    # ----

    @property
    def steps(self) -> tuple[AnyBurst, ...]:
        """The burst of each step, to look at: their figures and traces."""
        return tuple(step.burst for step in self._steps)

    def perform(self, job: Job) -> Result:
        """Execute it step by step; its timing is the sum of the steps'."""
        try:
            self.advance(lambda: not self._in_flight, seconds_left(job.wait.end))
        except Timeout:
            return job.wait.given_up()
        with self._lock:
            self._check()
            job.wait.check("executing")
            ways = [step.perform for step in self._steps]
            return perform_with_fallback(lambda: self._planned.perform_by(ways, job), self._fallback_for_whole, job)

    def _fallback_for_whole(self, error: BaseException) -> CpuFallback | None:
        return self._planned.fallback if is_retryable(error) else None

    def free_memory(self, memory: Memory) -> None:
        """Let the devices of all steps unmap a pool of `execute`. Unknown memory is no error."""
        free_everywhere(memory, self.steps)

    def timeline(self, name: str, first_lane: int = 0) -> list[dict[str, Any]]:
        """Return the last requests of all steps, each in lanes of its own, under names of their own."""
        del name
        lanes = ((step, n, first_lane + n * MOST_DEPTH) for n, step in enumerate(self._steps))
        events = (step.burst.timeline(f"step {n}, {step.device}", lane) for step, n, lane in lanes)
        return [event for its in events for event in its]

    def stats(self) -> dict[str, Any]:
        """Return counts of whole executions, and `Burst.stats` of each step with its device and operations."""
        steps = [
            {"device": step.device, "operations": step.prepared.step.operations, **step.burst.stats()}
            for step in self._steps
        ]
        return self._counts() | {
            "recoveries": sum(step["recoveries"] for step in steps),
            "memories_sent": sum(step["memories_sent"] for step in steps),
            "copied_bytes": {
                "bulk": self._frames.copied + sum(step["copied_bytes"]["bulk"] for step in steps),
                "control": sum(step["copied_bytes"]["control"] for step in steps),
            },
            "fallbacks": self._planned.fallback.report() if self._planned.fallback else None,
            "steps": steps,
        }

    def _end(self) -> None:
        for step in self._steps:
            step.burst.close()


def _result(frame: ChainFrame) -> Result:
    return Result(ErrorStatus.NONE, frame.outputs.arrays(()))
