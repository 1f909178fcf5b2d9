"""What the header of a model file says of its inputs and outputs, whatever the format; weights are not looked at."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from driver.errors import ImportFailed
from driver.importers.obstacle import InputSizes, Obstacle, Shapes, fix_sizes
from driver.nn import Operand, OperandType
from driver.nn.file_form import PACKED, tensor_type

if TYPE_CHECKING:
    from collections.abc import Mapping

HIGHEST_RANK = 32
_QUANTISED = {
    "uint8": (OperandType.TENSOR_QUANT8_ASYMM, 0, 255),
    "int8": (OperandType.TENSOR_QUANT8_ASYMM_SIGNED, -128, 127),
}
_SHOWN = 64
"""Characters of a name that an error message shows."""


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """An input or an output.

    dtype: numpy's name of it, or "bfloat16". shape: 0 where the file leaves a size open; None: the rank, too.
    scale, zero_point: of quantised integers; a scale of 0 for others. extra: of the operand. refusal: why the file form
    does not carry it; None: it does. A dtype of "packed" is no tensor of numbers: `extra["type"]` says what it is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    scale: float = 0.0
    zero_point: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    refusal: Obstacle | None = None

    def __str__(self) -> str:
        return f"{self.name[:_SHOWN]}: {self.dtype} {self.sizes}"

    @property
    def sizes(self) -> InputSizes:
        """Its sizes, and the names of open ones."""
        return InputSizes(self.shape, tuple(word or "" for word in self.extra.get("dims", ())))

    def operand(self) -> Operand:
        """Return the operand of a model in file form."""
        rank = None if self.shape is None else len(self.shape)
        extra = {"name": self.name, **self.extra}
        if self.dtype == "packed":
            return Operand(PACKED, (0,), extra={**extra, "shape": self.shape})
        kind, low, high = _QUANTISED.get(self.dtype, (None, 0, 0))
        is_usual = math.isfinite(self.scale) and self.scale > 0 and low <= self.zero_point <= high
        if kind is not None and rank != 0 and is_usual:
            return Operand(kind, self.shape or (), self.scale, self.zero_point, extra=extra)
        if self.scale:
            extra["quantisation"] = (self.scale, self.zero_point)
        return Operand(tensor_type(self.dtype, rank), self.shape or (), extra=extra)


@dataclass(frozen=True, slots=True)
class Header:
    """Inputs and outputs in the file's order.

    external: the ranges of other files that hold weights. signatures: the names of the file's entries, this one's
    first. signature: its own; None: it has no name.
    """

    inputs: tuple[HeaderTensor, ...]
    outputs: tuple[HeaderTensor, ...]
    external: tuple[ExternalRange, ...] = ()
    signatures: tuple[str, ...] = ()
    signature: str | None = None

    @property
    def refusals(self) -> list[Obstacle]:
        """The reasons why inputs and outputs are not carried."""
        return [tensor.refusal for tensor in (*self.inputs, *self.outputs) if tensor.refusal is not None]

    def own_names(self, shapes: Shapes | None) -> Shapes:
        """Return the given sizes by the names that inputs have here, where they are called by those of their
        tensors.
        """
        also = {t.extra["tensor"]: t.name for t in self.inputs if "tensor" in t.extra}
        own = {t.name for t in self.inputs}
        return {name if name in own else also.get(name, name): sizes for name, sizes in (shapes or {}).items()}

    def without_optional(self) -> Header:
        """Return this header without the inputs that may be left out."""
        return replace(self, inputs=tuple(t for t in self.inputs if not t.extra.get("optional")))

    def with_shapes(self, shapes: Shapes | None) -> Header:
        """Return this header with inputs of the given sizes. Raise ImportFailed unless the file allows them."""
        fixed = fix_sizes({t.name: t.sizes for t in self.inputs}, self.own_names(shapes))
        return replace(self, inputs=tuple(replace(t, shape=fixed[t.name].shape) for t in self.inputs))


@dataclass(frozen=True, slots=True)
class ExternalRange:
    """Where the values of the constant `tensor` lie: in the file `name`.

    length: None is all the rest. said: where the model says the offset, in decimal digits; None: nowhere, and it is 0.
    """

    tensor: str
    name: str
    offset: int
    length: int | None
    said: tuple[int, int] | None = None

    def check(self, size: int) -> tuple[int, int]:
        """Beginning and end of the range in a file of `size` bytes. Raise ImportFailed when it does not fit."""
        end = size if self.length is None else self.offset + self.length
        if not 0 <= self.offset <= end <= size:
            where = f"tensor {self.tensor[:_SHOWN]!r}: {end - self.offset} bytes at {self.offset}"
            raise ImportFailed(f"{where} lie outside the {size} bytes of {self.name[:_SHOWN]!r}")
        return self.offset, end
