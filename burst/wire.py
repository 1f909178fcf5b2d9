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

The functions are pure, and their rules are csrc/burst/wire.c, which a client in C has, too. A new kind of element is a
line there and in `FmqRequestDatum` or `FmqResultDatum`, and the lines there that write or read it.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from burst._core import ffi, lib
from burst.datum import DATUM
from burst.errors import Malformed
from burst.messages import ErrorStatus, OutputShape, RequestArgument, Timing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NOT_MEASURED: Final = 2**64 - 1
"""A time that was not measured, as it stands in executionTiming; and no deadline, and no loop timeout."""
VERSIONS: Final = (2, 1)
"""That this library speaks, best first."""
VOLATILE: Final = {1: (0, DATUM), 2: (DATUM, 2 * DATUM)}
"""By version: how many bytes at the end of a request, and of a result, differ from one execution to the next."""


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
    """Return the packet that asks for one execution.

    Raises:
        Malformed: a number does not fit its field, a slot is negative, an argument contradicts itself or the slots, or
            the version has no word for something.
    """
    try:
        request, _alive = _for_c(packet)
    except (OverflowError, TypeError) as error:
        raise _cannot_encode(packet, error) from None
    return _encoded(lib.burst_encode_request, request, version)


def decode_request(packet: bytes | memoryview, version: int) -> RequestPacket:
    """Return the request in `packet`.

    Raises:
        Malformed: `packet` is not what `encode_request` makes of any request, or it has no id in version 2.
    """
    raw = bytes(packet)  # bytes are not copied again; any other memory might still change under us
    room, why = ffi.new("burst_argument[]", len(raw) // DATUM), ffi.new("burst_complaint *")
    request = ffi.new("burst_request_packet *")
    if lib.burst_decode_request(raw, len(raw), version, request, room, why):
        raise _complaint(why)
    return RequestPacket(
        _arguments(request.inputs, request.n_inputs),
        _arguments(request.outputs, request.n_outputs),
        tuple([Token(p.number) if p.is_token else p.number for p in ffi.unpack(request.places, request.n_places)]),
        bool(request.measure),
        loop_timeout=None if request.loop_timeout == NOT_MEASURED else request.loop_timeout,
        id=request.id,
        deadline=None if request.deadline == NOT_MEASURED else request.deadline,
    )


def encode_result(result: ResultPacket, version: int) -> bytes:
    """Return the packet that answers a request. HAL 1.2 has no status above 4: in version 1 those travel as
    GENERAL_FAILURE.

    Raises:
        Malformed: a number does not fit its field, there are shapes or times that the status does not allow, or the
            times contradict each other.
    """
    status, shapes, timing, number = result
    if NOT_MEASURED in timing:
        raise Malformed(f"{NOT_MEASURED} us cannot be told from a time that was not measured")
    numbers = list[int]()
    for (dims, is_enough), same in groupby(shapes):  # often many
        numbers += [bool(is_enough), len(dims), *dims] * len(list(same))
    try:
        values = ffi.new("uint32_t[]", numbers)
        times = [NOT_MEASURED if time is None else time for time in timing]
        fields = (*times, number, status, len(shapes))
        given = ffi.new("burst_result_packet *", fields)
    except (OverflowError, TypeError) as error:
        raise _cannot_encode(result, error) from None
    return _encoded(lib.burst_encode_result, given, values, version)


def decode_result(packet: bytes | memoryview, version: int) -> ResultPacket:
    """Return the result in `packet`.

    Raises:
        Malformed: `packet` is not what `encode_result` makes of any result.
    """
    raw = bytes(packet)
    shapes = ffi.new("uint32_t[]", 2 * (len(raw) // DATUM))
    result, why = ffi.new("burst_result_packet *"), ffi.new("burst_complaint *")
    if lib.burst_decode_result(raw, len(raw), version, result, shapes, why):
        raise _complaint(why)
    times = [None if time == NOT_MEASURED else time for time in (result.on_device, result.in_driver)]
    timing = Timing(*times)
    return ResultPacket(ErrorStatus(result.status), _shapes(shapes, result.n_shapes), timing, result.id)


def _encoded(encode: Callable[..., int], *given: Any) -> bytes:
    """Return the packet. Raise Malformed."""
    nbytes = encode(*given, ffi.NULL, 0, ffi.NULL)
    room, why = ffi.new("unsigned char[]", nbytes), ffi.new("burst_complaint *")
    if encode(*given, room, nbytes, why) < 0:
        raise _complaint(why)
    return bytes(ffi.buffer(room, nbytes))


def _shapes(values: Any, count: int) -> tuple[OutputShape, ...]:
    found, at, numbers = list[OutputShape](), 0, ffi.unpack(values, len(values)) if count else []
    last, its, are_alike = list[int](), OutputShape(), True
    while (left := count - len(found)) > 0:
        end = at + 2 + numbers[at + 1]
        said = numbers[at:end]
        if said != last:
            last, its = said, OutputShape(tuple(said[2:]), bool(said[0]))
        elif are_alike:  # often all that are left
            are_alike = numbers[at : at + left * len(said)] == said * left
            found += [its] * (left - 1 if are_alike else 0)
        found.append(its)
        at = end
    return tuple(found)


def _arguments(arguments: Any, count: int) -> tuple[RequestArgument, ...]:
    return tuple(
        [
            RequestArgument(
                bool(a.has_no_value), a.pool, a.offset, a.length, dimensions=tuple(ffi.unpack(a.dimensions, a.rank))
            )
            for a in ffi.unpack(arguments, count)
        ]
    )


def _complaint(why: Any) -> Malformed:
    return Malformed(f"element {why.element}: {ffi.string(why.text).decode()}")


def _cannot_encode(packet: object, error: Exception) -> Malformed:
    return Malformed(f"{packet!r:.400} cannot be encoded: {error}")


def _for_c(packet: RequestPacket) -> tuple[Any, list[Any]]:
    """Return a burst_request_packet, and the memory that it refers to. Raise OverflowError, TypeError."""
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
    loop, deadline = packet.loop_timeout, packet.deadline
    times = NOT_MEASURED if loop is None else loop, packet.id, NOT_MEASURED if deadline is None else deadline
    return ffi.new("burst_request_packet *", (*counts, *map(len, lists), bool(packet.measure), *times)), alive
