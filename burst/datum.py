"""Elements of packets: FmqRequestDatum and FmqResultDatum, how each kind lies in its 24 bytes, and the packets.

The queue carries opaque elements of `DATUM_DTYPE`. The dtype of a kind shows its fields:

    >>> element = np.frombuffer(packet, FmqRequestDatum.PACKET_INFORMATION.dtype, count=1)[0]
    >>> element["packetSize"], element["numberOfInputs"]
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from burst.errors import Malformed

if TYPE_CHECKING:
    from collections.abc import Sequence

DATUM: Final = 24
"""Bytes in one element."""
DATUM_DTYPE: Final = f"V{DATUM}"
"""The numpy dtype of a queue of elements."""


class Datum(Enum):
    """A table of kinds: each member is a discriminator and its payload.

    The payload is a list of `offset name code`, the code being that of `struct`; all other bytes are zero.
    """

    def __init__(self, number: int, payload: str) -> None:
        fields = [(int(at), name, code) for at, name, code in map(str.split, payload.split(", "))]
        names, codes, offsets = ["discriminator"], ["B"], [0]
        layout, end = "<B", 1
        for at, name, code in fields:
            layout += f"{at - end}x{code}"
            end = at + struct.calcsize(f"<{code}")
            names.append(name)
            codes.append(code)
            offsets.append(at)
        self.number = number
        self.struct = struct.Struct(f"{layout}{DATUM - end}x")
        self.dtype: np.dtype[Any] = np.dtype(
            {"names": names, "formats": [f"<{code}" for code in codes], "offsets": offsets, "itemsize": DATUM}
        )


class FmqRequestDatum(Datum):
    """The kinds of element that a request is made of."""

    PACKET_INFORMATION = 0, "4 packetSize I, 8 numberOfInputs I, 12 numberOfOutputs I, 16 numberOfPools I"
    INPUT_OPERAND_INFORMATION = 1, "4 hasNoValue ?, 8 poolIndex I, 12 offset I, 16 length I, 20 numberOfDimensions I"
    INPUT_OPERAND_DIMENSION_VALUE = 2, "4 dimension I"
    OUTPUT_OPERAND_INFORMATION = 3, "4 hasNoValue ?, 8 poolIndex I, 12 offset I, 16 length I, 20 numberOfDimensions I"
    OUTPUT_OPERAND_DIMENSION_VALUE = 4, "4 dimension I"
    POOL_IDENTIFIER = 5, "4 slot i"
    MEASURE_TIMING = 6, "4 measure i"
    BUFFER_TOKEN = 7, "4 token I"
    LOOP_TIMEOUT = 8, "8 nanoseconds Q"
    REQUEST_IDENTIFIER = 9, "8 id Q, 16 deadline Q"


class FmqResultDatum(Datum):
    """The kinds of element that a result is made of."""

    PACKET_INFORMATION = 0, "8 packetSize I, 12 errorStatus i, 16 numberOfOperands I"
    OPERAND_INFORMATION = 1, "8 isSufficient ?, 12 numberOfDimensions I"
    OPERAND_DIMENSION_VALUE = 2, "8 dimension I"
    EXECUTION_TIMING = 3, "8 timeOnDevice Q, 16 timeInDriver Q"
    REQUEST_IDENTIFIER = 4, "8 id Q"


def malformed(element: int, what: str) -> Malformed:
    """The error for what stands there."""
    return Malformed(f"element {element}: {what}")


class PacketWriter:
    """Puts a packet together: its elements from the second on, and at last the first, which counts them."""

    __slots__ = ("body",)

    def __init__(self) -> None:
        self.body: list[bytes] = []

    @property
    def element(self) -> int:
        """The index of the next element."""
        return 1 + len(self.body)

    def put(self, datum: Datum, *values: int) -> None:
        """The next element. Raises Malformed when a value does not fit."""
        self.body.append(_pack(self.element, datum, values))

    def put_each(self, datum: Datum, values: Sequence[int]) -> None:
        """An element for each value."""
        for value in values:
            self.put(datum, value)

    def finish(self, information: Datum, *values: int) -> bytes:
        """The whole packet; `values` follow its size in the first element."""
        return b"".join([_pack(0, information, (self.element, *values)), *self.body])


def _pack(element: int, datum: Datum, values: tuple[int, ...]) -> bytes:
    try:
        return datum.struct.pack(datum.number, *values)
    except struct.error as error:
        raise malformed(element, f"{datum.name} cannot hold {values}: {error}") from None


class PacketReader:
    """Takes a packet apart from its first element to its last, and never looks beyond."""

    __slots__ = ("data", "element", "size")

    def __init__(self, packet: bytes | memoryview) -> None:
        self.data = bytes(packet)  # bytes are not copied again; any other memory might still change under us
        self.element = 0  # index of the next element
        self.size, rest = divmod(len(self.data), DATUM)
        if rest or not self.size:
            raise malformed(self.size, f"{len(self.data)} bytes are not one or more elements of {DATUM}")

    def take(self, datum: Datum) -> tuple[Any, ...]:
        """The values of the next element, which must be a `datum` that packs to the very same bytes."""
        start = self.element * DATUM
        raw = self.data[start : start + DATUM]
        if not raw:
            raise malformed(self.element, f"the packet ends where {datum.name} is due")
        values = datum.struct.unpack(raw)
        if values[0] != datum.number:
            raise malformed(self.element, f"discriminator {values[0]} where {datum.number}, {datum.name}, is due")
        if datum.struct.pack(*values) != raw:
            raise malformed(self.element, f"{datum.name} has padding that is not 0, or a bool neither 0 nor 1")
        self.element += 1
        return values[1:]

    def next_is(self, datum: Datum) -> bool:
        """Whether the next element, if there is one, begins like a `datum`."""
        return self.data[self.element * DATUM : self.element * DATUM + 1] == bytes([datum.number])

    def take_each(self, datum: Datum, count: int) -> tuple[int, ...]:
        """The single values of the next `count` elements, all of them `datum`."""
        if count > self.size - self.element:
            raise malformed(self.element - 1, f"announces {count} elements; {self.size - self.element} follow")
        return tuple([self.take(datum)[0] for _ in range(count)])

    def check_size(self, announced: int, least: int) -> None:
        """Compare the size that the packet announces, and the least that its counts add up to, with what came."""
        if announced != self.size:
            raise malformed(0, f"packetSize is {announced}, but {self.size} elements came")
        if least > self.size:
            raise malformed(0, f"its counts announce {least} elements or more, but {self.size} came")

    def finish(self) -> None:
        """Nothing may be left over."""
        if self.element != self.size:
            raise malformed(self.element, "the packet goes on after its last element")
