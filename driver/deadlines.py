"""Deadlines: CLOCK_MONOTONIC nanoseconds inside, time.monotonic() seconds at the surface.

On a device the deadline goes by the thread that works (`burst_due`), so that an operation in the midst of a model, or
of its preparation, can look at it.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from burst import (
    ErrorStatus,
    Malformed,
    MissedDeadlinePersistent,
    MissedDeadlineTransient,
    Result,
    Timeout,
)
from burst._core import lib
from burst.errors import timed_out
from burst.messages import Cause, Phase
from fmq import clock
from fmq.clock import FOREVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from burst import StatusError

WAITING: Phase = "waiting for the answer"
_LONGEST_WAIT = 2e6  # seconds: what poll takes


def checked(name: str, seconds: float) -> int:
    """Check a time that a caller gives as the argument `name`, on every path; as it travels, in nanoseconds.

    A `deadline` is a time.monotonic(); a `timeout`, a `duration` and a `loop_timeout` are seconds. All are 0 or more;
    infinity, and what the clock never reaches, is no limit: FOREVER. Raises ValueError.
    """
    try:
        is_time = seconds >= 0  # false for NaN
    except TypeError:
        is_time = False
    if not is_time:
        kind = "a time.monotonic()" if name == "deadline" else "seconds"
        raise ValueError(f"{name}={seconds!r:.60}: {kind}, 0 or more; leave it out, or give None, for no limit")
    return FOREVER if seconds >= FOREVER / 1e9 else int(seconds * 1e9)


def check_times(**times: float | None) -> None:
    """Check those that are given, by the names of the arguments. Raises ValueError."""
    for name, seconds in times.items():
        if seconds is not None:
            checked(name, seconds)


def nanoseconds(deadline: float) -> int:
    """Return a deadline in nanoseconds, checked. Raises ValueError."""
    return checked("deadline", deadline)


def taken(plain: object) -> int | None:
    """Check a deadline that a peer has sent. Raises Malformed."""
    if plain is None or (type(plain) is int and 0 <= plain <= FOREVER):
        return plain
    raise Malformed(f"deadline {plain!r:.60}: nanoseconds of CLOCK_MONOTONIC from 0 to 2^64 - 1, or nil")


def earlier(timeout: float | None, deadline: int | None) -> int | None:
    """Return the deadline, or the end of so many seconds from now, whichever comes first; None without both.

    Raises ValueError, and Timeout after 0 seconds, in which nothing is done.
    """
    if timeout is None:
        return deadline
    left = checked("timeout", timeout)
    if not left:
        raise Timeout(
            f"timeout={timeout!r}: no result can come in that time, and nothing was sent", "before start", 0.0
        )
    end = min(FOREVER, clock.now() + left)
    return end if deadline is None else min(end, deadline)


def seconds_left(deadline: int | None) -> float | None:
    """Until then, 0 when it has passed; None without one."""
    if deadline is None or deadline == FOREVER:
        return None
    return min(max(0, deadline - clock.now()) / 1e9, _LONGEST_WAIT)


def timeout_until(end: int | None) -> float | None:
    """Return the timeout of another try that ends then: a moment at least, as with 0 nothing would be tried."""
    left = seconds_left(end)
    return None if left is None else max(1e-9, left)


def _late(now: int, deadline: int) -> float | None:
    return (now - deadline) / 1e9 if now > deadline else None


# ---- what a client finds out


def passed(deadline: int | None) -> Result | None:
    """Return the result of a request whose deadline had passed before it was sent; None if it has not passed."""
    if deadline is None or (now := clock.now()) <= deadline:
        return None
    error = MissedDeadlinePersistent(cause=Cause("before start", _late(now, deadline)))
    return Result(error.status, message=str(error), cause=error.as_cause())


def missed_in_waiting(deadline: int | None) -> Result | None:
    """Return the result of a request whose deadline has passed while it waited, of which we know no more."""
    if deadline is None or (now := clock.now()) < deadline:
        return None
    error = unanswered(now - deadline)
    return Result(error.status, message=str(error), cause=error.as_cause())


class Wait(NamedTuple):
    """For how long a client waits for an answer. In ns of CLOCK_MONOTONIC, but for `timeout`.

    by: the deadline of the request. end: of the wait, which is the earlier one of that and `timeout` seconds from now.
    """

    by: int | None
    timeout: float | None
    end: int | None

    @classmethod
    def of(cls, timeout: float | None, deadline: float | None) -> Self:
        """Begins now. Raises ValueError, and Timeout after 0 seconds, in which nothing is done."""
        if timeout is None and deadline is None:
            return ENDLESS  # type: ignore[return-value]
        by = None if deadline is None else nanoseconds(deadline)
        end = by if by is not None and by < clock.now() else earlier(timeout, by)
        return cls(by, timeout, None if end == FOREVER else end)

    @property
    def ends_by_timeout(self) -> bool:
        """True if the timeout ends it, and not the deadline."""
        return self.timeout is not None and self.end != self.by

    def check(self, phase: Phase) -> None:
        """Raise Timeout if its timeout has passed."""
        if self.ends_by_timeout and self.end is not None and clock.now() >= self.end:
            raise timed_out(self.timeout, phase)

    def given_up(self) -> Result:
        """Return the result of a request that was not answered by `end`. Raises Timeout, unless its deadline has
        passed.
        """
        if missed := missed_in_waiting(self.by):
            return missed
        late_by = max(0, clock.now() - (self.end or 0)) / 1e9
        raise timed_out(self.timeout, WAITING, late_by)


ENDLESS = Wait(None, None, None)


def unanswered(late_ns: int) -> MissedDeadlineTransient:
    """When the wait ended at the deadline."""
    return MissedDeadlineTransient(cause=Cause(WAITING, max(0, late_ns) / 1e9))


@contextmanager
def waiting(deadline: float | None) -> Iterator[int | None]:
    """Bound a call by that time.monotonic(); gives it in nanoseconds. Raises MissedDeadline*."""
    by = None if deadline is None else nanoseconds(deadline)
    if found := passed(by):
        found.raise_for_status()
    try:
        yield by
    except Timeout:
        raise unanswered(clock.now() - (by or 0)) from None


@contextmanager
def until(timeout: float | None, deadline: float) -> Iterator[float | None]:
    """Give the timeout of a call that has to end at that time.monotonic(), too.

    Raises ValueError, and MissedDeadline* in the place of Timeout where the deadline comes first.
    """
    check_times(timeout=timeout)
    left = seconds_left(by := nanoseconds(deadline))
    if left is None or (timeout is not None and timeout <= left):
        yield timeout
    else:
        with waiting(deadline):
            yield timeout_until(by)


# ---- what a device does about it


@contextmanager
def due(deadline: int | None) -> Iterator[None]:
    """Bound what this thread does meanwhile by a deadline, which `check` looks at."""
    before = lib.burst_due()
    lib.burst_set_due(FOREVER if deadline is None else deadline)
    try:
        yield
    finally:
        lib.burst_set_due(before)


def deadline() -> int | None:
    """By when the execution or preparation in this thread has to be done, in CLOCK_MONOTONIC ns; None: at any time."""
    end = int(lib.burst_due())
    return None if end == FOREVER else end


def check(phase: Phase, deadline: int | None = None) -> None:
    """Raise MissedDeadlineTransient if this thread's work is overdue. `deadline`: its, if it is known."""
    end = int(lib.burst_due()) if deadline is None else deadline
    if end != FOREVER and clock.now() > end:
        raise overdue(phase, end)


def overdue(phase: Phase, deadline: int) -> StatusError:
    """Return the error of work that is given up, or was not begun because of others."""
    return missed(ErrorStatus.MISSED_DEADLINE_TRANSIENT, phase, clock.now(), deadline)


def checker() -> Callable[[], None] | None:
    """Return the function to call before each operation of an execution in this thread; None without a deadline."""
    deadline = lib.burst_due()
    return None if deadline == FOREVER else partial(check, "executing", deadline)


def check_entry(phase: Phase) -> None:
    """Raise MissedDeadlinePersistent if what this thread is about to do was overdue from the beginning."""
    deadline = lib.burst_due()
    if (now := clock.now()) > deadline:
        raise missed(ErrorStatus.MISSED_DEADLINE_PERSISTENT, phase, now, deadline)


@contextmanager
def taking(lock: threading.Lock) -> Iterator[None]:
    """With that lock. Raises MissedDeadlineTransient when this thread does not get it in time."""
    deadline = lib.burst_due()
    left = seconds_left(deadline)
    if not lock.acquire(timeout=-1 if left is None else min(left, threading.TIMEOUT_MAX)):
        raise overdue("queued", deadline)
    try:
        yield
    finally:
        lock.release()


def missed(status: ErrorStatus, phase: Phase, now: int, deadline: int) -> StatusError:
    """Return the error of a request that has missed its deadline, or will."""
    is_transient = status is ErrorStatus.MISSED_DEADLINE_TRANSIENT
    cause = Cause(phase, _late(now, deadline))
    return MissedDeadlineTransient(cause=cause) if is_transient else MissedDeadlinePersistent(cause=cause)


class Rate:
    """How long preparations take at least, by what they have to do: nothing before the first one.

    Operations differ, and so do weights, so what counts is the lesser of what the fewest seconds for an operation, and
    the fewest for a byte, make of it. A refusal teaches nothing: each in a row asks for an eighth less.
    """

    def __init__(self) -> None:
        self._operation = self._byte = self._doubts = 0.0

    def needed(self, operations: int, nbytes: int) -> float:
        """Seconds at least."""
        return min(operations * self._operation, nbytes * self._byte) * max(0.0, 1 - self._doubts / 8)

    @contextmanager
    def preparing(self, operations: int, nbytes: int) -> Iterator[None]:
        """Raise MissedDeadlinePersistent if too little time is left for what this thread prepares meanwhile."""
        self._check(operations, nbytes)
        begin = time.monotonic()
        try:
            yield
        except MissedDeadlineTransient:
            self._doubts = 0.0  # it was tried
            raise
        self._note(operations, nbytes, time.monotonic() - begin)

    def _check(self, operations: int, nbytes: int) -> None:
        deadline = lib.burst_due()
        if deadline != FOREVER and (now := clock.now()) + self.needed(operations, nbytes) * 1e9 > deadline:
            self._doubts += 1
            raise missed(ErrorStatus.MISSED_DEADLINE_PERSISTENT, "before start", now, deadline)

    def _note(self, operations: int, nbytes: int, seconds: float) -> None:
        operation, byte = seconds / max(1, operations), seconds / max(1, nbytes)
        is_new = not self._operation or self._doubts
        self._operation = operation if is_new else min(self._operation, operation)
        self._byte = byte if is_new else min(self._byte, byte)
        self._doubts = 0.0
