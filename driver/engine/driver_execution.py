"""A driver's execution as the engine runs it: with the buffers that it is bound to, and what is done around runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from burst import OutputShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from burst import ErrorStatus
    from driver.engine.driver_memory import HeldBuffer
    from driver.interface import BoundExecution


class WatchedRun(Protocol):
    """A way to start and end an execution that the engine watches."""

    @property
    def run(self) -> Callable[[], object]: ...
    @property
    def launch(self) -> Callable[[int], object] | None: ...
    @property
    def cancel(self) -> Callable[[], object]: ...


class DriverExecution:
    """A driver's execution with the engine's parts around it, which are none by default.

    bound: the driver's execution. watched: how to start and end it; None: as the driver says. count: called after each
    run, which therefore takes place in Python. around: called with what runs it, and does so, in Python. held: the
    driver's buffers that it is bound to, which live longer.
    """

    def __init__(
        self,
        bound: BoundExecution,
        held: Sequence[HeldBuffer] = (),
        watched: WatchedRun | None = None,
        count: Callable[[], object] | None = None,
        around: Callable[[Callable[[], object]], object] | None = None,
    ) -> None:
        self._held, self.bound = held, bound
        how: WatchedRun = watched or bound
        self._run, self._launch, self._cancel = how.run, how.launch, how.cancel
        self.native = bound.native
        if count is not None:
            self._run, self._launch, self.native = partial(_run_and_count, how.run, count), None, None
        if around is not None:
            self._run, self._launch, self.native = partial(around, self._run), None, None

    @property
    def run(self) -> Callable[[], object]:
        """The method that executes. It is the driver's own where nothing is around it."""
        return self._run_held if self._held else self._run

    @property
    def launch(self) -> Callable[[int], object] | None:
        """The method that begins what `run` does; None: the driver cannot do so, or runs are counted."""
        return self._launch_held if self._held and self._launch else self._launch

    @property
    def shapes(self) -> Sequence[OutputShape]:
        """The outputs' shapes, and whether their memory suffices."""
        found: Sequence[Any] = self.bound.shapes
        return found if found and type(found[0]) is OutputShape else tuple(map(OutputShape._make, found))

    def failure(self, status: ErrorStatus) -> Exception:
        """Return why `native` has returned this status."""
        return self.bound.failure(status)

    def cancel(self) -> None:
        """End the run in progress, and all later ones."""
        self._cancel()

    def _run_held(self) -> object:
        """Keep this object, and with it the buffers, for as long as the caller keeps the method."""
        return self._run()

    def _launch_held(self, run: int) -> None:
        assert self._launch
        self._launch(run)

    def __del__(self) -> None:
        """Drop what is bound first, then the buffers."""
        held = self._held
        vars(self).clear()
        del held


def _run_and_count(run: Callable[[], object], count: Callable[[], object]) -> None:
    run()
    count()
