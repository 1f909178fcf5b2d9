"""Retries calls that fail with a transient error. Nothing retries by itself: the caller says how often or how long."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, TypeVar

from burst import MissedDeadlineTransient, ResourceExhaustedTransient, StatusError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
TRANSIENT: tuple[type[Exception], ...] = (MissedDeadlineTransient, ResourceExhaustedTransient)
_WITHOUT_HINT = 0.01  # seconds: of errors that say nothing
_MOST_DOUBLINGS = 6


def retry(
    function: Callable[[], T],
    *,
    attempts: int | None = None,
    timeout: float | None = None,
    until: float | None = None,
    on: type[Exception] | tuple[type[Exception], ...] = TRANSIENT,
) -> T:
    """Return what `function()` returns, calling it again while it raises an error that passes.

    Before a call it waits as long as the error's `retry_after` says, twice as long after each further failure up to 64
    times, and up to as much again at random, so that callers that failed together do not come back together.

    Args:
        function: is called without arguments. Its own deadline is its own business: give it what is left, or `until`.
        attempts: calls at most, one or more.
        timeout: seconds from now after which no call begins.
        until: the same as a time.monotonic(). A wait that would go past the end is not begun.
        on: what counts as passing; by default the two TRANSIENT errors.

    Raise what the last call raised; ValueError without any limit.
    """
    if attempts is None and timeout is None and until is None:
        raise ValueError("retry without a limit: give attempts=, timeout= or until=")
    if attempts is not None and attempts < 1:
        raise ValueError(f"attempts={attempts!r}: 1 or more")
    end = min(float("inf") if until is None else until, float("inf") if timeout is None else time.monotonic() + timeout)
    made = 0
    while True:
        try:
            made += 1
            return function()
        except on as error:
            pause = _pause(error, made)
            if made == attempts or time.monotonic() + pause >= end:
                raise
        time.sleep(pause)


def _pause(error: Exception, made: int) -> float:
    hint = error.retry_after if isinstance(error, StatusError) else None
    usual: float = (_WITHOUT_HINT if hint is None else hint) * 2 ** min(made - 1, _MOST_DOUBLINGS)
    return usual * (1 + random.random())  # noqa: S311 (not for secrets)
