"""Deadlines: absolute CLOCK_MONOTONIC nanoseconds inside, seconds from now at the surface."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fmq._core import lib

if TYPE_CHECKING:
    from collections.abc import Callable

FOREVER = 2**64 - 1
now: Callable[[], int] = lib.fmq_now  #: nanoseconds of CLOCK_MONOTONIC


def deadline_of(timeout: float | None) -> int:
    """Return the deadline of a timeout: None waits for ever, 0 does not wait."""
    if timeout is None:
        return FOREVER
    if not timeout >= 0:
        raise ValueError(f"timeout={timeout!r}: seconds from now, 0 or more; None waits for ever")
    return 0 if timeout == 0 else min(FOREVER, now() + math.ceil(min(timeout, 1e9) * 1e9))
