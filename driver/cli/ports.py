"""Named inputs and outputs of a model, with conversion between real numbers and stored ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driver.nn.types import ZERO_POINTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.nn import Model, Operand


class Port(NamedTuple):
    """An input or output of a model."""

    name: str  #: from the model file, else "input 0"
    operand: Operand

    @property
    def is_state(self) -> bool:
        """True for a state that passes from one execution to the next."""
        return isinstance(self.operand.extra, dict) and "state" in self.operand.extra

    @property
    def words(self) -> str:
        """Type and shape, as text."""
        return f"{self.operand.type.name} {shape_words(self.operand.dimensions)}"

    def stored(self, real: NDArray[Any]) -> NDArray[Any]:
        """Converts real numbers to the stored type; quantises to the nearest step."""
        operand, dtype = self.operand, self.operand.type.dtype
        if not operand.type.is_quantised:
            return real.astype(dtype)
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        steps: NDArray[Any] = np.rint(real / operand.scale + operand.zero_point).clip(least, most).astype(dtype)
        return steps

    def real(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Converts stored numbers to real ones: dequantises."""
        if not self.operand.type.is_quantised:
            return stored
        numbers: NDArray[Any] = (stored.astype(np.float64) - self.operand.zero_point) * self.operand.scale
        return numbers

    @property
    def is_byte(self) -> bool:
        """True if it is quantised to 256 steps, as many as a byte of a pixel has."""
        return self.operand.type in ZERO_POINTS and self.operand.type.dtype.itemsize == 1


def inputs_of(model: Model) -> list[Port]:
    """The model's inputs, in order."""
    return _ports(model, model.main.inputs, "input")


def outputs_of(model: Model) -> list[Port]:
    """The model's outputs, in order."""
    return _ports(model, model.main.outputs, "output")


def _ports(model: Model, numbers: Sequence[int], kind: str) -> list[Port]:
    found, names = [], set[str]()
    for n, number in enumerate(numbers):
        operand = model.main.operands[number]
        named = operand.extra.get("name") if isinstance(operand.extra, dict) else None
        name = named if named and named not in names else f"{kind} {n}"
        names.add(name)
        found.append(Port(name, operand))
    return found


def shape_words(shape: Sequence[int]) -> str:
    """Formats a shape: 1 x 224 x 224 x 3, with ? for an open dimension."""
    return " x ".join(str(size) if size else "?" for size in shape) or "scalar"
