"""The burst of a model on several devices: a burst for each step, with the data left in place.

Inputs and what goes between steps lie in one memory, outputs in another; every step's burst knows both, so that what
one device writes the next one reads there. `run` executes the steps one after the other. With `submit`, frames overtake
nobody and wait for nobody: while one device has frame k, the one before it has frame k + 1. Nobody works in the
background here either: whoever waits, or submits, takes each frame from one step to the next.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self

from burst import Busy, ErrorStatus, GeneralFailure, Result, Timeout
from driver.buffers import Buffers
from driver.errors import DriverError
from driver.future import Future
from driver.runtime.fallback import FAILURES, is_retryable
from driver.runtime.link import Link
from driver.runtime.places import Frame, StepInputs, with_temporaries

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable

    from numpy.typing import NDArray

    from burst import Memory, Request
    from driver.options import Options
    from driver.runtime.local import LocalBurst
    from driver.runtime.plan import Planned
    from driver.session import Burst

_CLOSED = "this burst is closed; open another"


class Chain:
    """As `driver.Burst`: `run` from one thread, `submit` and futures from any. Made by `prepared.burst()`.

    There is no policy "latest", and requests on pools of one's own go to `prepared.execute`.
    """

    def __init__(self, planned: Planned, options: Options) -> None:
        if options.policy == "latest":
            raise ValueError("policy='latest': a model on several devices takes 'block' or 'reject'")
        if options.input_shapes is not None:
            raise ValueError("input_shapes: a model on several devices knows the shapes of its inputs; leave it out")
        self._planned, self._options = planned, options
        self._links = [Link(part, options) for part in planned.parts]
        graph = with_temporaries(planned.model, planned.temporaries).main
        shapes = tuple(graph.operands[i].dimensions for i in graph.inputs)
        self._buffers = Buffers(with_temporaries(planned.model, planned.temporaries), shapes, options.depth)
        self._frames: dict[Any, Frame] = {}
        self._lock = threading.RLock()
        self._flights: deque[_Flight] = deque()
        self._finished: deque[_Flight] = deque()
        self._late: list[Frame] = []  # that nobody waits for, and a device may still be writing to
        self._runs = self._drops = self._copied = 0
        self._is_closed = False

    @property
    def inputs(self) -> tuple[NDArray[Any] | None, ...]:
        """Arrays of the next request, to be written in place."""
        return self._buffers.inputs.arrays[: len(self._planned.model.main.inputs)]

    def run(self, *arrays: Any, timeout: float | None = None) -> Result:
        """As `Burst.run`; `timeout` is for all steps together."""
        with self._lock:
            self._check()
            if not self._flights:
                return self._run(arrays, timeout)
        return self.submit(*arrays, timeout=timeout).result(timeout)

    def _run(self, arrays: tuple[Any, ...], timeout: float | None) -> Result:
        end = None if timeout is None else time.monotonic() + timeout
        self._fill(arrays)
        frame = self._frame()
        try:
            for link, (reads, writes) in zip(self._links, frame.sets, strict=True):
                link.aimed.aim(reads, writes)
                try:
                    link.burst.run(timeout=_left(end, timeout))
                except FAILURES as error:
                    if self._instead(link, frame, error):
                        break
        except BaseException:
            self._put_aside(frame)
            raise
        self._runs += 1
        return Result(ErrorStatus.NONE, frame.outputs.arrays(()))

    def _fill(self, arrays: tuple[Any, ...]) -> None:
        if arrays:
            inputs = self._buffers.inputs
            self._copied += StepInputs(inputs.memory, (), self.inputs).fill(arrays)

    def _frame(self) -> Frame:
        """Of the next request."""
        for late in [late for late in self._late if not late.is_in_use]:
            late.outputs.is_busy = False
            self._late.remove(late)
        inputs, outputs = self._buffers.inputs, self._buffers.free_outputs()
        frame = self._frames.get((inputs, outputs))
        if frame is None:
            steps = [part.step for part in self._planned.parts]
            frame = Frame(self._planned.model, self._planned.temporaries, steps, inputs, outputs)
            self._frames[inputs, outputs] = frame
            for link, (_, writes) in zip(self._links, frame.sets, strict=True):
                link.aimed.know(writes)
        return frame

    def _put_aside(self, frame: Frame) -> None:
        """Its outputs are nobody's until no step writes to them any more; its inputs serve the next request.

        A step that is late for this frame comes before the same step of the next one, in the same burst.
        """
        frame.outputs.is_busy = True
        self._late.append(frame)

    def _instead(self, link: Link, frame: Frame, error: BaseException) -> bool:
        """The step on the CPU, or else the whole: True. Raises what cannot be helped."""
        if self._is_closed or not is_retryable(error):
            raise error
        if link.did_instead(error, *frame.sets[self._links.index(link)]):
            return False
        if self._planned.spare is None:
            raise error
        self._planned.spare.after(error).execute(frame.whole).raise_for_status()
        return True

    # ---- several in flight

    def submit(self, *arrays: Any, timeout: float | None = None) -> Future:
        """As `Burst.submit`, with policy "block" or "reject"."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                self._check()
                self._collect()
                if len(self._flights) < self._options.depth:
                    flight = self._admit(arrays)
                    break
                oldest = self._flights[0]
                if self._options.policy == "reject":
                    self._drops += 1
                    raise Busy(f"depth={self._options.depth} requests are in flight, and policy is 'reject'")
            self._wait(partial(self._has_landed, oldest), oldest, _left(end, timeout))
        self._call_back()
        return flight

    def _admit(self, arrays: tuple[Any, ...]) -> _Flight:
        """Under the lock: the frame sets out."""
        self._fill(arrays)
        frame = self._frame()
        self._buffers.next_inputs()
        frame.outputs.is_busy = True
        flight = _Flight(self, frame)
        self._flights.append(flight)
        self._go(flight)
        return flight

    def _go(self, flight: _Flight) -> None:
        """Under the lock: as far as it gets without waiting."""
        while flight.at < len(self._links) and not flight.done():
            link = self._links[flight.at]
            link.aimed.aim(*flight.frame.sets[flight.at])
            try:
                step = link.burst.submit()
            except FAILURES as error:
                self._after(flight, error)
                continue
            if not step.done():
                flight.step = step
                step.add_done_callback(partial(self._arrived, flight))
                return
            self._after(flight, step.exception(0))
        self._land(flight)

    def _after(self, flight: _Flight, error: BaseException | None) -> None:
        """Under the lock: a step has ended."""
        link = self._links[flight.at]
        flight.at += 1
        if error is None or flight.done():
            return
        try:
            if self._instead(link, flight.frame, error):
                flight.at = len(self._links)
        except (Exception, CancelledError) as final:  # noqa: BLE001 (it is what the caller gets)
            flight.fail(final)

    def _arrived(self, flight: _Flight, step: Future) -> None:
        """A step is done; whoever finds that out first takes the frame on."""
        with self._lock:
            if flight.step is not step:
                return
            flight.step = None
            self._after(flight, step.exception(0))
            self._go(flight)
        self._call_back()

    def _land(self, flight: _Flight) -> None:
        """Under the lock: there are no more steps for it."""
        frame = flight.frame
        if not flight.done():
            self._runs += 1
            flight.finish(Result(ErrorStatus.NONE, frame.outputs.arrays(())))
        self._flights.remove(flight)
        self._buffers.give_back(frame.inputs)
        frame.outputs.is_busy = False
        if frame.is_in_use:
            self._put_aside(frame)
        self._finished.append(flight)

    def _collect(self) -> None:
        """Under the lock: takes on whatever has arrived."""
        for link in self._links if self._flights else ():
            link.look()

    def _has_landed(self, flight: _Flight) -> bool:
        return flight not in self._flights

    def _wait(self, until: Callable[[], bool], flight: _Flight, timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not until():
            with self._lock:  # who has it takes the frame to its next step, perhaps
                step = flight.step
            if step is not None:
                step.exception(_left(end, timeout))
                self._arrived(flight, step)

    def wait_for(self, future: Future, timeout: float | None) -> None:
        """Until it is done. Raises Timeout."""
        assert isinstance(future, _Flight)
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

    # ---- for asyncio

    def arrival(self, future: Future) -> asyncio.Future[None]:
        """Done in the running loop when `future` is."""
        assert isinstance(future, _Flight)
        return asyncio.ensure_future(self._follow(future))

    async def _follow(self, flight: _Flight) -> None:
        while not flight.done():
            step = flight.step
            if step is None:
                await asyncio.sleep(0)  # another thread takes it on
                continue
            await asyncio.shield(asyncio.ensure_future(_settled(step)))  # a step is not given up with its task
            self._arrived(flight, step)
        self._call_back()

    async def run_async(self, *arrays: Any) -> Result:
        """As `run`, for asyncio. Cancelling the task drops the result when it comes."""
        while True:
            with self._lock:
                oldest = self._flights[0] if len(self._flights) >= self._options.depth else None
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
        return tuple(link.burst for link in self._links)

    def execute(self, request: Request, **terms: Any) -> NoReturn:
        """Not here. Raises DriverError."""
        del request, terms
        raise DriverError("a burst on several devices has memory of its own; give the request to prepared.execute")

    def free_memory(self, memory: Memory) -> None:
        """There is none but our own."""

    def trace(self, path: str) -> NoReturn:
        """Not of all together. Raises DriverError."""
        raise DriverError(f"path={path!r}: each step has a trace of its own: burst.steps[0].trace(path)")

    def stats(self) -> dict[str, Any]:
        """Counts of whole executions, and `Burst.stats` of each step with its device and operations."""
        steps = [
            {"device": link.device, "operations": link.part.step.operations, **link.burst.stats()}
            for link in self._links
        ]
        return {
            "runs": {"burst": self._runs, "plain": 0},
            "in_flight": len(self._flights),
            "drops": self._drops,
            "copied_bytes": {
                "bulk": self._copied + sum(step["copied_bytes"]["bulk"] for step in steps),
                "control": sum(step["copied_bytes"]["control"] for step in steps),
            },
            "fallbacks": self._planned.spare.report() if self._planned.spare else None,
            "steps": steps,
        }

    def _check(self) -> None:
        if self._is_closed:
            raise ValueError(_CLOSED)

    def close(self) -> None:
        """Ends the bursts of all steps; who still waits is told."""
        with self._lock:
            self._is_closed = True
            for link in self._links:
                link.burst.close()
            for flight in list(self._flights):
                flight.fail(GeneralFailure("this burst was closed before the result came"))
                self._finished.append(flight)
            self._flights.clear()
            self._frames.clear()
            self._late.clear()
            self._buffers.close()
        self._call_back()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a burst cannot be pickled: pickle the model, and compile it where it is unpickled")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Flight(Future):
    """A frame on its way."""

    __slots__ = ("at", "frame", "step")

    def __init__(self, chain: Chain, frame: Frame) -> None:
        super().__init__(chain)
        self.frame, self.at = frame, 0
        self.step: Future | None = None  #: that is being executed


async def _settled(future: Future) -> None:
    """When it is done, whatever came of it."""
    with suppress(Exception, CancelledError):
        await future


def _left(end: float | None, timeout: float | None) -> float | None:
    """Seconds. Raises Timeout when there are none."""
    if end is None:
        return None
    left = end - time.monotonic()
    if left <= 0 and timeout:
        raise Timeout(f"no result within {timeout} s; the burst stays usable")
    return max(0.0, left)
