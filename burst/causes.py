"""How and why a deadline was missed: csrc/README.md, "Deadlines", has the rule, csrc/burst/deadline.c applies it.

A result packet has room for the status alone, so `failure_of` reads the rest from the trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from burst._core import lib
from burst.errors import status_error
from burst.messages import NO_CAUSE, Cause, ErrorStatus
from fmq import clock

if TYPE_CHECKING:
    from typing import Any

    from burst.errors import StatusError
    from burst.messages import Phase
    from burst.trace import Trace


def missed(status: int, phase: Phase, deadline: int, estimate: Any = None) -> StatusError:
    """Return the error of a missed deadline. The usual time of such executions is when to try again."""
    late = clock.now() - deadline
    usual = estimate.usual_ns / 1e9 if estimate is not None else 0.0
    is_transient = status == ErrorStatus.MISSED_DEADLINE_TRANSIENT
    return status_error(
        status, cause=Cause(phase, late / 1e9 if late > 0 else None, usual or None if is_transient else None)
    )


_MISSED = ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT


def failure_of(status: ErrorStatus, deadline: int | None, trace: Trace, number: int) -> tuple[str, Cause]:
    """Return what the plain path says about that failure: the device's text and cause, else what the times tell."""
    text, cause = trace.failure(number, status) or ("", NO_CAUSE)
    if not text or (status in _MISSED and not cause.phase):
        cause = cause_of(status, deadline, trace, number)
        text = str(status_error(status, cause=cause))
    return text, cause


def cause_of(status: ErrorStatus, deadline: int | None, trace: Trace, number: int) -> Cause:
    """Return the cause of a request's status, from the times in the trace. Without a `deadline` a loop took
    too long.
    """
    if status not in _MISSED:
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
