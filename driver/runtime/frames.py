"""Frames in flight, up to `depth`, in a burst whose requests do not go through one device's queues.

What the burst of a model on several devices and the burst of a model in this process have in common: which frames are
admitted, what becomes of the others, who is told of a result. Each of them says how a frame is executed.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from burst import Busy, GeneralFailure, Result, Timeout
from burst.errors import timed_out
from driver.client.burst_requests import CLOSED, CLOSED_IN_FLIGHT, RUNNING, BurstRequests
from driver.client.completion import Completion, call_in
from driver.client.names import together
from driver.client.surface import AnyBurst
from driver.client.tasks import Tasks
from driver.deadlines import earlier, unanswered, until
from fmq import clock

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop as _Loop
    from collections.abc import Callable

    from numpy.typing import NDArray

    from driver.options import Options

_T = TypeVar("_T")


class FrameMemory(Protocol[_T]):
    """Where frames lie. The caller holds the burst's lock."""

    @property
    def inputs(self) -> tuple[NDArray[Any] | None, ...]:
        """The arrays of the next frame."""

    def frame(self, arrays: tuple[Any, ...]) -> _T:
        """Return the next frame, with those arrays copied into its inputs. Raise ValueError, ResultsHeld."""

    def lend(self, frame: _T) -> None:
        """Leave its memory to the frame until `take_back`; `inputs` are the next frame's."""

    def take_back(self, frame: _T) -> None:
        """Take its memory back: the frame was executed, or given up."""

    def close(self) -> None:
        """Free it: there are no more frames."""


class PendingFrame(Generic[_T]):
    """A frame on its way."""

    def __init__(self, completion: Completion, frame: _T) -> None:
        self.completion, self.frame, self.begin = completion, frame, clock.now()
        self.at = 0  #: the number of its step
        self.request: Completion | None = None  #: of the step that is being executed


class FrameBurst(AnyBurst, BurstRequests, Generic[_T]):
    """A burst with `submit`, futures, tasks and policies, as `driver.Burst` has them."""

    def __init__(self, options: Options, memory: FrameMemory[_T]) -> None:
        self.options, self._memory = options, memory
        self._lock = threading.RLock()
        self._in_flight: deque[PendingFrame[_T]] = deque()
        self._staged: PendingFrame[_T] | None = None  # the newest frame, kept until there is room
        self._finished: deque[Completion] = deque()  # their callbacks are due
        self._tasks = Tasks()
        self._loops: set[_Loop] = set()  # that have awaited frames
        self._runs = self._drops = self._timeouts = 0
        self._is_running = self._is_closed = False

    # ---- how a frame is executed

    @abstractmethod
    def _run(self, arrays: tuple[Any, ...], timeout: float | None) -> Result:
        """Execute once in this thread. The caller holds the lock, and nothing is in flight."""

    def _runs_here(self, timeout: float | None) -> bool:
        """Return True if `_run` may execute with that timeout; else the request is submitted."""
        del timeout
        return True

    @abstractmethod
    def _launch(self, pending: PendingFrame[_T]) -> None:
        """Send a frame on its way, which ends with `_finish`. The caller holds the lock."""

    @abstractmethod
    def _advance(self, pending: PendingFrame[_T], timeout: float | None) -> None:
        """Wait, without the lock, for news of a frame that was in flight. Raise Timeout."""

    def _collect(self) -> None:
        """Take on the frames of which there is news. The caller holds the lock."""

    # ---- requests

    @property
    def inputs(self) -> tuple[NDArray[Any] | None, ...]:
        return self._memory.inputs

    @property
    def source(self) -> FrameBurst[_T]:
        return self

    @property
    def tasks(self) -> Tasks:
        return self._tasks

    @property
    def depth(self) -> int:
        """The number of frames that may be in flight."""
        return self.options.depth

    @property
    def has_room(self) -> bool:
        """True if one more request may be in flight; also when the burst is closed, so that it can say so."""
        return self._is_closed or len(self._in_flight) < self.options.depth

    def run(self, *arrays: Any, timeout: float | None = None, deadline: float | None = None, **by_name: Any) -> Result:
        """Run one request as `Burst.run` does; on several devices `timeout` is for all steps together."""
        if deadline is not None:
            with until(timeout, deadline) as left:
                return self.run(*together(arrays, by_name), timeout=left)
        arrays = together(arrays, by_name)
        earlier(timeout, None)  # checks it
        if self._is_running:
            raise Busy(RUNNING)
        with self._lock:
            self._check()
            if self._runs_here(timeout) and not (self._in_flight or self._staged):
                self._is_running = True
                try:
                    result = self._run(arrays, timeout)
                except Timeout:
                    self._timeouts += 1
                    raise
                finally:
                    self._is_running = False
                self._runs += 1
                return result
        return self._run_behind_others(arrays, timeout)

    def _run_behind_others(self, arrays: tuple[Any, ...], timeout: float | None) -> Result:
        end = None if timeout is None else time.monotonic() + timeout
        if self.options.depth == 1 and self.options.policy != "latest":
            self.advance(lambda: not self._in_flight, timeout)
            if self._runs_here(timeout):
                return self.run(*arrays, timeout=time_left(end, timeout))
        return self.submit_and_wait(arrays, timeout, end)

    def note_drop(self) -> None:
        """Count a request that was cancelled, refused or replaced."""
        self._drops += 1

    def admit(self, arrays: tuple[Any, ...], deadline: int | None, told: int | None = None) -> Completion | None:
        """Submit without waiting; `told` as for `Completion`. None: there is no room."""
        try:
            with self._lock:
                self._check()
                self._collect()
                if not self.has_room and self.options.policy != "latest":
                    return None
                frame = self._memory.frame(arrays)
                self._memory.lend(frame)
                pending = PendingFrame(Completion(self, deadline, told), frame)
                if self.has_room:
                    self._in_flight.append(pending)
                    self._launch(pending)
                else:
                    self._stage(pending)
        finally:
            self._call_back()
        return pending.completion

    def _stage(self, pending: PendingFrame[_T]) -> None:
        """Keep the newest frame until there is room."""
        old, self._staged = self._staged, pending
        if old is not None:
            if not old.completion.is_done:
                self._drops += 1
            self._give_up(old, CancelledError("a newer frame took its place"))

    def _give_up(self, pending: PendingFrame[_T], error: BaseException) -> None:
        self._memory.take_back(pending.frame)
        self._finished.append(pending.completion.fail(error))

    def _finish(self, pending: PendingFrame[_T], result: Result | None) -> None:
        """Finish a frame that was executed, or has failed already. The caller holds the lock."""
        if pending not in self._in_flight:  # a callback has finished it, or the burst was closed
            return
        if result is not None and not pending.completion.is_done:
            self._runs += 1
            pending.completion.finish(result)
        self._in_flight.remove(pending)
        self._memory.take_back(pending.frame)
        self._finished.append(pending.completion)
        staged, self._staged = self._staged, None
        if staged is not None and staged.completion.is_done:
            self._memory.take_back(staged.frame)
        elif staged is not None:
            self._in_flight.append(staged)
            self._launch(staged)

    def _call_back(self) -> None:
        """Call back, without the lock, as what futures call may come back to us."""
        while self._finished:
            with suppress(IndexError):  # another thread took the last one
                self._finished.popleft().call_back()
        self._tasks.tell(self)

    def _check(self) -> None:
        if self._is_closed:
            raise ValueError(CLOSED)

    # ---- what futures ask for

    def look(self) -> None:
        """Take on the frames of which there is news, and call back. Does not wait."""
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()
        self._call_back()

    def advance(self, until: Callable[[], bool], timeout: float | None, completion: Completion | None = None) -> None:
        """Wait until that holds, by news of `completion`, or of the oldest frame in flight. Raise Timeout."""
        end = None if timeout is None else time.monotonic() + timeout
        while not until():
            with self._lock:
                oldest = self._in_flight[0] if self._in_flight else None
                target = next((each for each in self._in_flight if each.completion is completion), oldest)
            if target is not None:
                self._advance(target, time_left(end, timeout))
            self._call_back()

    def expire(self, future: Completion) -> None:
        """Fail it because its deadline has passed, unless it is done."""
        with self._lock:
            if future.is_done:
                return
            future.fail(unanswered(clock.now() - (future.deadline or 0)))
            self._timeouts += 1
        future.call_back()

    def drop(self, future: Completion) -> bool:
        """Cancel it, unless it is done."""
        with self._lock:
            if future.is_done:
                return False
            future.fail(CancelledError())
            self._drops += 1
        future.call_back()
        return True

    # ---- for asyncio

    def attend(self, loop: _Loop) -> None:
        """Have that loop, in its thread, hear of the frames in flight from now on."""
        with self._lock:
            self._loops.add(loop)
            for pending in self._in_flight:
                if pending.request is not None:
                    hear(loop, pending.request)

    def _attended(self, request: Completion) -> None:
        """Have the loops that await frames hear of this one, too. The caller holds the lock."""
        for loop in list(self._loops):
            if loop.is_running():
                hear(loop, request)
            else:
                self._loops.discard(loop)

    # ----

    def _counts(self) -> dict[str, Any]:
        return {
            "runs": {"burst": self._runs, "plain": 0},
            "in_flight": len(self._in_flight),
            "timeouts": self._timeouts,
            "drops": self._drops,
        }

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            waiting, self._staged = [*self._in_flight, *filter(None, [self._staged])], None
            for pending in waiting:
                closed = GeneralFailure(CLOSED_IN_FLIGHT)
                self._finished.append(pending.completion.fail(closed))
            self._in_flight.clear()
            self._end()
            self._memory.close()
        self._call_back()

    @abstractmethod
    def _end(self) -> None:
        """Give up what executes frames. The caller holds the lock."""


def hear(loop: _Loop, request: Completion) -> None:
    """Have the loop take the result of a step's request, which calls back: that takes the frame on."""
    import asyncio

    with suppress(RuntimeError):
        if asyncio.get_running_loop() is loop:
            request.attend()
            return
    call_in(loop, request.attend)


def time_left(end: float | None, timeout: float | None) -> float | None:
    """Return the seconds until `end`; `timeout` is what was asked for. Raise Timeout when there are none."""
    if end is None:
        return None
    left = end - time.monotonic()
    if left <= 0 and timeout:
        raise timed_out(timeout)
    return max(0.0, left)
