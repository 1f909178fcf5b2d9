"""The least utilisation that the kernel assumes of this process's threads: it picks processors and clocks by that.

A thread that sleeps between requests looks idle, so the clock is low when its next request comes. A clamp (uclamp,
sched_setattr(2)) says that it is busy whenever it runs. A thread clamps itself, without privilege, and threads that it
starts inherit the clamp. The sandbox lets it clamp no other one, which might be another program's.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from driver.engine.scheduling_attributes import SchedulingAttributes, attributes_of, set_attributes

if TYPE_CHECKING:
    from collections.abc import Iterator

FULL = 1024
"""The utilisation of a thread that is always busy, on the fastest processor."""

_KEEP, _CLAMP_LEAST = 0x08 | 0x10, 0x20  # policy and parameters stay; sched_util_min is given


def least() -> int:
    """Return the clamp of the calling thread. Raise OSError."""
    return attributes_of().least_utilisation


def set_least(value: int) -> None:
    """Clamp the calling thread. Raise OSError, with EOPNOTSUPP where the kernel cannot."""
    set_attributes(SchedulingAttributes(flags=_KEEP | _CLAMP_LEAST, least_utilisation=value))


@contextmanager
def clamped() -> Iterator[None]:
    """Clamp the calling thread to FULL within the block; threads that it starts meanwhile stay so. Raise OSError."""
    before = least()
    set_least(FULL)
    try:
        yield
    finally:
        set_least(before)
