"""What client and engine say to each other about a buffer that the device manages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
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
    is_fresh: bool  #: it has no value
    described: tuple[int, ...]  #: the dimensions that its description and its roles fix; 0 where open
