"""Packets for the tests of the wire: written by hand from the table in `burst.wire`, bad elements, random ones."""

import re
from typing import NamedTuple

import wire_oracle

from burst import wire
from burst.datum import DATUM
from burst.errors import Malformed
from burst.messages import NO_TIMING, ErrorStatus, OutputShape, RequestArgument, Timing
from burst.wire import RequestPacket, ResultPacket, Token

U32, U64 = 2**32 - 1, 2**64 - 1
EDGES = [0, 1, 2, 4, 255, 2**31 - 1, 2**31, U32]
SHAPED = {ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE}


class Direction(NamedTuple):
    """One of the parsers and the encoder that it must be the reverse of."""

    kind: str  # "request" or "result"
    version: int

    def decode(self, data):
        return getattr(wire, f"decode_{self.kind}")(data, self.version)

    def encode(self, packet):
        return getattr(wire, f"encode_{self.kind}")(packet, self.version)

    @property
    def by_oracle(self):
        """Encode and decode, in Python."""
        return tuple(getattr(wire_oracle, f"{verb}_{self.kind}") for verb in ("encode", "decode"))

    @property
    def size_at(self):
        """Where packetSize stands in the first element."""
        return 4 if self.kind == "request" else 8

    def __str__(self):
        return f"{self.kind}{self.version}"


REQUESTS = {version: Direction("request", version) for version in (1, 2)}
RESULTS = {version: Direction("result", version) for version in (1, 2)}
DIRECTIONS = [*REQUESTS.values(), *RESULTS.values()]


class Golden(NamedTuple):
    """A packet, and its elements written by hand."""

    direction: Direction
    packet: RequestPacket | ResultPacket
    elements: list[bytes]

    @property
    def data(self):
        return b"".join(self.elements)


def elements(*rows):
    """Elements spelled in hex; each is filled up with the zero bytes that the table leaves out at its end."""
    return [bytes.fromhex(row).ljust(DATUM, b"\0") for row in rows]


# ---- golden bytes: together they hold every kind of element and every status ---------------------------------------

ARGUMENTS = (
    (RequestArgument(False, 1, 0x10, 0x20, (2, 3)), RequestArgument(has_no_value=True)),
    (RequestArgument(False, 0, 0x01020304, 8, (4,)),),
)
ARGUMENT_ROWS = (
    "01000000 00000000 01000000 10000000 20000000 02000000",  # input: has a value, pool 1, offset, length, 2 dimensions
    "02000000 02000000",
    "02000000 03000000",
    "01000000 01000000 00000000 00000000 00000000 00000000",  # input without a value
    "03000000 00000000 00000000 04030201 08000000 01000000",  # output: pool 0, offset, length, 1 dimension
    "04000000 04000000",
)
REQUEST_1 = Golden(
    REQUESTS[1],
    RequestPacket(*ARGUMENTS, slots=(7, 2**31 - 1), measure=True),
    elements(
        "00000000 0a000000 02000000 01000000 02000000",  # packetInformation: 10 elements, 2 inputs, 1 output, 2 pools
        *ARGUMENT_ROWS,
        "05000000 07000000",  # slots 7 and 2^31 - 1
        "05000000 ffffff7f",
        "06000000 01000000",  # measure: yes
    ),
)
REQUEST_2 = Golden(
    REQUESTS[2],
    RequestPacket(
        *ARGUMENTS,
        slots=(7, Token(0xFEDCBA98)),
        measure=True,
        loop_timeout=0x1122334455667788,
        id=0x0102030405060708,
        deadline=0xF020304050607080,
    ),
    elements(
        "00000000 0c000000 02000000 01000000 02000000",  # packetInformation: 12 elements, 2 inputs, 1 output, 2 pools
        *ARGUMENT_ROWS,
        "05000000 07000000",  # slot 7
        "07000000 98badcfe",  # the buffer of a token
        "06000000 01000000",  # measure: yes
        "08000000 00000000 8877665544332211",  # loop timeout
        "09000000 00000000 0807060504030201 80706050403020f0",  # id, deadline
    ),
)
NOTHING_1 = Golden(
    REQUESTS[1],
    RequestPacket((), (), (), measure=False),
    elements("00000000 02000000 00000000 00000000 00000000", "06000000 00000000"),
)
NOTHING_2 = Golden(
    REQUESTS[2],
    RequestPacket((), (), (), measure=False, loop_timeout=None, id=1, deadline=None),
    elements(
        "00000000 04000000 00000000 00000000 00000000",
        "06000000 00000000",
        "08000000 00000000 ffffffffffffffff",
        "09000000 00000000 0100000000000000 ffffffffffffffff",
    ),
)
ZEROS_2 = Golden(
    REQUESTS[2],
    RequestPacket((), (), (Token(1),), measure=False, loop_timeout=0, id=U64, deadline=0),
    elements(
        "00000000 05000000 00000000 00000000 01000000",
        "07000000 01000000",
        "06000000 00000000",
        "08000000 00000000 0000000000000000",
        "09000000 00000000 ffffffffffffffff 0000000000000000",
    ),
)

NO_TIMES = "0300000000000000 ffffffffffffffff ffffffffffffffff"
RESULT_ROWS = (
    "0100000000000000 01000000 02000000",  # sufficient, 2 dimensions
    "0200000000000000 02000000",
    "0200000000000000 03000000",
    "0100000000000000 01000000 00000000",
    "0300000000000000 0500000000000000 0807060504030201",
)
INSUFFICIENT_ROWS = ("0100000000000000 00000000 01000000", "0200000000000000 09000000", NO_TIMES)
SHAPES, TIMING = (OutputShape((2, 3)), OutputShape()), Timing(5, 0x0102030405060708)
RESULT_1 = Golden(
    RESULTS[1],
    ResultPacket(ErrorStatus.NONE, SHAPES, TIMING),
    elements("0000000000000000 06000000 00000000 02000000", *RESULT_ROWS),  # 6 elements, NONE, 2 operands
)
RESULT_2 = Golden(
    RESULTS[2],
    ResultPacket(ErrorStatus.NONE, SHAPES, TIMING, 0x8182838485868788),
    elements(
        "0000000000000000 07000000 00000000 02000000",
        *RESULT_ROWS,
        "0400000000000000 8887868584838281",  # id
    ),
)
INSUFFICIENT = ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (OutputShape((9,), False),), NO_TIMING
INSUFFICIENT_1 = Golden(
    RESULTS[1],
    ResultPacket(*INSUFFICIENT),
    elements("0000000000000000 04000000 03000000 01000000", *INSUFFICIENT_ROWS),
)
INSUFFICIENT_2 = Golden(
    RESULTS[2],
    ResultPacket(*INSUFFICIENT, 0),
    elements("0000000000000000 05000000 03000000 01000000", *INSUFFICIENT_ROWS, "0400000000000000 0000000000000000"),
)
STATUS_ROWS = {  # by version and status: the first element of a result without operands
    1: {
        ErrorStatus.NONE: "0000000000000000 02000000 00000000 00000000",
        ErrorStatus.DEVICE_UNAVAILABLE: "0000000000000000 02000000 01000000 00000000",
        ErrorStatus.GENERAL_FAILURE: "0000000000000000 02000000 02000000 00000000",
        ErrorStatus.OUTPUT_INSUFFICIENT_SIZE: "0000000000000000 02000000 03000000 00000000",
        ErrorStatus.INVALID_ARGUMENT: "0000000000000000 02000000 04000000 00000000",
    },
    2: {
        ErrorStatus.NONE: "0000000000000000 03000000 00000000 00000000",
        ErrorStatus.DEVICE_UNAVAILABLE: "0000000000000000 03000000 01000000 00000000",
        ErrorStatus.GENERAL_FAILURE: "0000000000000000 03000000 02000000 00000000",
        ErrorStatus.OUTPUT_INSUFFICIENT_SIZE: "0000000000000000 03000000 03000000 00000000",
        ErrorStatus.INVALID_ARGUMENT: "0000000000000000 03000000 04000000 00000000",
        ErrorStatus.MISSED_DEADLINE_TRANSIENT: "0000000000000000 03000000 05000000 00000000",
        ErrorStatus.MISSED_DEADLINE_PERSISTENT: "0000000000000000 03000000 06000000 00000000",
        ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT: "0000000000000000 03000000 07000000 00000000",
        ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT: "0000000000000000 03000000 08000000 00000000",
    },
}
STATUSES_1 = {
    status: Golden(RESULTS[1], ResultPacket(status, (), NO_TIMING), elements(row, NO_TIMES))
    for status, row in STATUS_ROWS[1].items()
}
STATUSES_2 = {
    status: Golden(
        RESULTS[2], ResultPacket(status, (), NO_TIMING, 9), elements(row, NO_TIMES, "0400000000000000 0900000000000000")
    )
    for status, row in STATUS_ROWS[2].items()
}
FAILED_1, FAILED_2 = STATUSES_1[ErrorStatus.GENERAL_FAILURE], STATUSES_2[ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT]
GOLDEN = [
    *(REQUEST_1, NOTHING_1, RESULT_1, INSUFFICIENT_1, *STATUSES_1.values()),
    *(REQUEST_2, NOTHING_2, ZEROS_2, RESULT_2, INSUFFICIENT_2, *STATUSES_2.values()),
]

# What the conformance suite of the HAL puts in the place of good elements, and the like for version 2.
BAD_REQUEST_ELEMENTS = elements(
    "00000000 0a000000 0a000000 0a000000 0a000000",
    "01000000 00000000 00000000 00000000 00000000 0a000000",
    "02000000 00000000",
    "03000000 00000000 00000000 00000000 00000000 0a000000",
    "04000000 00000000",
    "05000000 ffffff7f",
    "06000000 01000000",
    "07000000 00000000",
    "08000000 00000000 0000000000000000",
    "09000000 00000000 0000000000000000 ffffffffffffffff",
)
BAD_RESULT_ELEMENTS = elements(
    "0000000000000000 0a000000 0a000000 0a000000",
    "0100000000000000 00000000 0a000000",
    "0200000000000000 00000000",
    "0300000000000000 0000000000000000 0000000000000000",
    "0400000000000000 0000000000000000",
)
BAD_ELEMENTS = {"request": BAD_REQUEST_ELEMENTS, "result": BAD_RESULT_ELEMENTS}


def outcome_of(decode, *given):
    """What a decoder returns, or the words of its refusal."""
    try:
        return decode(*given)
    except Malformed as error:
        return str(error)


def accepted(direction, packet):
    """True if `packet` is accepted: then it must be canonical; if not, the error must name one of its elements.

    The oracle decodes it to the same, or refuses it with the same words.
    """
    decoded = refusal = outcome_of(direction.decode, packet)
    assert decoded == outcome_of(direction.by_oracle[1], packet, direction.version), packet.hex()
    if not isinstance(decoded, str):
        assert direction.encode(decoded) == packet, packet.hex()
        return True
    named = re.match(r"element (\d+): ", refusal)
    assert named, refusal
    assert int(named[1]) <= len(packet) // DATUM, refusal
    return False


def patched(golden, element, offset, data):
    """The golden packet with `data` at `offset` of one element."""
    packet = bytearray(golden.data)
    packet[element * DATUM + offset : element * DATUM + offset + len(data)] = data
    return bytes(packet)


# ---- random packets, all legal ---------------------------------------------------------------------------------------


def random_u32(rng):
    return rng.choice(EDGES) if rng.random() < 0.5 else rng.getrandbits(32)


def random_dimensions(rng):
    return tuple(random_u32(rng) for _ in range(rng.randrange(5)))


def random_argument(rng, pools):
    if not pools or rng.random() < 0.2:
        return RequestArgument(has_no_value=True)
    return RequestArgument(False, rng.randrange(pools), random_u32(rng), random_u32(rng), random_dimensions(rng))


def random_slot(rng, version):
    is_token = version >= 2 and rng.random() < 0.5
    return Token(max(1, random_u32(rng))) if is_token else random_u32(rng) >> 1


def random_time(rng):
    return None if rng.random() < 0.2 else min(rng.getrandbits(64), U64 - 1) >> rng.randrange(64)


def random_request(rng, version):
    slots = tuple(random_slot(rng, version) for _ in range(rng.randrange(4)))
    inputs, outputs = (
        tuple(random_argument(rng, len(slots)) for _ in range(rng.randrange(5))) for _ in ("inputs", "outputs")
    )
    packet = RequestPacket(inputs, outputs, slots, rng.random() < 0.5)
    if version == 1:
        return packet
    return packet._replace(loop_timeout=random_time(rng), id=max(1, rng.getrandbits(64)), deadline=random_time(rng))


def random_result(rng, version):
    status = ErrorStatus(rng.randrange(5 if version == 1 else 9))
    operands = rng.randrange(5) if status in SHAPED else 0
    shapes = tuple(OutputShape(random_dimensions(rng), rng.random() < 0.5) for _ in range(operands))
    timing = Timing(random_time(rng), random_time(rng)) if status is ErrorStatus.NONE else NO_TIMING
    timing = timing if None in timing else Timing(*sorted(timing))
    return ResultPacket(status, shapes, timing, 0 if version == 1 else rng.getrandbits(64))


def random_packet(rng, direction):
    return (random_request if direction.kind == "request" else random_result)(rng, direction.version)
