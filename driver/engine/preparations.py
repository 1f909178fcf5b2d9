"""Preparations of several accounts at once, what they take, and rests of the device, while nothing is prepared."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from burst import MissedDeadlinePersistent, MissedDeadlineTransient
from burst._core import lib
from burst.causes import missed
from burst.executor import EstimateTable
from driver.deadlines import check, for_others, overdue, seconds_left, time_of_others
from fmq import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# Seconds. A request that arrives during a slice of work waits for its end, so slices must be short and rare. With these
# values, about one in 200 back-to-back requests meets a slice, which does not change their p99.
_WORK, _PAUSE = 100e-6, 1e-3


class _OwnSince(threading.local):
    since = 0.0  #: when this thread's slice of work began


class Pacer:
    """A pacer of long work in Python: it pauses, so that running bursts get the GIL.

    Threads that prepare take turns in pausing: together they work no more than one of them would.
    """

    def __init__(self) -> None:
        self.bursts = 0
        self._own, self._turn = _OwnSince(), threading.Lock()

    def __call__(self) -> None:
        """Pause now and then while a burst is open. Raise MissedDeadline* when this work is overdue."""
        check("preparing")
        if self.bursts and self._is_long():
            with for_others(), self._turn:
                time.sleep(
                    _PAUSE
                )  # a real sleep: a thread that only gives up the GIL takes it back before others get it
            self._own.since = time.perf_counter()

    def for_others(self) -> None:
        """Pause only while another burst is open: the burst of this thread has its own request bound.

        A deadline does not end it. What is bound is kept, so that the next request like it can be done in time. It
        waits for no preparation.
        """
        if self.bursts > 1 and self._is_long():
            time.sleep(_PAUSE)
            self._own.since = time.perf_counter()

    def _is_long(self) -> bool:
        """Return True if this thread has worked for long enough."""
        return time.perf_counter() - self._own.since > _WORK


class Preparations:
    """The preparations in progress. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count, self._is_resting = 0, False

    @contextmanager
    def one(self) -> Iterator[None]:
        """Let this thread prepare, within the block; the device does not rest meanwhile.

        Raise MissedDeadlineTransient when it rests for too long.
        """
        deadline = lib.burst_due()
        with self._changed:
            with for_others():
                may_begin = self._changed.wait_for(lambda: not self._is_resting, seconds_left(deadline))
            if not may_begin:
                raise overdue("queued", deadline)
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1

    def rest(self, give_back: Callable[[], object]) -> bool:
        """Call that, unless something is being prepared: then return False, and delay no preparation."""
        with self._changed:
            if self._count:
                return False
            self._is_resting = True
        try:
            give_back()
        finally:
            with self._changed:
                self._is_resting = False
                self._changed.notify_all()
        return True


class PreparationTime:
    """The least time of a preparation, in ns; 0: it is not known."""

    def __init__(self, key: bytes = b"", known: int = 0) -> None:
        """`key`: tells this model, prepared in this way, from others; b"": its time is not kept. `known`: before."""
        self.key, self.known = key, known
        self.found = 0  #: after a preparation that was more than sharing what is there


class PreparationEstimates:
    """A burst_estimate for each model that one account has prepared. Any thread."""

    _MOST = 1024

    def __init__(self) -> None:
        self._table = EstimateTable(self._MOST)

    @contextmanager
    def preparing(self, time: PreparationTime) -> Iterator[None]:
        """Time what this thread prepares in the block. Raise MissedDeadline* if it never was done in the time left."""
        if not time.key:
            yield
            return
        estimate, deadline = self._table.of(time.key, time.known), int(lib.burst_due())
        begin, others = clock.now(), time_of_others()
        if status := lib.burst_admit(estimate, begin - others, begin, deadline):
            is_transient = status == MissedDeadlineTransient.status
            raise missed(status, "queued" if is_transient else "before start", deadline, estimate)

        def own_time() -> int:
            return max(1, clock.now() - begin - (time_of_others() - others))

        try:
            yield
        except (MissedDeadlineTransient, MissedDeadlinePersistent) as error:
            lib.burst_took(estimate, own_time(), 0)
            if 0 < estimate.least_ns <= deadline - (begin - others):  # it has been done in that time
                raise missed(MissedDeadlineTransient.status, error.phase or "preparing", deadline, estimate) from error
            raise
        lib.burst_took(estimate, own_time(), 1)
        time.found = int(estimate.least_ns)
