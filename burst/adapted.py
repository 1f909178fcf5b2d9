"""Objects of others that need not inherit from Burst's classes: what they leave out has its default.

This is the only place of this package that asks an object what it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burst.execution import Execution

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from burst.execution_burst import BurstExecutorWithCache
    from burst.messages import OutputShape

_FIXED = (
    "native",
    "launch",
    "enters_itself",
    "estimate",
    "written",
    "copied_bytes",
    "checked_bytes",
    "failure",
    "cancel",
)


class AdaptedExecution(Execution):
    """An execution of an object that has `run`, `shapes` and `is_static`, and perhaps more of what `Execution` names.

    None stands for an attribute that it does not have.
    """

    def __init__(self, found: Any) -> None:
        self._found, self.run, self.is_static = found, found.run, found.is_static
        for name in _FIXED:
            if (value := getattr(found, name, None)) is not None:
                setattr(self, name, value)

    @property
    def shapes(self) -> Sequence[OutputShape]:  # type: ignore[override]  # follows the other object's
        """Shapes of the outputs, after a run."""
        shapes: Sequence[OutputShape] = self._found.shapes
        return shapes

    @property
    def joined(self) -> int:  # type: ignore[override]  # follows the other object's
        """Number of requests in the last run."""
        found = getattr(self._found, "joined", None)
        return 1 if found is None else found

    @property
    def time_on_device(self) -> int | None:  # type: ignore[override]  # follows the other object's
        """Microseconds that the last run computed, if the other object says so."""
        found: int | None = getattr(self._found, "time_on_device", None)
        return found


def as_execution(found: Any) -> Execution:
    """Return what a `bind` has returned as an `Execution`."""
    return found if isinstance(found, Execution) else AdaptedExecution(found)


def cancel_of(executor: BurstExecutorWithCache) -> Callable[[], object]:
    """Return the executor's method `cancel`; one that does nothing, if it has none."""
    found: Callable[[], object] | None = getattr(executor, "cancel", None)
    return found or _nothing


def _nothing() -> None:
    """Cancel nothing: the execution goes on to its end."""
