"""One execution, as everything below the surface takes it: made once, from what the caller wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

from burst import ErrorStatus
from driver.deadlines import ENDLESS, Wait, check_times, checked
from driver.protocol.lane_codec import with_loop_timeout
from fmq.clock import FOREVER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from burst import Request, Result
    from driver.client.fenced import Waitable


class Job(NamedTuple):
    """A request, and how to execute it.

    request: with its loop timeout. wait: for how long the caller waits, and what the device is told. after: fences that
    come first. duration: nanoseconds that it may take from when these are signalled.
    """

    request: Request
    wait: Wait = ENDLESS
    measure: bool = False
    after: Sequence[Waitable | None] = ()
    duration: int | None = None

    @classmethod
    def of(
        cls,
        request: Request,
        *,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
        deadline: float | None = None,
    ) -> Self:
        """Return a job that begins now. Raise ValueError for what is no time, and Timeout after 0 seconds."""
        if timeout is None and deadline is None and loop_timeout is None:
            return tuple.__new__(cls, (request, ENDLESS, measure, (), None))  # in half the time of the usual way
        check_times(timeout=timeout, loop_timeout=loop_timeout, deadline=deadline)
        return cls(with_loop_timeout(request, loop_timeout), Wait.of(timeout, deadline), measure)

    def behind(self, fences: Sequence[Waitable | None], duration: float | None = None) -> Self:
        """Return the job to be done when all fences are signalled; `duration` in seconds. Raise ValueError."""
        limit = None if duration is None else checked("duration", duration)
        return self._replace(after=fences, duration=None if limit == FOREVER else limit)

    def by(self, end: int | None) -> Self:
        """Return the job without fences, to be done by `end`, CLOCK_MONOTONIC ns."""
        return self._replace(wait=Wait(end, None, end), after=(), duration=None)


def perform_with_room(perform: Callable[[Job], Result], job: Job, grown: Callable[[Result], Request | None]) -> Result:
    """Perform a job; once more, by the same end, if it lacked room for its outputs alone.

    grown: returns the request with as much room as the result says; None: it lacks something else.
    """
    result = perform(job)
    if result.status != ErrorStatus.OUTPUT_INSUFFICIENT_SIZE or (request := grown(result)) is None:
        return result
    return perform(job._replace(request=request))
