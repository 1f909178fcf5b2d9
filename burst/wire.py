"""Wire version 1: one request, or one result, as a packet of 24-byte elements. It is the HAL 1.2 datum table exactly.

An element starts with a discriminator byte that says which kind it is; its payload follows at byte 4 in a request and
at byte 8 in a result. Integers are little-endian, a bool is one byte, 0 or 1, and every byte not named here is zero.

    request element              #   payload, at byte 4
    packetInformation            0   packetSize, numberOfInputs, numberOfOutputs, numberOfPools: u32
    inputOperandInformation      1   hasNoValue: bool, 3 zeros, poolIndex, offset, length, numberOfDimensions: u32
    inputOperandDimensionValue   2   u32
    outputOperandInformation     3   as 1
    outputOperandDimensionValue  4   u32
    poolIdentifier               5   slot: i32, not negative
    measureTiming                6   i32, NO = 0, YES = 1

    result element               #   payload, at byte 8
    packetInformation            0   packetSize: u32, errorStatus: i32, 0 to 4, numberOfOperands: u32
    operandInformation           1   isSufficient: bool, 3 zeros, numberOfDimensions: u32
    operandDimensionValue        2   u32
    executionTiming              3   timeOnDevice, timeInDriver: u64 microseconds, 2^64 - 1 = not measured

    request = packetInformation, (inputOperandInformation, its dimensions)*, (outputOperandInformation, its
              dimensions)*, poolIdentifier*, measureTiming
    result  = packetInformation, (operandInformation, its dimensions)*, executionTiming

packetSize counts elements, itself included. poolIndex is a position in the packet's own list of pools, not a slot. An
argument without a value has zeros for its location and no dimensions. A result has operands only if its status is NONE
or OUTPUT_INSUFFICIENT_SIZE and times only if it is NONE, and timeOnDevice <= timeInDriver when both were measured.

A packet is canonical or refused: the decoders accept exactly what the encoders emit, byte for byte, so that equal
packets are equal executions, and a packet may be recognised by its bytes. All else raises Malformed, which names the
element. The sender may be hostile: no count of its is believed before the packet has been seen to be that long.

The functions are pure. The checks that both directions owe (`_check_…`) are written once and called by both. A new kind
of element is one line in `RequestDatum` or `ResultDatum`.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from burst.errors import Malformed
from burst.messages import ErrorStatus, OutputShape, RequestArgument, Timing

if TYPE_CHECKING:
    from collections.abc import Sequence

DATUM: Final = 24
"""Bytes in one element."""
DATUM_DTYPE: Final = f"V{DATUM}"
"""The numpy dtype of a queue of elements."""
NOT_MEASURED: Final = 2**64 - 1
"""A time that was not measured, as it stands in executionTiming."""


class _Datum(Enum):
    """A table of kinds: each member is a discriminator and the layout of the whole element, x being a zero byte."""

    def __init__(self, number: int, layout: str) -> None:
        self.number = number
        self.struct = struct.Struct(layout)
        assert self.struct.size == DATUM


class RequestDatum(_Datum):
    """The kinds of element that a request is made of."""

    PACKET_INFORMATION = 0, "<B3x IIII 4x"
    INPUT_OPERAND_INFORMATION = 1, "<B3x ?3x III I"
    INPUT_OPERAND_DIMENSION_VALUE = 2, "<B3x I 16x"
    OUTPUT_OPERAND_INFORMATION = 3, "<B3x ?3x III I"
    OUTPUT_OPERAND_DIMENSION_VALUE = 4, "<B3x I 16x"
    POOL_IDENTIFIER = 5, "<B3x i 16x"
    MEASURE_TIMING = 6, "<B3x i 16x"


class ResultDatum(_Datum):
    """The kinds of element that a result is made of."""

    PACKET_INFORMATION = 0, "<B7x I i I 4x"
    OPERAND_INFORMATION = 1, "<B7x ?3x I 8x"
    OPERAND_DIMENSION_VALUE = 2, "<B7x I 12x"
    EXECUTION_TIMING = 3, "<B7x QQ"


class _ArgumentKinds(NamedTuple):
    """What tells an input from an output on the wire."""

    information: RequestDatum
    dimension: RequestDatum


_INPUT = _ArgumentKinds(RequestDatum.INPUT_OPERAND_INFORMATION, RequestDatum.INPUT_OPERAND_DIMENSION_VALUE)
_OUTPUT = _ArgumentKinds(RequestDatum.OUTPUT_OPERAND_INFORMATION, RequestDatum.OUTPUT_OPERAND_DIMENSION_VALUE)


class RequestPacket(NamedTuple):
    """A decoded request. `slots[argument.pool]` names the memory that an argument lies in."""

    inputs: tuple[RequestArgument, ...]
    outputs: tuple[RequestArgument, ...]
    slots: tuple[int, ...]
    measure: bool


class ResultPacket(NamedTuple):
    """A decoded result."""

    status: ErrorStatus
    output_shapes: tuple[OutputShape, ...]
    timing: Timing


def encode_request(
    inputs: Sequence[RequestArgument], outputs: Sequence[RequestArgument], slots: Sequence[int], measure: bool
) -> bytes:
    """The packet that asks for one execution with its pools in `slots`, and for its timing if `measure` is true.

    Raises:
        Malformed: a number does not fit its field, a slot is negative, or an argument contradicts itself or `slots`.
    """
    D = RequestDatum
    writer = _Writer()
    for argument in inputs:
        _put_argument(writer, _INPUT, argument, len(slots))
    for argument in outputs:
        _put_argument(writer, _OUTPUT, argument, len(slots))
    for slot in slots:
        _check_slot(writer.element, slot)
        writer.put(D.POOL_IDENTIFIER, slot)
    writer.put(D.MEASURE_TIMING, 1 if measure else 0)
    return writer.finish(D.PACKET_INFORMATION, len(inputs), len(outputs), len(slots))


def decode_request(packet: bytes | memoryview) -> RequestPacket:
    """The request in `packet`.

    Raises:
        Malformed: `packet` is not what `encode_request` makes of any request.
    """
    reader = _Reader(packet)
    size, inputs, outputs, pools = reader.take(RequestDatum.PACKET_INFORMATION)
    reader.check_size(size, least=2 + inputs + outputs + pools)
    request = RequestPacket(
        tuple([_take_argument(reader, _INPUT, pools) for _ in range(inputs)]),
        tuple([_take_argument(reader, _OUTPUT, pools) for _ in range(outputs)]),
        tuple([_take_slot(reader) for _ in range(pools)]),
        _take_measure(reader),
    )
    reader.finish()
    return request


def encode_result(status: ErrorStatus, output_shapes: Sequence[OutputShape], timing: Timing) -> bytes:
    """The packet that answers a request. HAL 1.2 has no status above 4: those travel as GENERAL_FAILURE.

    Raises:
        Malformed: a number does not fit its field, there are shapes or times that `status` does not allow, or the
            times contradict each other.
    """
    D = ResultDatum
    if ErrorStatus.INVALID_ARGUMENT < status <= ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT:
        status = ErrorStatus.GENERAL_FAILURE
    _check_status(status, len(output_shapes))
    writer = _Writer()
    for shape in output_shapes:
        writer.put(D.OPERAND_INFORMATION, shape.is_sufficient, len(shape.dimensions))
        writer.put_each(D.OPERAND_DIMENSION_VALUE, shape.dimensions)
    _check_timing(writer.element, status, timing)
    writer.put(D.EXECUTION_TIMING, *[NOT_MEASURED if time is None else time for time in timing])
    return writer.finish(D.PACKET_INFORMATION, status, len(output_shapes))


def decode_result(packet: bytes | memoryview) -> ResultPacket:
    """The result in `packet`.

    Raises:
        Malformed: `packet` is not what `encode_result` makes of any result.
    """
    reader = _Reader(packet)
    size, number, operands = reader.take(ResultDatum.PACKET_INFORMATION)
    reader.check_size(size, least=2 + operands)
    _check_status(number, operands)
    status = ErrorStatus(number)
    shapes = tuple([_take_shape(reader) for _ in range(operands)])
    element = reader.element
    times = reader.take(ResultDatum.EXECUTION_TIMING)
    timing = Timing(*[None if time == NOT_MEASURED else time for time in times])
    _check_timing(element, status, timing)
    reader.finish()
    return ResultPacket(status, shapes, timing)


def _put_argument(writer: _Writer, kinds: _ArgumentKinds, argument: RequestArgument, pools: int) -> None:
    _check_argument(writer.element, argument, pools)
    has_no_value, pool, offset, length, dimensions = argument
    writer.put(kinds.information, has_no_value, pool, offset, length, len(dimensions))
    writer.put_each(kinds.dimension, dimensions)


def _take_argument(reader: _Reader, kinds: _ArgumentKinds, pools: int) -> RequestArgument:
    element = reader.element
    has_no_value, pool, offset, length, rank = reader.take(kinds.information)
    argument = RequestArgument(has_no_value, pool, offset, length, reader.take_each(kinds.dimension, rank))
    _check_argument(element, argument, pools)
    return argument


def _take_slot(reader: _Reader) -> int:
    element = reader.element
    slot: int = reader.take(RequestDatum.POOL_IDENTIFIER)[0]
    _check_slot(element, slot)
    return slot


def _take_measure(reader: _Reader) -> bool:
    element = reader.element
    measure: int = reader.take(RequestDatum.MEASURE_TIMING)[0]
    if measure not in (0, 1):
        raise _malformed(element, f"measureTiming is {measure}, neither 0 nor 1")
    return bool(measure)


def _take_shape(reader: _Reader) -> OutputShape:
    is_sufficient, rank = reader.take(ResultDatum.OPERAND_INFORMATION)
    return OutputShape(reader.take_each(ResultDatum.OPERAND_DIMENSION_VALUE, rank), is_sufficient)


def _check_argument(element: int, argument: RequestArgument, pools: int) -> None:
    if argument.has_no_value:
        if argument.pool or argument.offset or argument.length or argument.dimensions:
            raise _malformed(element, "an argument without a value has a location or dimensions")
    elif argument.pool >= pools:
        raise _malformed(element, f"poolIndex is {argument.pool}, but the packet names {pools} pools")


def _check_slot(element: int, slot: int) -> None:
    if slot < 0:
        raise _malformed(element, f"slot {slot} is negative")


def _check_status(status: int, operands: int) -> None:
    if not ErrorStatus.NONE <= status <= ErrorStatus.INVALID_ARGUMENT:
        raise _malformed(0, f"errorStatus is {status}, not one of 0 to 4")
    if operands and status not in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE):
        raise _malformed(0, f"{operands} output shapes with errorStatus {status}, which has none")


def _check_timing(element: int, status: int, timing: Timing) -> None:
    known = [time for time in timing if time is not None]
    if known and status != ErrorStatus.NONE:
        raise _malformed(element, f"a time with errorStatus {status}, which has none")
    if known != sorted(known):
        raise _malformed(element, f"timeOnDevice {known[0]} is more than timeInDriver {known[1]}")
    if NOT_MEASURED in known:
        raise _malformed(element, f"{NOT_MEASURED} us cannot be told from a time that was not measured")


def _malformed(element: int, what: str) -> Malformed:
    return Malformed(f"element {element}: {what}")


class _Writer:
    """Puts a packet together: its elements from the second on, and at last the first, which counts them."""

    __slots__ = ("body",)

    def __init__(self) -> None:
        self.body: list[bytes] = []

    @property
    def element(self) -> int:
        """The index of the next element."""
        return 1 + len(self.body)

    def put(self, datum: _Datum, *values: int) -> None:
        self.body.append(_pack(self.element, datum, values))

    def put_each(self, datum: _Datum, values: Sequence[int]) -> None:
        for value in values:
            self.put(datum, value)

    def finish(self, information: _Datum, *values: int) -> bytes:
        return b"".join([_pack(0, information, (self.element, *values)), *self.body])


def _pack(element: int, datum: _Datum, values: tuple[int, ...]) -> bytes:
    try:
        return datum.struct.pack(datum.number, *values)
    except struct.error as error:
        raise _malformed(element, f"{datum.name} cannot hold {values}: {error}") from None


class _Reader:
    """Takes a packet apart from its first element to its last, and never looks beyond."""

    __slots__ = ("data", "element", "size")

    def __init__(self, packet: bytes | memoryview) -> None:
        self.data = bytes(packet)  # bytes are not copied again; any other memory might still change under us
        self.element = 0  # index of the next element
        self.size, rest = divmod(len(self.data), DATUM)
        if rest or not self.size:
            raise _malformed(self.size, f"{len(self.data)} bytes are not one or more elements of {DATUM}")

    def take(self, datum: _Datum) -> tuple[Any, ...]:
        """The values of the next element, which must be a `datum` that packs to the very same bytes."""
        start = self.element * DATUM
        raw = self.data[start : start + DATUM]
        if not raw:
            raise _malformed(self.element, f"the packet ends where {datum.name} is due")
        values = datum.struct.unpack(raw)
        if values[0] != datum.number:
            raise _malformed(self.element, f"discriminator {values[0]} where {datum.number}, {datum.name}, is due")
        if datum.struct.pack(*values) != raw:
            raise _malformed(self.element, f"{datum.name} has padding that is not 0, or a bool neither 0 nor 1")
        self.element += 1
        return values[1:]

    def take_each(self, datum: _Datum, count: int) -> tuple[int, ...]:
        """The single values of the next `count` elements, all of them `datum`."""
        if count > self.size - self.element:
            raise _malformed(self.element - 1, f"announces {count} elements; {self.size - self.element} follow")
        return tuple([self.take(datum)[0] for _ in range(count)])

    def check_size(self, announced: int, least: int) -> None:
        """Compare the size that the packet announces, and the least that its counts add up to, with what came."""
        if announced != self.size:
            raise _malformed(0, f"packetSize is {announced}, but {self.size} elements came")
        if least > self.size:
            raise _malformed(0, f"its counts announce {least} elements or more, but {self.size} came")

    def finish(self) -> None:
        if self.element != self.size:
            raise _malformed(self.element, "the packet goes on after its last element")
