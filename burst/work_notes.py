"""Where a device notes when its accelerator worked on a request: in the trace of the request's burst.

`Execution.launch` gets the address of a run. While it is called, `work_note` says which request that is.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from burst._core import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from burst.trace import Trace

_traces: WeakValueDictionary[int, Trace] = WeakValueDictionary()  # by run, whose memory may be another's later


class WorkNote(NamedTuple):
    """One request. It may be noted later than the answer, and when its burst has ended."""

    trace: Trace
    number: int

    def take(self, times: Sequence[int]) -> None:
        """Six times, as `Trace.note_work` has them."""
        self.trace.note_work(self.number, times)


def note_trace(run: int, trace: Trace) -> None:
    """Note which trace the requests of this run are in."""
    _traces[run] = trace


def work_note(run: int) -> WorkNote | None:
    """Return the note of the request that is being launched as this run; None if its trace wants none now."""
    trace = _traces.get(run)
    if trace is None or trace.works_until < time.monotonic():
        return None
    return WorkNote(trace, lib.burst_inflight_id(ffi.cast("void *", run)))
