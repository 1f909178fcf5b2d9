"""The burst of a model on several devices: a burst for each step, with the data left in place.

Inputs and what goes between steps lie in one memory, outputs in another; every step's burst knows both, so that what
one device writes the next one reads there. `run` executes the steps one after the other. With `submit`, frames overtake
nobody and wait for nobody: while one device has frame k, the one before it has frame k + 1. Nobody works in the
background here either: whoever waits, or submits, takes each frame from one step to the next.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, Self

from burst import ErrorStatus, GeneralFailure, Result
from driver.client.session import FAILURES
from driver.errors import DriverError
from driver.runtime.flights import Flight, Flights, time_left

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Iterable

    from burst import Memory, Request
    from driver.client.burst import Burst
    from driver.client.future import Future
    from driver.runtime.local import LocalBurst


class Chain(Flights):
    """As `driver.Burst`: `run` from one thread, `submit` and futures from any. Made by `prepared.burst()`.

    There is no policy "latest", and requests on pools of one's own go to `prepared.execute`.
    """

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
                    link.burst.run(timeout=time_left(end, timeout))
                except FAILURES as error:
                    if self._instead(link, frame, error):
                        break
        except BaseException:
            self._put_aside(frame)
            raise
        self._runs += 1
        return Result(ErrorStatus.NONE, frame.outputs.arrays(()))

    # ---- for asyncio

    def arrival(self, future: Future) -> asyncio.Future[None]:
        """Done in the running loop when `future` is."""
        assert isinstance(future, Flight)
        return asyncio.ensure_future(self._follow(future))

    async def _follow(self, flight: Flight) -> None:
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


async def _settled(future: Future) -> None:
    """When it is done, whatever came of it."""
    with suppress(Exception, CancelledError):
        await future
