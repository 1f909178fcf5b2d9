"""One request, or one result, as a packet of 24-byte elements.

Wire version 1 is the HAL 1.2 datum table exactly; version 2 adds the rows marked 2. An element starts with a
discriminator byte that says which kind it is; its payload follows at byte 4, or at byte 8 if it holds 64-bit numbers or
belongs to a result. Integers are little-endian, a bool is one byte, 0 or 1, and every byte not named here is zero.

    request element              #   payload
    packetInformation            0   packetSize, numberOfInputs, numberOfOutputs, numberOfPools: u32
    inputOperandInformation      1   hasNoValue: bool, 3 zeros, poolIndex, offset, length, numberOfDimensions: u32
    inputOperandDimensionValue   2   u32
    outputOperandInformation     3   as 1
    outputOperandDimensionValue  4   u32
    poolIdentifier               5   slot: i32, not negative
    measureTiming                6   i32, NO = 0, YES = 1
    bufferToken            (2)   7   token of a device's buffer: u32, not 0
    loopTimeout            (2)   8   u64 nanoseconds, 2^64 - 1 = the device's own
    requestIdentifier      (2)   9   id: u64, not 0; deadline: u64 CLOCK_MONOTONIC nanoseconds, 2^64 - 1 = none

    result element               #   payload
    packetInformation            0   packetSize: u32, errorStatus: i32, 0 to 4 (2: to 8), numberOfOperands: u32
    operandInformation           1   isSufficient: bool, 3 zeros, numberOfDimensions: u32
    operandDimensionValue        2   u32
    executionTiming              3   timeOnDevice, timeInDriver: u64 microseconds, 2^64 - 1 = not measured
    requestIdentifier      (2)   4   id: u64 of the request; 0 answers what had none that could be read

    request = packetInformation, (inputOperandInformation, its dimensions)*, (outputOperandInformation, its
              dimensions)*, pool*, measureTiming                                            pool = poolIdentifier
    request = the same, loopTimeout, requestIdentifier                           (2)        or bufferToken (2)
    result  = packetInformation, (operandInformation, its dimensions)*, executionTiming
    result  = the same, requestIdentifier                                        (2)

packetSize counts elements, itself included. poolIndex is a position in the packet's own list of pools, not a slot. An
argument without a value has zeros for its location and no dimensions. A result has operands only if its status is NONE
or OUTPUT_INSUFFICIENT_SIZE and times only if it is NONE, and timeOnDevice <= timeInDriver when both were measured.

A packet is canonical or refused: the decoders accept exactly what the encoders emit, byte for byte, so that equal
packets are equal executions, and a packet may be recognised by its bytes. All else raises Malformed, which names the
element. The sender may be hostile: no count of its is believed before the packet has been seen to be that long.

In version 2 what differs from one execution to the next comes last: `VOLATILE` bytes of a request, and of a result.
csrc/burst/caller.c patches them in place, and csrc/burst/listener.c recognises a packet by the bytes before them. There
a packet is as long as its packetInformation says; in version 1 it is all that has arrived.

The functions are pure. The client's half, `encode_request` and `decode_result`, is csrc/burst/wire.c, which a client
in C has, too; the device's half is here. A new kind of element is a line in `FmqRequestDatum` or `FmqResultDatum`, and
the lines there that write or read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from burst._core import ffi, lib
from burst.datum import DATUM, FmqRequestDatum, FmqResultDatum, PacketReader, PacketWriter, malformed
from burst.errors import Malformed
from burst.messages import ErrorStatus, OutputShape, RequestArgument, Timing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NOT_MEASURED: Final = 2**64 - 1
"""A time that was not measured, as it stands in executionTiming; and no deadline, and no loop timeout."""
VERSIONS: Final = (2, 1)
"""That this library speaks, best first."""
VOLATILE: Final = {1: (0, DATUM), 2: (DATUM, 2 * DATUM)}
"""By version: how many bytes at the end of a request, and of a result, differ from one execution to the next."""


class _ArgumentKinds(NamedTuple):
    """What tells an input from an output on the wire."""

    information: FmqRequestDatum
    dimension: FmqRequestDatum


_INPUT = _ArgumentKinds(FmqRequestDatum.INPUT_OPERAND_INFORMATION, FmqRequestDatum.INPUT_OPERAND_DIMENSION_VALUE)
_OUTPUT = _ArgumentKinds(FmqRequestDatum.OUTPUT_OPERAND_INFORMATION, FmqRequestDatum.OUTPUT_OPERAND_DIMENSION_VALUE)


class Token(NamedTuple):
    """Stands where a slot could stand: a buffer that the device manages."""

    token: int


class RequestPacket(NamedTuple):
    """A decoded request. `slots[argument.pool]` names the memory that an argument lies in; times are nanoseconds."""

    inputs: tuple[RequestArgument, ...]
    outputs: tuple[RequestArgument, ...]
    slots: tuple[int | Token, ...]
    measure: bool
    loop_timeout: int | None = None
    id: int = 0
    deadline: int | None = None


class ResultPacket(NamedTuple):
    """A decoded result."""

    status: ErrorStatus
    output_shapes: tuple[OutputShape, ...]
    timing: Timing
    id: int = 0


def encode_request(packet: RequestPacket, version: int) -> bytes:
    """The packet that asks for one execution.

    Raises:
        Malformed: a number does not fit its field, a slot is negative, an argument contradicts itself or the slots, or
            the version has no word for something.
    """
    try:
        request, _alive = _for_c(packet)
    except (OverflowError, TypeError) as error:
        raise Malformed(f"{packet!r:.400} cannot be encoded: {error}") from None
    room = ffi.new("unsigned char[]", nbytes := lib.burst_encode(request, version, ffi.NULL, 0, ffi.NULL))
    if lib.burst_encode(request, version, room, nbytes, why := ffi.new("burst_complaint *")) < 0:
        raise _complaint(why)
    return bytes(ffi.buffer(room, nbytes))


def decode_request(packet: bytes | memoryview, version: int) -> RequestPacket:
    """The request in `packet`.

    Raises:
        Malformed: `packet` is not what `encode_request` makes of any request, or it has no id in version 2.
    """
    reader = PacketReader(packet)
    size, inputs, outputs, pools = reader.take(FmqRequestDatum.PACKET_INFORMATION)
    reader.check_size(size, least=(2 if version == 1 else 4) + inputs + outputs + pools)
    request = RequestPacket(
        tuple([_take_argument(reader, _INPUT, pools) for _ in range(inputs)]),
        tuple([_take_argument(reader, _OUTPUT, pools) for _ in range(outputs)]),
        tuple([_take_slot(reader, version) for _ in range(pools)]),
        _take_measure(reader),
    )
    if version >= 2:
        (loop_timeout,) = reader.take(FmqRequestDatum.LOOP_TIMEOUT)
        number, deadline = reader.take(FmqRequestDatum.REQUEST_IDENTIFIER)
        if not number:
            raise malformed(reader.element - 1, "a request's id is not 0")
        request = request._replace(loop_timeout=_known(loop_timeout), id=number, deadline=_known(deadline))
    reader.finish()
    return request


def encode_result(result: ResultPacket, version: int) -> bytes:
    """The packet that answers a request. HAL 1.2 has no status above 4: in version 1 those travel as GENERAL_FAILURE.

    Raises:
        Malformed: a number does not fit its field, there are shapes or times that the status does not allow, or the
            times contradict each other.
    """
    D = FmqResultDatum
    status = result.status
    if version == 1 and ErrorStatus.INVALID_ARGUMENT < status <= ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT:
        status = ErrorStatus.GENERAL_FAILURE
    _check_status(status, len(result.output_shapes), version)
    writer = PacketWriter()
    for shape in result.output_shapes:
        writer.put(D.OPERAND_INFORMATION, shape.is_sufficient, len(shape.dimensions))
        writer.put_each(D.OPERAND_DIMENSION_VALUE, shape.dimensions)
    _check_timing(writer.element, status, result.timing)
    writer.put(D.EXECUTION_TIMING, *map(_or_none, result.timing))
    if version >= 2:
        writer.put(D.REQUEST_IDENTIFIER, result.id)
    return writer.finish(D.PACKET_INFORMATION, status, len(result.output_shapes))


def decode_result(packet: bytes | memoryview, version: int) -> ResultPacket:
    """The result in `packet`.

    Raises:
        Malformed: `packet` is not what `encode_result` makes of any result.
    """
    raw = bytes(packet)
    shapes = ffi.new("uint32_t[]", 2 * (len(raw) // DATUM))
    result, why = ffi.new("burst_result_packet *"), ffi.new("burst_complaint *")
    if lib.burst_decode(raw, len(raw), version, result, shapes, why):
        raise _complaint(why)
    timing = Timing(_known(result.on_device), _known(result.in_driver))
    return ResultPacket(ErrorStatus(result.status), tuple(_shapes(shapes, result.n_shapes)), timing, result.id)


def _shapes(values: Any, count: int) -> Iterator[OutputShape]:
    at = 0
    for _ in range(count):
        end = at + 2 + values[at + 1]
        yield OutputShape(tuple(values[at + 2 : end]), bool(values[at]))
        at = end


def _complaint(why: Any) -> Malformed:
    return malformed(why.element, ffi.string(why.text).decode())


def _for_c(packet: RequestPacket) -> tuple[Any, list[Any]]:
    """A burst_request_packet, and the memory that it refers to. Raises OverflowError, TypeError."""
    alive = []

    def arguments(side: Sequence[RequestArgument]) -> Any:
        rows = []
        for has_no_value, pool, offset, length, dimensions in side:
            alive.append(sizes := ffi.new("int64_t[]", dimensions) if dimensions else ffi.NULL)
            rows.append((bool(has_no_value), len(dimensions), pool, offset, length, sizes))
        alive.append(made := ffi.new("burst_argument[]", rows))
        return made

    places = ffi.new("burst_place[]", [(p.token, 1) if isinstance(p, Token) else (p, 0) for p in packet.slots])
    alive.append(places)
    lists, counts = packet[:3], (arguments(packet.inputs), arguments(packet.outputs), places)
    times = _or_none(packet.loop_timeout), packet.id, _or_none(packet.deadline)
    return ffi.new("burst_request_packet *", (*counts, *map(len, lists), bool(packet.measure), *times)), alive


def _or_none(value: int | None) -> int:
    return NOT_MEASURED if value is None else value


def _known(value: int) -> int | None:
    return None if value == NOT_MEASURED else value


def _take_argument(reader: PacketReader, kinds: _ArgumentKinds, pools: int) -> RequestArgument:
    element = reader.element
    has_no_value, pool, offset, length, rank = reader.take(kinds.information)
    argument = RequestArgument(has_no_value, pool, offset, length, reader.take_each(kinds.dimension, rank))
    if not has_no_value and pool >= pools:
        raise malformed(element, f"poolIndex is {pool}, but the packet names {pools} pools")
    if has_no_value and argument != RequestArgument(has_no_value=True):
        raise malformed(element, "an argument without a value has a location or dimensions")
    return argument


def _take_slot(reader: PacketReader, version: int) -> int | Token:
    element = reader.element
    if version >= 2 and reader.next_is(FmqRequestDatum.BUFFER_TOKEN):
        token = Token(*reader.take(FmqRequestDatum.BUFFER_TOKEN))
        if not token.token:
            raise malformed(element, "token 0 stands for no buffer")
        return token
    slot: int = reader.take(FmqRequestDatum.POOL_IDENTIFIER)[0]
    if slot < 0:
        raise malformed(element, f"slot {slot} is negative")
    return slot


def _take_measure(reader: PacketReader) -> bool:
    element = reader.element
    measure: int = reader.take(FmqRequestDatum.MEASURE_TIMING)[0]
    if measure not in (0, 1):
        raise malformed(element, f"measureTiming is {measure}, neither 0 nor 1")
    return bool(measure)


def _check_status(status: int, operands: int, version: int) -> None:
    last = ErrorStatus.INVALID_ARGUMENT if version == 1 else ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT
    if not ErrorStatus.NONE <= status <= last:
        raise malformed(0, f"errorStatus is {status}, not one of 0 to {last:d}")
    if operands and status not in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE):
        raise malformed(0, f"{operands} output shapes with errorStatus {status}, which has none")


def _check_timing(element: int, status: int, timing: Timing) -> None:
    known = [time for time in timing if time is not None]
    if known and status != ErrorStatus.NONE:
        raise malformed(element, f"a time with errorStatus {status}, which has none")
    if known != sorted(known):
        raise malformed(element, f"timeOnDevice {known[0]} is more than timeInDriver {known[1]}")
    if NOT_MEASURED in known:
        raise malformed(element, f"{NOT_MEASURED} us cannot be told from a time that was not measured")
