"""A network as the HAL describes it: subgraphs of operands and operations, in plain immutable records.

Building a record checks no more than that its words exist; `validate` checks the rules between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .types import Dimensions, OperandLifeTime, OperandType

ChannelQuant = tuple[tuple[float, ...], int]
"""Per-channel quantisation: one scale per channel, and the dimension that counts channels."""


def _set(record: object, /, **fields: Any) -> None:
    """Give a frozen record its fields."""
    for name, field in fields.items():
        object.__setattr__(record, name, field)


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """One value of a subgraph.

    `type` and `lifetime` may be given by their HAL names. A dimension of 0 is unknown, and so is the rank of a tensor
    without dimensions. `value` is the ndarray of a constant or the index, in `Model.referenced`, of a SUBGRAPH.
    `number_of_consumers` None means computed; `location` and `extra` are carried for the code that made the model.
    """

    type: OperandType
    dimensions: Dimensions
    scale: float = 0.0
    zero_point: int = 0
    lifetime: OperandLifeTime = OperandLifeTime.TEMPORARY_VARIABLE
    value: Any = None
    channel_quant: ChannelQuant | None = None
    number_of_consumers: int | None = None
    location: Any = None
    extra: Any = None

    def __init__(
        self,
        type: OperandType | str | int,  # noqa: A002 - the HAL's word
        dimensions: Sequence[int] = (),
        scale: float = 0.0,
        zero_point: int = 0,
        lifetime: OperandLifeTime | str | int = OperandLifeTime.TEMPORARY_VARIABLE,
        value: Any = None,
        channel_quant: tuple[Sequence[float], int] | None = None,
        number_of_consumers: int | None = None,
        location: Any = None,
        extra: Any = None,
    ) -> None:
        if channel_quant is not None:
            scales, channel = channel_quant
            channel_quant = (tuple(float(s) for s in scales), int(channel))
        _set(
            self,
            type=OperandType.parse(type),
            dimensions=tuple(map(int, dimensions)),
            scale=float(scale),
            zero_point=int(zero_point),
            lifetime=OperandLifeTime.parse(lifetime),
            value=value,
            channel_quant=channel_quant,
            number_of_consumers=number_of_consumers,
            location=location,
            extra=extra,
        )

    @property
    def is_known(self) -> bool:
        """Whether the model tells its shape."""
        return self.type.is_scalar or (bool(self.dimensions) and 0 not in self.dimensions)


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of a subgraph: a HAL operation and the indices of the operands it reads and writes."""

    type: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def __init__(self, type: str, inputs: Sequence[int], outputs: Sequence[int]) -> None:  # noqa: A002
        _set(self, type=str(type), inputs=tuple(map(int, inputs)), outputs=tuple(map(int, outputs)))


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Operands, the operations between them in executable order, and which operands go in and out."""

    operands: tuple[Operand, ...]
    operations: tuple[Operation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def __init__(
        self,
        operands: Sequence[Operand],
        operations: Sequence[Operation],
        inputs: Sequence[int],
        outputs: Sequence[int],
    ) -> None:
        listed = {"inputs": tuple(map(int, inputs)), "outputs": tuple(map(int, outputs))}
        _set(self, operands=tuple(operands), operations=tuple(operations), **listed)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Model:
    """A main subgraph and those that its control flow refers to.

    `relaxed` allows float32 to be computed with the range and precision of float16.
    """

    main: Subgraph
    referenced: tuple[Subgraph, ...] = ()
    relaxed: bool = False

    def __post_init__(self) -> None:
        _set(self, referenced=tuple(self.referenced))
