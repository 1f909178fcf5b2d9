"""A device that says how often it has bound a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from driver.devices.reference import ReferenceDevice
from driver.interface import BoundExecution, PreparedModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.interface import BindOptions, Preparation
    from driver.nn import Model


class Bindings(ReferenceDevice):
    """Each byte of an output is the number of requests that the model has bound so far."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As the reference device does."""
        return _Counting(super().prepare(model, preparation))


class _Counting(PreparedModel):
    def __init__(self, prepared: PreparedModel) -> None:
        self._prepared, self.is_static, self.bound = prepared, prepared.is_static, 0

    def bind(
        self, inputs: Sequence[NDArray[Any] | None], outputs: Sequence[NDArray[Any]], options: BindOptions
    ) -> BoundExecution:
        self.bound += 1
        return _Telling(self._prepared.bind(inputs, outputs, options), outputs[0], self)


class _Telling(BoundExecution):
    def __init__(self, bound: BoundExecution, output: NDArray[Any], counting: _Counting) -> None:
        self._bytes, self._counting, self.shapes = output.view(np.uint8), counting, bound.shapes

    def run(self) -> None:
        self._bytes[...] = self._counting.bound
