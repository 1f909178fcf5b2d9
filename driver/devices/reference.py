"""The reference device: numpy, on the CPU, and the definition that all others are held to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

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

    def supported_operations(self, model: Model) -> list[bool]:
        """True for the operations of driver.nn."""
        return [operation.type in OPERATIONS for operation in model.main.operations]

    def prepare(self, model: Model, pace: Callable[[], object]) -> PreparedModel:
        """An interpreter, made operation by operation."""
        return Interpreter(model, pace)
