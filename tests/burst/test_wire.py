"""Wire version 1: what the encoders emit is what the table says, and the decoders accept nothing else."""

import random
import re
import tracemalloc
from itertools import pairwise

import pytest

from burst import wire
from burst.errors import Malformed
from burst.messages import NO_TIMING, ErrorStatus, OutputShape, RequestArgument, Timing

U32 = 2**32 - 1
EDGES = [0, 1, 2, 4, 255, 2**31 - 1, 2**31, U32]


def elements(*rows):
    """Elements spelled in hex; each is filled up with the zero bytes that the table leaves out at its end."""
    return [bytes.fromhex(row).ljust(24, b"\0") for row in rows]


# Written by hand from the table in the module's docstring. Together they hold every kind of element.
REQUEST = wire.RequestPacket(
    inputs=(RequestArgument(False, 1, 0x10, 0x20, (2, 3)), RequestArgument(has_no_value=True)),
    outputs=(RequestArgument(False, 0, 0x01020304, 8, (4,)),),
    slots=(7, 2**31 - 1),
    measure=True,
)
REQUEST_ELEMENTS = elements(
    "00000000 0a000000 02000000 01000000 02000000",  # packetInformation: 10 elements, 2 inputs, 1 output, 2 pools
    "01000000 00000000 01000000 10000000 20000000 02000000",  # input: has a value, pool 1, offset, length, 2 dimensions
    "02000000 02000000",
    "02000000 03000000",
    "01000000 01000000 00000000 00000000 00000000 00000000",  # input without a value
    "03000000 00000000 00000000 04030201 08000000 01000000",  # output: pool 0, offset, length, 1 dimension
    "04000000 04000000",
    "05000000 07000000",  # slots 7 and 2^31 - 1
    "05000000 ffffff7f",
    "06000000 01000000",  # measure: yes
)
RESULT = wire.ResultPacket(ErrorStatus.NONE, (OutputShape((2, 3)), OutputShape()), Timing(5, 0x0102030405060708))
RESULT_ELEMENTS = elements(
    "0000000000000000 06000000 00000000 02000000",  # packetInformation: 6 elements, NONE, 2 operands
    "0100000000000000 01000000 02000000",  # sufficient, 2 dimensions
    "0200000000000000 02000000",
    "0200000000000000 03000000",
    "0100000000000000 01000000 00000000",
    "0300000000000000 0500000000000000 0807060504030201",
)
INSUFFICIENT = wire.ResultPacket(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (OutputShape((9,), False),), NO_TIMING)
INSUFFICIENT_ELEMENTS = elements(
    "0000000000000000 04000000 03000000 01000000",
    "0100000000000000 00000000 01000000",
    "0200000000000000 09000000",
    "0300000000000000 ffffffffffffffff ffffffffffffffff",
)
FAILED_ELEMENTS = elements(
    "0000000000000000 02000000 02000000 00000000",
    "0300000000000000 ffffffffffffffff ffffffffffffffff",
)
# The payload bytes of each kind that are not padding and may hold more than 0 and 1; of a bool, only its lowest bit is.
REQUEST_PAYLOAD = {
    0: range(4, 20),
    1: range(8, 24),
    2: range(4, 8),
    3: range(8, 24),
    4: range(4, 8),
    5: range(4, 8),
    6: range(4, 8),
}
RESULT_PAYLOAD = {0: range(8, 20), 1: range(12, 16), 2: range(8, 12), 3: range(8, 24)}

# What the conformance suite of the HAL puts in the place of good elements.
BAD_REQUEST_ELEMENTS = elements(
    "00000000 0a000000 0a000000 0a000000 0a000000",
    "01000000 00000000 00000000 00000000 00000000 0a000000",
    "02000000 00000000",
    "03000000 00000000 00000000 00000000 00000000 0a000000",
    "04000000 00000000",
    "05000000 ffffff7f",
    "06000000 01000000",
)
BAD_RESULT_ELEMENTS = elements(
    "0000000000000000 0a000000 0a000000 0a000000",
    "0100000000000000 00000000 0a000000",
    "0200000000000000 00000000",
    "0300000000000000 0000000000000000 0000000000000000",
)


def encode_request(packet):
    return wire.encode_request(*packet)


def encode_result(packet):
    return wire.encode_result(*packet)


REQUESTS = (wire.decode_request, encode_request)
RESULTS = (wire.decode_result, encode_result)
# direction, elements of a good packet, bad elements, kinds with one value of which the bad one is as legal
MUTANTS = [
    pytest.param(REQUESTS, REQUEST_ELEMENTS, BAD_REQUEST_ELEMENTS, {2, 4, 5, 6}, id="request"),
    pytest.param(RESULTS, RESULT_ELEMENTS, BAD_RESULT_ELEMENTS, {2, 3}, id="result"),
    pytest.param(RESULTS, INSUFFICIENT_ELEMENTS, BAD_RESULT_ELEMENTS, {2}, id="insufficient"),
    pytest.param(RESULTS, FAILED_ELEMENTS, BAD_RESULT_ELEMENTS, set(), id="failed"),
]


def accepted(direction, packet):
    """Whether `packet` is accepted: then it must be canonical; if not, the error must name one of its elements."""
    decode, encode = direction
    try:
        decoded = decode(packet)
    except Malformed as error:
        refusal = str(error)
    else:
        assert encode(decoded) == packet
        return True
    named = re.match(r"element (\d+): ", refusal)
    assert named
    assert int(named[1]) <= len(packet) // 24
    return False


def resized(mutant, header):
    """The mutant with the packetSize that fits it, so that it gets past the first check."""
    size = len(mutant).to_bytes(4, "little")
    return [mutant[0][:header] + size + mutant[0][header + 4 :], *mutant[1:]] if mutant else mutant


def refused_at_any_size(direction, mutant):
    header = 4 if direction is REQUESTS else 8
    return not any(accepted(direction, b"".join(packet)) for packet in (mutant, resized(mutant, header)))


@pytest.mark.parametrize(
    ("direction", "packet", "golden"),
    [
        (REQUESTS, REQUEST, REQUEST_ELEMENTS),
        (RESULTS, RESULT, RESULT_ELEMENTS),
        (RESULTS, INSUFFICIENT, INSUFFICIENT_ELEMENTS),
        (RESULTS, wire.ResultPacket(ErrorStatus.GENERAL_FAILURE, (), NO_TIMING), FAILED_ELEMENTS),
    ],
)
def test_golden_bytes(direction, packet, golden):
    """Both directions agree with bytes written by hand from the layout."""
    decode, encode = direction
    assert encode(packet) == b"".join(golden)
    assert decode(b"".join(golden)) == packet
    assert type(decode(b"".join(golden))) is type(packet)


@pytest.mark.parametrize(
    ("table", "golden", "payload", "bad"),
    [
        (wire.RequestDatum, REQUEST_ELEMENTS, REQUEST_PAYLOAD, BAD_REQUEST_ELEMENTS),
        (wire.ResultDatum, RESULT_ELEMENTS, RESULT_PAYLOAD, BAD_RESULT_ELEMENTS),
    ],
)
def test_every_kind_is_covered(table, golden, payload, bad):
    """No kind of element can be added without golden bytes, a map of its payload and a bad element."""
    numbers = {datum.number for datum in table}
    assert len(numbers) == len(list(table))
    assert numbers == {element[0] for element in golden} == set(payload) == {element[0] for element in bad}


def test_the_smallest_packets():
    """A request for nothing is two elements, and so is a result without outputs."""
    assert wire.encode_request((), (), (), False) == bytes.fromhex("00000000 02").ljust(24, b"\0") + b"\6" + bytes(23)
    assert len(wire.encode_result(ErrorStatus.NONE, (), NO_TIMING)) == 2 * wire.DATUM


def test_truth_is_encoded_as_one():
    """Any true value becomes the one canonical truth, so that the packet can be decoded."""
    packet = wire.decode_request(wire.encode_request([RequestArgument(has_no_value=2)], [], [], measure=2))
    assert packet == ((RequestArgument(has_no_value=True),), (), (), True)
    shape = OutputShape((), is_sufficient=2)
    assert (
        wire.decode_result(wire.encode_result(ErrorStatus.NONE, [shape], NO_TIMING)).output_shapes[0].is_sufficient
        is True
    )


def random_u32(rng):
    return rng.choice(EDGES) if rng.random() < 0.5 else rng.getrandbits(32)


def random_dimensions(rng):
    return tuple(random_u32(rng) for _ in range(rng.randrange(5)))


def random_argument(rng, pools):
    if not pools or rng.random() < 0.2:
        return RequestArgument(has_no_value=True)
    return RequestArgument(False, rng.randrange(pools), random_u32(rng), random_u32(rng), random_dimensions(rng))


def random_request(rng):
    slots = tuple(random_u32(rng) >> 1 for _ in range(rng.randrange(4)))
    inputs, outputs = (
        tuple(random_argument(rng, len(slots)) for _ in range(rng.randrange(5))) for _ in ("inputs", "outputs")
    )
    return wire.RequestPacket(inputs, outputs, slots, rng.random() < 0.5)


def random_time(rng):
    return None if rng.random() < 0.2 else min(rng.getrandbits(64), 2**64 - 2) >> rng.randrange(64)


def random_timing(rng):
    timing = Timing(random_time(rng), random_time(rng))
    return timing if None in timing else Timing(*sorted(timing))


def random_result(rng):
    status = ErrorStatus(rng.randrange(5))
    shaped = status in {ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE}
    shapes = tuple(OutputShape(random_dimensions(rng), rng.random() < 0.5) for _ in range(rng.randrange(5) * shaped))
    return wire.ResultPacket(status, shapes, random_timing(rng) if status is ErrorStatus.NONE else NO_TIMING)


@pytest.mark.parametrize(("direction", "make"), [(REQUESTS, random_request), (RESULTS, random_result)])
def test_round_trips(direction, make):
    """Whatever can be encoded is decoded to the same, from bytes and from a memoryview, and has the announced size."""
    decode, encode = direction
    rng = random.Random(1)
    for _ in range(2000):
        packet = make(rng)
        data = encode(packet)
        assert decode(data) == decode(memoryview(bytearray(data))) == packet
        assert len(data) % wire.DATUM == 0


@pytest.mark.parametrize(("direction", "good", "bad", "legal"), MUTANTS)
def test_removed_element(direction, good, bad, legal):
    """Without any one of its elements a packet is refused, even if packetSize is made to fit."""
    for position in range(len(good)):
        assert refused_at_any_size(direction, good[:position] + good[position + 1 :]), position


@pytest.mark.parametrize(("direction", "good", "bad", "legal"), MUTANTS)
def test_added_element(direction, good, bad, legal):
    """With any element too many, anywhere, a packet is refused, even if packetSize is made to fit."""
    for position in range(len(good) + 1):
        for element in [*bad, *good]:
            assert refused_at_any_size(direction, [*good[:position], element, *good[position:]]), (position, element)


@pytest.mark.parametrize(("direction", "good", "bad", "legal"), MUTANTS)
def test_replaced_element(direction, good, bad, legal):
    """With any one element replaced a packet is refused, unless that only changes a value to another legal one."""
    for position, original in enumerate(good):
        for element in bad:
            packet = b"".join([*good[:position], element, *good[position + 1 :]])
            only_a_value = element[0] == original[0] and element[0] in legal
            assert accepted(direction, packet) == only_a_value, (position, element)


@pytest.mark.parametrize(("direction", "good", "bad", "legal"), MUTANTS)
def test_swapped_elements(direction, good, bad, legal):
    """Two neighbours of different kinds in the wrong order are refused."""
    for position, (one, two) in enumerate(pairwise(good)):
        if one[0] != two[0]:
            packet = b"".join([*good[:position], two, one, *good[position + 2 :]])
            assert not accepted(direction, packet), position


@pytest.mark.parametrize(
    ("direction", "good", "payload"),
    [
        (REQUESTS, REQUEST_ELEMENTS, REQUEST_PAYLOAD),
        (RESULTS, RESULT_ELEMENTS, RESULT_PAYLOAD),
        (RESULTS, INSUFFICIENT_ELEMENTS, RESULT_PAYLOAD),
    ],
)
def test_padding(direction, good, payload):
    """Every bit that is not payload is checked: flipped, the packet is refused. Flipped payload is refused or kept."""
    bools = {(REQUESTS, 1): 4, (REQUESTS, 3): 4, (RESULTS, 1): 8}
    packet = b"".join(good)
    for byte in range(len(packet)):
        kind, at = good[byte // 24][0], byte % 24
        for bit in range(8):
            flipped = packet[:byte] + bytes([packet[byte] ^ 1 << bit]) + packet[byte + 1 :]
            is_payload = at in payload[kind] or (bools.get((direction, kind)) == at and bit == 0)
            assert not accepted(direction, flipped) or is_payload, (byte, bit)


@pytest.mark.parametrize("direction", [REQUESTS, RESULTS])
@pytest.mark.parametrize("size", [0, 1, 23, 25, 47])
def test_broken_elements(direction, size):
    """No bytes at all, and any number that is not whole elements, are refused."""
    assert not accepted(direction, (bytes.fromhex("00000000 01") + bytes(64))[:size])


def patched(good, element, offset, data):
    """The packet `good` with `data` at `offset` of one element."""
    packet = bytearray(b"".join(good))
    packet[element * 24 + offset : element * 24 + offset + len(data)] = data
    return bytes(packet)


@pytest.mark.parametrize(
    ("element", "offset", "data", "why"),
    [
        (0, 0, b"\7", "element 0: discriminator 7 where 0, PACKET_INFORMATION"),
        (1, 0, b"\3", "element 1: discriminator 3 where 1, INPUT_OPERAND_INFORMATION"),
        (9, 0, b"\xff", "element 9: discriminator 255 where 6, MEASURE_TIMING"),
        (0, 4, b"\x09", "element 0: packetSize is 9, but 10"),
        (0, 8, b"\xff\xff\xff\xff", "element 0: its counts announce"),
        (0, 12, b"\0", "element 5: discriminator 3 where 5, POOL_IDENTIFIER"),
        (1, 4, b"\2", "element 1: INPUT_OPERAND_INFORMATION has padding"),
        (1, 4, b"\1", "element 1: an argument without a value"),
        (4, 8, b"\1", "element 4: an argument without a value"),
        (4, 12, b"\1", "element 4: an argument without a value"),
        (4, 16, b"\1", "element 4: an argument without a value"),
        (1, 8, b"\2", "element 1: poolIndex is 2, but the packet names 2 pools"),
        (5, 8, b"\xff\xff\xff\xff", "element 5: poolIndex is 4294967295"),
        (5, 20, b"\x09", "element 5: announces 9 elements; 4 follow"),
        (5, 20, b"\xff\xff\xff\xff", "element 5: announces 4294967295 elements"),
        (6, 8, b"\1", "element 6: OUTPUT_OPERAND_DIMENSION_VALUE has padding"),
        (7, 4, b"\xff\xff\xff\xff", "element 7: slot -1 is negative"),
        (8, 7, b"\x80", "element 8: slot -2130706433 is negative"),
        (9, 4, b"\2", "element 9: measureTiming is 2"),
        (9, 4, b"\xff\xff\xff\xff", "element 9: measureTiming is -1"),
    ],
)
def test_refused_requests(element, offset, data, why):
    """A request that breaks a rule is refused with the element that breaks it, and the rule."""
    with pytest.raises(Malformed, match=why):
        wire.decode_request(patched(REQUEST_ELEMENTS, element, offset, data))


def test_an_omitted_argument_has_no_dimensions():
    """An argument without a value is refused if dimensions follow it, though they are counted and present."""
    packet = elements(
        "00000000 04000000 01000000 00000000 00000000",
        "01000000 01000000 00000000 00000000 00000000 01000000",
        "02000000 02000000",
        "06000000 00000000",
    )
    with pytest.raises(Malformed, match="element 1: an argument without a value"):
        wire.decode_request(b"".join(packet))


@pytest.mark.parametrize(
    ("good", "element", "offset", "data", "why"),
    [
        (RESULT_ELEMENTS, 0, 12, b"\5", "element 0: errorStatus is 5, not one of 0 to 4"),
        (RESULT_ELEMENTS, 0, 12, b"\xff\xff\xff\xff", "element 0: errorStatus is -1"),
        (RESULT_ELEMENTS, 0, 12, b"\2", "element 0: 2 output shapes with errorStatus 2"),
        (RESULT_ELEMENTS, 0, 12, b"\3", "element 5: a time with errorStatus 3"),
        (FAILED_ELEMENTS, 1, 8, bytes(8), "element 1: a time with errorStatus 2"),
        (FAILED_ELEMENTS, 1, 16, bytes(8), "element 1: a time with errorStatus 2"),
        (RESULT_ELEMENTS, 0, 16, b"\7", "element 0: its counts announce 9"),
        (RESULT_ELEMENTS, 0, 16, b"\1", "element 4: discriminator 1 where 3, EXECUTION_TIMING"),
        (RESULT_ELEMENTS, 1, 8, b"\2", "element 1: OPERAND_INFORMATION has padding"),
        (RESULT_ELEMENTS, 1, 12, b"\6", "element 1: announces 6 elements; 4 follow"),
        (RESULT_ELEMENTS, 5, 16, bytes(8), "element 5: timeOnDevice 5 is more than timeInDriver 0"),
    ],
)
def test_refused_results(good, element, offset, data, why):
    """A result that breaks a rule is refused with the element that breaks it, and the rule."""
    with pytest.raises(Malformed, match=why):
        wire.decode_result(patched(good, element, offset, data))


GOOD = RequestArgument(length=4)


@pytest.mark.parametrize(
    ("inputs", "outputs", "slots", "why"),
    [
        ([GOOD._replace(offset=2**32)], [], [0], "element 1: INPUT_OPERAND_INFORMATION cannot hold"),
        ([GOOD._replace(length=-1)], [], [0], "element 1: INPUT_OPERAND_INFORMATION cannot hold"),
        ([GOOD._replace(pool=-1)], [], [0], "element 1: INPUT_OPERAND_INFORMATION cannot hold"),
        ([GOOD._replace(length=4.0)], [], [0], "element 1: INPUT_OPERAND_INFORMATION cannot hold"),
        ([GOOD, GOOD._replace(pool=1)], [], [0], "element 2: poolIndex is 1, but the packet names 1 pools"),
        ([], [GOOD._replace(dimensions=(1, 2**32))], [0], "element 3: OUTPUT_OPERAND_DIMENSION_VALUE cannot hold"),
        ([], [GOOD._replace(dimensions=(-1,))], [0], "element 2: OUTPUT_OPERAND_DIMENSION_VALUE cannot hold"),
        ([GOOD._replace(has_no_value=True)], [], [0], "element 1: an argument without a value"),
        ([], [GOOD], [], "element 1: poolIndex is 0, but the packet names 0 pools"),
        ([], [], [0, -1], "element 2: slot -1 is negative"),
        ([], [], [2**31], "element 1: POOL_IDENTIFIER cannot hold"),
    ],
)
def test_requests_that_cannot_be_encoded(inputs, outputs, slots, why):
    """What could not be decoded again is not encoded either."""
    with pytest.raises(Malformed, match=why):
        wire.encode_request(inputs, outputs, slots, False)


@pytest.mark.parametrize(
    ("status", "shapes", "timing", "why"),
    [
        (9, [], NO_TIMING, "element 0: errorStatus is 9"),
        (-1, [], NO_TIMING, "element 0: errorStatus is -1"),
        (ErrorStatus.INVALID_ARGUMENT, [OutputShape()], NO_TIMING, "element 0: 1 output shapes"),
        (ErrorStatus.NONE, [OutputShape((-1,))], NO_TIMING, "element 2: OPERAND_DIMENSION_VALUE cannot hold"),
        (ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, [OutputShape()], Timing(1, 2), "element 2: a time with errorStatus 3"),
        (ErrorStatus.NONE, [], Timing(3, 2), "element 1: timeOnDevice 3 is more than timeInDriver 2"),
        (ErrorStatus.NONE, [], Timing(None, -1), "element 1: EXECUTION_TIMING cannot hold"),
        (ErrorStatus.NONE, [], Timing(None, 2**64), "element 1: EXECUTION_TIMING cannot hold"),
        (ErrorStatus.NONE, [], Timing(None, 2**64 - 1), "element 1: .* cannot be told from a time"),
    ],
)
def test_results_that_cannot_be_encoded(status, shapes, timing, why):
    """What could not be decoded again is not encoded either."""
    with pytest.raises(Malformed, match=why):
        wire.encode_result(status, shapes, timing)


@pytest.mark.parametrize("status", [status for status in ErrorStatus if status > ErrorStatus.INVALID_ARGUMENT])
def test_statuses_of_hal_1_3_become_general_failure(status):
    """Version 1 has no word for the statuses of HAL 1.3; they arrive as GENERAL_FAILURE, as the HAL does it."""
    assert wire.encode_result(status, (), NO_TIMING) == b"".join(FAILED_ELEMENTS)


def random_bytes(rng, good, bad):
    return rng.randbytes(rng.choice([rng.randrange(100), 24 * rng.randrange(1, 8)]))


def damaged(rng, good, bad):
    packet = bytearray(b"".join(good))
    for _ in range(rng.randrange(1, 4)):
        packet[rng.randrange(len(packet))] = rng.choice([0, 1, 2, 127, 128, 255, rng.randrange(256)])
    return bytes(packet)


def shuffled(rng, good, bad):
    return b"".join([good[0], *rng.choices([*good, *bad], k=len(good) - 2), good[-1]])


@pytest.mark.parametrize("make", [random_bytes, damaged, shuffled])
@pytest.mark.parametrize(("direction", "good", "bad", "legal"), MUTANTS)
def test_fuzz(direction, good, bad, legal, make):
    """Random bytes, damaged packets and shuffled elements are canonical or Malformed; nothing else is ever raised."""
    rng = random.Random(2)
    for _ in range(1500):
        accepted(direction, make(rng, good, bad))


def lie(count, row):
    """A packet of `count` elements whose first is `row`, and whose second would like four billion dimensions."""
    return b"".join(elements(row)) + elements("01000000 00000000 00000000 00000000 ffffffff ffffffff")[0] * (count - 1)


@pytest.mark.parametrize(
    ("decode", "packet"),
    [
        (wire.decode_request, lie(1000, "00000000 e8030000 ffffffff 00000000 00000000")),
        (wire.decode_request, lie(1000, "00000000 e8030000 00000000 ffffffff 00000000")),
        (wire.decode_request, lie(1000, "00000000 e8030000 00000000 00000000 ffffffff")),
        (wire.decode_request, lie(1000, "00000000 ffffffff ffffffff ffffffff ffffffff")),
        (wire.decode_request, lie(1000, "00000000 e8030000 e6030000 00000000 00000000")),
        (wire.decode_result, lie(1000, "0000000000000000 e8030000 00000000 ffffffff")),
        (wire.decode_result, lie(1000, "0000000000000000 e8030000 00000000 e6030000")),
        (wire.decode_result, lie(3, "0000000000000000 03000000 00000000 01000000")),
    ],
)
def test_lying_counts_allocate_nothing(decode, packet):
    """A count of four billion in a small packet is refused without memory for it."""
    tracemalloc.start()
    try:
        with pytest.raises(Malformed):
            decode(packet)
        assert tracemalloc.get_traced_memory()[1] < 32 * 1024
    finally:
        tracemalloc.stop()
