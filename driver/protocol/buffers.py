"""What client and engine say to each other about a buffer that the device manages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Iterable

    from driver.nn import ExtensionType, Operand, OperandType


class BufferKind(NamedTuple):
    """Type and quantisation: the same for all roles of a buffer, and for both buffers of a copy."""

    type: OperandType | ExtensionType
    scale: float
    zero_point: int
    channel_quant: Any

    def __str__(self) -> str:
        quantised = f" of scale {self.scale:g} and zero point {self.zero_point}" if self.scale else ""
        return f"{self.type.name}{quantised}{' per channel' if self.channel_quant else ''}"

    @classmethod
    def of(cls, operand: Operand) -> BufferKind:
        return cls(operand.type, operand.scale, operand.zero_point, operand.channel_quant)


class BufferState(NamedTuple):
    """A buffer as it is now."""

    dimensions: tuple[int, ...]  #: of its value; `described` while it has none
    has_value: bool
    described: tuple[int, ...]  #: the dimensions that its description and its roles fix; 0 where open

    @classmethod
    def from_wire(cls, dimensions: Iterable[int], is_fresh: bool, described: Iterable[int]) -> Self:
        """Return the state in an answer, which says whether the buffer has no value."""
        return cls(tuple(dimensions), not is_fresh, tuple(described))

    def to_wire(self) -> list[object]:
        """Return what `from_wire` takes."""
        return [self.dimensions, not self.has_value, self.described]
