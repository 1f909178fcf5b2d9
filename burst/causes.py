"""Why a deadline was missed, as far as the trace tells: a result packet has room for the status alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from burst._core import lib
from burst.messages import NO_CAUSE, Cause, ErrorStatus

if TYPE_CHECKING:
    from burst.messages import Phase
    from burst.trace import Trace


def cause_of(status: ErrorStatus, deadline: int | None, trace: Trace, number: int) -> Cause:
    """The cause of a request's status, from the times in the trace. Without a `deadline` a loop took too long."""
    if status not in {ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT}:
        return NO_CAUSE
    if deadline is None:
        return Cause("executing")
    served = trace.page.served[number % lib.BURST_RECORDS]
    started, done = int(served.started), int(served.done)
    if served.id != number:  # overwritten since, or the device writes no trace
        return NO_CAUSE
    late_by = (done - deadline) / 1e9 if done > deadline else None
    is_transient = status is ErrorStatus.MISSED_DEADLINE_TRANSIENT
    if started < done:
        phase: Phase = "executing"
    else:
        phase = "queued" if is_transient else "before start"
    usual = int(trace.page.device.usual_ns)
    return Cause(phase, late_by, usual / 1e9 if is_transient and usual else None)
