"""Where a device notes when its accelerator worked on a request: in the trace of the request's burst.

`Execution.launch` gets the address of a flight. While it is called, `work_note` says which request that is.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from burst._core import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from burst.trace import Trace

_traces: WeakValueDictionary[int, Trace] = WeakValueDictionary()  # by flight; a flight's memory may be another's later


class WorkNote(NamedTuple):
    """One request. It may be noted later than the answer, and when its burst has ended."""

    trace: Trace
    number: int

    def take(self, times: Sequence[int]) -> None:
        """Six times, as `Trace.note_work` has them."""
        self.trace.note_work(self.number, times)


def flies(flight: int, trace: Trace) -> None:
    """The burst with this trace has made this flight."""
    _traces[flight] = trace


def work_note(flight: int) -> WorkNote | None:
    """For the request that is being launched with this flight; None where its burst has no trace that wants it now."""
    trace = _traces.get(flight)
    if trace is None or trace.works_until < time.monotonic():
        return None
    return WorkNote(trace, lib.burst_flight_id(ffi.cast("void *", flight)))
