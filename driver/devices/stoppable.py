"""Runs of a library that can be ended: by their client, by a deadline or loop timeout, for a more urgent execution.

A library that can be told to end a run looks at that between its operations; one operation runs on to its end.
"""

from __future__ import annotations

import math
import os
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from burst._core import lib
from burst.run_queue import checkpoint, stoppable
from burst.serving_thread import ServingThread
from driver.deadlines import overdue, seconds_left
from driver.errors import LoopTimeout
from fmq import clock

if TYPE_CHECKING:
    from collections.abc import Callable


_CANCELLED = "the execution was cancelled"


class Attempt(NamedTuple):
    """One run of a library.

    run: executes without the GIL, and returns the error message, or None. stop: has it end early; called from any
    thread, at any time.
    """

    run: Callable[[], str | None]
    stop: Callable[[], object]


class StoppableRuns:
    """The runs of one execution. One thread runs at a time; any thread may cancel."""

    def __init__(self, loops: int, loop_timeout: float) -> None:
        """`loops`: how many the model has, each of which may take `loop_timeout` seconds."""
        self._loops, self._timeout = loops, loop_timeout * loops
        self._stop: Callable[[], object] | None = None  # of the run in progress
        self.is_cancelled = False

    def run(self, begin: Callable[[], Attempt], *, is_long: bool, may_repeat: bool = True) -> str | None:
        """Execute once. Returns the error message, or None. `begin`: makes an attempt.

        `is_long`: it ends at its deadline and loop timeout, and makes way for a more urgent execution, after which it
        starts again: a run keeps no state. Not so where it writes to its inputs (`may_repeat`).

        Raise LoopTimeout, MissedDeadlineTransient.
        """
        if not is_long:
            return self._run(begin())
        if not may_repeat:
            return self._run_in_time(begin())
        while True:
            attempt = begin()
            with stoppable(attempt.stop) as turn:
                begun = clock.now()
                fault = self._run_in_time(attempt)
            if not (fault and turn.was_stopped) or self.is_cancelled:
                return fault
            lib.burst_lose(clock.now() - begun)  # that work is done again
            checkpoint()

    def _run_in_time(self, attempt: Attempt) -> str | None:
        deadline = lib.burst_due()
        left = seconds_left(deadline)
        limits = [limit for limit in (self._timeout or None, left) if limit is not None]
        if not limits:
            return self._run(attempt)
        limited = _LimitedRun(time.monotonic() + min(limits), attempt)
        watchdog.add(limited)
        try:
            fault = self._run(attempt)
        finally:
            watchdog.remove(limited)
        if fault and limited.is_late:
            if left == min(limits):
                raise overdue("executing", deadline)
            loops = "a WHILE took longer than its" if self._loops == 1 else "its loops took longer than all of their"
            raise LoopTimeout(f"{loops} loop timeout of {self._timeout} s")
        return fault

    def _run(self, attempt: Attempt) -> str | None:
        self._stop = attempt.stop
        try:
            fault = _CANCELLED if self.is_cancelled else attempt.run()
        finally:
            self._stop = None
        return _CANCELLED if fault and self.is_cancelled else fault  # in our words, not in the library's

    @property
    def is_running(self) -> bool:
        """True if a run is in progress."""
        return self._stop is not None

    def cancel(self) -> None:
        """End the run in progress before its next operation, and all later ones before their first. Safe from any
        thread.
        """
        self.is_cancelled = True
        if stop := self._stop:
            stop()


class _LimitedRun:
    """A run in progress that has to end by a time.monotonic()."""

    __slots__ = ("attempt", "end", "is_late")

    def __init__(self, end: float, attempt: Attempt) -> None:
        self.end, self.attempt, self.is_late = end, attempt, False


class RunWatchdog:
    """Ends runs when their time is over: one thread for the process, which sleeps until the earliest of their ends.

    A run that begins wakes it only if it has to end before all others; a run that ends never does.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._runs: list[_LimitedRun] = []  # as many as threads run
        self._wakes_at = math.inf
        self._thread: ServingThread | None = None

    def add(self, run: _LimitedRun) -> None:
        """Note a run that begins."""
        with self._changed:
            if self._thread is None:
                thread = ServingThread(self._watch, name="burst-watchdog")
                thread.start()
                self._thread = thread
            self._runs.append(run)
            if run.end < self._wakes_at:
                self._wakes_at = run.end
                self._changed.notify()

    def remove(self, run: _LimitedRun) -> None:
        """Note a run that has ended."""
        with self._changed:
            self._runs.remove(run)

    def _watch(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                late = [run for run in self._runs if run.end <= now and not run.is_late]
                self._wakes_at = min((run.end for run in self._runs if run.end > now), default=math.inf)
                if not late:
                    self._changed.wait(None if self._wakes_at == math.inf else self._wakes_at - now)
                for run in late:
                    run.is_late = True
            for run in late:
                run.attempt.stop()


watchdog = RunWatchdog()


def _after_fork() -> None:
    global watchdog  # noqa: PLW0603 (the thread, and what it watched, are the parent's)
    watchdog = RunWatchdog()


os.register_at_fork(after_in_child=_after_fork)
