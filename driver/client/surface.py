"""What an application holds, whatever executes: one surface for one device, for several, and for this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn

from burst.errors import status_error
from driver.client.future import Future
from driver.deadlines import check_times, nanoseconds, passed
from driver.options import ExecuteOptions
from fmq.closing import Closing

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Iterable

    from numpy.typing import NDArray

    from burst import Memory, Request, Result
    from driver.client.tasks import RequestSource, Tasks


class AnyBurst(Closing, ABC):
    """Executions in quick succession. `run` from one thread; `submit` and futures from any.

    `inputs` are arrays in shared memory: the device reads what is written there, without a copy. They belong to the
    next request: with `submit`, look them up for each. The `outputs` of a result are arrays in shared memory, too, and
    yours as long as you hold them, or views of them.
    """

    @property
    @abstractmethod
    def inputs(self) -> tuple[NDArray[Any] | None, ...]:
        """Arrays of the next request, to be written in place; None where an input is omitted."""

    @property
    @abstractmethod
    def source(self) -> RequestSource:
        """What takes requests, and completes their futures."""

    @property
    @abstractmethod
    def tasks(self) -> Tasks:
        """What waits for `source` in event loops."""

    @abstractmethod
    def run(self, *arrays: Any, timeout: float | None = None) -> Result:
        """Executes once; with arrays, copies them into the inputs first.

        Raises ValueError for a wrong dtype or shape (nothing was sent), StatusError, PeerDied, Busy, ResultsHeld, and
        Timeout when the result does not come in `timeout` seconds: the burst stays usable, a late result is dropped.
        """

    def submit(self, *arrays: Any, timeout: float | None = None, deadline: float | None = None) -> Future:
        """Sends a request and does not wait for its result. With arrays, copies them into the inputs first.

        While `depth` requests are in flight, policy "block" waits (at most `timeout` seconds, then Timeout), "reject"
        raises Busy, and "latest" keeps this request until there is room, in the place of one that was kept before.
        `deadline`: a time.monotonic() by which it has to be done; then the future is, with MissedDeadline*.
        Raises as `run` does for what was not sent.
        """
        check_times(timeout=timeout)
        by = None if deadline is None else nanoseconds(deadline)
        if missed := passed(by):
            return Future(self.source, by).fail(status_error(missed.status, missed.message, missed.cause))
        return self.source.submit_by(arrays, timeout, by)

    async def run_async(self, *arrays: Any, timeout: float | None = None, deadline: float | None = None) -> Result:
        """As `run`, for asyncio. Cancelling the task drops the result when it comes.

        `timeout`: seconds from now, also for tasks before it; `deadline`: a time.monotonic(). The device is told the
        earlier one. Raises Timeout after the one, and MissedDeadline* at the other.
        """
        return await self.tasks.run(arrays, timeout, deadline)

    def stream(
        self,
        frames: Iterable[Any] | AsyncIterable[Any],
        timeout: float | None = None,
        deadline: float | None = None,
    ) -> AsyncIterator[Result]:
        """`async for result in burst.stream(frames)`: results in the order of the frames, `depth` in flight.

        A frame is an array, or a tuple of one for each input. With policy "latest" a source that is faster than the
        device loses frames, and not time; with "reject", too, and the oldest stay. `timeout`: of each frame, from when
        it is taken; `deadline`: of all. What misses it ends the stream, as `run_async` would.
        """
        return self.tasks.stream(frames, timeout, deadline)

    def execute(
        self,
        request: Request,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
        deadline: float | None = None,
    ) -> Result:
        """An explicit request on pools of your own, with any status.

        `timeout`: seconds from now, `deadline`: a time.monotonic(). The device is told the earlier one, and gives up
        what it cannot do by then. The wait ends there whatever it does: at the deadline with a result of status
        MISSED_DEADLINE_TRANSIENT, after the timeout by Timeout. `loop_timeout`: seconds that a WHILE may take.

        Raises PeerDied, Timeout, Busy.
        """
        check_times(timeout=timeout, loop_timeout=loop_timeout, deadline=deadline)
        return self.execute_as(request, ExecuteOptions(measure, timeout, loop_timeout, deadline))

    @abstractmethod
    def execute_as(self, request: Request, options: ExecuteOptions) -> Result:
        """As `execute`."""

    @abstractmethod
    def free_memory(self, memory: Memory) -> None:
        """The device may unmap a pool of `execute`. Unknown memory is no error."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Counts since the beginning, and where the time went; `driver.client.statistics` says what each is.

        `fallbacks`: those of the compiled model, if this is a burst of one.
        """

    @abstractmethod
    def trace(self, path: str) -> int:
        """Writes the last requests, stage by stage, as a file for Perfetto or chrome://tracing; returns how many."""

    @abstractmethod
    def close(self) -> None:
        """Ends the burst on both sides; threads and tasks that wait get GeneralFailure. Arrays stay readable."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("a burst cannot be pickled: pickle its model, and open a burst on the unpickled one")
