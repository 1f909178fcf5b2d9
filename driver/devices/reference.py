"""The reference device: numpy, on the CPU, and the definition that all others are held to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from burst import GeneralFailure
from burst.run_queue import checkpoint
from driver.deadlines import check
from driver.interface import BoundExecution, CacheFiles, Device, Needs, PreparedModel, Saved
from driver.nn import OPERATIONS, Bound, Interpreter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from driver.interface import BindOptions, Preparation
    from driver.nn import Model
    from driver.nn.interpreter import DynamicBound


class ReferenceDevice(Device):
    """Runs every operation that driver.nn defines."""

    name = "reference"
    version = f"1 (numpy {np.__version__})"
    type = "CPU"
    needs = Needs()  # it computes, and opens nothing
    cache_files = CacheFiles(0, 0)  #: transforming weights takes no longer than verifying transformed ones

    def supported_operations(self, model: Model) -> list[bool]:
        """Return True for the operations of driver.nn."""
        return [operation.type in OPERATIONS for operation in model.main.operations]

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Return an interpreter, made operation by operation."""
        return ReferenceModel(model, preparation.pace)


class ReferenceModel(PreparedModel):
    """An interpreter, as the engine calls it."""

    serves_all = True

    def __init__(self, model: Model, pace: Callable[[], object]) -> None:
        self._interpreter = Interpreter(model, pace)
        self.is_static = self._interpreter.is_static

    def bind(
        self,
        inputs: Sequence[NDArray[Any] | None],
        outputs: Sequence[NDArray[Any]],
        options: BindOptions,
    ) -> BoundExecution:
        watch = RunWatch()
        bound = self._interpreter.bind(inputs, outputs, options.pace, loop_timeout=options.loop_timeout, look=watch)
        return StaticExecution(bound, watch) if isinstance(bound, Bound) else DynamicExecution(bound, watch)

    def saved(self, root: NDArray[np.uint8]) -> Saved:
        """Return nothing but the model."""
        return Saved()


class RunWatch:
    """A watch at which an execution looks every few milliseconds: it may have to end, or to let others come first."""

    __slots__ = ("is_cancelled",)

    def __init__(self) -> None:
        self.is_cancelled = False

    def __call__(self) -> None:
        """Let others come first, and look if the execution has to end. Raise GeneralFailure,
        MissedDeadlineTransient.
        """
        if self.is_cancelled:
            raise GeneralFailure("the execution was cancelled")
        checkpoint()
        check("executing")


class WatchedExecution(BoundExecution):
    """Ends at its next look when it is cancelled."""

    def __init__(self, watch: RunWatch) -> None:
        self._watch = watch

    def cancel(self) -> None:
        self._watch.is_cancelled = True


class StaticExecution(WatchedExecution):
    """Calls numpy's steps without a frame around them: on shapes that fit they cannot fail."""

    is_infallible = True

    def __init__(self, bound: Bound, watch: RunWatch) -> None:
        super().__init__(watch)
        self.run, self.shapes = bound.run, bound.shapes


class DynamicExecution(WatchedExecution):
    """Has the shapes of its outputs once it has run."""

    def __init__(self, bound: DynamicBound, watch: RunWatch) -> None:
        super().__init__(watch)
        self._bound, self.shapes = bound, bound.shapes

    def run(self) -> None:
        try:
            self._bound.run()
        finally:
            self.shapes = self._bound.shapes
