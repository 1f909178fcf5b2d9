"""When a GPU works on requests, by events with times, for `burst trace`.

CUDA gives the time between two events, in milliseconds with 24 bits. A reference event, whose time on the CPU's clock
is known, is made anew every few seconds, so that times keep a quarter of a microsecond. How late the CPU sees the
reference bounds what is not known: some microseconds.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from burst.work_notes import WorkNote
    from driver.devices.cuda.context import CudaContext, CudaEvent, CudaStream

PARTS = IN, KERNELS, OUT = "copy in", "kernels", "copy out"
RENEW = 4_000_000_000  # ns
_TRIES = 3


class Reference(NamedTuple):
    """An event that the GPU has passed, and when: ns of CLOCK_MONOTONIC."""

    event: CudaEvent
    at: int

    def time_of(self, event: CudaEvent) -> int:
        """Return when the GPU passed an event, later than the reference; ns of CLOCK_MONOTONIC. Raise CudaFailed."""
        return self.at + max(0, int(1e9 * event.seconds_since(self.event)))


class WorkClock:
    """Times of one context's events, while it is wanted that they are taken: they cost the GPU and the CPU time."""

    def __init__(self, context: CudaContext) -> None:
        self._context, self._until, self._lock = context, 0.0, threading.Lock()
        self._stream: CudaStream | None = None
        self._reference: Reference | None = None

    def run_until(self, until: float) -> None:
        """Note that times are wanted until then (time.monotonic()), or as long as was said before."""
        self._until = max(self._until, until)

    @property
    def is_wanted(self) -> bool:
        """True if they still are."""
        return self._until > 0 and time.monotonic() < self._until

    def reference(self) -> Reference:
        """Return one that is not older than some seconds. Raise CudaFailed."""
        with self._lock:
            found = self._reference
            if found is None or time.monotonic_ns() - found.at > RENEW:
                found = self._reference = self._made()
            return found

    def _made(self) -> Reference:
        if self._stream is None:
            self._stream = self._context.stream()
        return min((self._tried(self._stream) for _ in range(_TRIES)), key=lambda found: found[0])[1]

    def _tried(self, stream: CudaStream) -> tuple[int, Reference]:
        """Return a reference, after how many ns it took to have one."""
        event = self._context.event(is_timed=True)
        before = time.monotonic_ns()
        stream.record(event)
        event.synchronize()
        took = time.monotonic_ns() - before
        return took, Reference(event, before + took // 2)


class WorkTimes:
    """When the GPU copied in, computed and copied out, in the last run of one execution. Under the lock of its lane."""

    def __init__(self, clock: WorkClock, context: CudaContext) -> None:
        """Make the events. Raise CudaFailed."""
        self._clock = clock
        self.request: WorkNote | None = None  #: whose run begins next
        self._events = {part: (context.event(is_timed=True), context.event(is_timed=True)) for part in PARTS}
        self._run: tuple[WorkNote, Reference] | None = None
        self._parts = list[str]()
        self._is_added = False

    def begin(self) -> None:
        """Begin a run of `request`. The one before it is over, and is noted if it was not yet. Raise CudaFailed."""
        self.tell()
        assert self.request
        self._run, self._is_added = (self.request, self._clock.reference()), False
        self._parts.clear()

    @contextmanager
    def around(self, part: str, stream: CudaStream) -> Iterator[None]:
        """Time what is added to the stream within, as that part of the run. Raise CudaFailed."""
        begin, end = self._events[part]
        stream.record(begin)
        yield
        stream.record(end)
        self._parts.append(part)

    def added(self) -> None:
        """Note that all of the run was added."""
        self._is_added = True

    def is_told(self) -> bool:
        """Return True if there is nothing to tell any more, now that what has ended was noted. Raise CudaFailed."""
        if self._run and self._is_added and all(self._events[part][1].is_done() for part in self._parts):
            self.tell()
        return self._run is None

    def tell(self) -> None:
        """Note the run, which has ended. Raise CudaFailed."""
        run, self._run = self._run, None
        if run and self._is_added:
            note, reference = run
            ends = [reference.time_of(e) if part in self._parts else 0 for part in PARTS for e in self._events[part]]
            note.take(ends)
