"""The model files and functions of a driver that run in the engine, noted where the service reads when that has died.

Each thread that executes files has a slot: the digest of the file that it runs, and the signal that hits the thread,
which the handler of fatal signals notes there. So the service knows which file to quarantine. A run that goes on a
second after its deadline, or after its client gave it up, cannot be stopped: it is noted, too, and the engine ends.

A slot also has the name of the function of a driver in a shared library that its thread has called. A call that takes
too long ends the engine, too.

Executions in C (`BoundExecution.native`) are not noted: that would take Python. Those of a driver in a shared library
are bounded all the same (csrc/burst/timed.c).
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

import numpy as np

from burst._core import ffi, lib
from burst.serving_thread import ServingThread
from driver.interface import BoundExecution
from fmq.clock import FOREVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Array = np.ndarray[Any, Any]

T = TypeVar("T")
_log = logging.getLogger(__name__)
GRACE = 1.0
"""Seconds that a run may go on after it was told to end."""

OVERDUE = 0xFFFF
"""In the place of a signal: the engine ended itself, because a run could not be stopped."""

_SLOTS, _SLOT = 256, np.dtype([("signal", np.uint64), ("digest", "V32"), ("function", "S24")])
_SIGNAL = ffi.offsetof("burst_trace", "device", "signal")
_LOOK = 0.25  # seconds
_NONE = bytes(32)
_MOST_WORDS = 512  # bytes


class FileEnd(NamedTuple):
    """A file that was running when the engine died."""

    digest: bytes
    signal: int  #: that its thread got, OVERDUE, or 0


class RunningFiles:
    """The slots of running files. Both processes have them from one fork."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _SLOTS * _SLOT.itemsize + _MOST_WORDS)
        self.slots: Array = np.frombuffer(self._map, _SLOT, _SLOTS)
        self._free = list(range(_SLOTS))
        self._local = threading.local()
        self._watch = OverdueWatch(self._end)
        self._calls = OverdueWatch(self.end_with)
        self._cancelled: OverdueWatch[BoundExecution] = OverdueWatch(self._end_cancelled)
        self._starting, self._is_watching = threading.Lock(), False
        self.may_hang = False  #: whether runs of operations are watched that have a deadline, as those of files are

    def ends(self) -> list[FileEnd]:
        """Return the files that were running, or whose thread got a signal."""
        found = [FileEnd(row["digest"].tobytes(), int(row["signal"])) for row in self.slots]
        return [each for each in found if each.digest != _NONE]

    @property
    def functions(self) -> list[str]:
        """The functions of a driver that threads had called when the engine ended."""
        return sorted({name.decode() for name in self.slots["function"].tolist() if name})

    @property
    def shutdown_reason(self) -> str:
        """The reason why the engine has ended itself; "": it has not."""
        return self._map[-_MOST_WORDS:].rstrip(b"\0").decode(errors="replace")

    def end_with(self, words: str) -> NoReturn:
        """End the engine, and say why."""
        raw = words.encode()[:_MOST_WORDS]
        self._map[-_MOST_WORDS:] = raw + bytes(_MOST_WORDS - len(raw))
        _log.error("%s; the engine ends", words)
        os._exit(1)

    @contextmanager
    def calling(self, driver: str, function: str, seconds: float) -> Iterator[None]:
        """Bound a call of a driver's function, within the block: it returns in so many seconds, or the engine ends."""
        slot, call = self.slot(), object()
        end = time.monotonic_ns() + int((seconds - GRACE) * 1e9)
        self._calls.add(call, f"driver {driver!r}: {function} did not return within {seconds:g} s", end)
        before = slot.note_function(function) if slot else ""
        try:
            yield
        finally:
            if slot:
                slot.note_function(before)
            self._calls.remove(call)

    @contextmanager
    def bounded_run(self, run: object, end: int) -> Iterator[None]:
        """Bound a run that nothing can stop, within the block. It ends by `end`, or the engine does GRACE later."""
        self._calls.add(run, f"an execution went on {GRACE:g} s after its deadline", end)
        try:
            yield
        finally:
            self._calls.remove(run)

    def watch_executions(self, driver: str) -> None:
        """End the engine when an execution of that driver goes on too long after its deadline or cancellation."""

        self.may_hang = True
        self._watch_runs(f"driver {driver!r}: execute went on {GRACE:g} s after its deadline or cancellation")

    def watch_flights(self) -> None:
        """Watch executions that go on outside of the threads that begin them (`BoundExecution.launch`)."""
        self._watch_runs(f"an execution went on {GRACE:g} s after its deadline, or after its client was gone")

    def _watch_runs(self, words: str) -> None:
        def watch() -> None:
            lib.burst_timed_overdue(int(GRACE * 1e9))
            self.end_with(words)

        with self._starting:
            if not self._is_watching:
                ServingThread(watch, name="overdue executions").start()
                self._is_watching = True

    def watched(self, bound: BoundExecution, digest: bytes) -> FileRun | OperationsRun | None:
        """Return how to run an execution of the model file with that digest, or of operations (b"") that can tell
        whether they run; None: it is not watched.
        """
        if bound.launch is not None:
            self.watch_flights()
        if digest:
            return FileRun(bound, digest, self)
        can_tell = bound.launch is not None or type(bound).is_running is not BoundExecution.is_running
        return OperationsRun(bound, self) if can_tell else None

    def watch_cancelled(self, bound: BoundExecution) -> None:
        """Watch a run that was cancelled now."""
        if bound.is_running():
            self._cancelled.add(bound, bound, time.monotonic_ns())

    def _end_cancelled(self, bound: BoundExecution) -> None:
        self._cancelled.remove(bound)
        if bound.is_running():
            self.end_with(f"an execution went on {GRACE:g} s after it was cancelled, or its client was gone")

    def slot(self) -> Slot | None:
        """Return the slot of this thread; None where all are taken."""
        try:
            return self._local.slot  # type: ignore[no-any-return]
        except AttributeError:
            with suppress(IndexError):
                self._local.slot = Slot(self._map, self.slots, self._free)
                return self._local.slot  # type: ignore[no-any-return]
        return None

    def watch(self, run: object, slot: Slot, end: int) -> None:
        """Watch a run: it must end by `end`, CLOCK_MONOTONIC ns, and GRACE seconds more."""
        self._watch.add(run, slot, end)

    def unwatch(self, run: object) -> None:
        """Stop watching a run: it has ended."""
        self._watch.remove(run)

    def _end(self, slot: Slot) -> NoReturn:
        slot.note(OVERDUE)
        _log.error("a run of the model file %s cannot be stopped; the engine ends", slot.digest.hex()[:12])
        os._exit(1)


class Slot:
    """A slot of one thread. It is given back when the thread has ended."""

    def __init__(self, memory: mmap.mmap, slots: Array, free: list[int]) -> None:
        """Take a free slot. Raise IndexError when there is none."""
        self._number, self._free = free.pop(), free
        self._row = slots[self._number : self._number + 1]
        begin = self._number * _SLOT.itemsize + _SLOT.fields["digest"][1]  # type: ignore[index]
        self._bytes = memoryview(memory)[begin : begin + len(_NONE)]
        # `burst_blame_on` wants a trace, of which it uses the address of this field.
        self._place = ffi.cast("burst_trace *", self._row.ctypes.data - _SIGNAL)

    @property
    def digest(self) -> bytes:
        """The digest of the file that runs."""
        return bytes(self._bytes)

    def begin(self, digest: bytes) -> None:
        """Note that this thread runs the file from now on. A listener has its own place for signals while it runs."""
        self._bytes[:] = digest
        lib.burst_blame_on(self._place)

    def end(self) -> None:
        """Note that this thread runs none."""
        self._bytes[:] = _NONE

    def note_function(self, name: str) -> str:
        """Note that this thread calls a function of that name from now on; "": none. Returns the one before."""
        before = bytes(self._row["function"][0]).decode()
        self._row["function"] = name.encode()
        return before

    def note(self, signal: int) -> None:
        """Note a signal as the handler of signals does."""
        self._row["signal"] = signal

    def __del__(self) -> None:
        with suppress(AttributeError):  # there was none
            self.end()
            self._free.append(self._number)


class OverdueWatch(Generic[T]):
    """A watch that calls `end` for runs that go on too long. One thread, which sleeps while nothing is bounded."""

    def __init__(self, end: Callable[[T], object]) -> None:
        self._end = end
        self._runs: dict[object, tuple[int, T]] = {}
        self._starting, self._thread = threading.Lock(), ServingThread(self._look, name="overdue")
        self._some = threading.Event()

    def add(self, run: object, what: T, end: int) -> None:
        """Watch a run: it ends by `end`, CLOCK_MONOTONIC ns, or is overdue GRACE seconds later: `end(what)`.

        The earliest end counts. Raise RuntimeError if the watch has no thread, and none can be started.
        """
        if not self._thread.has_started:
            with self._starting:
                if not self._thread.has_started:
                    self._thread.start()
        known = self._runs.get(run)
        if known is None or end < known[0]:
            self._runs[run] = end, what
        if not self._some.is_set():
            self._some.set()

    def remove(self, run: object) -> None:
        """Stop watching a run: it has ended."""
        self._runs.pop(run, None)

    def _look(self) -> None:
        while True:
            self._some.wait()
            time.sleep(_LOOK)
            self._end_overdue()
            self._some.clear()  # before looking: a run that is added meanwhile sets it again
            if self._runs:
                self._some.set()

    def _end_overdue(self) -> None:
        """End what is overdue, in a frame of its own: while this thread sleeps, it must keep no execution alive."""
        latest = time.monotonic_ns() - int(GRACE * 1e9)
        for run, (end, what) in list(self._runs.items()):
            if end < latest and run in self._runs:
                self._end(what)


class FileRun:
    """A note of the runs of one execution of a model file. One thread runs it at a time."""

    def __init__(self, bound: BoundExecution, digest: bytes, running: RunningFiles) -> None:
        self._bound, self._digest, self._running = bound, digest, running
        self._slot: Slot | None = None  # while it runs
        self._cancelled = FOREVER  # since when

    def run(self) -> None:
        """Execute. Raise what the execution raises."""
        running, slot = self._running, self._running.slot()
        if slot is None:
            self._bound.run()
            return
        slot.begin(self._digest)
        self._slot = slot
        end = min(self._cancelled, lib.burst_due())
        if end != FOREVER:
            running.watch(self, slot, end)
        try:
            self._bound.run()
        finally:
            self._slot = None
            slot.end()
            running.unwatch(self)

    @property
    def launch(self) -> Callable[[int], object] | None:
        """The method that begins an execution of the file, which is noted until it has begun."""
        return self._launch if self._bound.launch else None

    def _launch(self, run: int) -> None:
        slot = self._running.slot()
        if slot is not None:
            slot.begin(self._digest)
        try:
            assert self._bound.launch
            self._bound.launch(run)
        finally:
            if slot is not None:
                slot.end()

    def cancel(self) -> None:
        """End the run, which is overdue GRACE seconds later."""
        self._cancelled = min(self._cancelled, time.monotonic_ns())
        self._bound.cancel()
        if (slot := self._slot) is not None:
            self._running.watch(self, slot, self._cancelled)
            if self._slot is None:  # it ended meanwhile
                self._running.unwatch(self)


class OperationsRun:
    """A bound on the runs of one execution of a model of operations.

    `run` is the driver's own method, where that can be stopped.
    """

    def __init__(self, bound: BoundExecution, running: RunningFiles) -> None:
        self._bound, self._running = bound, running
        self.run, self.launch = bound.run, bound.launch
        if bound.launch is not None or (running.may_hang and not bound.native):
            self.run = partial(_run_in_time, bound, running)

    def cancel(self) -> None:
        """End the run, or the engine ends GRACE seconds later."""
        self._bound.cancel()
        self._running.watch_cancelled(self._bound)


def _run_in_time(bound: BoundExecution, running: RunningFiles) -> object:
    """Run work that nothing stops: it ends by its deadline and GRACE, or the engine does."""
    end = lib.burst_due()
    if end == FOREVER:
        return bound.run()
    with running.bounded_run(bound, end):
        return bound.run()
