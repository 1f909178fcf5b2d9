"""The burst of a model on several devices: a burst for each step, with the data left in place.

Inputs and what goes between steps lie in one memory, outputs in another; every step's burst knows both, so that what
one device writes the next one reads there. `run` executes the steps one after the other. With `submit`, frames stay in
order and do not wait for each other: while one device has frame k, the device before it has frame k + 1. Here, too,
there is no thread in the background: the thread that waits, or submits, takes each frame from one step to the next.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from burst import Busy, ErrorStatus, GeneralFailure, PeerDied, Result, Timeout
from driver.client.burst import Burst
from driver.client.future import Future
from driver.client.pipeline import Pipeline
from driver.client.prepared_model import RemotePreparedModel
from driver.client.session import FAILURES
from driver.deadlines import nanoseconds
from driver.errors import DriverError
from driver.runtime.fallback import is_retryable
from driver.runtime.local import LocalBurst
from driver.runtime.places import ChainMemory, StepBuffers
from fmq.closing import Closing

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable

    from numpy.typing import NDArray

    from burst import Memory, Request
    from driver.client.future import ResultSource
    from driver.options import Options
    from driver.runtime.places import ChainFrame, StepInputs, StepOutputs
    from driver.runtime.plan import PlannedModel, PreparedStep


class StepBurst:
    """A step's burst, and what takes its place."""

    def __init__(self, prepared: PreparedStep, options: Options) -> None:
        self.prepared, self._options, self.buffers = prepared, options._replace(policy="block"), StepBuffers()
        self._life, model = prepared.model.life, prepared.model.prepared
        self.burst: Burst | LocalBurst
        self._pipeline: Pipeline | None = None
        if isinstance(model, RemotePreparedModel):
            model.check_quarantine()
            self._pipeline = Pipeline(model, self._options, self.buffers)
            self.burst = Burst(self._pipeline)
        else:
            self.burst = LocalBurst(model, self._options, self.buffers)

    @property
    def device(self) -> str:
        """Where the step is executed now."""
        return "cpu" if isinstance(self.burst, LocalBurst) else self.prepared.device

    def look(self) -> None:
        """Takes the results that have arrived, and calls back."""
        if self._pipeline:
            self._pipeline.look()

    def fell_back(self, error: BaseException, reads: StepInputs, writes: StepOutputs) -> bool:
        """Execute the step on the CPU, unless it failed there. From now on, if its device has died."""
        model = self.prepared.model
        if model.fallback is None or isinstance(self.burst, LocalBurst):
            return False
        local, buffers = model.replacement(error, self._life), StepBuffers()
        buffers.aim(reads, writes)
        burst = LocalBurst(local, self._options, buffers)
        if isinstance(error, PeerDied):
            old, self.burst = self.burst, LocalBurst(local, self._options, self.buffers)
            old.close()
            self._pipeline = None
        try:
            burst.run()
        except FAILURES:
            return False
        return True


class FrameFuture(Future):
    """A frame on its way through the steps."""

    __slots__ = ("at", "frame", "request")

    def __init__(self, source: ResultSource, frame: ChainFrame) -> None:
        super().__init__(source)
        self.frame, self.at = frame, 0  #: at: the number of its step
        self.request: Future | None = None  #: of the step that is being executed


class Chain(Closing):
    """As `driver.Burst`: `run` from one thread, `submit` and futures from any. Made by `prepared.burst()`.

    There is no policy "latest", and requests on pools of one's own go to `prepared.execute`.
    """

    def __init__(self, planned: PlannedModel, options: Options) -> None:
        if options.policy == "latest":
            raise ValueError("policy='latest': a model on several devices takes 'block' or 'reject'")
        if options.input_shapes is not None:
            raise ValueError("input_shapes: a model on several devices knows the shapes of its inputs; leave it out")
        for n, i in enumerate(planned.model.main.inputs):
            if not planned.model.main.operands[i].is_known:
                raise ValueError(f"input {n} has an open shape, and bursts on several devices need to know it: use run")
        self._planned, self._options = planned, options
        self._steps = [StepBurst(step, options) for step in planned.steps]
        steps, buffers = [step.step for step in planned.steps], [burst.buffers for burst in self._steps]
        self._memory = ChainMemory(planned.model, planned.temporaries, steps, buffers, options.depth)
        self._lock = threading.RLock()
        self._in_flight: deque[FrameFuture] = deque()
        self._finished: deque[FrameFuture] = deque()  # their callbacks are due
        self._runs = self._drops = 0
        self._is_closed = False

    @property
    def inputs(self) -> tuple[NDArray[Any] | None, ...]:
        """Arrays of the next request, to be written in place."""
        return self._memory.inputs

    def run(self, *arrays: Any, timeout: float | None = None) -> Result:
        """As `Burst.run`; `timeout` is for all steps together."""
        with self._lock:
            self._check()
            if not self._in_flight:
                return self._run(arrays, timeout)
        return self.submit(*arrays, timeout=timeout).result(timeout)

    def _run(self, arrays: tuple[Any, ...], timeout: float | None) -> Result:
        end = None if timeout is None else time.monotonic() + timeout
        frame = self._memory.frame(arrays)
        try:
            for n, step in enumerate(self._steps):
                step.buffers.aim(*frame.steps[n])
                try:
                    step.burst.run(timeout=time_left(end, timeout))
                except FAILURES as error:
                    if self._fall_back(n, frame, error):
                        break
        except BaseException:
            self._memory.put_aside(frame)
            raise
        self._runs += 1
        return Result(ErrorStatus.NONE, frame.outputs.arrays(()))

    # ---- frames on their way

    def submit(self, *arrays: Any, timeout: float | None = None, deadline: float | None = None) -> Future:
        """As `Burst.submit`, with policy "block" or "reject"."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                self._check()
                self._collect()
                if len(self._in_flight) < self._options.depth:
                    future = self._admit(arrays, deadline)
                    break
                oldest = self._in_flight[0]
                if self._options.policy == "reject":
                    self._drops += 1
                    raise Busy(f"depth={self._options.depth} requests are in flight, and policy is 'reject'")
            self._wait(partial(self._has_left, oldest), oldest, time_left(end, timeout))
        self._call_back()
        return future

    def _admit(self, arrays: tuple[Any, ...], deadline: float | None) -> FrameFuture:
        """Under the lock: the frame goes to its first step."""
        frame = self._memory.frame(arrays)
        self._memory.lend(frame)
        future = FrameFuture(self, frame)
        future.deadline = None if deadline is None else nanoseconds(deadline)
        self._in_flight.append(future)
        self._go_on(future)
        return future

    def _go_on(self, future: FrameFuture) -> None:
        """Under the lock: as far as it gets without waiting."""
        try:
            if not self._is_on_its_way(future):
                self._finish(future)
        except BaseException:  # Ctrl-C, perhaps: no thread takes the frame on
            future.fail(CancelledError("the request was interrupted on its way"))
            self._finish(future)
            raise

    def _is_on_its_way(self, future: FrameFuture) -> bool:
        """Sends the frame to its next step; False if there is none, or none that does not end at once."""
        while future.at < len(self._steps) and not future.done():
            step = self._steps[future.at]
            step.buffers.aim(*future.frame.steps[future.at])
            try:
                request = step.burst.submit(deadline=None if future.deadline is None else future.deadline / 1e9)
            except FAILURES as error:
                self._end_step(future, error)
                continue
            if not request.done():
                future.request = request
                request.add_done_callback(partial(self._arrived, future))
                return True
            self._end_step(future, request.exception(0))
        return False

    def _end_step(self, future: FrameFuture, error: BaseException | None) -> None:
        """Under the lock: a step has ended, and falls back if it failed."""
        n = future.at
        future.at += 1
        if error is None or future.done():
            return
        try:
            if self._fall_back(n, future.frame, error):
                future.at = len(self._steps)
        except (Exception, CancelledError) as final:  # noqa: BLE001 (it is what the caller gets)
            future.fail(final)

    def _fall_back(self, n: int, frame: ChainFrame, error: BaseException) -> bool:
        """Execute step `n` on the CPU; or else the whole model, which is True. Raises what no fallback helps."""
        if self._is_closed or not is_retryable(error):
            raise error
        if self._steps[n].fell_back(error, *frame.steps[n]):
            return False
        if self._planned.fallback is None:
            raise error
        self._planned.fallback.take_over(error).execute(frame.whole).raise_for_status()
        return True

    def _arrived(self, future: FrameFuture, request: Future) -> None:
        """A step's request is done; the thread that finds that out first takes the frame on."""
        with self._lock:
            if future.request is not request:
                return
            future.request = None
            self._end_step(future, request.exception(0))
            self._go_on(future)
        self._call_back()

    def _finish(self, future: FrameFuture) -> None:
        """Under the lock: there are no more steps for the frame."""
        if future not in self._in_flight:  # a callback has finished it, or the burst was closed
            return
        if not future.done():
            self._runs += 1
            future.finish(Result(ErrorStatus.NONE, future.frame.outputs.arrays(())))
        self._in_flight.remove(future)
        self._memory.take_back(future.frame)
        self._finished.append(future)

    def _collect(self) -> None:
        """Under the lock: takes on the frames whose results have arrived."""
        for step in self._steps if self._in_flight else ():
            step.look()

    def _has_left(self, future: FrameFuture) -> bool:
        return future not in self._in_flight

    def _wait(self, until: Callable[[], bool], future: FrameFuture, timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not until():
            with self._lock:  # another thread that holds it may be taking the frame to its next step
                request = future.request
            if request is not None:
                request.exception(time_left(end, timeout))
                self._arrived(future, request)

    def wait_for(self, future: Future, timeout: float | None) -> None:
        """Until it is done. Raises Timeout."""
        assert isinstance(future, FrameFuture)
        self._wait(future.done, future, timeout)
        self._call_back()

    def drop(self, future: Future) -> bool:
        """Cancels it, unless it is done."""
        with self._lock:
            if future.done():
                return False
            future.fail(CancelledError())
            self._drops += 1
        future.call_back()
        return True

    def _call_back(self) -> None:
        while self._finished:
            with suppress(IndexError):  # another thread took the last one
                self._finished.popleft().call_back()

    def _check(self) -> None:
        if self._is_closed:
            raise ValueError("this burst is closed; open another")

    # ---- for asyncio

    def arrival(self, future: Future) -> asyncio.Future[None]:
        """Done in the running loop when `future` is."""
        assert isinstance(future, FrameFuture)
        return asyncio.ensure_future(self._follow(future))

    async def _follow(self, future: FrameFuture) -> None:
        while not future.done():
            request = future.request
            if request is None:
                await asyncio.sleep(0)  # another thread takes it on
                continue
            await asyncio.shield(asyncio.ensure_future(_settled(request)))  # without the step, a task can be cancelled
            self._arrived(future, request)
        self._call_back()

    async def run_async(self, *arrays: Any) -> Result:
        """As `run`, for asyncio. Cancelling the task drops the result when it comes."""
        while True:
            with self._lock:
                oldest = self._in_flight[0] if len(self._in_flight) >= self._options.depth else None
                if oldest is None or self._options.policy == "reject":
                    future = self.submit(*arrays)
                    break
            await asyncio.shield(asyncio.ensure_future(_settled(oldest)))
        return await future

    async def stream(self, frames: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Result]:
        """As `Burst.stream`, for an ordinary iterable."""
        if not hasattr(frames, "__iter__"):
            raise TypeError("frames: a model on several devices takes an ordinary iterable; use submit for others")
        pending: deque[Future] = deque()
        try:
            for frame in frames:
                if len(pending) >= self._options.depth:
                    yield await pending.popleft()
                pending.append(self.submit(*(frame if isinstance(frame, tuple) else (frame,))))
            while pending:
                yield await pending.popleft()
        finally:
            for future in pending:
                future.cancel()

    # ----

    @property
    def steps(self) -> tuple[Burst | LocalBurst, ...]:
        """The burst of each step, to look at: their figures and traces."""
        return tuple(step.burst for step in self._steps)

    def execute(self, request: Request, **options: Any) -> NoReturn:
        """Not here. Raises DriverError."""
        del request, options
        raise DriverError("a burst on several devices has memory of its own; give the request to prepared.execute")

    def free_memory(self, memory: Memory) -> None:
        """There is none but our own."""

    def trace(self, path: str) -> NoReturn:
        """Not of all together. Raises DriverError."""
        raise DriverError(f"path={path!r}: each step has a trace of its own: burst.steps[0].trace(path)")

    def stats(self) -> dict[str, Any]:
        """Counts of whole executions, and `Burst.stats` of each step with its device and operations."""
        steps = [
            {"device": step.device, "operations": step.prepared.step.operations, **step.burst.stats()}
            for step in self._steps
        ]
        return {
            "runs": {"burst": self._runs, "plain": 0},
            "in_flight": len(self._in_flight),
            "drops": self._drops,
            "copied_bytes": {
                "bulk": self._memory.copied + sum(step["copied_bytes"]["bulk"] for step in steps),
                "control": sum(step["copied_bytes"]["control"] for step in steps),
            },
            "fallbacks": self._planned.fallback.report() if self._planned.fallback else None,
            "steps": steps,
        }

    def close(self) -> None:
        """Ends the bursts of all steps; threads and tasks that wait get GeneralFailure."""
        with self._lock:
            self._is_closed = True
            for step in self._steps:
                step.burst.close()
            for future in list(self._in_flight):
                future.fail(GeneralFailure("this burst was closed before the result came"))
                self._finished.append(future)
            self._in_flight.clear()
            self._memory.close()
        self._call_back()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a burst cannot be pickled: pickle the model, and compile it where it is unpickled")


async def _settled(future: Future) -> None:
    """When it is done, with a result or an error."""
    with suppress(Exception, CancelledError):
        await future


def time_left(end: float | None, timeout: float | None) -> float | None:
    """Seconds until `end`; `timeout` is what was asked for. Raises Timeout when there are none."""
    if end is None:
        return None
    left = end - time.monotonic()
    if left <= 0 and timeout:
        raise Timeout(f"no result within {timeout} s; the burst stays usable")
    return max(0.0, left)
