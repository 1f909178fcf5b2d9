"""Deadlines: CLOCK_MONOTONIC nanoseconds inside, time.monotonic() seconds at the surface.

On a device the deadline goes by the thread that works (`burst_due`), so that an operation in the midst of a model, or
of its preparation, can look at it.
"""

from __future__ import annotations

import threading
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
MISSED = ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT
LAST_WORD = 200_000_000
"""Nanoseconds after a deadline in which a client still waits for what the device says of it: whose time it took."""
_LONGEST_WAIT = 2e6  # seconds: what poll takes


def checked(name: str, seconds: float) -> int:
    """Check a time that a caller gives as the argument `name`, on every path; as it travels, in nanoseconds.

    A `deadline` is a time.monotonic(); a `timeout`, a `duration` and a `loop_timeout` are seconds. All are 0 or more;
    infinity, and what the clock never reaches, is no limit: FOREVER. Raise ValueError.
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
    """Check those that are given, by the names of the arguments. Raise ValueError."""
    for name, seconds in times.items():
        if seconds is not None:
            checked(name, seconds)


def nanoseconds(deadline: float) -> int:
    """Return a deadline in nanoseconds, checked. Raise ValueError."""
    return checked("deadline", deadline)


def taken(plain: object) -> int | None:
    """Check a deadline that a peer has sent. Raise Malformed."""
    if plain is None or (type(plain) is int and 0 <= plain <= FOREVER):
        return plain
    raise Malformed(f"deadline {plain!r:.60}: nanoseconds of CLOCK_MONOTONIC from 0 to 2^64 - 1, or nil")


def earlier(timeout: float | None, deadline: int | None) -> int | None:
    """Return the deadline, or the end of so many seconds from now, whichever comes first; None without both.

    Raise ValueError, and Timeout after 0 seconds, in which nothing is done.
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
    """Return the seconds until a deadline: 0 when it has passed, None without one."""
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


def check_sent_in_time(deadline: int | None) -> None:
    """Raise MissedDeadlinePersistent if it has passed before anything was sent."""
    if found := passed(deadline):
        found.raise_for_status()


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
        """Return one that begins now. Raise ValueError, and Timeout after 0 seconds, in which nothing is done."""
        if timeout is None and deadline is None:
            return ENDLESS  # type: ignore[return-value]
        by = None if deadline is None else nanoseconds(deadline)
        end = by if by is not None and by < clock.now() else earlier(timeout, by)
        return cls(by, timeout, None if end == FOREVER else end)

    @property
    def ends_by_timeout(self) -> bool:
        """True if the timeout ends it, and not the deadline."""
        return self.timeout is not None and self.end != self.by

    @property
    def last(self) -> int | None:
        """The time when the caller goes on in any case: a moment after a deadline the device has had its last word."""
        return self.end if self.ends_by_timeout else last_word(self.end)

    def check(self, phase: Phase) -> None:
        """Raise Timeout if its timeout has passed."""
        if self.ends_by_timeout and self.end is not None and clock.now() >= self.end:
            raise timed_out(self.timeout, phase)

    def given_up(self) -> Result:
        """Return the result of a request that was not answered by `end`. Raise Timeout, unless its deadline has
        passed.
        """
        if missed := missed_in_waiting(self.by):
            return missed
        late_by = max(0, clock.now() - (self.end or 0)) / 1e9
        raise timed_out(self.timeout, WAITING, late_by)


ENDLESS = Wait(None, None, None)


def last_word(deadline: int | None) -> int | None:
    """Return until when a client waits for what the device says of that deadline."""
    return None if deadline is None else min(FOREVER, deadline + LAST_WORD)


def unanswered(late_ns: int) -> MissedDeadlineTransient:
    """Return the error of a wait that has ended without a word of the device."""
    return MissedDeadlineTransient(cause=Cause(WAITING, max(0, late_ns) / 1e9))


@contextmanager
def waiting(deadline: float | None) -> Iterator[int | None]:
    """Bound a call by that time.monotonic(); gives it in nanoseconds. Raise MissedDeadline*."""
    by = None if deadline is None else nanoseconds(deadline)
    check_sent_in_time(by)
    try:
        yield by
    except Timeout as error:
        now = clock.now()
        if error.phase == "executing":  # here, so no other kept it from being done
            raise missed(ErrorStatus.MISSED_DEADLINE_PERSISTENT, error.phase, now, by or 0) from None
        raise unanswered(now - (by or 0)) from None


@contextmanager
def until(timeout: float | None, deadline: float) -> Iterator[float | None]:
    """Give the timeout of a call that has to end at that time.monotonic(), too.

    Raise ValueError, and MissedDeadline* in the place of Timeout where the deadline comes first.
    """
    check_times(timeout=timeout)
    left = seconds_left(by := nanoseconds(deadline))
    if left is None or (timeout is not None and timeout <= left):
        yield timeout
    else:
        with waiting(deadline):
            yield timeout_until(by)


# ---- what a device does about it


class _Work(threading.local):
    """The preparation in this thread: when it began, and how long others kept it from going on, in ns."""

    since = others = 0


_work = _Work()


def begin_work(since: int, others: int = 0) -> None:
    """Note that what this thread prepares began then, and how long it has waited for others already."""
    _work.since, _work.others = since, others


def time_of_others() -> int:
    """Return how long others have kept this thread from what it prepares."""
    return _work.others


@contextmanager
def for_others() -> Iterator[None]:
    """Count the time in the block as others': this thread cannot go on with what it prepares."""
    begin = clock.now()
    try:
        yield
    finally:
        _work.others += clock.now() - begin


@contextmanager
def due(deadline: int | None) -> Iterator[None]:
    """Bound what this thread does meanwhile by a deadline, which `check` looks at."""
    before = lib.burst_due()
    if before == FOREVER:
        begin_work(clock.now())
    lib.burst_set_due(FOREVER if deadline is None else deadline)
    try:
        yield
    finally:
        lib.burst_set_due(before)


def deadline() -> int | None:
    """Return by when the execution or preparation in this thread has to be done, in CLOCK_MONOTONIC ns; None: at any
    time.
    """
    end = int(lib.burst_due())
    return None if end == FOREVER else end


def check(phase: Phase, deadline: int | None = None) -> None:
    """Raise MissedDeadline* if this thread's work is overdue. `deadline`: its, if it is known."""
    end = int(lib.burst_due()) if deadline is None else deadline
    if end != FOREVER and clock.now() > end:
        raise overdue(phase, end)


def overdue(phase: Phase, deadline: int) -> StatusError:
    """Return the error of work that is given up, or was not begun because of others.

    An execution that is given up says MISSED_DEADLINE_TRANSIENT, and csrc/burst/deadline.c judges it. A preparation is
    judged here: nobody knows what it needs, so others are at fault if they took as long as it is late, and not little.
    """
    now = clock.now()
    least = max(now - deadline, (deadline - _work.since) // 8)
    is_own_fault = phase == "preparing" and _work.others < least
    return missed(MISSED[is_own_fault], phase, now, deadline)


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
    """Hold that lock meanwhile. Raise MissedDeadlineTransient when this thread does not get it in time."""
    deadline = lib.burst_due()
    left = seconds_left(deadline)
    if not lock.acquire(blocking=False):
        with for_others():
            is_mine = lock.acquire(timeout=-1 if left is None else min(left, threading.TIMEOUT_MAX))
        if not is_mine:
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
