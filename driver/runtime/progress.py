"""The progress of a compilation, and the end of its time."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Literal

from burst import MissedDeadlinePersistent
from burst.messages import Cause

if TYPE_CHECKING:
    from collections.abc import Callable

_UNSHOWN = 1.0  # seconds


def _silent(_what: str, _done: float) -> None:
    """Show nothing."""


class ProgressLine:
    """A line in the terminal, for what takes more than a second."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def show(self, what: str, done: float) -> None:
        """Overwrite the line; clear it at the end."""
        if time.monotonic() - self._begin > _UNSHOWN:
            line = "" if done >= 1 else f"{done:4.0%} {what:.100}"
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()


class CompilationClock:
    """A clock of one compilation: it says how far it has come, and when time is up."""

    def __init__(self, timeout: float | None, progress: Callable[[str, float], object] | Literal[False] | None) -> None:
        is_shown = progress is None and sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
        self._timeout, self._progress = timeout, progress or (ProgressLine().show if is_shown else _silent)
        self._end, self._done = None if timeout is None else time.monotonic() + timeout, 0.0

    def begin(self, what: str, done: float) -> None:
        """Begin the next step. Raise MissedDeadlinePersistent."""
        if self._end is not None and time.monotonic() >= self._end:
            cause = Cause("before start", time.monotonic() - self._end)
            raise MissedDeadlinePersistent(f"timeout={self._timeout} s passed before this step: {what}", cause=cause)
        self._done = done
        self._progress(what, done)

    @property
    def end(self) -> float | None:
        """The end as a time.monotonic(); None: there is none."""
        return self._end

    def note(self, what: str) -> None:
        """Show something within a step."""
        self._progress(what, self._done)

    def left(self) -> float | None:
        """Return the seconds that are left; None: there is no end."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())
