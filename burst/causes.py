"""What a client can tell about a deadline that was missed: a burst's results have room for the status alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from burst._core import lib
from burst.messages import NO_CAUSE, Cause, ErrorStatus

if TYPE_CHECKING:
    from burst.trace import Trace


def cause_of(status: ErrorStatus, deadline: int | None, trace: Trace, number: int) -> Cause:
    """Of that request's result, by the times that both sides have noted. `deadline`: None, and a loop took too long."""
    if status not in {ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT}:
        return NO_CAUSE
    if deadline is None:
        return Cause("executing")
    served = trace.page.served[number % lib.BURST_RECORDS]
    started, done = int(served.started), int(served.done)
    if served.id != number:  # overwritten since, or by a device that takes no notes
        return NO_CAUSE
    late_by = (done - deadline) / 1e9 if done > deadline else None
    if status is ErrorStatus.MISSED_DEADLINE_PERSISTENT:
        return Cause("before start", late_by)
    return Cause("executing" if started <= deadline < done else "queued", late_by)
