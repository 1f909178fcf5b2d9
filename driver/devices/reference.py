"""The reference device: numpy, on the CPU, and the definition that all others are held to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from burst.turns import checkpoint
from driver.deadlines import checker
from driver.interface import CacheFiles, Saved
from driver.nn import OPERATIONS, Interpreter

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.interface import PreparedModel
    from driver.nn import Model


class ReferenceDevice:
    """Runs every operation that driver.nn defines."""

    name = "reference"
    version = f"1 (numpy {np.__version__})"
    type = "CPU"
    cache_files = CacheFiles(0, 0)  #: of its own: to transform weights takes no longer than to verify transformed ones

    def supported_operations(self, model: Model) -> list[bool]:
        """True for the operations of driver.nn."""
        return [operation.type in OPERATIONS for operation in model.main.operations]

    def prepare(self, model: Model, pace: Callable[[], object]) -> PreparedModel:
        """An interpreter, made operation by operation."""
        return _Interpreter(model, pace, checkpoint=checkpoint, checker=checker)

    def restore(self, model: Model, _: Saved, __: object, pace: Callable[[], object]) -> PreparedModel:
        """The same."""
        return self.prepare(model, pace)


class _Interpreter(Interpreter):
    @staticmethod
    def saved(_: object) -> Saved:
        """Nothing but the model."""
        return Saved()
