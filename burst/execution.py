"""One request, bound to its memory: what everything that executes requests runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burst.errors import status_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from burst.messages import ErrorStatus, OutputShape


class Execution:
    """One request, bound to its memory, to be run any number of times.

    A subclass defines `run` and sets `shapes` and `is_static`; the rest has a default. An object that does not inherit
    from this class may be used in its place: what it lacks, or what is None, has the default.
    """

    run: Callable[[], object]
    """Executes. Raises StatusError."""

    shapes: Sequence[OutputShape]
    """The shapes of the outputs, after a run."""

    is_static: bool
    """True when `shapes` never changes."""

    native: tuple[int, int] | None = None
    """The addresses of a C function `int32_t f(void *context)` that does what `run` does, and of its context. If the
    shapes never change, the listener calls that function instead of `run`, without Python and without the GIL, one call
    at a time. It returns an ErrorStatus and lives as long as the execution.
    """

    launch: Callable[[int], object] | None = None
    """Gets an address, which stands for the run, begins what `run` does, and returns at once.

    When the outputs are written, `burst.executor.COMPLETED` has to be called with that address, once, in any thread: a
    C function `void f(void *run)`, which neither waits nor takes the GIL. Then a burst's listener calls `launch`
    instead of `run` or `native`, but for the first time, and takes the next request; answers keep the order of the
    requests. It raises before it has begun anything, or not at all.
    """

    enters_itself: bool = False
    """True: `run` enters the run queue itself, when it needs a slot; its caller does not hold one."""

    joined: int = 1
    """The number of requests that were in the last run, with this one. More than one only where `enters_itself`."""

    estimate: Any = None
    """A burst_estimate of the time that executions of this kind take; runs update it."""

    written: Any = ()
    """uint32_t words in C, one for each buffer of the device that it writes. They are set to 1, no value, when an
    execution fails, also if it was not run.
    """

    time_on_device: int | None = None
    """Microseconds that the last run computed, as the device measured them; None: all the time that `run` took."""

    copied_bytes: int = 0
    """Bytes of its arguments that each run copies."""

    checked_bytes: int = 0
    """How many of these it copies only to check them in private memory."""

    def failure(self, status: ErrorStatus) -> Exception:
        """Return the error that `run` would have raised in the place of a `native` that has returned this status."""
        return status_error(status)

    def cancel(self) -> None:
        """End the run in progress as soon as it can, and later runs at once. Any thread may call it when the client is
        gone. By default a run goes on to its end.
        """
