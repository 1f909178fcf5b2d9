"""Wire versions 1 and 2: what goes there and back, what is refused and why, and what a hostile packet may cost."""

import random
import sys
import tracemalloc
from pathlib import Path

import pytest

from burst import wire
from burst.datum import DATUM
from burst.errors import Malformed
from burst.messages import NO_TIMING, ErrorStatus, OutputShape, RequestArgument, Timing
from burst.wire import RequestPacket, ResultPacket, Token

sys.path.insert(0, str(Path(__file__).parent))

from wire_packets import (
    BAD_ELEMENTS,
    DIRECTIONS,
    FAILED_1,
    FAILED_2,
    GOLDEN,
    NOTHING_1,
    NOTHING_2,
    REQUEST_1,
    REQUEST_2,
    REQUESTS,
    RESULT_1,
    RESULT_2,
    RESULTS,
    U64,
    accepted,
    elements,
    patched,
    random_packet,
)

VERSIONS = sorted(wire.VERSIONS)
each_version = pytest.mark.parametrize("version", VERSIONS)
each_direction = pytest.mark.parametrize("direction", DIRECTIONS, ids=str)
EMPTY = RequestPacket((), (), (), measure=False)
SUCCESS = ResultPacket(ErrorStatus.NONE, (), NO_TIMING)


def test_the_best_version_is_offered_first():
    """What both ends speak is found by going through VERSIONS."""
    assert wire.VERSIONS == (2, 1)
    assert set(wire.VOLATILE) == set(wire.VERSIONS)


def test_the_smallest_packets():
    """A request for nothing is two elements, in version 2 four; a result without outputs is two, and three."""
    assert [len(wire.encode_request(EMPTY._replace(id=1), version)) for version in (1, 2)] == [2 * DATUM, 4 * DATUM]
    assert [len(wire.encode_result(SUCCESS, version)) for version in (1, 2)] == [2 * DATUM, 3 * DATUM]


@each_version
def test_truth_is_encoded_as_one(version):
    """Any true value becomes the one canonical truth, so that the packet can be decoded."""
    packet = RequestPacket((RequestArgument(has_no_value=2),), (), (), measure=2, id=3)
    decoded = wire.decode_request(wire.encode_request(packet, version), version)
    assert decoded.inputs[0].has_no_value is decoded.measure is True
    shape = OutputShape((), is_sufficient=2)
    result = wire.encode_result(SUCCESS._replace(output_shapes=(shape,)), version)
    assert wire.decode_result(result, version).output_shapes[0].is_sufficient is True


@each_direction
def test_round_trips(direction):
    """Whatever can be encoded is decoded to the same, from bytes and from a memoryview, and has the announced size.

    The oracle encodes it to the same bytes, and decodes these to the same.
    """
    rng = random.Random(1)
    for _ in range(2000):
        packet = random_packet(rng, direction)
        data = direction.encode(packet)
        encode, decode = direction.by_oracle
        assert encode(packet, direction.version) == data
        assert decode(data, direction.version) == packet
        assert direction.decode(data) == direction.decode(memoryview(bytearray(data))) == packet
        assert len(data) % DATUM == 0
        assert int.from_bytes(data[direction.size_at :][:4], "little") == len(data) // DATUM


def test_a_slot_is_not_a_token():
    """Both are numbers on the wire; decoded, a token says what it is, so that none is taken for the other."""
    slot, token = wire.decode_request(wire.encode_request(EMPTY._replace(slots=(5, Token(5)), id=1), 2), 2).slots
    assert (type(slot), type(token)) == (int, Token)
    assert slot != token


def test_the_volatile_bytes_come_last():
    """Requests that differ in id and deadline alone, and results that differ in times and id, begin with the same."""
    requests = [REQUEST_2.packet._replace(id=number, deadline=time) for number, time in [(1, None), (2**64 - 1, 7)]]
    results = [
        RESULT_2.packet._replace(timing=Timing(*times), id=number) for number, times in [(1, (2, 3)), (4, (5, 6))]
    ]
    for encode, packets, which in [(wire.encode_request, requests, 0), (wire.encode_result, results, 1)]:
        for version in VERSIONS if encode is wire.encode_result else [2]:
            one, two = (encode(packet, version) for packet in packets)
            volatile = wire.VOLATILE[version][which]
            assert one[:-volatile] == two[:-volatile]
            assert one[-volatile:] != two[-volatile:]
    assert wire.VOLATILE[1][0] == 0


def test_patched_volatile_bytes_are_a_new_request():
    """An id of 0 says that a packet is still to get one: it can be encoded, to be patched later, but not received."""
    template = wire.encode_request(REQUEST_2.packet._replace(id=0), 2)
    with pytest.raises(Malformed, match="element 11: a request's id is not 0"):
        wire.decode_request(template, 2)
    end = wire.encode_request(EMPTY._replace(id=77, deadline=88), 2)[-wire.VOLATILE[2][0] :]
    received = wire.decode_request(template[: -len(end)] + end, 2)
    assert received == REQUEST_2.packet._replace(id=77, deadline=88)


def test_none_and_the_largest_number_are_one():
    """A loop timeout or a deadline of 2^64 - 1 ns is none, in 580 years as now."""
    said = wire.encode_request(EMPTY._replace(id=1, loop_timeout=U64, deadline=U64), 2)
    assert said == NOTHING_2.data
    assert wire.decode_request(said, 2) == EMPTY._replace(id=1)


def test_version_1_sends_no_id():
    """With one request in flight nobody needs it; it stays with the sender and the packet is the same."""
    assert wire.encode_request(EMPTY._replace(id=5), 1) == NOTHING_1.data
    assert wire.encode_result(SUCCESS._replace(id=5), 1) == wire.encode_result(SUCCESS, 1)


# ---- what is refused, and why ----------------------------------------------------------------------------------------


@each_direction
@pytest.mark.parametrize("size", [0, 1, 23, 25, 47])
def test_broken_elements(direction, size):
    """No bytes at all, and any number that is not whole elements, are refused."""
    assert not accepted(direction, (bytes.fromhex("00000000 01") + bytes(64))[:size])


BOTH_REQUESTS = [  # what stands at the same place in the golden requests of both versions
    (0, 0, b"\7", "element 0: discriminator 7 where 0, PACKET_INFORMATION"),
    (1, 0, b"\3", "element 1: discriminator 3 where 1, INPUT_OPERAND_INFORMATION"),
    (9, 0, b"\xff", "element 9: discriminator 255 where 6, MEASURE_TIMING"),
    (0, 4, b"\x09", "element 0: packetSize is 9, but 1[02]"),
    (0, 8, b"\xff\xff\xff\xff", "element 0: its counts announce"),
    (0, 12, b"\0", "element 5: discriminator 3 where 5, POOL_IDENTIFIER"),
    (1, 4, b"\2", "element 1: INPUT_OPERAND_INFORMATION has padding"),
    (1, 4, b"\1", "element 1: an argument without a value"),
    (4, 8, b"\1", "element 4: an argument without a value"),
    (4, 12, b"\1", "element 4: an argument without a value"),
    (4, 16, b"\1", "element 4: an argument without a value"),
    (1, 8, b"\2", "element 1: poolIndex is 2, but the packet names 2 pools"),
    (5, 8, b"\xff\xff\xff\xff", "element 5: poolIndex is 4294967295"),
    (5, 20, b"\x09", "element 5: announces 9 elements; [46] follow"),
    (5, 20, b"\xff\xff\xff\xff", "element 5: announces 4294967295 elements"),
    (6, 8, b"\1", "element 6: OUTPUT_OPERAND_DIMENSION_VALUE has padding"),
    (7, 4, b"\xff\xff\xff\xff", "element 7: slot -1 is negative"),
    (9, 4, b"\2", "element 9: measureTiming is 2"),
    (9, 4, b"\xff\xff\xff\xff", "element 9: measureTiming is -1"),
]
REFUSED_REQUESTS = [
    *[(golden, *row) for row in BOTH_REQUESTS for golden in (REQUEST_1, REQUEST_2)],
    (REQUEST_1, 7, 0, b"\7", "element 7: discriminator 7 where 5, POOL_IDENTIFIER"),
    (REQUEST_1, 8, 7, b"\x80", "element 8: slot -2130706433 is negative"),
    (REQUEST_1, 9, 0, b"\x08", "element 9: discriminator 8 where 6, MEASURE_TIMING"),
    (REQUEST_1, 9, 0, b"\x09", "element 9: discriminator 9 where 6, MEASURE_TIMING"),
    (REQUEST_2, 8, 0, b"\5", "element 8: slot -19088744 is negative"),
    (REQUEST_2, 8, 0, b"\6", "element 8: discriminator 6 where 5, POOL_IDENTIFIER"),
    (REQUEST_2, 8, 4, bytes(4), "element 8: token 0 stands for no buffer"),
    (REQUEST_2, 8, 8, b"\1", "element 8: BUFFER_TOKEN has padding"),
    (REQUEST_2, 10, 0, b"\x09", "element 10: discriminator 9 where 8, LOOP_TIMEOUT"),
    (REQUEST_2, 10, 4, b"\1", "element 10: LOOP_TIMEOUT has padding"),
    (REQUEST_2, 10, 23, b"\1", "element 10: LOOP_TIMEOUT has padding"),
    (REQUEST_2, 11, 7, b"\1", "element 11: REQUEST_IDENTIFIER has padding"),
    (REQUEST_2, 11, 8, bytes(8), "element 11: a request's id is not 0"),
    (REQUEST_2, 0, 16, b"\3", "element 9: discriminator 6 where 5, POOL_IDENTIFIER"),
]


@pytest.mark.parametrize(("good", "element", "offset", "data", "why"), REFUSED_REQUESTS)
def test_refused_requests(good, element, offset, data, why):
    """A request that breaks a rule is refused with the element that breaks it, and the rule."""
    with pytest.raises(Malformed, match=why):
        good.direction.decode(patched(good, element, offset, data))


@pytest.mark.parametrize(("version", "size", "end"), [(1, "04", []), (2, "06", NOTHING_2.elements[2:])])
def test_an_omitted_argument_has_no_dimensions(version, size, end):
    """An argument without a value is refused if dimensions follow it, though they are counted and present."""
    packet = elements(
        f"00000000 {size}000000 01000000 00000000 00000000",
        "01000000 01000000 00000000 00000000 00000000 01000000",
        "02000000 02000000",
        "06000000 00000000",
    )
    with pytest.raises(Malformed, match="element 1: an argument without a value"):
        wire.decode_request(b"".join(packet + end), version)


BOTH_RESULTS = [
    (0, 12, b"\xff\xff\xff\xff", "element 0: errorStatus is -1"),
    (0, 12, b"\2", "element 0: 2 output shapes with errorStatus 2"),
    (0, 12, b"\3", "element 5: a time with errorStatus 3"),
    (0, 16, b"\7", "element 0: its counts announce (9|10) "),
    (0, 16, b"\1", "element 4: discriminator 1 where 3, EXECUTION_TIMING"),
    (1, 8, b"\2", "element 1: OPERAND_INFORMATION has padding"),
    (1, 12, b"\x09", "element 1: announces 9 elements; [45] follow"),
    (5, 16, bytes(8), "element 5: timeOnDevice 5 is more than timeInDriver 0"),
]
REFUSED_RESULTS = [
    *[(golden, *row) for row in BOTH_RESULTS for golden in (RESULT_1, RESULT_2)],
    *[(golden, 1, at, bytes(8), "element 1: a time with err") for at in (8, 16) for golden in (FAILED_1, FAILED_2)],
    *[(RESULT_1, 0, 12, bytes([n]), f"element 0: errorStatus is {n}, not one of 0 to 4") for n in range(5, 10)],
    *[(FAILED_1, 0, 12, bytes([n]), f"element 0: errorStatus is {n}, not one of 0 to 4") for n in range(5, 10)],
    *[(RESULT_2, 0, 12, bytes([n]), f"element 0: 2 output shapes with errorStatus {n}") for n in (1, 4, 5, 6, 7, 8)],
    (RESULT_2, 0, 12, b"\x09", "element 0: errorStatus is 9, not one of 0 to 8"),
    (FAILED_2, 0, 12, b"\x09", "element 0: errorStatus is 9, not one of 0 to 8"),
    (RESULT_2, 6, 0, b"\3", "element 6: discriminator 3 where 4, REQUEST_IDENTIFIER"),
    (RESULT_2, 6, 16, b"\1", "element 6: REQUEST_IDENTIFIER has padding"),
]


@pytest.mark.parametrize(("good", "element", "offset", "data", "why"), REFUSED_RESULTS)
def test_refused_results(good, element, offset, data, why):
    """A result that breaks a rule is refused with the element that breaks it, and the rule."""
    with pytest.raises(Malformed, match=why):
        good.direction.decode(patched(good, element, offset, data))


GOOD = RequestArgument(length=4)


@each_version
@pytest.mark.parametrize(
    ("inputs", "outputs", "slots", "why"),
    [
        ([GOOD._replace(offset=2**32)], [], [0], "element 1: INPUT_OPERAND_INFORMATION cannot hold"),
        ([GOOD._replace(length=-1)], [], [0], "element 1: INPUT_OPERAND_INFORMATION cannot hold"),
        ([GOOD._replace(pool=-1)], [], [0], "element 1: INPUT_OPERAND_INFORMATION cannot hold"),
        ([GOOD._replace(length=4.0)], [], [0], "RequestPacket.*4.0.* cannot be encoded"),
        ([GOOD, GOOD._replace(pool=1)], [], [0], "element 2: poolIndex is 1, but the packet names 1 pools"),
        ([], [GOOD._replace(dimensions=(1, 2**32))], [0], "element 3: OUTPUT_OPERAND_DIMENSION_VALUE cannot hold"),
        ([], [GOOD._replace(dimensions=(-1,))], [0], "element 2: OUTPUT_OPERAND_DIMENSION_VALUE cannot hold"),
        ([GOOD._replace(has_no_value=True)], [], [0], "element 1: an argument without a value"),
        ([], [GOOD], [], "element 1: poolIndex is 0, but the packet names 0 pools"),
        ([], [], [0, -1], "element 2: slot -1 is negative"),
        ([], [], [2**31], "element 1: POOL_IDENTIFIER cannot hold"),
    ],
)
def test_requests_that_cannot_be_encoded(inputs, outputs, slots, why, version):
    """What could not be decoded again is not encoded either."""
    with pytest.raises(Malformed, match=why):
        wire.encode_request(RequestPacket(inputs, outputs, slots, measure=False, id=1), version)


@pytest.mark.parametrize(
    ("version", "change", "why"),
    [
        (1, {"slots": (0, Token(1))}, "element 2: wire version 1 has no buffer tokens"),
        (1, {"deadline": 1}, "wire version 1 has no deadline and no loop timeout"),
        (1, {"loop_timeout": 0}, "wire version 1 has no deadline and no loop timeout"),
        (2, {"slots": (Token(0),)}, "element 1: token 0 stands for no buffer"),
        (2, {"slots": (Token(-1),)}, "element 1: BUFFER_TOKEN cannot hold"),
        (2, {"slots": (Token(2**32),)}, "element 1: BUFFER_TOKEN cannot hold"),
        (2, {"loop_timeout": -1}, "RequestPacket.* cannot be encoded"),
        (2, {"loop_timeout": 2**64}, "RequestPacket.* cannot be encoded"),
        (2, {"deadline": 2**64}, "RequestPacket.* cannot be encoded"),
        (2, {"deadline": 0.5}, "RequestPacket.* cannot be encoded"),
        (2, {"id": -1}, "RequestPacket.* cannot be encoded"),
        (2, {"id": 2**64}, "RequestPacket.* cannot be encoded"),
    ],
)
def test_words_of_version_2(version, change, why):
    """Version 1 has no word for them and drops none silently; version 2 has room for what fits its fields."""
    with pytest.raises(Malformed, match=why):
        wire.encode_request(EMPTY._replace(**{"id": 1, **change}), version)


@each_version
@pytest.mark.parametrize(
    ("status", "shapes", "timing", "why"),
    [
        (9, [], NO_TIMING, "element 0: errorStatus is 9"),
        (-1, [], NO_TIMING, "element 0: errorStatus is -1"),
        (ErrorStatus.INVALID_ARGUMENT, [OutputShape()], NO_TIMING, "element 0: 1 output shapes"),
        (ErrorStatus.MISSED_DEADLINE_TRANSIENT, [OutputShape()], NO_TIMING, "element 0: 1 output shapes"),
        (ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT, [], Timing(1, 2), "element 1: a time with errorStatus"),
        (ErrorStatus.NONE, [OutputShape((-1,))], NO_TIMING, "ResultPacket.* cannot be encoded"),
        (
            ErrorStatus.OUTPUT_INSUFFICIENT_SIZE,
            [OutputShape()],
            Timing(1, 2),
            "element 2: a time with errorStatus 3",
        ),
        (ErrorStatus.NONE, [], Timing(3, 2), "element 1: timeOnDevice 3 is more than timeInDriver 2"),
        (ErrorStatus.NONE, [], Timing(None, -1), "ResultPacket.* cannot be encoded"),
        (ErrorStatus.NONE, [], Timing(None, 2**64), "ResultPacket.* cannot be encoded"),
        (ErrorStatus.NONE, [], Timing(None, 2**64 - 1), "us cannot be told from a time"),
    ],
)
def test_results_that_cannot_be_encoded(status, shapes, timing, why, version):
    """What could not be decoded again is not encoded either."""
    with pytest.raises(Malformed, match=why):
        wire.encode_result(ResultPacket(status, shapes, timing), version)


@pytest.mark.parametrize("number", [-1, 2**64, "1"])
def test_ids_that_do_not_fit_a_result(number):
    """As in requests."""
    with pytest.raises(Malformed, match=r"ResultPacket.* cannot be encoded"):
        wire.encode_result(SUCCESS._replace(id=number), 2)


# ---- hostile packets -------------------------------------------------------------------------------------------------


def random_bytes(rng, good, bad):
    return rng.randbytes(rng.choice([rng.randrange(100), DATUM * rng.randrange(1, 8)]))


def damaged(rng, good, bad):
    packet = bytearray(b"".join(good))
    for _ in range(rng.randrange(1, 4)):
        packet[rng.randrange(len(packet))] = rng.choice([0, 1, 2, 127, 128, 255, rng.randrange(256)])
    return bytes(packet)


def shuffled(rng, good, bad):
    return b"".join([good[0], *rng.choices([*good, *bad], k=len(good) - 2), good[-1]])


@pytest.mark.parametrize("make", [random_bytes, damaged, shuffled])
@each_direction
def test_noise(direction, make):
    """Random bytes, damaged packets and shuffled elements are canonical or Malformed; nothing else is ever raised."""
    rng = random.Random(2)
    golden = [one.elements for one in GOLDEN if one.direction == direction]
    for _ in range(1500):
        accepted(direction, make(rng, rng.choice(golden), BAD_ELEMENTS[direction.kind]))


def lie(count, row):
    """A packet of `count` elements whose first is `row`, and whose second would like four billion dimensions."""
    return b"".join(elements(row)) + elements("01000000 00000000 00000000 00000000 ffffffff ffffffff")[0] * (count - 1)


@pytest.mark.parametrize(
    ("decode", "packet"),
    [
        (REQUESTS, lie(1000, "00000000 e8030000 ffffffff 00000000 00000000")),
        (REQUESTS, lie(1000, "00000000 e8030000 00000000 ffffffff 00000000")),
        (REQUESTS, lie(1000, "00000000 e8030000 00000000 00000000 ffffffff")),
        (REQUESTS, lie(1000, "00000000 ffffffff ffffffff ffffffff ffffffff")),
        (REQUESTS, lie(1000, "00000000 e8030000 e4030000 00000000 00000000")),
        (RESULTS, lie(1000, "0000000000000000 e8030000 00000000 ffffffff")),
        (RESULTS, lie(1000, "0000000000000000 e8030000 00000000 e5030000")),
        (RESULTS, lie(4, "0000000000000000 04000000 00000000 01000000")),
    ],
)
@each_version
def test_lying_counts_allocate_nothing(decode, packet, version):
    """A count of four billion in a small packet is refused without memory for it."""
    tracemalloc.start()
    try:
        with pytest.raises(Malformed):
            decode[version].decode(packet)
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()
