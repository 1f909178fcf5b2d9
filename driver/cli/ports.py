"""Named inputs and outputs of a model, with conversion between real numbers and stored ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driver.nn.tensors import TEXTS, tensors_of
from driver.nn.types import ZERO_POINTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.importers.header import Header
    from driver.nn import Model, Operand
    from driver.nn.tensors import TensorInfo


class Port(NamedTuple):
    """An input or output of a model."""

    name: str  #: as in `model.inputs` and `model.outputs`
    operand: Operand

    @property
    def _extra(self) -> dict[str, Any]:
        return self.operand.extra if isinstance(self.operand.extra, dict) else {}

    @property
    def is_state(self) -> bool:
        """True for a state that the importer made an input and an output."""
        return "state" in self._extra

    @property
    def labels(self) -> list[str]:
        """The name of each class, where the file says it; else empty."""
        return [str(label) for label in self._extra.get("labels") or ()]

    @property
    def symbols(self) -> tuple[str, ...]:
        """The file's name of each open dimension; "" where it has none."""
        given = tuple(word or "" for word in self._extra.get("dims") or ())
        return given if len(given) == len(self.operand.dimensions) else ("",) * len(self.operand.dimensions)

    @property
    def kind(self) -> str:
        """The kind of value, as in `TensorInfo`: "" of a tensor of numbers."""
        return str(self._extra.get("type") or "")

    @property
    def dtype(self) -> str:
        """The element type: numpy's name, "bfloat16" or "string". Of what is no tensor, its kind."""
        if self.kind:
            return "string" if self.kind == TEXTS else self.kind
        return "bfloat16" if "BFLOAT16" in self.operand.type.name else self.operand.type.dtype.name

    @property
    def words(self) -> str:
        """Type and shape, as text."""
        quantised = "quantised " if self.operand.type.is_quantised else ""
        if self.kind and self.kind != TEXTS:
            return self.kind
        is_unranked = not self.operand.dimensions and not self.operand.type.is_scalar
        return f"{quantised}{self.dtype} {'of any rank' if is_unranked else shape_words(self.operand.dimensions)}"

    def stored(self, real: NDArray[Any]) -> NDArray[Any]:
        """Convert real numbers to the stored type: quantise to the nearest step."""
        operand, dtype = self.operand, self.operand.type.dtype
        if not operand.type.is_quantised:
            return real.astype(dtype)
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        steps: NDArray[Any] = np.rint(real / operand.scale + operand.zero_point).clip(least, most).astype(dtype)
        return steps

    def real(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Convert stored numbers to real ones: dequantise."""
        if self.dtype == "bfloat16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        if not self.operand.type.is_quantised:
            return stored
        numbers: NDArray[Any] = (stored.astype(np.float64) - self.operand.zero_point) * self.operand.scale
        return numbers

    @property
    def is_real(self) -> bool:
        """True if it holds real numbers."""
        return self.operand.type.is_quantised or self.dtype.startswith(("float", "bfloat"))

    @property
    def is_byte(self) -> bool:
        """True if it is quantised to 256 steps, as many as a byte of a pixel has."""
        return self.operand.type in ZERO_POINTS and self.operand.type.dtype.itemsize == 1


def inputs_of(model: Model) -> list[Port]:
    """Return the model's inputs, in order."""
    return _ports([model.main.operands[i] for i in model.main.inputs], "input")


def outputs_of(model: Model) -> list[Port]:
    """Return the model's outputs, in order."""
    return _ports([model.main.operands[i] for i in model.main.outputs], "output")


def declared(header: Header) -> tuple[list[Port], list[Port]]:
    """Return the inputs and outputs that a file declares, in order. None of them may be refused."""
    sides = (("input", header.inputs), ("output", header.outputs))
    inputs, outputs = (_ports([tensor.operand() for tensor in tensors], word) for word, tensors in sides)
    return inputs, outputs


def _ports(operands: Sequence[Operand], word: str) -> list[Port]:
    infos = tensors_of(operands, word)
    return [Port(info.name, _of_tensor(info, operand)) for info, operand in zip(infos, operands, strict=True)]


def _of_tensor(info: TensorInfo, operand: Operand) -> Operand:
    """Return the operand; of texts with their sizes, in place of those of the bytes in which they travel."""
    return replace(operand, dimensions=tuple(size or 0 for size in info.shape or ())) if info.kind else operand


def shape_words(shape: Sequence[int]) -> str:
    """Format a shape: 1 x 224 x 224 x 3, with ? for an open dimension."""
    return " x ".join(str(size) if size else "?" for size in shape) or "scalar"
